"""A stream under test: in a thread, at a pace for tests, with everything that it told."""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from backupd.binlog.acknowledgement import OFF, Evidence
from backupd.binlog.archive_state import Committed
from backupd.binlog.continuity import without_flag
from backupd.binlog.spool_files import Spool, Spooled
from backupd.binlog.stream_status import StreamEvent, StreamEventKind, StreamState
from backupd.binlog.supervisor import ArchivedTo, GivenUp, Pace, Streamer
from backupd.engine.server.binary_logs import BinlogSource, SourceState
from backupd.engine.sql.client import Connection
from backupd.model.binlog import Branch, Gap
from backupd.model.server_facts import Position
from tests.support.oracle import nothing_lost, same
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import Server
from tests.support.servers.stacks import STACKS, Stack, stacks, whole

USER, PASSWORD = "stream", "Stream-s3cret \\\"#' 9"
FAST = Pace(tick=0.02, poll=0.15, stall=1.5, purge=0.3, first=0.05, most=0.3)
STREAMED = stacks(*whole(*STACKS))
"""Parameters: every stack whose log can be streamed. What is said of the others, tests/e2e/streams/test_branches.py
asserts."""
TABLE = "CREATE TABLE shop.t (id INT AUTO_INCREMENT PRIMARY KEY, t LONGTEXT)"


def make_server(stack: Stack, **options: str | int | None) -> Server:
    """Not started yet."""
    return stack.make(options=options, tcp=True)


def prepare(server: Server) -> None:
    """An account with just the privileges that a stream needs, and something to write to."""
    mariadb = isinstance(server, PrivateServer)
    server.query(f"CREATE USER {USER}@'%%' IDENTIFIED BY %s", (PASSWORD,))
    server.execute(
        f"GRANT REPLICATION SLAVE, {'BINLOG MONITOR' if mariadb else 'REPLICATION CLIENT'} ON *.* TO {USER}@'%'",
        "CREATE DATABASE shop",
        TABLE,
    )


def through_socket(server: Server, password: str = PASSWORD) -> Connection:
    return Connection(socket=str(server.socket), user=USER, password=password)


def insert(server: Server, count: int = 1, size: int = 20) -> None:
    for _ in range(count):
        server.query("INSERT INTO shop.t (t) VALUES (REPEAT('x', %s))", (size,))


def reset(server: Server) -> None:
    server.execute(server.words.reset)


def purge(server: Server) -> None:
    """Remove all files but the current one: as soon as nobody reads them, which the server notices a moment after the
    reader has gone."""
    current, _ = log_status(server)

    def is_alone() -> bool:
        server.execute(f"PURGE BINARY LOGS TO '{current}'")
        return str(server.query("SHOW BINARY LOGS")[0][0]) == current

    until(is_alone, "the older files are gone")


def log_status(server: Server) -> tuple[str, int]:
    row = server.query(server.words.log_status)[0]
    return str(row[0]), int(row[1])


def until(condition: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.01)


class Streaming:
    """A streamer at work while the block lasts."""

    def __init__(
        self,
        server: Server,
        folder: Path,
        *,
        connection: Connection | None = None,
        wanted: Position | None = None,
        limit: int = 2**40,
        marker: Callable[[str], str] = lambda _datadir: "",
        archived_to: ArchivedTo = lambda: None,
        pace: Pace = FAST,
        installation: str = "test",
        given_up: GivenUp = lambda: (),
        acknowledge: str = OFF,
        evidence: Evidence | None = None,
        committed: Callable[[], Committed | None] = lambda: None,
        on_asked: Callable[[], None] = lambda: None,
        known: SourceState | None = None,
    ) -> None:
        self.spool = Spool(folder)
        self.events: list[StreamEvent] = []
        source = BinlogSource(connection or through_socket(server), marker=marker, semi_sync=acknowledge != OFF)
        self.streamer = Streamer(
            "db1",
            source,
            self.spool,
            installation=installation,
            wanted=wanted,
            max_spool_bytes=limit,
            clock=lambda: datetime.now(UTC),
            on_event=self.events.append,
            archived_to=archived_to,
            given_up=given_up,
            pace=pace,
            acknowledge=acknowledge,
            evidence=evidence,
            committed=committed,
            on_asked=on_asked,
            known=known,
        )
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="streamer", daemon=True)

    def _run(self) -> None:
        try:
            self.streamer.run(self._stop)
        except BaseException as error:  # noqa: BLE001  carried to the test's own thread
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(300)
        assert not self._thread.is_alive(), "the streamer did not stop"
        if self._error is not None:
            raise self._error

    def kinds(self, kind: StreamEventKind) -> list[StreamEvent]:
        return [event for event in self.events if event.kind is kind]

    def has_all(self, server: Server) -> None:
        """Wait until the spool holds what the server has."""

        def reached() -> bool:
            if self._error is not None:
                raise self._error
            status = self.streamer.status()
            return (status.file, status.pos) == log_status(server) and status.state is StreamState.STREAMING

        try:
            until(reached, "the spool has all")
        except AssertionError as error:
            told = "\n".join(f"{event.kind} {event.message} {event.detail}" for event in self.events)
            raise AssertionError(f"{error}: {self.streamer.status()}, server {log_status(server)}\n{told}") from None

    def reported(self, kind: StreamEventKind, count: int = 1) -> StreamEvent:
        """Wait until it was reported."""
        try:
            until(lambda: len(self.kinds(kind)) >= count, f"{kind} was reported")
        except AssertionError as error:
            told = "\n".join(f"{event.kind} {event.message} {event.detail}" for event in self.events)
            raise AssertionError(f"{error}: {self.streamer.status()}\n{told}") from None
        return self.kinds(kind)[count - 1]


