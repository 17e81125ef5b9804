"""Commits of real servers that wait until the stream has them."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.binlog import session
from backupd.binlog.acknowledgement import DESTINATION, SPOOL, Evidence
from backupd.binlog.archiver import Archiver
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import StreamEventKind
from backupd.engine.receiver.connection import Request
from backupd.engine.receiver.endings import EndedError
from backupd.engine.receiver.log_bytes import LogPosition
from backupd.engine.receiver.receiver import Receiver
from backupd.engine.server.binary_logs import BinlogSource
from tests.support.logs.archived import Books, Faulty, QuickSealer
from tests.support.logs.semi_sync import Commit, Writer, facts, switch_on, wait
from tests.support.logs.streaming import (
    STREAMED,
    Streaming,
    assert_identical,
    insert,
    log_status,
    make_server,
    reset,
    through_socket,
    until,
)
from tests.support.servers.server import Server


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with make_server(request.param) as running:
        switch_on(running)
        yield running


def attached(server: Server) -> None:
    """Wait until commits wait for the stream."""
    until(lambda: facts(server).clients == 1 and facts(server).status, f"semi-synchronous: {facts(server)}")


def received(spool: Spool) -> bytes:
    return b"".join(file.path.read_bytes() for file in spool.files())


class Disk:
    """``os`` as the session has it, with a disk that stands still while ``stands`` is set, and refuses ``refuses``
    times."""

    def __init__(self) -> None:
        self.stands = threading.Event()
        self.synced = self.refuses = 0

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def fdatasync(self, descriptor: int) -> None:
        while self.stands.is_set():
            self.stands.wait(0)
            threading.Event().wait(0.01)
        if self.refuses:
            self.refuses -= 1
            raise OSError(errno.EIO, "Input/output error")
        os.fdatasync(descriptor)
        self.synced += 1


@pytest.mark.parametrize("server", STREAMED, indirect=True)
def test_a_commit_waits_until_the_spool_is_synced(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    monkeypatch.setattr(session, "os", disk)
    with Streaming(server, tmp_path / "spool", acknowledge=SPOOL) as streaming:
        attached(server)
        before = facts(server)
        insert(server, 5)
        disk.stands.set()
        commit = Commit(server, "waits-for-the-disk")
        assert not commit.is_over(1.0)
        disk.stands.clear()
        assert commit.is_over(300)
        assert commit.error is None
        assert b"waits-for-the-disk" in received(streaming.spool)
        server.execute("FLUSH BINARY LOGS")
        insert(server, 3, size=3_000_000)
        after = facts(server)
        assert after.acknowledged >= before.acknowledged + 9
        assert (after.unacknowledged, after.fell_back) == (before.unacknowledged, before.fell_back)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)


@pytest.mark.parametrize("server", STREAMED, indirect=True)
def test_what_a_client_was_told_of_is_in_the_spool_when_its_server_is_killed(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool", acknowledge=SPOOL) as streaming:
        for turn in range(3):
            attached(server)
            writers = [Writer(server, f"turn-{turn}-writer-{one}") for one in range(4)]
            until(lambda writers=writers: all(len(writer.told) > 50 for writer in writers), "commits")  # type: ignore[misc]
            server.kill()
            for writer in writers:
                writer.join()
            content = received(streaming.spool)
            assert [text for writer in writers for text in writer.told if text.encode() not in content] == []
            server.start()
            wait(server)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert (len(streaming.spool.branches()), streaming.spool.gaps()) == (1, ())


class Storing:
    """Archives what ``streaming`` copies at one destination, which can hang, each time that somebody waits for it or a
    moment has passed."""

    def __init__(self, spool: Spool) -> None:
        self.destination = Faulty("one", lambda: datetime.now(UTC))
        self.archiver = Archiver(
            spool,
            {"one": self.destination},
            QuickSealer(),
            Books(),
            checkpoint=timedelta(hours=1),
            clock=lambda: datetime.now(UTC),
            patience=0.5,
        )
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def urge(self) -> None:
        self.archiver.urge()
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(0.5)
            self._wake.clear()
            self.archiver.step(datetime.now(UTC))

    def __enter__(self) -> Storing:
        self.archiver.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.destination.hang is not None:
            self.destination.hang.set()
        self._stop.set()
        self._thread.join()
        self.archiver.__exit__(None, None, None)


@pytest.mark.parametrize("server", STREAMED, indirect=True)
def test_a_commit_waits_until_the_destination_has_it_whoever_connects_again(server: Server, tmp_path: Path) -> None:
    storing = Storing(Spool(tmp_path / "spool"))
    streaming = Streaming(
        server,
        tmp_path / "spool",
        acknowledge=DESTINATION,
        committed=storing.archiver.committed,
        on_asked=storing.urge,
    )
    storing.archiver.spool = streaming.spool
    storing.archiver.on_committed = lambda _committed: streaming.streamer.rouse()
    with storing, streaming:
        attached(server)
        insert(server, 3)
        server.execute("FLUSH BINARY LOGS")
        insert(server, 2)
        stored = storing.archiver.committed()
        assert stored is not None
        assert (stored.number, stored.position) == (int(log_status(server)[0][-6:]), log_status(server)[1])
        before = facts(server)
        storing.destination.hang = threading.Event()
        commit = Commit(server, "waits-for-the-destination")
        assert not commit.is_over(1.0)
        until(lambda: b"waits-for-the-destination" in received(streaming.spool), "it is in the spool")
        lives = streaming.streamer.status().restarts
        for (dump,) in server.query("SELECT ID FROM information_schema.PROCESSLIST WHERE COMMAND LIKE 'Binlog Dump%%'"):
            server.execute(f"KILL {dump}")
        until(lambda: streaming.streamer.status().restarts > lives, "another connection")
        attached(server)
        assert not commit.is_over(1.0)
        storing.destination.hang.set()
        storing.destination.hang = None
        assert commit.is_over(300)
        assert commit.error is None
        assert facts(server).fell_back == before.fell_back
        assert commit.seconds < 300, "of 600 s"
        streaming.has_all(server)


@contextlib.contextmanager
def another_replica(server: Server) -> Iterator[None]:
    """A semi-synchronous replica that acknowledges at once."""
    name, position = log_status(server)
    request = Request(name, position, 77, 1.0, semi_sync=True)
    stop = threading.Event()
    replica: Receiver

    def run() -> None:
        with contextlib.suppress(EndedError):
            while not stop.is_set():
                replica.receive(0.05)

    def acknowledge(position: LogPosition) -> None:
        replica.acknowledge(position)

    with Receiver(through_socket(server), request, Nowhere(position), on_asked=acknowledge) as replica:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield
        stop.set()
        thread.join()


class Nowhere:
    """Takes nothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def follow(self, name: str) -> None:
        self.size = 4

    def describe(self, description: bytes, seconds: int, server_id: int) -> None:
        """Any will do."""

    def put(self, data: bytes | memoryview) -> None:
        self.size += len(data)

    def take_back(self, size: int) -> None:
        self.size = size


