"""Restores to moments between backups, while eight clients write. A real replica of the source, stopped at the same
transaction, says what is right."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.sql.client import Connection
from backupd.engine.witness import take
from backupd.model.proof import Witness
from backupd.model.text import format_time, new_id
from tests.support import sample
from tests.support.e2e.archived import Archive, wired
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.load import Writers
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer, connect
from tests.support.servers.replica import replica_of
from tests.support.servers.server import Server
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@dataclass
class Story:
    """What happened on the source. ``gtids``: of what was done on purpose, by name; ``expected``: checksums of a
    replica that was stopped there."""

    house: House
    archive: Archive
    server: Server
    moment: datetime
    witness: Witness
    gtids: dict[str, str] = field(default_factory=dict)
    expected: dict[str, dict[str, int]] = field(default_factory=dict)

    def before(self, name: str) -> str:
        """The GTID right before that of ``name``: one server writes in one domain."""
        domain, server, sequence = self.gtids[name].split("-")
        return f"{domain}-{server}-{int(sequence) - 1}"

    def place(self, name: str) -> tuple[str, int]:
        """Where the transaction begins, as the source's own list of events says."""
        for file, *_rest in self.server.query("SHOW BINARY LOGS"):
            for _name, pos, kind, _id, _end, info in self.server.query(f"SHOW BINLOG EVENTS IN '{file}'"):
                if kind == "Gtid" and re.search(rf"\b{self.gtids[name]}\b", str(info)):
                    return str(file), int(pos)
        raise AssertionError(name)


def did(server: Server, statement: str) -> str:
    """Execute it; its GTID."""
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        cursor.execute("SELECT @@last_gtid")
        return str(cursor.fetchone()[0])


def wait_for(writers: Writers, count: int) -> None:
    goal = writers.transactions + count
    deadline = time.monotonic() + 300
    while writers.transactions < goal:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def next_second(server: Server) -> datetime:
    """Wait until the server's clock has passed into another second but one; a moment between the two."""
    begun: datetime = server.scalar("SELECT UTC_TIMESTAMP()")
    while server.scalar("SELECT UTC_TIMESTAMP()") < begun + timedelta(seconds=2):
        time.sleep(0.02)
    return (begun + timedelta(seconds=1)).replace(microsecond=500_000, tzinfo=UTC)


@pytest.fixture(scope="module")
def story(keys: Keys) -> Iterator[Story]:
    with short_directory() as base, PrivateServer(tcp=True) as server:
        server.create_backup_users()
        sample.create(server)
        server.execute("CREATE TABLE shop.clock (what VARCHAR(20) PRIMARY KEY)")
        house = House(base, server, keys)
        with replica_of(server) as replica:
            replica.execute("STOP SLAVE")
            gtids: dict[str, str] = {}
            with Writers(server, 8) as writers:
                house.backup()
                wait_for(writers, 100)
                did(server, "INSERT INTO shop.clock VALUES ('early')")
                moment = next_second(server)
                gtids["late"] = did(server, "INSERT INTO shop.clock VALUES ('late')")
                witness = take(
                    Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD),
                    server=SERVER,
                    max_seconds=60,
                )
                server.execute("FLUSH BINARY LOGS")
                did(server, "CREATE EVENT shop.awake ON SCHEDULE EVERY 1 DAY DO DELETE FROM shop.order_log")
                gtids["drop"] = did(server, "DROP TABLE archive.pages")
                wait_for(writers, 100)
                gtids["harmless"] = did(server, "UPDATE shop.products SET title = 'wrong' WHERE id = 7")
                gtids["built upon"] = did(server, "UPDATE shop.customers SET name = 'wrong' WHERE id = 5")
                did(server, "UPDATE shop.customers SET name = CONCAT(name, '!') WHERE id = 5")
                server.execute("FLUSH BINARY LOGS")
                wait_for(writers, 100)
                gtids["delete"] = did(server, "DELETE FROM archive.letters")
                wait_for(writers, 100)
            gtids["end"] = str(server.scalar("SELECT @@gtid_binlog_pos"))
            archive = Archive(house, server)
            archive.take()
            told = Story(house, archive, server, moment, witness, gtids)
            timed = house.ok("plan", SERVER, "--to", format_time(moment))
            told.gtids["moment"] = timed["until"]["gtid"]
            stops = {
                "moment": told.gtids["moment"],
                "drop": told.before("drop"),
                "delete": told.before("delete"),
                "end": gtids["end"],
            }
            for name, gtid in stops.items():
                told.expected[name] = stopped_at(replica, gtid)
        with wired(house) as wiring:
            wiring.catalog.witnesses.add(new_id(witness.taken_at), witness)
        yield told


