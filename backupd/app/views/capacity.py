"""How a repository grows, and on which day it is full.

**Input**: when each full backup of a server was taken and how many bytes its source had (both from the catalog), what
is stored of it now, what is added each day, whether its destination has rules, and the free bytes.

**Formula**: data grows by the same factor each day, ``size(t) = e^(a + b t)``; ``a`` and ``b`` are the least squares
line through the logarithms of the sizes. What a destination with rules holds grows with the data,
``stored x (e^(b t) - 1)`` more after ``t`` days; one that keeps everything grows by what each day adds,
``added x (e^(b t) - 1) / b``.

**Error bound**: the prediction interval of that line which holds 19 times in 20, for growth that is geometric with
independent errors. It widens with the distance from the data. A change of behaviour (a new table, a purge, a holiday)
is not in it.

When a destination will be full, by what the catalog remembers; an event before it is, repeated with growing pauses
while nothing is done about it, and one when there is room again.

What was said is in the catalog's events, so a restart neither repeats nor forgets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from backupd.alerts.conditions import Key
from backupd.alerts.rules import FILLING
from backupd.app.context.incidents import Incidents
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.periodic import PeriodicCheck
from backupd.app.views.growth import Growth, exponential
from backupd.app.views.standings import shares_of_all
from backupd.backup.finding import Finding, from_error, warning
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Severity
from backupd.model.text import format_size
from storage.config import S3Config
from storage.destination import Space

HORIZON = 365
"""Days that are looked ahead."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One server's part of a destination: bytes ``stored`` now and ``added`` each day; ``expires``: it has rules.
    Without a ``growth`` its data is taken to stay as it is."""

    stored: int
    added: float
    expires: bool
    growth: Growth | None

    def more_after(self, days: float, *, rate: float | None = None) -> float:
        """Bytes that are there after ``days`` beyond those of now. ``rate`` replaces that of the growth."""
        speed = rate if rate is not None else self.growth.rate if self.growth else 0.0
        swollen = exponential(speed * days) - 1
        if self.expires:
            return max(0.0, self.stored * swollen)
        return self.added * (swollen / speed if abs(speed) > 1e-9 else days)

    def most_after(self, days: float) -> float:
        """The same at the upper error bound."""
        if self.growth is None:
            return self.more_after(days)
        upper = math.log(max(self.growth.bounds(days)[1], 1) / self.growth.size_now) / days
        return self.more_after(days, rate=upper)


@dataclass(frozen=True, slots=True)
class Filling:
    """Days from now until there is no room left; ``earliest`` at the upper error bound. None: not within a year."""

    day: int | None
    earliest: int | None


def days_until_full(tenants: Sequence[Tenant], free: int) -> Filling:
    """When the growth of all ``tenants`` of a destination has used up its ``free`` bytes."""
    return Filling(
        _first(lambda day: sum(tenant.more_after(day) for tenant in tenants) >= free),
        _first(lambda day: sum(tenant.most_after(day) for tenant in tenants) >= free),
    )


def _first(full: Callable[[int], bool]) -> int | None:
    return next((day for day in range(1, HORIZON + 1) if full(day)), None)


SOON = 30
"""Days: a repository that may be full within them is worth a warning."""
NEARLY = 0.05
"""A destination with less than this part of it free is nearly full, whatever its growth says."""
_AHEAD = (7, 14, 30)


@dataclass(frozen=True, slots=True)
class ServerGrowth:
    """A server's part: the growth of its data, None where too little is known."""

    server: str
    growth: Growth | None
    stored: int
    added: float

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes; ``bytes_source_after``: by number of days."""
        growth = self.growth
        return {
            "server": self.server,
            "bytes_stored": self.stored,
            "bytes_added_per_day": round(self.added),
            "factor_per_day": growth.factor if growth else None,
            "samples": growth.samples if growth else 0,
            "days": growth.days if growth else 0,
            "bytes_source_after": {str(day): round(growth.size_after(day)) for day in _AHEAD} if growth else {},
        }


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one destination, counted from ``at``. ``free`` bytes, None where a destination knows no limit; ``ahead``:
    after how many days how many bytes more are stored there; ``total``: all its bytes."""

    destination: str
    at: datetime
    free: int | None
    servers: tuple[ServerGrowth, ...]
    filling: Filling
    ahead: tuple[tuple[int, int], ...] = ()
    total: int | None = None

    @property
    def stored(self) -> int:
        """Bytes that are stored there now, of all servers."""
        return sum(one.stored for one in self.servers)

    @property
    def is_soon(self) -> bool:
        """May it be full within SOON days?"""
        return self.filling.earliest is not None and self.filling.earliest <= SOON

    def has_less_than(self, part: float) -> bool:
        """Is less than that part of all its room free?"""
        return self.free is not None and bool(self.total) and self.free < part * (self.total or 0)

    @property
    def text(self) -> str:
        """One sentence."""
        growing = [
            f"{one.server} x{one.growth.factor:.3g} a day, seen in {one.growth.samples} full backups over "
            f"{one.growth.days:.0f} days"
            for one in self.servers
            if one.growth is not None
        ]
        basis = f" ({'; '.join(growing)})" if growing else ""
        if self.free is None:
            ahead = [f"{format_size(self.stored + more)} after {days} days" for days, more in self.ahead]
            return f"{format_size(self.stored)} are stored, by its growth {', '.join(ahead)}; no limit is known{basis}"
        day, earliest = self.filling.day, self.filling.earliest
        if day is None and earliest is None:
            return f"{format_size(self.free)} are free, enough for a year of growth at the recent rate{basis}"
        sooner = "" if earliest in (None, day) else f", at the earliest on {self._day(earliest)}"
        full = f"the repository is full on {self._day(day)}" if day else "the repository may be full within a year"
        return f"{full}{sooner}: {format_size(self.free)} are free{basis}"

    def _day(self, number: int | None) -> str:
        return f"day {number} ({self.at + timedelta(days=number or 0):%Y-%m-%d})"

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes, ``*_day`` in days from now; ``bytes_stored_after``: by number of days."""
        return {
            "destination": self.destination,
            "bytes_free": self.free,
            "full_on_day": self.filling.day,
            "earliest_day": self.filling.earliest,
            "bytes_stored": self.stored,
            "bytes_stored_after": {str(days): self.stored + more for days, more in self.ahead},
            "servers": [one.as_json() for one in self.servers],
            "text": self.text,
        }


def forecast(wiring: Wiring, destination: str) -> Forecast | None:
    """Of a configured destination; None where nothing is stored, or that is not known yet. Raises
    DestinationError."""
    now = wiring.clock()
    parts = [
        ServerGrowth(server, one.growth, one.stored, one.added)
        for server, found in shares_of_all(wiring, now)
        for one in found
        if one.destination == destination
    ]
    if not parts:
        return None
    tenants = [
        Tenant(part.stored, part.added, _has_rules(wiring, part.server, destination), part.growth) for part in parts
    ]
    space = wiring.destination(destination).space() or _granted(wiring, destination, sum(one.stored for one in parts))
    filling = Filling(None, None) if space is None else days_until_full(tenants, space.free)
    ahead = tuple((days, round(sum(tenant.more_after(days) for tenant in tenants))) for days in _AHEAD)
    return Forecast(
        destination,
        now,
        None if space is None else space.free,
        tuple(parts),
        filling,
        ahead,
        None if space is None else space.total,
    )


def _granted(wiring: Wiring, destination: str, stored: int) -> Space | None:
    """The room that the configuration says a bucket has."""
    config = wiring.settings.destinations[destination]
    if not isinstance(config, S3Config) or config.capacity is None:
        return None
    return Space(config.capacity, max(0, config.capacity - stored))


def room(wiring: Wiring, destination: str) -> list[Finding]:
    """For `check`: a warning when the destination's repository may be full soon."""
    try:
        found = forecast(wiring, destination)
    except BackupdError as error:
        return [from_error(f"destination {destination}", error)]
    if found is None or not found.is_soon:
        return []
    return [
        warning(
            f"destination {destination}",
            f"by its growth {found.text}",
            "add space, or keep fewer backups: `backupd policy explain` previews other rules",
        )
    ]


