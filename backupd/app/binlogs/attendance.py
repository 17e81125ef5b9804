"""Is there a service that keeps a stream's process: starts it again, sends its alerts?

A process without one goes on for as long as it can: commits that are not copied cannot be had later, alerts can. What
it finds is in its log and in the catalog, and the next service sends it; that no service runs is seen from outside
(systemd, `alerts.heartbeat`, `/readyz`). Only where another service has taken over the catalog, on another host or with
another spool, it ends: that one streams the server itself.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime

from backupd.app.context.logging_setup import say
from backupd.app.context.settings import Settings
from backupd.app.runtime.child_process import CatalogWriter
from backupd.app.runtime.service_manager import is_served
from backupd.model.errors import CatalogError, RefusedError
from backupd.model.text import Clock, format_time

EVERY = 10.0
"""Seconds between two looks."""
NOTICED = 60.0
"""Seconds without a service that are reported: a restart of it takes less."""


class Attendance:
    """Of the process that streams ``server``, started by a service where it is ``kept``. ``alone``: was there no
    service at the last look? ``trouble``: what is to be known of that."""

    def __init__(self, settings: Settings, server: str, writer: CatalogWriter, clock: Clock, *, kept: bool) -> None:
        self.alone = False
        self.trouble = ""
        self._spool, self._server, self._writer, self._clock, self._kept = settings.spool, server, writer, clock, kept
        self._due = time.monotonic() + EVERY
        self._since: tuple[float, datetime] | None = None

    def look(self) -> None:
        """Once every few seconds. Raises RefusedError where another service uses the catalog."""
        now = time.monotonic()
        if not self._kept or now < self._due:
            return
        self._due = now + EVERY
        self.alone = not is_served(self._spool)
        if not self.alone:
            if self.trouble:
                say("stream-kept", "a service runs again", server=self._server)
            self._since, self.trouble = None, ""
            return
        self._since = self._since or (now, self._clock())
        if now - self._since[0] < NOTICED:
            return
        if not self.trouble:
            since = format_time(self._since[1])
            self.trouble = (
                f"no backupd service runs here since {since}; the stream goes on, but nobody restarts it or sends its "
                "alerts"
            )
            say("stream-alone", f"{self.trouble}; start the service", level=logging.WARNING, server=self._server)
        if self._is_taken() and not is_served(self._spool):  # it may be one of here that began just now
            raise RefusedError(
                f"the stream of {self._server} ends here: another backupd service uses the catalog, and streams the "
                "server itself",
                hint="to stream here again, stop that service and start the one of this host",
            )

    def _is_taken(self) -> bool:
        try:
            return self._writer.ask(lambda catalog: catalog.watch.is_held()) is True
        except CatalogError:
            return False
