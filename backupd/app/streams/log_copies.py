"""Beside a stream: what it has stored at the required destinations goes on to the others, soon afterwards.

One thread for each of the others, with a catalog of its own: one that is slow or gone holds back nobody.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from backupd.app.binlogs.stream_report import behind_limit
from backupd.app.context.incidents import DESTINATION, Incidents
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.copy_selection import opened, sources, wanted
from backupd.app.copies.log_copies import LogCopies, LogsCopied, copies_of
from backupd.app.copies.replication import pause_after
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.errors import BackupdError, CancelledError
from backupd.model.event import Event, Severity
from backupd.model.text import format_duration, format_time
from storage.contract.destination import Destination

LONGEST = 10.0
"""Seconds between two looks at most, whatever the checkpoint is."""
RULES = timedelta(minutes=10)
"""For so long it is not asked again what the target's rules keep, and where there is something to read."""


class LogFollower(threading.Thread):
    """Of one server to one of the ``others``, until ``stop``."""

    def __init__(self, wiring: Wiring, server: ServerSettings, place: str, stop: threading.Event) -> None:
        super().__init__(name=f"follow {place}", daemon=True)
        self._wiring, self._server, self.place, self._halt = wiring, server, place, stop
        self._failures = 0
        self._trouble = ""
        self._since: datetime | None = None
        self._asked: datetime | None = None
        self._sources: list[Destination] = []
        self._first: Mapping[str, int] = {}
        self._copies: LogCopies | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        while not self._halt.is_set():
            try:
                with open_catalog(self._wiring.settings.catalog, make=False) as catalog:
                    self._follow(catalog)
            except CancelledError:
                return
            except BackupdError as error:  # the catalog; everything else is dealt with where it happens
                self._failed(error, None)
                self._halt.wait(LONGEST)

    def standing(self) -> dict[str, Any]:
        """As a stream's row tells of a destination."""
        with self._lock:
            return {"behind_since": format_time(self._since) if self._since else None, "error": self._trouble}

    def step(self, wiring: Wiring, incidents: Incidents) -> float:
        """One look; seconds until the next one. Raises CatalogError, CancelledError."""
        try:
            done = self._copy(wiring)
        except CancelledError:
            raise
        except BackupdError as error:
            return self._after(incidents, LogsCopied(), error, wiring.clock())
        return self._after(incidents, done, done.failure, wiring.clock())

    # -- inside

    def _follow(self, catalog: Catalog) -> None:
        wiring = Wiring(self._wiring.settings, catalog, self._wiring.clock)
        incidents = Incidents(catalog)
        self._copies, self._asked = None, None
        while not self._halt.is_set():
            self._halt.wait(self.step(wiring, incidents))

    def _copy(self, wiring: Wiring) -> LogsCopied:
        now = wiring.clock()
        if self._copies is None:
            self._copies = copies_of(wiring, self._server.name, opened(wiring, self.place), check=self._check)
        known = {branch.id for branch in wiring.catalog.binlogs.branches(self._server.name)}
        if self._asked is None or not timedelta(0) <= now - self._asked < RULES or not known <= self._first.keys():
            self._sources = sources(wiring, self._server.name, self.place)
            names = [source.name for source in self._sources]
            kept = wanted(wiring, self._server.name, self.place, names).first_logs
            self._first = dict.fromkeys(known, 0) | kept
            self._asked = now
            self._copies.forget()
        return self._copies.step(self._sources, self._first)

    def _check(self) -> None:
        if self._halt.is_set():
            raise CancelledError("the stream ends")

    def _after(self, incidents: Incidents, done: LogsCopied, error: BackupdError | None, now: datetime) -> float:
        told = str(error) if error is not None else "; ".join(done.troubles)
        if not told:
            self._went_well(incidents, now)
            leg = self._server.policy.binlog
            return min(LONGEST, leg.checkpoint.total_seconds() if leg is not None else LONGEST)
        self._failed(error, told)
        with self._lock:
            self._since = done.since or self._since or now
            since = self._since
        if now - since >= behind_limit(self._server.policy):
            name, late = self._server.name, format_duration((now - since).total_seconds())
            incidents.broken(
                DESTINATION,
                Event(
                    now,
                    DESTINATION.broken,
                    Severity.ERROR,
                    server=name,
                    subject=self.place,
                    message=f"{self.place} lacks binary logs of {name} since {late}: they are at "
                    f"{', '.join(self._server.required)} only",
                    detail=told,
                    hint="they are copied when it takes them; it is tried again with growing pauses",
                ),
            )
        self._asked = None
        return min(LONGEST * self._failures, pause_after(self._failures).total_seconds(), 600.0)

    def _failed(self, error: BackupdError | None, told: str | None) -> None:
        self._failures += 1
        text = told or str(error)
        if text != self._trouble:
            say("stream-trouble", f"{self.place}: {text}", level=logging.WARNING, server=self._server.name)
        with self._lock:
            self._trouble = text

    def _went_well(self, incidents: Incidents, now: datetime) -> None:
        if self._trouble:
            say("stream-trouble-over", f"{self.place}: it goes on", server=self._server.name)
        self._failures = 0
        with self._lock:
            self._trouble, self._since = "", None
        incidents.mended(
            DESTINATION,
            Event(
                now,
                DESTINATION.mended,
                Severity.INFO,
                server=self._server.name,
                subject=self.place,
                message=f"{self.place} has all binary logs of {self._server.name} again",
            ),
        )
