"""The stream in trouble: the network, the disk, the account, another server, a copy of the data from earlier."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import StreamEvent, StreamEventKind, StreamState
from backupd.binlog.supervisor import Pace, Streamer
from backupd.engine.server.binary_logs import BinlogSource, SourceState
from backupd.engine.sql.client import Connection
from backupd.model.binlog import BranchReason, Ending
from backupd.model.errors import BusyError
from backupd.model.server_facts import Position, Version
from tests.support.logs.streaming import (
    FAST,
    PASSWORD,
    STREAMED,
    USER,
    Proxy,
    Streaming,
    assert_identical,
    insert,
    log_status,
    make_server,
    newest_branch,
    plain,
    prepare,
    purge,
    reset,
    through_socket,
    until,
)
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.replica import catch_up, part, replica_of
from tests.support.servers.server import Server
from tests.support.servers.stacks import MARIADB, MYSQL, Stack, stacks, whole
from tests.support.stores.folders import give_to_database


@pytest.fixture(scope="module", params=STREAMED)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with make_server(request.param) as running:
        prepare(running)
        yield running


@pytest.fixture(scope="module")
def mariadb() -> Iterator[Server]:
    with make_server(MARIADB) as running:
        prepare(running)
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    assert server.port is not None
    let_in(server)
    with Proxy(server.port) as between:
        yield between


def let_in(server: Server) -> None:
    """MySQL remembers who came through the socket, and lets that one in by TCP without a key."""
    server.connect(user=USER, password=PASSWORD).close()


def test_a_connection_that_breaks_or_dies_silently_loses_nothing(server: Server, proxy: Proxy, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming:
        insert(server, 2)
        streaming.has_all(server)
        proxy.cut()
        streaming.reported(StreamEventKind.LOST)
        insert(server, 2)
        streaming.has_all(server)
        proxy.hangs.set()
        insert(server, 2)
        until(
            lambda: any("no data was received" in event.message for event in streaming.kinds(StreamEventKind.LOST)),
            "the silence was noticed",
        )
        proxy.hangs.clear()
        proxy.cut()
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert len(streaming.spool.branches()) == 1
    assert streaming.spool.gaps() == ()


@pytest.mark.parametrize("lost", [0, 3])
def test_a_failover_is_followed_by_gtid_and_what_it_lost_is_named(
    server: Server, proxy: Proxy, tmp_path: Path, lost: int
) -> None:
    with Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming:
        streaming.has_all(server)
        with replica_of(server) as replica:
            insert(server, 3)
            catch_up(server, replica)
            part(replica)
            file, pos = log_status(server)
            insert(server, lost)
            streaming.has_all(server)
            let_in(replica)
            insert(replica, 2, size=77)
            assert replica.port is not None
            proxy.target = replica.port
            proxy.cut()
            event = streaming.reported(StreamEventKind.BRANCH, 2)
            streaming.has_all(replica)
            assert_identical(streaming.spool, replica)
    branch = event.branch
    assert branch is not None
    assert branch.reason is BranchReason.FAILOVER
    assert branch.fork is not None
    assert branch.fork.gtid
    assert (branch.fork.file, branch.fork.pos) == (file, pos)
    assert not branch.names_go_on
    assert ("lacks" in branch.note) is bool(lost)


def test_the_fork_is_found_where_several_files_were_lost(server: Server, proxy: Proxy, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming:
        insert(server, 1)
        streaming.has_all(server)
        with replica_of(server) as replica:
            insert(server, 3)
            catch_up(server, replica)
            part(replica)
            file, pos = log_status(server)
            for _ in range(3):
                insert(server, 1)
                server.execute("FLUSH BINARY LOGS")
            insert(server, 1)
            streaming.has_all(server)
            let_in(replica)
            insert(replica, 2, size=77)
            assert replica.port is not None
            proxy.target = replica.port
            proxy.cut()
            branch = streaming.reported(StreamEventKind.BRANCH, 2).branch
            streaming.has_all(replica)
            assert_identical(streaming.spool, replica)
    assert branch is not None
    assert branch.reason is BranchReason.FAILOVER
    assert branch.fork is not None, branch.note
    assert (branch.fork.file, branch.fork.pos) == (file, pos)
    assert "lacks" in branch.note


def test_a_wrong_password_stands_still_until_it_is_right(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool", connection=through_socket(server, "wrong")) as streaming:
        event = streaming.reported(StreamEventKind.FAILED)
        assert streaming.streamer.status().state is StreamState.FAILED
        assert "wrong" not in f"{event.message} {event.detail}"
        server.query(
            f"SET PASSWORD FOR {USER}@'%%' = {'PASSWORD(%s)' if not hasattr(server, 'flavour') else '%s'}", ("wrong",)
        )
        try:
            streaming.has_all(server)
        finally:
            server.query(
                f"SET PASSWORD FOR {USER}@'%%' = {'PASSWORD(%s)' if not hasattr(server, 'flavour') else '%s'}",
                (PASSWORD,),
            )


def test_the_right_to_read_the_binary_log_is_asked_for_by_name(server: Server, tmp_path: Path) -> None:
    server.execute(f"REVOKE REPLICATION SLAVE ON *.* FROM {USER}@'%'")
    try:
        with Streaming(server, tmp_path / "spool") as streaming:
            event = streaming.reported(StreamEventKind.FAILED)
            assert "REPLICATION SLAVE" in f"{event.detail} {event.hint}"
            server.execute(f"GRANT REPLICATION SLAVE ON *.* TO {USER}@'%'")
            streaming.has_all(server)
    finally:
        server.execute(f"GRANT REPLICATION SLAVE ON *.* TO {USER}@'%'")


def test_a_full_disk_is_survived(mariadb: Server, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        mariadb.execute("FLUSH BINARY LOGS")
        with Streaming(mariadb, small / "spool") as streaming:
            insert(mariadb, 2)
            streaming.has_all(mariadb)
            insert(mariadb, 1, size=2_000_000)
            event = streaming.reported(StreamEventKind.PAUSED)
            assert "no room" in event.message
            assert streaming.streamer.status().state is StreamState.PAUSED
            insert(mariadb)
            subprocess.run(["mount", "-o", "remount,size=16m", str(small)], check=True)
            streaming.has_all(mariadb)
            assert_identical(streaming.spool, mariadb)
        assert streaming.spool.gaps() == ()
        assert len(streaming.spool.branches()) == 1
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_spool_over_its_bound_pauses_until_the_archive_has_made_room(mariadb: Server, tmp_path: Path) -> None:
    mariadb.execute("FLUSH BINARY LOGS")
    seen: dict[str, bytes] = {}
    with Streaming(mariadb, tmp_path / "spool", limit=150_000) as streaming:
        streaming.has_all(mariadb)
        for _ in range(6):
            insert(mariadb, 1, size=60_000)
            mariadb.execute("FLUSH BINARY LOGS")
        streaming.reported(StreamEventKind.PAUSED)

        def archived() -> bool:
            for file in streaming.spool.files():
                if file.ended is not None:
                    seen[file.name] = plain(file.path)
                    streaming.spool.remove(file)
            status = streaming.streamer.status()
            return (status.file, status.pos) == log_status(mariadb)

        until(archived, "everything has passed through")
        streaming.has_all(mariadb)
        assert_identical_but_for(streaming, mariadb, seen)
    assert len(seen) >= 6
    assert streaming.spool.gaps() == ()


def assert_identical_but_for(streaming: Streaming, server: Server, seen: dict[str, bytes]) -> None:
    _branch, files = newest_branch(streaming.spool)
    for name, content in (seen | {file.name: plain(file.path) for file in files}).items():
        assert content == plain(server.datadir / name), name
    numbers = sorted(int(name[-6:]) for name in {*seen, *(file.name for file in files)})
    assert numbers == list(range(numbers[0], int(log_status(server)[0][-6:]) + 1))


def test_two_streams_never_write_to_one_spool(mariadb: Server, tmp_path: Path) -> None:
    patient = replace(FAST, stall=600.0)  # the server may be slow: nothing but the other stream could interrupt it
    with Streaming(mariadb, tmp_path / "spool", pace=patient) as streaming:
        streaming.has_all(mariadb)
        with pytest.raises(BusyError, match="another stream"), Streaming(mariadb, tmp_path / "spool") as second:
            until(lambda: not second._thread.is_alive(), "the second one has ended")
        insert(mariadb)
        streaming.has_all(mariadb)
        assert streaming.streamer.status().restarts == 0


def test_two_installations_stream_one_server_side_by_side(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "one") as one, Streaming(server, tmp_path / "two", installation="another") as two:
        insert(server, 2)
        one.has_all(server)
        two.has_all(server)
        assert one.kinds(StreamEventKind.FAILED) == two.kinds(StreamEventKind.FAILED) == []


def test_a_copy_of_the_data_from_earlier_is_noticed_although_the_binary_log_goes_on(tmp_path: Path) -> None:
    with make_server(MARIADB) as server:
        prepare(server)
        server.stop()
        copy = server.base / "copy"
        subprocess.run(["cp", "-a", str(server.datadir), str(copy)], check=True)
        server.start()
        with Streaming(server, tmp_path / "spool") as streaming:
            insert(server, 3, size=100_000)
            streaming.has_all(server)
            last, _ = log_status(server)
            until(
                lambda: streaming.spool.seen() is not None and streaming.streamer.status().server_position is not None,
                "the server was looked at",
            )
            server.stop()
            logs = list(server.datadir.glob("binlog.*"))
            for log in logs:
                shutil.copy2(log, copy / log.name)
                give_to_database(copy / log.name)
            shutil.rmtree(server.datadir)
            copy.rename(server.datadir)
            server.start()
            event = streaming.reported(StreamEventKind.BRANCH, 2)
            streaming.has_all(server)
            assert_identical(streaming.spool, server)
        assert event.branch is not None
        assert event.branch.reason is BranchReason.RESTORE
        assert event.branch.fork is None
        assert event.branch.first_number == int(last[-6:]) + 1
        kept = [file for file in streaming.spool.files() if file.branch != event.branch.id]
        assert kept[-1].ended is Ending.STOPPED


@pytest.mark.parametrize("stack", STREAMED)
def test_a_time_without_a_binary_log_begins_a_branch_that_nothing_is_replayed_across(
    stack: Stack, tmp_path: Path
) -> None:
    pace = replace(FAST, most=60.0, away=0.1)
    with make_server(stack) as server:
        prepare(server)
        with Streaming(server, tmp_path / "spool", pace=pace) as streaming:
            insert(server, 2)
            streaming.has_all(server)
            server.restart_logging(binlog=False)
            off = streaming.reported(StreamEventKind.FAILED)
            assert "writes no binary log" in off.message
            assert streaming.spool.unlogged() is not None
            insert(server, 2)
        server.restart_logging(binlog=True)
        insert(server, 2)
        with Streaming(server, tmp_path / "spool", pace=pace) as again:  # another process knows it from the disk
            event = again.reported(StreamEventKind.BRANCH)
            again.has_all(server)
            assert_identical(again.spool, server)
            server.restart_logging(binlog=False)
            again.reported(StreamEventKind.FAILED)
            server.restart_logging(binlog=True)
            again.reported(StreamEventKind.BRANCH, 2)
            again.has_all(server)
            assert len(again.kinds(StreamEventKind.FAILED)) == 1
        first, second, third = again.spool.branches()
        assert event.branch == second
        assert (second.reason, second.parent, second.fork) == (BranchReason.UNKNOWN, first.id, None)
        assert second.since is not None
        assert first.noticed_at < second.since < off.at < second.noticed_at
        assert "wrote no binary log between" in second.note
        assert "take a full backup now" in event.hint
        assert third.reason is BranchReason.UNKNOWN
        assert again.spool.unlogged() is None


def test_a_server_that_is_out_of_reach_is_looked_for_often_and_told_of_once(tmp_path: Path) -> None:
    looks: list[float] = []

    class Counting(BinlogSource):
        def look(self, *, files: bool = True, dump: int = 0) -> SourceState:
            looks.append(time.monotonic())
            return super().look(files=files, dump=dump)

    nowhere = Connection(socket=str(tmp_path / "nowhere.sock"), user=USER, password=PASSWORD)
    heard: list[StreamEvent] = []
    streamer = Streamer(
        "db1",
        Counting(nowhere),
        Spool(tmp_path / "spool"),
        installation="test",
        wanted=None,
        max_spool_bytes=2**40,
        clock=lambda: datetime.now(UTC),
        on_event=heard.append,
        pace=Pace(first=0.01, away=0.02),
    )
    stop = threading.Event()
    thread = threading.Thread(target=streamer.run, args=(stop,))
    thread.start()
    try:
        until(lambda: len(looks) >= 15, "it was tried again and again")
    finally:
        stop.set()
        thread.join()
    assert [event.kind for event in heard] == [StreamEventKind.LOST]
    assert Pace().away == 5.0


def test_the_marker_of_a_restore_begins_a_branch(mariadb: Server, tmp_path: Path) -> None:
    marker = {"id": ""}
    with Streaming(mariadb, tmp_path / "spool", marker=lambda _datadir: marker["id"]) as streaming:
        streaming.has_all(mariadb)
        until(lambda: streaming.streamer.status().server_position is not None, "the server was looked at")
        mariadb.stop()
        marker["id"] = "20261121T042512Z-7f3a9c01"
        mariadb.start()
        event = streaming.reported(StreamEventKind.BRANCH, 2)
        streaming.has_all(mariadb)
        assert event.branch is not None
        assert event.branch.reason is BranchReason.RESTORE
        assert marker["id"] in event.branch.note


def test_a_file_that_the_server_itself_cannot_read_to_its_end_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with make_server(MARIADB) as server:
        prepare(server)
        insert(server, 2)
        file, pos = log_status(server)
        insert(server, 1, size=5_000)
        server.kill()
        with (server.datadir / file).open("r+b") as log:
            log.truncate(pos + 2_000)
        server.start()
        insert(server, 2)
        with Streaming(server, tmp_path / "spool") as first:
            first.has_all(server)
        with Streaming(server, tmp_path / "other", wanted=Position(file, 4)) as streaming:
            streaming.has_all(server)
            branch, files = newest_branch(streaming.spool)
        # The transaction that was cut off in the middle is not here either: the server's copiers never get it.
        assert (files[0].name, files[0].size, files[0].ended) == (file, pos, Ending.CUT)
        assert plain(files[0].path) == plain(server.datadir / file)[:pos]
        assert branch.first_number == int(file[-6:])


def test_a_file_that_is_missing_in_the_middle_of_the_servers_list_is_a_gap(mariadb: Server, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    with Streaming(mariadb, folder) as streaming:
        insert(mariadb)
        streaming.has_all(mariadb)
        last, _ = log_status(mariadb)
    mariadb.execute("FLUSH BINARY LOGS")
    insert(mariadb)
    lost, _ = log_status(mariadb)
    mariadb.execute("FLUSH BINARY LOGS")
    insert(mariadb)
    (mariadb.datadir / lost).unlink()
    with Streaming(mariadb, folder) as streaming:
        event = streaming.reported(StreamEventKind.GAP)
        streaming.has_all(mariadb)
        assert_identical(streaming.spool, mariadb)
    assert event.gap is not None
    assert event.gap.before is not None
    assert (event.gap.after.file, event.gap.before.file) == (last, log_status(mariadb)[0])
    assert len(streaming.spool.branches()) == 1
    assert streaming.streamer.status().restarts < 10
    mariadb.execute(f"PURGE BINARY LOGS TO '{log_status(mariadb)[0]}'")


@pytest.mark.parametrize("stack", stacks(*whole(*MYSQL)))
def test_without_gtids_names_and_bytes_alone_tell_whether_it_goes_on(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    with make_server(stack, gtid_mode="OFF", enforce_gtid_consistency="OFF") as server:
        prepare(server)
        with Streaming(server, folder) as streaming:
            insert(server, 2)
            streaming.has_all(server)
            server.kill()
            streaming.reported(StreamEventKind.LOST)
            server.start()
            insert(server)
            streaming.has_all(server)
            assert_identical(streaming.spool, server)
            # A crash alone leaves no hole: nothing but the server's own list can say so.
            assert [kept.ended for kept in streaming.spool.files()] == [Ending.CRASHED, None]
            server.execute("FLUSH BINARY LOGS")
            insert(server)
            streaming.has_all(server)
            file, pos = log_status(server)
            insert(server, 2)
            streaming.has_all(server)
            server.kill()
            streaming.reported(StreamEventKind.LOST, 2)
            with (server.datadir / file).open("r+b") as log:
                log.truncate(pos)
            server.start()
            insert(server)
            lost = streaming.reported(StreamEventKind.BRANCH, 2).branch
            streaming.has_all(server)
            assert_identical(streaming.spool, server)
            assert lost is not None
            assert lost.reason is BranchReason.LOST_TAIL
            assert lost.fork == Position(file, pos, "")
        server.execute("FLUSH BINARY LOGS")
        purge(server)
        with Streaming(server, folder) as streaming:
            streaming.has_all(server)
        # The file that was here was cut while it was written to, and nothing tells what followed in it.
        if stack.version() >= Version(8, 0, 30):
            assert len(streaming.spool.gaps()) == 1
        else:  # no status variable tells how far InnoDB's log is on its disk, which would show the same history
            assert streaming.spool.branches()[-1].reason is BranchReason.UNKNOWN
        with Streaming(server, folder) as streaming:
            streaming.has_all(server)
            reset(server)
            insert(server)
            again = streaming.reported(StreamEventKind.BRANCH).branch
            streaming.has_all(server)
        assert again is not None
        assert again.reason is BranchReason.RESET


def test_the_server_is_about_to_remove_what_is_not_archived(server: Server, tmp_path: Path) -> None:
    if isinstance(server, MySQLServer) and server.version < Version(8, 0):
        return  # it knows whole days only, which no test waits for
    before = server.scalar("SELECT @@GLOBAL.binlog_expire_logs_seconds")
    server.execute("FLUSH BINARY LOGS")
    oldest = int(log_status(server)[0][-6:])
    archived = [oldest]
    with Streaming(server, tmp_path / "spool", archived_to=lambda: (archived[0], 0)) as streaming:
        streaming.has_all(server)
        server.execute("FLUSH BINARY LOGS")
        try:
            server.execute("SET GLOBAL binlog_expire_logs_seconds = 3000")
            event = streaming.reported(StreamEventKind.PURGE_ALARM)
            assert f"{oldest:06d}" in event.message
            assert event.hint
            archived[0] = oldest + 1
            streaming.reported(StreamEventKind.PURGE_OVER)
        finally:
            server.execute(f"SET GLOBAL binlog_expire_logs_seconds = {before}")
