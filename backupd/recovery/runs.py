"""Archived binary logs folded into runs, the branches that they belong to, and positions in them by time. Pure.

Runs: a million segments are a few hundred values. What proves that one file follows another: their numbers, that the
first one has ended and is known to be whole, and, where the server writes GTIDs, that everything executed at the end of
the one is what was executed at the beginning of the other. Where nobody knows whether the first one is whole
(``Ending.CUT``), GTIDs alone prove it. Within one file the bytes themselves do.

Branches: a position in a binary log means something only together with its branch, and a GTID may repeat over time. So
a backup's branch is taken from everything that is recorded (when it was taken, its position, what it had executed, who
the server was), and where one of these speaks against it, or nothing speaks for it, the backup is on none: it is a
point then, restored as it is, and nothing is replayed on it.

Positions: where the transactions committed after a moment begin, and what is executed at a position there. Some times
are false. A session may stamp what it commits with any time (SET timestamp), and a statement that ran for long carries
the time at which it began. What the log's order contradicts is not believed; what then is right at the moment's
position may belong to either side of it and is left out, so that a restore to the moment before a mistake never holds
the mistake.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Generic, TypeVar

from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import Branch, Ending, FilePosition, Gap, MariadbGtids, MysqlGtids, Run, Segment, covers, plus
from backupd.model.document import made_of
from backupd.model.errors import UnknownNameError
from backupd.model.server_facts import Position

_MARIADB = re.compile(r"\s*\d+-\d+-\d+\s*(?:,|$)")


def file_position(position: Position) -> FilePosition | None:
    """None for a server that writes no binary log."""
    number = position.file.rpartition(".")[2]
    return (int(number), position.pos) if number.isdecimal() else None


def first_of(run: Run) -> FilePosition:
    """Where the run begins: (number of the file, position in it)."""
    return run.first_number, run.first_pos


def last_of(run: Run) -> FilePosition:
    """Where the run ends: (number of the file, position in it)."""
    return run.last_number, run.last_pos


def replayable_from(run: Run) -> FilePosition:
    """The first position in it that a replay can begin at: no server reads a file whose beginning is not there."""
    return run.first_number + (run.first_pos > 0), 0


def reaches(run: Run, coordinate: FilePosition) -> bool:
    """Is everything up to ``coordinate`` in it? The beginning of a file is where the file before has ended."""
    after_whole_file = coordinate[1] == 0 and coordinate[0] == run.last_number + 1 and _may_be_whole(run)
    return coordinate <= last_of(run) or after_whole_file


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
    return made_of(
        Run,
        segment,
        destination=destination,
        first_number=segment.number,
        first_pos=segment.start,
        last_number=segment.number,
        last_pos=segment.end,
        confirmed_at=None,
        stored=stored,
        segments=1,
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
    after, before = file_position(gap.after), file_position(gap.before) if gap.before is not None else None
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

    Numbers of files show the other gaps. But where a file was lost before its end was copied and the very next one is
    there, only the record of the stream knows of it.
    """
    by_branch: dict[str, list[Gap]] = {}
    for gap in gaps:
        by_branch.setdefault(gap.branch, []).append(gap)
    found: list[Run] = []
    for run in runs:
        rest = run
        for gap in sorted(by_branch.get(run.branch, ()), key=lambda gap: file_position(gap.after) or (0, 0)):
            after, before = file_position(gap.after), file_position(gap.before) if gap.before else None
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