def evidence(streaming: Streaming) -> Evidence:
    found = streaming.streamer.status().acknowledgement
    assert found is not None
    return found


@pytest.mark.parametrize("server", STREAMED, indirect=True)
def test_rpo_0_is_claimed_only_while_every_commit_needs_our_acknowledgement(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    monkeypatch.setattr(session, "os", disk)
    with Streaming(server, tmp_path / "spool", acknowledge=SPOOL) as streaming:
        attached(server)
        insert(server, 2)
        until(lambda: evidence(streaming).since is not None, "RPO 0 is claimed")
        with another_replica(server):
            until(lambda: "not by backupd alone" in evidence(streaming).why, "another replica is noticed")
            disk.stands.set()
            commit = Commit(server, "acknowledged-by-another")
            assert commit.is_over(300)
            assert commit.error is None
            assert evidence(streaming).since is None
            disk.stands.clear()
        until(lambda: evidence(streaming).since is not None, "RPO 0 is claimed again")
        streaming.reported(StreamEventKind.UNACKNOWLEDGED)
        first, second = evidence(streaming).windows
        assert first.until < second.since
        server.execute(f"SET GLOBAL rpl_semi_sync_{facts(server).source}_timeout = 300")
        before = evidence(streaming)
        disk.stands.set()
        assert Commit(server, "after-the-timeout").is_over(300)
        disk.stands.clear()
        until(lambda: evidence(streaming).answered_at != before.answered_at, "the timeout is noticed")
        assert evidence(streaming).lost_at is None or evidence(streaming).lost_at >= second.until  # type: ignore[operator]  # not None
        until(lambda: len(evidence(streaming).windows) > 2 and not evidence(streaming).why, "a third window")
        assert evidence(streaming).windows[2].since > evidence(streaming).windows[1].until
        streaming.has_all(server)
        assert_identical(streaming.spool, server)


@contextlib.contextmanager
def writing(server: Server, count: int = 8) -> Iterator[list[float]]:
    """Seconds that each commit of several clients took."""
    took: list[float] = []
    over = threading.Event()

    def run(number: int) -> None:
        while not over.is_set():
            commit = Commit(server, f"of-client-{number}")
            if not commit.is_over(900) or commit.error is not None:
                return
            took.append(commit.seconds)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield took
    finally:
        over.set()
        for thread in threads:
            thread.join()


def end_dumps(server: Server) -> None:
    for (dump,) in server.query("SELECT ID FROM information_schema.PROCESSLIST WHERE COMMAND LIKE 'Binlog Dump%%'"):
        server.execute(f"KILL {dump}")


@pytest.mark.parametrize("server", STREAMED, indirect=True)
def test_a_connection_that_breaks_while_many_write_is_there_again_before_a_commit_has_waited_for_the_timeout(
    server: Server, tmp_path: Path
) -> None:
    """While a commit waits and others are to be written, servers do not tell where they stand."""
    with Streaming(server, tmp_path / "spool", acknowledge=SPOOL) as streaming:
        attached(server)
        insert(server, 3)
        before = facts(server)
        with writing(server) as took:
            for life in range(1, 4):
                done = len(took)
                until(lambda done=done: len(took) > done + 50, "commits")  # type: ignore[misc]
                end_dumps(server)
                until(lambda life=life: streaming.streamer.status().restarts >= life, "another")  # type: ignore[misc]
                if life == 2:
                    server.execute("FLUSH BINARY LOGS")
        assert max(took) < 300, "of 600 s"
        assert facts(server).fell_back == before.fell_back
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert (len(streaming.spool.branches()), streaming.spool.gaps()) == (1, ())


@pytest.mark.parametrize("server", STREAMED, indirect=True)
def test_a_stream_that_takes_over_from_another_does_not_ask_what_commits_hold_up_that_wait_for_it(
    server: Server, tmp_path: Path
) -> None:
    with Streaming(server, tmp_path / "spool", acknowledge=SPOOL):
        attached(server)
        insert(server, 3)
        before = facts(server)
        known = BinlogSource(through_socket(server)).look()
        insert(server, 3)  # received by the first one
    with contextlib.ExitStack() as streams, writing(server) as took:
        threading.Event().wait(0.5)
        second = Streaming(server, tmp_path / "spool", acknowledge=SPOOL, known=known)
        streams.enter_context(second)
        until(lambda: len(took) > 50, "commits")
        after = facts(server)
    assert after.fell_back == before.fell_back
    with Streaming(server, tmp_path / "spool") as third:
        third.has_all(server)
        assert_identical(third.spool, server)
    assert second.kinds(StreamEventKind.BRANCH) == []
    assert (len(third.spool.branches()), third.spool.gaps()) == (1, ())


@pytest.mark.parametrize("server", STREAMED, indirect=True)
def test_what_is_known_of_a_server_is_not_gone_by_when_its_log_was_reset(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool", acknowledge=SPOOL):
        attached(server)
        insert(server, 3)
        source = BinlogSource(through_socket(server))
        known = source.look()
        assert source.look_again(known) is not None
    server.execute(f"SET GLOBAL rpl_semi_sync_{facts(server).source}_enabled = OFF")
    reset(server)
    insert(server, 1)
    assert source.look_again(known) is None
    wait(server)
    with Streaming(server, tmp_path / "spool", acknowledge=SPOOL, known=known) as second:
        second.reported(StreamEventKind.BRANCH)
        attached(server)
        second.has_all(server)
        assert_identical(second.spool, server)


@pytest.mark.parametrize("server", STREAMED, indirect=True)
def test_what_the_disk_refused_once_is_written_anew_and_compared_before_anything_is_acknowledged(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells that once, and may drop the bytes: the next sync succeeds without them."""
    disk, starts = Disk(), list[int]()

    def asked(file: str, start: int, *more: Any, **named: Any) -> Request:
        starts.append(start)
        return Request(file, start, *more, **named)

    monkeypatch.setattr(session, "os", disk)
    with Streaming(server, tmp_path / "spool", acknowledge=SPOOL) as streaming:
        attached(server)
        insert(server, 5)
        streaming.has_all(server)
        before = streaming.spool.files()[-1]
        inode, synced = before.path.stat().st_ino, disk.synced
        monkeypatch.setattr(session, "Request", asked)
        disk.refuses = 1
        commit = Commit(server, "refused-once")
        assert commit.is_over(300)
        assert commit.error is None
        streaming.reported(StreamEventKind.FAILED)
        assert disk.refuses == 0
        assert disk.synced > synced
        assert starts[0] == 4
        after = streaming.spool.files()[-1]
        assert (after.key, after.path.stat().st_ino != inode) == (before.key, True)
        attached(server)
        until(lambda: not Spool(tmp_path / "spool").is_distrusted(after), "it is compared")
        insert(server, 2)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert b"refused-once" in received(streaming.spool)
