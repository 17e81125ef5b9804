"""From a restored backup to any later moment: the binary logs of every leg, applied to a private server one after the
other, and only what can be shown to be right is handed over."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

from backupd.engine.binlog.conflicts import Conflict, Conflicts
from backupd.engine.binlog.scan import scan
from backupd.engine.instance.launch import LaunchedServer
from backupd.model.binlog import ReplayLeg, ReplayMethod, ReplaySpec, Stop, Transaction
from backupd.model.errors import RefusedError
from backupd.model.gtid import plus
from backupd.model.job import Report
from backupd.model.server_facts import Position, ServerInfo
from backupd.model.table import TableName
from backupd.model.text import format_time, parse_time
from backupd.process.folders import PASSABLE
from restore.datadir.staging import WITHOUT
from restore.replay.logs import Logs
from restore.replay.replay import Replayed, replay

MOST_WORKERS = 16
_LEAST_WORKERS = 4
"""More than two processors have: workers wait for each other and for the disk, too."""
_NAMED = 20


@dataclass(frozen=True, slots=True)
class RolledForward:
    """What was replayed. ``stop``: where the copy stands; ``transactions`` that were applied; ``bytes`` of logs;
    ``excluded``, ``doubtful``: as in the spec; ``events``: scheduled events that got back the status which their DDL
    gave them; ``prepared_xa``: XA transactions that are prepared and hold locks."""

    stop: Stop
    method: ReplayMethod
    reason: str
    transactions: int
    bytes: int
    seconds: float
    excluded: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    prepared_xa: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As outcomes show it and the state of a restore keeps it; "seconds" has three decimals."""
        return {
            "branch": self.stop.branch,
            "file": self.stop.file,
            "pos": self.stop.pos,
            "gtid": self.stop.gtids,
            "at": format_time(self.stop.at) if self.stop.at else None,
            "method": str(self.method),
            "reason": self.reason,
            "transactions": self.transactions,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "excluded": list(self.excluded),
            "doubtful": list(self.doubtful),
            "events": list(self.events),
            "prepared_xa": list(self.prepared_xa),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RolledForward:
        """Raises KeyError, ValueError for what ``as_json`` did not write."""
        at = parse_time(data["at"]) if data["at"] else None
        return cls(
            stop=Stop(data["branch"], data["file"], int(data["pos"]), data["gtid"], at),
            method=ReplayMethod(data["method"]),
            reason=data["reason"],
            transactions=int(data["transactions"]),
            bytes=int(data["bytes"]),
            seconds=float(data["seconds"]),
            excluded=tuple(data["excluded"]),
            doubtful=tuple(data["doubtful"]),
            events=tuple(data["events"]),
            prepared_xa=tuple(data["prepared_xa"]),
            warnings=tuple(data["warnings"]),
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What an operator has to know of it."""
        found = list(self.warnings)
        if self.doubtful:
            found.append(f"the logs do not tell whether these belong before the target: {_joined(self.doubtful)}")
        if self.prepared_xa:
            found.append(
                f"{len(self.prepared_xa)} XA transactions are prepared and hold locks until somebody decides "
                f"(XA COMMIT or XA ROLLBACK): {_joined(self.prepared_xa)}"
            )
        if self.excluded:
            found.append(f"left out as asked: {_joined(self.excluded)}")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Means:
    """``programs``: paths of programs that are not searched; ``templates``: the folder where empty systems are kept for
    the next replay, None to make a new one each time."""

    programs: Mapping[str, str] = field(default_factory=dict)
    templates: Path | None = None


NO_MEANS = Means()


def goal_of(spec: ReplaySpec | None) -> str:
    """Where a replay goes and what it leaves out, in a few words; "" for none."""
    if spec is None:
        return ""
    without = f"{WITHOUT}{', '.join(sorted(spec.exclude))}" if spec.exclude else ""
    return f"{spec.stop.branch} {spec.stop.file}:{spec.stop.pos}{without}"


def tables_of(spec: ReplaySpec) -> tuple[TableName, ...]:
    """What a replay is narrowed down to; empty for everything."""
    return tuple(TableName.parse(table) for table in spec.tables)


def replay_workers(wanted: int) -> int:
    """How many appliers; ``wanted`` 0: as many as this machine can use."""
    return wanted or max(_LEAST_WORKERS, min(MOST_WORKERS, len(os.sched_getaffinity(0))))


def refuse_conflicts(spec: ReplaySpec, logs: Logs) -> None:
    """Raises RefusedError when a transaction that is to be left out is not there, or later ones build upon it."""
    if not spec.exclude:
        return
    conflicts = Conflicts(spec.exclude)
    found: list[Conflict] = []
    for leg, files in zip(spec.legs, logs.legs, strict=True):
        for path in files:
            with path.open("rb") as stream:
                found += conflicts.look(stream, since=leg.start.pos if path.name == leg.start.file else 0)
    if conflicts.missing:
        raise RefusedError(
            f"not between the backup and the target: {', '.join(conflicts.missing)}",
            hint="give transactions that would be replayed: `backupd binlog search SERVER` finds them; what the backup "
            "itself holds cannot be left out, an older backup may not hold it",
        )
    if found:
        lines = [
            f"{conflict.gtid} builds on {conflict.excluded}"
            f"{' in ' + conflict.table if conflict.table else ''}: {conflict.why}"
            for conflict in found
        ]
        raise RefusedError(
            f"{', '.join(spec.exclude)} cannot be left out: {len(found)} later transactions build upon it",
            detail="\n".join([*lines[:_NAMED], *([f"and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else [])]),
            hint="leave those out, too (--exclude-gtid for each), or restore to before-gtid: and mend the rest by hand",
        )


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a replay begins: ``skipped`` transactions behind the backup's recorded position; ``reason`` why, or ""."""

    position: Position
    skipped: int = 0
    reason: str = ""


def beginning(
    leg: ReplayLeg, files: Sequence[Path], place: Position | None, *, taken_until: datetime, mariadb: bool
) -> Beginning:
    """Where the first leg begins. As a rule where the backup's receipts say; further on when InnoDB's own ``place``
    (after prepare) is, because nothing may be replayed twice.

    InnoDB also remembers places of an earlier sequence of files with the same names (RESET), so its word counts only
    where a transaction ends at that very byte of these files that had committed by ``taken_until``, the end of the
    backup.
    """
    start = leg.start
    if place is None or not start.file or not start.file.rpartition(".")[2].isdecimal():
        return Beginning(start)
    by_name = {path.name: path for path in files}
    if place.file not in by_name or (_number(place.file), place.pos) <= (_number(start.file), start.pos):
        return Beginning(start)
    skipped: list[Transaction] = []
    for path in files:
        if _number(start.file) <= _number(path.name) <= _number(place.file):
            since = start.pos if path.name == start.file else 0
            until = place.pos if path.name == place.file else None
            skipped += _transactions(path, since, until)
    last = skipped[-1] if skipped else None
    if last is None or last.end != place.pos or last.at > taken_until:
        return Beginning(start)
    gtid = start.gtid
    for transaction in skipped:
        if transaction.gtid:
            gtid = plus(gtid, transaction.gtid, mariadb=mariadb)
    return Beginning(
        Position(place.file, place.pos, gtid),
        len(skipped),
        f"the copy stands at {place.file}:{place.pos} by InnoDB's own record, {len(skipped)} transactions after the "
        f"backup's position {start.file}:{start.pos}: replayed from there, so that nothing is applied twice",
    )


def _transactions(path: Path, since: int, until: int | None) -> list[Transaction]:
    found: list[Transaction] = []
    with path.open("rb") as stream:
        scan(stream, stop=until, on_transaction=lambda one: found.append(one) if one.start >= since else None)
    return found


def _number(file: str) -> int:
    return int(file.rpartition(".")[2])


def roll_forward(
    server: LaunchedServer,
    info: ServerInfo,
    spec: ReplaySpec,
    logs: Logs,
    begin: Beginning,
    *,
    folder: Path,
    report: Report,
    cancel: Event | None = None,
    means: Means = NO_MEANS,
    timed: Callable[[ReplayLeg], AbstractContextManager[None]] = lambda _leg: nullcontext(),
    on_stop: Callable[[Stop], None] = lambda _stop: None,
) -> RolledForward:
    """Apply every leg to ``server``, which was started with ``replayconfig.replay_config``; ``folder``: for what the
    replay itself needs, not there yet. ``timed`` is entered around each leg, ``on_stop`` called after it.

    Raises RefusedError for what cannot be replayed exactly, ToolError or ServerError when it went wrong; the copy is
    not to be used then.
    """
    done: list[Replayed] = []
    folder.mkdir()
    folder.chmod(PASSABLE)
    for number, (leg, files) in enumerate(zip(spec.legs, logs.legs, strict=True)):
        here = begin if number == 0 else Beginning(leg.start)
        with timed(leg):
            done.append(
                _leg(
                    server,
                    info,
                    spec,
                    leg,
                    files,
                    here,
                    folder=folder / f"{number + 1}",
                    report=report,
                    cancel=cancel,
                    means=means,
                )
            )
        on_stop(leg.stop)
    return RolledForward(
        stop=spec.stop,
        method=spec.method,
        reason=spec.reason,
        transactions=sum(one.transactions for one in done),
        bytes=sum(one.bytes for one in done),
        seconds=sum(one.seconds for one in done),
        excluded=spec.exclude,
        doubtful=spec.doubtful,
        events=tuple(dict.fromkeys(event for one in done for event in one.events)),
        prepared_xa=done[-1].prepared_xa if done else (),
        warnings=(
            *([begin.reason] if begin.reason else []),
            *dict.fromkeys(warning for one in done for warning in one.warnings),
        ),
    )


def _leg(
    server: LaunchedServer,
    info: ServerInfo,
    spec: ReplaySpec,
    leg: ReplayLeg,
    files: Sequence[Path],
    begin: Beginning,
    *,
    folder: Path,
    report: Report,
    cancel: Event | None,
    means: Means,
) -> Replayed:
    first = _number(begin.position.file) if begin.position.file else 0
    needed = [path for path in files if _number(path.name) >= first]
    if not needed:
        return Replayed(gtids=leg.stop.gtids, transactions=0, seconds=0.0, bytes=0)
    expected = None if leg.transactions is None else leg.transactions - begin.skipped
    return replay(
        server,
        info,
        needed,
        begin.position,
        leg.stop,
        method=spec.method,
        exclude=spec.exclude,
        server_ids=spec.server_ids,
        transactions=expected,
        tables=tables_of(spec),
        folder=folder,
        report=report,
        cancel=cancel,
        templates=means.templates,
        programs=means.programs,
    )


def _joined(lines: Sequence[str]) -> str:
    return "; ".join(lines[:_NAMED]) + (f"; and {len(lines) - _NAMED} more" if len(lines) > _NAMED else "")
