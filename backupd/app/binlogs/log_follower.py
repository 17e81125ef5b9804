"""Another destination follows the required ones: what those have of a server's binary log is copied to it, in a thread
of the stream's process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from backupd.alerts.conditions import Key
from backupd.alerts.rules import DESTINATION
from backupd.app.binlogs.stream_report import behind_limit
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.log_copies import LogCopies, LogsCopied, copies_of
from backupd.app.copies.missing_copies import opened, sources, wanted
from backupd.app.copies.replication import pause_after
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.errors import BackupdError, CancelledError
from backupd.model.event import Severity
from backupd.model.text import format_duration, format_time
from storage.destination import Destination

LONGEST = 10.0
"""Seconds between two looks at most, whatever the checkpoint is."""
RULES = timedelta(minutes=10)
"""For so long it is not asked again what the target's rules keep, and where there is something to read."""


class LogFollower(threading.Thread):
    """Copies what the required destinations have of one server's binary log to ``destination``, one of the others,
    until ``stop``. It opens the catalog itself: a destination that is slow or gone delays no other."""

    def __init__(self, wiring: Wiring, server: ServerSettings, destination: str, stop: threading.Event) -> None:
        super().__init__(name=f"follow {destination}", daemon=True)
        self._wiring, self._server, self.destination, self._halt = wiring, server, destination, stop
        self._failures = 0
        self._trouble = ""
        self._since: datetime | None = None
        self._asked: datetime | None = None
        self._sources: list[Destination] = []
        self._first: Mapping[str, int] = {}
        self._copies: LogCopies | None = None
        self._lacking = Key(DESTINATION, server.name, destination)
        self._lock = threading.Lock()

    def run(self) -> None:
        """Copy until the stream ends; what fails is reported, and tried again with growing pauses."""
        while not self._halt.is_set():
            try:
                with open_catalog(self._wiring.settings.catalog, make=False) as catalog:
                    self._follow(catalog)
            except CancelledError:
                return
            except BackupdError as error:  # the catalog; everything else is dealt with where it happens
                self._failed(str(error))
                self._halt.wait(LONGEST)

    def standing(self) -> dict[str, Any]:
        """As a stream's row reports a destination."""
        with self._lock:
            return {"behind_since": format_time(self._since) if self._since else None, "error": self._trouble}

    def step(self, wiring: Wiring) -> float:
        """One look; seconds until the next one. Raises CatalogError, CancelledError."""
        try:
            done = self._copy(wiring)
        except CancelledError:
            raise
        except BackupdError as error:
            return self._after(wiring, LogsCopied(), error)
        return self._after(wiring, done, done.failure)

    # -- inside

    def _follow(self, catalog: Catalog) -> None:
        wiring = Wiring(self._wiring.settings, catalog, self._wiring.clock)
        self._copies, self._asked = None, None
        while not self._halt.is_set():
            self._halt.wait(self.step(wiring))

    def _copy(self, wiring: Wiring) -> LogsCopied:
        now = wiring.clock()
        if self._copies is None:
            self._copies = copies_of(wiring, self._server.name, opened(wiring, self.destination), check=self._check)
        known = {branch.id for branch in wiring.catalog.binlogs.branches(self._server.name)}
        if self._asked is None or not timedelta(0) <= now - self._asked < RULES or not known <= self._first.keys():
            self._sources = sources(wiring, self._server.name, self.destination)
            names = [source.name for source in self._sources]
            kept = wanted(wiring, self._server.name, self.destination, names).first_logs
            self._first = dict.fromkeys(known, 0) | kept
            self._asked = now
            self._copies.forget()
        return self._copies.step(self._sources, self._first)

    def _check(self) -> None:
        if self._halt.is_set():
            raise CancelledError("the stream ends")

    def _after(self, wiring: Wiring, done: LogsCopied, error: BackupdError | None) -> float:
        now = wiring.clock()
        reason = str(error) if error is not None else "; ".join(done.troubles)
        if not reason:
            self._went_well(wiring)
            policy = self._server.policy.binlog
            return min(LONGEST, policy.checkpoint.total_seconds() if policy is not None else LONGEST)
        self._failed(reason)
        with self._lock:
            self._since = done.since or self._since or now
            since = self._since
        if now - since >= behind_limit(self._server.policy):
            name, late = self._server.name, format_duration((now - since).total_seconds())
            wiring.alert(
                self._lacking,
                Severity.ERROR,
                f"{self.destination} lacks binary logs of {name} since {late}: they are at "
                f"{', '.join(self._server.required)} only",
                detail=reason,
                hint="they are copied when it accepts them; backupd retries with increasing intervals",
            )
        self._asked = None
        return min(LONGEST * self._failures, pause_after(self._failures).total_seconds(), 600.0)

    def _failed(self, text: str) -> None:
        self._failures += 1
        if text != self._trouble:
            say("stream-trouble", f"{self.destination}: {text}", level=logging.WARNING, server=self._server.name)
        with self._lock:
            self._trouble = text

    def _went_well(self, wiring: Wiring) -> None:
        if self._trouble:
            say("stream-trouble-over", f"{self.destination}: it continues", server=self._server.name)
        self._failures = 0
        with self._lock:
            self._trouble, self._since = "", None
        well = f"{self.destination} has all binary logs of {self._server.name} again"
        wiring.settle(looked={self._lacking: well})
