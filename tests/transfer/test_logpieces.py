"""Pieces of binary logs that stay where nothing, or not everything, may be deleted, and who takes them away at last."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from backupd.model.binlog import Branch, BranchReason, SegmentKey
from backupd.model.errors import LockedError
from backupd.transfer import segments
from backupd.transfer.collect import collect
from backupd.transfer.logpieces import drop_pieces, replaced_pieces
from backupd.transfer.pin import Pin
from storage import layout
from storage.memory import MemoryDestination
from tests.binlog.archived import QuickSealer
from tests.support.archivedlogs import archive_log
from tests.support.reallogs import real_logs
from tests.transfer.stock import FakeClock, Stock, backup_id

BRANCH = Branch(server="shop", id="20261121T040000Z-0000000a", noticed_at=datetime(2026, 11, 21, 4, tzinfo=UTC),
                reason=BranchReason.FIRST, server_uuid="u", flavour="mariadb", basename="binlog", first_number=1)
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
    return {key for _server, key in segments.keys(place)}


def test_what_a_lock_keeps_does_not_keep_the_pieces_that_it_never_takes() -> None:
    place = Locked("locked", tree=False)
    whole, pieces = filled(place)
    assert len(pieces) == 4
    gone = drop_pieces(place, "shop", pieces, now=datetime.now(UTC))
    assert set(gone) == {key for key in pieces if key.start}
    assert present(place) == {whole, *pieces} - set(gone)
    assert {key for key in place._blobs if layout.comes_and_goes(key)} == set()
    assert drop_pieces(place, "shop", [key for key in pieces if not key.start], now=datetime.now(UTC)) == ()


def test_pieces_that_their_writer_may_not_remove_are_removed_by_whoever_sweeps_there() -> None:
    place = MemoryDestination("away", tree=False)
    whole, pieces = filled(place)
    Stock(place).add(1, {"t": b"a backup"})
    clock = FakeClock(datetime.now(UTC))
    clock.move(days=1)
    assert collect(place, clock=clock).log_pieces == [], "whoever wrote them has a week for it"
    clock.move(days=7)
    with Pin(place, backup_id(7), [("shop", backup_id(1))], clock=clock):
        assert collect(place, clock=clock).log_pieces == [], "somebody reads"
    assert set(collect(place, clock=clock).log_pieces) == set(pieces)
    assert present(place) == {whole}


@pytest.mark.parametrize("lost", [layout.SEGMENT, layout.part_name(0)])
def test_pieces_stay_while_their_file_is_not_there_whole(lost: str) -> None:
    place = MemoryDestination("away", tree=False)
    whole, pieces = filled(place)
    place.delete(layout.segment_folder("shop", whole) + lost)
    clock = FakeClock(datetime.now(UTC) + timedelta(days=8))
    assert collect(place, clock=clock).log_pieces == []
    assert set(pieces) <= present(place)
