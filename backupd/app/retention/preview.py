"""Binary logs under the rules: what a destination holds of them, as the decisions sees it, and letting go of what no
backup needs any more.

Logs go after the backups that needed them: as long as one can still be undeleted, its logs stay. The oldest file goes
first, so that a process that dies on the way leaves no hole in what stays.

What the rules of a policy say about the backups at each destination: read from the catalog, decided by
`backupd.app.retention.decisions`.

Nothing here changes anything; ``backupd.app.retention.retention`` acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from backupd.app.context.server_identity import own_branches
from backupd.app.context.wiring import Wiring
from backupd.app.retention.decisions import SKEW, needed, solve
from backupd.app.retention.holds import holds_of, kept_anywhere
from backupd.app.retention.rules import BinlogRun, Decisions, LogPosition, Minimum, RunDecision, Stored, View
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats
from backupd.model.binlog import Branch, Run
from backupd.model.document import made_of
from backupd.model.errors import BackupdError, NotFoundError
from backupd.model.job import JobKind, JobState
from backupd.model.proof import FAILED, PROVED
from backupd.recovery.chains import lineages, strangers
from backupd.recovery.restorable import Restorability, here_if
from backupd.recovery.runs import Histories, file_position
from backupd.transfer.holds_and_locks import Backup, Kept
from backupd.transfer.leases import living_intents, living_pins
from policies.policy import Keep
from storage.destination import Destination


def preview(wiring: Wiring, server: str, *, now: datetime, future: Sequence[Stored] = ()) -> tuple[Decisions, ...]:
    """What the rules say, one for each destination; changes nothing. ``future``: backups that do not exist yet, as if
    every destination held them.

    Raises NotFoundError for a server that is neither configured nor has any backup.
    """
    stock = stock_of(wiring, server, now)
    if server not in wiring.settings.servers and not stock.records:
        wiring.settings.server(server)
    return tuple(stock.decide(name, future=future) for name in destinations_holding(wiring, server, stock.records))


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


def stock_of(wiring: Wiring, server: str, now: datetime) -> Stock:
    """Raises CatalogError."""
    records = wiring.catalog.backups.list(server, foreign=True)
    return Stock(wiring, server, records, archive(wiring, server, records), now)


@dataclass(frozen=True, slots=True)
class Stock:
    """Every backup and binary log of one server that the catalog knows, asked about at ``now``. ``missing``: by
    destination, backups that the catalog expects there and that have no manifest. Its methods raise CatalogError."""

    wiring: Wiring
    server: str
    records: Sequence[BackupRecord]
    logs: Archive
    now: datetime
    missing: Mapping[str, Collection[Backup]] = field(default_factory=dict)

    @property
    def ours(self) -> Stock:
        """Without backups of which nothing shows that this installation took them."""
        return replace(self, records=[record for record in self.records if not record.foreign])

    def decide(self, destination: str, *, future: Sequence[Stored] = (), awaiting: bool = True) -> Decisions:
        """What the rules of the destination ``destination`` say. ``future``: backups besides, as if they were there;
        ``awaiting``: what is being read or built on, or is not yet where it has to be copied, stays."""
        keep, zone, unconfigured = self._rules(destination)
        reading, building = self._in_use(destination) if awaiting else (frozenset[str](), frozenset[str]())
        kept = kept_anywhere(self.wiring, self.server)
        view = View(
            self.server,
            destination,
            (*self._stored(destination, kept), *future),
            runs=self.logs.at(destination, self.records),
            branches=self.logs.branches,
            being_read=reading,
            built_on=building,
            unconfigured=unconfigured,
            hold="; ".join(hold.text for hold in holds_of(kept, self.server)),
            logs_minimum=logs_minimum(self.wiring, destination),
            awaited=self._awaited(destination) if awaiting else {},
        )
        return settled(self.wiring, solve(view, keep, now=self.now, zone=ZoneInfo(zone)), self.logs.branches)

    def foresee(self, destination: str, future: Sequence[Stored], sources: Collection[str]) -> Decisions:
        """What the rules of ``destination`` would say, did it hold the backups ``future``, too, and the binary logs of
        ``sources``."""
        runs = tuple(
            replace(run, destination=destination)
            for run in self.logs.runs
            if run.destination in {destination, *sources}
        )
        return replace(self, logs=replace(self.logs, runs=runs)).decide(destination, future=future, awaiting=False)

    def as_if_there(self, candidates: Iterable[BackupRecord]) -> list[Stored]:
        """``candidates``, of all the records, as a destination would have them that does not yet."""
        stored = self._as_stored()
        return [stored(record) for record in candidates]

    def _as_stored(self) -> Callable[..., Stored]:
        """What makes of one of the records how a destination has it, with the fields that are ``given`` besides."""
        lineage = lineages(tuple(self.records))
        strange = {name for one in strangers(self.records) for name in one.backups}

        def stored(record: BackupRecord, **given: Any) -> Stored:
            return made_of(
                Stored,
                record,
                bytes=record.stats.bytes_stored,
                log_position=self.logs.positions.get(record.id),
                missing=record.not_dumped,
                lineage=lineage[record.id],
                strange=record.id in strange or record.foreign,
                doubtful=bool(record.doubtful),
                **given,
            )

        return stored

    def _rules(self, destination: str) -> tuple[Keep | None, str, str]:
        """What the policy keeps at a destination, its time zone, and why there are no rules where nothing is
        configured."""
        settings = self.wiring.settings
        zone = settings.configuration.timezone
        if self.server not in settings.servers:
            return None, zone, f"server {self.server} is no longer configured, so its stored data is kept"
        if destination not in settings.destinations:
            return None, zone, f"destination {destination} is no longer configured, so it keeps everything"
        policy = settings.server(self.server).policy
        return policy.retention.get(destination), policy.timing.timezone or zone, ""

    def _stored(self, destination: str, kept: Kept) -> tuple[Stored, ...]:
        """The copies at ``destination``, with everything that the rules ask about them."""
        proved, restored = _proofs(self.wiring, self.server)
        here = [(record, copy) for record in self.records for copy in record.copies if copy.destination == destination]
        stored = self._as_stored()
        return tuple(
            stored(
                record,
                usable=copy.state == "complete",
                pinned=(self.server, record.id) in kept.backups,
                proved_at=proved.get(record.id),
                restored_at=restored.get(record.id),
                marked=BackupState.DELETED in (copy.state, record.state),
                minimum=minimum_of(self.wiring, copy, record.stats),
            )
            for record, copy in here
        )

    def _awaited(self, destination: str) -> dict[str, str]:
        """Backups at ``destination`` that another destination of the policy would keep, and has not got, or lost
        (``missing``: it is copied there again from here, and only then can the rules let it go there): by id, why."""
        configured = self.wiring.settings
        if self.server not in configured.servers or not (settings := configured.server(self.server)).usable:
            return {}
        ours = self.ours
        here = {record.id for record in ours.records if record.state_at(destination) == "complete"}
        lost = {
            name: f"it is missing at {other}, and is copied there again"
            for other in (*settings.required, *settings.others)
            if other != destination
            for owner, name in self.missing.get(other, ())
            if owner == self.server and name in here
        }
        late: dict[str, list[str]] = {}
        for other in settings.others:
            if other != destination and other in configured.destinations:
                for name in ours.kept_when_copied(other, here):
                    late.setdefault(name, []).append(other)
        return lost | {
            name: f"it is not yet at {' and '.join(others)}, which keeps it" for name, others in late.items()
        }

    def kept_when_copied(self, destination: str, sources: Collection[str]) -> list[str]:
        """Ids of the backups that ``destination`` lacks, and would keep if all of these were copied there, sorted; none
        where it lacks nothing of ``sources``."""
        # Copies are made of what any destination has: of each member of a chain another one may.
        anywhere = Restorability(
            {record.id: record for record in self.records}.get,
            lambda one: here_if(one.state is BackupState.COMPLETE and one.whole_at),
        )
        missing = [one for one in self.records if not one.state_at(destination) and anywhere.of(one).destinations]
        if not any(record.id in sources for record in missing):
            return []
        said = self.decide(destination, future=self.as_if_there(missing), awaiting=False)
        return sorted({decision.backup.id for decision in said.kept} & {record.id for record in missing})

    def _in_use(self, destination: str) -> tuple[frozenset[str], frozenset[str]]:
        """Ids that restores read, or that are being thawed for one, and that running backups build on. Nothing where
        the destination cannot be asked: then nothing can be marked there either."""
        try:
            store = opened(self.wiring, destination)
            now = self.wiring.clock()
            reading = {
                name for lease in living_pins(store, now) for owner, name in lease.backups if owner == self.server
            }
            reading |= {
                part
                for job in self.wiring.catalog.jobs.list(self.server, kind=JobKind.THAW, state=JobState.WAITING)
                for part in job.arguments["parts"]
            }
            building = {name for lease in living_intents(store, now) for name in lease.parents}
        except BackupdError:
            return frozenset(), frozenset()
        return frozenset(reading), frozenset(building)


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


def minimum_of(wiring: Wiring, copy: Copy, stats: Stats) -> Minimum | None:
    """Of a copy at a destination whose storage class has a minimum storage time; None for any other.

    It counts from when the copy was stored. Objects that it shares with earlier backups were stored before, and those
    that it shares with later ones stay: so it is over by then at the latest, and costs at most what is shown.
    """
    settings = wiring.settings
    if copy.destination not in settings.destinations:
        return None
    storage_class = settings.destinations[copy.destination].kept_in(logs=False)
    if not storage_class:
        return None
    from backupd.model.thaw import GIB, MONTH_DAYS

    prices = settings.configuration.archive.prices.as_prices
    time = prices.minimum(storage_class)
    if not time:
        return None
    monthly = prices.per_gib_month.get(storage_class)
    per_day = None if monthly is None else stats.bytes_stored / GIB * monthly / MONTH_DAYS
    return Minimum(storage_class, copy.stored_at + time, per_day, prices.currency)


def logs_minimum(wiring: Wiring, destination: str) -> tuple[str, timedelta] | None:
    """The storage class of complete binary logs at a destination, and its minimum storage time."""
    settings = wiring.settings
    if destination not in settings.destinations:
        return None
    storage_class = settings.destinations[destination].kept_in(logs=True)
    time = settings.configuration.archive.prices.as_prices.minimum(storage_class) if storage_class else None
    return (storage_class, time) if time else None


@dataclass(frozen=True, slots=True)
class Archive:
    """What the catalog knows of a server's binary logs. ``positions``: by id of a backup, where that is certain."""

    branches: tuple[Branch, ...]
    runs: tuple[Run, ...]
    positions: Mapping[str, LogPosition]

    def at(self, destination: str, records: Iterable[BackupRecord]) -> tuple[BinlogRun, ...]:
        """The runs of one destination."""
        ended: dict[str, list[tuple[int, BackupRecord]]] = {}
        for record in records:
            if (position := self.positions.get(record.id)) is not None:
                ended.setdefault(position.branch, []).append((position.number, record))
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
    positions = {}
    for record in records:
        if (position := file_position(record.start)) is None:
            continue
        if (branch := histories.branch_of(record)) is not None:
            positions[record.id] = LogPosition(branch.id, position[0])
    return Archive(branches, runs, positions)


