"""Routes: through which archived files a replay goes from a restored backup to a stop, across forks where they are
known. Pure. A route that is given back has no hole; whatever cannot be shown to be without one is refused.

Two kinds of forks. A lost tail: the names of the files go on, and up to the fork a place means the same on both
branches, so both are replayed in one go. All others: another sequence of files, which is entered by GTID alone, from
the state that both share; that takes a replay of its own. The files of a server that took over (failover) repeat what
it got from the old one, and that is skipped; all others must begin exactly at the fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from backupd.model.backup.record import BackupRecord
from backupd.model.errors import RefusedError
from backupd.model.server.facts import Position
from backupd.model.server.logs import FIRST_EVENT, Branch, BranchReason, Run, Stop
from backupd.recovery.branches import Histories
from backupd.recovery.runs import Place, executed, first_of, last_of, place_of, reaches, replayable_from, same_state

_ELSE = "choose a target before it, or one after the next backup; `backupd timeline {server}` shows what is recoverable"
_OTHER = "choose a backup that was taken after the fork"


@dataclass(frozen=True, slots=True)
class Span:
    """Archived bytes of one branch, ``last`` excluded; ``(number, 0)`` stands for all of the files before it."""

    branch: str
    first: Place
    last: Place


@dataclass(frozen=True, slots=True)
class RouteLeg:
    """One replay: files of one sequence of names.

    ``branch``: in whose names it ends. ``start``: where the copy stands. ``until``: where it ends; without a file that
    is the place at which exactly its GTIDs are executed, and the last span then goes to the end of what is archived.
    ``repeats``: nothing tells what was executed before its first file, so it must be seen that this one repeats what
    is executed at the start; else something may be missing between.
    """

    branch: str
    spans: tuple[Span, ...]
    start: Position
    until: Position
    repeats: bool = False


def route(
    base: BackupRecord, branch: Branch, stop: Stop, branches: Iterable[Branch], runs: Iterable[Run]
) -> tuple[RouteLeg, ...]:
    """The legs from ``base`` to ``stop`` (in the writing of ``branch``). For many routes: ``way``.

    Raises RefusedError naming the places on both sides of a gap, or why a fork cannot be crossed.
    """
    histories = Histories(branches, runs)
    home = histories.branch_of(base)
    if home is None:
        raise RefusedError(
            f"nothing can be replayed on backup {base.id}: it is not certain which history of the server it is of",
            hint=f"choose another backup; `backupd timeline {base.server}` shows from which ones a replay can begin",
        )
    return way(histories, base.position, home, branch, stop.position)


def way(histories: Histories, start: Position, home: Branch, branch: Branch, stop: Position) -> tuple[RouteLeg, ...]:
    """As ``route``, from a place on branch ``home``. No leg at all where the place is the stop already."""
    line = histories.descent(branch)
    if home not in line:
        raise RefusedError(
            f"{stop.file}:{stop.pos} of branch {branch.id} cannot be reached from branch {home.id}: "
            "they do not descend from each other, or nobody knows where they parted",
            hint="choose a backup that was taken on that branch",
        )
    groups = _groups(line[line.index(home) :])
    legs: list[RouteLeg] = []
    at, repeats, entered = start, False, False
    forks = [following[0].fork for following in groups[1:]]
    for group, following, until in zip(groups, groups[1:], [*forks[1:], stop], strict=False):
        fork = _known_fork(following[0], at)
        for member in group[1:]:  # the same GTIDs may stand for other transactions on what a lost tail lost
            _shared_names(member, at, place_of(at) or (0, 0), entered=entered)
        if not same_state(at.gtid, fork.gtid):
            legs.append(replace(_leg(histories, group, at, fork, entered=entered), repeats=repeats))
        at, repeats = _entered(histories, following, fork, until)
        entered = True
    legs.append(replace(_leg(histories, groups[-1], at, stop, entered=entered), repeats=repeats))
    return tuple(leg for leg in legs if leg.spans)


def fork_text(branch: Branch) -> str:
    """The fork of a branch in words."""
    if branch.fork is None:
        return "an unknown place"
    place = f"{branch.fork.file}:{branch.fork.pos}" if branch.fork.file else ""
    return ", ".join(part for part in (place, f"GTID {branch.fork.gtid}" if branch.fork.gtid else "") if part)


def _groups(line: Sequence[Branch]) -> list[list[Branch]]:
    """Branches whose files have one sequence of names."""
    groups = [[line[0]]]
    for branch in line[1:]:
        if branch.names_go_on:
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return groups


# -- into another sequence of names


def _known_fork(entry: Branch, at: Position) -> Position:
    """Where a branch with names of its own parted; ``at`` is on its parent. Raises RefusedError."""
    fork = entry.fork
    if fork is None or not fork.gtid:
        raise RefusedError(
            f"the fork between branch {entry.parent} and branch {entry.id} ({entry.reason}) cannot be crossed: "
            "without GTIDs nothing tells where the new files go on",
            hint=_OTHER,
        )
    if not executed(fork.gtid, at.gtid):
        raise _not_shared(at, entry)
    return fork


def _not_shared(at: Position, branch: Branch) -> RefusedError:
    place = ", ".join(part for part in (f"{at.file}:{at.pos}" if at.file else "", at.gtid) if part)
    return RefusedError(
        f"{place} is not part of branch {branch.id}: that forked at {fork_text(branch)}",
        hint="choose an older backup, or one that was taken on that branch",
    )


def _entered(
    histories: Histories, group: Sequence[Branch], fork: Position, until: Position | None
) -> tuple[Position, bool]:
    """Where a copy that stands at the fork stands in the new names; and ``repeats`` of a leg. Raises RefusedError.

    ``until``: where the leg through the ``group`` ends. What a lost tail lost goes by the names of what came instead:
    only a file that begins before that leads on.
    """
    entry = group[0]
    end = place_of(until) if until is not None else None
    ends = [*([end] if end is not None else []), *(_lost_from(member)[1] for member in group[1:])]
    for run in reversed(histories.runs(entry.id)):
        if ends and replayable_from(run) > min(ends):
            continue
        at = Position(entry.file(replayable_from(run)[0]), FIRST_EVENT, fork.gtid)
        from_birth = first_of(run) == (entry.first_number, 0)
        if entry.reason is BranchReason.FAILOVER:
            if run.gtids_before and run.first_pos == 0 and executed(fork.gtid, run.gtids_before):
                return at, False
            if not run.gtids_before and from_birth and "," not in fork.gtid:
                return at, True
        elif from_birth and same_state(run.gtids_before, fork.gtid):
            return at, False
    raise RefusedError(
        f"the fork between branch {entry.parent} and branch {entry.id} ({entry.reason}) cannot be crossed: "
        f"what is archived of {entry.id} does not go on from {fork_text(entry)}",
        hint=_OTHER,
    )


# -- within one sequence of names


def _leg(histories: Histories, group: Sequence[Branch], start: Position, until: Position, *, entered: bool) -> RouteLeg:
    """``entered``: by GTID, at the beginning of a file that may come before the state of the copy."""
    begin, end = place_of(start), place_of(until)
    if begin is None:
        raise ValueError("a replay begins at a place")
    if end is not None and (end < begin or (entered and not executed(until.gtid, start.gtid))):
        raise RefusedError(
            f"{until.file}:{until.pos} of branch {group[-1].id} is before {start.file}:{start.pos} "
            f"{start.gtid}, where the copy would stand",
            hint="choose an older backup",
        )
    spans: list[Span] = []
    upper = end  # where the files of the next branch take over
    for branch in reversed(group):
        lower = (branch.first_number, 0) if branch is not group[0] else (0, 0)
        first = max(begin, lower)
        if upper is None:
            spans.append(Span(branch.id, first, _where_executed(histories, branch, first, until.gtid)))
        elif first < upper:
            _prove(histories, branch, first, upper)
            spans.append(Span(branch.id, first, upper))
        if branch is not group[0]:
            shared = _shared_names(branch, start, begin, entered=entered)
            upper = shared if upper is None else min(upper, shared)
    spans.reverse()
    for one, other in pairwise(spans):
        _prove_join(histories, one, other)
    return RouteLeg(group[-1].id, tuple(spans), start, until)


def _shared_names(branch: Branch, start: Position, begin: Place, *, entered: bool) -> Place:
    """Up to where the files are its parent's in a branch whose names go on. Raises RefusedError where ``start`` is
    behind the fork.

    The file with the fork is archived again as the branch's own, from its beginning; or the fork is the end of the file
    before.
    """
    fork, place = _lost_from(branch)
    if begin > place or (entered and not executed(fork.gtid, start.gtid)):
        raise _not_shared(start, branch)
    return min(place, (branch.first_number, 0))


def _lost_from(branch: Branch) -> tuple[Position, Place]:
    """Where a branch whose names go on parted. Raises RefusedError where that is not known, or is too far back."""
    place = place_of(branch.fork) if branch.fork is not None else None
    if branch.fork is None or place is None or place[0] < branch.first_number - 1:
        raise RefusedError(
            f"the fork between branch {branch.parent} and branch {branch.id} cannot be crossed: it is at "
            f"{fork_text(branch)}, and the archive goes on with {branch.file(branch.first_number)}",
            hint=_OTHER,
        )
    return branch.fork, place


def _prove(histories: Histories, branch: Branch, first: Place, last: Place) -> None:
    """Is everything from ``first`` to ``last`` there, and the first file from its beginning? Raises RefusedError."""
    run = histories.run_at(branch.id, first)
    if run is None or not reaches(run, last):
        raise hole(histories, branch, first, run)


def _prove_join(histories: Histories, one: Span, other: Span) -> None:
    """Do the files of a lost tail's branch go on from those of its parent? Raises RefusedError."""
    before, after = histories.run_at(one.branch, one.first), histories.run_at(other.branch, other.first)
    if (
        before is None
        or after is None
        or (
            before.last_number < other.first[0] == after.first_number
            and not same_state(before.gtids_after, after.gtids_before)
        )
    ):
        raise RefusedError(
            f"the files of branch {other.branch} do not go on from those of branch {one.branch}",
            detail=f"executed at the end of the one: {before.gtids_after if before else ''}; "
            f"at the beginning of the other: {after.gtids_before if after else ''}",
            hint=_ELSE.format(server=histories.server),
        )


def _where_executed(histories: Histories, branch: Branch, first: Place, gtids: str) -> Place:
    """The end of the run in which all of ``gtids`` become executed. Raises RefusedError."""
    run = histories.run_at(branch.id, first)
    if run is None or not executed(run.gtids_after, gtids):
        raise hole(histories, branch, first, run)
    return last_of(run)


def hole(histories: Histories, branch: Branch, first: Place, run: Run | None) -> RefusedError:
    """The refusal of what lies behind ``run`` (behind ``first`` where there is none): with the places on both sides."""
    after = first if run is None else last_of(run)
    before = histories.run_after(branch.id, after)
    there = f"{branch.file(after[0])}:{after[1]}"
    if before is None:
        return RefusedError(
            f"the binary logs of branch {branch.id} are archived up to {there} only",
            detail=f"gap: after {there}, nothing follows",
            hint=_ELSE.format(server=histories.server),
        )
    resumes = f"{branch.file(before.first_number)}:{before.first_pos}"
    return RefusedError(
        f"the binary logs of branch {branch.id} between {there} and {resumes} are not there",
        detail=f"gap: after {there}, before {resumes}",
        hint=_ELSE.format(server=histories.server),
    )
