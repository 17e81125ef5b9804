"""Binary logs under the rules: what a destination holds of them, as the decisions sees it, and letting go of what no
backup needs any more.

Logs go after the backups that needed them: as long as one can still be undeleted, its logs stay. The oldest file goes
first, so that a process that dies on the way leaves no hole in what stays.

What the rules of a policy say about the backups at each destination: read from the catalog, decided by
`backupd.app.retention.decisions`.

Nothing here changes anything; ``backupd.app.retention.retention`` acts on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from types import MappingProxyType
from zoneinfo import ZoneInfo

from backupd.app.context.access import audit, service_actor
from backupd.app.context.server_identity import own_branches
from backupd.app.context.wiring import JobRun, Wiring
from backupd.app.retention.decisions import SKEW, needed, solve
from backupd.app.retention.deletion import DELETED
from backupd.app.retention.holds import holds_of, kept_anywhere
from backupd.app.retention.rules import BinlogRun, Decisions, LogPlace, Minimum, RunDecision, Stored, View
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy
from backupd.model.binlog import Branch, Run, SegmentRecord
from backupd.model.document import HIDDEN, Document
from backupd.model.errors import BackupdError, LockedError, NotFoundError
from backupd.model.job import JobKind, JobState
from backupd.model.manifest import Stats
from backupd.model.proof import FAILED, PROVED
from backupd.model.text import format_size
from backupd.model.thaw import GIB, MONTH_DAYS
from backupd.recovery.chains import lineages, strangers
from backupd.recovery.runs import Histories, place_of
from backupd.transfer import log_segments as segments
from backupd.transfer.collection import living_intents, living_pins
from backupd.transfer.deletion_limit import is_most
from backupd.transfer.holds_and_locks import Backup, Kept, each
from policies.schema import Keep
from storage.destination import Destination

_BATCH = 200
"""Segments that are removed between two looks at who reads."""
_ROW = 8
"""Segments that are removed at once. A process that dies on the way may leave so many out of order."""


@dataclass(frozen=True, slots=True)
class Archive:
    """What the catalog knows of a server's binary logs. ``places``: by id of a backup, where that is certain."""

    branches: tuple[Branch, ...]
    runs: tuple[Run, ...]
    places: Mapping[str, LogPlace]

    def at(self, destination: str, records: Iterable[BackupRecord]) -> tuple[BinlogRun, ...]:
        """The runs of one destination."""
        ended: dict[str, list[tuple[int, BackupRecord]]] = {}
        for record in records:
            if (place := self.places.get(record.id)) is not None:
                ended.setdefault(place.branch, []).append((place.number, record))
        by_id = {branch.id: branch for branch in self.branches}
        return tuple(
            _seen(run, by_id[run.branch], ended.get(run.branch, ()), len(self.branches) > 1)
            for run in self.runs
            if run.destination == destination
        )


def archive(wiring: Wiring, server: str, records: Iterable[BackupRecord]) -> Archive:
    """What the catalog knows of the binary logs of ``server``; ``records``: its backups. Raises CatalogError."""
    branches = own_branches(wiring, server)
    if not branches:
        return Archive((), (), {})
    ids = {branch.id for branch in branches}  # no rule touches the binary logs of a stranger
    runs = tuple(run for run in wiring.catalog.binlogs.runs(server) if run.branch in ids)
    histories = Histories(branches, runs)
    places = {}
    for record in records:
        if (place := place_of(record.position)) is None:
            continue
        if (branch := histories.branch_of(record)) is not None:
            places[record.id] = LogPlace(branch.id, place[0])
    return Archive(branches, runs, places)


