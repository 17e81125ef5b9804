"""Binary logs under the rules: what a destination holds of them, as the decisions sees it, and letting go of what no
backup needs any more.

Logs go after the backups that needed them: as long as one can still be undeleted, its logs stay. The oldest file goes
first, so that a process that dies on the way leaves no hole in what stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from backupd.app.context.audit import audit, service_actor
from backupd.app.context.run import JobRun
from backupd.app.context.server_identity import own_branches
from backupd.app.context.wiring import Wiring
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.binlog import Branch, Run, SegmentRecord
from backupd.model.errors import LockedError
from backupd.model.text import format_size
from backupd.recovery.runs import Histories, place_of
from backupd.retention.logs import SKEW, needed
from backupd.retention.values import BinlogRun, Decisions, LogPlace, RunDecision, Stored
from backupd.transfer import log_segments as segments
from backupd.transfer.guards.object_locks import each
from backupd.transfer.sweep.collection import living_pins
from backupd.transfer.sweep.deletion_limit import is_most
from storage.contract.destination import Destination

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
class Cleared:
    """``held``: why something stayed that was to go."""

    segments: int = 0
    bytes: int = 0
    held: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """How many binary logs were removed, and their size."""
        return f"{self.segments} archived binary logs went ({format_size(self.bytes)})"

    def as_json(self) -> dict[str, Any]:
        """Segments and their stored bytes."""
        return {"segments": self.segments, "bytes": self.bytes}


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
