"""Places that fill up, told before they are full: when it is foreseen, again with growing pauses while nothing is done
about it, and when there is room again.

What was told stands in the catalog's events, so a restart neither repeats nor forgets it.
"""

from __future__ import annotations

import logging
import threading
import traceback
from datetime import datetime, timedelta

from backupd.app.forecast import SOON, Forecast, forecast
from backupd.app.incidents import Pair
from backupd.app.logs import say
from backupd.app.wiring import Wiring
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Severity

FILLING = Pair("destination-filling", "destination-has-room")
EVERY = timedelta(hours=1)
PAUSE = timedelta(days=1)
"""Between the first two events; each next pause is twice as long."""
LONGEST = timedelta(days=8)
URGENT = 7
"""Days: a place that may be full within them is an error, and told at once even in a pause."""
_CALM = 5
"""Days beyond SOON that must be left for it to count as over: a forecast moves a little every day."""
_REMEMBERED = 500


class FillingWatch:
    """Looks at every destination now and then, in a thread of its own: a place may take its time to answer."""

    def __init__(self) -> None:
        self._due: datetime | None = None
        self._thread: threading.Thread | None = None
        self._trouble = ""

    def look(self, wiring: Wiring, now: datetime) -> None:
        """Begin, if it is time for it and the last time is over."""
        soon = self._due is not None and timedelta(0) < self._due - now <= EVERY
        if soon or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = now + EVERY
        # A daemon thread: the service may end in the middle, and the next one looks again.
        self._thread = threading.Thread(target=self.step, args=(wiring, now), name="filling", daemon=True)
        self._thread.start()

    def step(self, wiring: Wiring, now: datetime) -> None:
        """One look at every destination. What fails is logged, once, and tried again."""
        troubles = []
        for name in wiring.settings.destinations:
            try:
                found = forecast(wiring, name)
                if found is not None:
                    tell(wiring, found, now)
            except BackupdError as error:
                troubles.append(f"{name}: {error}")
            except Exception as error:  # noqa: BLE001  one place's rows must not be the others' trouble; all is told
                troubles.append(f"{name}: {''.join(traceback.format_exception(error))}")
        trouble = "\n".join(troubles)
        if trouble and trouble != self._trouble:
            say("forecast-trouble", trouble, level=logging.WARNING)
        self._trouble = trouble


def tell(wiring: Wiring, found: Forecast, now: datetime) -> None:
    """Record what is to be said about ``found``, if anything is. Raises CatalogError."""
    told = _told(wiring, found.destination)
    earliest = found.filling.earliest
    if not found.is_soon:
        if told and (earliest is None or earliest > SOON + _CALM):
            wiring.catalog.events.add(Event(now, FILLING.mended, Severity.INFO,
                                            f"destination {found.destination} has room again: {found.text}",
                                            subject=found.destination))
        return
    severity = Severity.ERROR if earliest is not None and earliest <= URGENT else Severity.WARNING
    worse = severity is Severity.ERROR and all(event.severity is not Severity.ERROR for event in told)
    if told and not worse and now - told[0].at < min(PAUSE * 2 ** (len(told) - 1), LONGEST):
        return
    wiring.catalog.events.add(Event(
        now, FILLING.broken, severity, f"destination {found.destination} fills up: {found.text}",
        subject=found.destination,
        hint="give it more room, or keep less: `backupd policy explain` previews other rules"))


def _told(wiring: Wiring, destination: str) -> list[Event]:
    """What was said since it was well the last time, newest first."""
    events = wiring.catalog.events
    over = events.last("", [FILLING.mended], destination)
    since = over.number if over is not None else 0
    return [event for event in events.list(kind=FILLING.broken, after=since, limit=_REMEMBERED)
            if event.subject == destination]