def _seen(run: Run, branch: Branch, backups: Iterable[tuple[int, BackupRecord]], told: bool) -> BinlogRun:
    """A run by its times. A server that was idle writes nothing: the backups that lie in it and the last confirmation
    tell that it reaches further than its first and last commit."""
    inside = [record.started_at for number, record in backups if run.first_number <= number <= run.last_number]
    moments = [at for at in (run.first_at, run.last_at, run.confirmed_at, *inside) if at is not None]
    name = _name(branch, run.first_number, run.last_number, told)
    return BinlogRun(
        name,
        min(moments, default=branch.noticed_at),
        max(moments, default=branch.noticed_at),
        run.stored,
        branch.id,
        run.first_number,
        run.last_number,
    )


def _name(branch: Branch, first: int, last: int, told: bool) -> str:
    files = branch.file(first) if first == last else f"{branch.file(first)} to {branch.file(last)}"
    return f"{files} of branch {branch.id}" if told else files


def settled(wiring: Wiring, decisions: Decisions, branches: Sequence[Branch]) -> Decisions:
    """With the names and bytes of runs that go in part, and with what those that go still wait for."""
    if not any(one.run.branch and not one.keep for one in decisions.runs):
        return decisions
    by_id = {branch.id: branch for branch in branches}
    found: list[RunDecision] = []
    for one in decisions.runs:
        run = one.run
        if run.branch:
            size = wiring.catalog.binlogs.stored_bytes(
                decisions.server, run.branch, decisions.destination, run.first, run.last
            )
            waits = None if one.keep else _waits(run, decisions, branches)
            reason = (
                one.reason
                if waits is None
                else (f"{one.reason}; what {waits.id} needs goes only after that one, which can still be undeleted")
            )
            name = _name(by_id[run.branch], run.first, run.last, len(branches) > 1)
            one = replace(one, run=replace(run, name=name, bytes=size), reason=reason)  # noqa: PLW2901  the same decision, told better
        found.append(one)
    return replace(decisions, runs=tuple(found))


def stranded(decisions: Decisions) -> tuple[str, ...]:
    """The kept backups whose logs would go, where these are too many of the server's logs at once: nothing that happens
    as time goes by, but a rule that was changed. Pure."""
    going = [one.run for one in decisions.runs if not one.keep]
    found = tuple(
        decision.backup.id for decision in decisions.kept if any(_lies_in(decision.backup, run) for run in going)
    )
    total = sum(one.run.bytes for one in decisions.runs)
    return found if is_most(sum(run.bytes for run in going), total, backups=len(found)) else ()


def _lies_in(backup: Stored, run: BinlogRun) -> bool:
    place = backup.place
    return place is not None and place.branch == run.branch and run.first <= place.number <= run.last


@dataclass(frozen=True, slots=True)
class Cleared(Document):
    """``held``: why something stayed that was to go."""

    segments: int = 0
    bytes: int = 0
    held: tuple[str, ...] = field(default=(), metadata=HIDDEN)

    @property
    def text(self) -> str:
        """How many binary logs were removed, and their size."""
        return f"{self.segments} archived binary logs went ({format_size(self.bytes)})"


def clear(wiring: Wiring, destination: Destination, decisions: Decisions, run: JobRun) -> Cleared:
    """Remove what ``decisions`` let go, oldest first, but what backups need that are still there (marked or not), and
    what a restore reads that began meanwhile. The caller holds the lock of removals. Raises DestinationError."""
    server, name = decisions.server, destination.name
    present = {record.id for record in wiring.catalog.backups.list(server) if record.state_at(name)}
    branches = wiring.catalog.binlogs.branches(server)
    left = replace(decisions, backups=tuple(one for one in decisions.backups if one.backup.id in present))
    done = Cleared()
    for branch in branches:
        limit, held = _limit(
            [one.run for one in decisions.runs if not one.keep and one.run.branch == branch.id], left, branches
        )
        done = replace(done, held=(*done.held, *held))
        if limit is not None:
            done = _clear_branch(wiring, destination, left, branch, branches, limit, done, run)
    if done.segments:
        audit(
            wiring,
            service_actor(),
            "binlogs-removed",
            server=server,
            subject=run.job.id,
            detail=f"at {name}: {done.text}",
        )
    return done


