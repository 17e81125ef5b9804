"""The way to any moment on MySQL: replayed by GTID while eight clients wrote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.model.server_facts import Version
from backupd.model.text import format_time
from tests.support import sample
from tests.support.e2e.archived import Archive, as_it_was, flip
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.load import Writers
from tests.support.oracle import stored, unaltered
from tests.support.sample import checksum_everything
from tests.support.servers.server import Server, connect
from tests.support.servers.stacks import MYSQL, MYSQL_XTRABACKUP, Stack, stacks, whole
from tests.support.stores.folders import give_to_database, short_directory

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


@dataclass
class Story:
    """``before``: checksums of every table right before a DELETE, ``executed``: the GTIDs of that place; ``wrong``: the
    GTID of the DELETE, ``harmless``: of a row of shop.products that nothing is built upon. ``refused``: the release
    from which no log is replayed. ``files``: the last three binary logs; the DELETE is in the second."""

    stack: Stack
    house: House
    server: Server
    refused: str
    before: dict[str, int]
    executed: str
    wrong: str
    harmless: str
    files: list[str]

    def is_refused(self, *command: str) -> bool:
        if self.refused:
            self.house.refuses(self.refused, *command)
        return bool(self.refused)


def did(server: Server, statement: str) -> str:
    """The GTID of a statement while nobody else writes."""
    server.execute(statement)
    source, _, done = str(server.scalar("SELECT @@GLOBAL.gtid_executed")).replace("\n", "").rpartition(":")
    return f"{source}:{done.rpartition('-')[2]}"


@pytest.fixture(scope="module", params=stacks(*MYSQL))
def story(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Story]:
    stack: Stack = request.param
    with short_directory() as base, stack.make(options=GTIDS) as server:
        server.create_backup_users()
        sample.create(server)
        house = House(base, server, keys, programs=stack.all_programs())
        house.backup()
        write(server, 200, seed=1)
        server.execute("FLUSH BINARY LOGS")
        write(server, 200, seed=2)
        harmless = did(server, "INSERT INTO shop.products (title, price, stock) VALUES ('wrong', 1, 1)")
        before, executed = sums(server), str(server.scalar("SELECT @@GLOBAL.gtid_executed"))
        wrong = did(server, "DELETE FROM archive.letters")
        server.execute("FLUSH BINARY LOGS")
        write(server, 200, seed=3)
        Archive(house, server).take()
        files = [str(row[0]) for row in server.query("SHOW BINARY LOGS")][-3:]
        yield Story(stack, house, server, stack.refused(), before, executed, wrong, harmless, files)


def test_just_before_a_disaster_and_at_the_latest_moment_every_table_is_the_sources(
    story: Story, short_tmp: Path
) -> None:
    house, server = story.house, story.server
    to = ("restore", SERVER, "--to", f"before-gtid:{story.wrong}", "--datadir", str(short_tmp / "d"), "--start")
    if story.is_refused(*to):
        story.is_refused("plan", SERVER, "--to", format_time(datetime.now(UTC)))
        assert not (short_tmp / "d").exists()
        return
    outcome = house.ok(*to)
    try:
        assert outcome["position"]["gtid"] == story.executed
        with connect(outcome["started"]["socket"]) as connection:
            assert checksum_everything(connection) == story.before
    finally:
        os.kill(outcome["started"]["pid"], signal.SIGKILL)
    house.restore(short_tmp / "e", to="latest")
    with story.stack.make(datadir=short_tmp / "e", options=GTIDS) as restored:
        assert sums(restored) == sums(server)
        executed = "SELECT @@GLOBAL.gtid_executed"
        assert str(restored.scalar(executed)) == str(server.scalar(executed))
        assert restored.query(f"SHOW {server.words.replica} STATUS") == []


def test_a_replay_that_was_killed_begins_again_from_the_backup_and_ends_right(story: Story, short_tmp: Path) -> None:
    document = short_tmp / "d.restoring" / "restore.json"

    def in_the_replay() -> bool:
        try:
            return json.loads(document.read_text())["stage"] == "replaying" and any(
                (document.parent / "data").glob("backupd-relay-*")
            )
        except (OSError, ValueError):
            return False

    command = ("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "d"))
    if story.is_refused(*command):
        return
    story.house.kill_when(in_the_replay, *command)
    assert not (short_tmp / "d").exists()
    outcome = story.house.ok(*command)
    assert any("interrupted while it replayed" in text for text in outcome["warnings"])
    assert not [path for path in (short_tmp / "d").iterdir() if path.name.startswith("backupd-relay")]
    with story.stack.make(datadir=short_tmp / "d", options=GTIDS) as restored:
        assert sums(restored) == sums(story.server)
        assert restored.query(f"SHOW {story.server.words.replica} STATUS") == []


def test_one_transaction_is_left_out_through_the_pipe_and_all_others_are_there(story: Story, short_tmp: Path) -> None:
    command = (
        "restore",
        SERVER,
        "--to",
        "latest",
        "--datadir",
        str(short_tmp / "d"),
        "--start",
        "--replay-with",
        "pipe",
        "--exclude-gtid",
        story.harmless,
    )
    if story.is_refused(*command):
        return
    outcome = story.house.ok(*command)
    try:
        assert (outcome["replay"]["method"], outcome["replay"]["excluded"]) == ("pipe", [story.harmless])
        with connect(outcome["started"]["socket"]) as connection:
            found, live = checksum_everything(connection), sums(story.server)
            assert {name for name in live if found[name] != live[name]} == {"`shop`.`products`"}
    finally:
        os.kill(outcome["started"]["pid"], signal.SIGKILL)


def test_a_test_restore_compares_the_witness_on_the_way_to_the_latest_moment(story: Story) -> None:
    proof = story.house.ok("test-restore", SERVER)
    assert proof["outcome"] == "proved", proof
    checks = {check["name"]: check for check in proof["checks"]}
    assert "table checksums equal the witness" in checks
    assert ("binary logs replayed to the target" in checks) is not bool(story.refused), checks


@pytest.mark.parametrize("damage", ["removed", "flipped", "swapped"])
def test_what_is_lost_or_mixed_up_of_the_log_is_found_and_nothing_beyond_it_is_restored(
    story: Story, short_tmp: Path, damage: str
) -> None:
    house = story.house
    first, second = (
        next((house.repository / "binlogs" / SERVER).glob(f"*/{int(name[-6:]):010d}-*")) for name in story.files[:2]
    )
    with as_it_was(house):
        if damage == "removed":
            shutil.rmtree(second)
        elif damage == "flipped":
            flip(next(second.glob("part-*")))
        else:
            second.rename(short_tmp / "aside")
            first.rename(second)
            (short_tmp / "aside").rename(first)
        assert second.name in house.fails("verify", SERVER).all
        for target in ("latest", f"before-gtid:{story.wrong}"):
            refused = house.fails("restore", SERVER, "--to", target, "--datadir", str(short_tmp / "d")).all
            assert story.refused in refused
            assert story.refused or target != "latest" or any(name in refused for name in story.files[:2]), refused
        assert not (short_tmp / "d").exists()
        assert house.run("plan", SERVER, "--to", f"backup:{house.backups()[0]['id']}").code == 0
    assert house.run("verify", SERVER).code == 0


@pytest.mark.parametrize("stack", stacks(*whole(MYSQL_XTRABACKUP)))
def test_tables_outside_the_data_directory_are_rolled_forward_and_their_sources_stay_as_they_are(
    stack: Stack, short_tmp: Path, keys: Keys
) -> None:
    elsewhere = short_tmp / "elsewhere"
    elsewhere.mkdir()
    give_to_database(elsewhere)
    known = {"innodb_directories": str(elsewhere)} if stack.version() >= Version(8, 0) else {}
    with stack.make(options={**GTIDS, **known}) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE away",
            *(
                f"CREATE TABLE away.{name} (id INT PRIMARY KEY, t TEXT) DATA DIRECTORY='{elsewhere}'"
                for name in ("old", "changed", "gone")
            ),
            "INSERT INTO away.old VALUES (1, 'backed up')",
        )
        house = House(short_tmp, server, keys, programs=stack.all_programs())
        house.backup()
        server.execute(
            "INSERT INTO away.old VALUES (2, 'replayed')",
            "ALTER TABLE away.changed ADD COLUMN more INT",
            "INSERT INTO away.changed VALUES (1, 'one', 2)",
            "DROP TABLE away.gone",
        )
        archive = Archive(house, server)
        archive.take()
        server.restart()  # its files are as they stay
        before = stored(elsewhere)
        outcome = house.ok("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "d"), "--start")
        try:
            with connect(outcome["started"]["socket"]) as connection:
                assert checksum_everything(connection) == sums(server)
        finally:
            os.kill(outcome["started"]["pid"], signal.SIGKILL)
        unaltered(elsewhere, before)
        # One that is made there by the logs: the copy may not, and the source's own file would be in the way.
        server.execute(f"CREATE TABLE away.made (id INT PRIMARY KEY) DATA DIRECTORY='{elsewhere}'")
        archive.take()
        server.restart()
        before = stored(elsewhere)
        for number, how in enumerate(((), ("--replay-with", "pipe"))):
            house.refuses(
                "DATA DIRECTORY", "restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / f"no{number}"), *how
            )
        unaltered(elsewhere, before)
