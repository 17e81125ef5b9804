"""A schema that somebody dropped, back with everything in it: tables, triggers, views, routines, events."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from backupd.engine.client import Connection
from backupd.engine.ddl import read_tables
from backupd.engine.schemascripts import SchemaScripts, read_schema
from backupd.model.table import TableName
from tests.e2e.archived import Archive
from tests.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.places import short_directory
from tests.support.server import SERVICE_USER, Server
from tests.support.stacks import MARIADB, MYSQL_CLONE, Stack

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

TABLES = (TableName("shop", "lines"), TableName("shop", "orders"))
BEFORE = (
    "CREATE USER owner@localhost", "GRANT ALL ON *.* TO owner@localhost",
    "CREATE DATABASE shop CHARACTER SET latin1 COLLATE latin1_german2_ci", "CREATE DATABASE other",
    "CREATE TABLE other.rates (id INT PRIMARY KEY, rate INT)", "INSERT INTO other.rates VALUES (1, 10)",
    "CREATE TABLE shop.orders (id INT PRIMARY KEY, v VARCHAR(40))",
    "CREATE TABLE shop.`lines` (id INT PRIMARY KEY, o INT, FOREIGN KEY (o) REFERENCES shop.orders (id))",
    "INSERT INTO shop.orders VALUES (1, 'ä'), (2, 'b')", "INSERT INTO shop.`lines` VALUES (1, 1), (2, 2)",
    "CREATE TRIGGER shop.orders_bi BEFORE INSERT ON shop.orders FOR EACH ROW SET NEW.v = CONCAT(NEW.v, '!')",
    "CREATE FUNCTION shop.twice(n INT) RETURNS INT DETERMINISTIC RETURN 2 * n",
    "CREATE DEFINER = owner@localhost PROCEDURE shop.`list it`() SELECT 'ő', COUNT(*) FROM shop.orders",
    "CREATE VIEW shop.b_base AS SELECT id, shop.twice(id) AS two FROM shop.orders",
    "CREATE VIEW shop.a_upon AS SELECT * FROM shop.b_base",
    "CREATE VIEW shop.`with rates` AS SELECT o.id, r.rate FROM shop.orders o JOIN other.rates r ON r.id = o.id",
    "CREATE EVENT shop.nightly ON SCHEDULE EVERY 1 DAY STARTS '2036-01-01 03:00:00' DO DELETE FROM shop.`lines`",
    "CREATE EVENT shop.paused ON SCHEDULE EVERY 1 HOUR DISABLE COMMENT 'ő' DO DELETE FROM shop.`lines`",
)


@dataclass
class Shop:
    stack: Stack
    house: House
    server: Server
    ids: dict[str, str]
    state: dict[str, Any]

    def restore(self, *args: str, to: str, code: int = 0) -> dict[str, Any]:
        done = self.house.run("restore", SERVER, "--to", to, "--into", SERVER, "--tables", "shop.*", *args, "--json")
        assert done.code == code, done.all
        outcome: dict[str, Any] = done.json
        return outcome


def state_of(server: Server) -> dict[str, Any]:
    """Everything in the schema, and itself."""
    with Connection(socket=str(server.socket), user="root").connect() as session:
        scripts: SchemaScripts = read_schema(session, "shop")
        tables = read_tables(session, TABLES)
    assert scripts.unread == ()
    return {"scripts": scripts, "tables": tables,
            "sums": server.query("CHECKSUM TABLE shop.orders, shop.`lines` EXTENDED")}


@pytest.fixture(scope="module", params=[MARIADB, MYSQL_CLONE], ids=str)
def shop(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Shop]:
    stack: Stack = request.param
    if why := stack.why_not():
        pytest.skip(why)
    with ExitStack() as cleanup:
        base = cleanup.enter_context(short_directory())
        server = cleanup.enter_context(stack.make())
        server.create_backup_users()
        server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost WITH GRANT OPTION", *BEFORE)
        house = House(base, server, keys, programs=stack.programs())
        ids = {"logical": house.ok("backup", SERVER, "--kind", "logical")["id"], "physical": house.backup()["id"]}
        yield Shop(stack, house, server, ids, state_of(server))


@pytest.mark.parametrize("source", ["physical", "logical"])
def test_a_dropped_schema_comes_back_with_everything_in_it(shop: Shop, source: str) -> None:
    shop.server.execute("DROP DATABASE shop")
    outcome = shop.restore("--confirm", SERVER, "--from", source, to=f"backup:{shop.ids[source]}")
    import json
    print(json.dumps(outcome["objects"], indent=1), outcome["warnings"])
    assert state_of(shop.server) == shop.state