def _limit(
    going: Sequence[BinlogRun],
    decisions: Decisions,
    branches: Sequence[Branch],
) -> tuple[int | None, list[str]]:
    """The first file of a branch that stays, None when all of it does."""
    limit: int | None = None
    for one in sorted(going, key=lambda run: run.first):
        waits = _waits(one, decisions, branches)
        number = _first_of(one, waits, branches) if waits is not None else one.last + 1
        if number > one.first:
            limit = number
        if waits is not None:
            return limit, [f"binary logs {one.name}: {waits.id} needs them and can still be undeleted"]
    return limit, []


def _waits(run: BinlogRun, decisions: Decisions, branches: Sequence[Branch]) -> Stored | None:
    """A backup that goes, is not gone, and needs something of ``run``: of several the one that needs most."""
    physical = any(one.backup.kind is not BackupKind.LOGICAL for one in decisions.backups)
    # Beside physical backups no dump holds logs.
    doomed = [
        one.backup
        for one in decisions.backups
        if (one.backup.marked or not one.keep) and not (physical and one.backup.kind is BackupKind.LOGICAL)
    ]
    found = [backup for backup in doomed if _first_of(run, backup, branches) <= run.last]
    return min(found, key=lambda backup: _first_of(run, backup, branches), default=None)


def _first_of(run: BinlogRun, backup: Stored, branches: Sequence[Branch]) -> int:
    """The first file of ``run`` that a backup needs; behind its last one where it needs none."""
    if backup.place is None:
        return run.first if run.last_at >= backup.started_at - SKEW else run.last + 1
    number = needed(backup.place, run.branch, branches)
    return run.last + 1 if number is None else max(number, run.first)


def _clear_branch(
    wiring: Wiring,
    destination: Destination,
    decisions: Decisions,
    branch: Branch,
    branches: Sequence[Branch],
    limit: int,
    done: Cleared,
    run: JobRun,
) -> Cleared:
    places = {one.backup.id: one.backup for one in decisions.backups}
    for batch in _batches(wiring, destination.name, branch, limit):
        run.check()
        run.fence()
        reader = _reader(wiring, destination, branch, branches, places, limit)
        if reader:
            return replace(done, held=(*done.held, f"binary logs of branch {branch.id}: restore {reader} reads here"))
        gone, lock = _remove_rows(destination, branch.server, batch)
        wiring.catalog.binlogs.drop_segments(branch.server, [record.key for record in gone], destination.name)
        done = replace(
            done,
            segments=done.segments + len(gone),
            bytes=done.bytes + sum(record.destinations[destination.name].stored for record in gone),
        )
        if lock is not None:
            return replace(
                done, held=(*done.held, f"binary logs of branch {branch.id} may not be removed yet: {lock.line}")
            )
    return done


def _remove_rows(
    destination: Destination,
    server: str,
    batch: Sequence[SegmentRecord],
) -> tuple[list[SegmentRecord], LockedError | None]:
    """Those that are gone, the oldest first; and what kept the next ones."""

    def remove(record: SegmentRecord) -> LockedError | None:
        try:
            segments.remove(destination, server, record.key)
        except LockedError as error:
            return error
        return None

    gone: list[SegmentRecord] = []
    for start in range(0, len(batch), _ROW):
        row = batch[start : start + _ROW]
        locks = each(remove, row, workers=_ROW)
        gone += [record for record, lock in zip(row, locks, strict=True) if lock is None]
        if (kept := next((lock for lock in locks if lock is not None), None)) is not None:
            return gone, kept
    return gone, None


def _batches(wiring: Wiring, destination: str, branch: Branch, limit: int) -> Iterator[list[SegmentRecord]]:
    found = (
        record
        for record in wiring.catalog.binlogs.each_segment(branch.server, branch.id, to_place=(limit, 0))
        if destination in record.destinations
    )
    while batch := list(islice(found, _BATCH)):
        yield batch


