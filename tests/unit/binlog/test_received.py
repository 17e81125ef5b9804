"""What is received of real servers, byte for byte: large events, cut connections, other formats, a spool that a program
had filled."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.binlog import session
from backupd.binlog.session import fetch
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import StreamEventKind
from backupd.engine.binlog.scan import scan
from backupd.engine.server.binary_logs import BinlogSource
from backupd.model.binlog import Ending
from backupd.model.errors import ToolError
from tests.support.dice import rounds, thrown
from tests.support.logs.streaming import (
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
    reset,
    through_socket,
    until,
)
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import Server
from tests.support.servers.stacks import MARIADB, MYSQL, Stack, stacks, whole
from tests.support.stores.folders import give_to_database

MIB = 1024 * 1024


@pytest.fixture(scope="module", params=STREAMED)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with make_server(request.param, max_allowed_packet="128M") as running:
        prepare(running)
        yield running


def one_transaction(server: Server, *sizes: int) -> None:
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        for size in sizes:
            cursor.execute("INSERT INTO shop.t (t) VALUES (REPEAT('z', %s))", (size,))
        cursor.execute("COMMIT")


def test_events_of_several_packets_and_large_transactions_are_identical(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        one_transaction(server, 20 * MIB, 100, 38 * MIB, 0xFFFFFF - 60, 0xFFFFFF)
        one_transaction(server, *[2_000] * 4_000)
        streaming.has_all(server)
        insert(server, 1, size=18 * MIB)  # the last event is a large one when the stream goes on
        streaming.has_all(server)
    insert(server, 3)
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        server.execute("FLUSH BINARY LOGS")
        insert(server)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert (len(streaming.spool.branches()), streaming.spool.gaps()) == (1, ())


def test_a_large_event_is_received_whatever_the_server_lets_its_clients_send(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
    one_transaction(server, 20 * MIB)
    server.execute("SET GLOBAL max_allowed_packet = 1048576")
    try:
        with Streaming(server, tmp_path / "spool") as streaming:
            streaming.has_all(server)
            assert_identical(streaming.spool, server)
    finally:
        server.execute("SET GLOBAL max_allowed_packet = 134217728")
    assert (len(streaming.spool.branches()), streaming.spool.gaps()) == (1, ())


class Scissors:
    """Cuts each connection after so many bytes."""

    def __init__(self, proxy: Proxy, dice: random.Random) -> None:
        self._proxy, self._dice = proxy, dice
        self.cuts = 0
        self._left = 0

    def __call__(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left > 0:
            return data
        kept = data[: self._dice.randrange(len(data))]
        self._left = self._dice.choice([3_000, 30_000, 900_000])
        self.cuts += 1
        threading.Timer(0.01, self._proxy.cut).start()
        return kept


@pytest.mark.campaign
def test_connections_that_are_cut_within_packets_leave_an_identical_copy(server: Server, tmp_path: Path) -> None:
    dice = thrown("cuts")
    server.connect(user=USER, password=PASSWORD).close()
    with (
        Proxy(server.port or 0) as proxy,
        Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming,
    ):
        streaming.has_all(server)
        proxy.alters = scissors = Scissors(proxy, dice)
        for _ in range(rounds(12)):
            one_transaction(server, *(dice.choice([50, 5_000, 700_000]) for _ in range(6)))
            if dice.random() < 0.3:
                server.execute("FLUSH BINARY LOGS")
            time.sleep(0.1)
        proxy.alters = None
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert scissors.cuts > 3
    assert (len(streaming.spool.branches()), streaming.spool.gaps()) == (1, ())


def test_logs_without_checksums_and_a_change_of_that_are_identical(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        try:
            for kind in ("NONE", "CRC32", "NONE"):
                server.execute(f"SET GLOBAL binlog_checksum = '{kind}'")
                insert(server, 3, size=3_000)
                streaming.has_all(server)
            restarts = streaming.streamer.status().restarts
        finally:
            server.execute("SET GLOBAL binlog_checksum = 'CRC32'")
        insert(server)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
        assert restarts == 0
    with Streaming(server, tmp_path / "spool") as streaming:
        insert(server)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)


def test_a_log_without_checksums_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    """From within the file: its format description is sent changed."""
    server.execute("SET GLOBAL binlog_checksum = 'NONE'")
    try:
        for _ in range(3):
            with Streaming(server, tmp_path / "spool") as streaming:
                insert(server, 2, size=20_000)
                streaming.has_all(server)
                assert_identical(streaming.spool, server)
                assert not streaming.kinds(StreamEventKind.LOST)
    finally:
        server.execute("SET GLOBAL binlog_checksum = 'CRC32'")
    assert (len(streaming.spool.branches()), streaming.spool.gaps()) == (1, ())


def program_of(server: Server) -> str:
    if isinstance(server, PrivateServer):
        return "mariadb-binlog"
    stack = next(one for one in MYSQL if not one.why_not() and one.programs()["mysqld"] == server.program())
    return stack.replay()[0]


def copied_by_program(server: Server, name: str, folder: Path) -> bytes:
    """As mysqlbinlog copies it."""
    folder.mkdir()
    subprocess.run(
        [
            program_of(server),
            "--no-defaults",
            "--read-from-remote-server",
            "--raw",
            f"--result-file={folder}/",
            f"--socket={server.socket}",
            "--user=root",
            name,
        ],
        check=True,
        capture_output=True,
    )
    return (folder / name).read_bytes()


def test_mysqlbinlog_copies_the_same_bytes(server: Server, tmp_path: Path) -> None:
    insert(server, 3, size=40_000)
    name, _pos = log_status(server)
    server.execute("FLUSH BINARY LOGS")
    spool = Spool(tmp_path / "spool")
    with spool.locked():
        ours = fetch(
            through_socket(server), spool, name, connection_id=2**31 + 5, stall=20.0, cancel=threading.Event()
        ).read_bytes()
    assert ours == copied_by_program(server, name, tmp_path / "theirs")


@pytest.mark.parametrize("cut", [0, 1, 700])
def test_a_spool_that_a_program_had_filled_is_gone_on_with(server: Server, tmp_path: Path, cut: int) -> None:
    """Its newest file ends within an event where the program was killed, and its folders are there still."""
    folder = tmp_path / "spool"
    with Streaming(server, folder) as streaming:
        insert(server, 3, size=1_000)
        streaming.has_all(server)
        newest = streaming.spool.newest()
    assert newest is not None
    theirs = copied_by_program(server, newest.name, tmp_path / "theirs")
    newest.path.write_bytes(theirs[: len(theirs) - cut])
    for left in (folder / "intake", folder / "incoming"):
        left.mkdir(exist_ok=True)
        (left / newest.name).write_bytes(theirs[:500])
    folder.chmod(0o711)
    insert(server, 2)
    server.execute("FLUSH BINARY LOGS")
    insert(server, 2)
    with Streaming(server, folder) as streaming:
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
        assert not streaming.kinds(StreamEventKind.BRANCH)
        assert not streaming.kinds(StreamEventKind.MENDED)
    assert (len(streaming.spool.branches()), streaming.spool.gaps()) == (1, ())
    assert not (folder / "intake").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


def dumps(server: Server) -> list[int]:
    """The ids of all who receive its log."""
    return [
        int(row[0])
        for row in server.query("SELECT ID FROM information_schema.PROCESSLIST WHERE COMMAND LIKE 'Binlog Dump%%'")
    ]


def test_a_copy_whose_dump_was_broken_off_is_none(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KILL QUERY ends it on MariaDB with the message that everything came."""
    server.execute("FLUSH BINARY LOGS")
    one_transaction(server, *[MIB] * 24)
    name, size = log_status(server)
    source, spool, write = BinlogSource(through_socket(server)), Spool(tmp_path / "spool"), session._write
    killed: list[int] = []

    def writes(descriptor: int, data: bytes | memoryview) -> int:
        if len(data) > 5_000 and not killed:  # the server waits for us: the rest is more than the connection holds
            killed.extend(dumps(server))
            for dump in killed:
                server.execute(f"KILL QUERY {dump}")
        return write(descriptor, data)

    def copy() -> Path:
        return fetch(
            source.connection,
            spool,
            name,
            connection_id=2**31 + 6,
            stall=20.0,
            cancel=threading.Event(),
            at_least=source.size_of(name),
        )

    assert source.size_of(name) == size
    assert source.size_of("binlog.999999") == 0
    monkeypatch.setattr(session, "_write", writes)
    with spool.locked():
        with pytest.raises(ToolError, match="cannot be copied") as broken:
            copy()
        assert killed
        assert not isinstance(server, PrivateServer) or f"of {size} bytes" in str(broken.value.detail)
        assert copy().stat().st_size == size


