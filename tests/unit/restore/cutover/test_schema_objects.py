"""What a dropped schema held besides tables comes back, and what is there is left alone. The oracle: the server itself,
before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.server.definitions import read_schema, read_tables
from backupd.engine.sql.client import Connection
from backupd.model.errors import DamagedError
from backupd.model.table import TableName
from backupd.model.text import new_id
from restore.cutover.schema_objects import (
    SchemaObject,
    add_missing,
    copy_scripts,
    create_missing,
    keep_scripts,
    remarks,
)
from restore.planning.table_plan import Source, TableGoal
from restore.tables import restore as tablerestore
from restore.tables.outcome import TablesOutcome, TablesSpec
from tests.support.keys import Keys
from tests.support.restores.rolling import MARIADB, MYSQL, Kind, both
from tests.support.restores.subsets import ChainRepository
from tests.support.restores.taken import now
from tests.support.servers.server import Server
from tests.support.stores.folders import short_directory

BOTH = both()
LINES, ORDERS = TABLES = (TableName("shop", "lines"), TableName("shop", "orders"))
SCHEMA = (
    "CREATE DATABASE shop CHARACTER SET latin1 COLLATE latin1_german2_ci",
    "CREATE TABLE shop.orders (id INT PRIMARY KEY, v VARCHAR(40))",
    "CREATE TABLE shop.`lines` (id INT PRIMARY KEY, o INT, FOREIGN KEY (o) REFERENCES shop.orders (id))",
)
OBJECTS = (
    "CREATE TRIGGER shop.orders_bi BEFORE INSERT ON shop.orders FOR EACH ROW SET NEW.v = CONCAT(NEW.v, '!')",
    "CREATE FUNCTION shop.twice(n INT) RETURNS INT DETERMINISTIC RETURN 2 * n",
    "CREATE DEFINER = owner@localhost PROCEDURE shop.`list it`() SELECT 'ő', COUNT(*) FROM shop.orders",
    "SET SESSION sql_mode = 'ANSI_QUOTES'",
    'CREATE PROCEDURE shop."quo ted"() SELECT COUNT(*) FROM "orders"',
    "SET SESSION sql_mode = DEFAULT",
    "ALTER DATABASE shop COLLATE latin1_bin",
    "CREATE PROCEDURE shop.aged(t VARCHAR(10)) SELECT t = 'A'",
    "ALTER DATABASE shop COLLATE latin1_german2_ci",
    "CREATE VIEW shop.c_base AS SELECT id, shop.twice(id) AS two FROM shop.orders",
    "CREATE VIEW shop.b_upon AS SELECT * FROM shop.c_base",
    "CREATE VIEW other.between AS SELECT * FROM shop.b_upon",
    "CREATE VIEW shop.a_around AS SELECT * FROM other.between",
    "CREATE VIEW shop.`with rates` AS SELECT o.id, r.rate FROM shop.orders o JOIN other.rates r ON r.id = o.id",
    "CREATE EVENT shop.nightly ON SCHEDULE EVERY 1 DAY STARTS '2036-01-01 03:00:00' DO DELETE FROM shop.`lines`",
    "CREATE EVENT shop.`szünet` ON SCHEDULE EVERY 1 HOUR DISABLE COMMENT 'ő' DO DELETE FROM shop.`lines`",
)
ONLY_MARIADB = (
    "SET SESSION sql_mode = 'ORACLE'",
    "CREATE PACKAGE shop.pack AS FUNCTION one RETURN INT; END",
    "CREATE PACKAGE BODY shop.pack AS FUNCTION one RETURN INT AS BEGIN RETURN 1; END; END",
    "SET SESSION sql_mode = DEFAULT",
)
PLAIN = {
    ("function", "twice"),
    ("procedure", "list it"),
    ("procedure", "quo ted"),
    ("procedure", "aged"),
    ("view", "c_base"),
    ("view", "b_upon"),
    ("view", "a_around"),
    ("view", "with rates"),
    ("event", "nightly"),
    ("event", "szünet"),
}
OF_MARIADB = {("package", "pack"), ("package body", "pack")}


@dataclass
class House:
    """A server with a backup, and what it held then: ``state`` of the schema, ``folder`` with its scripts."""

    repository: ChainRepository
    folder: Path
    state: dict[str, Any]

    @property
    def server(self) -> Server:
        return self.repository.server

    @property
    def connection(self) -> Connection:
        return Connection(socket=str(self.server.socket), user="root")

    @property
    def objects(self) -> set[tuple[str, str]]:
        return PLAIN | (OF_MARIADB if self.repository.kind.mariadb else set())

    def look(self) -> dict[str, Any]:
        with self.connection.connect() as session:
            scripts, tables = read_schema(session, "shop"), read_tables(session, TABLES)
        assert scripts.unread == ()
        # MySQL says the character set of a column where it was given, and not where it came from the table.
        created = [table.create.replace(" CHARACTER SET latin1", "") for table in tables.tables.values()]
        return {"scripts": scripts, "created": created, "triggers": [one.triggers for one in tables.tables.values()]}

    def restore(self, folder: Path, *, compare: bool = False) -> TablesOutcome:
        spec = TablesSpec(
            restore_id=new_id(now()),
            server="shop",
            target="latest",
            way=Source.PHYSICAL,
            chain=self.repository.chain,
            replay=None,
            statements=(),
            goals=tuple(TableGoal(name, name) for name in TABLES),
            into="shop",
            folder=folder,
            whole=("shop",),
            replace=True,
            compare=compare,
        )
        return tablerestore.execute(
            spec,
            self.connection,
            self.repository.sources,
            self.repository.context,
        )


@pytest.fixture(scope="module")
def house_mariadb(keys: Keys) -> Iterator[House]:
    yield from _house(MARIADB, keys)


@pytest.fixture(scope="module")
def house_mysql(keys: Keys) -> Iterator[House]:
    yield from _house(MYSQL, keys)


def _house(kind: Kind, keys: Keys) -> Iterator[House]:
    with short_directory() as folder, kind.make() as server:
        server.create_backup_users()
        server.execute(
            "CREATE USER owner@localhost",
            "GRANT ALL ON *.* TO owner@localhost",
            "CREATE DATABASE other",
            "CREATE TABLE other.rates (id INT PRIMARY KEY, rate INT)",
            "INSERT INTO other.rates VALUES (1, 10)",
            *SCHEMA,
            "INSERT INTO shop.orders VALUES (1, 'ä'), (2, 'b')",
            "INSERT INTO shop.`lines` VALUES (1, 1)",
            *OBJECTS,
            *(ONLY_MARIADB if kind.mariadb else ()),
        )
        repository = ChainRepository(kind, server, keys, folder)
        repository.take()
        house = House(repository, folder / "scripts", {})
        house.state = house.look()
        for path, content in house.state["scripts"].files().items():
            (house.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (house.folder / path).write_bytes(content)
        yield house


@pytest.fixture
def house(request: pytest.FixtureRequest, kind: Kind) -> House:
    found = request.getfixturevalue(f"house_{kind}")
    assert isinstance(found, House)
    return found


def kinds(objects: Any) -> set[tuple[str, str]]:
    return {(one.kind, one.name) for one in objects}


@BOTH
@pytest.mark.skipif(os.geteuid() != 0, reason="a copy is given to the server's user")
def test_a_dropped_schema_comes_back_out_of_a_physical_backup_with_everything_in_it(
    house: House, short_tmp: Path
) -> None:
    server = house.server
    sums = server.query("CHECKSUM TABLE shop.orders, shop.`lines` EXTENDED")
    server.execute("DROP DATABASE shop")
    outcome = house.restore(short_tmp)
    assert outcome.is_good
    assert kinds(outcome.objects.added) == house.objects
    assert kinds(outcome.objects.enabled) == {("event", "nightly")}
    assert outcome.objects.left_alone == {} == outcome.objects.failed
    assert house.look() == house.state
    assert server.query("CHECKSUM TABLE shop.orders, shop.`lines` EXTENDED") == sums
    assert server.query("SELECT * FROM shop.`with rates`") == [(1, 10)]
    assert any(text.startswith("enabled, as their definitions say: event shop.nightly") for text in outcome.warnings)


@BOTH
@pytest.mark.skipif(os.geteuid() != 0, reason="a copy is given to the server's user")
def test_a_comparison_makes_nothing(house: House, short_tmp: Path) -> None:
    house.server.execute("DROP VIEW shop.`with rates`")
    before = house.look()
    outcome = house.restore(short_tmp, compare=True)
    assert (outcome.done, outcome.objects.as_json()) == (False, {"added": [], "left_alone": [], "failed": []})
    assert house.look() == before


@BOTH
def test_what_is_there_is_left_alone_and_said_to_differ(house: House) -> None:
    server = house.server
    server.execute(
        "CREATE OR REPLACE VIEW shop.c_base AS SELECT 1 AS id, 2 AS two",
        "DROP PROCEDURE shop.`list it`",
        "DROP VIEW IF EXISTS shop.`with rates`",
        "CREATE TABLE shop.`with rates` (id INT)",
        "ALTER EVENT shop.nightly DISABLE",
    )
    before = house.look()
    found = add_missing(house.connection, house.folder, ["shop"])
    assert kinds(found.added) == {("procedure", "list it")}
    assert {one.name for one, differs in found.left_alone.items() if differs} == {"c_base", "nightly"}
    assert [one.name for one, differs in found.left_alone.items() if differs is None] == ["with rates"]
    assert kinds(found.left_alone) == house.objects - kinds(found.added)
    assert (found.failed, found.enabled, found.warnings) == ({}, (), ())
    after = house.look()
    assert (after["scripts"].views, after["scripts"].events) == (before["scripts"].views, before["scripts"].events)
    again = add_missing(house.connection, house.folder, ["shop"])
    assert again.added == ()


@BOTH
def test_what_cannot_be_made_is_named_and_stops_nothing_else(house: House) -> None:
    server = house.server
    server.execute("DROP DATABASE shop", "DROP TABLE other.rates", "DROP USER owner@localhost")
    assert create_missing(house.connection, house.folder, ["shop", "unknown"]) == {"shop"}
    assert create_missing(house.connection, house.folder, ["shop"]) == frozenset()
    server.execute(*SCHEMA[1:])
    found = add_missing(house.connection, house.folder, ["shop"])
    assert "other.rates" in found.failed[SchemaObject("view", "shop", "with rates")]
    assert kinds(found.failed) == {("view", "with rates")}
    assert kinds(found.added) == house.objects - kinds(found.failed)
    (stranger,) = [text for text in found.warnings if text.startswith("there is no account")]
    assert stranger.startswith("there is no account `owner`@`localhost` here, the definer of procedure shop.list it:")
    (aged,) = [text for text in found.warnings if "shop.aged" in text]
    assert "latin1_bin" in aged  # somebody else may be at work in this schema, so its collation stays
    assert (
        server.scalar("SELECT DEFAULT_COLLATION_NAME FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = 'shop'")
        == "latin1_german2_ci"
    )


@BOTH
def test_views_across_schemas_find_each_other_and_what_is_over_does_not_begin_again(
    house: House, tmp_path: Path
) -> None:
    server = house.server
    server.execute(
        "CREATE DATABASE one",
        "CREATE DATABASE two",
        "CREATE TABLE one.t (id INT)",
        "CREATE VIEW two.b AS SELECT * FROM one.t",
        "CREATE VIEW one.a AS SELECT * FROM two.b",
        "CREATE VIEW two.a AS SELECT * FROM one.a",
        "CREATE EVENT one.once ON SCHEDULE AT '2036-01-01 00:00:00' DO SELECT 1",
    )
    with house.connection.connect() as session:
        files = {**read_schema(session, "one").files(), **read_schema(session, "two").files()}
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content.replace(b"2036-01-01", b"2020-01-01"))
    server.execute("RENAME TABLE one.t TO one.away")
    for working in (True, False):
        said = keep_scripts(
            house.connection, tmp_path / str(working), ["one", "two", "gone"], ["two"], absent=(), working=working
        )
        assert len(said) == (3 if working else 1)  # no schema "gone", two views that do not work
        kept = (tmp_path / str(working) / "schemas/two/views.sql").read_bytes()
        assert (b"\nCREATE " in kept, b"-- CREATE " in kept) == (not working, working)
        assert [path.name for path in (tmp_path / str(working) / "schemas/one").iterdir()] == ["create.sql"]
    server.execute("RENAME TABLE one.away TO one.t", "DROP VIEW two.b, one.a, two.a", "DROP EVENT one.once")
    found = add_missing(house.connection, tmp_path, ["one", "two"])
    assert kinds(found.added) == {("view", "a"), ("view", "b")}
    assert len(found.added) == 3
    assert found.warnings == ("event one.once was dropped by the server: its schedule has ended",)
    (tmp_path / "schemas/one/routines.sql").write_text("SET SESSION sql_mode = '';\nCREATE OR REPLACE PROCEDURE p();\n")
    with pytest.raises(DamagedError, match=r"routines\.sql of schema one"):
        add_missing(house.connection, tmp_path, ["one"])


def test_scripts_of_a_dump_are_said_to_be_of_its_moment(tmp_path: Path) -> None:
    base, rows = tmp_path / "base", tmp_path / "rows"
    for name in ("shop", "other"):
        (base / "schemas" / name).mkdir(parents=True)
    (base / "schemas/shop/views.sql").write_text("x")
    copy_scripts(base, rows, ["shop", "none"])
    assert [path.name for path in rows.rglob("*.sql")] == ["views.sql"]
    said = remarks(rows, ["other", "shop"], "b1", replayed=True, chosen=True)
    assert said == (
        (
            "backup b1 has no views, routines or events of other: there were none, or the backup was limited to some "
            "tables of that schema"
        ),
        (
            "views, routines and events of shop are those of backup b1: changes to them between it and the target are "
            "not replayed"
        ),
    )
    assert remarks(rows, ["shop"], "b1", replayed=False, chosen=True) == ()