def _reader(
    wiring: Wiring,
    destination: Destination,
    branch: Branch,
    branches: Sequence[Branch],
    known: Mapping[str, Stored],
    limit: int,
) -> str:
    """The restore that began since the decision was made and may need what is about to go; empty when none does."""
    for lease in living_pins(destination, wiring.clock()):
        for owner, backup_id in lease.backups:
            if owner == branch.server and _may_need(known.get(backup_id), branch, branches, limit):
                return lease.id
    return ""


def _may_need(backup: Stored | None, branch: Branch, branches: Sequence[Branch], limit: int) -> bool:
    if backup is None or backup.place is None:
        return True
    number = needed(backup.place, branch.id, branches)
    return number is not None and number < limit


def may_come(record: BackupRecord, place: str, by_id: Mapping[str, BackupRecord]) -> bool:
    """Was it never at ``place``, and can it come there, with all that it builds on?"""
    if record.state_at(place):
        return False
    one: BackupRecord | None = record
    seen: set[str] = set()
    while one is not None and one.id not in seen:
        seen.add(one.id)
        if one.state is not BackupState.COMPLETE or not any(copy.state == "complete" for copy in one.copies):
            return False
        if one.parent is None:
            return True
        one = by_id.get(one.parent)
    return False


def minimum_of(wiring: Wiring, copy: Copy, stats: Stats) -> Minimum | None:
    """Of a copy at a destination whose storage class has a minimum storage time; None for any other.

    It counts from when the copy was stored. Objects that it shares with earlier backups were stored before, and those
    that it shares with later ones stay: so it is over by then at the latest, and costs at most what is told.
    """
    settings = wiring.settings
    if copy.destination not in settings.destinations:
        return None
    storage_class = settings.destinations[copy.destination].kept_in(logs=False)
    prices = settings.configuration.archive.prices.as_prices()
    time = prices.minimum(storage_class)
    if not time:
        return None
    monthly = prices.per_gib_month.get(storage_class)
    per_day = None if monthly is None else stats.bytes_stored / GIB * monthly / MONTH_DAYS
    return Minimum(storage_class, copy.stored_at + time, per_day, prices.currency)


def logs_minimum(wiring: Wiring, place: str) -> tuple[str, timedelta] | None:
    """The storage class that complete binary logs lie in at a destination, and its minimum storage time."""
    settings = wiring.settings
    if place not in settings.destinations:
        return None
    storage_class = settings.destinations[place].kept_in(logs=True)
    time = settings.configuration.archive.prices.as_prices().minimum(storage_class)
    return (storage_class, time) if time else None


def preview(wiring: Wiring, server: str, *, now: datetime, future: Sequence[Stored] = ()) -> tuple[Decisions, ...]:
    """What the rules say, one for each destination; changes nothing. ``future``: backups that do not exist yet, as if
    every destination held them.

    Raises NotFoundError for a server that is neither configured nor has any backup.
    """
    records = wiring.catalog.backups.list(server, foreign=True)
    if server not in wiring.settings.servers and not records:
        wiring.settings.server(server)
    logs = archive(wiring, server, records)
    return tuple(
        decide(wiring, server, name, records, now, logs, future=future)
        for name in destinations_holding(wiring, server, records)
    )


def foresee(
    wiring: Wiring, server: str, place: str, *, now: datetime, future: Sequence[Stored], sources: Collection[str]
) -> Decisions:
    """What the rules of ``place`` would say, did it hold the backups ``future``, too, and the binary logs of
    ``sources``; changes nothing."""
    records = wiring.catalog.backups.list(server, foreign=True)
    logs = archive(wiring, server, records)
    here = tuple(replace(run, destination=place) for run in logs.runs if run.destination in {place, *sources})
    return decide(wiring, server, place, records, now, replace(logs, runs=here), future=future, awaiting=False)


