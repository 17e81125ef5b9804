"""Where a moment lies in archived binary logs, of which some times may be false: catalog rows tell which sealed indexes
have to be read for that, ``recovery.stamps`` which times are believed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from backupd.app.binlogs.transactions import Logbook, Met
from backupd.catalog.binlog_rows import Binlogs
from backupd.model.binlog import SegmentRecord
from backupd.recovery.positions import AHEAD, BACK, Cut
from backupd.recovery.runs import Place


class Moments:
    def __init__(self, binlogs: Binlogs, server: str, log: Logbook, clock: Callable[[], datetime]) -> None:
        self._binlogs = binlogs
        self._server = server
        self._log = log
        self._clock = clock

    def cut(self, branch: str, start: Place, end: Place, moment: datetime, since: datetime) -> Cut[Met]:
        """Of ``[start, end)``. ``since``: see ``Cut``."""
        cut: Cut[Met] = Cut(moment, since)
        unread: list[SegmentRecord] = []  # none of it after the moment; read only where its times may be false
        before: datetime | None = None
        for record in self._log.records(branch, start, end):
            first, last = record.segment.first_at, record.segment.last_at
            if first is None or last is None:
                continue
            if cut.is_cut:
                self._behind(cut, record, first, last, start, end)
            elif last > moment or (record.key.number, record.key.start) < start:
                self._exactly(cut, before, [*unread, record], start, end)
                unread, before = [], cut.last
            elif last < cut.floor:
                unread.append(record)
            else:
                unread, before = [record], cut.last
                cut.believe(last if before is None else max(last, before))
        if len(unread) > 1 or (unread and _contradict(cut, before, unread)):
            self._exactly(cut, before, unread, start, end)
        return cut

    def _behind(
        self, cut: Cut[Met], record: SegmentRecord, first: datetime, last: datetime, start: Place, end: Place
    ) -> None:
        """What lies behind something that is later than the moment may show that its time was false."""
        if first > cut.moment:
            cut.skip(record.segment.transactions, first)
        elif last <= cut.moment and cut.last is not None and first >= cut.last:
            cut.take_earlier(record.segment.transactions, first, last)
        elif last >= cut.floor:
            self._take(cut, record, start, end)

    def _exactly(
        self, cut: Cut[Met], before: datetime | None, found: list[SegmentRecord], start: Place, end: Place
    ) -> None:
        """All of ``found`` where their times contradict each other, else the last one: the others were believed whole.
        ``before``: the latest time in front of them."""
        if contradict := _contradict(cut, before, found):
            cut.believe(before)
        for record in found if contradict else found[-1:]:
            self._take(cut, record, start, end)

    def _take(self, cut: Cut[Met], record: SegmentRecord, start: Place, end: Place) -> None:
        archived = self._archived(record)
        for met in self._log.met(record, last=end):
            if met.start >= start:
                cut.take(met, met.transaction.at, archived)

    def later_before(self, branch: str, place: Place, moment: datetime, since: datetime) -> Met | None:
        """See ``restore.planning.target_resolution.TargetResolver``."""
        begin = end = place
        late = list(self._binlogs.each_segment(self._server, branch, to_place=place, since=moment))
        for record in reversed(late):
            behind = record.key.number, record.key.end
            old = self._binlogs.each_segment(self._server, branch, from_place=behind, to_place=end, until=since)
            if any((other.key.number, other.key.start) >= behind for other in old):
                break
            begin = end = record.key.number, record.key.start
        cut: Cut[Met] = Cut(moment, since)
        for record in self._log.records(branch, (max(begin[0] - 1, 0), 0), begin):
            if (last := record.segment.last_at) is not None and last <= moment:
                cut.believe(last if cut.last is None else max(last, cut.last))
        for record in self._log.records(branch, begin, place):
            first, last = record.segment.first_at, record.segment.last_at
            if first is None or last is None:
                continue
            if last <= moment:
                cut.take_earlier(record.segment.transactions, first, last)
                continue
            for met in self._log.met(record, begin, place):
                if cut.floor <= met.transaction.at <= since:
                    cut.believe(met.transaction.at)
                else:
                    cut.take(met, met.transaction.at, self._archived(record))
        return cut.first if cut.is_cut else None

    def is_ahead(self, met: Met) -> bool:
        """Is its time still to come, or was it when it was archived?"""
        return met.transaction.at > self._archived(met.record) + AHEAD

    def _archived(self, record: SegmentRecord) -> datetime:
        """When it certainly was; now, where nobody has it."""
        return min((copy.stored_at for copy in record.destinations.values()), default=self._clock())


def _contradict(cut: Cut[Met], before: datetime | None, found: list[SegmentRecord]) -> bool:
    first, *others = [record.segment.first_at for record in found]
    least = cut.since - AHEAD if before is None else before - BACK
    return (first is not None and first < least) or any(at is not None and at < cut.floor for at in others)
