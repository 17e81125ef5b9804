"""Which position in the archived binary logs of a server a target means, to one transaction.

Rows of the catalog say in which segment it must be; then the sealed index of that one is read, from the best
destination.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import pairwise

from backupd.app.binlogs.transactions import Indexes, Logbook, Met, Moments
from backupd.app.context.server_identity import own_branches
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring, gathered
from backupd.model.binlog import (
    ELSEWHERE,
    FIRST_EVENT,
    OF_TEMPORARY,
    STATEMENTS,
    Branch,
    Ending,
    FilePosition,
    MariadbGtids,
    ReplayLeg,
    SegmentKey,
    SegmentRecord,
    Stop,
    Transaction,
    covers,
    same,
)
from backupd.model.errors import (
    ConfigurationError,
    DamagedError,
    DestinationError,
    KeyUnusableError,
    RefusedError,
)
from backupd.model.server_facts import Position
from backupd.model.text import format_time
from backupd.recovery.runs import APART, Missing, file_position, holder, parted, same_state, state_after
from backupd.recovery.windows import RouteLeg, Span
from restore.planning.inexact_replay import beyond_replay, open_before, over_temporary
from restore.planning.target_resolution import History, Material

_REPEATING: set[tuple[str, str, Position, FilePosition]] = set()
"""Legs of which the index was read once, and showed that they repeat what is executed at their start."""
_LOOK_BACK = 500
"""Files in front of a backup in which temporary tables are looked for that were open at its position."""
_RESTARTED = (Ending.STOPPED, Ending.CRASHED, Ending.CUT)
_LISTED = 20
"""Doubtful transactions that are named one by one."""


def history(wiring: Wiring, server: ServerSettings, *, exact: bool = True) -> History | None:
    """What is archived of ``server``'s binary logs at destinations that are configured; None where nothing ever was.
    Without ``exact`` no index is read to count transactions."""
    binlogs = wiring.catalog.binlogs
    branches = own_branches(wiring, server.name)
    if not branches:
        return None
    configured = wiring.settings.destinations
    ids = {branch.id for branch in branches}
    runs = [run for run in binlogs.runs(server.name) if run.destination in configured and run.branch in ids]
    gaps = [gap for gap in binlogs.gaps(server.name) if gap.branch in ids]
    resolver = Targets(wiring, server.name, branches, prefer=server.preferred, exact=exact)
    return History(branches, runs, gaps, resolver)


class Targets:
    """Implements ``TargetResolver`` of ``restore.planning.target_resolution``. ``prefer``: names of destinations, the
    one to read from first; without ``exact`` transactions are counted by whole segments."""

    def __init__(
        self, wiring: Wiring, server: str, branches: Iterable[Branch], *, prefer: Sequence[str] = (), exact: bool = True
    ) -> None:
        self._exact = exact
        self._binlogs = wiring.catalog.binlogs
        self._server = server
        self._branches = {branch.id: branch for branch in branches}
        self._log = Logbook(self._binlogs, server, Indexes(wiring, prefer))
        self._moments = Moments(self._log, wiring.clock)

    # -- what a plan asks

    def stop_for_time(
        self, branch: str, start: FilePosition, end: FilePosition, moment: datetime, since: datetime
    ) -> Stop | None:
        """Right before the first transaction in ``[start, end)`` that is later than ``moment``; None where there is
        none. ``since``: see ``Cut``."""
        cut = self._moments.cut(branch, start, end, moment, since)
        return self._before(cut.first, cut.last) if cut.first else None

    def stop_for_gtid(self, branch: str, gtid: str, *, before: bool) -> Stop | None:
        """Right before the transaction ``gtid``, or right after everything in it was executed; None where the branch
        does not have it."""
        if before:
            met = self._log.named(branch, gtid, mariadb=self._is_mariadb(branch))
            return self._before(met, met.before.at if met.before else None) if met else None
        stop = self._after_mariadb(branch, gtid) if self._is_mariadb(branch) else self._after_mysql(branch, gtid)
        return stop or self._beginning_with(branch, gtid)

    def stop_for_position(self, branch: str, number: int, pos: int) -> Stop | None:
        """At a position in a file; None where it is not archived. Raises RefusedError for one inside a transaction."""
        found = self._log.records(branch, (number, 0), (number, pos + 1))
        holding = next((record for record in found if record.key.start <= pos <= record.key.end), None)
        if holding is None:
            return None
        segment = holding.segment
        below = max(segment.start, FIRST_EVENT)
        if pos <= below:
            first = next(self._log.met(holding), None)
            return _stop(holding, below, segment.gtids_before, None, first.transaction if first else None)
        above = segment.end
        for met in self._log.met(holding):
            one = met.transaction
            if pos == one.start:
                return self._before(met, met.before.at if met.before else None)
            if pos == one.end:
                return self._after(met)
            if pos < one.end:
                below, above = (one.start, one.end) if pos > one.start else (below, one.start)
                break
            below = one.end
        if pos == segment.end:
            return _stop(holding, segment.end, segment.gtids_after, segment.last_at)
        raise RefusedError(
            f"{segment.file}:{pos} is not between two transactions",
            detail=f"nearest before: {segment.file}:{below}\nnearest after:  {segment.file}:{above}",
            hint=f"choose one of them: --to {segment.file}:{below} or --to {segment.file}:{above}",
        )

    def later_before(self, branch: str, position: FilePosition, moment: datetime, since: datetime) -> Stop | None:
        """The first transaction in front of ``position`` with a later time than ``moment`` (see ``TargetResolver``);
        None where there is none."""
        found = self._moments.later_before(branch, position, moment, since)
        return self._before(found, found.before.at if found.before else None) if found else None

    def doubts(
        self, branch: str, start: FilePosition, stop: FilePosition, end: FilePosition, moment: datetime
    ) -> tuple[str, ...]:
        """Sentences about transactions whose time contradicts the position where the replay stops."""
        second = moment.replace(microsecond=0)
        same = list(self._log.each(branch, start, stop, lambda record: _may_hold(record, second)))
        same = [met for met in same if not met.transaction.precise and met.transaction.at == second]
        lines: list[str] = []
        if same:
            one, last = same[0], same[-1]
            lines.append(
                f"{len(same)} transactions of the target's second are replayed, although some may have committed "
                f"after {format_time(moment)}, because this server's log records whole seconds only: from {one.text} "
                f"to "
                f"{last.text}"
            )
        turned = [
            f"{met.text}: it is after the target's position with an earlier time (its session set it, the "
            "clock went back, or commits overtook each other) and is not replayed"
            for met in self._log.each(branch, stop, end, lambda record: _before_moment(record, moment))
            if met.transaction.at <= moment
        ]
        ahead = [
            f"{met.text}: the log's order contradicts that time (its session set it, or the clock was set back); "
            "it is replayed, since it is before the target's position"
            for met in self._log.each(branch, start, stop, lambda record: _is_later(record, moment + APART))
            if met.transaction.at > moment + APART
        ]
        ahead += [
            f"{met.text}: its session set that time, which is in the future; it is at the target's position and "
            "is not replayed"
            for met in itertools.takewhile(
                lambda met: met.start[0] == stop[0] and self._moments.is_ahead(met),
                self._log.each(branch, stop, end, lambda record: _is_later(record, moment)),
            )
        ]
        for like in (turned, ahead):
            lines += like[:_LISTED]
            if len(like) > _LISTED:
                lines.append(f"and {len(like) - _LISTED} more like these")
        return tuple(lines)

    def material(self, leg: RouteLeg, stop: Stop) -> Material:
        """What is read to replay a leg up to ``stop``: segments, bytes, transactions."""
        begin, end = _file_position(leg.start.file, leg.start.pos), _file_position(stop.file, stop.pos)
        chosen = [record for span in leg.spans for record in self._of_span(span, end)]
        sizes = [_overlap(record, begin, end) for record in chosen]
        counts = [self._count(record, begin, end) for record in chosen]
        ids = {number for record in chosen for number in record.segment.server_ids}
        remarks = dict.fromkeys(remark for record in chosen for remark in record.segment.remarks)
        return Material(
            segments=tuple(record.key for record in chosen),
            size=sum(sizes),
            transactions=sum(counts),
            server_ids=tuple(sorted(ids)),
            repeated=self._repeated(chosen, begin, end, leg.start.gtid),
            unended=sum(
                1
                for one, other in pairwise(chosen)
                if one.key.number != other.key.number and not one.segment.is_final and not _ends_at_fork(one.key, leg)
            ),
            remarks=tuple(remarks),
            by_statements=sum(STATEMENTS in record.segment.remarks for record in chosen),
        )

    def repeats(self, leg: RouteLeg) -> bool:
        """Do the binary logs of a leg hold transactions that are executed already at its start? False where no index
        can be read."""
        known = (self._server, leg.branch, leg.start, leg.spans[0].first) if leg.spans else None
        if known is None or known in _REPEATING:
            return known is not None
        mariadb, held = self._is_mariadb(leg.branch), holder(leg.start.gtid, mariadb=self._is_mariadb(leg.branch))
        for span in leg.spans:
            for record in self._log.records(span.branch, span.first, span.last):
                before = record.segment.gtids_before
                if before and covers(before, leg.start.gtid, mariadb=mariadb):
                    return False
                with suppress(ConfigurationError, KeyUnusableError, DestinationError, DamagedError):
                    if any(held(met.transaction.gtid) for met in self._log.met(record)):
                        _REPEATING.add(known)
                        return True
        return False

    def split(self, leg: ReplayLeg, position: Position) -> tuple[ReplayLeg, ...]:
        """The leg up to ``position`` and the rest of it; one leg where it ends there, none where that is not after
        its start and within it: by file and position, and where both are known by what was executed there."""
        where = file_position(position)
        begin, end = _file_position(leg.start.file, leg.start.pos), _file_position(leg.stop.file, leg.stop.pos)
        if where is None or not begin < where <= end or _basename(position.file) != _basename(leg.stop.file):
            return ()
        key = next((key for key in leg.segments if key.number == where[0] and key.start <= where[1] <= key.end), None)
        try:
            stop = self.stop_for_position(key.branch, *where) if key else None
        except RefusedError:
            return ()
        if stop is None or not self._is_behind(stop, position, leg.start):
            return ()
        if where == end:
            return (leg,)
        known = self._known(leg)
        chosen = [known[key] for key in leg.segments]
        size = sum(_overlap(record, begin, where) for record in chosen)
        count = (
            None
            if leg.transactions is None
            else sum(
                self._count(record, begin, where) for record in chosen if (record.key.number, record.key.start) < where
            )
        )
        first = tuple(key for key in leg.segments if (key.number, key.start) < where)
        rest = tuple(key for key in leg.segments if key.number >= where[0])
        stop = replace(stop, branch=leg.stop.branch)
        later = None if count is None or leg.transactions is None else leg.transactions - count
        return (
            ReplayLeg(first, leg.start, stop, size, count),
            ReplayLeg(rest, stop.position, leg.stop, leg.size - size, later),
        )

    def _is_behind(self, stop: Stop, position: Position, start: Position) -> bool:
        """Is ``stop`` the state of ``position``, as far as GTIDs show it, and not in the part of its file that only
        repeats what the copy has executed when it enters that?"""
        mariadb = self._is_mariadb(stop.branch)
        if not stop.gtids:
            return True
        as_there = not position.gtid or same(stop.gtids, position.gtid, mariadb=mariadb)
        return as_there and (not start.gtid or covers(stop.gtids, start.gtid, mariadb=mariadb))

    def within(self, leg: ReplayLeg) -> Iterator[Transaction]:
        """Everything that is replayed in a leg, in log order."""
        at, end = _file_position(leg.start.file, leg.start.pos), _file_position(leg.stop.file, leg.stop.pos)
        known = self._known(leg)
        for key in leg.segments:
            for met in self._log.met(known[key], at, end):
                yield met.transaction
                at = key.number, met.transaction.end  # pieces may overlap

    def over_temporary(self, legs: Sequence[ReplayLeg], backup: str) -> str:
        """See ``restore.planning.inexact_replay``; indexes are read only where a segment says that it makes or drops
        temporary tables. Raises KeyUnusableError, ConfigurationError where they cannot be."""
        for leg in legs:
            begin = _file_position(leg.start.file, leg.start.pos)
            branch = leg.segments[0].branch if leg.segments else leg.stop.branch
            inside = not OF_TEMPORARY.isdisjoint(self._remarks(leg))
            back = max(begin[0] - _LOOK_BACK, 0)
            remarked = leg is legs[0] and not OF_TEMPORARY.isdisjoint(
                self._binlogs.remarks(self._server, branch, back, begin[0])
            )
            if not (remarked or inside):
                continue
            before_it = self._log.records(branch, (back, 0), begin) if leg is legs[0] else ()
            past = [record for record in before_it if record.segment.start < begin[1] or record.key.number < begin[0]]
            began = next(
                (
                    number
                    for number, record in reversed(list(enumerate(past)))
                    if record.segment.ending in _RESTARTED and record.key.number < begin[0]
                ),
                None,
            )
            known = leg is not legs[0] or began is not None or bool(past and past[0].key.number == 1)
            past = past[began + 1 :] if began is not None else past
            marked = [record for record in past if OF_TEMPORARY & set(record.segment.remarks)]
            if not marked and not inside:
                continue
            before = open_before(
                met.transaction.statement for record in marked for met in self._log.met(record, last=begin)
            )
            if why := over_temporary(self.within(leg), before, known=known, backup=backup):
                return why
        return ""

    def beyond_replay(self, legs: Sequence[ReplayLeg], exclude: Collection[str]) -> RefusedError | None:
        """See ``restore.planning.inexact_replay``; indexes are read only where a segment says that files are made
        elsewhere. Raises KeyUnusableError, ConfigurationError."""
        for leg in legs:
            if ELSEWHERE in self._remarks(leg) and (
                found := beyond_replay(one for one in self.within(leg) if one.gtid not in exclude)
            ):
                return found
        return None

    def _remarks(self, leg: ReplayLeg) -> set[str]:
        """Of all segments that are read for it."""
        files = gathered((key.branch, key.number) for key in leg.segments)
        if not any(self._binlogs.remarks(self._server, name, min(found), max(found)) for name, found in files.items()):
            return set()
        known = self._known(leg)
        return {remark for key in leg.segments if key in known for remark in known[key].segment.remarks}

    def _known(self, leg: ReplayLeg) -> dict[SegmentKey, SegmentRecord]:
        return {
            record.key: record
            for branch, found in gathered((key.branch, key.number) for key in leg.segments).items()
            for record in self._binlogs.each_segment(
                self._server, branch, from_position=(min(found), 0), to_position=(max(found) + 1, 0)
            )
        }

    # -- segments

    def _of_span(self, span: Span, end: FilePosition) -> Iterator[SegmentRecord]:
        last = min(span.last, end)
        for record in self._log.held(span.branch, span.first, last):
            if (record.key.number, record.key.start) < last:
                yield record

    def _count(self, record: SegmentRecord, begin: FilePosition, end: FilePosition) -> int:
        """Transactions of a segment between two positions; at most, where its index cannot be opened here."""
        segment = record.segment
        inside = begin <= (segment.number, segment.start) and (segment.number, segment.end) <= end
        if self._exact and segment.transactions and not inside:
            with suppress(ConfigurationError, KeyUnusableError):
                return sum(1 for _ in self._log.met(record, begin, end))
        return segment.transactions

    def _repeated(self, chosen: Sequence[SegmentRecord], begin: FilePosition, end: FilePosition, executed: str) -> int:
        """How many were executed already when the copy came to ``begin``. Only where a sequence of files is
        entered at its beginning may some be: elsewhere the position says what was executed."""
        if not executed or not chosen or begin[1] > FIRST_EVENT:
            return 0
        mariadb = self._is_mariadb(chosen[0].key.branch)
        held = holder(executed, mariadb=mariadb)
        count = 0
        for record in chosen:
            segment = record.segment
            if not segment.gtids_after or (
                segment.gtids_before and covers(segment.gtids_before, executed, mariadb=mariadb)
            ):
                break
            with suppress(ConfigurationError, KeyUnusableError):
                count += sum(held(met.transaction.gtid) for met in self._log.met(record, begin, end))
        return count

    # -- stops

    def _before(self, met: Met, at: datetime | None) -> Stop:
        return _stop(met.record, met.transaction.start, self._state(met, included=False), at, met.transaction)

    def _after(self, met: Met) -> Stop:
        one = met.transaction
        return _stop(met.record, one.end, self._state(met, included=True), one.at, self._next(met))

    def _next(self, met: Met) -> Transaction | None:
        """The transaction after it, as far as its own segment shows it, or the segment right behind it."""
        record = met.record
        end = (record.key.number, met.transaction.end)
        for candidate in self._log.records(record.key.branch, end, (record.key.number + 2, 0)):
            if (
                candidate.segment.transactions
                and (candidate.key.number, candidate.key.end) > end
                and (found := next(self._log.met(candidate, end), None))
            ):
                return found.transaction
        return None

    # -- transactions by their ids

    def _after_mysql(self, branch: str, gtids: str) -> Stop | None:
        for record in self._log.holding(branch, gtids):
            segment = record.segment
            if segment.gtids_after and covers(segment.gtids_after, gtids, mariadb=False):
                missing = Missing(segment.gtids_before, gtids)
                for met in self._log.met(record):
                    missing.executed(met.transaction.gtid)
                    if missing.nothing:
                        return self._after(met)
        return None

    def _after_mariadb(self, branch: str, gtids: str) -> Stop | None:
        """Right behind the transaction that is named; of several the last one in log order, where those that are not
        archived are the last ones of their domains."""
        named = _members(gtids)
        found = {gtid: met for gtid in named if (met := self._log.named(branch, gtid, mariadb=True)) is not None}
        if not found:
            return None
        stop = self._after(max(found.values(), key=lambda met: met.start))
        return stop if named - found.keys() <= _members(stop.gtids) else None

    def _beginning_with(self, branch: str, gtids: str) -> Stop | None:
        """Where something archived begins with exactly this executed, which itself is not archived."""
        for run in parted(self._log.runs(branch), self._binlogs.gaps(self._server)):
            if same_state(run.gtids_before, gtids):
                return Stop(
                    branch,
                    self._branches[branch].file(run.first_number),
                    max(run.first_pos, FIRST_EVENT),
                    run.gtids_before,
                )
        return None

    def _state(self, met: Met, *, included: bool) -> str:
        """Everything that is executed right before a transaction, or right after it."""
        last = (met.record.key.number, met.transaction.start + included)
        gtids = [one.transaction.gtid for one in self._log.met(met.record, last=last)]
        return state_after(met.record.segment.gtids_before, gtids, mariadb=self._is_mariadb(met.record.key.branch))

    def _is_mariadb(self, branch: str) -> bool:
        return self._branches[branch].flavour == "mariadb"


def _stop(
    record: SegmentRecord, pos: int, gtids: str, at: datetime | None, following: Transaction | None = None
) -> Stop:
    """In the file of a segment; ``following``: the first transaction that is left out."""
    left = (following.gtid, following.at) if following else ("", None)
    return Stop(record.key.branch, record.segment.file, pos, gtids, at, *left)


def _ends_at_fork(key: SegmentKey, leg: RouteLeg) -> bool:
    """Does the segment end where the next branch of the route began? Then nothing behind it is shared, whether or not
    its file is known to have ended there."""
    return any(span.branch == key.branch and span.last == (key.number, key.end) for span in leg.spans[:-1])


def _file_position(file: str, pos: int) -> FilePosition:
    return int(file.rpartition(".")[2]), pos


def _basename(file: str) -> str:
    return file.rpartition(".")[0]


def _overlap(record: SegmentRecord, begin: FilePosition, end: FilePosition) -> int:
    """Bytes of a segment between two positions."""
    number, start, stop = record.key.number, record.key.start, record.key.end
    if number == begin[0]:
        start = max(start, begin[1])
    if number == end[0]:
        stop = min(stop, end[1])
    return max(0, stop - start)


def _may_hold(record: SegmentRecord, second: datetime) -> bool:
    first, last = record.segment.first_at, record.segment.last_at
    return not record.segment.precise and first is not None and last is not None and first <= second <= last


def _members(gtids: str) -> frozenset[str]:
    """Of MariaDB, in its own writing."""
    return frozenset(filter(None, str(MariadbGtids.parse(gtids)).split(",")))


def _is_later(record: SegmentRecord, moment: datetime) -> bool:
    return record.segment.last_at is not None and record.segment.last_at > moment


def _before_moment(record: SegmentRecord, moment: datetime) -> bool:
    return record.segment.first_at is not None and record.segment.first_at <= moment
