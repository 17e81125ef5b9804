"""A Galera cluster as its nodes say it is, and how a node that is restored would come back: by IST, or by a copy of all
data from a donor (SST).

The service looks at the nodes from time to time, so that it is known how much is written, and for how long a backup
still lets a node come back by IST; when a restore would take too large a part of that, it is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import IST_WINDOW
from backupd.app.context.incidents import Incidents
from backupd.app.context.wiring import Wiring
from backupd.app.restores.donors import besides, donors, forecast_of, look, newest_of, refuse_no_node, seen_donors
from backupd.app.runtime.periodic import PeriodicCheck
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.document import Document
from backupd.model.errors import BackupdError
from backupd.model.event import Severity
from backupd.model.text import format_duration
from backupd.recovery.ist import Advice, Donor, Forecast, Outcome, Rejoin, advice, is_short

EVERY = timedelta(minutes=1)
KEPT = timedelta(days=2)
"""How long looks at nodes stay in the catalog."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class BackupForecast(Document):
    """How a node comes back that is restored from this backup now."""

    backup: str
    server: str
    finished_at: datetime
    forecast: Forecast
    words: str


@dataclass(frozen=True, slots=True)
class Cluster(Document):
    """A cluster. ``server``: who was asked about; ``size``: nodes in the part of it that goes on. ``donors``: its nodes
    that are configured, ``troubles``: why others are not among them. ``backups``: the newest ones, newest first.
    ``advice``: what has to be otherwise so that a restore of the newest one ends in time; "" where it does.
    ``rejoins``: what was predicted of nodes that came back, and how they did, newest first."""

    server: str
    name: str
    uuid: str
    size: int
    at: datetime
    donors: tuple[Donor, ...]
    troubles: tuple[str, ...]
    backups: tuple[BackupForecast, ...]
    advice: str
    rejoins: tuple[Rejoin, ...]


def cluster(wiring: Wiring, server: str) -> Cluster:
    """The cluster that ``server`` is a node of; every node is asked now. Raises NotFoundError, RefusedError where no
    node of one answers."""
    looked = donors(wiring, server)
    refuse_no_node(looked, server)
    now, first = wiring.clock(), looked.donors[0].sample
    found: list[BackupForecast] = []
    short: Advice | None = None
    for record, listed in _backups(wiring, first.uuid):
        verdict = forecast_of(wiring, record, listed, looked.donors, now)
        if not found and is_short(verdict, now):
            short = _advice(looked.donors, verdict, record, now)
        found.append(BackupForecast(record.id, record.server, record.finished_at, verdict, verdict.words))
    return Cluster(
        server=server,
        name=first.name,
        uuid=first.uuid,
        size=max(one.sample.size for one in looked.donors),
        at=now,
        donors=looked.donors,
        troubles=looked.troubles,
        backups=tuple(found),
        advice=short.words if short is not None else "",
        rejoins=wiring.catalog.rejoins.of_cluster(first.uuid),
    )


def _backups(wiring: Wiring, uuid: str) -> Iterator[tuple[BackupRecord, tuple[BackupRecord, ...]]]:
    """The newest usable backups of nodes of the cluster, each with all those of its server."""
    found: list[tuple[BackupRecord, tuple[BackupRecord, ...]]] = []
    for name in wiring.settings.servers:
        listed = wiring.catalog.backups.list(name)
        found += [
            (one, listed)
            for one in listed
            if one.node is not None
            and one.node.uuid == uuid
            and one.kind is not BackupKind.LOGICAL
            and one.state is BackupState.COMPLETE
        ]
    return iter(sorted(found, key=lambda pair: (pair[0].finished_at, pair[0].id), reverse=True)[:_SHOWN])


def _advice(donors: Iterable[Donor], verdict: Forecast, record: BackupRecord, now: datetime) -> Advice | None:
    windows = [
        one for one in donors if one.window is not None and one.sample.uuid == (record.node and record.node.uuid)
    ]
    best = max(windows, key=lambda one: one.window or timedelta(0), default=None)
    if best is None or verdict.seconds is None:
        return None
    return advice(best, timedelta(seconds=verdict.seconds), max(now - record.finished_at, timedelta(0)))


@dataclass(frozen=True, slots=True)
class Window:
    """For how long the newest backup of a server lets a node come back by IST, and how long its restore takes.
    ``left``: nothing where it is too late already, None where that is not known or as good as for ever."""

    record: BackupRecord
    verdict: Forecast
    donors: tuple[Donor, ...]
    left: timedelta | None


def window(wiring: Wiring, server: str, now: datetime) -> Window | None:
    """By the last looks of the service; None of a server without such a backup, and where no node was seen. Raises
    CatalogError."""
    listed = wiring.catalog.backups.list(server)
    newest = newest_of(listed)
    if newest is None:
        return None
    seen = seen_donors(wiring, server, now)
    if not seen.donors:
        return None
    found = besides(server, seen.donors)
    verdict = forecast_of(wiring, newest, listed, found, now)
    left = max(verdict.until - now, timedelta(0)) if verdict.until is not None else None
    if verdict.outcome in (Outcome.SST, Outcome.FOREIGN):
        left = timedelta(0)
    return Window(newest, verdict, found, left)


class ClusterWatch(PeriodicCheck):
    """Looks at every server that was seen to be a node, and at one other server each time: it may have become one."""

    def __init__(self) -> None:
        super().__init__("clusters", EVERY)
        self._incidents: Incidents | None = None
        self._turn = 0
        self._nodes: frozenset[str] = frozenset()

    def _names(self, wiring: Wiring) -> Iterable[str]:
        now = wiring.clock()
        wiring.catalog.nodes.forget(now - KEPT)
        names = [one.member or one.name for one in wiring.settings.ways()]
        self._nodes = frozenset(wiring.catalog.nodes.servers())
        known = [name for name in names if name in self._nodes]
        others = [name for name in names if name not in self._nodes]
        self._turn += 1
        return [*known, *others[self._turn % len(others) :][:1]] if others else known

    def _look(self, wiring: Wiring, name: str, now: datetime) -> None:
        server = wiring.settings.reached(name)
        try:
            sample = look(wiring, name, now)
        except BackupdError:
            if name not in self._nodes:
                return  # others report a server that does not answer
            raise
        if sample is None:
            return
        wiring.catalog.nodes.add(sample)
        if not server.usable or server.policy.physical is None:
            return
        found = window(wiring, server.name, now)
        if found is None:
            return
        if self._incidents is None:
            self._incidents = Incidents(wiring.catalog)
        key = Key(IST_WINDOW, server.name)
        if is_short(found.verdict, now):
            self._incidents.settle(now, _condition(key, found, now))
        else:
            self._incidents.settle(
                now,
                looked={key: f"a node that is restored from {server.name}'s newest backup comes back by IST again"},
            )


def _condition(key: Key, found: Window, now: datetime) -> Condition:
    advised = _advice(found.donors, found.verdict, found.record, now)
    if found.verdict.outcome is Outcome.SST or found.left is None or found.verdict.seconds is None:
        message = f"a node that is restored from {key.server}'s newest backup needs an SST"
    else:
        message = (
            f"restoring {key.server}'s newest backup takes {format_duration(found.verdict.seconds)}, and IST is "
            f"possible for {format_duration(found.left.total_seconds())} more"
        )
    return Condition(
        key,
        Severity.WARNING,
        message,
        detail=f"{found.record.id}: {found.verdict.words}",
        hint=f"{advised.words}; to see every node: backupd cluster {key.server}"
        if advised is not None
        else f"take a backup now; to see every node: backupd cluster {key.server}",
    )
