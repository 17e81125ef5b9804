"""Tables of every kind out of both sorts of backups and back into a running server, beside the live ones or in their
place: equal to the last bit, and every other table as it was."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backupd.model.table import quote_name
from tests.support.dice import SOAK, rounds
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.oracle import Sums, Total
from tests.support.sample import checksum_everything
from tests.support.servers import zoo
from tests.support.servers.server import SERVICE_USER, Server
from tests.support.servers.stacks import MYSQL_CLONE, STACKS, Stack, stacks, whole
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

ODD_SCHEMA, ODD_TABLE = "my.shop/ő `1`", "or der.%"
LONG = rounds(1) >= 20
MANY, BIG_ROW = (5000, 100 * 1024 * 1024) if LONG else (20, 0)


@dataclass
class Herd:
    """A server with the zoo, many small tables and a schema with an odd name; ``ids``: its backups by kind; ``zoo``:
    the sums of those tables when they were taken."""

    stack: Stack
    house: House
    server: Server
    archive: Archive
    ids: Mapping[str, str]
    zoo: Mapping[str, str]

    def restore(self, *args: str, to: str) -> dict[str, Any]:
        outcome: dict[str, Any] = self.house.ok("restore", SERVER, "--to", to, "--into", SERVER, *args)
        return outcome


def taken(stack: Stack, house: House) -> dict[str, str]:
    logical = house.ok("backup", SERVER, "--kind", "logical")
    assert logical["tables_missing"] == 0
    return {"logical": logical["id"], "physical": house.backup()["id"]}


@pytest.fixture(scope="module", params=stacks(*whole(*STACKS)))
def herd(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Herd]:
    stack: Stack = request.param
    with ExitStack() as cleanup:
        base = cleanup.enter_context(short_directory())
        server = cleanup.enter_context(stack.make(options={"max_allowed_packet": "256M"}))
        server.create_backup_users()
        server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
        zoo.build(server, big_row=BIG_ROW)
        fill_many(server, MANY)
        server.execute(
            f"CREATE DATABASE {quote_name(ODD_SCHEMA)}",
            f"CREATE TABLE {quote_name(ODD_SCHEMA, ODD_TABLE)} (id INT PRIMARY KEY, t VARCHAR(20))",
        )
        server.execute(f"INSERT INTO {quote_name(ODD_SCHEMA, ODD_TABLE)} VALUES (1, 'ő')")
        house = House(
            base, server, keys, programs=stack.programs(), policy_extra='logical: {schedule: "0 4 * * *"}\n'
        )  # CLONE leaves tables out
        ids = taken(stack, house)
        yield Herd(stack, house, server, Archive(house, server), ids, zoo.checksums(server))


def fill_many(server: Server, count: int) -> None:
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE many CHARACTER SET utf8mb4")
        cursor.execute("USE many")
        for number in range(count):
            cursor.execute(f"CREATE TABLE t{number} (id INT AUTO_INCREMENT PRIMARY KEY, v VARCHAR(40))")
            rows = ", ".join(f"('{number} {row}')" for row in range(20))
            cursor.execute(f"INSERT INTO t{number} (v) VALUES {rows}")


@pytest.mark.parametrize("source", ["logical", pytest.param("physical", marks=SOAK)])
def test_the_whole_zoo_comes_back_in_another_schema_equal_to_the_last_bit(herd: Herd, source: str) -> None:
    server = herd.server
    done = herd.house.run(
        "restore",
        SERVER,
        "--to",
        f"backup:{herd.ids[source]}",
        "--into",
        SERVER,
        "--tables",
        "zoo.*",
        "--tables",
        quote_name(ODD_SCHEMA, ODD_TABLE),
        "--as",
        "other.*",
        "--from",
        source,
        "--json",
    )
    assert "tables" in done.json, done.all
    trouble = {table["source"]: table["trouble"] for table in done.json["tables"] if table["trouble"]}
    expected = dict(herd.zoo)
    if herd.stack is MYSQL_CLONE and source == "physical":
        assert "MyISAM" in trouble.pop("zoo.isam")
        del expected["isam"]
        plan = herd.house.ok("plan", SERVER, "--to", "latest", "--tables", "zoo.isam")
        assert plan["way"] == "logical", "the clone is newer, and has no rows of it"
    assert trouble == {}, done.err
    assert done.code == (len(expected) < len(herd.zoo)), done.err
    assert server.query(f"SELECT id, t FROM {quote_name('other', ODD_TABLE)}") == [(1, "ő")]
    server.execute(f"DROP TABLE {quote_name('other', ODD_TABLE)}")
    assert zoo.checksums(server, "other") == expected
    assert zoo.checksums(server) == herd.zoo
    assert_no_staging(server)
    server.execute("DROP DATABASE other")


def test_one_dropped_table_of_many_comes_back_and_the_others_are_as_they_were(herd: Herd) -> None:
    server = herd.server
    before = everything(server)
    server.execute("DROP TABLE many.t7")
    outcome = herd.restore(
        "--tables", "many.t7", "--confirm", SERVER, "--from", "physical", to=f"backup:{herd.ids['physical']}"
    )
    assert [table["aside"] for table in outcome["tables"]] == [None]
    assert everything(server) == before
    assert_no_staging(server)


def test_a_table_in_a_schema_with_an_odd_name_takes_its_place_again(herd: Herd) -> None:
    server, table = herd.server, quote_name(ODD_SCHEMA, ODD_TABLE)
    before = server.query(f"SELECT id, t FROM {table}")
    server.execute(f"DELETE FROM {table}")
    outcome = herd.restore(
        "--tables", table, "--confirm", SERVER, "--from", "logical", to=f"backup:{herd.ids['logical']}"
    )
    (one,) = outcome["tables"]
    assert one["difference"]["missing"] == len(before)
    assert one["aside"].startswith("`my.shop/ő ``1```.`or der.%__before_")
    assert server.query(f"SELECT id, t FROM {table}") == before
    server.execute(f"DROP TABLE {one['aside']}")


def test_a_view_in_the_place_of_a_table_and_system_schemas_are_refused_before_anything_is_fetched(herd: Herd) -> None:
    server, to = herd.server, f"backup:{herd.ids['logical']}"
    server.execute("RENAME TABLE many.t5 TO many.t5_real", "CREATE VIEW many.t5 AS SELECT * FROM many.t5_real")
    restore = ("restore", SERVER, "--to", to, "--into", SERVER, "--tables", "many.t5")
    for more, why in (
        (("--confirm", SERVER), "views of these names: many.t5"),
        (("--as", "mysql.t5"), "tables of the server itself"),
    ):
        refused = herd.house.fails(*restore, *more)
        assert why in refused.err
        assert "fetch:" not in refused.err
    [one] = herd.restore("--tables", "many.t5", "--compare", to=to)["tables"]
    assert "a view has this name" in one["difference"]["why_not"]
    server.execute(
        "DROP VIEW many.t5",
        "ALTER TABLE many.t5_real ADD KEY fresh (v)",
        "RENAME TABLE many.t5_real TO many.t5",
        "SET GLOBAL read_only = 1",
    )
    outcome = herd.restore("--tables", "many.t5", "--compare", to=to)
    server.execute("SET GLOBAL read_only = 0", "ALTER TABLE many.t5 DROP KEY fresh")
    difference = outcome["tables"][0]["difference"]
    assert (difference["missing"], difference["changed"], difference["same"]) == (0, 0, False)
    assert difference["definition_differs"] == ["the live table has, the restored one has not: KEY `fresh` (`v`)"]
    assert any("is read_only" in warning for warning in outcome["warnings"])


def test_tables_that_were_renamed_made_and_altered_since_come_back_by_the_names_of_the_target(herd: Herd) -> None:
    server = herd.server
    source = "logical" if herd.stack is MYSQL_CLONE else "physical"
    server.execute(
        "UPDATE many.t3 SET v = 'changed' WHERE id = 3",
        "RENAME TABLE many.t3 TO many.renamed",
        "INSERT INTO many.renamed (v) VALUES ('after')",
        "CREATE TABLE many.newer (id INT PRIMARY KEY, v VARCHAR(40), KEY (v))",
        "INSERT INTO many.newer VALUES (1, 'one')",
        "ALTER TABLE many.t4 ADD COLUMN more INT DEFAULT 4",
        "UPDATE many.t4 SET more = id",
    )
    herd.archive.take()
    wanted = ("renamed", "newer", "t4")
    args = [text for name in wanted for text in ("--tables", f"many.{name}")]
    outcome = herd.restore(*args, "--as", "*_again", "--from", source, to="latest")
    assert outcome["replay"]["transactions"] > 0
    for name in wanted:
        assert checksum(server, f"many.{name}_again") == checksum(server, f"many.{name}"), name
        server.execute(f"DROP TABLE many.{name}_again")
    herd.restore("--tables", "many.t3", "--as", "t3_old", "--from", "logical", to=f"backup:{herd.ids['logical']}")
    assert server.scalar("SELECT COUNT(*) FROM many.t3_old WHERE v = 'changed'") == 0
    server.execute("DROP TABLE many.t3_old")
    gone = herd.house.fails(
        "restore", SERVER, "--to", "latest", "--tables", "many.t3", "--as", "x", "--into", SERVER, "--from", source
    )
    assert "many.renamed" in gone.err


@SOAK
@pytest.mark.skipif(not LONG, reason="for a soak: BACKUPD_ROUNDS=20 or more")
@pytest.mark.parametrize("source", ["logical", "physical"])
def test_thousands_of_small_tables_come_back_in_another_schema(herd: Herd, source: str) -> None:
    herd.restore("--tables", "many.*", "--as", "again.*", "--from", source, to=f"backup:{herd.ids[source]}")
    with herd.server.connect() as connection:
        sums = checksum_everything(connection)
    assert sum(name.startswith("`again`.") for name in sums) == MANY
    for number in range(10, MANY):
        assert sums[f"`again`.`t{number}`"] == sums[f"`many`.`t{number}`"], number
    herd.server.execute("DROP DATABASE again")


def test_sql_files_loaded_by_hand_with_the_client_give_the_same_rows(herd: Herd, short_tmp: Path) -> None:
    folder = short_tmp / "sql"
    outcome = herd.house.ok(
        "restore", SERVER, "--to", f"backup:{herd.ids['logical']}", "--tables", "zoo.*", "--sql", str(folder)
    )
    assert outcome["folder"] == str(folder)
    server = herd.server
    server.execute("DROP DATABASE zoo")
    done = subprocess.run(
        ["sh", str(folder / "load.sh"), f"--defaults-file={server.client_file()}"],
        check=False,
        env={**os.environ, "CLIENT": str(herd.stack.replay()[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert zoo.checksums(server) == herd.zoo
    again = herd.house.fails(
        "restore", SERVER, "--to", f"backup:{herd.ids['logical']}", "--tables", "zoo.*", "--sql", str(folder)
    )
    assert "exists" in again.err


def everything(server: Server) -> tuple[dict[str, int], dict[str, str]]:
    """The zoo by its own sums: those of the server change for a key over many values (MySQL)."""
    with server.connect() as connection:
        sums = checksum_everything(connection)
    return Sums({name: value for name, value in sums.items() if not name.startswith("`zoo`")}), zoo.checksums(server)


def checksum(server: Server, table: str) -> int:
    return Total(server.query(f"CHECKSUM TABLE {table}")[0][1])


def assert_no_staging(server: Server) -> None:
    assert server.query("SHOW DATABASES LIKE 'backupd\\_%%'") == []
