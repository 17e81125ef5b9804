"""A file that the server lists and cannot read or open: the stream goes on behind it, and what is missing is a gap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.binlog import session
from backupd.binlog.session import Session
from backupd.binlog.stream_status import StreamEventKind
from backupd.binlog.supervisor import Pace
from backupd.engine.receiver.endings import EndedError, EndKind
from backupd.engine.receiver.receiver import Receiver
from backupd.engine.server.binary_logs import BinlogSource
from backupd.model.server_facts import Position
from tests.support.logs.streaming import (
    STREAMED,
    Streaming,
    assert_identical,
    insert,
    log_status,
    make_server,
    prepare,
    reset,
    until,
)
from tests.support.servers.server import Server
from tests.support.servers.stacks import Stack

_HEADER_LENGTH_AT = 4 + 19 + 2 + 50 + 4
"""Behind the magic number, the event's header, version of the log and of the server, and the time."""


def gone(path: Path) -> None:
    path.unlink()


def overwritten(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def described_wrongly(path: Path) -> None:
    """Headers of events have 18 bytes, it says. (By a description of zeros MariaDB 10.11.19 crashes, or not, as its
    memory is.)"""
    content = bytearray(path.read_bytes())
    content[_HEADER_LENGTH_AT] = 18
    path.write_bytes(content)


def _of_length(path: Path, length: int) -> None:
    """The third event says that it has another length."""
    content = bytearray(path.read_bytes())
    at = 4
    for _ in range(2):
        at += int.from_bytes(content[at + 9 : at + 13], "little")
    content[at + 9 : at + 13] = length.to_bytes(4, "little")
    path.write_bytes(content)


def too_long(path: Path) -> None:
    _of_length(path, 2**31 - 1)


def too_short(path: Path) -> None:
    _of_length(path, 5)


@pytest.fixture(scope="module")
def fresh() -> Iterator[Callable[[Stack], Server]]:
    """A server whose binary log begins anew: one for all tests of a stack."""
    with ExitStack() as running:
        made: dict[str, Server] = {}

        def begun(stack: Stack) -> Server:
            if stack.name in made:
                reset(made[stack.name])
                return made[stack.name]
            made[stack.name] = running.enter_context(make_server(stack))
            prepare(made[stack.name])
            return made[stack.name]

        yield begun


@pytest.mark.parametrize("harm", [gone, overwritten, described_wrongly, too_long, too_short])
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("stack", STREAMED)
def test_the_stream_goes_on_behind_a_file_that_the_server_cannot_read(
    fresh: Callable[[Stack], Server], stack: Stack, tmp_path: Path, harm: Callable[[Path], None], behind: int
) -> None:
    """The newest file that is here, of which nothing is missing, or the one after it."""
    server = fresh(stack)
    with Streaming(server, tmp_path / "spool") as streaming:
        insert(server, 3)
        streaming.has_all(server)
        newest = streaming.spool.newest()
    assert newest is not None
    for _ in range(2):
        server.execute("FLUSH BINARY LOGS")
        insert(server)
    base, _, number = newest.name.rpartition(".")
    harm(server.datadir / f"{base}.{int(number) + behind:06d}")
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        assert len(streaming.kinds(StreamEventKind.GAP)) == len(streaming.spool.gaps())
        assert not streaming.kinds(StreamEventKind.BRANCH)
    gaps = streaming.spool.gaps()
    if behind:
        (gap,) = gaps
        assert gap.after.file in (newest.name, f"{base}.{int(number) + 1:06d}")
        assert gap.before is not None
        assert gap.before.file == f"{base}.{int(number) + 2:06d}"


@pytest.mark.parametrize("stack", STREAMED)
def test_the_stream_goes_on_behind_several_such_files(
    fresh: Callable[[Stack], Server], stack: Stack, tmp_path: Path
) -> None:
    server = fresh(stack)
    with Streaming(server, tmp_path / "spool") as streaming:
        insert(server)
        server.execute("FLUSH BINARY LOGS")
        streaming.has_all(server)
    newest, harms = log_status(server)[0], (gone, described_wrongly, gone, overwritten)
    for _ in range(len(harms) + 1):
        server.execute("FLUSH BINARY LOGS")
        insert(server)
    base, _, number = newest.rpartition(".")
    for behind, harm in enumerate(harms, 1):
        harm(server.datadir / f"{base}.{int(number) + behind:06d}")
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
    (gap,) = streaming.spool.gaps()
    assert gap.before is not None
    assert (gap.after.file, gap.before.file) == (newest, f"{base}.{int(number) + len(harms) + 1:06d}")
    told = streaming.kinds(StreamEventKind.GAP)[-1].gap
    assert told is not None
    assert (told.after, told.before, told.reason) == (gap.after, gap.before, gap.reason)


@pytest.mark.parametrize("stack", STREAMED)
def test_a_file_that_the_server_cannot_open_for_a_while_is_waited_for(
    fresh: Callable[[Stack], Server], stack: Stack, tmp_path: Path
) -> None:
    """It may have too many open: no gap because of that."""
    pace = Pace(tick=0.02, poll=0.15, stall=1.5, first=0.05)
    server = fresh(stack)
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        newest = streaming.spool.newest()
    assert newest is not None
    for _ in range(2):
        server.execute("FLUSH BINARY LOGS")
        insert(server)
    base, _, number = newest.name.rpartition(".")
    closed = server.datadir / f"{base}.{int(number) + 1:06d}"
    closed.chmod(0)
    with Streaming(server, tmp_path / "spool", pace=pace) as streaming:
        until(lambda: streaming.streamer.status().restarts >= 4, "it was tried again and again")
        (lost,) = streaming.kinds(StreamEventKind.LOST)
        assert "cannot open" in lost.message
        closed.chmod(0o660)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert streaming.spool.gaps() == ()


class Crashes:
    """Of a server that reads the file ``fatal``, and is started again right away; the server itself goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fatal, self.count = "", 0
        self._begun = datetime.now(UTC)
        crash, follow = self._crash, Session.follow

        class Broken(Receiver):
            def receive(self, seconds: float) -> None:
                crash(self.file)
                super().receive(seconds)

        def followed(one: Session, name: str) -> None:
            crash(name)
            follow(one, name)

        monkeypatch.setattr(session, "Receiver", Broken)
        monkeypatch.setattr(Session, "follow", followed)
        monkeypatch.setattr(BinlogSource, "started", lambda _source: self._begun + timedelta(seconds=5 * self.count))

    def _crash(self, name: str) -> None:
        if name == self.fatal:
            self.count += 1
            raise EndedError(EndKind.LOST, "Lost connection to server during query")

    def by(self, server: Server) -> str:
        """The file that the server writes now is fatal from here on, and others follow."""
        self.fatal, self.count = log_status(server)[0], 0
        for _ in range(2):
            server.execute("FLUSH BINARY LOGS")
            insert(server)
        return self.fatal


@pytest.mark.parametrize("stack", STREAMED)
def test_what_the_server_crashes_by_is_asked_for_no_more(
    fresh: Callable[[Stack], Server], stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = Crashes(monkeypatch)
    server = fresh(stack)
    first = crashes.by(server)
    with Streaming(server, tmp_path / "spool", wanted=Position(first, 4, "")) as streaming:
        streaming.has_all(server)
    one, other = streaming.spool.branches()
    assert (one.file(one.first_number), crashes.count) == (first, 2), "nothing was here"
    assert f"crashes when it reads {first}" in other.note

    kept = crashes.by(server)
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
    assert (crashes.count, streaming.spool.gaps()) == (2, ()), "all of it was here"
    assert f"crashes when it reads {kept}" in streaming.kinds(StreamEventKind.LOST)[-1].message

    server.execute("FLUSH BINARY LOGS")
    insert(server)
    lacking = crashes.by(server)
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        streaming.reported(StreamEventKind.GAP)
    (gap,) = streaming.spool.gaps()
    assert f"crashes when it reads {lacking}" in gap.reason
    assert crashes.count == 3, "the first time something had come before"

    given_up = [(gap.branch, int(lacking.rpartition(".")[2]))]
    with Streaming(server, tmp_path / "spool", given_up=lambda: given_up) as streaming:
        insert(server)
        streaming.has_all(server)
        assert streaming.streamer.status().restarts == 0, "nothing is brought back"
        assert streaming.spool.is_fatal(lacking)
        reset(server)
        insert(server)
        streaming.reported(StreamEventKind.BRANCH)
        assert not streaming.spool.is_fatal(lacking), "there will be another file of this name"
