"""A server that sends anything as its binary log: bounded, and nothing of it outside the spool."""

from __future__ import annotations

import contextlib
import itertools
import resource
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.binlog.connection_start import Start
from backupd.binlog.session import Session, fetch
from backupd.binlog.spool_files import Spool
from backupd.binlog.spool_repair import DamagedCopyError
from backupd.engine.receiver.endings import DamagedDumpError
from backupd.engine.sql.client import Connection
from backupd.engine.sql.option_files import Tls
from backupd.model.binlog import Branch, BranchReason
from backupd.model.errors import MisnamedError, ServerError, ToolError
from tests.attacks.server.test_wrong_answers import Rogue
from tests.unit.engine.receiver.test_log_bytes import NAME, description, event, rotate

_DUMP = b"\x12"
_MIB = 1024 * 1024
_AFTER = 4 + len(description()) + 31
"""Where the first event belongs after what ``begins`` sends."""


def packet(body: bytes, number: int = 1) -> bytes:
    return len(body).to_bytes(3, "little") + bytes([number % 256]) + body


def sends(*messages: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter([packet(b"\0" + message) for message in messages])


def begins(*more: bytes) -> Callable[[], Iterator[bytes]]:
    """As a right dump does."""
    return sends(rotate(), description(), event(35, 4 + len(description()), bytes(8)), *more)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path / "spool")
    with spool.locked():
        spool.begin(
            Branch(
                server="db1",
                id="20261128T120000Z-00000001",
                noticed_at=datetime(2026, 11, 28, 12, tzinfo=UTC),
                reason=BranchReason.FIRST,
                server_uuid="u",
                flavour="mysql",
                basename="binlog",
                first_number=7,
                since=None,
                parent=None,
                fork=None,
                names_go_on=False,
                note="",
            )
        )
        yield spool


def session(spool: Spool, rogue: Rogue) -> Session:
    return Session(
        spool,
        rogue.connection,
        Start(spool.branches()[-1], 7, NAME, None),
        connection_id=2**31,
        written=None,
        stall=1.0,
        is_whole=lambda _number, _size: True,
    )


def written(spool: Spool) -> set[str]:
    return {path.name for path in spool.folder.parent.rglob("*") if path.is_file()} - {"lock", "state.json"}


@pytest.mark.parametrize(
    "answer",
    [
        sends(event(2, 4)),
        begins(event(2, 99)),
        begins(struct.pack("<IBIIIH", 1, 2, 1, 2**32 - 1, 5, 0)),
        begins(b""),
        sends(rotate(), description(version=b"x" * 50)[:-1] + b"?"),
        begins(event(2, _AFTER, b"x")[:-1] + b"?"),
        begins(event(30, _AFTER, bytes(2 * _MIB))[:-1] + b"?"),
        begins(event(2, _AFTER, b"x") + b"more"),
        begins(event(30, _AFTER, bytes(2 * _MIB))[:-9]),
        begins(struct.pack("<IBIIIH", 1, 2, 1, 0, _AFTER, 0)),
        begins(struct.pack("<IBIIIH", 1, 2, 1, 18, _AFTER + 18, 0)),
        begins(event(27, 0, bytes(2 * _MIB), following=0)),
        begins(rotate("binlog.000008", position=99)),
        lambda: iter([packet(b"\7what")]),
        lambda: iter([packet(b"")]),
    ],
)
def test_lengths_places_and_checksums_that_are_wrong_end_the_dump(
    spool: Spool, answer: Callable[[], Iterator[bytes]]
) -> None:
    with Rogue(answer, to=_DUMP) as rogue, session(spool, rogue) as one, pytest.raises(DamagedDumpError):
        one.receive(5)
    assert written(spool) <= {NAME}


@pytest.mark.parametrize("name", ["binlog.000006", "binlog.000001"])
def test_a_name_that_goes_back_is_no_next_file(spool: Spool, name: str) -> None:
    answer = begins(rotate(name), description(), event(35, 4 + len(description()), bytes(8)))
    with Rogue(answer, to=_DUMP) as rogue, session(spool, rogue) as one, pytest.raises(DamagedCopyError):
        one.receive(5)
    assert written(spool) == {NAME}


@pytest.mark.parametrize("name", ["../../../x.000008", "/tmp/x.000008", "other.000008", "binlog.000008.sh"])
def test_a_name_of_another_log_ends_the_dump(spool: Spool, name: str) -> None:
    answer = begins(rotate(name))
    with Rogue(answer, to=_DUMP) as rogue, session(spool, rogue) as one, pytest.raises(MisnamedError):
        one.receive(5)
    assert written(spool) == {NAME}


