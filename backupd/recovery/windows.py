"""Windows: the moments that a server can be recovered to, and what interrupts them; and the routes that lead there.
Pure.

A window begins at the moment of a backup that a replay can begin from and reaches as far as the logs behind it are
archived without a hole. How far that is, was confirmed when the server was asked ("everything committed by then is in
here"). Only where it never was, the latest commit in the logs counts, itself excluded, since others of that very moment
may be missing. A backup that nothing can be replayed on is a window of one moment.

A route says through which archived files a replay goes from a restored backup to a stop, across forks where they are
known. One that is given back has no hole; whatever cannot be shown to be without one is refused. Two kinds of forks. A
lost tail: the names of the files go on, and up to the fork a position means the same on both branches, so both are
replayed in one go. All others: another sequence of files, which is entered by GTID alone, from the state that both
share; that takes a replay of its own. The files of a server that took over (failover) repeat what it got from the old
one, and that is skipped; all others must begin exactly at the fork. Nodes of a cluster that give GTIDs of their own
are entered at a position that their Xids have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise

from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import FIRST_EVENT, Branch, BranchReason, FilePosition, Run
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Position, Version, no_roll_forward
from backupd.model.text import format_time
from backupd.recovery.runs import (
    Histories,
    executed,
    file_position,
    first_of,
    last_of,
    reaches,
    replayable_from,
    same_state,
)

_ELSE = "choose a target before it, or one after the next backup; `backupd timeline {server}` shows what is recoverable"
_OTHER = "choose a backup that was taken after the fork"


@dataclass(frozen=True, slots=True)
class Span:
    """Archived bytes of one branch, ``last`` excluded; ``(number, 0)`` stands for all of the files before it."""

    branch: str
    first: FilePosition
    last: FilePosition


@dataclass(frozen=True, slots=True)
class RouteLeg:
    """One replay: files of one sequence of names.

    ``branch``: in whose names it ends. ``start``: where the copy is. ``until``: where it ends; without a file that
    is the position at which exactly its GTIDs are executed, and the last span then goes to the end of what is archived.
    ``repeats``: nothing records what was executed before its first file, so it must be seen that this one repeats what
    is executed at the start; else something may be missing between.
    """

    branch: str
    spans: tuple[Span, ...]
    start: Position
    until: Position
    repeats: bool = False


def way(histories: Histories, start: Position, home: Branch, branch: Branch, stop: Position) -> tuple[RouteLeg, ...]:
    """The legs from a position on branch ``home`` to ``stop`` (in the writing of ``branch``); none where the position
    is the stop already.

    Raises RefusedError naming the positions on both sides of a gap, or why a fork cannot be crossed.
    """
    line = histories.descent(branch)
    if home not in line:
        raise RefusedError(
            f"{stop.file}:{stop.pos} of branch {branch.id} cannot be reached from branch {home.id}: "
            "the branches are unrelated, or their fork position is unknown",
            hint="choose a backup that was taken on that branch",
        )
    groups = _groups(line[line.index(home) :])
    legs: list[RouteLeg] = []
    at, repeats, entered = start, False, False
    forks = [following[0].fork for following in groups[1:]]
    for group, following, until in zip(groups, groups[1:], [*forks[1:], stop], strict=False):
        fork = _known_fork(following[0], at)
        for member in group[1:]:  # the same GTIDs may stand for other transactions on what a lost tail lost
            _shared_names(member, at, file_position(at) or (0, 0), entered=entered)
        if not same_state(at.gtid, fork.gtid):
            legs.append(replace(_leg(histories, group, at, fork, entered=entered), repeats=repeats))
        at, repeats = _entered(histories, following, fork, until)
        entered = True
    legs.append(replace(_leg(histories, groups[-1], at, stop, entered=entered), repeats=repeats))
    return tuple(leg for leg in legs if leg.spans)


def fork_text(branch: Branch) -> str:
    """The fork of a branch in words."""
    if branch.fork is None:
        return "an unknown position"
    coordinate = f"{branch.fork.file}:{branch.fork.pos}" if branch.fork.file else ""
    return ", ".join(part for part in (coordinate, f"GTID {branch.fork.gtid}" if branch.fork.gtid else "") if part)


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
            "without GTIDs its position in the new files is unknown",
            hint=_OTHER,
        )
    if not executed(fork.gtid, at.gtid):
        raise _not_shared(at, entry)
    return fork


def _not_shared(at: Position, branch: Branch) -> RefusedError:
    coordinate = ", ".join(part for part in (f"{at.file}:{at.pos}" if at.file else "", at.gtid) if part)
    return RefusedError(
        f"{coordinate} is not part of branch {branch.id}: that forked at {fork_text(branch)}",
        hint="choose an older backup, or one that was taken on that branch",
    )


def _entered(
    histories: Histories, group: Sequence[Branch], fork: Position, until: Position | None
) -> tuple[Position, bool]:
    """The position of a copy that is at the fork, in the new names; and ``repeats`` of a leg. Raises RefusedError.

    ``until``: where the leg through the ``group`` ends. What a lost tail lost goes by the names of what came instead:
    only a file that begins before that leads on.
    """
    entry = group[0]
    if entry.entry is not None and histories.run_at(entry.id, file_position(entry.entry) or (0, 0)) is not None:
        return entry.entry, False
    end = file_position(until) if until is not None else None
    ends = [*([end] if end is not None else []), *(_lost_from(member)[1] for member in group[1:])]
    for run in reversed(histories.runs(entry.id)) if entry.entry is None else ():
        if ends and replayable_from(run) > min(ends):
            continue
        at = Position(entry.file(replayable_from(run)[0]), FIRST_EVENT, fork.gtid)
        from_birth = first_of(run) == (entry.first_number, 0)
        if entry.reason in (BranchReason.FAILOVER, BranchReason.NODE_CHANGED):
            if run.gtids_before and run.first_pos == 0 and executed(fork.gtid, run.gtids_before):
                return at, False
            if not run.gtids_before and from_birth and "," not in fork.gtid:
                return at, True
        elif from_birth and same_state(run.gtids_before, fork.gtid):
            return at, False
    raise RefusedError(
        f"the fork between branch {entry.parent} and branch {entry.id} ({entry.reason}) cannot be crossed: "
        f"what is archived of {entry.id} does not continue from {fork_text(entry)}",
        hint=_OTHER,
    )


# -- within one sequence of names


def _leg(histories: Histories, group: Sequence[Branch], start: Position, until: Position, *, entered: bool) -> RouteLeg:
    """``entered``: by GTID, at the beginning of a file that may come before the state of the copy."""
    begin, end = file_position(start), file_position(until)
    if begin is None:
        raise ValueError("a replay begins at a position")
    if end is not None and (end < begin or (entered and not executed(until.gtid, start.gtid))):
        raise RefusedError(
            f"{until.file}:{until.pos} of branch {group[-1].id} is before {start.file}:{start.pos} "
            f"{start.gtid}, the position of the restored copy",
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


def _shared_names(branch: Branch, start: Position, begin: FilePosition, *, entered: bool) -> FilePosition:
    """Up to where the files are its parent's in a branch whose names go on. Raises RefusedError where ``start`` is
    behind the fork.

    The file with the fork is archived again as the branch's own, from its beginning; or the fork is the end of the file
    before.
    """
    fork, coordinate = _lost_from(branch)
    if begin > coordinate or (entered and not executed(fork.gtid, start.gtid)):
        raise _not_shared(start, branch)
    return min(coordinate, (branch.first_number, 0))


def _lost_from(branch: Branch) -> tuple[Position, FilePosition]:
    """Where a branch whose names go on parted. Raises RefusedError where that is not known, or is too far back."""
    coordinate = file_position(branch.fork) if branch.fork is not None else None
    if branch.fork is None or coordinate is None or coordinate[0] < branch.first_number - 1:
        raise RefusedError(
            f"the fork between branch {branch.parent} and branch {branch.id} cannot be crossed: it is at "
            f"{fork_text(branch)}, and the archive continues with {branch.file(branch.first_number)}",
            hint=_OTHER,
        )
    return branch.fork, coordinate


def _prove(histories: Histories, branch: Branch, first: FilePosition, last: FilePosition) -> None:
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
            f"the files of branch {other.branch} do not continue those of branch {one.branch}",
            detail=f"executed at the end of the one: {before.gtids_after if before else ''}; "
            f"at the beginning of the other: {after.gtids_before if after else ''}",
            hint=_ELSE.format(server=histories.server),
        )


def _where_executed(histories: Histories, branch: Branch, first: FilePosition, gtids: str) -> FilePosition:
    """The end of the run in which all of ``gtids`` become executed. Raises RefusedError."""
    run = histories.run_at(branch.id, first)
    if run is None or not executed(run.gtids_after, gtids):
        raise hole(histories, branch, first, run)
    return last_of(run)


def hole(histories: Histories, branch: Branch, first: FilePosition, run: Run | None) -> RefusedError:
    """The refusal of what is behind ``run`` (behind ``first`` where there is none): with the positions on both
    sides."""
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
        f"the binary logs of branch {branch.id} between {there} and {resumes} are missing",
        detail=f"gap: after {there}, before {resumes}",
        hint=_ELSE.format(server=histories.server),
    )


_INSTANT = timedelta(microseconds=1)
_SKEW = timedelta(seconds=10)
"""Two hosts of ours may differ by so much, and reading a catalog may take as long. What was confirmed at a moment that
is further ahead was set by a clock that was wrong, and says nothing."""
_TRIES = 8
REPLAY_STOPS = "a restore to a later moment stops at the first change"
"""In a warning of a backup: binary logs are replayed onto it only as long as they do not change some of its tables."""

Repeats = Callable[[RouteLeg], bool]
"""Does a leg repeat, at its beginning, something that is executed where the copy is? Only the index has it."""


def nobody_knows(_leg: RouteLeg) -> bool:
    """Where no index of the files can be asked: no leg is known to repeat what came before."""
    return False


@dataclass(frozen=True, slots=True)
class Window(Document):
    """All moments from ``begin`` to ``end``, both included. ``branch``: "" where that of its ``base`` (a backup) is not
    known. ``destinations``: where a base and logs of it are; each alone may reach less far. ``conditions``: what makes
    the logs inside doubtful. ``run``: those logs, None for a backup alone."""

    begin: datetime = field(metadata=json_key("from"))
    end: datetime = field(metadata=json_key("to"))
    reason_end: str
    branch: str
    base: BackupRecord = field(metadata=HIDDEN)
    run: Run | None = field(metadata=HIDDEN)
    destinations: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    """What makes it doubtful."""

    @property
    @computed("base", after="branch")
    def base_id(self) -> str:
        """The backup that a restore to it begins with."""
        return self.base.id

    def holds(self, moment: datetime) -> bool:
        """Can the server be recovered to this moment?"""
        return self.begin <= moment <= self.end


def believed(confirmed_at: datetime, now: datetime) -> datetime | None:
    """What a moment that was confirmed tells by ``now``; None for one that was told by a clock that was wrong."""
    return min(confirmed_at, now) if confirmed_at <= now + _SKEW else None


def complete_until(run: Run, now: datetime) -> datetime | None:
    """The moment by which everything that was committed is in ``run``; None where nothing records it.

    A session may stamp its transactions with any time, so one stamp shows nothing of when the archive ends: what was
    confirmed counts, and where something was, nothing else does. Where the server was never asked (the catalog was made
    anew from a destination) the latest stamp has to do. One in the future is certainly none of a commit; and when a
    segment was stored, which would bound it closer, no run knows.
    """
    if run.confirmed_at is not None:
        return believed(run.confirmed_at, now)
    return run.last_at - _INSTANT if run.last_at is not None and run.last_at <= now else None


def abandoned(histories: Histories, latest: Window) -> str:
    """Why ``latest``, the last of all windows, is not of the server's present history; "" where it is, as far as is
    known."""
    present = histories.current
    if present is None or latest.branch == present.id or (not latest.branch and latest.begin >= present.noticed_at):
        return ""
    return (
        f"this is not the server's present history: since {format_time(present.noticed_at)} it continues as branch "
        f"{present.id} ({present.reason}), of which nothing can be restored yet; take a full backup now: "
        f"backupd backup {present.server} --kind full"
    )


def windows(
    histories: Histories, bases: Sequence[BackupRecord], *, now: datetime, repeats: Repeats = nobody_knows
) -> tuple[Window, ...]:
    """In the order of their ends, those of the server's present history last.

    ``bases``: restorable backups of the server, by time. ``repeats`` is asked of the files of a server that took over
    where nothing was executed before the first of them: they lead on only if they repeat what both servers share.
    """
    found: list[Window] = []
    open_at: dict[tuple[str, int, int], int] = {}
    latest: Window | None = None
    for base in bases:
        if latest is not None and latest.run is not None and latest.begin <= base.finished_at <= latest.end:
            continue
        latest = _of(histories, base, now)
        if latest.run is not None:
            key = (latest.run.branch, latest.run.first_number, latest.run.first_pos)
            number = open_at.setdefault(key, len(found))
            if number < len(found) and latest.begin <= found[number].end:
                latest = found[number] = replace(found[number], begin=min(found[number].begin, latest.begin))
                continue
        found.append(latest)
    _widen_across_forks(histories, found, now, repeats)
    rank = {branch.id: number for number, branch in enumerate(histories.branches)}

    def order(window: Window) -> tuple[int, datetime]:
        return rank[window.branch] if window.branch else _branch_by_time(histories, window.end), window.end

    return tuple(sorted(found, key=order))


def _branch_by_time(histories: Histories, moment: datetime) -> int:
    return max((number for number, branch in enumerate(histories.branches) if branch.noticed_at <= moment), default=0)


def goes_on(histories: Histories, last: Window) -> bool:
    """Does ``last``, the last of all windows, reach as far as the server's present history is archived? Then it goes on
    by itself with what is confirmed next, as long as nothing but that comes."""
    present = histories.current
    if present is None or last.run is None or last.branch != present.id:
        return False
    return last_of(last.run) == last_of(histories.runs(present.id)[-1])


def _of(histories: Histories, base: BackupRecord, now: datetime) -> Window:
    branch = histories.branch_of(base)
    coordinate = file_position(base.start)
    run = histories.run_at(branch.id, coordinate) if branch is not None and coordinate is not None else None
    if branch is None or run is None or not_rolled(base):
        why, at = _why_a_point(histories, base, branch), base.finished_at
        return Window(at, at, why, branch.id if branch else "", base, None)
    end, reason = _end(histories, branch, run, now)
    return Window(base.finished_at, max(end, base.finished_at), reason, branch.id, base, run, conditions=run.remarks)


def not_rolled(base: BackupRecord) -> str:
    """Why no binary log is replayed onto ``base``, whatever is archived; "" where it is."""
    return no_roll_forward(base.flavour, Version.parse(base.server_version)) if base.server_version else ""


def stops_replay(base: BackupRecord) -> tuple[str, ...]:
    """What ``base`` itself says of tables whose changes no replay onto it can make."""
    return tuple(warning for warning in base.warnings if REPLAY_STOPS in warning)


def _why_a_point(histories: Histories, base: BackupRecord, branch: Branch | None) -> str:
    if why := not_rolled(base):
        return why
    if not histories.branches:
        return "no binary logs are archived"
    if not base.start.file:
        return "the server wrote no binary log"
    if branch is None:
        return "the branch of this backup is uncertain, so no binary log is replayed on it"
    return f"the binary log is not archived at {base.start.file}:{base.start.pos}, where a replay would start"


def _end(histories: Histories, branch: Branch, run: Run, now: datetime) -> tuple[datetime, str]:
    """Until when a run reaches, and why no further."""
    end = complete_until(run, now) or datetime.min.replace(tzinfo=now.tzinfo)
    there = f"{branch.file(run.last_number)}:{run.last_pos}"
    following = histories.run_after(branch.id, last_of(run))
    if following is not None:
        resumes = f"{branch.file(following.first_number)}:{following.first_pos}"
        if following.first_at is not None:  # the earliest time there, which a session may have set into the past
            end = min(end, max(following.first_at, run.last_at or following.first_at))
        return end, f"gap: the binary logs between {there} and {resumes} are missing"
    later = histories.next_of(branch)
    if later is not None:
        return min(end, later.noticed_at), (
            f"the server's history continues as branch {later.id} ({later.reason}); this one is archived up to {there}"
        )
    if run.confirmed_at is None:
        return end, f"archived up to {there}; the server was not checked for later transactions"
    if believed(run.confirmed_at, now) is None:
        return end, (
            f"archived up to {there}; the time of the last check is unreliable, because the clock was wrong "
            f"({format_time(run.confirmed_at)})"
        )
    return end, f"everything committed by then is archived, up to {there}"


def _widen_across_forks(histories: Histories, found: list[Window], now: datetime, repeats: Repeats) -> None:
    """Branches can be entered from a backup of one they descend from, too."""
    for branch in histories.branches[1:]:
        line = histories.descent(branch)
        runs = histories.runs(branch.id)
        if len(line) < 2 or not runs:
            continue
        run = runs[0]
        base = _entrance(histories, found, line, run, repeats)
        if base is None:
            continue
        begin = max(base.finished_at, histories.since(branch) or branch.noticed_at)
        end, reason = _end(histories, branch, run, now)
        if end < begin:
            continue
        crossing = Window(begin, end, reason, branch.id, base, run, conditions=run.remarks)
        inside = [window for window in found if window.run is run and window.begin <= end]
        found[:] = [window for window in found if window not in inside]
        found.append(replace(crossing, begin=min([begin, *(window.begin for window in inside)])))


def _entrance(
    histories: Histories, found: Sequence[Window], line: Sequence[Branch], run: Run, repeats: Repeats
) -> BackupRecord | None:
    """The newest backup of an ancestor from which all of ``run`` can be replayed."""
    branch = line[-1]
    stop = Position(branch.file(run.last_number), run.last_pos, run.gtids_after)
    ancestors = {ancestor.id: ancestor for ancestor in line[:-1]}
    candidates = [window for window in found if window.run is not None and window.branch in ancestors]
    for window in sorted(candidates, key=lambda window: window.begin, reverse=True)[:_TRIES]:
        home = histories.branch_of(window.base)
        if home is None:
            continue
        try:
            legs = way(histories, window.base.start, home, branch, stop)
        except RefusedError:
            continue
        if all(repeats(leg) for leg in legs if leg.repeats):
            return window.base
    return None