def stopped_at(replica: PrivateServer, gtid: str) -> dict[str, int]:
    replica.execute(f"START SLAVE UNTIL master_gtid_pos='{gtid}'")
    assert replica.scalar("SELECT MASTER_GTID_WAIT(%s, 300)", (gtid,)) == 0
    replica.execute("STOP SLAVE")
    assert replica.scalar("SELECT @@gtid_slave_pos") == gtid
    with replica.connect() as connection:
        return checksum_everything(connection)


@contextmanager
def on(datadir: Path) -> Iterator[PrivateServer]:
    """A server on a restored data directory, which it may remove."""
    with PrivateServer(datadir=datadir) as restored:
        yield restored
        assert "[ERROR]" not in restored.log_text()


def sums(server: Server) -> dict[str, int]:
    with server.connect() as connection:
        return checksum_everything(connection)


@contextmanager
def started(outcome: dict[str, Any]) -> Iterator[Any]:
    try:
        with connect(outcome["started"]["socket"]) as connection:
            yield connection
    finally:
        os.kill(outcome["started"]["pid"], signal.SIGKILL)


def test_just_before_a_dropped_table_every_table_is_what_a_replica_stopped_there_holds(
    story: Story, short_tmp: Path
) -> None:
    outcome = story.house.restore(short_tmp / "d", to=f"before-gtid:{story.gtids['drop']}")
    assert outcome["position"]["gtid"] == story.before("drop")
    assert outcome["replay"]["transactions"] > 100
    assert [phase["name"] for phase in outcome["phases"]] == [
        "fetched",
        "prepared",
        "restored",
        "started",
        "rolled_forward",
    ]
    assert not (short_tmp / "d.restoring").exists()
    left = {path.name for path in (short_tmp / "d").iterdir() if "relay" in path.name or "master" in path.name}
    with on(short_tmp / "d") as restored:
        assert sums(restored) == story.expected["drop"]
        assert restored.scalar("SELECT @@gtid_slave_pos") == story.before("drop")
        assert dict(restored.query("SELECT name, status FROM mysql.event")) == {
            "forget_logs": "ENABLED",
            "asleep": "DISABLED",
            "awake": "ENABLED",
        }
        assert not restored.query("SELECT user FROM mysql.user WHERE user LIKE 'backupd\\_%'")
    assert left <= {"multi-master.info"}


def test_at_a_time_nothing_later_is_there_and_a_started_server_answers(story: Story, short_tmp: Path) -> None:
    outcome = story.house.ok(
        "restore", SERVER, "--to", format_time(story.moment), "--datadir", str(short_tmp / "d"), "--start"
    )
    with started(outcome) as connection:
        assert checksum_everything(connection) == story.expected["moment"]
        with connection.cursor() as cursor:
            cursor.execute("SELECT what FROM shop.clock")
            assert [row[0] for row in cursor.fetchall()] == ["early"]
            cursor.execute("SELECT @@event_scheduler, @@skip_networking")
            assert cursor.fetchone() == ("OFF", 1)
    assert any("whole seconds" in text for text in outcome["warnings"]), outcome["warnings"]


def test_a_place_between_two_transactions_is_reached_and_one_inside_is_refused_with_its_neighbours(
    story: Story, short_tmp: Path
) -> None:
    file, pos = story.place("delete")
    refused = story.house.fails("restore", SERVER, "--to", f"{file}:{pos + 1}", "--datadir", str(short_tmp / "no"))
    assert f"{file}:{pos}" in refused.all
    assert not (short_tmp / "no").exists()
    story.house.restore(short_tmp / "d", to=f"{file}:{pos}")
    with on(short_tmp / "d") as restored:
        assert sums(restored) == story.expected["delete"]


