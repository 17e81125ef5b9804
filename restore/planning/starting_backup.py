"""From which backup a replay begins, and what is replayed then: the way that takes least time by the rates.

Without binary logs the backups alone are what can be restored: each is one point, and nothing between them is
recoverable. Pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.binlog import OF_TEMPORARY, STATEMENTS, ReplayLeg, ReplayMethod, ReplaySpec, Stop
from backupd.model.errors import DumpsOnlyError, NotFoundError, RefusedError, UnknownNameError
from backupd.model.server_facts import Position
from backupd.model.text import format_time
from backupd.recovery.chains import dumps
from backupd.recovery.runs import file_position
from backupd.recovery.windows import RouteLeg, Span, not_rolled
from restore.planning.plan import Rate
from restore.planning.target import AtBackup, AtGtid, AtPosition, AtTime, Goal, Latest
from restore.planning.target_resolution import Archive, Material, Resolution, TargetResolver, Way

_SortKey = tuple[str, int, str, int, int]
"""GTID domain and sequence, base name and number of the binary log, position in it; empty names: not known."""
Cost = Callable[[BackupRecord], float]
"""Seconds to fetch, prepare and place a backup with all that it builds on."""


def choose_point(
    server: str, own: Sequence[BackupRecord], usable: Sequence[BackupRecord], goal: Goal
) -> tuple[BackupRecord, str]:
    """The backup that ``goal`` means where no binary log is replayed, and in words why that one. ``usable``: restorable
    ones, by time; ``own``: all of the server. Raises NotFoundError, RefusedError with the nearest points."""
    if isinstance(goal, AtBackup):
        return _by_id(server, own, goal.backup_id)
    if not usable:
        raise none_restorable(server, own)
    whole = [b for b in usable if not b.is_partial]
    if isinstance(goal, Latest):
        newest = (whole or usable)[-1]
        partial = [b.id for b in usable if b.is_partial and b.finished_at > newest.finished_at]
        return newest, (
            f"the newest restorable backup{' that lacks no tables' if partial else ''}, finished "
            f"{format_time(newest.finished_at)}; without archived binary logs nothing later is recoverable"
            + (f", but --to backup:{partial[-1]} without the tables missing in it" if partial else "")
        )
    exact = [b for b in usable if is_exactly(b, goal)]
    if exact:
        exact = [b for b in exact if not b.is_partial] or exact
        return exact[-1], f"the backup's position is exactly {goal}"
    raise _between(usable, goal)


def none_restorable(server: str, own: Sequence[BackupRecord]) -> NotFoundError:
    """The error for a server without a restorable backup, saying whether there are dumps only, damaged ones or none."""
    damaged = [b for b in own if b.state is BackupState.DAMAGED and b.kind is not BackupKind.LOGICAL]
    take = f"take one: backupd backup {server} --kind full"
    if not damaged and dumps(own) and all(b.kind is BackupKind.LOGICAL for b in own):
        return DumpsOnlyError(
            f"server {server} cannot be restored as a whole: it has dumps only, and dumps restore tables",
            hint="all of its tables, rolled forward by the binary log where that is archived: backupd restore "
            f"{server} --to latest --tables '*.*' --sql DIR, or --into SERVER in place of --sql DIR",
        )
    if not damaged:
        return NotFoundError(f"server {server} has no restorable backup", hint=take)
    return NotFoundError(
        f"server {server} has no restorable backup: {len(damaged)} exist, but are marked as damaged",
        detail="\n".join(_named(b) for b in reversed(damaged)),
        hint=f"a damaged backup may be readable in part: --to backup:{damaged[-1].id} restores it or lists the "
        f"unreadable files; while the server runs, {take}",
    )


def furthest(usable: Sequence[BackupRecord]) -> BackupRecord:
    """The last one by time, or one whose position is provably ahead of it, the furthest. ``usable`` by time."""
    best = usable[-1]
    ahead = _sort_key(best.start)
    for backup in usable:
        coordinate = _sort_key(backup.start)
        if _is_ahead(coordinate, ahead):
            best, ahead = backup, coordinate
    return best


def _sort_key(position: Position) -> _SortKey:
    domain, sequence = _sequence(position.gtid)
    base, _, number = position.file.rpartition(".")
    return (domain, sequence, base, int(number), position.pos) if number.isdecimal() else (domain, sequence, "", 0, 0)


def _is_ahead(one: _SortKey, other: _SortKey) -> bool:
    """Is ``one`` provably later in the history of the same server? By binary log and, on MariaDB, by a GTID of one
    domain; where both can be compared, both must say so."""
    by_gtid = bool(one[0]) and one[0] == other[0]
    by_file = bool(one[2]) and one[2] == other[2]
    return (by_gtid or by_file) and (not by_gtid or one[1] > other[1]) and (not by_file or one[3:] > other[3:])


def disorder(chosen: BackupRecord, usable: Sequence[BackupRecord]) -> list[str]:
    """What to say when times and positions of the backups contradict each other.

    The time decides: a binary log begins again more often (RESET MASTER, a restored server) than a clock goes back, and
    backups never record a time before that of their predecessor.
    """
    newest, ahead = usable[-1], furthest(usable)
    if ahead is newest:
        return []
    other = newest if chosen is ahead else ahead
    why = "the clock was set back, or the binary log was reset (RESET MASTER, a restored server)"
    choice = f"chosen is {chosen.id}; if that is wrong: --to backup:{other.id}"
    return [f"the newest backup is ambiguous: {_named(newest)} by time, {_named(ahead)} by position ({why}); {choice}"]


def unknown_backup(server: str, backup_id: str) -> UnknownNameError:
    """The error for an id that is no backup of ``server``."""
    return UnknownNameError(
        f"server {server} has no backup {backup_id}",
        kind="backup",
        name=backup_id,
        hint=f"`backupd backups {server}` lists the backups",
    )


def _by_id(server: str, own: Sequence[BackupRecord], backup_id: str) -> tuple[BackupRecord, str]:
    found = next((b for b in own if b.id == backup_id), None)
    if found is None:
        raise unknown_backup(server, backup_id)
    if found.state is BackupState.DELETED:
        raise RefusedError(
            f"backup {backup_id} is marked as deleted",
            hint=f"while its data is there: backupd backups undelete {backup_id}",
        )
    if found.kind is BackupKind.LOGICAL:
        raise RefusedError(
            f"backup {backup_id} is a logical one; it cannot become a data directory",
            hint="choose a physical backup",
        )
    return found, "requested by its ID"


def refuse_deleted(chain: Sequence[BackupRecord]) -> None:
    """Raises RefusedError where a backup that the last of ``chain`` builds on is marked as deleted."""
    gone = [b.id for b in chain[:-1] if b.state is BackupState.DELETED]
    if gone:
        raise RefusedError(
            f"backup {chain[-1].id} builds on {', '.join(gone)}, marked as deleted",
            hint="while the data is there: " + "; ".join(f"backupd backups undelete {name}" for name in gone),
        )


def is_exactly(backup: BackupRecord, goal: AtTime | AtGtid | AtPosition) -> bool:
    """Is the moment of ``backup`` the very one that ``goal`` names?"""
    if isinstance(goal, AtTime):
        return backup.finished_at == goal.moment
    if isinstance(goal, AtPosition):
        return (backup.start.file, backup.start.pos) == (goal.file, goal.pos)
    return not goal.before and bool(backup.position.gtid) and same_gtid(backup.position.gtid, goal.gtid)


def same_gtid(one: str, other: str) -> bool:
    """Do two GTID sets have the same members, whatever their order and spacing?"""
    return _members(one) == _members(other)


def _members(gtid: str) -> frozenset[str]:
    return frozenset(member.strip().lower() for member in gtid.split(",") if member.strip())


def same_position(one: Position, other: Position) -> bool:
    """Are both the same position in the history of one server? False when either server wrote no binary log."""
    if one.gtid and other.gtid:
        return same_gtid(one.gtid, other.gtid)
    return bool(one.file) and (one.file, one.pos) == (other.file, other.pos)


def _between(usable: Sequence[BackupRecord], goal: AtTime | AtGtid | AtPosition) -> RefusedError:
    """The refusal of a target that only binary logs could reach, with the nearest points that backups can."""
    before, after = _neighbours(usable, goal)
    lines = [
        *(f"nearest before: {_named(b)}" for b in before),
        *(f"nearest after:  {_named(b)}" for b in after),
    ]
    if not lines:
        lines = [f"recoverable: {_named(b)}" for b in usable[-3:]]
    suggestion = (before or after or [usable[-1]])[0]
    return RefusedError(
        f"{goal} is not recoverable: "
        + (not_rolled(suggestion) or "no binary logs are archived, so only the backups themselves are"),
        detail="\n".join(lines),
        hint=f"ask for one of them by name: --to backup:{suggestion.id}",
    )


def _neighbours(
    usable: Sequence[BackupRecord], goal: AtTime | AtGtid | AtPosition
) -> tuple[list[BackupRecord], list[BackupRecord]]:
    """At most one backup on each side, the nearest, where the two can be ordered at all."""
    wanted: Any
    key: list[tuple[Any, BackupRecord]]
    if isinstance(goal, AtTime):
        wanted = goal.moment
        key = [(b.finished_at, b) for b in usable]
    elif isinstance(goal, AtPosition):
        wanted = _sort_key(Position(goal.file, goal.pos))[2:]
        sorted_by = [(_sort_key(b.start)[2:], b) for b in usable]
        key = [(coordinate, b) for coordinate, b in sorted_by if coordinate[0] and coordinate[0] == wanted[0]]
    else:
        domain, wanted = _sequence(goal.gtid)
        found = [(_sequence(b.position.gtid), b) for b in usable]
        key = [(number, b) for (where, number), b in found if where and where == domain]
    ordered = sorted(key, key=lambda item: item[0])
    # A before-gtid target is in front of the position its GTID names, so an equal one is after it.
    at_or_after = isinstance(goal, AtGtid) and goal.before
    before = [b for coordinate, b in ordered if coordinate < wanted or (coordinate == wanted and not at_or_after)]
    after = [b for coordinate, b in ordered if coordinate > wanted or (coordinate == wanted and at_or_after)]
    return before[-1:], after[:1]


def _sequence(gtid: str) -> tuple[str, int]:
    """(domain, sequence) of a MariaDB GTID of one domain; ("", 0) when several or of another family."""
    fields = gtid.split("-")
    if "," in gtid or len(fields) != 3 or not all(field.isdigit() for field in fields):
        return "", 0
    return fields[0], int(fields[2])


def _named(backup: BackupRecord) -> str:
    position = backup.position.gtid or (f"{backup.position.file}:{backup.position.pos}" if backup.position.file else "")
    return f"backup:{backup.id} (finished {format_time(backup.finished_at)}{', at ' + position if position else ''})"


@dataclass(frozen=True, slots=True)
class Manner:
    """How to replay: ``rate`` is that of ``method``."""

    method: ReplayMethod
    reason: str
    rate: Rate
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """``replay``: None where the backup is at the stop already. ``reason``: why this backup."""

    base: BackupRecord
    replay: ReplaySpec | None
    reason: str
    remarks: tuple[str, ...] = ()


def choose(resolution: Resolution, archive: Archive, resolver: TargetResolver, manner: Manner, cost: Cost) -> Choice:
    """The quickest way, from a backup that lacks no tables where there is one. An older backup is looked at only where
    it alone is quicker than every newer one, for the older it is, the more is to be replayed. Raises RefusedError where
    no way can be shown to be whole."""
    whole = tuple(way for way in resolution.ways if not way.base.is_partial)
    if 0 < len(whole) < len(resolution.ways):
        with contextlib.suppress(RefusedError):  # then, perhaps, from one that lacks some
            return choose(replace(resolution, ways=whole), archive, resolver, manner, cost)
    best: tuple[float, Way, ReplaySpec | None, tuple[str, ...]] | None = None
    least = float("inf")
    looked = 0
    refused: RefusedError | None = None
    costs = [cost(way.base) for way in resolution.ways]
    for number, (way, seconds) in enumerate(zip(resolution.ways, costs, strict=True)):
        if seconds >= least:
            continue
        try:
            spec, remarks = _spec(way, resolution, archive, resolver, manner)
        except RefusedError as error:
            refused = refused or error
            continue
        least = seconds
        looked += 1
        replaying = manner.rate.estimate(spec.size) if spec else 0.0
        if best is None or seconds + replaying < best[0]:
            best = seconds + replaying, way, spec, remarks
        if replaying + min(costs[number + 1 :], default=float("inf")) >= best[0]:
            break
    if best is None:
        raise refused or RefusedError("no backup reaches the target")
    _seconds, way, spec, remarks = best
    newest = way is resolution.ways[0]
    reason = (
        "the nearest backup before the target" if newest else "faster than a nearer backup, although more is replayed"
    )
    if resolution.stop is None:
        reason = "the newest restorable backup, after which nothing can be replayed"
    elif spec is None:
        reason = "its position is exactly the target"
    elif looked > 1 and newest:
        reason += f"; {looked - 1} older one{'s' if looked > 2 else ''} would take longer"
    return Choice(way.base, spec, reason, remarks)


def with_doubts(choice: Choice, resolution: Resolution, resolver: TargetResolver, moment: datetime) -> Choice:
    """With the transactions near the stop of which the logs do not say that they belong before ``moment``, or not."""
    spec, stop = choice.replay, resolution.stop
    if spec is None or stop is None:
        return choice
    last, coordinate = spec.legs[-1], file_position(stop.position) or (0, 0)
    begin = file_position(last.start) or (0, 0)
    return replace(
        choice,
        replay=replace(
            spec,
            doubtful=resolver.doubts(
                stop.branch, min(begin, coordinate), coordinate, max(resolution.end, coordinate), moment
            ),
        ),
    )


def _spec(
    way: Way, resolution: Resolution, archive: Archive, resolver: TargetResolver, manner: Manner
) -> tuple[ReplaySpec | None, tuple[str, ...]]:
    if not way.legs or resolution.stop is None:
        return None, ()
    legs: list[ReplayLeg] = []
    materials: list[Material] = []
    for leg in way.legs:
        stop = resolution.stop
        if leg.until != stop.position:  # another leg follows: at the fork
            stop = archive.exactly(archive.histories.branch(leg.branch), leg.until)
        material = resolver.material(leg, stop)
        _prove(leg, material, stop)
        legs.append(ReplayLeg(material.segments, leg.start, stop, material.size, material.transactions))
        materials.append(material)
    spec = ReplaySpec(
        legs=tuple(legs),
        method=manner.method,
        reason=manner.reason,
        size=sum(part.size for part in materials),
        transactions=sum(part.transactions for part in materials),
        server_ids=tuple(sorted({number for part in materials for number in part.server_ids})),
        exclude=manner.exclude,
    )
    remarks = dict.fromkeys(
        remark for part in materials for remark in part.remarks if remark != STATEMENTS and remark not in OF_TEMPORARY
    )
    if written := sum(part.by_statements for part in materials):
        total = sum(len(part.segments) for part in materials)
        remarks[
            f"{written} of the {total} archived pieces of binary log that are replayed hold changes of data written as "
            "statements, not rows: a replay may give other rows than on the source (UUID(), NOW(6), LIMIT "
            "without ORDER BY)"
        ] = None
    return spec, tuple(remarks)


def _prove(leg: RouteLeg, material: Material, stop: Stop) -> None:
    """Are the segments without a hole from the beginning of the first file to the stop, and does none of them hold what
    is behind a fork? Raises RefusedError."""
    ends = {span.branch: span for span in leg.spans}
    end = file_position(stop.position) or (0, 0)
    at: tuple[int, int] | None = None
    for key in material.segments:
        coordinate = (key.number, key.start)
        first = at is None and coordinate == (leg.spans[0].first[0], 0)
        within = at is not None and at[0] == key.number and key.start <= at[1] <= key.end
        next_file = at is not None and coordinate == (at[0] + 1, 0)
        if key.branch not in ends or not (first or within or next_file):
            raise _torn(leg, f"{key.branch} {key.number}:{key.start}-{key.end} does not follow")
        if _reaches_over(key.number, key.end, ends[key.branch], leg):
            raise _torn(leg, f"{key.branch} {key.number}:{key.start}-{key.end} holds more than both branches share")
        at = (key.number, key.end)
    if material.unended:
        raise _torn(leg, f"{material.unended} files are there without their ends")
    if at is None or (at < end and end != (at[0] + 1, 0)):
        raise _torn(leg, f"the segments end before {stop.file}:{stop.pos}")
    if leg.repeats and not material.repeated:
        raise RefusedError(
            f"the replay of branch {leg.branch} cannot start at {leg.start.gtid}: its binary logs do not record which "
            "transactions were executed by then, so the missing ones are unknown",
            hint="choose a backup that was taken after the fork",
        )


def _reaches_over(number: int, end: int, span: Span, leg: RouteLeg) -> bool:
    """Would a file that is not the last one be replayed beyond the end of its span?"""
    return span is not leg.spans[-1] and (number, end) > span.last and span.last != (number + 1, 0)


def _torn(leg: RouteLeg, detail: str) -> RefusedError:
    return RefusedError(
        f"the archived segments of branch {leg.branch} cannot be replayed from {leg.start.file}:{leg.start.pos}",
        detail=detail,
        hint="`backupd fsck` shows the cause; choose an earlier target",
    )
