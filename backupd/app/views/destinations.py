"""Destinations at a glance, and the incident when one does not answer or is not there any more.

They are looked at in the background: a caller gets what was seen last, and never waits for a destination that does not
answer.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import REACH
from backupd.app.context.destination_identity import note_seen
from backupd.app.context.wiring import Wiring, gathered
from backupd.app.runtime.periodic import PeriodicCheck
from backupd.app.views.capacity import EVERY as FORECAST_EVERY
from backupd.app.views.capacity import NEARLY, URGENT, Forecast, forecast
from backupd.app.views.server_status import Reason, Status
from backupd.catalog.destinations import FAILING
from backupd.catalog.overview import Stock
from backupd.catalog.session import Catalog
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.errors import DestinationError
from backupd.model.event import Severity
from backupd.model.text import format_duration, format_size
from policies.configuration import DestinationSettings, FilesystemDestination
from storage.destination import Space

EVERY = timedelta(minutes=1)
HANGS = timedelta(minutes=3)
"""A look that has not ended by then: the destination does not answer."""
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Shortfall(Document):
    """Backups that belong at a destination and are not there yet, their bytes, how long the oldest waits, and why."""

    backups: int
    bytes: int
    seconds: timedelta | None = field(metadata=json_key(digits=3))
    error: str


@dataclass(frozen=True, slots=True)
class DestinationView(Document):
    """One destination."""

    name: str
    type: str
    """``filesystem``, ``s3`` or ``sftp``."""
    off_site: bool
    status: Status
    reasons: tuple[Reason, ...] = ()
    reachable: bool | None = None
    """Null while nobody has looked."""
    initialised: bool | None = None
    """It has the marker of this installation."""
    trouble: str = ""
    """Why it cannot be used."""
    hangs: bool = field(default=False, metadata=HIDDEN)
    """The look that is under way has gone on for too long."""
    checked_at: datetime | None = None
    free: int | None = field(default=None, metadata=json_key("bytes_free"))
    """Null where the destination knows no limit."""
    total: int | None = field(default=None, metadata=json_key("bytes_total"))
    forecast: str = ""
    """One sentence about when it will be full."""
    full_on: datetime | None = None
    """By the growth seen."""
    earliest_full_on: datetime | None = None
    servers: int = 0
    """Servers whose policies name it."""
    backups: int = 0
    """Backups with a complete copy there."""
    bytes_stored: int = 0
    """Of backups and binary logs there, as the catalog counts it."""
    behind_backups: int = field(default=0, metadata=HIDDEN)
    behind_bytes: int = field(default=0, metadata=HIDDEN)
    behind: timedelta | None = field(default=None, metadata=HIDDEN)
    """How long the oldest backup waits that belongs there and is not there yet."""
    behind_error: str = field(default="", metadata=HIDDEN)
    lag: timedelta | None = field(default=None, metadata=json_key("worst_lag_seconds_of_a_day", digits=3))
    """The most that its binary logs were behind within a day."""
    lock: timedelta | None = field(default=None, metadata=json_key("lock_seconds", digits=3))
    """For how long the destination itself refuses to delete anything; null where it does not."""

    @property
    def is_lost(self) -> bool:
        """Backups belong there, and it carries no marker: another folder or disk is mounted there."""
        return self.initialised is False and self.backups > 0

    @property
    @computed("behind", after="bytes_stored")
    def shortfall(self) -> Shortfall:
        return Shortfall(self.behind_backups, self.behind_bytes, self.behind, self.behind_error)


def destination_views(wiring: Wiring, now: datetime) -> tuple[DestinationView, ...]:
    """Every configured destination, in the order of the configuration. Raises CatalogError."""
    glimpses, catalog = _glimpses(wiring), wiring.catalog
    stock, lags = catalog.glances.stock(), catalog.glances.lags(now - _DAY)
    users: Counter[str] = Counter()
    for name in wiring.settings.servers:
        server = wiring.settings.server(name)
        if server.usable:
            users.update({*server.required, *server.others})
    behind = gathered((row.destination, row) for row in catalog.replications.list())
    found = []
    for name, settings in wiring.settings.destinations.items():
        seen, late = glimpses[name], behind.get(name, ())
        seen.look(wiring, now)
        lag = max((worst for (_server, other), worst in lags.items() if other == name), default=None)
        failing = next((row for row in late if row.state == FAILING), None)
        filling = seen.forecast.filling if seen.forecast is not None else None
        days = getattr(settings, "lock_days", None)
        hanging = seen.hanging(now)
        made = DestinationView(
            name=name,
            type=settings.type,
            off_site=settings.is_off_site,
            status=Status.GOOD,
            reachable=seen.reachable if hanging is None else False,
            hangs=hanging is not None,
            initialised=seen.initialised if hanging is None else None,
            trouble=seen.trouble
            if hanging is None
            else f"no response for {format_duration(hanging.total_seconds())}: the check is still running",
            checked_at=seen.checked_at,
            free=seen.space.free if seen.space else None,
            total=seen.space.total if seen.space else None,
            forecast=seen.forecast.text if seen.forecast else "",
            full_on=_day(seen.forecast, filling.day if filling else None),
            earliest_full_on=_day(seen.forecast, filling.earliest if filling else None),
            servers=users[name],
            backups=stock.get(name, Stock()).backups,
            bytes_stored=stock.get(name, Stock()).bytes,
            behind_backups=len(late),
            behind_bytes=sum(max(0, row.bytes_total - row.bytes_done) for row in late),
            behind=max((now - row.since for row in late), default=None),
            behind_error=failing.message if failing else "",
            lag=timedelta(seconds=lag) if lag is not None else None,
            lock=timedelta(days=days) if days is not None else None,
        )
        reasons = tuple(sorted(_reasons(made, seen.forecast), key=lambda reason: -reason.status.rank))
        found.append(replace(made, status=reasons[0].status if reasons else Status.GOOD, reasons=reasons))
    return tuple(found)


class DestinationLook(PeriodicCheck):
    """What was seen of one destination last. Each has its own thread: one that hangs keeps no other waiting."""

    def __init__(self, name: str) -> None:
        super().__init__(f"destination-{name}", EVERY)
        self._name = name
        self.reachable: bool | None = None
        self.initialised: bool | None = None
        self.trouble = ""
        self.checked_at: datetime | None = None
        self.space: Space | None = None
        self.forecast: Forecast | None = None
        self._foreseen: datetime | None = None
        self._begun: datetime | None = None

    def _names(self, wiring: Wiring) -> Iterable[str]:
        return (self._name,) if self._name in wiring.settings.destinations else ()

    def hanging(self, now: datetime) -> timedelta | None:
        """For how long nothing was heard of it, where that is too long."""
        begun = self._begun
        return now - begun if begun is not None and now - begun >= HANGS else None

    def _look(self, wiring: Wiring, name: str, now: datetime) -> None:
        self._begun = now
        try:
            self._see(wiring, name, now)
        finally:
            self._begun = None

    def _see(self, wiring: Wiring, name: str, now: datetime) -> None:
        destination = wiring.destination(name)
        try:
            initialised = destination.is_initialised()
            if not initialised:
                _require_parent(wiring.settings.destinations[name])
            space = destination.space() if initialised else None
        except DestinationError as error:
            self.reachable, self.initialised, self.trouble, self.checked_at = False, None, error.message, now
            return
        self.initialised, self.space, self.trouble, self.reachable = initialised, space, "", True
        self.checked_at = now
        if initialised and (self._foreseen is None or not timedelta(0) <= now - self._foreseen < FORECAST_EVERY):
            self.forecast = forecast(wiring, name)
            self._foreseen = now if self.forecast is not None else None
        note_seen(wiring, name, initialised=initialised)


def _require_parent(settings: DestinationSettings) -> None:
    """Raises DestinationError for a folder that nobody can make a repository."""
    if isinstance(settings, FilesystemDestination) and not settings.path.parent.is_dir():
        raise DestinationError(f"there is no folder {settings.path.parent}")


_ALL: weakref.WeakKeyDictionary[Catalog, dict[str, DestinationLook]] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def _glimpses(wiring: Wiring) -> Mapping[str, DestinationLook]:
    with _MAKING:
        known = _ALL.setdefault(wiring.catalog, {})
        for name in wiring.settings.destinations:
            if name not in known:
                known[name] = DestinationLook(name)
        return dict(known)


def _reasons(made: DestinationView, foreseen: Forecast | None) -> Iterator[Reason]:
    if made.reachable is False:
        yield Reason(Status.BAD, f"it does not answer: {made.trouble}", "to find the cause: backupd check")
    elif made.is_lost:
        yield Reason(
            Status.BAD,
            f"it should hold {made.backups} backups, but it is empty or not a repository",
            "is the file system mounted?",
        )
    more_room = "add space, or keep fewer backups: `backupd policy explain` previews other rules"
    if made.free is not None and made.total and made.free < NEARLY * made.total:
        yield Reason(
            Status.BAD, f"it is nearly full: {format_size(made.free)} of {format_size(made.total)} are free", more_room
        )
    elif foreseen is not None and foreseen.is_soon:
        urgent = foreseen.filling.earliest is not None and foreseen.filling.earliest <= URGENT
        yield Reason(Status.BAD if urgent else Status.WARNING, f"it fills up: {foreseen.text}", more_room)
    if made.behind_error:
        yield Reason(
            Status.WARNING,
            f"{made.behind_backups} backups ({format_size(made.behind_bytes)}) are not there yet: {made.behind_error}",
            "backupd retries; to copy now: backupd replicate",
        )


def _day(foreseen: Forecast | None, number: int | None) -> datetime | None:
    return foreseen.at + timedelta(days=number) if foreseen is not None and number is not None else None


_LOOKS = 3
"""So many looks in a row, a minute apart, in which it does not answer: a moment's trouble is none."""