def _seen(run: Run, branch: Branch, backups: Iterable[tuple[int, BackupRecord]], named: bool) -> BinlogRun:
    """A run by its times. A server that was idle writes nothing: the backups that are in it and the last confirmation
    show that it reaches further than its first and last commit."""
    inside = [record.started_at for number, record in backups if run.first_number <= number <= run.last_number]
    moments = [at for at in (run.first_at, run.last_at, run.confirmed_at, *inside) if at is not None]
    name = _name(branch, run.first_number, run.last_number, named)
    return BinlogRun(
        name,
        min(moments, default=branch.noticed_at),
        max(moments, default=branch.noticed_at),
        run.stored,
        branch.id,
        run.first_number,
        run.last_number,
    )


def _name(branch: Branch, first: int, last: int, named: bool) -> str:
    files = branch.file(first) if first == last else f"{branch.file(first)} to {branch.file(last)}"
    return f"{files} of branch {branch.id}" if named else files


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
            waits, reason = None if one.keep else waiting_for(run, decisions, branches), one.reason
            if waits is not None:
                reason += f"; what {waits.id} needs is deleted only after that backup, which can still be undeleted"
            name = _name(by_id[run.branch], run.first, run.last, len(branches) > 1)
            one = replace(one, run=replace(run, name=name, bytes=size), reason=reason)  # noqa: PLW2901  the same decision, told better
        found.append(one)
    return replace(decisions, runs=tuple(found))


def waiting_for(run: BinlogRun, decisions: Decisions, branches: Sequence[Branch]) -> Stored | None:
    """A backup that goes, is not gone, and needs something of ``run``: of several the one that needs most."""
    physical = any(one.backup.kind is not BackupKind.LOGICAL for one in decisions.backups)
    # Beside physical backups no dump holds logs.
    doomed = [
        one.backup
        for one in decisions.backups
        if (one.backup.marked or not one.keep) and not (physical and one.backup.kind is BackupKind.LOGICAL)
    ]
    found = [backup for backup in doomed if first_needed(run, backup, branches) <= run.last]
    return min(found, key=lambda backup: first_needed(run, backup, branches), default=None)


def first_needed(run: BinlogRun, backup: Stored, branches: Sequence[Branch]) -> int:
    """The first file of ``run`` that a backup needs; behind its last one where it needs none."""
    if backup.log_position is None:
        return run.first if run.last_at >= backup.started_at - SKEW else run.last + 1
    number = needed(backup.log_position, run.branch, branches)
    return run.last + 1 if number is None else max(number, run.first)
