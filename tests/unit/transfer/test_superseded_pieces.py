"""Pieces of binary logs that stay where not everything may be deleted, and that no sweep takes away."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

from backupd.model.binlog import Branch, BranchReason, SegmentKey
from backupd.model.errors import LockedError
from backupd.transfer import log_segments
from backupd.transfer.collection import collect
from backupd.transfer.log_leftovers import drop_pieces, replaced_pieces
from storage import layout
from storage.memory import MemoryDestination
from tests.support.logs.archived import QuickSealer
from tests.support.logs.archived_logs import archive_log
from tests.support.logs.real_logs import real_logs
from tests.support.stores.stock import FakeClock, Stock

BRANCH = Branch(
    server="shop",
    id="20261121T040000Z-0000000a",
    noticed_at=datetime(2026, 11, 21, 4, tzinfo=UTC),
    reason=BranchReason.FIRST,
    server_uuid="u",
    flavour="mariadb",
    basename="binlog",
    first_number=1,
)
LOG = real_logs()[0]
CUTS = LOG.cuts[1:4]


class Locked(MemoryDestination):
    """Everything is locked that object lock is asked for."""

    def delete(self, key: str) -> None:
        if key in self._blobs and not layout.comes_and_goes(key):
            raise LockedError(f"{key} is locked")
        super().delete(key)


def filled(place: MemoryDestination) -> tuple[SegmentKey, tuple[SegmentKey, ...]]:
    """A whole log, and beside it pieces of it: [0, a), [a, b), [0, b), [b, c)."""
    first, second, third = CUTS
    for start, end in ((0, first), (first, second), (0, second), (second, third)):
        archive_log(place, QuickSealer(), BRANCH, 1, LOG.data, start=start, end=end)
    whole = archive_log(place, QuickSealer(), BRANCH, 1, LOG.data).segment.key
    return whole, replaced_pieces(place, "shop", whole)


def present(place: MemoryDestination) -> set[SegmentKey]:
    return {key for _server, key in log_segments.keys(place)}


def test_what_a_lock_keeps_does_not_keep_the_pieces_that_it_never_takes() -> None:
    place = Locked("locked", tree=False)
    whole, pieces = filled(place)
    assert len(pieces) == 4
    gone = drop_pieces(place, "shop", pieces, now=datetime.now(UTC))
    assert set(gone) == {key for key in pieces if key.start}
    assert present(place) == {whole, *pieces} - set(gone)
    assert {key for key in place._blobs if layout.comes_and_goes(key)} == set()
    assert drop_pieces(place, "shop", [key for key in pieces if not key.start], now=datetime.now(UTC)) == ()


def test_no_sweep_removes_pieces_since_it_cannot_know_whether_their_file_is_what_they_are() -> None:
    """Neither one of other bytes, nor one of a whole that is rotten, nor one that nobody has come to remove."""
    place = MemoryDestination("away", tree=False)
    whole, pieces = filled(place)
    other = next(log for log in real_logs() if log.data[: CUTS[0]] != LOG.data[: CUTS[0]])
    end = next(cut for cut in other.cuts if 0 < cut < len(LOG.data) and cut not in CUTS)
    stranger = archive_log(place, QuickSealer(), BRANCH, 1, other.data, start=0, end=end).segment.key
    rotten = layout.segment_folder("shop", whole) + layout.part_name(0)
    with place.get(rotten) as stream:
        raw = bytearray(stream.read())
    raw[len(raw) // 2] ^= 1
    place.put(rotten, io.BytesIO(bytes(raw)))
    Stock(place).add(1, {"t": b"a backup"})
    collect(place, clock=FakeClock(datetime.now(UTC) + timedelta(days=400)))
    assert present(place) == {whole, stranger, *pieces}