def test_the_dump_before_is_ended_at_the_server_though_it_did_not_notice(server: Server, tmp_path: Path) -> None:
    server.connect(user=USER, password=PASSWORD).close()
    until(lambda: not dumps(server), "no dump")
    with (
        Proxy(server.port or 0) as proxy,
        Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming,
    ):
        streaming.has_all(server)
        (first,) = dumps(server)
        proxy.freeze()
        insert(server)
        streaming.reported(StreamEventKind.LOST)
        assert first in dumps(server)
        streaming.has_all(server)
        until(lambda: first not in dumps(server), "the first dump is gone", seconds=5.0)
        assert len(dumps(server)) == 1


def test_what_is_here_is_not_sent_again(server: Server, tmp_path: Path) -> None:
    insert(server, 5, size=MIB)
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
    came: list[int] = []

    def count(data: bytes) -> bytes:
        came.append(len(data))
        return data

    server.connect(user=USER, password=PASSWORD).close()
    with Proxy(server.port or 0) as proxy:
        proxy.alters = count
        with Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming:
            streaming.has_all(server)
    assert sum(came) < 3 * MIB  # its last event, and what the server was asked


def test_a_file_that_grew_beyond_the_same_size_after_a_reset_is_another(server: Server, tmp_path: Path) -> None:
    """Position and checksum are right, bytes are not."""
    reset(server)
    with Streaming(server, tmp_path / "spool") as streaming:
        insert(server, 4, size=500)
        streaming.has_all(server)
    time.sleep(1.1)
    reset(server)
    insert(server, 6, size=500)
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.reported(StreamEventKind.BRANCH)
        streaming.has_all(server)
        assert_identical(streaming.spool, server)
    assert len(streaming.spool.branches()) == 2


