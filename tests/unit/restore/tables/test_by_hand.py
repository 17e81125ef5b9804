"""What a logical backup holds, loaded by people: by its runbook, by the script of SQL files, and one file alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from backupd.backup.logical import LogicalOutcome
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Flavour
from backupd.process.runtime import option_file
from restore.tables.sql_files import SCRIPT, write_sql
from tests.support.dice import SOAK
from tests.support.keys import Keys
from tests.support.restores.dumped import DumpRepository, table
from tests.support.servers import mysql, zoo
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server
from tests.support.stores.folders import short_directory

_SHOP = (
    "CREATE DATABASE shop",
    "USE shop",
    "SET SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO,ALLOW_INVALID_DATES'",
    (
        "CREATE TABLE z (id INT AUTO_INCREMENT PRIMARY KEY, d DATE NOT NULL DEFAULT '0000-00-00', w VARCHAR(60) "
        "DEFAULT "
        "'a;''b\\\\\n/*') COMMENT='VIEW; \\'--\n'"
    ),
    "INSERT INTO z VALUES (0, '0000-00-00', 'x'), (5, '2020-02-31', 'y')",
    (
        "CREATE PROCEDURE p()\nBEGIN\n  -- it's a comment // with delimiter\n  # another 'one\n  SELECT "
        "'a\nDELIMITER ;\n'"
        ' AS x, "//" AS `delimiter`;\r\n  SELECT `delimiter`\n  FROM (SELECT 1 AS `delimiter`) q;\nEND'
    ),
    "CREATE FUNCTION two() RETURNS INT DETERMINISTIC RETURN 2",
    "CREATE TRIGGER t BEFORE INSERT ON z FOR EACH ROW SET NEW.w = 'fired'",
    "CREATE VIEW zv AS SELECT *, two() FROM z",
    "CREATE VIEW a_first AS SELECT * FROM zv",
    "CREATE EVENT ev ON SCHEDULE EVERY 1 DAY DISABLE COMMENT 'x;--' DO DELETE FROM z WHERE 1 = 0",
    "CREATE DATABASE other",
    "CREATE VIEW other.v1 AS SELECT * FROM shop.a_first",
    "CREATE VIEW a_second AS SELECT * FROM other.v1",
    "SET SESSION sql_mode = DEFAULT",
)
_ALL = (
    (
        "SELECT ROUTINE_SCHEMA, ROUTINE_NAME, ROUTINE_DEFINITION, SQL_MODE FROM information_schema.ROUTINES WHERE "
        "ROUTINE_SCHEMA IN ('shop', 'zoo') ORDER BY 1, 2"
    ),
    (
        "SELECT TABLE_SCHEMA, TABLE_NAME, VIEW_DEFINITION FROM information_schema.VIEWS WHERE TABLE_SCHEMA IN ("
        "'shop', 'zoo', 'other') ORDER BY 1, 2"
    ),
    (
        "SELECT TRIGGER_SCHEMA, TRIGGER_NAME, ACTION_STATEMENT FROM information_schema.TRIGGERS WHERE "
        "TRIGGER_SCHEMA IN ('shop', 'zoo') ORDER BY 1, 2"
    ),
    "SELECT EVENT_NAME, STATUS, EVENT_COMMENT FROM information_schema.EVENTS ORDER BY 1",
    "SELECT * FROM shop.a_second ORDER BY id",
    "SHOW CREATE TABLE shop.z",
)


@dataclass
class Hand:
    """A dump of ``repository``, and another server to load it into."""

    repository: DumpRepository
    outcome: LogicalOutcome
    target: Server
    client: str
    options: Path
    sums: dict[str, str]

    def load(self, schema: str, file: Path) -> None:
        with file.open("rb") as script:
            done = subprocess.run(
                [self.client, f"--defaults-file={self.options}", "--binary-mode", "--comments", schema],
                stdin=script,
                capture_output=True,
                check=False,
            )
        assert (done.returncode, done.stderr) == (0, b"")

    def compare(self) -> None:
        assert zoo.checksums(self.target) == self.sums
        for question in _ALL:
            assert self.target.query(question) == self.repository.server.query(question), question
        for schema in ("zoo", "shop", "other"):
            self.target.execute(f"DROP DATABASE {schema}")


@pytest.fixture(scope="module", params=[Flavour.MARIADB, pytest.param(Flavour.MYSQL, marks=SOAK)])
def hand(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Hand]:
    mariadb = request.param is Flavour.MARIADB
    if not mariadb and (why := mysql.why_not()):
        pytest.skip(why)

    def server() -> Server:
        return PrivateServer() if mariadb else MySQLServer()

    with server() as source, server() as target, short_directory() as base:
        source.create_backup_users()
        zoo.build(source)
        source.execute(*_SHOP)
        repository = DumpRepository(base, source, keys)
        sums = zoo.checksums(source)
        connection = Connection(socket=str(target.socket), user="root")
        with option_file(connection.option_groups()) as options:
            client = "mariadb" if mariadb else str(mysql.root_programs() / "mysql")
            yield Hand(repository, repository.dump(), target, client, Path(options), sums)


@pytest.fixture(scope="module")
def unpacked(hand: Hand) -> Path:
    """What the runbook, followed word for word, left in its folder."""
    repository = hand.repository
    repository.do_by_hand(hand.outcome, f"{hand.client} --defaults-file={hand.options}")
    hand.compare()
    return repository.base / "work/data"


def test_the_runbook_and_the_script_of_sql_files_bring_back_the_zoo_and_all_that_belongs_to_schemas(
    hand: Hand, unpacked: Path
) -> None:
    flavour = Flavour.MARIADB if hand.client == "mariadb" else Flavour.MYSQL
    folder = hand.repository.base / "sql"
    write_sql(unpacked, folder, flavour)
    done = subprocess.run(
        ["sh", str(folder / SCRIPT), f"--defaults-file={hand.options}"],
        text=True,
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "CLIENT": hand.client},
    )
    assert (done.returncode, done.stderr) == (0, "")
    hand.compare()


def test_each_file_of_a_table_loads_alone_with_the_same_ids_and_dates_whichever_tool_wrote_it(
    hand: Hand, unpacked: Path
) -> None:
    assert table(hand.outcome, "shop.z").tool == "mydumper"
    assert table(hand.outcome, "zoo.floats").tool == "backupd"
    folder = unpacked / "tables"
    heads = {
        (folder / name / "data-00000.sql").read_bytes().partition(b"INSERT")[0] for name in ("shop/z", "zoo/floats")
    }
    assert len(heads) == 1
    hand.target.execute("DROP DATABASE IF EXISTS alone", "CREATE DATABASE alone")
    for name in ("definition.sql", "data-00000.sql"):
        hand.load("alone", folder / "shop/z" / name)
    assert hand.target.query("SELECT * FROM alone.z") == hand.repository.server.query("SELECT * FROM shop.z")
