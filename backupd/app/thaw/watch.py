"""The service's look at thaws: now and then, in a thread that ends with the look."""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timedelta

from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring
from backupd.app.thaw.requests import MOST, advance
from backupd.model.errors import BackupdError

_AHEAD = MOST + timedelta(hours=1)
"""A next look that is later than this was computed by a clock that was ahead."""


class ThawWatch:
    """Moves on what waits for an archive. Between the looks there is nothing but rows in the catalog."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def look(self, wiring: Wiring, now: datetime) -> None:
        """Begin to look at those whose time it is, unless the look before is still at it. Raises CatalogError."""
        if self._thread is not None and self._thread.is_alive():
            return
        due = [job.id for job in wiring.catalog.jobs.waiting(now, _AHEAD)]
        if due:
            # A daemon thread: the service may end in the middle; the next look asks before it asks for anything again.
            self._thread = threading.Thread(target=_look_at, args=(wiring, due), name="thaws", daemon=True)
            self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the look that is going on, if there is one."""
        if self._thread is not None:
            self._thread.join(seconds)


def _look_at(wiring: Wiring, job_ids: list[str]) -> None:
    for job_id in job_ids:
        try:
            advance(wiring, job_id)
        except BackupdError as error:
            say("thaw-trouble", str(error), level=logging.WARNING, job=job_id)
