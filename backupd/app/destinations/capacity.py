"""Places that fill up, told before they are full: when it is foreseen, again with growing pauses while nothing is done
about it, and when there is room again.

What was told stands in the catalog's events, so a restart neither repeats nor forgets it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from backupd.app.context.incidents import Pair
from backupd.app.context.wiring import Wiring
from backupd.app.destinations.forecast import NEARLY, SOON, Forecast, forecast
from backupd.app.runtime.periodic import Lookout
from backupd.model.event import Event, Severity
from backupd.model.text import format_size

FILLING = Pair("destination-filling", "destination-has-room")
EVERY = timedelta(hours=1)
PAUSE = timedelta(days=1)
"""Between the first two events; each next pause is twice as long."""
LONGEST = timedelta(days=8)
URGENT = 7
"""Days: a place that may be full within them is an error, and told at once even in a pause."""
_CALM = 5
"""Days beyond SOON that must be left for it to count as over: a forecast moves a little every day."""
_ROOMY = 0.07
"""The part that must be free again, where less than NEARLY was."""
_REMEMBERED = 500


class FillingWatch(Lookout):
    """Looks at every destination: a place may take its time to answer."""

    def __init__(self) -> None:
        super().__init__("forecast", EVERY)

    def _names(self, wiring: Wiring) -> Iterable[str]:
        return wiring.settings.destinations

    def _look(self, wiring: Wiring, name: str, now: datetime) -> None:
        found = forecast(wiring, name)
        if found is not None:
            tell(wiring, found, now)


def tell(wiring: Wiring, found: Forecast, now: datetime) -> None:
    """Record what is to be said about ``found``, if anything is. Raises CatalogError."""
    told = _told(wiring, found.destination)
    earliest = found.filling.earliest
    nearly = found.has_less_than(NEARLY)
    if not found.is_soon and not nearly:
        if told and (earliest is None or earliest > SOON + _CALM) and not found.has_less_than(_ROOMY):
            wiring.catalog.events.add(
                Event(
                    now,
                    FILLING.mended,
                    Severity.INFO,
                    f"destination {found.destination} has room again: {found.text}",
                    subject=found.destination,
                )
            )
        return
    urgent = nearly or (earliest is not None and earliest <= URGENT)
    severity = Severity.ERROR if urgent else Severity.WARNING
    worse = severity is Severity.ERROR and all(event.severity is not Severity.ERROR for event in told)
    if told and not worse and now - told[0].at < min(PAUSE * 2 ** (len(told) - 1), LONGEST):
        return
    wiring.catalog.events.add(
        Event(
            now,
            FILLING.broken,
            severity,
            _sentence(found) if nearly else f"destination {found.destination} fills up: {found.text}",
            subject=found.destination,
            hint="give it more room, or keep less: `backupd policy explain` previews other rules",
        )
    )


def _sentence(found: Forecast) -> str:
    return (
        f"destination {found.destination} is nearly full: {format_size(found.free or 0)} of "
        f"{format_size(found.total or 0)} are free"
    )


def _told(wiring: Wiring, destination: str) -> list[Event]:
    """What was said since it was well the last time, newest first."""
    events = wiring.catalog.events
    over = events.last("", [FILLING.mended, FILLING.unwatched], destination)
    since = over.number if over is not None else 0
    return [
        event
        for event in events.list(kind=FILLING.broken, after=since, limit=_REMEMBERED)
        if event.subject == destination
    ]