def destinations_holding(wiring: Wiring, server: str, records: Iterable[BackupRecord]) -> tuple[str, ...]:
    """Where the server's backups go by its policy, then where else the catalog knows some."""
    names: list[str] = []
    if server in wiring.settings.servers:
        settings = wiring.settings.server(server)
        names += [*settings.required, *settings.others]
    names += sorted({copy.destination for record in records for copy in record.copies})
    return tuple(dict.fromkeys(names))


def opened(wiring: Wiring, name: str) -> Destination:
    """The repository at a destination. Raises NotFoundError where there is none, DestinationError."""
    destination = wiring.destination(name)
    if not destination.is_initialised():
        raise NotFoundError(f"destination {name} is no repository", hint="is its file system mounted?")
    return destination


def _rules(wiring: Wiring, server: str, place: str) -> tuple[Keep | None, str, str]:
    """What the policy keeps at a destination, its time zone, and why there are no rules where nothing is configured."""
    settings = wiring.settings
    zone = settings.configuration.timezone
    if server not in settings.servers:
        return None, zone, f"server {server} is not configured any more, so what is left of it is kept"
    if place not in settings.destinations:
        return None, zone, f"destination {place} is not configured any more, so it keeps everything"
    policy = settings.server(server).policy
    return policy.retention.get(place), policy.timing.timezone or zone, ""


def decide(
    wiring: Wiring,
    server: str,
    place: str,
    records: Sequence[BackupRecord],
    now: datetime,
    logs: Archive,
    *,
    future: Sequence[Stored] = (),
    awaiting: bool = True,
    missing: Mapping[str, Collection[Backup]] = MappingProxyType({}),
) -> Decisions:
    """What the rules of the destination ``place`` say about ``records``, every backup of ``server`` that the catalog
    knows. ``future``: backups besides, as if they were there; ``awaiting``: what is being read or built on, or is not
    yet where it has to be copied, stays; ``missing``: by destination, backups that the catalog expects there and that
    have no manifest. Raises CatalogError."""
    keep, zone, unconfigured = _rules(wiring, server, place)
    reading, building = _in_use(wiring, server, place) if awaiting else (frozenset[str](), frozenset[str]())
    kept = kept_anywhere(wiring)
    view = View(
        server,
        place,
        (*_stored(wiring, server, place, records, kept, logs), *future),
        runs=logs.at(place, records),
        branches=logs.branches,
        being_read=reading,
        built_on=building,
        unconfigured=unconfigured,
        hold="; ".join(hold.text for hold in holds_of(kept, server)),
        logs_minimum=logs_minimum(wiring, place),
        awaited=_awaited(wiring, server, place, records, now, logs, missing) if awaiting else {},
    )
    return settled(wiring, solve(view, keep, now=now, zone=ZoneInfo(zone)), logs.branches)


def as_if_there(records: Sequence[BackupRecord], candidates: Iterable[BackupRecord], logs: Archive) -> list[Stored]:
    """``candidates``, of all the ``records`` of a server, as a destination would have them that does not yet."""
    lineage = lineages(tuple(records))
    strange = {name for one in strangers(records) for name in one.backups}
    return [
        Stored(
            record.id,
            record.kind,
            record.parent,
            record.started_at,
            record.finished_at,
            pinned=record.pinned,
            bytes=record.stats.bytes_stored,
            place=logs.places.get(record.id),
            table_set=record.table_set,
            missing=record.not_dumped,
            lineage=lineage[record.id],
            strange=record.id in strange,
            doubtful=bool(record.doubtful),
        )
        for record in candidates
    ]


def _stored(
    wiring: Wiring, server: str, place: str, records: Sequence[BackupRecord], kept: Kept, logs: Archive
) -> tuple[Stored, ...]:
    """The copies at ``place``, with everything that the rules ask about them."""
    proved, restored = _proofs(wiring, server)
    here = [(record, copy) for record in records for copy in record.copies if copy.destination == place]
    stored = as_if_there(records, [record for record, _copy in here], logs)
    return tuple(
        replace(
            one,
            usable=copy.state == "complete",
            pinned=(server, record.id) in kept.backups,
            proved_at=proved.get(record.id),
            restored_at=restored.get(record.id),
            marked=copy.state == DELETED or record.state is BackupState.DELETED,
            minimum=minimum_of(wiring, copy, record.stats),
            strange=one.strange or record.foreign,
        )
        for one, (record, copy) in zip(stored, here, strict=True)
    )


