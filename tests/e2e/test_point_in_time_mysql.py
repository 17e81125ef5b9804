"""The way to any moment on MySQL: replayed by GTID while eight clients wrote."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.model.clock import format_time
from tests.e2e.archived import Archive
from tests.e2e.house import SERVER, House
from tests.support import sample
from tests.support.keys import Keys
from tests.support.load import Writers
from tests.support.sample import checksum_everything
from tests.support.server import Server, connect
from tests.support.stacks import MYSQL, Stack, stacks

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")
GTIDS = {"gtid_mode": "ON", "enforce_gtid_consistency": "ON"}


def sums(server: Server) -> dict[str, int]:
    with server.connect() as connection:
        return checksum_everything(connection)


def write(server: Server, count: int, seed: int) -> None:
    """By eight clients, until they have committed that many transactions."""
    with Writers(server, 8, seed=seed) as writers:
        deadline = time.monotonic() + 300
        while writers.transactions < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("stack", stacks(*MYSQL))
def test_just_before_a_disaster_and_at_the_latest_moment_every_table_is_the_sources(
        stack: Stack, short_tmp: Path, keys: Keys) -> None:
    with stack.make(options=GTIDS) as server:
        server.create_backup_users()
        sample.create(server)
        house = House(short_tmp, server, keys, programs=stack.all_programs())
        house.backup()
        if release := stack.refused():
            write(server, 10, seed=1)
            Archive(house, server).take()
            house.refuses(release, "plan", SERVER, "--to", format_time(datetime.now(UTC)))
            target = f"gtid:{server.scalar('SELECT @@GLOBAL.gtid_executed')}"
            house.refuses(release, "restore", SERVER, "--to", target, "--datadir", str(short_tmp / "d"))
            assert not (short_tmp / "d").exists()
            return
        write(server, 200, seed=1)
        server.execute("FLUSH BINARY LOGS")
        write(server, 200, seed=2)
        before, executed = sums(server), str(server.scalar("SELECT @@GLOBAL.gtid_executed"))
        server.execute("DELETE FROM archive.letters")
        source, _, done = executed.replace("\n", "").rpartition(":")
        write(server, 200, seed=3)
        archive = Archive(house, server)
        archive.take()
        wrong = f"{source}:{int(done.rpartition('-')[2]) + 1}"

        outcome = house.ok("restore", SERVER, "--to", f"before-gtid:{wrong}", "--datadir", str(short_tmp / "d"),
                           "--start")
        try:
            assert outcome["position"]["gtid"] == executed
            with connect(outcome["started"]["socket"]) as connection:
                assert checksum_everything(connection) == before
        finally:
            os.kill(outcome["started"]["pid"], signal.SIGKILL)
        house.restore(short_tmp / "e", to="latest")
        with stack.make(datadir=short_tmp / "e", options=GTIDS) as restored:
            assert sums(restored) == sums(server)
            executed = "SELECT @@GLOBAL.gtid_executed"
            assert str(restored.scalar(executed)) == str(server.scalar(executed))
            assert restored.query(f"SHOW {stack.words().replica} STATUS") == []
