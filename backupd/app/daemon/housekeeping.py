"""What the service does once a day for itself: old rows and logs go, what dead runs left at
destinations too, and who paused something is reminded of it."""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timedelta

from backupd.app.alerting.service import forget_old_alerts
from backupd.app.backups.physical import forget_old
from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring
from backupd.app.jobs.jobs import prune
from backupd.app.metacopies.catalog_copies import after_job
from backupd.app.metacopies.copy_check import of_today
from backupd.app.reconcile.missing_tables import look_back
from backupd.app.retention.deletion import sweep_destination
from backupd.app.retention.holds import remind
from backupd.app.schedule.calendar import next_runs
from backupd.model.errors import BackupdError

DAILY = "30 4 * * *"
EVENTS_KEPT = timedelta(days=400)
"""How long events, and how far destinations were behind, stay in the catalog."""


def keep_house(wiring: Wiring) -> None:
    """Do it now. What fails is logged, and tried again tomorrow."""
    try:
        gone = prune(wiring)
        wiring.catalog.thaws.forget()
        wiring.catalog.events.forget(wiring.clock() - EVENTS_KEPT)
        wiring.catalog.lags.forget(wiring.clock() - EVENTS_KEPT)
        remind(wiring)
        forget_old(wiring)
        look_back(wiring)
        forget_old_alerts(wiring)
        say("housekeeping", f"{len(gone)} jobs that ended long ago were forgotten")
    except BackupdError as error:
        say("housekeeping-failed", str(error), level=logging.WARNING)
    after_job(wiring, turn=of_today(wiring.clock()))
    for name in wiring.settings.destinations:
        try:
            destination = wiring.destination(name)
            if destination.is_initialised():
                for held in sweep_destination(wiring, destination):
                    say("housekeeping", f"{name}: {held}")
        except BackupdError as error:
            say("housekeeping-failed", f"destination {name}: {error}", level=logging.WARNING)


class Housekeeper:
    """Keeps house once a day, in a thread of its own, so that the service goes on meanwhile."""

    def __init__(self, now: datetime, zone: str) -> None:
        self._due = _next(now, zone)
        self._thread: threading.Thread | None = None

    def look(self, wiring: Wiring, now: datetime) -> None:
        """Begin, if it is time for it and the last time is over."""
        zone = wiring.settings.configuration.timezone
        if self._due - now > timedelta(days=2):
            self._due = _next(now, zone)  # the clock was ahead when this was computed
        if now < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = _next(now, zone)
        # A daemon thread: the service may end in the middle; whatever it left is swept the next time.
        self._thread = threading.Thread(target=keep_house, args=(wiring,), name="housekeeping", daemon=True)
        self._thread.start()


def _next(now: datetime, zone: str) -> datetime:
    return next(next_runs(DAILY, zone, now, count=1))
