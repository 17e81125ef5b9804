"""One table, or a few, back into the server that goes on working. A real replica, stopped at the same transaction, says
what their rows were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymysql
import pytest

from tests.e2e.restores.test_point_in_time import did, stopped_at, wait_for
from tests.support import sample
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.load import Writers
from tests.support.oracle import Total, same
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.replica import replica_of
from tests.support.servers.server import SERVICE_USER, Server
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@dataclass
class Story:
    """``gtids`` of what went wrong, by name; ``expected``: checksums of a replica that was stopped right before;
    ``logical``, ``physical``: ids of the backups, which are older than all of that."""

    house: House
    server: Server
    logical: str
    physical: str
    gtids: dict[str, str]
    expected: dict[str, dict[str, int]]

    def restore(self, *args: str, to: str) -> dict[str, Any]:
        outcome: dict[str, Any] = self.house.ok("restore", SERVER, "--to", to, "--into", SERVER, *args)
        return outcome

    def checksum(self, table: str) -> int:
        return Total(self.server.query(f"CHECKSUM TABLE {table}")[0][1])

    def sums(self) -> dict[str, int]:
        with self.server.connect() as connection:
            return checksum_everything(connection)


@pytest.fixture(scope="module")
def story(keys: Keys) -> Iterator[Story]:
    with short_directory() as base, PrivateServer(tcp=True) as server:
        server.create_backup_users()
        server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
        sample.create(server, 400_000)
        server.execute("SET GLOBAL event_scheduler = OFF", "DROP EVENT shop.forget_logs")
        house = House(base, server, keys)
        with replica_of(server, options={"sync_binlog": 0, "innodb_flush_log_at_trx_commit": 0}) as replica:
            replica.execute("STOP SLAVE")
            gtids: dict[str, str] = {}
            with Writers(server, 8, pause=0.1) as writers:
                logical = house.ok("backup", SERVER, "--kind", "logical")
                physical = house.backup()
                wait_for(writers, 60)
                gtids["delete"] = did(server, "DELETE FROM shop.order_lines")
                wait_for(writers, 30)
                server.execute("FLUSH BINARY LOGS")
                gtids["drop"] = did(server, "DROP TABLE archive.pages")
                wait_for(writers, 30)
            Archive(house, server).take()
            expected = {name: stopped_at(replica, before(gtids[name])) for name in ("delete", "drop")}
        yield Story(house, server, logical["id"], physical["id"], gtids, expected)


def before(gtid: str) -> str:
    domain, server, sequence = gtid.split("-")
    return f"{domain}-{server}-{int(sequence) - 1}"


@pytest.mark.parametrize("source", ["logical", "physical"])
def test_a_table_comes_back_as_it_was_right_before_a_delete_while_the_others_keep_their_newest_rows(
    story: Story, source: str
) -> None:
    live = story.sums()
    name = f"order_lines_{source}"
    outcome = story.restore(
        "--tables", "shop.order_lines", "--as", name, "--from", source, to=f"before-gtid:{story.gtids['delete']}"
    )
    assert outcome["way"] == source
    assert outcome["backup"] == getattr(story, source)
    assert outcome["replay"]["transactions"] > 0
    assert outcome["position"]["gtid"] == before(story.gtids["delete"])
    assert story.checksum(f"shop.{name}") == story.expected["delete"]["`shop`.`order_lines`"]
    (table,) = outcome["tables"]
    lost = story.server.scalar(
        f"SELECT COUNT(*) FROM shop.{name} r LEFT JOIN shop.order_lines l "
        "USING (order_id, line) WHERE l.order_id IS NULL"
    )
    assert table["difference"]["missing"] == lost > 0
    story.server.execute(f"DROP TABLE shop.{name}")
    assert story.sums() == live


def test_a_whole_schema_has_the_tables_that_were_made_after_the_backup_in_any_manner(
    short_tmp: Path, keys: Keys
) -> None:
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute(
            f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost",
            "CREATE DATABASE late",
            "CREATE TABLE late.old (i INT) ENGINE=MyISAM",
        )
        house = House(short_tmp, server, keys)
        house.backup()
        house.ok("backup", SERVER, "--kind", "logical")
        server.execute(
            "CREATE TABLE late.plain (i INT)",
            "CREATE TABLE IF NOT EXISTS late.perhaps (i INT)",
            "CREATE OR REPLACE TABLE late.replaced (i INT)",
            "DROP TABLE IF EXISTS late.anew",
            "CREATE TABLE late.anew (i INT)",
            "CREATE SEQUENCE IF NOT EXISTS late.numbers",
            "CREATE VIEW late.seen AS SELECT * FROM late.plain",
            "INSERT INTO late.perhaps VALUES (1)",
            "INSERT INTO late.anew VALUES (2)",
        )
        Archive(house, server).take()
        with server.connect() as connection:
            expected = checksum_everything(connection)
        server.execute("DROP DATABASE late", "CREATE DATABASE late")
        refused = house.fails("plan", SERVER, "--to", "latest", "--tables", "late.*", "--from", "logical")
        assert "late.old (MyISAM)" in refused.err
        done = house.ok(
            "restore", SERVER, "--to", "latest", "--tables", "late.*", "--into", SERVER, "--confirm", SERVER
        )
        assert "no views, routines or events of late: those created" in " ".join(done["warnings"])
        with server.connect() as connection:
            same(checksum_everything(connection), expected)


def test_a_dropped_table_comes_back_alone_under_its_own_name(story: Story) -> None:
    live = story.sums()
    outcome = story.restore("--tables", "archive.pages", "--confirm", SERVER, to=f"before-gtid:{story.gtids['drop']}")
    (table,) = outcome["tables"]
    assert table["aside"] is None
    after = story.sums()
    assert after.pop("`archive`.`pages`") == story.expected["drop"]["`archive`.`pages`"]
    assert after == live


def test_a_table_takes_the_place_of_the_live_one_which_is_kept_aside_and_foreign_keys_hold(story: Story) -> None:
    damaged = story.checksum("shop.order_lines")
    outcome = story.restore(
        "--tables",
        "shop.order_lines",
        "--tables",
        "shop.orders",
        "--confirm",
        SERVER,
        to=f"before-gtid:{story.gtids['delete']}",
    )
    by_name = {table["source"]: table for table in outcome["tables"]}
    assert story.checksum("shop.order_lines") == story.expected["delete"]["`shop`.`order_lines`"]
    assert story.checksum("shop.orders") == story.expected["delete"]["`shop`.`orders`"]
    assert story.checksum(by_name["shop.order_lines"]["aside"]) == damaged
    with pytest.raises(pymysql.err.IntegrityError):
        story.server.execute("INSERT INTO shop.order_lines VALUES (999999999, 1, 1, 1)")
    parent = story.server.scalar("SELECT order_id FROM shop.order_lines LIMIT 1")
    story.server.execute(f"DELETE FROM shop.orders WHERE id = {parent}")
    assert story.server.scalar(f"SELECT COUNT(*) FROM shop.order_lines WHERE order_id = {parent}") == 0
    story.server.execute("INSERT INTO shop.orders (customer_id, created_at) SELECT MIN(id), NOW() FROM shop.customers")
    number = story.server.scalar("SELECT MAX(id) FROM shop.orders")
    assert story.server.scalar(f"SELECT COUNT(*) FROM shop.order_log WHERE order_id = {number}") == 1


def test_nothing_is_replaced_without_the_servers_name_and_a_comparison_changes_nothing(story: Story) -> None:
    live = story.sums()
    to = f"backup:{story.logical}"
    refused = story.house.fails("restore", SERVER, "--to", to, "--tables", "bank.accounts", "--into", SERVER)
    assert f"--confirm {SERVER}" in refused.err
    wrong = story.house.fails(
        "restore", SERVER, "--to", to, "--tables", "bank.accounts", "--into", SERVER, "--confirm", "shop-db2"
    )
    assert "shop-db2" in wrong.err
    taken = story.house.fails(
        "restore", SERVER, "--to", to, "--tables", "bank.accounts", "--into", SERVER, "--as", "transfers"
    )
    assert "bank.transfers" in taken.err
    compared = story.restore("--tables", "bank.accounts", "--compare", "--keys", "3", to=to)
    assert not compared["done"]
    assert compared["tables"][0]["difference"]["changed"] > 3
    assert len(compared["tables"][0]["difference"]["samples"]["changed"]) == 3
    assert story.sums() == live
    assert not story.server.query("SHOW DATABASES LIKE 'backupd\\_%'")


def test_a_plan_says_which_way_is_quicker_and_what_the_other_would_take(story: Story) -> None:
    to = f"before-gtid:{story.gtids['delete']}"
    plan = story.house.ok("plan", SERVER, "--to", to, "--tables", "shop.order_lines")
    assert plan["way"] in ("logical", "physical")
    other = {"logical": "physical", "physical": "logical"}[plan["way"]]
    assert any(other in line and "fetch" in line for line in plan["others"])
    names = [step["name"] for step in plan["steps"]]
    assert names[0] == "fetched"
    assert names[-2:] == ["loaded", "handed_over"]
    assert "rolled_forward" in names
    gone = story.house.fails("plan", SERVER, "--to", "latest", "--tables", "archive.letterz")
    assert "archive.letterz" in gone.err


def test_a_server_that_may_only_be_read_is_told_so_and_nothing_is_left_there(story: Story) -> None:
    server = story.server
    server.execute(f"REVOKE ALL PRIVILEGES, GRANT OPTION FROM {SERVICE_USER}@localhost")
    server.create_backup_users()
    try:
        refused = story.house.fails(
            "restore",
            SERVER,
            "--to",
            f"backup:{story.logical}",
            "--tables",
            "bank.accounts",
            "--into",
            SERVER,
            "--as",
            "*_restored",
        )
        assert "restore_defaults_file" in refused.err
    finally:
        with suppress(pymysql.err.OperationalError):
            server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