def plain(path: Path) -> bytes:
    return without_flag(path.read_bytes())


def newest_branch(spool: Spool) -> tuple[Branch, list[Spooled]]:
    branch = spool.branches()[-1]
    return branch, [file for file in spool.files() if file.branch == branch.id]


def assert_identical(spool: Spool, server: Server) -> None:
    """The newest branch is the server's own, byte for byte, from its first file to the current one, but for gaps that
    are named."""
    branch, files = newest_branch(spool)
    current = int(log_status(server)[0].rpartition(".")[2])
    numbers = [file.number for file in files]
    missing = set(range(branch.first_number, current + 1)) - set(numbers)
    nothing_lost(named_missing(spool.gaps(), branch), missing, f"log files of the server; gaps: {spool.gaps()}")
    assert numbers == sorted(numbers)
    for file in files:
        there = server.datadir / file.name
        if there.exists():
            same(plain(file.path), plain(there), file.name)
    assert all(file.ended for file in files[:-1])
    assert files[-1].ended is None


def named_missing(gaps: tuple[Gap, ...], branch: Branch) -> set[int]:
    found: set[int] = set()
    for gap in gaps:
        if gap.branch == branch.id and gap.before is not None:
            found |= set(range(int(gap.after.file[-6:]) + 1, int(gap.before.file[-6:])))
    return found


class Proxy:
    """Forwards TCP connections to ``target`` (a port of this host), until it is told to hang or to cut. ``alters``:
    what becomes of what the server sends."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.hangs = threading.Event()
        self.alters: Callable[[bytes], bytes] | None = None
        self.left: int | None = None
        """Every connection breaks when so many more bytes have come from the server."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(0.1)
        self.port: int = self._socket.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._frozen: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()

    def connection(self, **more: object) -> Connection:
        return Connection(
            host="127.0.0.1",
            port=self.port,
            user=USER,
            password=PASSWORD,
            answer_timeout=1.0,
            connect_timeout=1.0,
            **more,  # type: ignore[arg-type]  # what a test says
        )

    def freeze(self) -> None:
        """Nothing comes any more through the connections that there are, and none of them ends."""
        self._frozen |= set(self._ends)

    def cut(self) -> None:
        """Every connection breaks."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._threads[0].join()  # who lets connections in: from now on there are no new ones
        self.cut()
        for thread in self._threads:
            thread.join()
        self._socket.close()
        for end in self._ends:
            end.close()

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                client, _ = self._socket.accept()
            except TimeoutError:
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            self._ends += [client, server]
            over = threading.Barrier(2, action=functools.partial(_reset, client, server))
            self._start(self._forward, client, server, over, False)
            self._start(self._forward, server, client, over, True)

    def _forward(
        self, source: socket.socket, target: socket.socket, over: threading.Barrier, from_server: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while (self.hangs.is_set() or source in self._frozen) and not self._stop.is_set():
                    time.sleep(0.02)
                alters = self.alters  # a test may take it away at any moment
                left = self.left if from_server else None
                target.sendall((alters(data) if alters is not None and from_server else data)[:left])
                if left is not None:
                    self.left = left - len(data) if left > len(data) else None
                    if self.left is None:
                        self.cut()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        over.wait()


def _reset(*ends: socket.socket) -> None:
    """Nobody waits for what is not read any more, as after a shutdown alone."""
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()
