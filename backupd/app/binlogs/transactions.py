"""The transactions in the archived binary logs of one server: read from their sealed indexes, found by GTID, position
and time.

Rows of the catalog show which index a question needs before one is opened. An index is read as a stream, from the best
destination that has it whole, one segment after the other, so the memory does not grow with the archive. Times in a
binary log may be false: ``recovery.runs`` decides which count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import groupby, islice, product
from typing import TYPE_CHECKING

from backupd.app.context.wiring import Wiring
from backupd.catalog.binlogs import Binlogs
from backupd.model.binlog import FilePosition, Run, SegmentRecord, Transaction
from backupd.model.errors import (
    BackupdError,
    DamagedError,
    DestinationError,
    NotFoundError,
    RefusedError,
    StreamError,
)
from backupd.model.text import format_time
from backupd.recovery.runs import AHEAD, BACK, Cut, in_order

if TYPE_CHECKING:
    from backupd.transfer.records.encryption import Unsealer

_KEPT = 4
_HELD = 2_000
"""Files of a branch of which the segments stay in memory: a plan looks at them for each backup that it may begin
from."""
_SMALL = 20_000
"""Transactions of an index that is kept in memory when it was read: a position is looked up more than once."""
_SMALL_TEXT = 16 * 1024**2
"""Characters of all their statements."""
_END: FilePosition = (2**62, 0)


class Indexes:
    """``prefer``: names of destinations, the one to read from first; the others come after, damaged copies last.

    Needs the private key: the first read raises ConfigurationError or KeyUnusableError where there is none.
    """

    def __init__(self, wiring: Wiring, prefer: Sequence[str] = ()) -> None:
        self._wiring = wiring
        self._rank = {name: number for number, name in enumerate(prefer)}
        self._unsealer: Unsealer | None = None
        self._kept: OrderedDict[object, tuple[Transaction, ...]] = OrderedDict()

    def transactions(self, record: SegmentRecord) -> Iterator[Transaction]:
        """Of one segment, in log order. Raises DamagedError, or DestinationError, when no destination gives them."""
        name = (record.segment.server, record.key)
        if (kept := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            yield from kept
            return
        keep: list[Transaction] | None = [] if record.segment.transactions <= _SMALL else None
        text = 0
        for transaction in self._read(record):
            text += len(transaction.statement)
            if text > _SMALL_TEXT:
                keep = None
            if keep is not None:
                keep.append(transaction)
            yield transaction
        if keep is not None:
            self._kept[name] = tuple(keep)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def destinations(self, record: SegmentRecord) -> tuple[str, ...]:
        """The configured destinations that have a copy, best first."""
        known = [name for name in record.destinations if name in self._wiring.settings.destinations]
        return tuple(
            sorted(
                known,
                key=lambda name: (
                    not record.destinations[name].is_complete,
                    self._rank.get(name, len(self._rank)),
                    name,
                ),
            )
        )

    def _read(self, record: SegmentRecord) -> Iterator[Transaction]:
        """From the best copy, else out of the segment that has replaced this one since the catalog was asked."""
        if self._unsealer is None:
            self._unsealer = self._wiring.unsealer()
        from backupd.transfer import log_segments

        server, key, given = record.segment.server, record.key, 0
        failures: list[BackupdError] = []
        for is_replaced, name in product((False, True), self.destinations(record)):
            try:
                destination = self._wiring.destination(name)
                stored = next(iter(log_segments.holding(destination, server, key)), None) if is_replaced else key
                if stored is None:
                    continue
                header = log_segments.load_header(destination, server, stored)
                index = log_segments.read_index(destination, header, self._unsealer)
                within = (one for one in index if key.start <= one.start and one.end <= key.end)
                for transaction in islice(within, given, None):  # the others came from a copy that broke off
                    given += 1
                    yield transaction
            except (DamagedError, DestinationError, NotFoundError, StreamError) as error:
                failures.append(error)
            else:
                return
        raise _unreadable(record, failures)


def _unreadable(record: SegmentRecord, failures: Sequence[BackupdError]) -> BackupdError:
    segment = record.segment
    message = f"bytes {segment.start} to {segment.end} of binary log {segment.file} cannot be read from any destination"
    lines = [error.line for error in failures] or ["no destination has it"]
    if failures and all(isinstance(error, DestinationError) for error in failures):
        return DestinationError(message, detail="\n".join(lines), hint="check that the destinations can be reached")
    return DamagedError(
        message,
        lines,
        hint="`backupd verify` checks every copy; `backupd timeline "
        f"{segment.server}` shows what is recoverable without it",
    )


@dataclass(frozen=True, slots=True)
class Met:
    """A transaction at its position. ``before``: the one right before it in the same segment, None for the first."""

    record: SegmentRecord
    transaction: Transaction
    before: Transaction | None

    @property
    def start(self) -> FilePosition:
        """The number of its file, and its position in that."""
        return self.record.key.number, self.transaction.start

    @property
    def text(self) -> str:
        """Its GTID, position and time, for a message."""
        one = self.transaction
        at = format_time(one.at)
        return f"{one.gtid or 'a transaction'} at {self.record.segment.file}:{one.start}, {at}"


@dataclass(slots=True)
class _Files:
    """Files of a branch from ``first`` up to ``end``, each with those segments that ``Logbook.records`` gives."""

    first: int
    end: int
    segments: dict[int, list[SegmentRecord]] = field(default_factory=dict)


@dataclass(slots=True)
class Logbook:
    """Reads the transactions of one server's archived binary logs: catalog rows say which segments are opened."""

    binlogs: Binlogs
    server: str
    indexes: Indexes
    _files: dict[str, _Files] = field(default_factory=dict)

    def records(self, branch: str, first: FilePosition, last: FilePosition) -> Iterator[SegmentRecord]:
        """Segments of a branch that hold every byte once, whole files before pieces: from the beginning of the file
        that ``first`` is in up to ``last``."""
        for _number, found in self._read(branch, first[0], last):
            yield from found

    def held(self, branch: str, first: FilePosition, last: FilePosition) -> Iterator[SegmentRecord]:
        """The same, for whoever asks for parts of one range again and again: what was read for an earlier question is
        not read again, so what was archived meanwhile is not seen."""
        if last[0] - first[0] >= _HELD:
            yield from self.records(branch, first, last)
            return
        known = self._held(branch, first[0], last[0] + 1)
        for number in range(first[0], last[0] + 1):
            for record in known.get(number, ()):
                if (number, record.key.start) < last:
                    yield record

    def _held(self, branch: str, first: int, end: int) -> Mapping[int, Sequence[SegmentRecord]]:
        """Segments of at least the files from ``first`` up to ``end``; only what was not read yet is."""
        held = self._files.get(branch)
        if held is None or first > held.end or end < held.first or max(end, held.end) - min(first, held.first) > _HELD:
            held = self._files[branch] = _Files(first, first)
        elif first < held.first:  # an older backup; the next one is older still, so twice as much is read
            first = max(min(first, 2 * held.first - held.end), max(end, held.end) - _HELD, 0)
        for begin, until in ((first, held.first), (held.end, end)):
            if begin < until:
                held.segments.update(self._read(branch, begin, (until, 0)))
        held.first, held.end = min(first, held.first), max(end, held.end)
        return held.segments

    def _read(self, branch: str, first: int, last: FilePosition) -> Iterator[tuple[int, list[SegmentRecord]]]:
        everything = self.binlogs.each_segment(self.server, branch, from_position=(first, 0), to_position=last)
        for number, found in groupby(everything, key=lambda record: record.key.number):
            yield number, _covering(list(found))

    def met(
        self, record: SegmentRecord, first: FilePosition = (0, 0), last: FilePosition | None = None
    ) -> Iterator[Met]:
        """The transactions of a segment that start within ``[first, last)``."""
        before: Transaction | None = None
        for transaction in self.indexes.transactions(record):
            met = Met(record, transaction, before)
            if last is not None and met.start >= last:
                return
            if met.start >= first:
                yield met
            before = transaction

    def each(
        self, branch: str, first: FilePosition, last: FilePosition, wanted: Callable[[SegmentRecord], bool]
    ) -> Iterator[Met]:
        """The transactions that start within ``[first, last)``, of the segments that are wanted."""
        for record in self.records(branch, first, last):
            if record.segment.transactions and wanted(record):
                yield from self.met(record, first, last)

    def named(self, branch: str, gtid: str, *, mariadb: bool) -> Met | None:
        """The very transaction. Raises RefusedError where a file holds two of that name."""
        for record in self._candidates(branch, gtid, mariadb=mariadb):
            found = [met for met in self.met(record) if met.transaction.gtid.lower() == gtid.lower()]
            if len(found) > 1:
                raise RefusedError(
                    f"{gtid} is ambiguous: {len(found)} transactions have this GTID",
                    detail="\n".join(met.text for met in found),
                    hint=f"name the position: --to {found[0].record.segment.file}:{found[0].transaction.start} is "
                    "before "
                    "the first of them",
                )
            if found:
                return found[0]
        return None

    def _candidates(self, branch: str, gtid: str, *, mariadb: bool) -> Iterator[SegmentRecord]:
        """Segments that may hold a transaction; more than the sets at their ends show only where a server of MariaDB
        has let numbers go back."""
        yield from self.holding(branch, gtid)
        if not mariadb or all(
            in_order(run.gtids_before, run.gtids_after, run.transactions) for run in self.runs(branch)
        ):
            return
        server = int(gtid.split("-")[1])
        if any(
            not in_order(segment.gtids_before, segment.gtids_after, segment.transactions)
            for segment in (record.segment for record in self.records(branch, (0, 0), _END))
        ):
            for record in self.records(branch, (0, 0), _END):
                if record.segment.transactions and server in record.segment.server_ids:
                    yield record

    def holding(self, branch: str, gtids: str) -> Iterator[SegmentRecord]:
        """Segments at whose end all of ``gtids`` is executed, and was not at the beginning of their file or piece."""
        for held in self.binlogs.holding_gtid(self.server, gtids):
            if held.key.branch == branch:
                end = held.key.number, held.key.end
                yield from [
                    record for record in self.records(branch, (end[0], 0), end) if record.key.end > held.key.start
                ] or [held]

    def runs(self, branch: str) -> list[Run]:
        """Of all destinations."""
        return [run for run in self.binlogs.runs(self.server) if run.branch == branch]


