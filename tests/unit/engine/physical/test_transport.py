"""Tables as files between two running servers of a flavour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest

from backupd.engine.physical.tablespace_transport import Imported, can_import, export_tables, files_of, import_tables
from backupd.engine.sql.client import Connection
from backupd.model.errors import CancelledError
from backupd.model.table import TableName
from backupd.process.run_context import RunContext
from tests.support.restores.rolling import MARIADB, MYSQL, Kind
from tests.support.servers.server import Server

TEN = " UNION ALL ".join(f"SELECT {number} n" for number in range(10))
ROWS = f"(SELECT a.n + 10 * b.n + 100 * c.n n FROM ({TEN}) a, ({TEN}) b, ({TEN}) c) numbers"
DEFINITIONS = {
    "plain": "(id INT PRIMARY KEY, v VARCHAR(200), KEY (v))",
    "we ird/é": "(id INT PRIMARY KEY, v VARCHAR(200) DEFAULT 'x')",
    "virtual": "(id INT PRIMARY KEY, v VARCHAR(200), w INT GENERATED ALWAYS AS (LENGTH(v)) VIRTUAL, KEY (w))",
    "parts": "(id INT PRIMARY KEY, v VARCHAR(200), KEY (v)) PARTITION BY RANGE (id) "
    "(PARTITION `p é` VALUES LESS THAN (100), PARTITION p1 VALUES LESS THAN MAXVALUE)",
    "halves": "(id INT, v VARCHAR(200), y INT NOT NULL DEFAULT 3, PRIMARY KEY (id, y)) PARTITION BY RANGE (id) "
    "SUBPARTITION BY HASH (y) SUBPARTITIONS 2 (PARTITION p0 VALUES LESS THAN (100), "
    "PARTITION p1 VALUES LESS THAN (10000))",
    "empty": "(id INT PRIMARY KEY)",
    "texts": "(id INT PRIMARY KEY, v VARCHAR(200), FULLTEXT (v))",
    "instant": "(id INT PRIMARY KEY, v VARCHAR(200))",
    "isam": "(id INT PRIMARY KEY) ENGINE=MyISAM",
}
FILES = ("plain", "we ird/é", "virtual", "parts", "halves", "empty", "instant")


@dataclass(frozen=True)
class Pair:
    source: Server
    target: Server

    def connect(self, server: Server) -> Connection:
        return Connection(socket=str(server.socket), user="root")

    def stage(self, *names: str) -> None:
        self.target.execute("DROP DATABASE IF EXISTS staging", "CREATE DATABASE staging")
        for name in names:
            more = "(id INT PRIMARY KEY, v VARCHAR(200), c INT DEFAULT 7)"
            self.target.execute(f"CREATE TABLE staging.`{name}` {more if name == 'instant' else DEFINITIONS[name]}")

    def move(self, *names: str, cancel: Event | None = None) -> Imported:
        tables = [TableName("sh-op", name) for name in names]
        with self.connect(self.source).connect() as session, export_tables(session, tables) as exported:
            goals = [(table, TableName("staging", table.name.table)) for table in exported]
            return import_tables(self.connect(self.target), goals, RunContext(cancel=cancel or Event()))

    def files(self) -> set[str]:
        return {path.name for path in (self.target.datadir / "staging").iterdir()} - {"db.opt"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, id=str(kind), marks=pytest.mark.skipif(bool(why := kind.why_not()), reason=why or "-"))
        for kind in (MARIADB, MYSQL)
    ],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    kind: Kind = request.param
    with kind.make() as source, kind.make(binlog=False) as target:
        source.execute("CREATE DATABASE `sh-op`")
        for name, definition in DEFINITIONS.items():
            source.execute(f"CREATE TABLE `sh-op`.`{name}` {definition}")
            if name not in ("empty", "isam"):
                source.execute(f"INSERT INTO `sh-op`.`{name}` (id, v) SELECT n, REPEAT('x', 150) FROM {ROWS}")
        source.execute(
            "ALTER TABLE `sh-op`.instant ADD COLUMN c INT DEFAULT 7, ALGORITHM=INSTANT",
            "INSERT INTO `sh-op`.instant VALUES (5000, 'z', 9)",
        )
        yield Pair(source, target)


def test_tables_and_all_their_partitions_arrive_with_every_row(pair: Pair) -> None:
    pair.stage(*FILES)
    done = pair.move(*FILES)
    assert done.failed == {}
    assert {name.table: rows for name, rows in done.rows.items()} == {
        name: {"empty": 0, "instant": 1001}.get(name, 1000) for name in FILES
    }
    for name in FILES:
        assert pair.target.query(f"SELECT * FROM staging.`{name}` ORDER BY 1") == pair.source.query(
            f"SELECT * FROM `sh-op`.`{name}` ORDER BY 1"
        )
        assert pair.target.query(f"CHECK TABLE staging.`{name}`")[-1][-1] == "OK"
    assert pair.target.query("SELECT c FROM staging.instant WHERE id IN (1, 5000) ORDER BY id") == [(7,), (9,)]
    assert not any(name.endswith(".cfg") for name in pair.files())
    pair.source.execute("UPDATE `sh-op`.plain SET v = 'after' WHERE id = 1")  # its server holds nothing any more
    pair.source.execute("UPDATE `sh-op`.plain SET v = REPEAT('x', 150) WHERE id = 1")


def test_what_cannot_go_as_a_file_is_said_before_anything_is_done(pair: Pair) -> None:
    names = [TableName("sh-op", name) for name in (*DEFINITIONS, "absent")]
    with pair.connect(pair.source).connect() as source, pair.connect(pair.target).connect() as target:
        reasons = can_import(source, target, names)
        assert {name.table: why for name, why in reasons.items()} == {
            "texts": "it has a full-text index, which is kept in separate files",
            "isam": "engine MyISAM",
            "absent": "there is no such table in the copy",
        }
        logged = can_import(target, source, [TableName("sh-op", "plain")])
        assert "binary log" in logged[TableName("sh-op", "plain")]


def test_a_table_whose_definition_is_another_one_is_dropped_and_named_and_leaves_no_file(pair: Pair) -> None:
    pair.stage("plain", "empty")
    pair.target.execute("ALTER TABLE staging.plain ADD COLUMN more INT, ADD KEY (more)")
    done = pair.move("plain", "empty")
    assert set(done.rows) == {TableName("staging", "empty")}
    assert "mismatch" in done.failed[TableName("staging", "plain")].lower()
    assert {name.partition(".")[0] for name in pair.files()} == {"empty"}
    assert pair.target.query("SHOW TABLES FROM staging") == [("empty",)]


def test_a_partition_that_is_missing_makes_its_table_fail_alone(pair: Pair) -> None:
    pair.stage("parts", "plain")
    pair.target.execute("ALTER TABLE staging.parts DROP PARTITION p1")
    done = pair.move("parts", "plain")
    assert set(done.failed) == {TableName("staging", "parts")}
    assert done.rows == {TableName("staging", "plain"): 1000}
    assert {name.partition(".")[0] for name in pair.files()} == {"plain"}


def test_cancelling_leaves_neither_table_nor_file(pair: Pair) -> None:
    pair.stage("plain")
    cancel = Event()
    cancel.set()
    with pytest.raises(CancelledError):
        pair.move("plain", cancel=cancel)
    assert pair.files() == set()
    assert pair.target.query("SHOW TABLES FROM staging") == []


def test_the_files_of_a_server_that_is_somewhere_else_are_not_touched(pair: Pair, short_tmp: Path) -> None:
    (short_tmp / "staging").mkdir()
    assert files_of(short_tmp, [TableName("staging", "plain")]) == {TableName("staging", "plain"): ()}
