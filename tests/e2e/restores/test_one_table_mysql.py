"""One table on MySQL with GTIDs, out of a physical backup and out of a dump: as it was right before a DELETE without
WHERE, while eight clients went on writing. The source's own checksums at that place say what is right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymysql
import pytest

from tests.e2e.restores.test_point_in_time_mysql import GTIDS, sums, write
from tests.support import sample
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.oracle import NO_GTIDS
from tests.support.keys import Keys
from tests.support.oracle import Total, same
from tests.support.sample import checksum_everything
from tests.support.servers.server import SERVICE_USER, Server
from tests.support.servers.stacks import MYSQL, Stack, stacks, whole
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")
LINES, ORDERS = "`shop`.`order_lines`", "`shop`.`orders`"


@dataclass
class Story:
    """``before``: checksums of every table right before the DELETE, ``executed``: the GTIDs of that place; ``wrong``:
    the GTID of the DELETE; ``ids``: backups by kind, both older. ``refused``: the release from which no table can be
    put back alone."""

    house: House
    server: Server
    ids: dict[str, str]
    before: dict[str, int]
    executed: str
    wrong: str
    refused: str = ""

    def restore(self, *args: str) -> dict[str, Any]:
        outcome: dict[str, Any] = self.house.ok(
            "restore", SERVER, "--to", f"before-gtid:{self.wrong}", "--into", SERVER, *args
        )
        return outcome

    def is_refused(self, *args: str) -> None:
        live = sums(self.server)
        self.house.refuses(
            self.refused, "restore", SERVER, "--to", "latest", "--into", SERVER, "--tables", "shop.order_lines", *args
        )
        assert sums(self.server) == live
        assert self.server.query("SHOW DATABASES LIKE 'backupd\\_%'") == []

    def checksum(self, table: str) -> int:
        return Total(self.server.query(f"CHECKSUM TABLE {table}")[0][1])


@pytest.fixture(scope="module", params=stacks(*MYSQL))
def story(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Story]:
    stack: Stack = request.param
    with short_directory() as base, stack.make(options=GTIDS) as server:
        server.create_backup_users()
        server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
        sample.create(server)
        house = House(base, server, keys, programs=stack.all_programs())
        if release := stack.refused():
            house.backup()
            yield Story(house, server, {}, {}, "", "", refused=release)
            return
        ids = {"logical": house.ok("backup", SERVER, "--kind", "logical")["id"], "physical": house.backup()["id"]}
        write(server, 150, seed=1)
        server.execute("FLUSH BINARY LOGS")
        write(server, 50, seed=2)
        before, executed = sums(server), str(server.scalar("SELECT @@GLOBAL.gtid_executed")).replace("\n", "")
        server.execute("DELETE FROM shop.order_lines")
        source, _, done = executed.rpartition(":")
        write(server, 100, seed=3)
        Archive(house, server).take()
        yield Story(house, server, ids, before, executed, f"{source}:{int(done.rpartition('-')[2]) + 1}")


@pytest.mark.parametrize("source", ["logical", "physical"])
def test_a_table_comes_back_as_it_was_right_before_a_delete_and_the_others_keep_their_newest_rows(
    story: Story, source: str
) -> None:
    live = sums(story.server)
    if story.refused:
        story.is_refused("--as", "again")
        return
    outcome = story.restore("--tables", "shop.order_lines", "--as", f"lines_{source}", "--from", source)
    assert (outcome["way"], outcome["backup"]) == (source, story.ids[source])
    assert outcome["position"]["gtid"].replace("\n", "") == story.executed
    assert story.checksum(f"shop.lines_{source}") == story.before[LINES]
    assert outcome["tables"][0]["difference"]["missing"] > 0
    story.server.execute(f"DROP TABLE shop.lines_{source}")
    assert sums(story.server) == live
    assert story.server.query("SHOW DATABASES LIKE 'backupd\\_%'") == []


def test_it_takes_its_place_with_its_parent_and_foreign_keys_hold_afterwards(story: Story) -> None:
    live = sums(story.server)
    if story.refused:
        story.is_refused("--confirm", SERVER)
        return
    outcome = story.restore("--tables", "shop.orders", "--tables", "shop.order_lines", "--confirm", SERVER)
    asides = {
        f"`{schema}`.`{table}`": one["aside"]
        for one in outcome["tables"]
        for schema, table in [one["source"].split(".")]
    }
    after = sums(story.server)
    for name in (ORDERS, LINES):
        assert after.pop(name) == story.before[name], name
        aside = "`" + asides[name].replace(".", "`.`") + "`"
        assert after.pop(aside) == live.pop(name), "the live one was kept"
    assert after == live
    with pytest.raises(pymysql.err.IntegrityError):
        story.server.execute("INSERT INTO shop.order_lines VALUES (999999999, 1, 1, 1)")
    parent = story.server.scalar("SELECT order_id FROM shop.order_lines LIMIT 1")
    story.server.execute(f"DELETE FROM shop.orders WHERE id = {parent}")
    assert story.server.scalar(f"SELECT COUNT(*) FROM shop.order_lines WHERE order_id = {parent}") == 0


@pytest.mark.parametrize("stack", stacks(*whole(*MYSQL)))
def test_a_whole_schema_has_the_tables_that_were_made_after_the_backup_in_any_manner(
    stack: Stack, short_tmp: Path, keys: Keys
) -> None:
    with stack.make(options=NO_GTIDS) as server:  # with them 5.7 refuses CREATE TABLE ... SELECT
        server.create_backup_users()
        server.execute(
            f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost",
            "CREATE DATABASE late",
            "CREATE DATABASE other",
            "CREATE TABLE late.old (i INT PRIMARY KEY)",
            "INSERT INTO late.old VALUES (1)",
            "CREATE TABLE other.comes (i INT)",
            "INSERT INTO other.comes VALUES (4)",
        )
        house = House(short_tmp, server, keys, programs=stack.all_programs())
        house.backup()
        server.execute(
            "CREATE TABLE late.plain (i INT)",
            "CREATE TABLE IF NOT EXISTS late.perhaps (i INT)",
            "DROP TABLE IF EXISTS late.anew",
            "CREATE /* a remark */ TABLE late.anew (i INT)",
            "CREATE TABLE late.alike LIKE late.old",
            "INSERT INTO late.alike VALUES (7)",
            "/*!50000 CREATE TABLE late.versioned (i INT) */",
            "INSERT INTO late.versioned VALUES (8)",
            "CREATE TABLE late.first_name (i INT)",
            "RENAME TABLE late.first_name TO late.second_name",
            "INSERT INTO late.second_name VALUES (5)",
            "RENAME TABLE other.comes TO late.came",
            "INSERT INTO late.came VALUES (6)",
            "CREATE TABLE late.child (i INT, FOREIGN KEY (i) REFERENCES late.old (i))",
            "INSERT INTO late.child VALUES (1)",
            "CREATE TABLE late.chosen AS SELECT * FROM late.old",
            "INSERT INTO late.chosen VALUES (9)",
            "USE late",
            "CREATE TABLE here (i INT)",
            "INSERT INTO here VALUES (3)",
            "CREATE VIEW late.seen AS SELECT * FROM late.plain",
            "INSERT INTO late.perhaps VALUES (1)",
            "INSERT INTO late.anew VALUES (2)",
            "UPDATE late.old SET i = 1",
        )
        Archive(house, server).take()
        with server.connect() as connection:
            expected = checksum_everything(connection)
        server.execute("DROP DATABASE late", "CREATE DATABASE late")
        done = house.run(
            "restore", SERVER, "--to", "latest", "--tables", "late.*", "--into", SERVER, "--confirm", SERVER
        )
        assert done.code == 0, done.all
        with server.connect() as connection:
            same(checksum_everything(connection), expected)
