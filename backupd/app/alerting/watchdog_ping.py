"""Pings a watcher elsewhere while the service does its rounds: a service that is dead, stuck or without its catalog
sends no mail, and this way somebody hears of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from backupd.alerts.channels import DeliveryError
from backupd.alerts.heartbeat import ping, read_url
from backupd.app.context.incidents import Incidents, Pair
from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.periodic import GuardedLoop
from backupd.model.event import Event, Severity

HEARTBEAT = Pair("heartbeat-failed", "heartbeat-sent")
STALE = 120.0
"""Seconds after which a service that has ended no round counts as stuck."""
FAILURES = 3
"""So many pings in a row in vain are told."""
_IDLE = 5.0


class Heartbeat:
    """``alive`` gives the monotonic time of the service's last good round."""

    def __init__(self, wiring: Wiring, alive: Callable[[], float]) -> None:
        self._wiring, self._alive = wiring, alive
        self._incidents = Incidents(wiring.catalog)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="heartbeat", daemon=True)
        self._guarded = GuardedLoop("heartbeat-trouble")
        self._failures = 0
        self._trouble = ""

    def start(self) -> None:
        """Begin to ping."""
        self._thread.start()

    def reload(self, wiring: Wiring) -> None:
        """Go by these settings from the next ping on."""
        self._wiring = wiring

    def stop(self, seconds: float) -> None:
        """End; a ping that is under way gets at most so many ``seconds``."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _loop(self) -> None:
        while not self._ending.is_set():
            settings = self._wiring.settings.alerts.heartbeat
            self._guarded(self.step)
            self._ending.wait(settings.every.total_seconds() if settings is not None else _IDLE)

    def step(self) -> None:
        """One ping, if there is one to send. Raises CatalogError."""
        settings = self._wiring.settings.alerts.heartbeat
        if settings is None or time.monotonic() - self._alive() > STALE:
            return
        try:
            ping(read_url(settings.url_file))
        except DeliveryError as error:
            self._failed(error)
            return
        self._failures, self._trouble = 0, ""
        self._incidents.mended(
            HEARTBEAT,
            HEARTBEAT.over(self._wiring.clock(), "the heartbeat's watcher answers again", subject="heartbeat"),
        )

    def _failed(self, error: DeliveryError) -> None:
        self._failures += 1
        if self._trouble != error.message:
            say(HEARTBEAT.broken, str(error), level=logging.WARNING)
        self._trouble = error.message
        if self._failures >= FAILURES:
            self._incidents.broken(
                HEARTBEAT,
                Event(
                    self._wiring.clock(),
                    HEARTBEAT.broken,
                    Severity.WARNING,
                    subject="heartbeat",
                    message=f"{error.message}, {self._failures} times in a row",
                    detail=error.detail,
                    hint=error.hint,
                ),
            )
