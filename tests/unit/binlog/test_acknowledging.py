"""Commits of real servers that wait until the stream has them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.binlog import session
from backupd.binlog.acknowledgement import SPOOL
from backupd.binlog.spool_files import Spool
from tests.support.logs.semi_sync import Commit, Writer, facts, switch_on, wait
from tests.support.logs.streaming import (
    STREAMED,
    Streaming,
    assert_identical,
    insert,
    make_server,
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
    """``os`` as the session has it, with a disk that stands still while ``stands`` is set."""

    def __init__(self) -> None:
        self.stands = threading.Event()
        self.synced = 0

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def fdatasync(self, descriptor: int) -> None:
        while self.stands.is_set():
            self.stands.wait(0)
            threading.Event().wait(0.01)
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
        assert commit.is_over(5.0)
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
