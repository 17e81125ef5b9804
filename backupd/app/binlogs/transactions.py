"""The transactions in the archived binary logs of one server, read from their sealed indexes, and where they lie.

What an index is needed for, catalog rows tell before one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from backupd.app.binlogs.log_indexes import Indexes
from backupd.catalog.binlog_rows import Binlogs
from backupd.model.binlog import Run, SegmentRecord, Transaction
from backupd.model.errors import RefusedError
from backupd.model.text import format_time
from backupd.recovery.positions import in_order
from backupd.recovery.runs import Place

_END: Place = (2**62, 0)


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


class Logbook:
    def __init__(self, binlogs: Binlogs, server: str, indexes: Indexes) -> None:
        self._binlogs = binlogs
        self._server = server
        self._indexes = indexes

    def records(self, branch: str, first: Place, last: Place) -> Iterator[SegmentRecord]:
        """Segments of a branch that hold every byte once, whole files before pieces: from the beginning of the file
        that ``first`` is in up to ``last``."""
        everything = self._binlogs.each_segment(self._server, branch, from_place=(first[0], 0), to_place=last)
        for _number, found in groupby(everything, key=lambda record: record.key.number):
            yield from _covering(list(found))

    def met(self, record: SegmentRecord, first: Place = (0, 0), last: Place | None = None) -> Iterator[Met]:
        """The transactions of a segment that start within ``[first, last)``."""
        before: Transaction | None = None
        for transaction in self._indexes.transactions(record):
            met = Met(record, transaction, before)
            if last is not None and met.start >= last:
                return
            if met.start >= first:
                yield met
            before = transaction

    def each(self, branch: str, first: Place, last: Place, wanted: Callable[[SegmentRecord], bool]) -> Iterator[Met]:
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
                    f"{gtid} is not the id of one transaction: {len(found)} have it",
                    detail="\n".join(met.text for met in found),
                    hint=f"name the place: --to {found[0].record.segment.file}:{found[0].transaction.start} is before "
                    "the first of them",
                )
            if found:
                return found[0]
        return None

    def _candidates(self, branch: str, gtid: str, *, mariadb: bool) -> Iterator[SegmentRecord]:
        """Segments that may hold a transaction; more than the sets at their ends tell only where a server of MariaDB
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
        for held in self._binlogs.holding_gtid(self._server, gtids):
            if held.key.branch == branch:
                place = held.key.number, held.key.end
                yield from [
                    record for record in self.records(branch, (place[0], 0), place) if record.key.end > held.key.start
                ] or [held]

    def runs(self, branch: str) -> list[Run]:
        """Of all destinations."""
        return [run for run in self._binlogs.runs(self._server) if run.branch == branch]


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