def _covering(found: Sequence[SegmentRecord]) -> list[SegmentRecord]:
    """Of the segments of one file those that hold every byte from 0 on once, the longest first. What comes after a hole
    is left out."""
    chosen: list[SegmentRecord] = []
    end = 0
    while here := [record for record in found if record.key.start == end and record.key.end > end]:
        best = max(here, key=lambda record: (_is_whole_somewhere(record), record.key.end, record.segment.is_final))
        chosen.append(best)
        end = best.key.end
    return chosen


def _is_whole_somewhere(record: SegmentRecord) -> bool:
    return any(copy.is_complete for copy in record.destinations.values())


@dataclass(slots=True)
class Moments:
    """Answers for one server where a moment is in its archived binary logs."""

    log: Logbook
    clock: Callable[[], datetime]

    def cut(self, branch: str, start: FilePosition, end: FilePosition, moment: datetime, since: datetime) -> Cut[Met]:
        """Of ``[start, end)``. ``since``: see ``Cut``."""
        cut: Cut[Met] = Cut(moment, since)
        unread: list[SegmentRecord] = []  # none of it after the moment; read only where its times may be false
        before: datetime | None = None
        for record in self.log.records(branch, start, end):
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
        self,
        cut: Cut[Met],
        record: SegmentRecord,
        first: datetime,
        last: datetime,
        start: FilePosition,
        end: FilePosition,
    ) -> None:
        """What comes after something that is later than the moment may show that its time was false."""
        if first > cut.moment:
            cut.skip(record.segment.transactions, first)
        elif last <= cut.moment and cut.last is not None and first >= cut.last:
            cut.take_earlier(record.segment.transactions, first, last)
        elif last >= cut.floor:
            self._take(cut, record, start, end)

    def _exactly(
        self, cut: Cut[Met], before: datetime | None, found: list[SegmentRecord], start: FilePosition, end: FilePosition
    ) -> None:
        """All of ``found`` where their times contradict each other, else the last one: the others were believed whole.
        ``before``: the latest time in front of them."""
        if contradict := _contradict(cut, before, found):
            cut.believe(before)
        for record in found if contradict else found[-1:]:
            self._take(cut, record, start, end)

    def _take(self, cut: Cut[Met], record: SegmentRecord, start: FilePosition, end: FilePosition) -> None:
        archived = self._archived(record)
        for met in self.log.met(record, last=end):
            if met.start >= start:
                cut.take(met, met.transaction.at, archived)

    def later_before(self, branch: str, position: FilePosition, moment: datetime, since: datetime) -> Met | None:
        """See ``restore.planning.target_resolution.TargetResolver``."""
        begin = end = position
        each_segment = partial(self.log.binlogs.each_segment, self.log.server, branch)
        late = list(each_segment(to_position=position, since=moment))
        for record in reversed(late):
            behind = record.key.number, record.key.end
            old = each_segment(from_position=behind, to_position=end, until=since)
            if any((other.key.number, other.key.start) >= behind for other in old):
                break
            begin = end = record.key.number, record.key.start
        cut: Cut[Met] = Cut(moment, since)
        for record in self.log.records(branch, (max(begin[0] - 1, 0), 0), begin):
            if (last := record.segment.last_at) is not None and last <= moment:
                cut.believe(last if cut.last is None else max(last, cut.last))
        for record in self.log.records(branch, begin, position):
            first, last = record.segment.first_at, record.segment.last_at
            if first is None or last is None:
                continue
            if last <= moment:
                cut.take_earlier(record.segment.transactions, first, last)
                continue
            for met in self.log.met(record, begin, position):
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
        return min((copy.stored_at for copy in record.destinations.values()), default=self.clock())


def _contradict(cut: Cut[Met], before: datetime | None, found: list[SegmentRecord]) -> bool:
    first, *others = [record.segment.first_at for record in found]
    least = cut.since - AHEAD if before is None else before - BACK
    return (first is not None and first < least) or any(at is not None and at < cut.floor for at in others)
