from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from backupd.binlog.segment_cutter import MOST_PIECES, Cut, LogCoordinate, LogFile, Marks, next_piece
from backupd.model.binlog import Ending, SegmentKey

NOW = datetime(2026, 11, 21, 4, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
FILE = LogFile("b", 7)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("size", "cut_at", "start"),
    [
        (0, None, None),  # nothing there
        (100, None, 100 - 100),  # the first one ever
        (100, NOW, None),  # one was cut just now
        (100, at(-59), None),
        (100, at(-60), 0),
        (100, at(3600), 0),  # the clock was set back
    ],
)
def test_a_piece_is_due_once_in_a_checkpoint(size: int, cut_at: datetime | None, start: int | None) -> None:
    assert next_piece(FILE, size, now=NOW, cut_at=cut_at, checkpoint=MINUTE) == start


def test_no_piece_without_new_bytes_and_none_of_a_damaged_file() -> None:
    file = replace(FILE, cuts=(Cut(0, 100),))
    assert next_piece(file, 100, now=NOW, cut_at=None, checkpoint=MINUTE) is None
    assert next_piece(file, 99, now=NOW, cut_at=None, checkpoint=MINUTE) is None
    assert next_piece(file, 101, now=NOW, cut_at=None, checkpoint=MINUTE) == 100
    assert next_piece(file.damaged(100, "why", NOW), 101, now=NOW, cut_at=None, checkpoint=MINUTE) is None


def test_many_pieces_begin_again_at_zero() -> None:
    file = replace(FILE, cuts=tuple(Cut(end, end + 1) for end in range(MOST_PIECES)))
    assert next_piece(file, 1000, now=NOW, cut_at=None, checkpoint=MINUTE) == 0
    one_less = replace(file, cuts=file.cuts[:-1])
    assert next_piece(one_less, 1000, now=NOW, cut_at=None, checkpoint=MINUTE) == MOST_PIECES - 1


def test_reach_goes_over_overlaps_and_stops_at_holes() -> None:
    def held(*ranges: tuple[int, int]) -> dict[SegmentKey, Ending]:
        return {SegmentKey("b", 7, start, end): Ending.OPEN for start, end in ranges}

    assert FILE.reach({}) == 0
    assert FILE.reach(held((0, 10), (10, 20), (30, 40))) == 20
    assert FILE.reach(held((0, 30), (10, 20), (30, 40))) == 40
    assert FILE.reach(held((10, 20))) == 0
    assert FILE.reach({SegmentKey("other", 7, 0, 10): Ending.OPEN, SegmentKey("b", 8, 0, 10): Ending.OPEN}) == 0


def test_an_ended_file_is_wanted_whole_and_a_piece_of_its_size_gets_the_ending() -> None:
    file = replace(FILE, cuts=(Cut(0, 100),)).ended_at(100, Ending.CUT)
    key = SegmentKey("b", 7, 0, 100)
    assert file.lacks({key: Ending.OPEN}) == (Cut(0, 100, Ending.CUT),)
    assert not file.is_complete({key: Ending.OPEN})
    assert file.is_complete({key: Ending.CUT})
    assert file.is_complete({key: Ending.ROTATED})


def test_a_damaged_file_is_complete_with_what_could_be_read() -> None:
    file = replace(FILE, cuts=(Cut(0, 100),))
    assert file.damaged(100, "why", NOW).wanted == file.cuts
    closed = file.damaged(150, "why", NOW)
    assert closed.wanted == (*file.cuts, Cut(100, 150, Ending.CUT, "why"))
    assert not closed.is_complete({SegmentKey("b", 7, 0, 100): Ending.OPEN})
    assert FILE.damaged(0, "why", NOW).is_complete({})


def test_marks_tell_the_last_moment_within_and_the_first_beyond() -> None:
    marks = Marks()
    for second, place in enumerate([(0, 1, 10), (0, 1, 20), (0, 1, 20), (0, 1, 20), (0, 2, 4), (1, 1, 4)]):
        marks.add(LogCoordinate(*place), at(second))
    marks.add(LogCoordinate(0, 1, 5), at(99))  # smaller: not believed
    assert marks.latest_within(None) is None
    assert marks.latest_within(LogCoordinate(0, 1, 9)) is None
    assert marks.latest_within(LogCoordinate(0, 1, 25)) == ((0, 1, 20), at(3))
    assert marks.latest_within(LogCoordinate(2, 0, 0)) == ((1, 1, 4), at(5))
    assert marks.first_beyond(LogCoordinate(0, 1, 10)) == at(1)
    assert marks.first_beyond(LogCoordinate(0, 1, 20)) == at(4)
    assert marks.first_beyond(None) == at(0)
    assert marks.first_beyond(LogCoordinate(1, 1, 4)) is None
    marks.forget_within(LogCoordinate(0, 1, 20))
    assert marks.latest_within(LogCoordinate(0, 1, 25)) == ((0, 1, 20), at(3))
    assert marks.first_beyond(LogCoordinate(0, 1, 20)) == at(4)


def test_marks_thin_out_and_keep_their_ends() -> None:
    marks = Marks(most=16)
    for second in range(10_000):
        marks.add(LogCoordinate(0, 1, second), at(second))
    assert marks.first_beyond(None) == at(0)
    assert marks.latest_within(LogCoordinate(9, 9, 9)) == ((0, 1, 9999), at(9999))
    within = marks.latest_within(LogCoordinate(0, 1, 9990))
    assert within is not None
    assert within[1] <= at(9990)
