"""SQL files for people: the real client loads what was written, called by its script."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from backupd.engine.sql.client import Connection
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName, data_path, definition_path, quote_name, schema_folder, triggers_path
from backupd.process.runtime import option_file
from restore.tables.sql_files import README, SCRIPT, write_sql
from tests.support.restores.dump_folder import add_table
from tests.support.servers import mysql
from tests.support.servers.datadir import find_program
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server

ODD = TableName("my.shop", "we ird/..;'\n`x`%")
LINE = "a'b\n$(touch pwned) `x`;"
"""A schema."""
PARENT, CHILD = TableName("shop", "a_child_of_z"), TableName("shop", "z")


def folder_of(path: Path) -> Path:
    """Tables of two schemas with foreign keys, a trigger, a view that needs a routine."""
    odd = "CREATE TABLE `" + ODD.table.replace("`", "``") + "` (\n  `a` int DEFAULT NULL\n) ENGINE=InnoDB"
    parent = (
        "CREATE TABLE `a_child_of_z` (\n  `id` int NOT NULL,\n  KEY `k` (`id`),\n  CONSTRAINT `fk` FOREIGN KEY "
        "(`id`) REFERENCES `z` (`id`)\n) ENGINE=InnoDB"
    )
    add_table(path, ODD, odd, [(1,), (None,)], files=2)
    add_table(path, PARENT, parent, [(n,) for n in range(20)])
    add_table(
        path,
        CHILD,
        "CREATE TABLE `z` (\n  `id` int NOT NULL,\n  PRIMARY KEY (`id`)\n) ENGINE=InnoDB",
        [(n,) for n in range(20)],
    )
    scripts = {
        triggers_path(PARENT): "DELIMITER ;;\nCREATE TRIGGER `up` BEFORE INSERT ON `a_child_of_z` FOR EACH ROW BEGIN "
        "SET NEW.id = NEW.id + 1; END ;;\nDELIMITER ;\n",
        schema_folder("shop") + "create.sql": "CREATE DATABASE IF NOT EXISTS `shop` CHARACTER SET latin1;\n",
        schema_folder("shop") + "routines.sql": "DELIMITER ;;\nCREATE FUNCTION `two`() RETURNS int DETERMINISTIC BEGIN "
        "RETURN 2; END ;;\nDELIMITER ;\n",
        schema_folder("shop") + "views.sql": "CREATE VIEW `v` AS SELECT two() AS two;\n",
    }
    for name, text in scripts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@dataclass(frozen=True)
class Hand:
    """A server and its client ``program``; ``options``: its option file, whose ``force`` a script overrules."""

    server: Server
    flavour: Flavour
    program: str
    options: Path

    def load(self, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(folder / SCRIPT), f"--defaults-file={self.options}", *more],
            check=False,
            env={"PATH": "/usr/bin:/bin", "CLIENT": self.program},
            cwd="/",
            text=True,
            capture_output=True,
        )


@pytest.fixture(scope="module", params=[Flavour.MARIADB, Flavour.MYSQL])
def hand(request: pytest.FixtureRequest) -> Iterator[Hand]:
    flavour = Flavour(request.param)
    if flavour is Flavour.MYSQL and (why := mysql.why_not()):
        pytest.skip(why)
    mariadb = flavour is Flavour.MARIADB
    program = find_program("mariadb") if mariadb else str(mysql.root_programs() / "mysql")
    with PrivateServer(binlog=False) if mariadb else MySQLServer(binlog=False) as server:
        groups = Connection(socket=str(server.socket), user="root").option_groups()
        groups["client"]["loose-force"] = None
        with option_file(groups) as options:
            yield Hand(server, flavour, program, Path(options))


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "hand" in request.fixturenames:
        server: Server = request.getfixturevalue("hand").server
        server.execute(*(f"DROP DATABASE IF EXISTS {quote_name(name)}" for name in ("shop", ODD.schema, LINE)))


def written_for(hand: Hand, folder: Path, target: Path) -> Path:
    write_sql(folder, target, hand.flavour)
    return target


def test_what_was_written_is_loaded_by_its_script_in_order(hand: Hand, tmp_path: Path) -> None:
    target = tmp_path / "it's $(touch pwned)\n`x`" / "-sql"
    dump = folder_of(tmp_path / "dump")
    write_sql(dump, target, hand.flavour)
    files = {path.relative_to(dump): path.read_bytes() for path in dump.rglob("*.sql")}
    assert len(files) == 11
    assert {path: (target / path).read_bytes() for path in files} == files
    done, server = hand.load(target), hand.server
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert server.query(f"SELECT a FROM {ODD} ORDER BY a") == [(None,), (1,)]
    assert server.scalar(f"SELECT SUM(id) FROM {PARENT}") == sum(range(20))
    assert server.scalar("SELECT two FROM shop.v") == 2
    assert server.query(
        "SELECT DEFAULT_CHARACTER_SET_NAME FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = 'shop'"
    ) == [("latin1",)]
    server.execute(f"INSERT INTO {CHILD} VALUES (100)", f"INSERT INTO {PARENT} VALUES (99)")
    assert server.scalar(f"SELECT COUNT(*) FROM {PARENT} WHERE id = 100") == 1


def test_no_row_gets_into_a_table_that_was_there_before(hand: Hand, tmp_path: Path) -> None:
    target, server = written_for(hand, folder_of(tmp_path / "dump"), tmp_path / "sql"), hand.server
    server.execute(
        "CREATE DATABASE shop", f"CREATE TABLE {CHILD} (id INT PRIMARY KEY)", f"INSERT INTO {CHILD} VALUES (777)"
    )
    for more in ((), ("--force",)):
        done = hand.load(target, *more)
        assert done.returncode != 0
        assert "1050" in done.stderr
        server.execute(f"DROP TABLE IF EXISTS {PARENT}", f"DROP DATABASE {quote_name(ODD.schema)}")
    assert "load.sh: stopped at tables/shop/z/definition.sql: nothing behind it was loaded" in done.stderr
    assert server.query(f"SELECT id FROM {CHILD}") == [(777,)]
    assert server.query("SHOW TRIGGERS FROM shop") == []
    only = subprocess.run(
        [hand.program, f"--defaults-file={hand.options}"],
        check=False,
        text=True,
        cwd=target,
        input=(target / README).read_text(),
        capture_output=True,
    )
    assert "this file only explains" in only.stderr
    assert server.query(f"SELECT id FROM {CHILD}") == [(777,)]


def test_rows_that_are_refused_or_a_file_that_is_gone_end_the_script(hand: Hand, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "dump")
    with (folder / data_path(PARENT, 0)).open("a") as file:
        file.write("INSERT INTO `nothing` VALUES (1);\n")
    target, server = written_for(hand, folder, tmp_path / "sql"), hand.server
    done = hand.load(target)
    assert done.returncode != 0
    assert f"stopped at {data_path(PARENT, 0)}" in done.stderr
    assert server.query("SHOW TABLES FROM shop") == [(PARENT.table,)]
    server.execute("DROP DATABASE shop", f"DROP DATABASE {quote_name(ODD.schema)}")
    (target / definition_path(PARENT)).unlink()
    done = hand.load(target)
    assert done.returncode != 0
    assert f"stopped at {definition_path(PARENT)}" in done.stderr
    assert server.query("SHOW TABLES FROM shop") == []


def test_names_and_values_that_a_shell_or_a_client_might_execute(hand: Hand, tmp_path: Path) -> None:
    names = [TableName(LINE, name) for name in ("a'b\"$(touch pwned)\\`touch pwned`", "-e DROP", "x\ny; exit 0", "é ü")]
    rows = ["\\! touch pwned\ndelimiter x\n\\. /etc/passwd\nsource /etc/passwd", "a\r\nb\0'\""]
    for name in names:
        create = f"CREATE TABLE {quote_name(name.table)} (\n  `t` text DEFAULT NULL\n) ENGINE=InnoDB"
        add_table(tmp_path / "dump", name, create, [(row,) for row in rows])
    target = written_for(hand, tmp_path / "dump", tmp_path / "sql")
    done = hand.load(target)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for name in names:
        assert hand.server.query(f"SELECT t FROM {name}") == [(row,) for row in rows]
    assert not list(tmp_path.rglob("pwned"))
    assert not Path("/pwned").exists()


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path: Path) -> None:
    dump = folder_of(tmp_path / "dump")
    target = tmp_path / "sql"
    target.mkdir()
    write_sql(dump, target)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    for there in (target, target / README):
        with pytest.raises(RefusedError, match="exists"):
            write_sql(dump, there)
    with pytest.raises(RefusedError, match="cannot write SQL files"):
        write_sql(dump, Path("/proc/nothing/sql"))
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"dump", "sql"}
