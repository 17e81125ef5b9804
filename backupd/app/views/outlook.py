"""The coming two weeks: which runs a policy starts, and what its retention holds after them. Pure, clock included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, tzinfo
from typing import Any

from backupd.app.schedule.calendar import Leg, due_times, start_of
from backupd.model.backup_record import BackupKind
from backupd.model.job import JobKind
from backupd.model.text import format_time
from backupd.retention.decisions import BinlogRun, Decisions, Stored, View
from backupd.retention.solver import solve
from policies.schema import Keep

SPAN = timedelta(days=14)
SOLVED = 500
"""The most times that retention is looked at on the way; with more runs not after each, which changes no rule's end."""

_BACKUPS = {
    JobKind.FULL: BackupKind.PHYSICAL_FULL,
    JobKind.INCREMENTAL: BackupKind.PHYSICAL_INCREMENTAL,
    JobKind.LOGICAL: BackupKind.LOGICAL,
}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """``at``: when it starts, jitter and blackout applied; ``due``: when the schedule says."""

    at: datetime
    due: datetime
    leg: str
    kind: JobKind

    def as_json(self) -> dict[str, Any]:
        return {"at": format_time(self.at), "due": format_time(self.due), "leg": self.leg, "kind": str(self.kind)}


@dataclass(frozen=True, slots=True)
class Typical:
    """What a planned backup is taken to be like: its bytes and how long it runs. Nothing is known without history.
    ``dump_bytes``: of a logical one, by its set of tables."""

    full_bytes: int = 0
    increment_bytes: int = 0
    duration: timedelta = timedelta(0)
    dump_bytes: Mapping[str, int] = field(default_factory=dict)


def planned_runs(legs: Iterable[Leg], after: datetime, until: datetime) -> tuple[PlannedRun, ...]:
    """Every run that is due in that time, by its start."""
    runs = [
        PlannedRun(start_of(leg, due), due, leg.leg, leg.kind)
        for leg in legs
        for due in due_times(leg, after, until=until)
    ]
    return tuple(sorted(runs, key=lambda run: (run.at, run.leg)))


def ahead(
    view: View,
    keep: Keep | None,
    runs: Sequence[PlannedRun],
    *,
    until: datetime,
    zone: tzinfo,
    max_chain: int,
    typical: Typical | None = None,
) -> Decisions:
    """What ``view`` has become by ``until``, when every run succeeds and retention follows each, as it does."""
    typical = typical or Typical()
    step = len(runs) // SOLVED + 1
    for number, run in enumerate(runs):
        if run.kind in _BACKUPS:
            taken = _backup(view, run, max_chain, typical)
            view = replace(view, backups=(*view.backups, taken))
            if number % step == 0:
                view = _expired(view, solve(view, keep, now=taken.finished_at, zone=zone))
        elif run.kind is JobKind.RETENTION:
            view = _expired(view, solve(view, keep, now=run.at, zone=zone))
    return solve(view, keep, now=until + typical.duration, zone=zone)


def untold(runs: Iterable[BinlogRun]) -> tuple[BinlogRun, ...]:
    """Binary logs by their times alone: of backups that do not exist yet nobody knows the place in them."""
    return tuple(replace(run, branch="", first=0, last=0) for run in runs)


def streamed(runs: Iterable[BinlogRun], now: datetime) -> tuple[BinlogRun, ...]:
    """The same when the binary log is streamed all the time: the newest goes on, and where there is none one begins."""
    *older, newest = sorted(untold(runs), key=lambda run: run.last_at) or [BinlogRun("the binary log", now, now)]
    return (*older, replace(newest, last_at=now + 2 * SPAN))


def _expired(view: View, decisions: Decisions) -> View:
    gone = {decision.backup.id for decision in decisions.expired}
    return replace(view, backups=tuple(backup for backup in view.backups if backup.id not in gone)) if gone else view


def _backup(view: View, run: PlannedRun, max_chain: int, typical: Typical) -> Stored:
    """The backup that the run will take; an increment that has nothing to build on, or too much, becomes a full one."""
    kind, parent = _BACKUPS[run.kind], None
    if kind is BackupKind.PHYSICAL_INCREMENTAL:
        parent, length = _newest_chain(view)
        if parent is None or length >= max_chain:
            kind, parent = BackupKind.PHYSICAL_FULL, None
    if kind is BackupKind.LOGICAL:
        table_set = run.leg.partition("/")[2]
        name = "-".join(filter(None, (f"{run.at:%Y%m%dT%H%M%SZ}", "dump", table_set)))
        return Stored(
            name,
            kind,
            None,
            run.at,
            run.at + typical.duration,
            table_set=table_set,
            bytes=typical.dump_bytes.get(table_set, 0),
        )
    size = typical.increment_bytes if parent else typical.full_bytes
    name = f"{run.at:%Y%m%dT%H%M%SZ}-{'increment' if parent else 'full'}"
    return Stored(name, kind, parent, run.at, run.at + typical.duration, bytes=size)


def _newest_chain(view: View) -> tuple[str | None, int]:
    """The newest physical backup that can be built on, and how many increments it is away from its full one."""
    by_id = {backup.id: backup for backup in view.backups if backup.usable and not backup.marked}
    physical = [backup for backup in by_id.values() if backup.kind is not BackupKind.LOGICAL]
    for newest in sorted(physical, key=lambda backup: (backup.finished_at, backup.id), reverse=True):
        length, backup = 0, newest
        while backup.parent is not None and backup.parent in by_id:
            backup, length = by_id[backup.parent], length + 1
        if backup.parent is None:
            return newest.id, length
    return None, 0
