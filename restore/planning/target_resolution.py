"""Where a target is in the archived binary logs, and from which backups it can be reached. Pure but for the resolver
that it asks.

``History``: what a plan knows of archived binary logs, branches, runs and gaps as values, and a resolver for what only
the index of the transactions shows. ``clock_skew``: backups that a time target must not begin from without a word,
since what they hold was partly stamped later than it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice, pairwise
from typing import Protocol

from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import Branch, FilePosition, Gap, Run, SegmentKey, Stop
from backupd.model.errors import NotFoundError, RefusedError
from backupd.model.server_facts import Position
from backupd.model.text import format_duration, format_time
from backupd.recovery.runs import (
    Histories,
    executed,
    file_position,
    first_of,
    last_of,
    parted,
    same_state,
)
from backupd.recovery.windows import RouteLeg, Window, complete_until, hole, not_rolled, way, windows
from restore.planning.target import (
    AtGtid,
    AtPosition,
    AtTime,
    Goal,
    Latest,
    Older,
    Target,
    end_of,
    later_known,
    past_end,
    refuse_past_end,
)

LOOK_BACK = timedelta(hours=1)
"""Of log in front of a backup, in which later times than the target's are looked for."""
MOST_BASES = 64
"""Backups that are compared, the nearest ones: what is still further back has much more to replay."""
_MOST_TRIES = 2000
_MOST_NEAREST = 16
_OLD = 3600.0
"""Seconds behind the present that are worth a remark."""


@dataclass(frozen=True, slots=True)
class Material:
    """What a leg replays. ``segments`` in log order, without a hole, from the first byte of the file that holds the
    start. ``size`` in bytes and ``transactions`` between start and stop, at most; ``repeated``: how many of them are
    executed at the start already, by their GTIDs; ``unended``: how many files before the last one have no segment that
    ends them. ``remarks`` of the segments; ``by_statements``: how many of them hold data changes that were written as
    statements."""

    segments: tuple[SegmentKey, ...]
    size: int
    transactions: int
    server_ids: tuple[int, ...]
    repeated: int = 0
    unended: int = 0
    remarks: tuple[str, ...] = ()
    by_statements: int = 0


class TargetResolver(Protocol):
    """Answers about one server's archive, from the catalog's rows and the sealed indexes. Places are of the branch that
    is named, ends excluded.

    Every method raises DestinationError, DamagedError or KeyUnusableError where an index cannot be read.
    """

    def stop_for_time(
        self, branch: str, start: FilePosition, end: FilePosition, moment: datetime, since: datetime
    ) -> Stop | None:
        """Before the first transaction, in log order, in ``[start, end)`` that committed later than ``moment``; None
        when none did. ``since``: everything there committed later than this, by our clock; it shows false times (see
        ``recovery.stamps``). ``at`` of the Stop is None when it is at ``start``."""

    def stop_for_gtid(self, branch: str, gtid: str, *, before: bool) -> Stop | None:
        """Right behind the very transaction that ``gtid`` names, whatever numbers came before it; of a set the first
        place where all of it is executed. With ``before`` the position where the transaction begins. None when the
        branch's own files do not hold it, and do not begin with exactly that executed either."""

    def later_before(self, branch: str, coordinate: FilePosition, moment: datetime, since: datetime) -> Stop | None:
        """Before the first transaction, in log order, in front of ``coordinate`` that carries a time later than
        ``moment``; of those behind the last one that carries ``since`` or an earlier time. None where none does."""

    def stop_for_position(self, branch: str, number: int, pos: int) -> Stop | None:
        """That place, with what is executed there. None when it is not archived. Raises RefusedError when it is
        inside a transaction, naming where that begins and ends."""

    def doubts(
        self, branch: str, start: FilePosition, stop: FilePosition, end: FilePosition, moment: datetime
    ) -> tuple[str, ...]:
        """In words, of a stop for a time: transactions behind ``stop`` of which the log does not say that they were
        later (stamps of whole seconds, or earlier ones: a clock that went back), and those before it with a later
        stamp."""

    def repeats(self, leg: RouteLeg) -> bool:
        """Does the first transaction of the leg's files that is executed at its start belong to them? False where their
        index cannot be read here."""

    def material(self, leg: RouteLeg, stop: Stop) -> Material:
        """What is between the leg's start and ``stop``, through its spans."""


@dataclass(frozen=True, slots=True)
class History:
    """Everything that is archived of one server. ``resolver`` is asked about this server only."""

    branches: Sequence[Branch]
    runs: Sequence[Run]
    gaps: Sequence[Gap]
    resolver: TargetResolver


