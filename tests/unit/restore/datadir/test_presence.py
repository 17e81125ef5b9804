"""Everything that a witness names is looked for in the copy, by name and definition: and equal copies are equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from backupd.engine.server.launch import OWN_ACCOUNT
from backupd.engine.sql.client import Connection
from backupd.engine.witness import take
from backupd.model.proof import Check, Tally, Witness
from backupd.process.run_context import RunContext
from restore.datadir.checks import CHECKSUMS, DEFINITIONS, compare_with_witness
from tests.support.servers.mariadb import PrivateServer

_WIDE = r"""
SET NAMES utf8mb4;;
CREATE DATABASE w CHARACTER SET latin1;;
CREATE DATABASE `hostile ``db`` ; '\\ 数` CHARACTER SET utf8mb4;;
USE w;;
CREATE TABLE plain (id INT PRIMARY KEY AUTO_INCREMENT, a VARCHAR(40) DEFAULT 'it''s AUTO_INCREMENT=7')
AUTO_INCREMENT=1000 COMMENT='DATA DIRECTORY=''/x''';;
INSERT INTO plain (a) VALUES ('a'), ('b');;
CREATE TABLE zoned (t TIMESTAMP DEFAULT '2026-03-01 12:00:00', u TIMESTAMP NULL DEFAULT CURRENT_TIMESTAMP ON
UPDATE CURRENT_TIMESTAMP, d DATETIME(6) DEFAULT NOW(6));;
CREATE TABLE gen (a INT, b INT AS (a + 1) VIRTUAL, c INT AS (a * 2) PERSISTENT, j LONGTEXT CHECK
(JSON_VALID(j)), INVISIBLE_ONE INT INVISIBLE DEFAULT 3, CONSTRAINT `odd ``c` CHECK (a < 100));;
CREATE TABLE parts (id INT, d DATE) PARTITION BY RANGE (YEAR(d)) SUBPARTITION BY HASH (id) SUBPARTITIONS 2
(PARTITION p0 VALUES LESS THAN (2000), PARTITION p1 VALUES LESS THAN MAXVALUE);;
CREATE TABLE times (t TIMESTAMP NOT NULL) PARTITION BY RANGE (UNIX_TIMESTAMP(t)) (PARTITION p0 VALUES LESS THAN
(UNIX_TIMESTAMP('2026-01-01')), PARTITION p1 VALUES LESS THAN MAXVALUE);;
CREATE TABLE mparts (id INT) ENGINE=MyISAM PARTITION BY HASH (id) PARTITIONS 3;;
CREATE TABLE versioned (a INT) WITH SYSTEM VERSIONING;;
CREATE TABLE vparts (a INT) WITH SYSTEM VERSIONING PARTITION BY SYSTEM_TIME (PARTITION h HISTORY, PARTITION n
CURRENT);;
INSERT INTO versioned VALUES (1);;
UPDATE versioned SET a = 2;;
CREATE TABLE packed (a INT) ROW_FORMAT=COMPRESSED KEY_BLOCK_SIZE=4;;
CREATE TABLE paged (a INT) PAGE_COMPRESSED=1;;
CREATE TABLE txt (a TEXT, FULLTEXT (a)) COLLATE utf8mb4_bin;;
CREATE TABLE geo (g POINT NOT NULL, SPATIAL INDEX (g)) ENGINE=Aria TRANSACTIONAL=1;;
CREATE TABLE my (a INT) ENGINE=MyISAM MAX_ROWS=5 CHECKSUM=1 DELAY_KEY_WRITE=1;;
INSERT INTO my VALUES (1);;
CREATE TABLE csv (a INT NOT NULL) ENGINE=CSV;;
CREATE TABLE mem (a INT) ENGINE=MEMORY;;
CREATE TABLE mrg (a INT) ENGINE=MRG_MyISAM UNION=(my);;
CREATE TABLE parent (id INT PRIMARY KEY, x INT UNIQUE);;
CREATE TABLE child (id INT, FOREIGN KEY (id) REFERENCES parent (id) ON DELETE CASCADE, CONSTRAINT `b x` FOREIGN
KEY (id) REFERENCES parent (x));;
CREATE SEQUENCE seq START WITH 5 INCREMENT BY 3 CACHE 10;;
SELECT NEXT VALUE FOR seq;;
CREATE TABLE `hostile ``db`` ; '\\ 数`.`t``; -- '' \\ ü%s` (`c``'' ü` INT COMMENT 'x\\y\'z') COMMENT='%d \\';;
CREATE DEFINER=`ghost`@`nowhere` SQL SECURITY INVOKER VIEW v AS SELECT p.id, v.a FROM plain p JOIN versioned v;;
CREATE ALGORITHM=MERGE VIEW `hostile ``db`` ; '\\ 数`.`v``'` AS SELECT 'a\'b\\' AS `x``y`, t FROM w.zoned WHERE t
> '2026-01-01';;
CREATE VIEW broken AS SELECT * FROM my;;
ALTER TABLE my RENAME COLUMN a TO b;;
CREATE TRIGGER plain_bi BEFORE INSERT ON plain FOR EACH ROW SET NEW.a = CONCAT(NEW.a, '\'');;
CREATE TRIGGER plain_bi2 BEFORE INSERT ON plain FOR EACH ROW FOLLOWS plain_bi SET NEW.a = NEW.a;;
SET sql_mode = 'ANSI_QUOTES,PIPES_AS_CONCAT';;
CREATE FUNCTION f(a INT) RETURNS INT DETERMINISTIC COMMENT 'ü' RETURN a + 1;;
CREATE PROCEDURE `p ``'`(INOUT x VARCHAR(10) CHARACTER SET utf8mb4) BEGIN SELECT "id" || 'x' FROM w.plain; END;;
SET sql_mode = 'ORACLE';;
CREATE PACKAGE pkg AS FUNCTION one RETURN INT; END;;
CREATE PACKAGE BODY pkg AS FUNCTION one RETURN INT AS BEGIN RETURN 1; END; END;;
SET sql_mode = DEFAULT, time_zone = '+03:00';;
CREATE EVENT e ON SCHEDULE EVERY 1 HOUR STARTS '2030-01-01 00:00:00' ENDS '2031-01-01 00:00:00' DO DELETE FROM
plain;;
CREATE EVENT e2 ON SCHEDULE AT '2035-05-05 05:05:05' ON COMPLETION PRESERVE DISABLE ON SLAVE DO SELECT 1;;
CREATE USER 'o''dd'@'10.%' IDENTIFIED BY 'x';;
CREATE ROLE `r ole`
"""


def _by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def _root(server: PrivateServer) -> Connection:
    return Connection(socket=str(server.socket), user="root")


def _compared(server: PrivateServer, witness: Witness) -> tuple[dict[str, Check], Tally]:
    checks, tally = compare_with_witness(_root(server), witness, witness.position, RunContext(workers=1))
    return _by_name(checks), tally


@pytest.fixture(scope="module")
def wide() -> Iterator[PrivateServer]:
    with PrivateServer() as server:
        server.execute(*_WIDE.split(";;\n"))
        yield server


def test_what_is_equal_is_found_equal_whatever_the_sessions_say(wide: PrivateServer) -> None:
    witness = take(_root(wide), server="s", max_seconds=60)
    assert witness.definitions is not None
    known = {kind: sum(map(bool, names.values())) for kind, names in witness.definitions.items()}
    assert known == {
        "table": 19,
        "view": 3,
        "sequence": 1,
        "trigger": 2,
        "event": 2,
        "function": 1,
        "procedure": 1,
        "package": 1,
        "package body": 1,
        "user": 0,
    }
    wide.execute(
        "INSERT INTO w.plain (id) VALUES (77777)",
        "DELETE FROM w.plain WHERE id = 77777",
        "SET GLOBAL time_zone = '-07:00', GLOBAL sql_mode = 'ANSI_QUOTES,NO_FIELD_OPTIONS'",
        "SET GLOBAL sql_quote_show_create = 0",
        "ALTER EVENT w.e DISABLE",
        f"CREATE USER {OWN_ACCOUNT}@localhost",
        "SELECT NEXT VALUE FOR w.seq",
    )
    try:
        checks, tally = _compared(wide, witness)
    finally:
        wide.execute(
            "SET GLOBAL time_zone = 'SYSTEM', GLOBAL sql_mode = DEFAULT, GLOBAL sql_quote_show_create = 1",
            f"DROP USER {OWN_ACCOUNT}@localhost",
            "ALTER EVENT w.e ENABLE",
        )
    assert checks[DEFINITIONS].outcome == "passed", checks[DEFINITIONS].detail
    assert (tally.unseen, tally.equal + tally.present) == (0, 20)


@pytest.mark.parametrize(
    ("statement", "undo", "kind", "name"),
    [
        ("RENAME TABLE w.my TO w.away", "RENAME TABLE w.away TO w.my", "table", "`w`.`my`"),
        ("ALTER TABLE w.csv ADD b INT NOT NULL", "ALTER TABLE w.csv DROP b", "table", "`w`.`csv`"),
        ("ALTER TABLE w.mem COMMENT 'x'", "ALTER TABLE w.mem COMMENT ''", "table", "`w`.`mem`"),
        ("DROP VIEW w.broken", "", "view", "`w`.`broken`"),
        ("DROP TRIGGER w.plain_bi2", "", "trigger", "`w`.`plain_bi2`"),
        ("CREATE OR REPLACE FUNCTION w.f(a INT) RETURNS INT DETERMINISTIC RETURN a + 2", "", "function", "`w`.`f`"),
        ("SET sql_mode = 'ORACLE';;DROP PACKAGE w.pkg", "", "package", "`w`.`pkg`"),
        ("ALTER EVENT w.e2 ON SCHEDULE AT '2036-05-05 05:05:05'", "", "event", "`w`.`e2`"),
        ("DROP SEQUENCE w.seq", "CREATE SEQUENCE w.seq", "sequence", "`w`.`seq`"),
        ("RENAME USER 'o''dd'@'10.%' TO odd@'10.%'", "", "user", "`o'dd`.`10.%`"),
    ],
)
def test_whatever_is_missing_or_different_is_named(
    wide: PrivateServer, statement: str, undo: str, kind: str, name: str
) -> None:
    witness = take(_root(wide), server="s", max_seconds=60)
    wide.execute(*statement.split(";;"))
    try:
        checks, _tally = _compared(wide, witness)
    finally:
        wide.execute(*filter(None, [undo]))
    assert checks[DEFINITIONS].outcome == "failed"
    assert checks[DEFINITIONS].detail.startswith(("1: ", "2: "))
    assert f"{kind} {name} is " in checks[DEFINITIONS].detail


def test_a_table_that_an_old_witness_left_out_is_looked_for_too(wide: PrivateServer) -> None:
    witness = take(_root(wide), server="s", max_seconds=60)
    old = replace(
        witness,
        definitions=None,
        version="",
        rows={},
        checksums={},
        uncovered={
            "`w`.`mem`": "engine MEMORY: not part of a snapshot",
            "`w`.`seq`": "a sequence: its value is not part of a snapshot",
            "`w`.`gone`": "renamed or rebuilt after the snapshot",
        },
    )
    checks, tally = _compared(wide, old)
    assert checks[DEFINITIONS].outcome == "passed"
    assert tally == Tally(0, 2, 0)
    checks, _tally = _compared(wide, replace(old, uncovered={"`w`.`lost`": "engine Aria: not part of a snapshot"}))
    assert (checks[DEFINITIONS].outcome, checks[DEFINITIONS].detail) == ("failed", "1: table `w`.`lost` is not there")


def test_another_version_may_print_differently_and_rows_are_counted(wide: PrivateServer) -> None:
    witness = take(_root(wide), server="s", max_seconds=60)
    assert witness.definitions is not None
    other = {**witness.definitions, "view": dict.fromkeys(witness.definitions["view"], "0" * 16)}
    checks, _tally = _compared(wide, replace(witness, definitions=other))
    assert checks[DEFINITIONS].outcome == "failed"
    checks, tally = _compared(wide, replace(witness, definitions=other, version="10.11.1-MariaDB"))
    assert checks[DEFINITIONS].outcome == "passed"
    assert "printed differently" in checks[DEFINITIONS].detail
    assert tally.unseen == 0
    checks, _tally = _compared(wide, replace(witness, rows={"`w`.`csv`": 3}))
    assert checks[CHECKSUMS].outcome == "failed"
    assert "`w`.`csv`: 0 rows, not 3" in checks[CHECKSUMS].detail


def test_what_cannot_be_looked_at_is_counted(wide: PrivateServer) -> None:
    witness = take(_root(wide), server="s", max_seconds=60)
    assert witness.definitions is not None
    strange = {**witness.definitions, "library": {"`w`.`lib`": "0" * 16}}
    checks, tally = _compared(wide, replace(witness, definitions=strange))
    assert tally.unseen == 1
    assert "not looked at: library `w`.`lib`" in checks[DEFINITIONS].detail


def test_small_tables_without_snapshots_are_read_while_nothing_is_written(wide: PrivateServer) -> None:
    wide.execute("SET GLOBAL binlog_format = 'ROW'")
    witness = take(_root(wide), server="s", max_seconds=60)
    assert {"`w`.`my`", "`w`.`geo`", "`w`.`mparts`"} <= witness.checksums.keys()
    assert {"`w`.`csv`", "`w`.`mem`"} <= witness.uncovered.keys()