def _awaited(
    wiring: Wiring,
    server: str,
    place: str,
    records: Sequence[BackupRecord],
    now: datetime,
    logs: Archive,
    missing: Mapping[str, Collection[Backup]],
) -> dict[str, str]:
    """Backups at ``place`` that another destination of the policy would keep, and has not got, or lost (``missing``:
    it is copied there again from here, and only then can the rules let it go there): by id, why."""
    if server not in wiring.settings.servers or not (settings := wiring.settings.server(server)).usable:
        return {}
    records = [record for record in records if not record.foreign]
    here = {record.id for record in records if record.state_at(place) == "complete"}
    lost = {
        name: f"it is missing at {other}, and is copied there again"
        for other in (*settings.required, *settings.others)
        if other != place
        for owner, name in missing.get(other, ())
        if owner == server and name in here
    }
    late: dict[str, list[str]] = {}
    for other in settings.others:
        if other != place and other in wiring.settings.destinations:
            for name in _kept_when_copied(wiring, server, other, records, here, now, logs):
                late.setdefault(name, []).append(other)
    return lost | {name: f"it is not yet at {' and '.join(others)}, which keeps it" for name, others in late.items()}


def _kept_when_copied(
    wiring: Wiring,
    server: str,
    place: str,
    records: Sequence[BackupRecord],
    sources: Collection[str],
    now: datetime,
    logs: Archive,
) -> list[str]:
    """Ids of the backups that ``place`` lacks, and would keep if all of these were copied there, sorted; none where it
    lacks nothing of ``sources``."""
    by_id = {record.id: record for record in records}
    lacking = [record for record in records if may_come(record, place, by_id)]
    if not any(record.id in sources for record in lacking):
        return []
    future = as_if_there(records, lacking, logs)
    said = decide(wiring, server, place, records, now, logs, future=future, awaiting=False)
    return sorted({decision.backup.id for decision in said.kept} & {record.id for record in lacking})


def _proofs(wiring: Wiring, server: str) -> tuple[dict[str, datetime], dict[str, datetime]]:
    """When each backup was last proved, and when it was last restored and found good with or without a witness. A later
    ``failed`` takes both back; a test that never came to a verdict says nothing."""
    proved: dict[str, datetime] = {}
    restored: dict[str, datetime] = {}
    revoked: set[str] = set()
    for proof in wiring.catalog.proofs.list(server):  # newest first
        if proof.outcome == FAILED:
            revoked.add(proof.backup_id)
        elif proof.is_good and proof.backup_id not in revoked:
            restored.setdefault(proof.backup_id, proof.finished_at)
            if proof.outcome == PROVED:
                proved.setdefault(proof.backup_id, proof.finished_at)
    return proved, restored


def _in_use(wiring: Wiring, server: str, place: str) -> tuple[frozenset[str], frozenset[str]]:
    """Ids that restores read, or that are being thawed for one, and that running backups build on. Nothing where the
    destination cannot be asked: then nothing can be marked there either."""
    try:
        destination = opened(wiring, place)
        now = wiring.clock()
        reading = {name for lease in living_pins(destination, now) for owner, name in lease.backups if owner == server}
        reading |= {
            part
            for job in wiring.catalog.jobs.list(server, kind=JobKind.THAW, state=JobState.WAITING)
            for part in job.arguments["parts"]
        }
        building = {name for lease in living_intents(destination, now) for name in lease.parents}
    except BackupdError:
        return frozenset(), frozenset()
    return frozenset(reading), frozenset(building)