@dataclass(frozen=True, slots=True)
class ClockSkew:
    """The log in front of ``base``, which is of branch ``home``, carries times later than the target, as one does when
    the server's clock was set back; ``stop``: before the first of these transactions."""

    base: BackupRecord
    home: Branch
    stop: Stop

    def __str__(self) -> str:
        first = self.stop.next_gtid or f"{self.stop.file}:{self.stop.pos}"
        later = f" of {format_time(self.stop.next_at)}" if self.stop.next_at else ""
        return (
            f"before backup {self.base.id} the log holds transactions with times later than the target (the "
            f"server's clock was set back), from {first}{later} on"
        )


def clock_skew(
    base: BackupRecord,
    home: Branch,
    moment: datetime,
    later_before: Callable[[str, FilePosition, datetime, datetime], Stop | None],
) -> ClockSkew | None:
    """``later_before``: of the resolver."""
    coordinate = file_position(base.start)
    stop = later_before(home.id, coordinate, moment, base.started_at - LOOK_BACK) if coordinate is not None else None
    return ClockSkew(base, home, stop) if stop is not None else None


@dataclass(frozen=True, slots=True)
class Way:
    """A backup and how a replay goes from it to the stop; no leg where it is there already."""

    base: BackupRecord
    legs: tuple[RouteLeg, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """``stop``: None where a backup alone is the target. ``ways`` to it, the nearest backup first. ``end``: of what is
    archived behind the stop. ``remarks``: what an operator should know of the choice. Of the newest moment ``older``
    shows what is known to exist behind it (None: nothing), and ``ends`` up to when it goes."""

    stop: Stop | None
    ways: tuple[Way, ...]
    end: FilePosition = (0, 0)
    remarks: tuple[str, ...] = ()
    older: Older | None = None
    ends: datetime | None = None


class Archive:
    """The archive of one server and the backups that replays can begin from. ``usable``: restorable ones, by time;
    ``only``: the id of the one that is to be taken."""

    def __init__(
        self, history: History, usable: Sequence[BackupRecord], *, now: datetime, only: str | None = None
    ) -> None:
        self._resolver = history.resolver
        self._usable = usable
        self._only = only
        self._now = now
        self.histories = Histories(history.branches, parted(history.runs, history.gaps))
        self._shows = f"`backupd timeline {self.histories.server}` shows"

    def windows(self) -> tuple[Window, ...]:
        """The spans of time that can be restored, in the order of their ends; those of the present history last."""
        return windows(self.histories, self._usable, now=self._now, repeats=self._resolver.repeats)

    def resolve(self, target: Target) -> Resolution:
        """Raises NotFoundError (an unknown branch, a GTID that is nowhere) and RefusedError: it cannot be reached."""
        goal = target.goal
        if isinstance(goal, Latest):
            return self._latest(target.branch)
        self._refuse_unrolled(goal)
        if isinstance(goal, AtTime):
            return self._time(goal.moment, target.branch)
        branch = self.histories.branch(target.branch) if target.branch else self.histories.branches[-1]
        if isinstance(goal, AtGtid):
            stop = self._gtid(goal, branch)
        elif isinstance(goal, AtPosition):
            stop = self._position(goal, branch)
        else:
            raise TypeError(f"{goal} needs no binary log")
        return self._reached(stop, None)

    def _refuse_unrolled(self, goal: Goal) -> None:
        """Raises RefusedError where binary logs can be replayed onto no backup."""
        reasons = [not_rolled(base) for base in self._usable if self._only in (None, base.id)]
        if reasons and all(reasons):
            raise RefusedError(
                f"{goal} is not recoverable: {reasons[-1]}",
                hint=f"restore a backup: --to backup:{self._usable[-1].id}; {self._shows} the moments of all",
            )

    def fork_stop(self, branch: Branch) -> Stop:
        """Where a branch parted from its parent, in the parent's writing. Raises RefusedError."""
        if branch.fork is None or branch.parent is None:
            raise RefusedError(
                f"the fork position of branch {branch.id} is unknown", hint="choose a backup taken after it"
            )
        return self.exactly(self.histories.branch(branch.parent), branch.fork)

    def exactly(self, branch: Branch, position: Position) -> Stop:
        """A position of ``branch``; where only its GTIDs are known, the one where exactly they are executed. Raises
        RefusedError where the branch was never in that state."""
        if position.file:
            return Stop(branch.id, position.file, position.pos, position.gtid)
        for ancestor in reversed(self.histories.descent(branch)):
            stop = self._resolver.stop_for_gtid(ancestor.id, position.gtid, before=False)
            if stop is not None and same_state(stop.gtids, position.gtid):
                return stop
            if not ancestor.names_go_on:
                break
        raise RefusedError(
            f"branch {branch.id} was never exactly at {position.gtid}, where the next branch begins",
            hint="choose a backup that was taken after the fork",
        )

    # -- latest

    def _latest(self, wanted: str | None) -> Resolution:
        if wanted is not None:
            self.histories.branch(wanted)
        found = [window for window in self.windows() if wanted in (None, window.branch)]
        if not found:
            raise RefusedError(f"nothing is recoverable on branch {wanted}", hint=f"{self._shows} what is recoverable")
        window = found[-1]
        older = later_known(self.histories, window, named=wanted is not None, now=self._now)
        ends = end_of(window, self._now)
        remarks = (
            [f"the newest recoverable moment is {format_duration(age)} old"]
            if (age := (self._now - ends).total_seconds()) > _OLD
            else []
        )
        if window.run is None:
            return Resolution(
                None, (Way(window.base, ()),), remarks=(*remarks, window.reason_end), older=older, ends=ends
            )
        resolution = self._reached(_end_of(self.histories.branch(window.branch), window.run), None, remarks)
        return replace(resolution, older=older, ends=ends)

    # -- a time

    def _time(self, moment: datetime, wanted: str | None) -> Resolution:
        if moment > self._now:
            raise RefusedError(
                f"{format_time(moment)} is in the future",
                hint="use --to latest for the newest recoverable point in time",
            )
        refused: list[RefusedError] = []
        for branch in self._branches_at(moment, wanted):
            try:
                stop, remarks = self._stop_for_time(branch, moment)
                return self._reached(stop, moment, [*self._elsewhere(branch, moment, wanted), *remarks])
            except RefusedError as error:
                refused.append(error)
        raise refused[0]

    def _branches_at(self, moment: datetime, wanted: str | None) -> list[Branch]:
        """On which branch the server was at a moment; where that is not certain, more than one."""
        if wanted is not None:
            return [self.histories.branch(wanted)]
        branches = self.histories.branches
        index = max((number for number, branch in enumerate(branches) if branch.noticed_at <= moment), default=0)
        found = [branches[index]]
        for branch in branches[index + 1 :]:
            since = self.histories.since(branch)
            if since is None or since > moment:
                break
            found.append(branch)
        return found

    def _elsewhere(self, branch: Branch, moment: datetime, wanted: str | None) -> list[str]:
        later = self.histories.next_of(branch)
        if wanted is not None or later is None or (self.histories.since(later) or later.noticed_at) > moment:
            return []
        other = f"--to {format_time(moment)}@{later.id}"
        here = f"this is branch {branch.id}; to use the later branch: {other}"
        return [f"the server's history forked near this time ({later.reason}): {here}"]

    def _stop_for_time(self, branch: Branch, moment: datetime) -> tuple[Stop, list[str]]:
        """With what is to be said of it. A stop must not depend on the backup that happens to be the nearest: where
        transactions right before that carry a later time, it is in front of them."""
        line = self.histories.descent(branch)
        refused: list[RefusedError] = []
        behind: list[ClockSkew] = []
        for base, home in self._nearest(line, moment):
            if (late := clock_skew(base, home, moment, self._resolver.later_before)) is not None:
                behind.append(late)
            elif behind:
                break
            else:
                try:
                    return self._first_later(base, line[line.index(home) :], moment), []
                except RefusedError as error:
                    refused.append(error)
        for late in behind[-1:]:
            with suppress(RefusedError):
                self._refuse_unknown(late, line, moment)
                next(self._ways(late.stop, moment))
                return late.stop, [f"{late}: this stops before them"]
        for late in behind:
            try:
                return (
                    self._first_later(late.base, line[line.index(late.home) :], moment),
                    [f"not certain: {late}; no older backup can be used, so they are restored"],
                )
            except RefusedError as error:
                refused.append(error)
        raise (
            refused[0]
            if refused
            else RefusedError(
                f"{format_time(moment)} is not recoverable: no backup of branch {branch.id} is older, as far as "
                "is known",
                hint=f"choose a target inside a window; {self._shows} them",
            )
        )

    def _refuse_unknown(self, late: ClockSkew, line: Sequence[Branch], moment: datetime) -> None:
        """Raises RefusedError where not all that was committed by ``moment`` is known to be archived."""
        run = self.histories.run_at(late.home.id, file_position(late.stop.position) or (0, 0))
        if run is not None:
            others = [one for branch in line[line.index(late.home) :] for one in self.histories.runs(branch.id)]
            refuse_past_end(self.histories, late.home, run, others, moment, later=late.stop.next_at, now=self._now)

    def _nearest(self, line: Sequence[Branch], moment: datetime) -> Iterator[tuple[BackupRecord, Branch]]:
        """The newest backups before ``moment`` of the branches of a descent."""
        before = (base for base in reversed(self._usable) if base.finished_at <= moment)
        homes = ((base, self.histories.branch_of(base)) for base in before)
        return islice(((base, home) for base, home in homes if home is not None and home in line), _MOST_NEAREST)

    def _first_later(self, base: BackupRecord, line: Sequence[Branch], moment: datetime) -> Stop:
        """Before the first transaction behind ``base`` that committed later, in the history that ``line`` ends with.

        Where that cannot be followed to its end, it may be followed far enough: into a branch before.
        """
        refused: list[RefusedError] = []
        for here, child in zip(reversed(line), [None, *reversed(line[1:])], strict=True):
            try:
                run = self._run_from(base, here, line)
                end, fork = _end_of(here, run), self.fork_stop(child) if child is not None else None
                shared = fork is not None and (file_position(fork.position) or (0, 0)) <= last_of(run)
                if shared and fork is not None:
                    end = replace(fork, branch=here.id)
                legs = way(self.histories, base.start, line[0], here, end.position)
            except RefusedError as error:
                refused.append(error)
                continue
            found = self._search(base, line[0], legs, moment)
            if found is not None:
                crossed = [self.histories.run_at(span.branch, span.first) for leg in legs for span in leg.spans]
                refuse_past_end(self.histories, here, run, crossed, moment, later=found.next_at, now=self._now)
                return found
            if not shared:
                return self._at_end(here, run, moment)
            break
        raise refused[0]

    def _run_from(self, base: BackupRecord, here: Branch, line: Sequence[Branch]) -> Run:
        """The run of ``here`` by which a replay from ``base``, which is on the first of ``line``, gets there."""
        begin = here.first_number, 0
        if all(member.names_go_on for member in line[1 : line.index(here) + 1]):
            begin = max(begin, file_position(base.start) or begin)
        entered = here is not line[0] and not here.names_go_on
        run = next(iter(self.histories.runs(here.id)), None) if entered else self.histories.run_at(here.id, begin)
        if run is None:
            raise RefusedError(
                f"the binary logs of branch {here.id} at {here.file(begin[0])}:{begin[1]} are missing",
                hint=f"choose a target inside a window; {self._shows} them",
            )
        return run

    def _search(self, base: BackupRecord, home: Branch, legs: Sequence[RouteLeg], moment: datetime) -> Stop | None:
        before = Stop(home.id, base.start.file, base.start.pos, base.start.gtid)
        for leg in legs:
            by_gtid = leg.start != base.start
            for span in leg.spans:
                found = self._resolver.stop_for_time(span.branch, span.first, span.last, moment, base.started_at)
                if found is not None:
                    # What a server repeats of its former source was committed there later.
                    repeated = by_gtid and not executed(found.gtids, leg.start.gtid)
                    return before if repeated else found
            before = self.exactly(self.histories.branch(leg.branch), leg.until)
        return None

    def _at_end(self, branch: Branch, run: Run, moment: datetime) -> Stop:
        """All that is archived was committed by ``moment``; is it all that was committed by then?"""
        known = complete_until(run, self._now) if run.confirmed_at is not None else None
        if known is None or moment > known:
            raise past_end(self.histories, branch, run, moment, known)
        return _end_of(branch, run)

    # -- a GTID, a position

    def _gtid(self, goal: AtGtid, branch: Branch) -> Stop:
        line = self.histories.descent(branch)
        for here, child in zip(reversed(line), [None, *reversed(line[1:])], strict=True):
            runs = self.histories.runs(here.id)
            is_known = same_state if here.flavour == "mariadb" else executed
            if not runs or (runs[0].gtids_before and is_known(runs[0].gtids_before, goal.gtid)):
                continue  # executed before the first file of this branch
            stop = self._resolver.stop_for_gtid(here.id, goal.gtid, before=goal.before)
            if stop is not None and self._belongs(stop, here, child, line):
                return stop
        others = [
            other
            for other in self.histories.branches
            if other is not branch and self._resolver.stop_for_gtid(other.id, goal.gtid, before=goal.before) is not None
        ]
        raise self._in_a_hole(
            line,
            lambda _branch, one, other: (
                executed(other.gtids_before, goal.gtid) and not executed(one.gtids_after, goal.gtid)
            ),
        ) or _nowhere(str(goal), branch, others)

    def _position(self, goal: AtPosition, branch: Branch) -> Stop:
        base, _, digits = goal.file.rpartition(".")
        line = self.histories.descent(branch)
        for here, child in zip(reversed(line), [None, *reversed(line[1:])], strict=True):
            if here.basename == base and int(digits) >= here.first_number:
                stop = self._resolver.stop_for_position(here.id, int(digits), goal.pos)
                if stop is not None and self._belongs(stop, here, child, line):
                    return stop
            if not here.names_go_on:
                break  # the same name means another file on an earlier branch
        others = [
            other
            for other in self.histories.branches
            if other is not branch
            and other.basename == base
            and self._resolver.stop_for_position(other.id, int(digits), goal.pos) is not None
        ]
        coordinate = int(digits), goal.pos
        raise self._in_a_hole(
            line, lambda here, one, other: here.basename == base and last_of(one) < coordinate < first_of(other)
        ) or _nowhere(str(goal), branch, others)

    def _in_a_hole(
        self, line: Sequence[Branch], lies_between: Callable[[Branch, Run, Run], bool]
    ) -> RefusedError | None:
        """The refusal of a target that is between two runs of a branch; None where it is between none."""
        for branch in reversed(line):
            for one, other in pairwise(self.histories.runs(branch.id)):
                if lies_between(branch, one, other):
                    return hole(self.histories, branch, last_of(one), one)
        return None

    def _belongs(self, stop: Stop, here: Branch, child: Branch | None, line: Sequence[Branch]) -> bool:
        """Is a stop in the files of ``here`` part of the history that ``line`` ends with, and not a repetition of what
        its parent's files hold?"""
        entered = here.entered_at if here is not line[0] and not here.names_go_on else None
        if entered is not None and not executed(stop.gtids, entered.gtid):
            return False
        if child is None:
            return True
        coordinate, fork = file_position(stop.position), file_position(self.fork_stop(child).position)
        return coordinate is not None and fork is not None and coordinate <= fork

    # -- from where

    def _reached(self, stop: Stop, moment: datetime | None, remarks: Sequence[str] = ()) -> Resolution:
        ways = tuple(self._ways(stop, moment))
        coordinate = file_position(stop.position)
        run = self.histories.run_at(stop.branch, coordinate) if coordinate is not None else None
        return Resolution(stop, ways, last_of(run) if run else coordinate or (0, 0), tuple(remarks))

    def _ways(self, stop: Stop, moment: datetime | None) -> Iterator[Way]:
        """Raises RefusedError, that of the nearest backup, where there is none."""
        branch = self.histories.branch(stop.branch)
        line = self.histories.descent(branch)
        coordinate = file_position(stop.position) or (0, 0)
        one_sequence = all(member.names_go_on for member in line[1:])
        first: RefusedError | None = None
        tries = found = 0
        for base in reversed(self._usable):
            if tries == _MOST_TRIES or found == MOST_BASES:
                break
            at = file_position(base.start) if self._only in (None, base.id) and not not_rolled(base) else None
            if at is None or (moment is not None and base.finished_at > moment) or (at > coordinate and one_sequence):
                continue
            home = self.histories.branch_of(base)
            if home is None or home not in line or (home is branch and at > coordinate):
                continue
            tries += 1
            try:
                legs = way(self.histories, base.start, home, branch, stop.position)
            except RefusedError as error:
                first = first or error
                continue
            found += 1
            yield Way(base, legs)
        if not found:
            raise first or RefusedError(
                f"{stop.file}:{stop.pos} of branch {branch.id} cannot be reached: there is no backup before it",
                hint=f"{self._shows} what is recoverable",
            )


def _end_of(branch: Branch, run: Run) -> Stop:
    return Stop(branch.id, branch.file(run.last_number), run.last_pos, run.gtids_after, run.last_at)


def _nowhere(goal: str, branch: Branch, others: Sequence[Branch]) -> NotFoundError | RefusedError:
    if not others:
        return NotFoundError(
            f"{goal} is not in the archived binary logs of branch {branch.id}",
            hint=f"`backupd binlog search {branch.server}` finds transactions; `backupd timeline "
            f"{branch.server}` shows what is archived",
        )
    named = ", ".join(f"{other.id} ({other.reason})" for other in others)
    return RefusedError(
        f"{goal} is not part of branch {branch.id}, but of {named}",
        hint=f"if that is meant: --to {goal}@{others[0].id}",
    )
