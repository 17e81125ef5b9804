"""Tables of MyRocks (ROCKSDB), with the real plugin: what is said of them is what comes of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.oracle import not_proved, same
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_USER, Server

_PLUGINS = Path("/usr/lib/mysql/plugin")
_PLUGIN = Path(os.environ.get("BACKUPD_TEST_ROCKSDB", str(_PLUGINS / "ha_rocksdb.so")))
"""The plugin, of the very version of the server. Where it lies outside the server's folder, what it needs besides
(libsnappy) must be found by $LD_LIBRARY_PATH."""

pytestmark = [
    pytest.mark.skipif(not _PLUGIN.is_file(), reason="BACKUPD_TEST_ROCKSDB is not set, and MyRocks is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user"),
]


@pytest.fixture
def options(short_tmp: Path) -> dict[str, Any]:
    plugins = short_tmp / "plugins"
    shutil.copytree(_PLUGINS, plugins)
    shutil.copy(_PLUGIN, plugins)
    return {"plugin_dir": str(plugins), "plugin_load_add": "ha_rocksdb", "rocksdb_block_cache_size": "32M"}


@pytest.fixture
def house(short_tmp: Path, keys: Keys, options: dict[str, Any]) -> Iterator[House]:
    with PrivateServer(options=options) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.r (i INT PRIMARY KEY, t VARCHAR(20)) ENGINE=ROCKSDB",
            "INSERT INTO shop.r VALUES (1, 'one'), (2, 'two')",
            "CREATE TABLE shop.i (i INT PRIMARY KEY) ENGINE=InnoDB",
            "INSERT INTO shop.i VALUES (1)",
        )
        yield House(short_tmp, server, keys)


def sums(server: Server) -> dict[str, int]:
    with server.connect() as connection:
        return checksum_everything(connection)


def test_what_is_said_of_tables_of_myrocks_is_what_comes_of_them(
    house: House, options: dict[str, Any], short_tmp: Path
) -> None:
    assert "every physical backup fails without it" in house.fails("check", SERVER).all
    assert "rocksdb_create_checkpoint" in house.fails("backup", SERVER, "--kind", "full").all
    house.server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
    assert "1 tables of engine ROCKSDB" in house.run("check", SERVER).all

    backup, expected = house.backup(), sums(house.server)
    assert any(
        "a restore to a later moment stops at the first change of their rows: shop.r" in text
        for text in backup["warnings"]
    )
    house.restore(short_tmp / "restored")
    with PrivateServer(datadir=short_tmp / "restored", options=options) as copy:
        same(sums(copy), expected)
    proof = house.run("test-restore", SERVER, "--json").json
    not_proved(proof, "its private server cannot read shop.r")

    # One table of it, and all of its schema: never without a word.
    out = ("--sql", str(short_tmp / "sql"))
    refused = house.fails("restore", SERVER, "--to", "latest", "--tables", "shop.r", *out)
    assert "shop.r cannot be restored separately from backup" in refused.all
    assert "it is of engine ROCKSDB" in refused.all
    left = house.fails("restore", SERVER, "--to", "latest", "--tables", "shop.*", *out)
    assert "failed: shop.r: it is of engine ROCKSDB" in left.all

    # Later than the backup: the plan says what the replay comes to.
    house.server.execute("INSERT INTO shop.r VALUES (3, 'three')")
    Archive(house, house.server).take()
    assert "a restore to a later moment stops at the first change" in house.run("plan", SERVER, "--to", "latest").all
    assert "! " + backup["id"] + ": the 1 tables of engine ROCKSDB" in house.run("timeline", SERVER).all
    assert "ROCKSDB" in house.fails("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "later")).all
    assert not (short_tmp / "later").exists()

    # A dump has them all.
    assert house.ok("backup", SERVER, "--kind", "logical")["tables_missing"] == 0
    house.ok("restore", SERVER, "--to", "latest", "--tables", "shop.*", "--into", SERVER, "--as", "again.*")
    found = sums(house.server)
    same([found["`again`.`i`"], found["`again`.`r`"]], [found["`shop`.`i`"], found["`shop`.`r`"]])
