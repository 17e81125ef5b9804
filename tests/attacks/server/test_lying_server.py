"""A server, or somebody between it and here, who names files for the program that copies binary logs."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backupd.binlog.stream_status import StreamEventKind
from backupd.engine.log_client import collect, make_intake
from backupd.engine.server import sandbox as handover
from backupd.engine.server.binary_logs import BinlogSource
from backupd.engine.server.sandbox import is_available, worker
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
from tests.support.stores.places import runs_as_root

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


@pytest.mark.parametrize(
    "confined",
    [
        pytest.param(
            True, marks=pytest.mark.skipif(not is_available(), reason="bubblewrap cannot confine anything on this host")
        ),
        pytest.param(False, marks=pytest.mark.skipif(not runs_as_root(), reason="only root can become somebody else")),
    ],
)
def test_a_rotate_event_writes_no_file_of_its_own_choice(
    server: Server, tmp_path: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, *, confined: bool
) -> None:
    """On the code of before this wrote the file as root. ``short_tmp`` is open for everybody in the first case."""
    victim = short_tmp / "there" / "x"
    victim.parent.mkdir()
    if confined:
        victim.parent.chmod(0o777)
    else:
        monkeypatch.setattr(handover, "can_confine", lambda _program: False)
    name = "../" * 12 + str(victim).lstrip("/")
    insert(server, 3)
    with Proxy(server.port or 0) as proxy:
        proxy.alters = rotating_to(name)
        with Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming:
            told = streaming.told(StreamEventKind.FAILED)
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
            assert repr(name) in streaming.told(StreamEventKind.FAILED).message
            proxy.alters = None
            streaming.has_all(server)
            assert_identical(streaming.spool, server)


def test_the_program_is_never_root_and_what_it_made_is_ours_in_the_end(server: Server, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        running = [pid for pid in Path("/proc").glob("[0-9]*") if _is_copying(pid, streaming.spool.folder)]
        assert running
        for pid in running:
            status = dict(line.split(":\t", 1) for line in (pid / "status").read_text().splitlines() if ":\t" in line)
            assert "NoNewPrivs" in status
            assert status["NoNewPrivs"] == "1"
            if runs_as_root():
                assert status["Uid"].split()[0] != "0"
                assert int(status["CapEff"], 16) == 0
        newest = streaming.spool.newest()
        assert newest is not None
        found = newest.path.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o600)
        # Nothing of the connection is left for others to read.
        if (user := worker()) is not None:
            assert (
                subprocess.run(
                    ["ls", str(streaming.spool.folder)], user=user, check=False, cwd="/", capture_output=True
                ).returncode
                != 0
            )


@pytest.mark.skipif(not runs_as_root(), reason="only root can become somebody else")
def test_an_account_that_logs_in_as_root_of_the_system_still_streams(tmp_path: Path) -> None:
    """The program is somebody else, whom the server does not know."""
    with make_server(MARIADB) as running:
        prepare(running)
        running.execute("ALTER USER root@localhost IDENTIFIED VIA unix_socket")
        with Streaming(
            running,
            tmp_path / "spool",
            connection=Connection(socket=str(running.socket), user="root"),
            programs=tmp_path,
        ) as streaming:
            streaming.has_all(running)
            insert(running, 3)
            streaming.has_all(running)
            assert_identical(streaming.spool, running)
            (path,) = [
                Path(os.fsdecode(word)).parent / "s.sock"
                for pid in Path("/proc").glob("[0-9]*")
                if _is_copying(pid, streaming.spool.folder)
                for word in (pid / "cmdline").read_bytes().replace(b"=", b"\0").split(b"\0")
                if word.endswith(b"options.cnf")
            ]
            assert path.exists()
            # Nobody but the program gets through to the server as root.
            asked = subprocess.run(
                ["/usr/bin/python3", "-c", _ASK, str(path)],
                user=worker(),
                check=False,
                cwd="/",
                capture_output=True,
                text=True,
            )
            assert asked.stdout.split() == ["0"], asked.stderr


_ASK = """
import os, socket, sys, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent: time.sleep(0.01)  # from now on it is nobody's that we have started
with socket.socket(socket.AF_UNIX) as s:
    s.settimeout(20)
    s.connect(sys.argv[1])
    print(len(s.recv(100)))
"""


def _is_copying(process: Path, spool: Path) -> bool:
    """Is it the program itself, beginning in the intake of this spool (in whatever way it sees it)?"""
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        return (
            b"--raw" in words
            and b"binlog" in Path(os.fsdecode(words[0])).name.encode()
            and str((process / "cwd").readlink()).endswith(f"{spool.name}/intake")
        )
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["link", "hard", "fifo", "folder"])
def test_what_lies_in_the_programs_folder_is_not_followed(short_tmp: Path, kind: str) -> None:
    intake, target, victim = short_tmp / "intake", short_tmp / "incoming", short_tmp / "victim"
    victim.write_text("root's own")
    victim.chmod(0o600)
    make_intake(intake)
    target.mkdir()
    laid = intake / "binlog.000001"
    match kind:
        case "link":
            laid.symlink_to(victim)
        case "hard":
            os.link(victim, laid)
        case "fifo":
            os.mkfifo(laid)
        case _:
            laid.mkdir()
    with pytest.raises(MisnamedError, match="named a file that must not be written"):
        collect(intake, target, "db1:3306", expected=is_log_name)
    assert list(target.iterdir()) == []
    found = victim.stat()
    assert (victim.read_text(), found.st_uid, stat.S_IMODE(found.st_mode)) == ("root's own", os.geteuid(), 0o600)


def test_a_name_that_a_server_lists_is_no_option() -> None:
    """It becomes an argument of the program."""
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