class Histories:
    """Branches of one server with their archived runs, ready to be asked many times.

    ``branches``: in the order in which they were noticed; the last one is the server's present. ``runs``: of all
    destinations, or of the one that is asked about.
    """

    def __init__(self, branches: Iterable[Branch], runs: Iterable[Run]) -> None:
        self.branches = tuple(sorted(branches, key=lambda branch: (branch.noticed_at, branch.id)))
        self._by_id = {branch.id: branch for branch in self.branches}
        self._noticed = [branch.noticed_at for branch in self.branches]
        self._runs: dict[str, list[Run]] = {}
        for run in joined(runs):
            self._runs.setdefault(run.branch, []).append(run)
        self._starts = {name: [first_of(run) for run in found] for name, found in self._runs.items()}
        self._since: dict[str, datetime | None] = {branch.id: branch.since for branch in self.branches[:1]}
        for before, branch in pairwise(self.branches):
            signs = [before.noticed_at, branch.since, self._last_sign(before, branch.noticed_at)]
            self._since[branch.id] = max(sign for sign in signs if sign is not None)

    @property
    def server(self) -> str:
        """Its name, for the commands that people are asked to run."""
        return self.branches[0].server if self.branches else "SERVER"

    @property
    def current(self) -> Branch | None:
        """The branch that the server is on now."""
        return self.branches[-1] if self.branches else None

    def branch(self, branch_id: str) -> Branch:
        """Raises UnknownNameError naming those that there are."""
        found = self._by_id.get(branch_id)
        if found is None:
            raise UnknownNameError(
                f"this server has no branch {branch_id!r}",
                detail="\n".join(f"{b.id}: {b.reason}, since {b.noticed_at:%Y-%m-%d %H:%M:%SZ}" for b in self.branches),
                hint=f"leave out @branch for the present one; `backupd timeline {self.server}` shows them all",
            )
        return found

    def since(self, branch: Branch) -> datetime | None:
        """Until when the branch before was certainly the server's present; None for the first one.

        A branch says that itself, but whoever noticed it may have known old things only (a spool that was put back):
        what was noticed and confirmed of the branch before counts, too.
        """
        return self._since[branch.id]

    def runs(self, branch_id: str) -> Sequence[Run]:
        """In log order, without a position in two of them."""
        return self._runs.get(branch_id, ())

    def run_at(self, branch_id: str, coordinate: FilePosition) -> Run | None:
        """The run that a replay from ``coordinate`` begins in: it holds the position, and its file from the first
        byte."""
        starts = self._starts.get(branch_id, ())
        index = bisect_right(starts, coordinate) - 1
        if index < 0:
            return None
        run = self._runs[branch_id][index]
        return run if replayable_from(run) <= coordinate <= last_of(run) else None

    def run_after(self, branch_id: str, coordinate: FilePosition) -> Run | None:
        """The first run that begins after ``coordinate``."""
        starts = self._starts.get(branch_id, ())
        index = bisect_right(starts, coordinate)
        return self._runs[branch_id][index] if index < len(starts) else None

    def descent(self, branch: Branch) -> tuple[Branch, ...]:
        """The branches that ``branch`` came from, oldest first, itself last; only those with known forks between."""
        line = [branch]
        while line[-1].parent is not None and line[-1].fork is not None:
            parent = self._by_id.get(line[-1].parent)
            if parent is None or parent in line:
                break
            line.append(parent)
        return tuple(reversed(line))

    def next_of(self, branch: Branch) -> Branch | None:
        """The branch that the server was on after ``branch``."""
        index = self.branches.index(branch) + 1
        return self.branches[index] if index < len(self.branches) else None

    def branch_of(self, backup: BackupRecord) -> Branch | None:
        """The branch that a backup's position is on; None where that is not certain."""
        coordinate = file_position(backup.start)
        candidates = self._at_the_time(backup) if coordinate is not None else []
        if coordinate is None or len(candidates) != 1:
            return None
        branch = candidates[0]
        other_server = backup.log_uuid and branch.server_uuid and backup.log_uuid != branch.server_uuid
        other_file = branch.basename != backup.start.file.rpartition(".")[0] or coordinate[0] < branch.first_number
        if other_server or other_file or not self._executed_fits(branch, coordinate, backup.start.gtid):
            return None
        if backup.started_at < branch.noticed_at and not self._was_there_before(branch, coordinate, backup):
            return None
        return branch

    def _at_the_time(self, backup: BackupRecord) -> list[Branch]:
        """The branches that the server may have been on while the backup was taken. Two histories of different servers
        are distinguished by their identity."""
        index = max(bisect_right(self._noticed, backup.started_at) - 1, 0)
        found = [*self.branches[index : index + 1]]
        for later in self.branches[index + 1 :]:
            certain = self.since(later)
            if certain is not None and backup.finished_at <= certain:
                break
            found.append(later)
            if backup.finished_at < later.noticed_at:
                break
        identities = {branch.server_uuid for branch in found}
        if len(found) > 1 and backup.log_uuid and "" not in identities and len(identities) == len(found):
            found = [branch for branch in found if branch.server_uuid == backup.log_uuid]
        return found

    def _last_sign(self, branch: Branch, until: datetime) -> datetime | None:
        """When a branch was certainly the server's present, by what was confirmed of it."""
        return max(
            (
                run.confirmed_at
                for run in self.runs(branch.id)
                if run.confirmed_at is not None and run.confirmed_at <= until
            ),
            default=None,
        )

    def _executed_fits(self, branch: Branch, coordinate: FilePosition, gtids: str) -> bool:
        """Does what the backup had executed fit the logs around its position? Where neither says anything, it does."""
        if not gtids:
            return True
        starts = self._starts.get(branch.id, ())
        index = bisect_right(starts, coordinate) - 1
        if index >= 0:
            run = self._runs[branch.id][index]
            if run.gtids_before and not executed(gtids, run.gtids_before):
                return False
            if coordinate < last_of(run):
                if run.gtids_after and not executed(run.gtids_after, gtids):
                    return False
            elif run.gtids_after and not executed(gtids, run.gtids_after):
                return False
        following = self.run_after(branch.id, coordinate)
        return following is None or not following.gtids_before or executed(following.gtids_before, gtids)

    def _was_there_before(self, branch: Branch, coordinate: FilePosition, backup: BackupRecord) -> bool:
        """Was a backup that is older than the first look at its branch taken of these very files?

        It was when they held transactions already as it began, or when they begin with exactly what it had executed.
        Where its file was begun while it ran, its GTIDs are between those at the beginning of the files and at their
        end, and the files held transactions already when it ended: after a RESET these numbers would be given again
        only later. Else they may be younger ones of the same names.
        """
        if branch is not self.branches[0] and backup.log_uuid != branch.server_uuid:
            return False
        run = self.run_at(branch.id, coordinate)
        if run is None:
            return False
        if run.first_at is not None and run.first_at <= backup.started_at:
            return True
        gtids = backup.start.gtid
        if not gtids:
            return False
        if coordinate[0] == run.first_number and same_state(gtids, run.gtids_before):
            return True
        in_time = run.first_at is not None and run.first_at <= backup.finished_at
        return (
            in_time
            and bool(run.gtids_before)
            and executed(gtids, run.gtids_before)
            and executed(run.gtids_after, gtids)
        )