class ReachWatch:
    """From one thread. The looking itself goes on in the background: see ``destination_views``."""

    def __init__(self) -> None:
        self._silent: dict[str, list[datetime]] = {}

    def step(self, wiring: Wiring, now: datetime) -> None:
        """Raises CatalogError."""
        for destination in destination_views(wiring, now):
            self._look(wiring, destination)

    def _look(self, wiring: Wiring, destination: DestinationView) -> None:
        key = Key(REACH, subject=destination.name)
        if destination.reachable is None:
            return
        if destination.reachable and not destination.is_lost:
            self._silent.pop(destination.name, None)
            wiring.settle(looked={key: f"destination {destination.name} answers again"})
            return
        looks = self._silent.setdefault(destination.name, [])
        if destination.checked_at is not None and destination.checked_at not in looks:
            looks.append(destination.checked_at)
        if len(looks) < _LOOKS and not destination.hangs:
            return
        if destination.is_lost:
            what = f"should hold {destination.backups} backups, but it is empty or not a repository"
            hint = "is the file system mounted? Backups that need it fail until it is there again"
        else:
            what = f"cannot be reached: {destination.trouble}"
            hint = "backups that need it fail until it answers; to find the cause: backupd check"
        wiring.settle(Condition(key, Severity.ERROR, f"destination {destination.name} {what}", hint=hint))
