"""Reading the sealed indexes of archived binary logs: streaming, each from the best destination that has it whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from backupd.app.context.wiring import Wiring
from backupd.model.binlog import SegmentRecord, Transaction
from backupd.model.errors import BackupdError, DamagedError, DestinationError, NotFoundError, StreamError
from backupd.transfer import log_segments
from backupd.transfer.log_leftovers import holding
from backupd.transfer.seal.seal import Unsealer

_KEPT = 4
_SMALL = 20_000
"""Transactions of an index that is kept in memory when it was read: a place is looked up more than once."""
_SMALL_TEXT = 16 * 1024**2
"""Characters of all their statements."""


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

    def places(self, record: SegmentRecord) -> tuple[str, ...]:
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
        if self._unsealer is None:
            self._unsealer = self._wiring.unsealer()
        failures: list[BackupdError] = []
        given = 0
        for name in self.places(record):
            try:
                destination = self._wiring.destination(name)
                header = log_segments.load_header(destination, record.segment.server, record.key)
                for number, transaction in enumerate(log_segments.read_index(destination, header, self._unsealer)):
                    if number >= given:  # what another copy gave before it broke off is not told twice
                        given += 1
                        yield transaction
            except (DamagedError, DestinationError, NotFoundError, StreamError) as error:
                failures.append(error)
            else:
                return
        yield from self._read_larger(record, self._unsealer, given, failures)

    def _read_larger(
        self, record: SegmentRecord, unsealer: Unsealer, given: int, failures: list[BackupdError]
    ) -> Iterator[Transaction]:
        """Out of the segment that has replaced this one since the catalog was asked; ``given``: how many not to give
        again. Raises for what was to be read where there is none."""
        server, key = record.segment.server, record.key
        for name in self.places(record):
            try:
                destination = self._wiring.destination(name)
                for larger in holding(destination, server, key):
                    header = log_segments.load_header(destination, server, larger)
                    within = (
                        one
                        for one in log_segments.read_index(destination, header, unsealer)
                        if key.start <= one.start and one.end <= key.end
                    )
                    for number, transaction in enumerate(within):
                        if number >= given:
                            given += 1
                            yield transaction
                    return
            except (DamagedError, DestinationError, NotFoundError, StreamError) as error:
                failures.append(error)
        raise _unreadable(record, failures)


def _unreadable(record: SegmentRecord, failures: Sequence[BackupdError]) -> BackupdError:
    segment = record.segment
    message = (
        f"what binary log {segment.file} holds from byte {segment.start} to {segment.end} cannot be read from "
        "any destination"
    )
    lines = [error.line for error in failures] or ["no destination has it"]
    if failures and all(isinstance(error, DestinationError) for error in failures):
        return DestinationError(message, detail="\n".join(lines), hint="see that the destinations can be reached")
    return DamagedError(
        message,
        lines,
        hint="`backupd verify` looks at every copy; `backupd timeline "
        f"{segment.server}` shows what is recoverable without it",
    )
