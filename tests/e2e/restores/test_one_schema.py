"""A schema that somebody dropped, back with everything in it, by the command line. What a physical backup gives is
shown in tests/unit/restore/cutover/test_schema_objects.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backupd.engine.server.definitions import read_schema
from backupd.engine.sql.client import Connection
from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_USER

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@SOAK
def test_a_dropped_schema_comes_back_out_of_a_dump_with_its_views_routines_and_events(
    keys: Keys, short_tmp: Path
) -> None:
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute(
            f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost",
            "CREATE DATABASE shop CHARACTER SET latin1",
            "CREATE TABLE shop.orders (id INT PRIMARY KEY)",
            "INSERT INTO shop.orders VALUES (1)",
            "CREATE VIEW shop.seen AS SELECT * FROM shop.orders",
            "CREATE PROCEDURE shop.p() SELECT 1",
            "CREATE EVENT shop.e ON SCHEDULE EVERY 1 DAY DO DELETE FROM shop.orders",
        )
        connection = Connection(socket=str(server.socket), user="root")
        with connection.connect() as session:
            before = read_schema(session, "shop")
        house = House(short_tmp, server, keys)
        backup = house.ok("backup", SERVER, "--kind", "logical")["id"]
        server.execute("INSERT INTO shop.orders VALUES (2)", "CREATE VIEW shop.later AS SELECT 1")
        Archive(house, server).take()
        server.execute("DROP DATABASE shop")
        told = house.run(
            "restore",
            SERVER,
            "--to",
            "latest",
            "--tables",
            "shop.*",
            "--into",
            SERVER,
            "--confirm",
            SERVER,
            "--from",
            "logical",
        )
        assert told.code == 0, told.all
        plain = " ".join(told.out.split())
        assert "created, because missing: procedure shop.p, view shop.seen, event shop.e" in plain
        assert f"views, routines and events of shop are those of backup {backup}" in plain
        assert "enabled, as their definitions say: event shop.e" in plain
        assert server.query("SELECT * FROM shop.seen ORDER BY id") == [(1,), (2,)]
        with connection.connect() as session:
            assert read_schema(session, "shop") == before
        server.execute("DROP PROCEDURE shop.p", "CREATE PROCEDURE shop.p() SELECT 2", "DROP EVENT shop.e")
        again = house.ok(
            "restore",
            SERVER,
            "--to",
            f"backup:{backup}",
            "--tables",
            "shop.*",
            "--into",
            SERVER,
            "--as",
            "*_old",
            "--from",
            "logical",
        )
        assert again["objects"] == {
            "added": [{"kind": "event", "name": "shop.e", "enabled": True}],
            "left_alone": [
                {"kind": "procedure", "name": "shop.p", "differs": True},
                {"kind": "view", "name": "shop.seen", "differs": False},
            ],
            "failed": [],
        }
        other = house.ok(
            "restore",
            SERVER,
            "--to",
            f"backup:{backup}",
            "--tables",
            "shop.ord*",
            "--into",
            SERVER,
            "--as",
            "*_older",
            "--from",
            "logical",
        )
        assert other["objects"] == {"added": [], "left_alone": [], "failed": []}
