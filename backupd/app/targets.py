"""Where a target lies in the archived binary logs of a server, to one transaction.

Catalog rows tell in which segment a place must lie; then that one's sealed index is read, from the best destination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, pairwise

from backupd.app.indexes import Indexes
from backupd.app.settings import ServerSettings
from backupd.app.wiring import Wiring
from backupd.model.binlog import FIRST_EVENT, Branch, ReplayLeg, SegmentKey, SegmentRecord, Stop, Transaction
from backupd.model.clock import format_time
from backupd.model.errors import ConfigurationError, KeyUnusableError, RefusedError
from backupd.model.gtid import covers, same
from backupd.model.server import Position
from backupd.recovery.executed import Missing, holder, state_after
from backupd.recovery.route import RouteLeg, Span
from backupd.recovery.runs import Place, place_of
from restore.history import History, Material

_TOLD = 20
"""Doubtful transactions that are named one by one."""


def history(wiring: Wiring, server: ServerSettings, *, exact: bool = True) -> History | None:
    """What is archived of ``server``'s binary logs at destinations that are configured; None where nothing ever was.
    Without ``exact`` no index is read to count transactions."""
    binlogs = wiring.catalog.binlogs
    branches = binlogs.branches(server.name)
    if not branches:
        return None
    configured = wiring.settings.destinations
    runs = [run for run in binlogs.runs(server.name) if run.destination in configured]
    resolver = Targets(wiring, server.name, branches, prefer=(*server.required, *server.others),
                       exact=exact)
    return History(branches, runs, binlogs.gaps(server.name), resolver)


@dataclass(frozen=True, slots=True)
class Met:
    """A transaction where it lies. ``before``: the one right before it in the same segment, None for the first."""

    record: SegmentRecord
    transaction: Transaction
    before: Transaction | None

    @property
    def start(self) -> Place:
        return self.record.key.number, self.transaction.start

    @property
    def text(self) -> str:
        one = self.transaction
        at = format_time(one.at)
        return f"{one.gtid or 'a transaction'} at {self.record.segment.file}:{one.start}, {at}"


class Targets:
    """Implements ``restore.history.TargetResolver``. ``prefer``: names of destinations, the one to read from first;
    without ``exact`` transactions are counted by whole segments."""

    def __init__(self, wiring: Wiring, server: str, branches: Iterable[Branch], *, prefer: Sequence[str] = (),
                 exact: bool = True) -> None:
        self._exact = exact
        self._binlogs = wiring.catalog.binlogs
        self._server = server
        self._branches = {branch.id: branch for branch in branches}
        self._indexes = Indexes(wiring, prefer)

    # -- what a plan asks

    def stop_for_time(self, branch: str, start: Place, end: Place, moment: datetime) -> Stop | None:
        at: datetime | None = None
        for record in self._records(branch, start, end):
            if not record.segment.transactions:
                continue
            last_at = record.segment.last_at
            if last_at is not None and last_at > moment:
                for met in self._met(record, start, end):
                    if met.transaction.at > moment:
                        return self._before(met, at)
                    at = met.transaction.at
            elif (record.key.number, record.key.start) >= start:
                at = last_at
            else:
                at = next((met.transaction.at for met in reversed(list(self._met(record, start, end)))), None)
        return None

    def stop_for_gtid(self, branch: str, gtid: str, *, before: bool) -> Stop | None:
        if not before:
            return self._executing(branch, gtid)
        for record in self._binlogs.holding_gtid(self._server, gtid):
            if record.key.branch == branch:
                for met in self._met(record):
                    if met.transaction.gtid.lower() == gtid.lower():
                        return self._before(met, met.before.at if met.before else None)
        return None

    def stop_for_position(self, branch: str, number: int, pos: int) -> Stop | None:
        found = self._records(branch, (number, 0), (number, pos + 1))
        holding = next((record for record in found if record.key.start <= pos <= record.key.end), None)
        if holding is None:
            return None
        segment = holding.segment
        below = max(segment.start, FIRST_EVENT)
        if pos <= below:
            first = next(self._met(holding), None)
            following = first.transaction if first else None
            return Stop(branch, segment.file, below, segment.gtids_before, None, following.gtid if following else "",
                        following.at if following else None)
        above = segment.end
        for met in self._met(holding):
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
            return Stop(branch, segment.file, segment.end, segment.gtids_after, segment.last_at)
        raise RefusedError(
            f"{segment.file}:{pos} is not between two transactions",
            detail=f"nearest before: {segment.file}:{below}\nnearest after:  {segment.file}:{above}",
            hint=f"choose one of them: --to {segment.file}:{below} or --to {segment.file}:{above}")

    def doubts(self, branch: str, start: Place, stop: Place, end: Place, moment: datetime) -> tuple[str, ...]:
        second = moment.replace(microsecond=0)
        same = list(self._each(branch, start, stop, lambda record: _may_hold(record, second)))
        same = [met for met in same if not met.transaction.precise and met.transaction.at == second]
        lines: list[str] = []
        if same:
            one, last = same[0], same[-1]
            lines.append(
                f"{len(same)} transactions of the target's own second are replayed, though some may have committed "
                f"after {format_time(moment)}, since this server's log tells whole seconds only: from {one.text} to "
                f"{last.text}")
        turned = [f"{met.text}: it lies behind the target's place with an earlier time (the clock went back, or "
                  "commits overtook each other) and is not replayed"
                  for met in self._each(branch, stop, end, lambda record: _before_moment(record, moment))
                  if met.transaction.at <= moment]
        lines += turned[:_TOLD]
        if len(turned) > _TOLD:
            lines.append(f"and {len(turned) - _TOLD} more like these")
        return tuple(lines)

    def material(self, leg: RouteLeg, stop: Stop) -> Material:
        begin, end = _place(leg.start.file, leg.start.pos), _place(stop.file, stop.pos)
        chosen = [record for span in leg.spans for record in self._of_span(span, end)]
        sizes = [_overlap(record, begin, end) for record in chosen]
        counts = [self._count(record, begin, end) for record in chosen]
        ids = {number for record in chosen for number in record.segment.server_ids}
        remarks = dict.fromkeys(remark for record in chosen for remark in record.segment.remarks)
        return Material(
            segments=tuple(record.key for record in chosen), size=sum(sizes), transactions=sum(counts),
            server_ids=tuple(sorted(ids)), repeated=self._repeated(chosen, begin, end, leg.start.gtid),
            unended=sum(1 for one, other in pairwise(chosen)
                        if one.key.number != other.key.number and not one.segment.is_final),
            remarks=tuple(remarks))

    def split(self, leg: ReplayLeg, place: Position) -> tuple[ReplayLeg, ...]:
        """The leg up to ``place`` and the rest of it; one leg where it ends there, none where the place is not behind
        its start and on its way: by file and position, and where both are known by what was executed there."""
        where = place_of(place)
        begin, end = _place(leg.start.file, leg.start.pos), _place(leg.stop.file, leg.stop.pos)
        if where is None or not begin < where <= end or _basename(place.file) != _basename(leg.stop.file):
            return ()
        key = next((key for key in leg.segments if key.number == where[0] and key.start <= where[1] <= key.end), None)
        try:
            stop = self.stop_for_position(key.branch, *where) if key else None
        except RefusedError:
            return ()
        if stop is None or (stop.gtids and place.gtid and not same(stop.gtids, place.gtid,
                                                                   mariadb=self._is_mariadb(stop.branch))):
            return ()
        if where == end:
            return (leg,)
        known = self._known(leg)
        chosen = [known[key] for key in leg.segments]
        size = sum(_overlap(record, begin, where) for record in chosen)
        count = None if leg.transactions is None else sum(self._count(record, begin, where) for record in chosen
                                                          if (record.key.number, record.key.start) < where)
        first = tuple(key for key in leg.segments if (key.number, key.start) < where)
        rest = tuple(key for key in leg.segments if key.number >= where[0])
        stop = replace(stop, branch=leg.stop.branch)
        later = None if count is None or leg.transactions is None else leg.transactions - count
        return (ReplayLeg(first, leg.start, stop, size, count),
                ReplayLeg(rest, stop.position, leg.stop, leg.size - size, later))

    def _known(self, leg: ReplayLeg) -> dict[SegmentKey, SegmentRecord]:
        numbers: dict[str, list[int]] = {}
        for key in leg.segments:
            numbers.setdefault(key.branch, []).append(key.number)
        return {record.key: record for branch, found in numbers.items()
                for record in self._binlogs.each_segment(self._server, branch, from_place=(min(found), 0),
                                                         to_place=(max(found) + 1, 0))}

    # -- segments

    def _records(self, branch: str, first: Place, last: Place) -> Iterator[SegmentRecord]:
        """Segments of a branch that hold every byte once, whole files before pieces: from the beginning of the file
        that ``first`` is in up to ``last``."""
        everything = self._binlogs.each_segment(self._server, branch, from_place=(first[0], 0), to_place=last)
        for _number, found in groupby(everything, key=lambda record: record.key.number):
            yield from _covering(list(found))

    def _of_span(self, span: Span, end: Place) -> Iterator[SegmentRecord]:
        last = min(span.last, end)
        for record in self._records(span.branch, span.first, last):
            if (record.key.number, record.key.start) < last:
                yield record

    def _met(self, record: SegmentRecord, first: Place = (0, 0), last: Place | None = None) -> Iterator[Met]:
        """The transactions of a segment that start within ``[first, last)``."""
        before: Transaction | None = None
        for transaction in self._indexes.transactions(record):
            met = Met(record, transaction, before)
            if last is not None and met.start >= last:
                return
            if met.start >= first:
                yield met
            before = transaction

    def _each(self, branch: str, first: Place, last: Place, wanted: Callable[[SegmentRecord], bool]) -> Iterator[Met]:
        for record in self._records(branch, first, last):
            if record.segment.transactions and wanted(record):
                yield from self._met(record, first, last)

    def _count(self, record: SegmentRecord, begin: Place, end: Place) -> int:
        """Transactions of a segment between two places; at most, where its index cannot be opened here."""
        segment = record.segment
        inside = begin <= (segment.number, segment.start) and (segment.number, segment.end) <= end
        if self._exact and segment.transactions and not inside:
            with suppress(ConfigurationError, KeyUnusableError):
                return sum(1 for _ in self._met(record, begin, end))
        return segment.transactions

    def _repeated(self, chosen: Sequence[SegmentRecord], begin: Place, end: Place, executed: str) -> int:
        """How many were executed already when the copy came to ``begin``. Only where a sequence of files is
        entered at its beginning may some be: elsewhere the place says what was executed."""
        if not executed or not chosen or begin[1] > FIRST_EVENT:
            return 0
        mariadb = self._is_mariadb(chosen[0].key.branch)
        held = holder(executed, mariadb=mariadb)
        count = 0
        for record in chosen:
            segment = record.segment
            if not segment.gtids_after or (segment.gtids_before and covers(segment.gtids_before, executed,
                                                                           mariadb=mariadb)):
                break
            with suppress(ConfigurationError, KeyUnusableError):
                count += sum(held(met.transaction.gtid) for met in self._met(record, begin, end))
        return count

    # -- stops

    def _before(self, met: Met, at: datetime | None) -> Stop:
        one = met.transaction
        return Stop(met.record.key.branch, met.record.segment.file, one.start, self._state(met, included=False), at,
                    one.gtid, one.at)

    def _after(self, met: Met) -> Stop:
        one, record = met.transaction, met.record
        following = self._next(met)
        return Stop(record.key.branch, record.segment.file, one.end, self._state(met, included=True), one.at,
                    following.gtid if following else "", following.at if following else None)

    def _next(self, met: Met) -> Transaction | None:
        """The transaction after it, as far as its own segment tells, or the segment right behind it."""
        record = met.record
        end = (record.key.number, met.transaction.end)
        for candidate in self._records(record.key.branch, end, (record.key.number + 2, 0)):
            if candidate.segment.transactions and (candidate.key.number, candidate.key.end) > end and (
                    found := next(self._met(candidate, end), None)):
                return found.transaction
        return None

    def _executing(self, branch: str, gtids: str) -> Stop | None:
        mariadb = self._is_mariadb(branch)
        for record in self._records(branch, (0, 0), _END):
            segment = record.segment
            if not segment.gtids_after or not covers(segment.gtids_after, gtids, mariadb=mariadb):
                continue
            missing = Missing(segment.gtids_before, gtids, mariadb=mariadb)
            if segment.gtids_before and missing.nothing:
                return Stop(branch, segment.file, max(segment.start, FIRST_EVENT), segment.gtids_before)
            for met in self._met(record):
                missing.executed(met.transaction.gtid)
                if missing.nothing:
                    return self._after(met)
            return None  # transactions of other servers got these numbers
        return None

    def _state(self, met: Met, *, included: bool) -> str:
        """Everything that is executed right before a transaction, or right after it."""
        last = (met.record.key.number, met.transaction.start + included)
        gtids = [one.transaction.gtid for one in self._met(met.record, last=last)]
        return state_after(met.record.segment.gtids_before, gtids, mariadb=self._is_mariadb(met.record.key.branch))

    def _is_mariadb(self, branch: str) -> bool:
        return self._branches[branch].flavour == "mariadb"


_END: Place = (2**62, 0)


def _place(file: str, pos: int) -> Place:
    return int(file.rpartition(".")[2]), pos


def _basename(file: str) -> str:
    return file.rpartition(".")[0]


def _covering(found: Sequence[SegmentRecord]) -> list[SegmentRecord]:
    """Of the segments of one file those that hold every byte from 0 on once, the longest first. What comes after a hole
    is left out."""
    chosen: list[SegmentRecord] = []
    place = 0
    while here := [record for record in found if record.key.start == place and record.key.end > place]:
        best = max(here, key=lambda record: (_is_whole_somewhere(record), record.key.end, record.segment.is_final))
        chosen.append(best)
        place = best.key.end
    return chosen


def _is_whole_somewhere(record: SegmentRecord) -> bool:
    return any(copy.is_complete for copy in record.destinations.values())


def _overlap(record: SegmentRecord, begin: Place, end: Place) -> int:
    """Bytes of a segment between two places."""
    number, start, stop = record.key.number, record.key.start, record.key.end
    if number == begin[0]:
        start = max(start, begin[1])
    if number == end[0]:
        stop = min(stop, end[1])
    return max(0, stop - start)


def _may_hold(record: SegmentRecord, second: datetime) -> bool:
    first, last = record.segment.first_at, record.segment.last_at
    return not record.segment.precise and first is not None and last is not None and first <= second <= last


def _before_moment(record: SegmentRecord, moment: datetime) -> bool:
    return record.segment.first_at is not None and record.segment.first_at <= moment
