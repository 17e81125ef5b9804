"""XA transactions on the way of single tables to a moment: what MySQL's filters cannot do is refused by the plan."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.keys import operator_keys
from tests.support.restores.rolling import Kind, both
from tests.support.servers.mysql import root_programs
from tests.support.servers.server import SERVICE_USER
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@both()
@SOAK
def test_tables_are_not_rolled_forward_over_xa_transactions_where_the_servers_filters_stop_at_them(kind: Kind) -> None:
    with operator_keys() as keys, short_directory() as base, kind.make() as server:
        server.create_backup_users()
        server.execute(
            f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost",
            "CREATE DATABASE shop",
            "CREATE TABLE shop.o (id INT PRIMARY KEY)",
            "CREATE TABLE shop.other (id INT PRIMARY KEY)",
            "INSERT INTO shop.o VALUES (1)",
        )
        house = House(
            Path(base), server, keys, programs={} if kind.mariadb else {"mysqld": str(root_programs() / "mysqld")}
        )
        assert house.run("backup", SERVER, "--kind", "logical").code == 0
        server.execute("INSERT INTO shop.o VALUES (2)")
        archive = Archive(house, server)
        archive.take()
        before = archive.transactions[-1][1].gtid
        server.execute(
            "XA START 'x'",
            "INSERT INTO shop.other VALUES (1)",
            "XA END 'x'",
            "XA PREPARE 'x'",
            "XA COMMIT 'x'",
            "INSERT INTO shop.o VALUES (3)",
        )
        archive.take()
        prepared = next(one for _file, one in archive.transactions if one.state)
        wanted = "--tables", "shop.o"
        if kind.mariadb:
            done = house.run("restore", SERVER, "--to", "latest", *wanted, "--into", SERVER, "--as", "shop.again")
            assert done.code == 0, done.all
            assert server.query("SELECT id FROM shop.again ORDER BY id") == [(1,), (2,), (3,)]
            return
        refused = house.run("plan", SERVER, "--to", "latest", *wanted)
        assert refused.code == 1
        assert "cannot be rolled forward over XA transactions" in refused.all
        assert prepared.gtid in refused.all
        assert "--replay-with" not in refused.all
        assert house.run("plan", SERVER, "--to", f"gtid:{before}", *wanted).code == 0
