"""A file that the server lists and cannot read or open: the stream goes on behind it, and what is missing is a gap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backupd.binlog.stream_status import StreamEventKind
from backupd.binlog.supervisor import Pace
from tests.support.logs.streaming import STREAMED, Streaming, assert_identical, insert, make_server, prepare, until
from tests.support.servers.stacks import Stack


def gone(path: Path) -> None:
    path.unlink()


def overwritten(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def described_wrongly(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4 + 19 : 4 + 19 + 80] = bytes(80)
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


@pytest.mark.parametrize("harm", [gone, overwritten, described_wrongly, too_long, too_short])
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("stack", STREAMED)
def test_the_stream_goes_on_behind_a_file_that_the_server_cannot_read(
    stack: Stack, tmp_path: Path, harm: Callable[[Path], None], behind: int
) -> None:
    """The newest file that is here, of which nothing is missing, or the one after it."""
    with make_server(stack) as server:
        prepare(server)
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
def test_a_file_that_the_server_cannot_open_for_a_while_is_waited_for(stack: Stack, tmp_path: Path) -> None:
    """It may have too many open: no gap because of that."""
    pace = Pace(tick=0.02, poll=0.15, stall=1.5, first=0.05)
    with make_server(stack) as server:
        prepare(server)
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
