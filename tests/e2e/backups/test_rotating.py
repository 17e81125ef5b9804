"""A server whose binary log rotates while it is backed up, and while a restore is planned."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import restore.replay.private_replay
from backupd.app.restores.request import RestoreRequest
from backupd.app.service.dispatch import Foreground
from backupd.engine.binlog.scan import scan
from backupd.model.access import Actor, Role, Via
from backupd.model.job import silent
from backupd.model.text import format_time
from restore.replay.logs import fetch_logs
from tests.support import sample
from tests.support.e2e.archived import wired
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.stacks import MYSQL_CLONE, STACKS, Stack, stacks, whole

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

POLICY = ONCE_A_YEAR + "binlog: {stream: true, checkpoint: 1s}\n"


def write(house: House, what: str) -> None:
    house.server.execute(f"INSERT INTO shop.order_log (order_id, what) VALUES (1, '{what}')")


def archive(house: House) -> None:
    assert house.run("run-stream", SERVER, "--once").code == 0


@pytest.fixture(params=stacks(*whole(*STACKS), soak=(MYSQL_CLONE,)))
def house(request: pytest.FixtureRequest, short_tmp: Path, keys: Keys) -> Iterator[House]:
    stack: Stack = request.param
    with stack.make() as server:
        server.create_backup_users()
        sample.create(server)
        yield House(short_tmp, server, keys, programs=stack.all_programs())


@contextmanager
def rotating(house: House) -> Iterator[None]:
    """Transactions, and a new log after every eight of them."""
    stop = threading.Event()

    def rotate() -> None:
        while not stop.is_set():
            house.server.execute("FLUSH BINARY LOGS")
            for _ in range(8):
                write(house, "during the backup")
                stop.wait(0.03)

    busy = threading.Thread(target=rotate)
    busy.start()
    try:
        yield
    finally:
        stop.set()
        busy.join()


def test_a_log_that_rotates_during_the_first_backup_and_under_a_plan_is_replayed_to_its_end(
    house: House, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = house.server
    (house.base / "policies" / "gold.yaml").write_text(POLICY)
    for _attempt in range(5):  # a backup that falls between a rotation and the next transaction tries nothing
        with rotating(house):
            record = house.backup()
        with (server.datadir / record["position"]["file"]).open("rb") as log:
            found = scan(log, stop=record["position"]["pos"])
        if found.transactions:
            break
    assert record["started_at"] < format_time(found.context.first_event_at), "its file is older: nothing was tried"
    assert found.transactions, "the backup is of the beginning of a file: nothing was tried"
    write(house, "after it")
    archive(house)  # README's order: the stream begins after the backup
    for number in range(2):
        write(house, f"piece {number}")
        refused = house.fails("plan", SERVER, "--to", "latest").all
        assert "has written up to" in refused, "no stream runs, and no objective says that so much may be lost"
        assert "--accept-older" in refused
        archive(house)
    with server.connect() as connection:
        wanted = checksum_everything(connection)
    assert house.ok("timeline", SERVER)["latest"] > record["finished_at"]

    def replaced_first(*args: object, **more: object) -> object:
        """Between the plan and its logs: the file ends, is stored whole, and its pieces go."""
        write(house, "not planned")
        server.execute("FLUSH BINARY LOGS")
        archive(house)
        assert len(pieces(house)) < len(before)
        return fetch_logs(*args, **more)  # type: ignore[arg-type]  # as it was called

    before = pieces(house)
    monkeypatch.setattr(restore.replay.private_replay, "fetch_logs", replaced_first)
    for name, value in house.environment().items():
        monkeypatch.setenv(name, value)
    with wired(house) as wiring:
        request = RestoreRequest(SERVER, "latest", datadir=str(short_tmp / "d"))
        Foreground(wiring, Actor("test", Role.ADMIN, Via.CLI)).restore(request, silent)
    with server.another(datadir=short_tmp / "d") as restored, restored.connect() as connection:
        assert checksum_everything(connection) == wanted


def pieces(house: House) -> list[Path]:
    """Segments of files that were still growing."""
    return [
        path for path in (house.repository / "binlogs").rglob("segment.json") if '"ending":"open"' in path.read_text()
    ]
