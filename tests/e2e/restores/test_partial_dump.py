"""Tables out of a logical backup that lacks one of them, and which backup stands in for one that is to be deleted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_USER
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

POLICY = """\
logical:
  schedule: every 24h
  partial: accepted
  sets:
    money: {schedule: every 1h, tables: {include: ['shop.a']}}
"""


@pytest.fixture(scope="module")
def house(keys: Keys) -> Iterator[House]:
    """Two whole tables of a schema, and a crashed one."""
    with short_directory() as base, PrivateServer() as server:
        server.create_backup_users()
        server.execute(
            f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost",
            "CREATE DATABASE shop",
            "CREATE TABLE shop.a (id INT PRIMARY KEY, v INT)",
            "INSERT INTO shop.a VALUES (0, 1)",
            "CREATE TABLE shop.b (id INT PRIMARY KEY)",
            "INSERT INTO shop.b VALUES (7)",
            "CREATE TABLE shop.broken (id INT PRIMARY KEY, v CHAR(100)) ENGINE=MyISAM",
            "INSERT INTO shop.broken VALUES (1, 'x'), (2, 'y'), (3, 'z')",
            "FLUSH TABLES",
        )
        rows = server.datadir / "shop/broken.MYD"
        rows.write_bytes(rows.read_bytes()[:50])
        yield House(base, server, keys, policy_extra=POLICY)


@pytest.fixture(scope="module")
def backup(house: House) -> str:
    done = house.run("backup", SERVER, "--kind", "logical")
    assert done.code == 1
    assert "shop.broken is missing" in done.all
    return str(house.backups()[0]["id"])


def test_a_pattern_takes_what_is_there_and_names_what_is_missing(house: House, backup: str, tmp_path: Path) -> None:
    target = ("restore", SERVER, "--to", f"backup:{backup}", "--tables", "shop.*")
    done = house.run(*target, "--sql", str(tmp_path / "sql"), "--json")
    assert done.code == 1
    told = json.loads(done.out)
    tables = {one["source"]: one["trouble"] for one in told["tables"]}
    assert (tables["shop.a"], tables["shop.b"]) == (None, None)
    assert "orrupt" in tables["shop.broken"]
    assert any("shop.broken is not in backup" in line for line in told["warnings"])
    assert (tmp_path / "sql/tables/shop/b/data-00000.sql").is_file()
    done = house.run(*target, "--into", SERVER, "--as", "*_back")
    assert done.code == 1
    assert house.server.query("SELECT * FROM shop.a_back") == [(0, 1)]


def test_a_table_that_is_named_and_missing_is_an_error(house: House, backup: str, tmp_path: Path) -> None:
    for more in ((), ("--tables", "shop.*")):
        done = house.run(
            "restore",
            SERVER,
            "--to",
            f"backup:{backup}",
            "--tables",
            "shop.broken",
            *more,
            "--sql",
            str(tmp_path / "none"),
        )
        assert done.code == 1
        assert f"backup {backup} does not hold shop.broken" in done.all
        assert not (tmp_path / "none").exists()


def test_the_last_dump_is_kept_with_the_command_for_another_one_of_its_kind(house: House, backup: str) -> None:
    assert house.run("backup", SERVER, "--kind", "logical", "--set", "money").code == 0
    money = next(str(one["id"]) for one in house.backups() if one["id"] != backup)
    for chosen, options in ((backup, "--kind logical"), (money, "--kind logical --set money")):
        done = house.run("backups", "delete", chosen, "--now")
        assert done.code == 1
        assert f"hint: take another one first: backupd backup {SERVER} {options}\n" in done.all
