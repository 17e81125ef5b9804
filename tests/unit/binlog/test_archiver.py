from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.binlog import segment_cutter, segment_sealer, shipper
from backupd.binlog.spool_files import Spool
from backupd.model.binlog import Ending
from backupd.model.errors import BusyError, DestinationError, DestinationFullError, KeyUnusableError
from backupd.transfer import log_segments
from backupd.transfer.leases import Pin
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.manifests import put_bytes
from backupd.transfer.records.segment_documents import SegmentHeader
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys
from tests.support.logs.archived import Books, Clock, Faults, Faulty, House, Killed, QuickSealer, branch_of
from tests.support.logs.real_logs import RealLog, real_logs
from tests.support.logs.streaming import until
from tests.support.stores.memory import MemoryDestination


def test_whole_files_open_everywhere_and_leave_the_spool(tmp_path: Path, clock: Clock, keys: Keys) -> None:
    disk, memory = FilesystemDestination("disk", tmp_path / "d"), MemoryDestination("memory")
    disk.initialise(clock())
    house = House(tmp_path / "spool", [disk, memory], clock, sealer=Sealer([keys.fingerprint], keys.public_home))
    logs = real_logs()[:3]
    for log in logs:
        house.end(log)
    done = house.step()
    assert done.removed == 3
    assert not house.spool.files()
    unsealer = Unsealer(keys.secret_home)
    for destination in (disk, memory):
        headers = [item for item in log_segments.headers(destination, "shop") if isinstance(item, SegmentHeader)]
        assert [header.segment.file for header in headers] == [log.name for log in logs]
        for header, log in zip(headers, logs, strict=True):
            target = tmp_path / f"{destination.name}-{log.name}"
            log_segments.fetch(destination, header, unsealer, target)
            assert target.read_bytes() == log.archived
            assert tuple(log_segments.read_index(destination, header, unsealer)) == log.transactions
        assert list(log_segments.branches(destination, "shop")) == [house.branch]
        assert sum(layout.cold_kind(info.key) == "log" for info in destination.list(layout.BINLOGS)) == len(logs)
    assert house.books.of("disk") == house.books.of("memory") == [house.key(log) for log in logs]
    first, second = (house.books.segments["disk", house.key(log)] for log in logs[:2])
    assert first.gtids_after == second.gtids_before != ""


def test_a_growing_file_is_shipped_at_checkpoints_and_only_when_it_changed(house: House, one: Faulty) -> None:
    log = real_logs()[0]
    a, b, c = log.cuts[1], log.cuts[2], log.cuts[4]
    house.grow(log, a)
    with house.archiver() as archiver:
        archiver.step(house.clock())
        assert house.keys("one") == [house.key(log, 0, a)]
        house.grow(log, b)
        archiver.step(house.clock.move(59))
        assert len(house.keys("one")) == 1
        archiver.step(house.clock.move(1))
        assert house.keys("one") == [house.key(log, 0, a), house.key(log, a, b)]
        before = one.faults.count
        archiver.step(house.clock.move(600))
        assert one.faults.count == before
        house.grow(log, c)
        archiver.step(house.clock.move(1))
        assert house.keys("one")[-1] == house.key(log, b, c)
    pieces = [house.books.segments["one", key] for key in house.keys("one")]
    assert [piece.ending for piece in pieces] == [Ending.OPEN] * 3
    assert {layout.cold_kind(info.key) for info in one.list(layout.BINLOGS)} == {None}  # they are replaced soon
    assert sum(piece.transactions for piece in pieces) == log.cuts.index(c) + 1
    assert [piece.gtids_after for piece in pieces[:-1]] == [piece.gtids_before for piece in pieces[1:]]


def test_pieces_end_between_transactions_wherever_the_copy_has_come_to(house: House) -> None:
    log = real_logs()[0]
    safe = {*log.cuts, *(transaction.start for transaction in log.transactions), log.size}
    with house.archiver() as archiver:
        for size in range(1, log.size, 97):
            house.grow(log, size)
            assert not archiver.step(house.clock.move(60)).trouble
    ends = [key.end for key in house.keys("one") if key.end > log.transactions[0].start]
    assert ends
    assert set(ends) <= safe
    house.end(log)
    house.settle()
    house.check("one", [log])