def test_heartbeats_without_an_end_are_no_progress(spool: Spool) -> None:
    def answer() -> Iterator[bytes]:
        yield from begins()()
        beat = packet(b"\0" + event(27, 0, NAME.encode(), following=0))
        while True:
            yield beat * 1_000

    with Rogue(answer, to=_DUMP) as rogue, session(spool, rogue) as one:
        began = time.monotonic()
        one.receive(0.3)
        moved = one.moved
        one.receive(0.3)
        assert one.moved == moved > 0  # what the supervisor asks: without progress the connection is given up
        assert time.monotonic() - began < 60
    with Rogue(answer, to=_DUMP) as rogue, pytest.raises(ToolError, match="no data"):
        fetch(rogue.connection, spool, NAME, connection_id=2**31, stall=0.5, cancel=threading.Event())


def test_an_event_of_1_gib_takes_no_memory_and_a_longer_one_is_refused(spool: Spool) -> None:
    start = 4 + len(description()) + 31
    full = b"\xff\xff\xff"

    def answer(length: int) -> Callable[[], Iterator[bytes]]:
        def send() -> Iterator[bytes]:
            yield from begins()()
            header = struct.pack("<IBIIIH", 1, 30, 1, length, (start + length) % 2**32, 0)
            yield full + b"\2\0" + header + bytes(0xFFFFFF - 20)
            for _ in itertools.repeat(None, 5):
                yield full + b"\3" + bytes(0xFFFFFF)

        return send

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Rogue(answer(2**30), to=_DUMP) as rogue, session(spool, rogue) as one:
        deadline = time.monotonic() + 300
        while one.end is None and time.monotonic() < deadline:
            one.receive(0.2)
            if one.moved > 90 * _MIB:
                break
        assert one.received == (7, 4 + one.moved)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB; the server is in here, too
    with Rogue(answer(2**31), to=_DUMP) as rogue, session(spool, rogue) as one, pytest.raises(DamagedDumpError):
        one.receive(5)


def test_no_binary_log_is_asked_for_in_clear_where_tls_is_demanded(spool: Spool, tmp_path: Path) -> None:
    with Rogue(begins(), to=_DUMP) as rogue:
        asked = rogue.connection
        demands = [replace(asked, tls=Tls.REQUIRED)]
        for words in (
            "ssl-mode=REQUIRED",
            "ssl-mode=VERIFY_CA",
            "ssl-mode=VERIFY_IDENTITY",
            "ssl-verify-server-cert",
            "ssl",
        ):
            file = tmp_path / "client.cnf"
            file.write_text(f"[client]\n{words}\n")
            by_file = Connection.from_config(host=asked.host, port=asked.port, user="backup", defaults_file=file)
            demands.append(replace(by_file, password="s3cret"))
        for demanding in demands:
            with pytest.raises(ServerError):
                fetch(demanding, spool, NAME, connection_id=2**31, stall=1.0, cancel=threading.Event())
        assert not any(said.startswith(_DUMP) for said in rogue.got)
        assert not any(b"s3cret" in said for said in rogue.got)


def test_a_connection_that_breaks_within_a_packet_leaves_whole_events_only(spool: Spool) -> None:
    one = event(2, 4 + len(description()) + 31, b"x" * 100)
    whole = b"".join(begins()())
    with contextlib.suppress(OSError), Rogue(lambda: iter([whole + packet(b"\0" + one)[:60]]), to=_DUMP) as rogue:
        with session(spool, rogue) as receiving:
            receiving.receive(0.5)
        kept = spool.newest()
        assert kept is not None
        assert kept.path.read_bytes() == b"\xfebin" + description() + event(35, 4 + len(description()), bytes(8))


@pytest.mark.parametrize("other", [False, True])
def test_a_server_that_sends_other_bytes_at_the_end_of_what_is_here_appends_nothing(
    spool: Spool, *, other: bool
) -> None:
    at = 4 + len(description())
    with Rogue(begins(), to=_DUMP) as rogue, session(spool, rogue) as receiving:
        receiving.receive(0.5)
    kept = spool.newest()
    assert kept is not None
    before = kept.path.read_bytes()
    more = event(2, len(before), b"more")
    sent = sends(rotate(), description(), event(35, at, bytes([int(other)]) * 8), more)
    with Rogue(sent, to=_DUMP) as rogue:
        start = Start(spool.branches()[-1], 7, NAME, kept)
        with Session(
            spool,
            rogue.connection,
            start,
            connection_id=2**31,
            written=None,
            stall=1.0,
            is_whole=lambda _number, _size: True,
        ) as receiving:
            receiving.receive(0.5)
            assert receiving.diverged is other
            assert (receiving.current is None) is other
    assert kept.path.read_bytes() == before + (b"" if other else more)
