"""The stream of real servers of both families; and by when what a server has written is known: the earlier of two
clocks, read before the position. There the server is fake, since no real one has a clock that is ahead."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from backupd.binlog.archive_state import Committed
from backupd.binlog.session import Session, Watch
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import StreamEventKind, StreamState
from backupd.binlog.supervisor import Streamer
from backupd.engine.server.binary_logs import BinlogSource, ListedLog, SourceState
from backupd.model.binlog import BranchReason, Ending
from backupd.model.errors import DestinationError
from backupd.model.server_facts import Flavour, Position, Version
from tests.support.logs.archived import Faulty, House
from tests.support.logs.real_logs import real_logs
from tests.support.logs.streaming import (
    STREAMED,
    Streaming,
    assert_identical,
    insert,
    log_status,
    make_server,
    newest_branch,
    prepare,
    purge,
    reset,
    until,
)
from tests.support.servers.server import Server
from tests.support.servers.stacks import Stack


@pytest.fixture(scope="module", params=STREAMED)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with make_server(request.param) as running:
        prepare(running)
        yield running


def test_every_file_is_identical_over_rotations_a_clean_restart_and_a_kill(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool") as streaming:
        insert(server, 3)
        streaming.has_all(server)
        first = int(log_status(server)[0][-6:])
        for _ in range(12):
            server.execute("FLUSH BINARY LOGS")
            insert(server)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)

        server.restart()
        insert(server, 2)
        streaming.has_all(server)
        server.kill()
        streaming.reported(StreamEventKind.LOST, 2)
        server.start()
        insert(server, 2)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)

        branch, files = newest_branch(streaming.spool)
        assert branch.reason is BranchReason.FIRST
        assert [file.ended for file in files] == [Ending.ROTATED] * 12 + [Ending.STOPPED, Ending.CRASHED, None]
        assert files[0].number == first
        assert streaming.streamer.status().restarts >= 2
        until(lambda: streaming.streamer.status().server_position is not None, "its position is known")
        status = streaming.streamer.status()
        assert status.server_position is not None
        assert (status.server_position.file, status.server_position.pos) == log_status(server)
    assert len(streaming.spool.branches()) == 1
    assert streaming.spool.gaps() == ()


def test_a_reset_begins_a_branch_even_where_the_new_file_has_the_old_name(server: Server, tmp_path: Path) -> None:
    reset(server)
    with Streaming(server, tmp_path / "spool") as streaming:
        insert(server, 5)
        streaming.has_all(server)
        reset(server)
        insert(server, 2)
        event = streaming.reported(StreamEventKind.BRANCH, 2)
        assert event.branch is not None
        assert event.branch.reason is BranchReason.RESET
        assert event.branch.fork is None
        streaming.has_all(server)
        server.execute("FLUSH BINARY LOGS")
        insert(server, 2)
        streaming.has_all(server)
        reset(server)
        insert(server, 20)
        streaming.reported(StreamEventKind.BRANCH, 3)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert [branch.reason for branch in streaming.spool.branches()] == [
        BranchReason.FIRST,
        BranchReason.RESET,
        BranchReason.RESET,
    ]
    kept = streaming.spool.files()
    assert [file.ended for file in kept] == [Ending.CUT, Ending.ROTATED, Ending.CUT, None]


def test_files_that_the_server_removed_are_a_gap_with_a_name(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    with Streaming(server, folder) as streaming:
        insert(server)
        streaming.has_all(server)
        last, _ = log_status(server)
    insert(server, 2)
    server.execute("FLUSH BINARY LOGS")
    insert(server, 2)
    server.execute("FLUSH BINARY LOGS")
    insert(server)
    current, _ = log_status(server)
    purge(server)
    with Streaming(server, folder) as streaming:
        event = streaming.reported(StreamEventKind.GAP)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert event.gap is not None
    assert event.gap.before is not None
    assert (event.gap.after.file, event.gap.before.file, event.gap.before.pos) == (last, current, 4)
    assert event.gap.after.gtid
    assert event.gap.from_at is not None
    assert len(streaming.spool.branches()) == 1
    assert len(streaming.spool.gaps()) == 1


def test_a_file_that_is_here_whole_leaves_no_gap_when_the_server_removes_it(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    with Streaming(server, folder) as streaming:
        insert(server)
        streaming.has_all(server)
    server.execute("FLUSH BINARY LOGS")
    purge(server)
    with Streaming(server, folder) as streaming:
        insert(server)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert streaming.spool.gaps() == ()
    assert len(streaming.spool.branches()) == 1


def test_purging_under_its_feet_takes_nothing_from_it(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        for _ in range(3):
            insert(server, 2)
            server.execute("FLUSH BINARY LOGS")
            server.execute(f"PURGE BINARY LOGS TO '{log_status(server)[0]}'")
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert streaming.spool.gaps() == ()
    assert len(streaming.spool.branches()) == 1


def test_the_first_stream_begins_at_the_file_that_the_oldest_backup_needs(server: Server, tmp_path: Path) -> None:
    wanted, _ = log_status(server)
    server.execute("FLUSH BINARY LOGS")
    insert(server)
    with Streaming(server, tmp_path / "spool", wanted=Position(wanted, 200)) as streaming:
        streaming.has_all(server)
        assert newest_branch(streaming.spool)[1][0].name == wanted
    with Streaming(server, tmp_path / "other", wanted=Position("binlog.000000", 200)) as streaming:
        streaming.has_all(server)
        assert newest_branch(streaming.spool)[1][0].name == log_status(server)[0]


@pytest.mark.parametrize("stack", STREAMED)
def test_a_crash_that_lost_its_tail_is_a_branch_with_its_fork(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    with make_server(stack) as server:
        prepare(server)
        with Streaming(server, folder) as streaming:
            insert(server, 2)
            streaming.has_all(server)
            file, pos = log_status(server)
            insert(server, 3)
            streaming.has_all(server)
            server.kill()
            streaming.reported(StreamEventKind.LOST)
            with (server.datadir / file).open("r+b") as log:
                log.truncate(pos)
            server.start()
            insert(server, 4, size=33)
            event = streaming.reported(StreamEventKind.BRANCH, 2)
            streaming.has_all(server)
            assert_identical(streaming.spool, server)
        branch = event.branch
        assert branch is not None
        assert branch.fork is not None
        assert (branch.reason, branch.fork.file, branch.fork.pos) == (BranchReason.LOST_TAIL, file, pos)
        assert branch.fork.gtid
        assert branch.names_go_on
        first, second = streaming.spool.branches()
        assert branch == second
        assert branch.parent == first.id
        assert branch.first_number == int(file[-6:])
        parent = [kept for kept in streaming.spool.files() if kept.branch == first.id]
        assert parent[-1].size > pos
        assert parent[-1].ended is Ending.CUT


def test_a_server_that_is_down_is_waited_for(server: Server, tmp_path: Path) -> None:
    server.stop()
    try:
        with Streaming(server, tmp_path / "spool") as streaming:
            event = streaming.reported(StreamEventKind.LOST)
            assert "cannot connect" in event.message
            assert streaming.streamer.status().state is StreamState.WAITING
            server.start()
            streaming.has_all(server)
    finally:
        server.start()


def test_a_server_that_sends_fast_has_the_room_looked_at_by_bytes() -> None:
    """A second of catching up is more than a small spool holds."""
    now = datetime(2026, 11, 21, 4, 0, tzinfo=UTC)
    logs = (ListedLog("binlog.000001", 1, 1000),)
    at = Position("binlog.000001", 1000)
    begun = SourceState(now, "", 1, Flavour.MARIADB, Version(10, 11), "binlog", logs, at, None)
    watch = Watch(begun, poll=1, stall=1, clock=lambda: now, quiet=1, seldom=1)
    watch.moved((8 << 20) - 1)
    assert not watch.is_room_due()
    watch.moved(8 << 20)
    assert watch.is_room_due()
    assert not watch.is_room_due()


# -- by when what has come is known

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize("ahead", [timedelta(minutes=30), timedelta(minutes=-30)])
def test_neither_a_clock_of_the_server_that_is_ahead_nor_ours_claims_anything(tmp_path: Path, ahead: timedelta) -> None:
    moments = [NOW, NOW + timedelta(seconds=7)]
    streamer = Streamer(
        "db1",
        cast(BinlogSource, SimpleNamespace()),
        Spool(tmp_path / "spool"),
        installation="i",
        wanted=None,
        max_spool_bytes=1,
        clock=lambda: moments[0],
        on_event=lambda _event: None,
    )

    def look(*, files: bool, dump: int) -> SimpleNamespace:
        del files
        moments.pop(0)  # asking takes a while, and the position is that of its beginning
        return SimpleNamespace(server_time=NOW + ahead, position=Position("binlog.000001", 900), logs=())

    streamer._approach = SimpleNamespace(look=look)  # type: ignore[assignment]  # the fake server
    watch = SimpleNamespace(contradiction=lambda *_all: "", is_stalled=lambda: False, is_note_due=lambda: False)
    session = SimpleNamespace(
        received=(1, 900),
        thread_id=1,
        is_written=lambda _position: None,
        start=SimpleNamespace(branch=SimpleNamespace(id="b")),
    )
    question = streamer._ask(cast(Session, session))
    question.state.exception(timeout=60)
    assert streamer._heed(question, cast(Session, session), cast(Watch, watch)) == ""
    assert streamer._status.server_time == min(NOW, NOW + ahead)


def test_what_one_destination_lacks_is_not_committed(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    heard: list[Committed] = []
    two.refuse = DestinationError("down")
    with house.archiver() as archiver:
        archiver.on_committed = heard.append
        assert archiver.committed() is None
        house.grow(log, log.cuts[1])
        archiver.step(house.clock.move(60))
        assert archiver.committed() is None
        two.refuse = None
        archiver.step(house.clock.move(60))
        first = Committed(house.branch.id, log.number, log.cuts[1])
        assert archiver.committed() == first
        two.refuse = DestinationError("down")
        house.grow(log, log.cuts[3])
        archiver.step(house.clock.move(60))
        assert archiver.committed() == first
        two.refuse = None
        house.end(log)
        archiver.step(house.clock.move(400))
        archiver.step(house.clock.move(400))
        last = Committed(house.branch.id, log.number, log.size)
        assert archiver.committed() == last
    assert heard == sorted(heard)
    assert (heard[0], heard[-1]) == (first, last)
    with house.archiver() as archiver:  # the file has left the spool by now
        archiver.step(house.clock())
        assert archiver.committed() == last


def test_a_catalog_that_is_out_of_reach_does_not_matter(house: House) -> None:
    log = real_logs()[0]
    house.grow(log, log.cuts[1])
    house.books.broken = True
    with house.archiver() as archiver:
        assert archiver.step(house.clock()).unrecorded
        assert archiver.committed() == (house.branch.id, log.number, log.cuts[1])


def test_who_waits_for_what_has_come_does_not_wait_for_the_checkpoint(house: House) -> None:
    log = real_logs()[0]
    house.grow(log, log.cuts[1])
    with house.archiver() as archiver:
        archiver.step(house.clock())
        house.grow(log, log.cuts[2])
        assert not archiver.step(house.clock.move(1)).stored
        archiver.urge()
        assert len(archiver.step(house.clock.move(1)).stored) == 2
        assert archiver.committed() == (house.branch.id, log.number, log.cuts[2])
        house.grow(log, log.cuts[3])
        assert not archiver.step(house.clock.move(1)).stored


def test_nothing_behind_a_file_that_cannot_be_read_counts_as_committed(house: House) -> None:
    log, following = real_logs()[:2]
    good = log.cuts[1]
    house.grow(log)
    broken = bytearray(log.data)
    broken[good + 25] ^= 1
    house.end(log)
    next(file for file in house.spool.files() if file.number == log.number).path.write_bytes(broken)
    house.grow(following)
    with house.archiver() as archiver:
        archiver.step(house.clock())
        house.judge("both copies have the same bytes")
        house.books.broken = True  # so that nothing leaves the spool
        for _ in range(3):
            archiver.step(house.clock.move(400))
        assert archiver.committed() == (house.branch.id, log.number, good)
