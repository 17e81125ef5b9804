"""Runs: archived binary logs folded, so that a million segments are a few hundred values. Pure.

What proves that one file follows another: their numbers, that the first one has ended and is known to be whole, and,
where the server writes GTIDs, that everything executed at the end of the one is what was executed at the beginning of
the other. Where nobody knows whether the first one is whole (``Ending.CUT``), GTIDs alone prove it. Within one file the
bytes themselves do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime

from backupd.model.server.facts import Position
from backupd.model.server.gtid import covers
from backupd.model.server.logs import Ending, Gap, Run, Segment, SegmentKey

Place = tuple[int, int]
"""Number of a file and position in it: what sorts within one branch."""

_MARIADB = re.compile(r"\s*\d+-\d+-\d+\s*(?:,|$)")


def place_of(position: Position) -> Place | None:
    """None for a server that writes no binary log."""
    number = position.file.rpartition(".")[2]
    return (int(number), position.pos) if number.isdecimal() else None


def first_of(run: Run) -> Place:
    return run.first_number, run.first_pos


def last_of(run: Run) -> Place:
    return run.last_number, run.last_pos


def replayable_from(run: Run) -> Place:
    """The first place in it that a replay can begin at: no server reads a file whose beginning is not there."""
    return run.first_number + (run.first_pos > 0), 0


def reaches(run: Run, place: Place) -> bool:
    """Is everything up to ``place`` in it? The beginning of a file is where the file before has ended."""
    after_whole_file = place[1] == 0 and place[0] == run.last_number + 1 and _may_be_whole(run)
    return place <= last_of(run) or after_whole_file


def _may_be_whole(run: Run) -> bool:
    """Has its last file ended, and can what comes next prove, or need not, that nothing followed in it?"""
    return run.ending is not Ending.OPEN and (run.ending is not Ending.CUT or bool(run.gtids_after))


def executed(one: str, other: str) -> bool:
    """Does the state ``one`` hold everything of ``other``? Both in the writing of model.gtid, "" is nothing; False for
    what cannot be compared."""
    try:
        return covers(one, other, mariadb=_MARIADB.match(one or other) is not None)
    except ValueError:
        return False


def same_state(one: str, other: str) -> bool:
    """Do both stand for the same transactions? Exactly: of MariaDB the server ids, too."""
    return one == other or (executed(one, other) and executed(other, one) and _servers(one) == _servers(other))


def _servers(gtids: str) -> frozenset[str]:
    return frozenset(re.findall(r"(\d+-\d+)-\d+", gtids)) if _MARIADB.match(gtids) else frozenset()


def run_of(segment: Segment, destination: str, stored: int = 0) -> Run:
    """A run of one segment; ``stored``: its sealed bytes."""
    return Run(
        server=segment.server,
        branch=segment.branch,
        destination=destination,
        first_number=segment.number,
        first_pos=segment.start,
        last_number=segment.number,
        last_pos=segment.end,
        gtids_before=segment.gtids_before,
        gtids_after=segment.gtids_after,
        first_at=segment.first_at,
        last_at=segment.last_at,
        confirmed_at=None,
        size=segment.size,
        stored=stored,
        segments=1,
        transactions=segment.transactions,
        remarks=segment.remarks,
        ending=segment.ending,
    )


def follows(one: Run, other: Run) -> bool:
    """Does ``other`` begin within ``one`` or exactly where it ends, and is it proved that nothing is between?"""
    if (one.server, one.branch) != (other.server, other.branch) or first_of(other) < first_of(one):
        return False
    if first_of(other) <= last_of(one):
        return True
    next_file = other.first_number == one.last_number + 1 and other.first_pos == 0
    return next_file and _may_be_whole(one) and same_state(one.gtids_after, other.gtids_before)


def linked(one: Run, other: Run) -> Run:
    """Both as one; only where ``follows``. Counts are those of both; where they overlap that is at most."""
    if last_of(other) < last_of(one) or (last_of(other) == last_of(one) and other.ending is Ending.OPEN):
        end, inside = one, other
    else:
        end, inside = other, one
    contained = first_of(end) <= first_of(inside)
    size, stored, segments, transactions = (
        getattr(end, name) + (0 if contained else getattr(inside, name))
        for name in ("size", "stored", "segments", "transactions")
    )
    begin = end if contained else one
    return replace(
        begin,
        last_number=end.last_number,
        last_pos=end.last_pos,
        gtids_after=end.gtids_after,
        ending=end.ending,
        first_at=_earliest(one.first_at, other.first_at),
        last_at=_latest(one.last_at, other.last_at),
        confirmed_at=_latest(one.confirmed_at, other.confirmed_at),
        size=size,
        stored=stored,
        segments=segments,
        transactions=transactions,
        remarks=tuple(dict.fromkeys(one.remarks + other.remarks)),
    )


def runs_of(
    segments: Iterable[Segment], destination: str, stored: Mapping[SegmentKey, int] | None = None
) -> tuple[Run, ...]:
    """The runs of what one destination holds, by branch and in log order. What lies within a longer segment of the
    same file counts as that."""
    sizes = stored or {}
    found: list[Run] = []
    for segment in _outermost(sorted(segments, key=lambda s: (s.branch, s.number, s.start, -s.end, not s.is_final))):
        one = run_of(segment, destination, sizes.get(segment.key, 0))
        if found and follows(found[-1], one):
            found[-1] = linked(found[-1], one)
        else:
            found.append(one)
    return tuple(found)


def _outermost(ordered: Iterable[Segment]) -> Iterator[Segment]:
    last: Segment | None = None
    for segment in ordered:
        inside = (
            last is not None
            and (last.branch, last.number) == (segment.branch, segment.number)
            and (segment.end < last.end or (segment.end == last.end and (last.is_final or not segment.is_final)))
        )
        if not inside:
            last = segment
            yield segment


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """What all destinations hold together, by branch and in log order: a replay may take each segment from another
    one. ``destination`` is empty where more than one contributes; sizes and counts are at most."""
    found: list[Run] = []
    for one in sorted(runs, key=lambda run: (run.branch, first_of(run), last_of(run))):
        if found and follows(found[-1], one):
            both = linked(found[-1], one)
            same = found[-1].destination == one.destination
            found[-1] = both if same else replace(both, destination="")
        else:
            found.append(one)
    return tuple(found)


def without(gap: Gap, segment: Segment) -> Gap | None:
    """``gap`` as the whole of ``segment`` leaves it, a file that has ended, from its first byte on: None where that
    file is all that was missing, the same gap where it says nothing of it."""
    after, before = place_of(gap.after), place_of(gap.before) if gap.before is not None else None
    holds = (
        segment.start == 0
        and segment.ending not in (Ending.OPEN, Ending.CUT)
        and after is not None
        and (segment.branch, segment.number) == (gap.branch, after[0])
        and segment.end > after[1]
    )
    if not holds or gap.destination:
        return gap
    if before is not None and before[0] == segment.number + 1:
        return None
    return replace(gap, after=Position(segment.file, segment.end, segment.gtids_after), from_at=segment.last_at)


def parted(runs: Iterable[Run], gaps: Iterable[Gap]) -> tuple[Run, ...]:
    """``runs`` without what recorded gaps say is not there.

    Numbers of files tell the other gaps. But where a file was lost before its end was copied and the very next one is
    there, only the record of the stream knows of it.
    """
    by_branch: dict[str, list[Gap]] = {}
    for gap in gaps:
        by_branch.setdefault(gap.branch, []).append(gap)
    found: list[Run] = []
    for run in runs:
        rest = run
        for gap in sorted(by_branch.get(run.branch, ()), key=lambda gap: place_of(gap.after) or (0, 0)):
            after, before = place_of(gap.after), place_of(gap.before) if gap.before else None
            if (
                after is None
                or before is None
                or before[0] != after[0] + 1
                or gap.destination not in ("", rest.destination)
            ):
                continue
            if last_of(rest) == after:
                rest = replace(rest, ending=Ending.OPEN)
            elif first_of(rest) <= after and before <= last_of(rest):
                found.append(
                    replace(
                        rest,
                        last_number=after[0],
                        last_pos=after[1],
                        gtids_after=gap.after.gtid,
                        last_at=gap.from_at,
                        confirmed_at=None,
                        ending=Ending.OPEN,
                    )
                )
                rest = replace(
                    rest,
                    first_number=before[0],
                    first_pos=0,
                    first_at=gap.to_at,
                    gtids_before=gap.before.gtid if gap.before else "",
                )
        found.append(rest)
    return tuple(found)


def _earliest(one: datetime | None, other: datetime | None) -> datetime | None:
    return min((at for at in (one, other) if at is not None), default=None)


def _latest(one: datetime | None, other: datetime | None) -> datetime | None:
    return max((at for at in (one, other) if at is not None), default=None)