def test_the_latest_moment_is_the_end_of_the_archive_also_through_the_pipe(story: Story, short_tmp: Path) -> None:
    outcome = story.house.ok(
        "restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "d"), "--start", "--replay-with", "pipe"
    )
    assert outcome["replay"]["method"] == "pipe"
    with started(outcome) as connection:
        assert checksum_everything(connection) == story.expected["end"] == sums(story.server)


def test_one_transaction_is_left_out_and_all_others_are_there(story: Story, short_tmp: Path) -> None:
    outcome = story.house.ok(
        "restore",
        SERVER,
        "--to",
        "latest",
        "--datadir",
        str(short_tmp / "d"),
        "--exclude-gtid",
        story.gtids["harmless"],
    )
    assert outcome["replay"]["excluded"] == [story.gtids["harmless"]]
    with on(short_tmp / "d") as restored:
        found = sums(restored)
        assert {name for name in found if found[name] != story.expected["end"][name]} == {"`shop`.`products`"}
        assert restored.scalar("SELECT COUNT(*) FROM shop.products WHERE title = 'wrong'") == 0


def test_what_others_build_upon_is_not_left_out_and_nothing_is_restored(story: Story, short_tmp: Path) -> None:
    done = story.house.fails(
        "restore",
        SERVER,
        "--to",
        "latest",
        "--datadir",
        str(short_tmp / "d"),
        "--exclude-gtid",
        story.gtids["built upon"],
    )
    assert "shop.customers" in done.all
    assert story.gtids["built upon"] in done.all
    assert not (short_tmp / "d").exists()