@pytest.mark.parametrize("stack", stacks(*whole(*MYSQL)))
def test_compressed_transactions_are_identical(stack: Stack, tmp_path: Path) -> None:
    with make_server(stack, loose_binlog_transaction_compression="ON") as running:
        prepare(running)
        with Streaming(running, tmp_path / "spool") as streaming:
            one_transaction(running, 3 * MIB, 50)
            insert(running, 2)
            streaming.has_all(running)
            assert_identical(streaming.spool, running)


def test_an_encrypted_log_of_mariadb_comes_plain_and_is_gone_on_with(short_tmp: Path, tmp_path: Path) -> None:
    keys = short_tmp / "keys"
    keys.write_text("1;" + "ab" * 16 + "\n")
    give_to_database(keys)
    options: dict[str, str | int | None] = {
        "plugin_load_add": "file_key_management",
        "encrypt_binlog": 1,
        "file_key_management_filename": str(keys),
    }
    with make_server(MARIADB, **options) as running:
        prepare(running)
        with Streaming(running, tmp_path / "spool") as streaming:
            insert(running, 3, size=9_000)
            streaming.has_all(running)
        insert(running, 2)
        with Streaming(running, tmp_path / "spool") as streaming:
            streaming.has_all(running)
            running.execute("FLUSH BINARY LOGS")
            insert(running)
            streaming.has_all(running)
        _branch, files = newest_branch(streaming.spool)
        assert [file.ended for file in files] == [Ending.ROTATED, None]
        assert plain(files[0].path) != plain(running.datadir / files[0].name)
        for file in files:
            with file.path.open("rb") as opened:
                found = scan(opened)
            assert found.end == (running.datadir / file.name).stat().st_size
            assert found.transactions > 0
    assert (len(streaming.spool.branches()), streaming.spool.gaps()) == (1, ())