def _has_rules(wiring: Wiring, server: str, destination: str) -> bool:
    if server not in wiring.settings.servers:
        return False
    found = wiring.settings.server(server)
    return found.usable and destination in found.policy.retention


EVERY = timedelta(hours=1)
PAUSE = timedelta(days=1)
"""Between the first two events; each next pause is twice as long."""
LONGEST = timedelta(days=8)
URGENT = 7
"""Days: a destination that may be full within them is an error, and reported at once even in a pause."""
_CALM = 5
"""Days beyond SOON that must be left for it to count as over: a forecast moves a little every day."""
_ROOMY = 0.07
"""The part that must be free again, where less than NEARLY was."""
_REMEMBERED = 500


class FillingWatch(PeriodicCheck):
    """Looks at every destination: one may take its time to answer."""

    def __init__(self) -> None:
        super().__init__("forecast", EVERY)

    def _names(self, wiring: Wiring) -> Iterable[str]:
        return wiring.settings.destinations

    def _look(self, wiring: Wiring, name: str, now: datetime) -> None:
        found = forecast(wiring, name)
        if found is not None:
            report(wiring, found, now)


def report(wiring: Wiring, found: Forecast, now: datetime) -> None:
    """Record what is to be said about ``found``, if anything is. Raises CatalogError."""
    reported = _reported(wiring, found.destination)
    earliest = found.filling.earliest
    nearly = found.has_less_than(NEARLY)
    if not found.is_soon and not nearly:
        if reported and (earliest is None or earliest > SOON + _CALM) and not found.has_less_than(_ROOMY):
            well = f"destination {found.destination} has room again: {found.text}"
            Incidents(wiring.catalog).settle(now, looked={Key(FILLING, subject=found.destination): well})
        return
    urgent = nearly or (earliest is not None and earliest <= URGENT)
    severity = Severity.ERROR if urgent else Severity.WARNING
    worse = severity is Severity.ERROR and all(event.severity is not Severity.ERROR for event in reported)
    if reported and not worse and now - reported[0].at < min(PAUSE * 2 ** (len(reported) - 1), LONGEST):
        return
    wiring.catalog.events.add(
        Event(
            now,
            FILLING.broken,
            severity,
            _sentence(found) if nearly else f"destination {found.destination} fills up: {found.text}",
            subject=found.destination,
            hint="add space, or keep fewer backups: `backupd policy explain` previews other rules",
        )
    )


def _sentence(found: Forecast) -> str:
    return (
        f"destination {found.destination} is nearly full: {format_size(found.free or 0)} of "
        f"{format_size(found.total or 0)} are free"
    )


def _reported(wiring: Wiring, destination: str) -> list[Event]:
    """What was said since it was well the last time, newest first."""
    events = wiring.catalog.events
    over = events.last("", [FILLING.mended, FILLING.unwatched], destination)
    since = over.number if over is not None else 0
    return [
        event
        for event in events.list(kind=FILLING.broken, after=since, limit=_REMEMBERED)
        if event.subject == destination
    ]