AHEAD = timedelta(days=1)
"""More than clocks and time zones of servers are ever wrong by."""
BACK = timedelta(hours=1)
"""So far may a time be behind one that is in front of it in the log: longer does hardly a statement run."""
APART = timedelta(minutes=10)
"""Times that are less apart may be turned round by statements that ran for long."""
_TIMES = 10

_T = TypeVar("_T")


@dataclass
class Cut(Generic[_T]):
    """Give it what is in the log, in the log's order. ``since``: everything there was committed later than this, by
    another host's clock. ``first``: where what was committed after ``moment`` begins, None: nowhere so far; ``last``:
    the latest time in front of it.

    A time that is ahead is false where as many times behind it go on from what was in front of it; for one after
    ``moment`` it takes ten times as many, since a clock that was set back and sessions that overtake each other must
    not bring a mistake back.
    """

    moment: datetime
    since: datetime
    first: _T | None = None
    last: datetime | None = None
    _later: int = 0
    _earliest: datetime | None = None
    _against: int = 0
    _low: datetime | None = None
    _jumped: int = 0
    _behind: int = 0

    @property
    def floor(self) -> datetime:
        """An earlier time is not believed here."""
        least = self.since - AHEAD
        return least if self.last is None else max(least, self.last - BACK)

    @property
    def is_cut(self) -> bool:
        """Is something that is believed behind the moment?"""
        return self._later > 0

    def take(self, item: _T, at: datetime, latest: datetime) -> None:
        """``latest``: when it was archived, or it is now: a day after that nothing can have been committed."""
        if self._goes_on_below(at):
            self.believe(at)
        elif at > latest + AHEAD or at < self.floor:
            if latest > self.moment:
                self.first = self.first or item
            elif not self._later:
                self.first = None  # archived by then
        elif at > self.moment:
            self.first = self.first or item
            self.skip(1, at)
        elif not self._later:
            self._believe_next(at)
        else:
            self.take_earlier(1, at, at)

    def take_earlier(self, count: int, first: datetime, last: datetime) -> None:
        """As many behind something later, with times from ``first`` to ``last``, none of which is after the moment."""
        if (self.last is None or first >= self.last) and self._earliest is not None and self._earliest - last > APART:
            self._against += count
            if self._against >= _TIMES * self._later:
                self.believe(last)

    def believe(self, at: datetime | None) -> None:
        """Everything so far belongs before the moment, and ``at`` is the latest time of it."""
        self.first, self._earliest, self._later, self._against = None, None, 0, 0
        self.last, self._low = at, None

    def skip(self, count: int, earliest: datetime) -> None:
        """As many carry a later time than the moment."""
        self._later += count
        self._earliest = earliest if self._earliest is None else min(self._earliest, earliest)

    def _believe_next(self, at: datetime) -> None:
        if self.last is not None and at > self.last + BACK:
            self._low, self._jumped, self._behind = self.last, 0, 0
        self._jumped += 1
        self.first, self.last = None, at if self.last is None else max(self.last, at)

    def _goes_on_below(self, at: datetime) -> bool:
        """Does it show, with others, that the time by which ``last`` went on by more than an hour was false?"""
        if self._later or self._low is None or not self._low <= at < self.floor:
            return False
        self._behind += 1
        return self._behind >= self._jumped


