"""A server, or somebody between it and here, who names files for the stream of its binary log."""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backupd.binlog.stream_status import StreamEventKind
from backupd.engine.server.binary_logs import BinlogSource
from backupd.engine.sql.client import Connection
from backupd.model.binlog import is_log_name
from backupd.model.errors import MisnamedError
from tests.support.logs.streaming import (
    Proxy,
    Streaming,
    assert_identical,
    insert,
    make_server,
    prepare,
    through_socket,
)
from tests.support.servers.server import Server
from tests.support.servers.stacks import MARIADB
from tests.support.stores.folders import runs_as_root

_EVENT = struct.Struct("<IBIIIH")
_ROTATE = 4
_CRC = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with make_server(MARIADB) as running:
        prepare(running)
        yield running


def rotating_to(name: str) -> Callable[[bytes], bytes]:
    """Of what a server sends: each Rotate event names this file, in a packet and an event of the right length, with a
    right checksum."""

    def alter(data: bytes) -> bytes:
        altered, at = b"", 0
        while at + 4 <= len(data):
            end = at + 4 + int.from_bytes(data[at : at + 3], "little")
            altered += _renamed(data[at:end], name.encode())
            at = end
        return altered + data[at:]

    return alter


def _renamed(packet: bytes, name: bytes) -> bytes:
    event = packet[5:]
    if len(event) < _EVENT.size + 8 or packet[4] != 0:
        return packet
    when, kind, server_id, length, end, flags = _EVENT.unpack(event[: _EVENT.size])
    if kind != _ROTATE or length != len(event):
        return packet
    is_summed = zlib.crc32(event[:-_CRC]).to_bytes(_CRC, "little") == event[-_CRC:]
    body = event[_EVENT.size : _EVENT.size + 8] + name
    made = _EVENT.pack(when, kind, server_id, _EVENT.size + len(body) + (_CRC if is_summed else 0), end, flags) + body
    made += zlib.crc32(made).to_bytes(_CRC, "little") if is_summed else b""
    return (len(made) + 1).to_bytes(3, "little") + packet[3:5] + made


def test_a_rotate_event_writes_no_file_of_its_own_choice(server: Server, tmp_path: Path, short_tmp: Path) -> None:
    victim = short_tmp / "there" / "x"
    victim.parent.mkdir()
    name = "../" * 12 + str(victim).lstrip("/")
    insert(server, 3)
    with Proxy(server.port or 0) as proxy:
        proxy.alters = rotating_to(name)
        with Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming:
            told = streaming.reported(StreamEventKind.FAILED)
            assert "a host between them" in told.message
            assert str(victim) in told.message
            assert "tls: verify-full" in told.hint
            proxy.alters = None
            streaming.has_all(server)
            insert(server, 3)
            streaming.has_all(server)
            assert_identical(streaming.spool, server)
            assert streaming.spool.gaps() == ()
    assert not victim.exists()


@pytest.mark.parametrize("name", ["cron.000001", "binlog.000001.sh", "binlog"])
def test_a_name_that_is_not_of_this_log_stops_the_stream(server: Server, tmp_path: Path, name: str) -> None:
    with Proxy(server.port or 0) as proxy:
        proxy.alters = rotating_to(name)
        with Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming:
            assert repr(name) in streaming.reported(StreamEventKind.FAILED).message
            proxy.alters = None
            streaming.has_all(server)
            assert_identical(streaming.spool, server)


def test_what_was_received_is_for_our_eyes_only(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        newest = streaming.spool.newest()
        assert newest is not None
        found = newest.path.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o600)
        folders = [streaming.spool.folder, *(path for path in streaming.spool.folder.rglob("*") if path.is_dir())]
        assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


@pytest.mark.skipif(not runs_as_root(), reason="only root can become somebody else")
def test_an_account_that_logs_in_as_root_of_the_system_streams(tmp_path: Path) -> None:
    with make_server(MARIADB) as running:
        prepare(running)
        running.execute("ALTER USER root@localhost IDENTIFIED VIA unix_socket")
        connection = Connection(socket=str(running.socket), user="root")
        with Streaming(running, tmp_path / "spool", connection=connection) as streaming:
            streaming.has_all(running)
            insert(running, 3)
            streaming.has_all(running)
            assert_identical(streaming.spool, running)


def test_a_name_that_a_server_lists_is_no_option() -> None:
    """Nor is it a path."""
    with make_server(MARIADB, log_bin="--result-file=x") as running:
        prepare(running)
        with pytest.raises(MisnamedError, match="result-file=x"):
            BinlogSource(through_socket(running)).look()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("binlog.000042", True),
        ("mysql-bin.1000000", True),
        ("db1.example.com-bin.000001", True),
        ("bön.000001", True),
        ("../x.000001", False),
        ("/etc/x.000001", False),
        ("-x.000001", False),
        (".x.000001", False),
        ("x.1", False),
        ("x.00000a", False),
        ("a\nb.000001", False),
        ("x\\y.000001", False),
        (f"{'x' * 300}.000001", False),
        ("", False),
    ],
)
def test_what_a_binary_log_can_be_called(name: str, is_one: bool) -> None:
    assert is_log_name(name) is is_one
