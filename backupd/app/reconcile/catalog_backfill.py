"""What the catalog forgot of one server's binary logs, brought back when its stream begins.

A stream tells the catalog what it stores, once. A catalog that was lost, or restored from an older copy, hears of that
here: on a thread with a connection of its own, so that neither the copying nor the archive ever waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import timedelta

from backupd.app.context.logging_setup import say
from backupd.app.reconcile.log_records import YOUNG, Reconciliation, Settled
from backupd.binlog.spool_files import Spool
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Severity
from backupd.model.text import Clock
from storage.contract.destination import Destination

_TELL = 0.2
"""Seconds between two looks whether the archive has told its branches."""
_AGAIN = timedelta(seconds=30)
"""After something failed."""


class _OverError(Exception):
    """The process ends."""


class Recollection:
    """``destinations`` by name. ``stop`` ends it between two batches."""

    def __init__(
        self,
        server: str,
        url: str,
        destinations: Mapping[str, Destination],
        spool: Spool,
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self._server, self._url, self._destinations = server, url, destinations
        self._spool, self._stop, self._clock = spool, stop, clock
        self._complaints: set[str] = set()
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recollection", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> None:
        """After ``stop`` was set."""
        self._thread.join(timeout)

    @property
    def was_tried(self) -> bool:
        """Was each destination compared once, or found out of reach?"""
        return self._tried.is_set()

    def _run(self) -> None:
        left = dict(self._destinations)
        while left and not self._stop.is_set():
            wait = _AGAIN
            try:
                with open_catalog(self._url, make=False) as catalog:
                    self._await_branches(catalog)
                    if self._round(catalog, left):
                        wait = YOUNG
            except BackupdError as error:
                self._complain(str(error))
            except _OverError:
                break
            self._tried.set()
            if left:
                self._stop.wait(wait.total_seconds())
        self._tried.set()

    def _round(self, catalog: Catalog, left: dict[str, Destination]) -> bool:
        """Takes those out of ``left`` that are through. Are the others only waiting for rows to be old enough?"""
        failed = False
        for name, destination in list(left.items()):
            try:
                found = Reconciliation(catalog, destination, self._server, self._clock, self._check).settle(
                    at_work=True
                )
            except BackupdError as error:
                failed = True
                self._complain(f"{name}: {error}")
                continue
            self._tell(catalog, name, found)
            if not found.young:
                del left[name]
        return not failed

    def _await_branches(self, catalog: Catalog) -> None:
        """The archive tells those in the spool by itself, and with them the event."""
        while {branch.id for branch in self._spool.branches()} - {
            branch.id for branch in catalog.binlogs.branches(self._server)
        }:
            self._check()
            self._stop.wait(_TELL)

    def _check(self) -> None:
        if self._stop.is_set():
            raise _OverError

    def _complain(self, why: str) -> None:
        """Once."""
        if why not in self._complaints:
            self._complaints.add(why)
            say(
                "catalog-not-compared",
                f"what the catalog knows of the archive could not be compared: {why}",
                level=logging.WARNING,
                server=self._server,
            )

    def _tell(self, catalog: Catalog, destination: str, found: Settled) -> None:
        if found.is_nothing:
            return
        forgotten = found.replaced + len(found.gone)
        say(
            "catalog-compared",
            f"{destination}: the catalog has learned of {found.added} segments and "
            f"{found.branches} branches that are there, and forgotten {forgotten} that are not",
            server=self._server,
        )
        if found.gone:
            catalog.events.add(
                Event(
                    self._clock(),
                    "binlog-missing",
                    Severity.WARNING,
                    f"{len(found.gone)} archived binary logs of {self._server} are not at destination "
                    f"{destination} any "
                    "more, and the catalog has forgotten them there",
                    server=self._server,
                    subject=destination,
                    detail="\n".join(
                        f"{key.branch}: file {key.number}, bytes {key.start} to {key.end}" for key in found.gone[:20]
                    ),
                    hint=f"`backupd timeline {self._server}` shows what is recoverable. Nothing is wrong where they "
                    "had "
                    "expired and the catalog comes from an older copy",
                )
            )