def test_pieces_go_only_where_the_whole_file_was_read_back(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    for end in log.cuts[:3]:
        house.grow(log, end)
        house.step(60)
    assert len(house.keys("two")) == 3
    house.end(log)
    two.twist = f"-{log.size:012d}/part"
    done = house.step(60)
    assert "does not return the bytes that were written to it" in done.trouble["two"]
    assert house.keys("one") == [house.key(log)]
    assert len(house.keys("two")) == 3
    assert house.books.of("two") == house.keys("two")
    assert [file.number for file in house.spool.files()] == [log.number]
    two.twist = ""
    house.settle()
    house.check("two", [log])
    assert not house.spool.files()


def test_too_many_pieces_are_merged(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cutter, "MOST_PIECES", 2)
    log = real_logs()[0]
    for end in log.cuts[:3]:
        house.grow(log, end)
        house.step(60)
    house.step(1)
    assert house.keys("one") == [house.key(log, 0, log.cuts[2])]
    assert house.books.of("one") == house.keys("one")
    house.grow(log, log.cuts[3])
    house.step(60)
    assert house.keys("one")[-1] == house.key(log, log.cuts[2], log.cuts[3])
    house.end(log)
    house.settle()
    house.check("one", [log])
    house.check("two", [log])


def test_a_file_that_ends_where_its_only_piece_ended_gets_its_ending(house: House) -> None:
    log = real_logs()[3]
    end = log.cuts[-1]
    short = replace(log, data=log.data[:end])
    house.grow(short)
    house.step()
    assert house.books.segments["one", house.key(short)].ending is Ending.OPEN
    house.end(short)
    house.settle()
    house.check("one", [short])
    house.check("two", [short])


@pytest.mark.parametrize(
    "trouble",
    [
        DestinationError("destination two is not mounted"),
        DestinationFullError("destination two is full", destination="two"),
        OSError(5, "Input/output error"),
    ],
)
def test_a_destination_in_trouble_delays_only_itself(house: House, two: Faulty, trouble: Exception) -> None:
    logs = real_logs()
    two.refuse = trouble
    house.end(logs[0])
    house.grow(logs[1], logs[1].cuts[0])
    with house.archiver() as archiver:
        done = archiver.step(house.clock())
        assert len(house.keys("one")) == 2
        assert done.trouble.keys() == {"two"}
        behind = archiver.behind()["two"]
        assert behind.bytes == logs[0].size + logs[1].cuts[0]
        assert behind.since == house.clock()
        assert str(trouble) in behind.error
        assert archiver.behind()["one"].bytes == 0
        assert archiver.archived_to() == (logs[0].number, 0)
        calls = two.faults.count
        for _ in range(20):
            archiver.step(house.clock.move(1))
        assert two.faults.count == calls
        two.refuse = None
        archiver.step(house.clock.move(300))
        assert archiver.behind()["two"].bytes == 0
        assert archiver.behind()["two"].error == ""
        assert archiver.archived_to() == (logs[1].number, logs[1].cuts[0])
    house.end(logs[1])
    house.settle()
    house.check("two", logs[:2])


def test_one_that_hangs_holds_back_nobody_and_is_caught_up_later(
    house: House, two: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "SLOW", 0.2)
    logs = real_logs()
    two.hang = threading.Event()
    try:
        house.end(logs[0])
        with house.archiver(patience=0.3) as archiver:
            archiver.step(house.clock())
            house.end(logs[1])

            def shipped() -> bool:
                archiver.step(house.clock.move(60))
                return len(house.keys("one")) == 2

            until(shipped, "the other one has both")
            assert archiver.behind()["two"].bytes == logs[0].size + logs[1].size
            assert "the upload of one binary log has taken" in archiver.behind()["two"].error
            two.hang.set()
    finally:
        two.hang.set()
    two.hang = None
    house.settle()
    house.check("two", logs[:2])


def test_what_hangs_at_the_end_has_one_time_limit_for_all_and_stores_nothing_afterwards(
    house: House, one: Faulty, two: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    stop = shipper.Shipper.stop

    def noted(it: shipper.Shipper, limit: float) -> None:
        limits.append(limit)
        stop(it, limit)

    monkeypatch.setattr(shipper.Shipper, "stop", noted)
    one.hang, two.hang = threading.Event(), threading.Event()
    before = set(threading.enumerate())
    try:
        house.end(real_logs()[0])
        with house.archiver(patience=0.1, letting_go=0.1) as archiver:
            archiver.step(house.clock())
            hanging = [thread for thread in threading.enumerate() if thread not in before]
        assert len(hanging) == 2
        assert len(set(limits)) == 1
        assert all(thread.is_alive() for thread in hanging)
    finally:
        one.hang.set()
        two.hang.set()
    for thread in hanging:
        thread.join(30)
        assert not thread.is_alive()
    assert house.keys("one") == house.keys("two") == []
    one.hang = two.hang = None
    house.settle()
    house.check("two", real_logs()[:1])


def test_a_destination_that_loses_what_it_took_is_not_believed(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    two.lose = "part-00000"
    house.end(log)
    done = house.step()
    assert "is missing" in done.trouble["two"]
    assert house.keys("two") == []
    two.lose = ""
    house.settle()
    house.check("two", [log])


def test_what_others_stored_under_the_same_key_is_named_and_never_overwritten(
    tmp_path: Path, clock: Clock, house: House, one: Faulty
) -> None:
    log, other = real_logs()[1:3]
    assert log.size == other.size
    house.end(log)
    house.settle()
    stranger = House(tmp_path / "other", [one], clock)
    stranger.end(replace(other, name=log.name, number=log.number))
    done = stranger.step()
    assert "holds another binary log as binlog.000002" in done.trouble["one"]
    assert stranger.spool.files()
    house.check("one", [log])


def test_an_archive_that_is_longer_than_the_source_is_kept_and_named(
    tmp_path: Path, clock: Clock, house: House, one: Faulty
) -> None:
    log = real_logs()[0]
    house.grow(log, log.cuts[3])
    house.step()
    shorter = House(tmp_path / "other", [one], clock)
    shorter.end(log, log.cuts[2])
    done = shorter.step()
    assert "more of binlog.000001 than the server ever wrote" in done.trouble["one"]
    assert house.key(log, 0, log.cuts[3]) in house.keys("one")
    assert shorter.books.of("one") == []
    assert shorter.spool.files()


def test_what_the_recorder_refuses_is_told_again(house: House) -> None:
    log = real_logs()[0]
    house.grow(log, log.cuts[0])
    house.books.broken = True
    with house.archiver() as archiver:
        done = archiver.step(house.clock())
        assert "locked" in done.unrecorded
        house.end(log)
        archiver.step(house.clock.move(60))
        assert len(house.keys("one")) == 2
        assert house.spool.files()
        house.books.broken = False
        done = archiver.step(house.clock.move(1))
        assert done.unrecorded == ""
    house.settle()
    house.check("one", [log])


def test_an_idle_server_is_confirmed_as_far_as_each_destination_goes(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    a, b = log.cuts[:2]
    house.grow(log, a)
    two.refuse = DestinationError("destination two is away")
    with house.archiver() as archiver:
        asked = house.clock()
        archiver.note_position(house.branch.id, log.number, a, asked)
        archiver.step(house.clock.move(1))
        assert house.books.confirmations == {"one": ((log.number, a), asked)}
        later = house.clock.move(1000)
        archiver.note_position(house.branch.id, log.number, a, later)
        archiver.step(house.clock())
        assert house.books.confirmations["one"] == ((log.number, a), later)
        two.refuse = None
        archiver.step(house.clock.move(400))
        assert house.books.confirmations["two"] == ((log.number, a), later)
        archiver.note_position(house.branch.id, log.number, b, house.clock())
        archiver.step(house.clock.move(1))
        assert house.books.confirmations["one"] == ((log.number, a), later)


def test_what_the_server_had_and_lost_is_never_confirmed(house: House) -> None:
    logs = real_logs()
    asked = house.clock()
    with house.archiver() as archiver:
        house.grow(logs[0], logs[0].cuts[0])
        archiver.note_position(house.branch.id, logs[0].number, logs[0].size, asked)
        archiver.step(house.clock.move(1))
        house.spool.end(house.grow(logs[0], logs[0].cuts[1]), Ending.CUT)  # the rest was never copied
        house.grow(logs[1], logs[1].cuts[0])
        archiver.step(house.clock.move(60))
        assert house.books.confirmations == {}
        later = house.clock()
        archiver.note_position(house.branch.id, logs[1].number, logs[1].cuts[0], later)
        archiver.step(house.clock.move(60))
        assert house.books.confirmations["one"] == ((logs[1].number, logs[1].cuts[0]), later)


@pytest.mark.parametrize(
    "trouble", [KeyUnusableError("cannot encrypt: the key has expired"), OSError(28, "No space left on device")]
)
def test_what_cannot_be_sealed_waits_in_the_spool_and_is_told(house: House, trouble: Exception) -> None:
    logs = real_logs()
    assert isinstance(house.sealer, QuickSealer)
    house.sealer.refuse = trouble
    house.end(logs[0])
    house.grow(logs[1], logs[1].cuts[0])
    with house.archiver() as archiver:
        done = archiver.step(house.clock())
        assert str(trouble) in done.trouble[""]
        assert str(trouble) in archiver.behind()["one"].error
        house.sealer.refuse = None
        assert not archiver.step(house.clock.move(1)).trouble
    house.end(logs[1])
    house.settle()
    house.check("two", logs[:2])


def test_a_damaged_file_is_kept_as_far_as_it_can_be_read_and_the_gap_is_named(house: House) -> None:
    logs = real_logs()
    good = logs[0].cuts[2]
    data = bytearray(logs[0].data)
    data[good + 40] ^= 1
    house.end(replace(logs[0], data=bytes(data)))
    house.end(logs[1])
    first = house.step()
    assert "backupd fetches it from the server again" in first.trouble[""]
    again = house.step(1)
    assert "before it is archived" in again.trouble[""]
    assert (again.stored, house.books.gaps) == ((), [])  # as long as the server may have it whole
    house.judge("the server no longer has the file")
    house.step(1)
    house.settle()
    assert house.keys("one") == [house.key(logs[0], 0, good), house.key(logs[1])]
    kept = house.books.segments["one", house.key(logs[0], 0, good)]
    assert kept.ending is Ending.CUT
    assert kept.transactions == 3
    assert any("offset" in remark or "byte" in remark for remark in kept.remarks)
    gap = house.books.gaps[0]
    assert (gap.after.file, gap.after.pos) == (logs[0].name, good)
    assert gap.before is not None
    assert (gap.before.file, gap.before.pos) == (logs[1].name, 4)
    assert "the server no longer has the file" in gap.reason
    assert not house.spool.files()


@pytest.mark.parametrize("harm", ["flip", "zeros", "truncation"])
def test_a_file_that_was_damaged_in_the_spool_is_archived_when_it_was_fetched_again(
    house: House, tmp_path: Path, harm: str
) -> None:
    logs = real_logs()
    for log in logs[:2]:
        house.end(log)
    file = house.spool.files()[0]
    data = bytearray(logs[0].data)
    offset = logs[0].cuts[1] + 40
    if harm == "flip":
        data[offset] ^= 1
    else:
        data[offset:] = bytes(len(data) - offset) if harm == "zeros" else b""
    file.path.write_bytes(data)
    assert "damaged" in house.step().trouble[""]
    (doubt,) = house.spool.doubts()
    fresh = tmp_path / "fresh"
    fresh.write_bytes(logs[0].data)
    house.spool.renew(file, fresh, logs[0].ending)
    house.spool.judge(doubt)
    house.settle()
    house.check("one", logs[:2])
    assert house.books.gaps == []


def test_a_file_of_which_nothing_can_be_read_leaves_when_its_gap_was_told(house: House) -> None:
    logs = real_logs()
    data = bytearray(logs[0].data)
    data[60] ^= 1
    house.end(replace(logs[0], data=bytes(data)))
    house.end(logs[1])
    house.books.broken = True
    for _ in range(3):
        house.step(1)
        house.judge("the server no longer has the file")
    assert len(house.spool.files()) == 2
    house.books.broken = False
    house.settle()
    assert not house.spool.files()
    assert house.keys("one") == [house.key(logs[1])]
    assert {(gap.after.file, gap.after.pos) for gap in house.books.gaps} == {(logs[0].name, 0)}


def test_two_archivers_of_one_spool_are_refused(house: House) -> None:
    with house.archiver(), pytest.raises(BusyError, match="already archives"), house.archiver():
        pass
    with house.archiver():
        pass


def test_a_lost_memory_costs_nothing_but_work(house: House) -> None:
    log = real_logs()[0]
    for end in log.cuts[:2]:
        house.grow(log, end)
        house.step(60)
    (house.spool.folder / "archive.json").write_text("{")
    house.grow(log, log.cuts[3])
    house.step(60)
    house.step(1)
    assert house.keys("one") == [house.key(log, 0, log.cuts[3])]
    (house.spool.folder / "archive.json").unlink()
    house.end(log)
    house.settle()
    house.check("one", [log])


def test_pieces_stay_while_a_restore_of_their_server_reads(house: House, one: Faulty, clock: Clock) -> None:
    log = real_logs()[0]
    house.grow(log, log.cuts[1])
    house.step()
    house.end(log)
    backup = "20261121T030000Z-00000001"
    put_bytes(one, layout.manifest_key("shop", backup), b"a manifest")
    with Pin(one, "20261121T050000Z-00000002", [("shop", backup)], clock=clock):
        house.step(60)
        house.step(120)
        assert len(house.keys("one")) == 2
        assert len(house.keys("two")) == 1
        assert not house.spool.files()
    one.delete(layout.manifest_key("shop", backup))
    house.settle()
    house.check("one", [log])


def test_what_is_sealed_for_a_destination_that_is_away_is_bounded(house: House, two: Faulty) -> None:
    logs = real_logs()[:3]
    two.refuse = DestinationError("destination two is away")
    for log in logs:
        house.end(log)
    house.step(most_sealed=1)
    assert len(house.keys("one")) == 3
    assert sum(1 for path in (house.spool.folder / "sealed").rglob("*") if path.is_file()) == 0
    two.refuse = None
    house.settle()
    house.check("two", logs)


def test_a_new_branch_follows_and_keeps_its_own_numbers(house: House) -> None:
    logs = real_logs()
    house.end(logs[0])
    with house.spool.locked():
        later = replace(branch_of("20261121T050000Z-0000000b"), parent=house.branch.id)
        house.spool.begin(later)
    house.settle()
    house.branch = later
    house.end(logs[0])
    house.settle()
    keys = house.keys("one")
    assert [key.branch for key in keys] == ["20261121T040000Z-0000000a", later.id]
    assert len(list(log_segments.branches(house.destinations["one"]))) == 2
    with house.archiver() as archiver:
        archiver.step(house.clock())
        assert archiver.archived_to() == (logs[0].number + 1, 0)


@pytest.mark.parametrize("small_part", [1, segment_sealer.SMALL_PART])
def test_killed_at_any_operation_nothing_is_missing_and_nothing_is_stored_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_part: int
) -> None:
    """``small_part``: of the pieces' parts all are taken over, or none."""
    monkeypatch.setattr(segment_sealer, "SMALL_PART", small_part)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # a kill needs none, and there are hundreds of lives
    logs = real_logs()[:2]
    undisturbed = Faults()
    total = _life(tmp_path / "0", logs, undisturbed)
    assert total > 50
    for at in range(1, total + 1):
        _life(tmp_path / f"{at}", logs, Faults(at))
    for at in sorted(undisturbed.changes):
        _life(tmp_path / f"{at}-after", logs, Faults(at, after=True))


def _life(folder: Path, logs: tuple[RealLog, ...], faults: Faults) -> int:
    """Two pieces, the whole file, another one, a piece's removal; killed once, then to the end. How much was done."""
    clock = Clock()
    destination = Faulty("one", clock, faults)
    house = House(folder, [destination], clock, books=Books(faults=faults), sealer=QuickSealer(faults))
    first, second = logs
    stages: list[Callable[[], object]] = [
        lambda: house.grow(first, first.cuts[0]),
        lambda: house.grow(first, first.cuts[2]),
        lambda: house.end(first),
        lambda: house.end(second),
    ]

    def survive(work: Callable[[], object]) -> bool:
        try:
            work()
        except Killed:
            house.spool = Spool(folder)
            return False
        return True

    for stage in stages:
        stage()
        survive(lambda: house.step(60))
    if not survive(house.settle):
        house.settle()
    done = faults.count
    faults.at = -1
    house.check("one", logs)
    assert not house.spool.files()
    state = json.loads((folder / "archive.json").read_text())
    assert state["holdings"]["one"]["drops"] == []
    return done


def test_behind_tells_since_when_there_were_bytes_that_are_not_there(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    house.grow(log, log.cuts[0])
    with house.archiver() as archiver:
        archiver.step(house.clock())
        two.refuse = DestinationError("destination two is away")
        house.grow(log, log.cuts[1])
        since = house.clock.move(60)
        archiver.step(since)
        for size in log.cuts[2:4]:
            house.grow(log, size)
            archiver.step(house.clock.move(60))
        behind = archiver.behind()["two"]
        assert behind.since == since
        assert behind.bytes == log.cuts[3] - log.cuts[0]
        assert house.clock() - since == timedelta(seconds=120)
        assert archiver.behind()["one"].since is None
