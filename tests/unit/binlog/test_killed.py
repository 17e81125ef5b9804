"""Kills at random: of the dump, of the whole streamer, of the server, of what archives."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.binlog.spool_files import Spool
from backupd.engine.sql.client import Connection
from backupd.model.binlog import BranchReason
from backupd.model.errors import ServerError
from backupd.transfer import log_segments
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.segment_documents import SegmentHeader
from storage.filesystem import FilesystemDestination
from tests.support.dice import rounds, thrown
from tests.support.keys import Keys
from tests.support.logs.archived import Books, Clock, House
from tests.support.logs.real_logs import real_logs
from tests.support.logs.streaming import (
    STREAMED,
    USER,
    Streaming,
    assert_identical,
    insert,
    log_status,
    make_server,
    prepare,
    until,
)
from tests.support.servers.server import Server
from tests.support.servers.stacks import Stack


class Load:
    """Writes and rotates all the time, and bears it when the server is gone."""

    def __init__(self, server: Server, dice: random.Random) -> None:
        self._server = server
        self._dice = dice
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_args: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(ServerError):
                with Connection(socket=str(self._server.socket), user="root").connect() as session:
                    while not self._stop.wait(0.003):
                        size = self._dice.choice([10, 200, 20_000, 300_000])
                        session.execute("INSERT INTO shop.t (t) VALUES (REPEAT('y', %s))", size)
                        if self._dice.random() < 0.05:
                            session.execute("FLUSH BINARY LOGS")
            self._stop.wait(0.05)


def kill_dumps(server: Server) -> None:
    """The server ends the stream's connections."""
    for number, command in server.query(
        "SELECT ID, COMMAND FROM information_schema.PROCESSLIST WHERE USER = %s", (USER,)
    ):
        if str(command).startswith("Binlog Dump"):
            with contextlib.suppress(Exception):  # gone already
                server.execute(f"KILL {number}")


@pytest.mark.campaign
@pytest.mark.parametrize("stack", STREAMED)
def test_the_dump_is_killed_at_random_and_the_spool_stays_identical(stack: Stack, tmp_path: Path) -> None:
    dice = thrown(f"kills-of-the-dump-{stack}")
    folder = tmp_path / "spool"
    with make_server(stack) as server:
        prepare(server)
        with Streaming(server, folder) as streaming:
            streaming.has_all(server)
            with Load(server, dice):
                for _ in range(rounds(5)):
                    time.sleep(dice.random() * 0.3)
                    kill_dumps(server)
            insert(server)
            streaming.has_all(server)
            assert_identical(streaming.spool, server)
        assert len(streaming.spool.branches()) == 1
        assert streaming.spool.gaps() == ()


@pytest.mark.campaign
@pytest.mark.parametrize("stack", STREAMED)
def test_the_streamer_and_the_server_are_killed_at_random_and_the_spool_stays_identical(
    stack: Stack, tmp_path: Path
) -> None:
    dice = thrown(f"kills-of-the-streamer-{stack}")
    folder = tmp_path / "spool"
    with make_server(stack) as server:
        prepare(server)
        argv = [
            sys.executable,
            "-m",
            "tests.support.logs.stream_process",
            str(server.socket),
            str(folder),
        ]
        with Load(server, dice):
            for turn in range(rounds(3)):
                with subprocess.Popen(argv, cwd=Path(__file__).parents[3], stdin=subprocess.DEVNULL) as process:
                    if turn == 0:
                        until(lambda: bool(Spool(folder).files()), "it has begun")
                    time.sleep(0.4 + dice.random() * 0.8)
                    if turn == 1:
                        server.kill()
                        server.start()
                        time.sleep(dice.random() * 0.3)
                    process.kill()
        with Streaming(server, folder) as streaming:
            insert(server)
            streaming.has_all(server)
            assert_identical(streaming.spool, server)
        branches = streaming.spool.branches()
        assert [branch.reason for branch in branches] == [BranchReason.FIRST], branches
        assert streaming.spool.gaps() == ()
        assert streaming.spool.files()[-1].name == log_status(server)[0]


@pytest.mark.campaign
def test_a_process_killed_at_random_leaves_every_log_whole(short_tmp: Path, keys: Keys) -> None:
    dice = thrown("killed archive")
    clock = Clock()
    clock.now = datetime.now(UTC)
    disk = FilesystemDestination("disk", short_tmp / "d")
    disk.initialise(clock())
    house = House(
        short_tmp / "spool",
        [disk],
        clock,
        sealer=Sealer([keys.fingerprint], keys.public_home),
        books=Books(forgotten=True),
    )
    logs = real_logs()
    for turn in range(rounds(6)):
        log = logs[turn % len(logs)]
        if turn < len(logs):
            house.grow(log, dice.choice(log.cuts))
            if turn:
                house.end(logs[turn - 1])
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.logs.archiving",
                str(short_tmp / "spool"),
                str(keys.public_home),
                keys.fingerprint,
                str(disk.root),
            ],
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"archiving\n"
            time.sleep(dice.uniform(0, 0.25))  # not for synchronisation: the moment of the kill is what is random
            assert process.poll() is None
            process.kill()
        house.spool = type(house.spool)(house.spool.folder)
    house.end(logs[-1])
    # Each process had a recorder of its own; the one here is told of what the last one needs only.
    with house.archiver() as archiver:
        for _ in range(10):
            assert not archiver.step(clock.move(400)).trouble
    assert not house.spool.files()
    headers = [item for item in log_segments.headers(disk) if isinstance(item, SegmentHeader)]
    assert [header.segment.key for header in headers] == [house.key(log) for log in logs]
    for header, log in zip(headers, logs, strict=True):
        target = short_tmp / log.name
        log_segments.fetch(disk, header, Unsealer(keys.secret_home), target)
        assert target.read_bytes() == log.archived
