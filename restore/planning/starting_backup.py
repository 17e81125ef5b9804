"""From which backup a replay begins, and what is replayed then: the way that takes least time by the rates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from backupd.engine.binlog.changes import OF_TEMPORARY, STATEMENTS
from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import ReplayLeg, ReplayMethod, ReplaySpec, Stop
from backupd.model.errors import RefusedError
from backupd.recovery.runs import place_of
from backupd.recovery.windows import RouteLeg, Span
from restore.planning.log_history import Material, TargetResolver
from restore.planning.plan import Rate
from restore.planning.target_resolution import Aim, Archive, Way

Cost = Callable[[BackupRecord], float]
"""Seconds to fetch, prepare and place a backup with all that it builds on."""


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


def choose(aim: Aim, archive: Archive, resolver: TargetResolver, manner: Manner, cost: Cost) -> Choice:
    """The quickest way, from a backup that lacks no tables where there is one. An older backup is looked at only where
    it alone is quicker than every newer one, for the older it is, the more is to be replayed. Raises RefusedError where
    no way can be shown to be whole."""
    whole = tuple(way for way in aim.ways if not way.base.is_partial)
    if 0 < len(whole) < len(aim.ways):
        with contextlib.suppress(RefusedError):  # then, perhaps, from one that lacks some
            return choose(replace(aim, ways=whole), archive, resolver, manner, cost)
    best: tuple[float, Way, ReplaySpec | None, tuple[str, ...]] | None = None
    least = float("inf")
    looked = 0
    refused: RefusedError | None = None
    costs = [cost(way.base) for way in aim.ways]
    for number, (way, seconds) in enumerate(zip(aim.ways, costs, strict=True)):
        if seconds >= least:
            continue
        try:
            spec, remarks = _spec(way, aim, archive, resolver, manner)
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
    newest = way is aim.ways[0]
    reason = (
        "the nearest backup before the target"
        if newest
        else "quicker than a nearer backup, although more is to be replayed"
    )
    if aim.stop is None:
        reason = "the newest restorable backup, behind which nothing can be replayed"
    elif spec is None:
        reason = "its position is exactly the target"
    elif looked > 1 and newest:
        reason += f"; {looked - 1} older one{'s' if looked > 2 else ''} would take longer"
    return Choice(way.base, spec, reason, remarks)


def with_doubts(choice: Choice, aim: Aim, resolver: TargetResolver, moment: datetime) -> Choice:
    """With the transactions near the stop of which the logs do not tell that they belong before ``moment``, or not."""
    spec, stop = choice.replay, aim.stop
    if spec is None or stop is None:
        return choice
    last, place = spec.legs[-1], place_of(stop.position) or (0, 0)
    begin = place_of(last.start) or (0, 0)
    return replace(
        choice,
        replay=replace(
            spec, doubtful=resolver.doubts(stop.branch, min(begin, place), place, max(aim.end, place), moment)
        ),
    )


def _spec(
    way: Way, aim: Aim, archive: Archive, resolver: TargetResolver, manner: Manner
) -> tuple[ReplaySpec | None, tuple[str, ...]]:
    if not way.legs or aim.stop is None:
        return None, ()
    legs: list[ReplayLeg] = []
    materials: list[Material] = []
    for leg in way.legs:
        stop = aim.stop if leg.until == aim.stop.position else _end_of(leg, archive)
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
        remarks[_by_statements(written, sum(len(part.segments) for part in materials))] = None
    return spec, tuple(remarks)


def _by_statements(written: int, total: int) -> str:
    return (
        f"{written} of the {total} archived pieces of binary log that are replayed hold changes of data written as "
        "statements, not rows: replayed, they may give other rows than on the source (UUID(), NOW(6), LIMIT "
        "without ORDER BY)"
    )


def _end_of(leg: RouteLeg, archive: Archive) -> Stop:
    """Where a leg ends that another follows: at the fork."""
    return archive.exactly(archive.histories.branch(leg.branch), leg.until)


def _prove(leg: RouteLeg, material: Material, stop: Stop) -> None:
    """Are the segments without a hole from the beginning of the first file to the stop, and does none of them hold what
    is behind a fork? Raises RefusedError."""
    ends = {span.branch: span for span in leg.spans}
    end = place_of(stop.position) or (0, 0)
    at: tuple[int, int] | None = None
    for key in material.segments:
        place = (key.number, key.start)
        first = at is None and place == (leg.spans[0].first[0], 0)
        within = at is not None and at[0] == key.number and key.start <= at[1] <= key.end
        next_file = at is not None and place == (at[0] + 1, 0)
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
            f"branch {leg.branch} cannot be entered at {leg.start.gtid}: its binary logs repeat nothing of what was "
            "executed by then, so what is missing between cannot be told",
            hint="choose a backup that was taken after the fork",
        )


def _reaches_over(number: int, end: int, span: Span, leg: RouteLeg) -> bool:
    """Would a file that is not the last one be replayed beyond the end of its span?"""
    return span is not leg.spans[-1] and (number, end) > span.last and span.last != (number + 1, 0)


def _torn(leg: RouteLeg, detail: str) -> RefusedError:
    return RefusedError(
        f"the archived segments of branch {leg.branch} cannot be replayed from {leg.start.file}:{leg.start.pos}",
        detail=detail,
        hint="`backupd fsck` says what happened to them; choose a target before it",
    )
