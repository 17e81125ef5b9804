from __future__ import annotations

import errno
import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.binlog import segment_cutter, segment_sealer
from backupd.binlog.segment_cutter import MOST_PIECES, Cut, LogCoordinate, LogFile, Marks, next_piece
from backupd.model.binlog import Ending, SegmentKey
from backupd.model.errors import ArchivedError, DestinationError, DestinationFullError
from backupd.transfer import log_segments
from backupd.transfer.records.segment_documents import SegmentHeader
from storage import layout
from tests.support.logs.archived import Clock, Faulty, House, QuickSealer, plain_of
from tests.support.logs.real_logs import RealLog, real_logs

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
    for second, coordinate in enumerate([(0, 1, 10), (0, 1, 20), (0, 1, 20), (0, 1, 20), (0, 2, 4), (1, 1, 4)]):
        marks.add(LogCoordinate(*coordinate), at(second))
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


@pytest.fixture(autouse=True)
def _sealed_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part is so small that it is sealed again with its neighbours."""
    monkeypatch.setattr(segment_sealer, "SMALL_PART", 1)


@pytest.fixture
def plain(tmp_path: Path, clock: Clock) -> House:
    """Whose one destination copies nothing by itself, with three pieces of a file."""
    destination = Faulty("plain", clock)
    destination._tree = False
    house = House(tmp_path / "spool", [destination], clock)
    for end in real_logs()[0].cuts[:3]:
        house.grow(real_logs()[0], end)
        house.step(60)
    return house


def sealer_of(house: House) -> QuickSealer:
    assert isinstance(house.sealer, QuickSealer)
    return house.sealer


def stored(house: House, name: str) -> dict[str, str]:
    """What each sealed part of a log is, by its key."""
    return {
        header.folder + part.stored.name: part.stored.sha256
        for header in log_segments.headers(house.destinations[name])
        if isinstance(header, SegmentHeader)
        for part in header.parts
    }


def grown(house: House, log: RealLog, *, ends: tuple[int, ...]) -> dict[str, str]:
    """With pieces up to ``ends``, each cut by a process of its own; what they are at the first destination."""
    for end in ends:
        house.grow(log, end)
        house.step(60)
    return stored(house, "one")


def test_the_parts_of_pieces_are_not_sealed_again(house: House) -> None:
    log = real_logs()[0]
    pieces = grown(house, log, ends=log.cuts[:3])
    before = sealer_of(house).calls
    house.end(log)
    house.settle()
    assert sealer_of(house).calls - before == 2  # what follows the last piece, and the index
    for name in ("one", "two"):
        house.check(name, [log])
        assert list(stored(house, name).values())[:3] == list(pieces.values())
        assert not any(layout.of_piece(key) for key in stored(house, name))
    assert not list((house.spool.folder / "sealed").iterdir())


def test_one_process_does_the_same(house: House) -> None:
    log = real_logs()[0]
    with house.archiver() as archiver:
        for end in log.cuts[:3]:
            house.grow(log, end)
            assert not archiver.step(house.clock.move(60)).trouble
        pieces = stored(house, "one")
        house.end(log)
        archiver.step(house.clock.move(60))
        archiver.step(house.clock.move(400))
    house.check("two", [log])
    assert list(stored(house, "two").values())[:3] == list(pieces.values())


def test_sealed_bytes_are_kept_here_only_until_each_destination_has_them(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    two.refuse = DestinationFullError("destination two is full", destination="two")
    grown(house, log, ends=log.cuts[:2])
    here = house.spool.folder / "sealed"
    assert len([path for path in here.rglob("*.gpg") if "part-" in path.name]) == 2
    two.refuse = None
    house.step(400)
    house.step(400)
    assert not list(here.rglob("*.gpg"))
    house.end(log)
    house.settle()
    house.check("one", [log])
    house.check("two", [log])


def test_a_destination_that_was_away_gets_the_parts_from_here(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    two.refuse = DestinationFullError("destination two is full", destination="two")
    grown(house, log, ends=log.cuts[:3])
    house.end(log)
    house.step(60)
    before = sealer_of(house).calls
    two.refuse = None
    house.settle()
    assert sealer_of(house).calls - before <= 2  # the description of another process
    house.check("one", [log])
    house.check("two", [log])


def test_parts_that_a_destination_lost_are_sealed_anew(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    grown(house, log, ends=log.cuts[:3])
    lost = log_segments.of_file(two, "shop", house.branch.id, log.number)[1]
    log_segments.remove(two, "shop", lost)
    del house.books.segments["two", lost]
    house.end(log)
    house.settle()
    house.check("one", [log])
    house.check("two", [log])


def test_parts_that_are_damaged_at_a_destination_are_not_taken_over(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    pieces = grown(house, log, ends=log.cuts[:3])
    key = list(pieces)[1]
    with two.get(key) as stream:
        content = bytearray(stream.read())
    content[-1] ^= 1
    two.put(key, io.BytesIO(content))
    house.end(log)
    house.settle()
    house.check("one", [log])
    house.check("two", [log])


@pytest.mark.parametrize("error", [ArchivedError("in an archive class"), DestinationError("links are forbidden here")])
def test_a_destination_that_refuses_copies_gets_every_part_sent(
    house: House, two: Faulty, monkeypatch: pytest.MonkeyPatch, error: DestinationError
) -> None:
    def refuse(_source: str, _target: str) -> bool:
        raise error

    monkeypatch.setattr(two, "duplicate", refuse)
    log = real_logs()[0]
    grown(house, log, ends=log.cuts[:3])
    house.end(log)
    house.settle()
    house.check("one", [log])
    house.check("two", [log])


def test_small_neighbours_become_one_part(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    log = real_logs()[0]
    pieces = grown(house, log, ends=log.cuts[2:5])
    monkeypatch.setattr(segment_sealer, "SMALL_PART", log.cuts[2])  # the first piece is large, the others are not
    house.end(log)
    house.settle()
    house.check("one", [log])
    found = list(stored(house, "one").values())
    assert len(found) == 2
    assert found[0] == next(iter(pieces.values()))


def test_merged_pieces_take_over_parts_too(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cutter, "MOST_PIECES", 2)
    log = real_logs()[0]
    pieces = grown(house, log, ends=log.cuts[:2])
    grown(house, log, ends=log.cuts[2:3])
    house.step(1)
    assert house.keys("one") == [house.key(log, 0, log.cuts[2])]
    assert set(pieces.values()) < set(stored(house, "one").values())
    house.end(log)
    house.settle()
    house.check("one", [log])
    assert set(pieces.values()) < set(stored(house, "one").values())


def test_pieces_for_other_keys_are_sealed_anew(house: House) -> None:
    log = real_logs()[0]
    pieces = grown(house, log, ends=log.cuts[:3])
    sealer_of(house).recipients = ("B" * 40,)
    house.end(log)
    house.settle()
    house.check("one", [log])
    assert not set(pieces.values()) & set(stored(house, "one").values())


def test_a_destination_that_copies_nothing_gets_the_parts_from_here(plain: House) -> None:
    log = real_logs()[0]
    before = sealer_of(plain).calls
    plain.end(log)
    plain.settle()
    assert sealer_of(plain).calls - before == 2
    plain.check("plain", [log])


def test_a_sealed_part_that_is_damaged_here_is_sealed_anew_and_not_blamed_on_the_destination(plain: House) -> None:
    log = real_logs()[0]
    kept = sorted((plain.spool.folder / "sealed").rglob("part-*"))
    kept[1].write_bytes(kept[1].read_bytes()[:-7])
    plain.end(log)
    plain.settle()
    plain.check("plain", [log])


def test_a_file_that_is_another_one_than_its_pieces_is_not_put_together(house: House) -> None:
    log, other = real_logs()[:2]
    grown(house, log, ends=log.cuts[:2])
    changed = RealLog(log.name, log.number, other.data, other.ending, other.transactions)
    house.end(changed)
    done = house.step(60)
    assert "differs from the server's file" in done.trouble["one"]
    assert house.key(log, 0, log.cuts[0]) in house.keys("one")


def test_bytes_that_changed_in_the_spool_are_not_sealed_again_as_those_of_the_pieces(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = real_logs()[0]
    monkeypatch.setattr(segment_sealer, "SMALL_PART", log.size)
    with house.archiver() as archiver:
        for end in log.cuts[:3]:
            house.grow(log, end)
            assert not archiver.step(house.clock.move(60)).trouble
        pieces = house.keys("one")
        house.end(log)
        with house.spool.files()[0].path.open("r+b") as file:
            file.seek(log.cuts[1] - 5)  # of the checksum of an event that was archived
            byte = file.read(1)[0]
            file.seek(-1, io.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        assert "in the spool is damaged" in archiver.step(house.clock.move(60)).trouble[""]
        assert house.keys("one") == pieces


def test_transactions_whose_end_a_power_cut_took_are_not_taken_for_all(house: House) -> None:
    log = real_logs()[0]
    grown(house, log, ends=log.cuts[:3])
    kept = sorted((house.spool.folder / "sealed").rglob("transactions.zst"))
    assert len(kept) == 3
    kept[1].write_bytes(b"")
    house.end(log)
    house.settle()
    (header,) = log_segments.headers(house.destinations["one"])
    assert isinstance(header, SegmentHeader)
    index = b""
    for part in header.index:
        with house.destinations["one"].get(header.folder + part.stored.name) as stream:
            index += stream.read()[16:]
    assert index.count(b'"gtid"') == len(log.transactions)
    house.check("one", [log])


def test_a_file_that_ended_and_is_written_to_again_goes_on(house: House) -> None:
    log = real_logs()[0]
    short = RealLog(log.name, log.number, log.data[: log.cuts[2]], Ending.CUT, log.transactions[:3])
    grown(house, short, ends=log.cuts[:2])
    with house.archiver() as archiver:
        house.destinations["two"].refuse = DestinationFullError("full", destination="two")  # type: ignore[attr-defined]
        house.end(short)
        archiver.step(house.clock.move(60))
        file = house.spool.files()[0]
        house.spool.cut(file, file.size)
        house.grow(log, log.cuts[3])
        house.destinations["two"].refuse = None  # type: ignore[attr-defined]
        for _ in range(3):
            assert not archiver.step(house.clock.move(400)).trouble
    house.end(log)
    house.settle()
    house.check("one", [log])
    house.check("two", [log])


def test_a_full_disk_while_parts_are_taken_over_delays_and_loses_nothing(house: House) -> None:
    log = real_logs()[0]
    pieces = grown(house, log, ends=log.cuts[:3])
    house.end(log)
    sealer_of(house).refuse = OSError(errno.ENOSPC, "No space left on device")
    done = house.step(60)
    assert "No space left on device" in done.trouble[""]
    assert len(house.keys("one")) == 3
    sealer_of(house).refuse = None
    house.settle()
    house.check("one", [log])
    house.check("two", [log])
    assert set(pieces.values()) < set(stored(house, "one").values())


def test_two_installations_that_archive_the_same_file_disturb_each_other_in_nothing(
    tmp_path: Path, house: House, clock: Clock
) -> None:
    log = real_logs()[0]
    other = House(tmp_path / "other", list(house.destinations.values()), clock)
    for end in log.cuts[:3]:
        for one in (house, other):
            one.grow(log, end)
            one.step(60)
    for one in (house, other):
        one.end(log)
    house.step(60)
    other.step(60)
    for one in (house, other):
        one.settle()
    assert house.keys("one") == house.keys("two") == [house.key(log)]
    for name in ("one", "two"):
        (header,) = log_segments.headers(house.destinations[name])
        assert isinstance(header, SegmentHeader)
        assert plain_of(house.destinations[name], header) == log.archived