def state_after(before: str, gtids: Iterable[str], *, mariadb: bool) -> str:
    """Everything that is executed when ``gtids`` were, in this order, after ``before``."""
    found = [gtid for gtid in gtids if gtid]
    if not found:
        return before
    if mariadb:
        last = {gtid.partition("-")[0]: gtid for gtid in found}
        return plus(before, ",".join(last.values()), mariadb=True)
    return plus(before, str(MysqlGtids.parse(",".join(found))), mariadb=False)


def holder(executed: str, *, mariadb: bool) -> Callable[[str], bool]:
    """Tells whether a transaction is among ``executed``."""
    if mariadb:
        state = MariadbGtids.parse(executed)
        return lambda gtid: bool(gtid) and state.covers(MariadbGtids.parse(gtid))
    known = MysqlGtids.parse(executed)
    return lambda gtid: bool(gtid) and known.covers(MysqlGtids.parse(gtid))


def holder_of_each(history: str, *, mariadb: bool) -> Callable[[str], bool]:
    """Tells of GTIDs whether ``history`` holds them; of MySQL it is a set, of MariaDB the last transaction of each
    server in each domain. What has no GTID is not in it. Raises ValueError, as what it gives."""
    if not mariadb:
        return holder(history, mariadb=False)
    last: dict[tuple[str, str], int] = {}
    for member in filter(None, map(str.strip, history.split(","))):
        domain, server, sequence = member.split("-")
        last[domain, server] = max(last.get((domain, server), 0), int(sequence))

    def has(gtid: str) -> bool:
        domain, server, sequence = gtid.split("-") if gtid else ("", "", "0")
        return last.get((domain, server), -1) >= int(sequence)

    return has


def in_order(before: str, after: str, transactions: int) -> bool:
    """MariaDB: do the numbers of the domains grow by one with each of the ``transactions`` between two states? Where
    they do not, a number can be anywhere: servers that are not in strict mode take what they are given."""
    known = MariadbGtids.parse(before).last
    grown = sum(number - known.get(domain, (0, 0))[1] for domain, (_, number) in MariadbGtids.parse(after).last.items())
    return grown == transactions


class Missing:
    """What of ``wanted`` (MySQL) is not executed yet, one transaction after the other."""

    def __init__(self, before: str, wanted: str) -> None:
        missing = MysqlGtids.parse(wanted).minus(MysqlGtids.parse(before))
        self._runs, self._left = missing.runs, missing.count

    @property
    def nothing(self) -> bool:
        """Is all that was wanted executed by now?"""
        return not self._left

    def executed(self, gtid: str) -> None:
        """Note that this transaction was executed; one that was not missing, or has no GTID, changes nothing."""
        if not gtid:
            return
        source, _, number = gtid.lower().rpartition(":")
        if any(first <= int(number) <= last for first, last in self._runs.get(source, ())):
            self._left -= 1
