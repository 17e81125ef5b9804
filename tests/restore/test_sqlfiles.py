"""SQL files for people: the real client loads what was written, in the order of its README."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from backupd.engine.client import Connection
from backupd.engine.clienttool import client_options, client_tool
from backupd.model.dump import schema_folder, triggers_path
from backupd.model.errors import RefusedError, ServerError, ToolMissingError
from backupd.model.server import Flavour
from backupd.model.table import TableName
from backupd.process.optionfile import option_file
from restore.sqlfiles import README, write_sql
from tests.restore.dumpfolder import add_table
from tests.support import mysql
from tests.support.mariadb import PrivateServer
from tests.support.mysql import MySQLServer
from tests.support.server import Server

ODD = TableName("my.shop", "we ird/..;'\n`x`%")
PARENT, CHILD = TableName("shop", "a_child_of_z"), TableName("shop", "z")


@pytest.fixture(params=[Flavour.MARIADB, Flavour.MYSQL])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    if request.param is Flavour.MYSQL and (why := mysql.why_not()):
        pytest.skip(why)
    return Flavour(request.param)


def folder_of(path: Path) -> Path:
    """Tables of two schemas with foreign keys, a trigger, a view that needs a routine."""
    odd = "CREATE TABLE `" + ODD.table.replace("`", "``") + "` (\n  `a` int DEFAULT NULL\n) ENGINE=InnoDB"
    parent = ("CREATE TABLE `a_child_of_z` (\n  `id` int NOT NULL,\n  KEY `k` (`id`),\n  CONSTRAINT `fk` FOREIGN KEY "
              "(`id`) REFERENCES `z` (`id`)\n) ENGINE=InnoDB")
    add_table(path, ODD, odd, [(1,), (None,)], files=2)
    add_table(path, PARENT, parent, [(n,) for n in range(20)])
    add_table(path, CHILD, "CREATE TABLE `z` (\n  `id` int NOT NULL,\n  PRIMARY KEY (`id`)\n) ENGINE=InnoDB",
              [(n,) for n in range(20)])
    scripts = {
        triggers_path(PARENT): "DELIMITER ;;\nCREATE TRIGGER `up` BEFORE INSERT ON `a_child_of_z` FOR EACH ROW BEGIN "
                               "SET NEW.id = NEW.id + 1; END ;;\nDELIMITER ;\n",
        schema_folder("shop") + "create.sql": "CREATE DATABASE `shop` CHARACTER SET latin1;\n",
        schema_folder("shop") + "routines.sql": "DELIMITER ;;\nCREATE FUNCTION `two`() RETURNS int DETERMINISTIC BEGIN "
                                                "RETURN 2; END ;;\nDELIMITER ;\n",
        schema_folder("shop") + "views.sql": "CREATE VIEW `v` AS SELECT two() AS two;\n",
    }
    for name, text in scripts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def made(flavour: Flavour) -> Server:
    return PrivateServer(binlog=False) if flavour is Flavour.MARIADB else MySQLServer(binlog=False)


def test_what_was_written_is_loaded_by_the_client_in_the_order_of_its_readme(flavour: Flavour, tmp_path: Path) -> None:
    target = tmp_path / "out" / "sql"
    written = write_sql(folder_of(tmp_path / "dump"), target, flavour)
    assert (written.tables, written.files) == (3, 11)
    assert README in {path.name for path in target.iterdir()}
    paths = {} if flavour is Flavour.MARIADB else {"mysql": str(mysql.root_programs() / "mysql")}
    tool = client_tool(flavour, paths=paths)
    assert tool.mariadb is (flavour is Flavour.MARIADB)
    with made(flavour) as server:
        connection = Connection(socket=str(server.socket), user="root")
        with option_file(client_options(connection, mariadb=tool.mariadb)) as options:
            script = (target / README).read_text()
            told = next(line for line in script.splitlines() if line.endswith(f" < {README}")).split()[2:-2]
            done = subprocess.run([tool.tool.path, f"--defaults-file={options}", *told], cwd=target, check=False,
                                  text=True, input=script, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert server.query(f"SELECT a FROM {ODD} ORDER BY a") == [(None,), (1,)]
        assert server.scalar(f"SELECT SUM(id) FROM {PARENT}") == sum(range(20))
        assert server.scalar("SELECT two FROM shop.v") == 2
        assert server.query("SELECT DEFAULT_CHARACTER_SET_NAME FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = "
                            "'shop'") == [("latin1",)]
        server.execute(f"INSERT INTO {CHILD} VALUES (100)", f"INSERT INTO {PARENT} VALUES (99)")
        trigger = b"DELIMITER ;;\nCREATE TRIGGER t AFTER INSERT ON z FOR EACH ROW BEGIN SET @x = 1; END ;;\n"
        tool.run(connection, trigger, schema="shop")
        with pytest.raises(ServerError, match="refused a script") as caught:
            tool.run(connection, target / triggers_path(PARENT), schema="shop")
        assert "1359" in caught.value.detail
        assert server.scalar(f"SELECT COUNT(*) FROM {PARENT} WHERE id = 100") == 1


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path: Path) -> None:
    dump = folder_of(tmp_path / "dump")
    target = tmp_path / "sql"
    target.mkdir()
    write_sql(dump, target)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    for there in (target, target / README):
        with pytest.raises(RefusedError, match="there already"):
            write_sql(dump, there)
    with pytest.raises(RefusedError, match="cannot write SQL files"):
        write_sql(dump, Path("/proc/nothing/sql"))
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"dump", "sql"}


def test_a_client_that_is_missing_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolMissingError) as caught:
        client_tool(Flavour.MYSQL, paths={"mysql": "/nowhere/mysql"})
    assert "/nowhere/mysql" in caught.value.message