def test_a_replay_that_was_killed_begins_again_from_the_backup_and_ends_right(story: Story, short_tmp: Path) -> None:
    staging = short_tmp / "d.restoring" / "restore.json"

    def in_the_replay() -> bool:
        try:
            return json.loads(staging.read_text())["stage"] == "replaying" and any(
                (staging.parent / "data").glob("backupd-relay-*")
            )
        except (OSError, ValueError):
            return False

    command = ("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "d"))
    story.house.kill_when(in_the_replay, *command)
    assert not (short_tmp / "d").exists()
    outcome = story.house.ok(*command)
    assert any("interrupted while it replayed" in text for text in outcome["warnings"])
    with on(short_tmp / "d") as restored:
        assert sums(restored) == story.expected["end"]


def test_without_the_key_nothing_is_begun(story: Story, short_tmp: Path) -> None:
    story.house.write(restore_home=story.house.keys.public_home)
    try:
        done = story.house.fails(
            "restore", SERVER, "--to", format_time(story.moment), "--datadir", str(short_tmp / "d")
        )
    finally:
        story.house.write()
    assert "secret key" in done.all
    assert not (short_tmp / "d").exists()


def test_a_damaged_segment_is_read_from_another_place_and_without_one_refused_with_both_ends(
    story: Story, short_tmp: Path
) -> None:
    file, _pos = story.place("delete")
    number = int(file.rpartition(".")[2])
    (part,) = (story.house.repository / "binlogs").glob(f"*/*/{number:010d}-*/part-00000*")
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        done = story.house.fails("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "d"))
        assert f"{file}:0" in done.all
        assert re.search(rf"continues at {file}:\d+", done.all)
        assert not (short_tmp / "d").exists()
        # Before it, nothing of it is needed.
        story.house.ok("plan", SERVER, "--to", f"before-gtid:{story.gtids['drop']}")
        shutil.rmtree(short_tmp / "d.restoring", ignore_errors=True)
    finally:
        part.write_bytes(whole)


def test_tables_outside_the_data_directory_are_rolled_forward_and_their_sources_stay_as_they_are(
    short_tmp: Path, keys: Keys
) -> None:
    elsewhere = short_tmp / "elsewhere"
    elsewhere.mkdir()
    shutil.chown(elsewhere, "mysql", "mysql")
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE away",
            f"CREATE TABLE away.old (id INT PRIMARY KEY, t TEXT) DATA DIRECTORY='{elsewhere}'",
            f"CREATE TABLE away.changed (id INT PRIMARY KEY) DATA DIRECTORY='{elsewhere}'",
            f"CREATE TABLE away.gone (id INT PRIMARY KEY) DATA DIRECTORY='{elsewhere}'",
            "INSERT INTO away.old VALUES (1, 'backed up')",
        )
        house = House(short_tmp, server, keys)
        house.backup()
        server.execute(
            "INSERT INTO away.old VALUES (2, 'replayed')",
            "ALTER TABLE away.changed ADD COLUMN more INT",
            "INSERT INTO away.changed VALUES (1, 2)",
            "DROP TABLE away.gone",
            "FLUSH TABLES away.old, away.changed WITH READ LOCK",
            "UNLOCK TABLES",
        )
        Archive(house, server).take()
        before = {path: path.read_bytes() for path in elsewhere.rglob("*.ibd")}
        outcome = house.ok("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "d"), "--start")
        with started(outcome) as connection:
            assert checksum_everything(connection) == sums(server)
        links = {path.read_text() for path in (short_tmp / "d" / "away").glob("*.isl")}
        assert len(links) == 2
        assert all(Path(link).is_relative_to(short_tmp / "d.external") for link in links), links
        assert {path: path.read_bytes() for path in elsewhere.rglob("*.ibd")} == before


def test_a_table_that_the_logs_make_in_a_folder_that_the_sandbox_forgets_is_refused_and_never_proved(
    short_tmp: Path, keys: Keys
) -> None:
    # The sandbox has a /tmp that goes with it; in other folders that it does not show the table cannot be made at all.
    with PrivateServer() as server, short_directory(base="/tmp") as elsewhere:
        server.create_backup_users()
        server.execute("CREATE DATABASE away")
        house = House(short_tmp, server, keys)
        house.backup()
        server.execute(
            f"CREATE TABLE away.made (id INT PRIMARY KEY) DATA DIRECTORY='{elsewhere}'",
            "INSERT INTO away.made VALUES (1)",
        )
        Archive(house, server, remarked=False).take()
        for said in (
            house.fails("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "d")),
            house.fails("test-restore", SERVER),
        ):
            assert "away/made.isl leads to" in said.all
            assert "DATA DIRECTORY" in said.all
        assert not (short_tmp / "d").exists()


def test_a_test_restore_compares_the_witness_on_the_way_to_the_latest_moment(story: Story) -> None:
    proof = story.house.ok("test-restore", SERVER)
    assert proof["outcome"] == "proved", proof
    assert proof["tables_compared"] == len(story.witness.checksums)
    checks = {check["name"]: check for check in proof["checks"]}
    assert story.witness.position.gtid in checks["table checksums equal the witness"]["detail"]
    assert story.gtids["end"] in checks["binary logs replayed to the target"]["detail"]
    assert {phase["name"] for phase in proof["phases"]} >= {"started", "rolled_forward", "verified"}
    plan = story.house.ok("plan", SERVER, "--to", "latest")
    (step,) = [step for step in plan["steps"] if step["name"] == "rolled_forward"]
    assert "measured" in step["estimate"]


def test_a_test_restore_goes_to_any_moment_that_is_recoverable(story: Story) -> None:
    proof = story.house.ok("test-restore", SERVER, "--to", "random")
    assert proof["outcome"] == "proved", proof
    assert re.match(r"\d{4}-", proof["target"])


def test_a_witness_that_is_not_what_was_replayed_fails_the_test_restore(story: Story) -> None:
    wrong = replace(
        story.witness,
        taken_at=story.witness.taken_at + timedelta(seconds=1),
        checksums={name: value + 1 for name, value in story.witness.checksums.items()},
    )
    with wired(story.house) as wiring:
        wiring.catalog.witnesses.add(new_id(wrong.taken_at), wrong)
    proof = json.loads(story.house.fails("test-restore", SERVER, "--json").out)
    assert proof["outcome"] == "failed", proof
