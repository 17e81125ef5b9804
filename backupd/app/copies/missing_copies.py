"""What has to be copied to a destination, from where, and when a job is queued for it.

The catalog and the target's own rules decide what is copied. The service (``ReplicaWatch``) looks at the catalog only
and queues a job for a server and a destination when a backup came or went, when something that failed is due again,
when the service has started, and each hour in any case; one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from backupd.app.context.destination_identity import require_single
from backupd.app.context.incidents import Incidents
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.protection import look as look_at_protection
from backupd.app.copies.protection import sites_of
from backupd.app.jobs.jobs import queued
from backupd.app.retention.decisions import NOTHING
from backupd.app.retention.preview import stock_of
from backupd.app.retention.rules import Decisions
from backupd.app.runtime.periodic import PeriodicCheck
from backupd.backup.finding import Finding, from_error, warning
from backupd.backup.preflight import EMPTIED_HINT
from backupd.catalog.jobs import OPEN
from backupd.catalog.standings import Count
from backupd.model.backup_record import BackupRecord, BackupState, HoldKind
from backupd.model.errors import BackupdError, RefusedError
from backupd.model.job import JobKind, JobRecord
from backupd.model.text import format_time
from backupd.recovery.restorable import Obstacle, Restorability, Why, here_if, members_of
from storage.destination import Destination

COMPLETE = str(BackupState.COMPLETE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """``backups``: to be copied, each after what it builds on, the newest chain first. ``declined``: ids that the
    target's own rules would not keep, with why. ``first_logs``: of each branch the first file that is needed there, or
    NOTHING; of a branch that is not named nothing is archived yet."""

    backups: tuple[BackupRecord, ...] = ()
    declined: tuple[tuple[str, str], ...] = ()
    first_logs: dict[str, int] = field(default_factory=dict)


def destinations_of(
    wiring: Wiring, server: str | None, destination: str | None, some: Collection[str] | None = None
) -> list[tuple[str, str]]:
    """Each server, each of ``some``, or ``server`` alone, with each destination that its policy names, or with
    ``destination`` alone. Raises UnknownNameError, RefusedError where the policy of ``server`` does not name
    ``destination``."""
    if destination is not None:
        wiring.settings.destination(destination)
    found = []
    for name in [server] if server is not None else list(wiring.settings.servers if some is None else some):
        one = wiring.settings.server(name)
        known = [*one.required, *one.others]
        if destination is None or destination in known:
            found += [(name, where) for where in (known if destination is None else [destination])]
        elif server is not None:
            raise RefusedError(
                f"backups of {server} do not go to {destination}", hint=f"its policy names: {', '.join(known)}"
            )
    return found


def opened(wiring: Wiring, name: str) -> Destination:
    """A destination that copies go to, initialised where this is the first one.

    Raises DestinationError where it cannot be reached, RefusedError where it is bare and was not, or has two names.
    """
    destination = wiring.destination(name)
    if not destination.is_initialised():
        if wiring.holds_anything(name):
            raise RefusedError(
                f"destination {name} should hold backups, but it is empty or not a repository", hint=EMPTIED_HINT
            )
        destination.initialise(wiring.clock())
    require_single(wiring, destination)
    return destination


def sources(wiring: Wiring, server: str, target: str) -> list[Destination]:
    """Where copies can be read now, in the order to ask: those that must hold everything come first."""
    settings = wiring.settings.server(server)
    usable = {destination.name: destination for destination in wiring.usable_destinations()}
    return [
        usable[name]
        for name in dict.fromkeys((*settings.required, *settings.others, *usable))
        if name in usable and name != target
    ]


def wanted(wiring: Wiring, server: str, target: str, from_destinations: Collection[str]) -> Wanted:
    """What ``target`` lacks and would keep. Raises CatalogError."""
    stock = stock_of(wiring, server, wiring.clock())
    records = {record.id: record for record in stock.ours.records}
    candidates = [record for record in records.values() if _can_be_copied(record, target, from_destinations)]
    said = stock.foresee(target, stock.ours.as_if_there(candidates), from_destinations)
    kept = {decision.backup.id for decision in said.kept}
    possible = {record.id for record in candidates}
    walk = Restorability(
        records.get,
        lambda one: here_if(one.id in possible or one.state_at(target) == COMPLETE),
    )
    take: dict[str, BackupRecord] = {}
    declined: dict[str, str] = {}
    for decision in said.backups:
        if decision.backup.id in possible and decision.backup.id not in kept:
            declined[decision.backup.id] = "; ".join(decision.reasons)
    for record in sorted(candidates, key=lambda one: (one.finished_at, one.id), reverse=True):
        if record.id not in kept:
            continue
        if (obstacle := walk.of(record).obstacle) is not None:
            declined[record.id] = _words(obstacle)
            continue
        missing = [one for one in members_of(record, records) if one.state_at(target) != COMPLETE]
        take |= {one.id: one for one in missing if one.id not in take}
    return Wanted(tuple(take.values()), tuple(sorted(declined.items(), reverse=True)), _first_logs(said))


def above(record: BackupRecord, records: Iterable[BackupRecord]) -> tuple[str, ...]:
    """Ids of all that ``record`` builds on, the full backup first."""
    return tuple(member.id for member in members_of(record, {one.id: one for one in records})[:-1])


def findings(wiring: Wiring, server: ServerSettings) -> list[Finding]:
    """What `backupd check` says about the others of a server."""
    found = []
    for name in server.others:
        try:
            wiring.destination(name).is_initialised()
        except BackupdError as failure:
            found.append(
                warning(f"destination {name}", from_error("", failure).message, failure.hint or "copies to it wait")
            )
        late = [row for row in wiring.catalog.replications.of(server.name, name) if row.message]
        if late:
            found.append(
                warning(
                    f"destination {name}",
                    f"{len(late)} backups of {server.name} wait to be copied since "
                    f"{format_time(min(row.since for row in late))}: {late[0].message}",
                    f"backupd retries automatically; to copy now: backupd replicate {server.name} --to {name}",
                )
            )
    return found


def _can_be_copied(record: BackupRecord, target: str, from_destinations: Collection[str]) -> bool:
    return (
        record.state is BackupState.COMPLETE
        and not record.state_at(target)
        and any(copy.destination in from_destinations and copy.state == COMPLETE for copy in record.copies)
    )


def _words(obstacle: Obstacle) -> str:
    if obstacle.why is Why.UNFIT:
        return "its parent backup is not complete at any reachable destination"
    parent = obstacle.parent or "an unnamed backup"
    return f"its chain is broken: {obstacle.backup} builds on {parent}" + (
        ", which builds on it" if obstacle.why is Why.CIRCLE else ", which the catalog does not list"
    )


def _first_logs(said: Decisions) -> dict[str, int]:
    first: dict[str, int] = {}
    for one in said.runs:
        if one.run.branch:
            first[one.run.branch] = min(one.run.first if one.keep else NOTHING, first.get(one.run.branch, NOTHING))
    return first


EVERY = timedelta(seconds=10)
HOURLY = timedelta(hours=1)
LEG = "replicate/"
"""What the leg of its jobs begins with; the name of the destination follows."""


@dataclass(frozen=True, slots=True)
class _Look:
    """At one server. ``changes``: those that were counted before it. ``again``: when time alone may call for another
    one. ``held``: destinations whose job was not over, so that no further one was queued."""

    changes: Count
    again: datetime
    held: frozenset[str]

    def calls_for_another(
        self, changes: Count, busy: Collection[tuple[str, str]], due: Collection[str], server: str, now: datetime
    ) -> bool:
        """``busy``: servers and destinations whose jobs are not over now; ``due``: destinations of this server at which
        something is to be tried again."""
        if changes != self.changes or not now < self.again <= now + HOURLY:  # later than that: the clock was ahead
            return True
        return not self.held.issuperset(due) or any((server, destination) not in busy for destination in self.held)


class ReplicaWatch(PeriodicCheck):
    """Looks at every server once it has begun, and later at those that something calls for: a change of what is
    recorded of the server, a job that is over, a moment that has come. There may be a thousand, with a thousand backups
    each."""

    def __init__(self) -> None:
        super().__init__("replication", EVERY)
        self._seen: dict[tuple[str, str], frozenset[str]] = {}
        self._queued: dict[tuple[str, str], datetime] = {}
        self._looks: dict[str, _Look] = {}
        self._changes: Mapping[str, Count] = {}
        self._basis: object = None
        self._incidents: Incidents | None = None

    def _names(self, wiring: Wiring) -> Iterable[str]:
        catalog, now = wiring.catalog, wiring.clock()
        paused = {hold.server for hold in catalog.holds.all() if hold.kind is HoldKind.PAUSE}
        basis = (wiring.settings, sites_of(wiring), paused)
        if basis != self._basis:
            self._basis = basis
            self._looks.clear()
        self._changes = catalog.standings.counts()
        busy = catalog.jobs.open_copies() if any(look.held for look in self._looks.values()) else ()
        due: dict[str, set[str]] = {}
        for name, destination in catalog.replications.due(now):
            due.setdefault(name, set()).add(destination)
        return [
            name
            for name in wiring.settings.servers
            if (last := self._looks.get(name)) is None
            or last.calls_for_another(self._changes.get(name, Count()), busy, due.get(name, ()), name, now)
        ]

    def _look(self, wiring: Wiring, name: str, now: datetime) -> None:
        server = wiring.settings.server(name)
        if not server.usable:
            return
        if self._incidents is None:
            self._incidents = Incidents(wiring.catalog)
        self._looks.pop(name, None)
        known = wiring.catalog.backups.list(server.name)
        _forget_former(wiring, server)
        again, held = [now + HOURLY], set()
        if not wiring.catalog.holds.of(server.name, HoldKind.PAUSE):
            for destination in (*server.required, *server.others):
                others = destination in server.others
                missing = _unverified(known, destination)
                missing |= _absent(known, destination) if others else frozenset()
                if self._waits(wiring, server.name, destination, missing, now, always=others):
                    held.add(destination)
                elif (last := self._queued.get((server.name, destination))) is not None:
                    again.append(last + HOURLY)
        if (moment := look_at_protection(wiring, self._incidents, server.name, now)) is not None:
            again.append(moment)
        later = min((moment for moment in again if moment > now), default=now + HOURLY)
        self._looks[name] = _Look(self._changes.get(name, Count()), later, frozenset(held))

    def _waits(
        self, wiring: Wiring, server: str, destination: str, missing: frozenset[str], now: datetime, *, always: bool
    ) -> bool:
        """Queue a job where one is due; True: the one before is not over. ``always``: also when nothing is known to be
        missing, since binary logs may be."""
        pair = (server, destination)
        if pair in self._seen:
            self._seen[pair] &= missing  # what came back is news again when it is missing once more
        last = self._queued.get(pair)
        hourly = (always or bool(missing)) and (last is None or abs(now - last) >= HOURLY)
        news = bool(missing - self._seen.get(pair, frozenset()))
        retry = _retry_at(wiring, server, destination) if always else None
        again = retry is not None and retry <= now
        if not (hourly or news or again):
            return False
        if any(
            job.arguments.get("destination") == destination
            for job in wiring.catalog.jobs.list(server, kind=JobKind.REPLICATE, state=OPEN)
        ):
            return True  # it may have begun before the news: they stay news until it is over
        wiring.catalog.jobs.enqueue(job_for(wiring, server, destination))
        self._queued[pair], self._seen[pair] = now, missing
        return False


def job_for(wiring: Wiring, server: str, destination: str) -> JobRecord:
    """A job, not queued yet, that brings ``destination`` up to date for one server."""
    return replace(
        queued(wiring, JobKind.REPLICATE, server, arguments={"destination": destination}), leg=f"{LEG}{destination}"
    )


def _forget_former(wiring: Wiring, server: ServerSettings) -> None:
    """Nothing is expected any more at a destination that the policy does not name among the others now."""
    for row in wiring.catalog.replications.of(server.name):
        if row.destination not in server.others:
            wiring.catalog.replications.forget(row.destination, [row.backup_id])


def _absent(records: tuple[BackupRecord, ...], destination: str) -> frozenset[str]:
    return frozenset(
        record.id for record in records if record.state is BackupState.COMPLETE and not record.state_at(destination)
    )


def _unverified(records: tuple[BackupRecord, ...], destination: str) -> frozenset[str]:
    return frozenset(
        record.id
        for record in records
        for copy in record.copies
        if copy.destination == destination and copy.state == str(BackupState.COMPLETE) and copy.verified_at is None
    )


def _retry_at(wiring: Wiring, server: str, destination: str) -> datetime | None:
    """When what fails there is tried again; None where nothing does."""
    rows = wiring.catalog.replications.of(server, destination)
    return min((row.not_before for row in rows if row.not_before is not None), default=None)
