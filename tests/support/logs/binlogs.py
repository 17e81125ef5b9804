"""Real binary logs of real servers, made once in a session, and what the servers' own tools say about them."""

from __future__ import annotations

import atexit
import functools
import io
import random
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pymysql.connections import Connection

from backupd.engine.binlog.scan import Scan, scan
from backupd.model.binlog import Transaction
from tests.support.servers import mysql
from tests.support.servers.datadir import find_program
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import Server
from tests.support.servers.stacks import MYSQL_CLONE
from tests.support.stores.folders import make_short_directory

_HEADER = re.compile(r"#\d{6} [ \d]\d:\d\d:\d\d server id \d+  end_log_pos (\d+)\s+(?:CRC32 \w+\s+)?(\S+) ?(\S*)")
FLAVOURS = ("mariadb", "mysql")
COLUMNS = """a TINYINT, b SMALLINT, c MEDIUMINT, d INT, e BIGINT UNSIGNED, f DECIMAL(65,30), g DECIMAL(5,0), h FLOAT,
    i DOUBLE, j BIT(1), k BIT(17), l DATE, m TIME, n TIME(3), o DATETIME, p DATETIME(6), q TIMESTAMP(2) NULL, r YEAR,
    s CHAR(10), t CHAR(255), u BINARY(16), v VARCHAR(10), w VARCHAR(300), x VARBINARY(5), y TINYBLOB, z TEXT,
    aa MEDIUMBLOB, ab LONGTEXT, ac ENUM('x','y'), ad SET('p','q','r'), ae JSON, ag CHAR(64) CHARACTER SET latin1"""
VALUES = """1, 2, 3, 4, 5, 1234567890.123456789, 99, 1.5, 2.5, 1, 70000, '2020-01-02', '12:13:14', '12:13:14.123',
    '2020-01-02 03:04:05', '2020-01-02 03:04:05.123456', '2020-01-02 03:04:05.12', 1999, 'ten', REPEAT('é', 200),
    'binary', 'short', REPEAT('w', 290), 'abc', 'tiny', REPEAT('t', 3000), REPEAT('m', 70000), 'long', 'y', 'p,r',
    '{"a": [1, 2]}', 'latin'"""
QUOTED = "Ünïcode ``q`` table"


@dataclass(frozen=True)
class Printed:
    """A transaction as the servers' own tool prints it. ``rows``: ``("insert", "shop.a")`` and how many; MySQL's tool
    cannot read rows of ``shop.places``."""

    gtid: str
    start: int
    end: int
    rows: dict[tuple[str, str], int]
    micros: int = 0


@dataclass(frozen=True)
class Log:
    """``gtids``: what the server had executed when the file ended. ``shown``: (from, to, type) of its own list of
    events."""

    path: Path
    gtids: str
    shown: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class Logs:
    flavour: str
    tool: str
    files: dict[str, Log] = field(default_factory=dict)

    def printed(self, name: str) -> list[Printed]:
        """What the tool says about a file."""
        done = subprocess.run(
            [self.tool, "--no-defaults", "--base64-output=decode-rows", "-v", str(self.files[name].path)],
            capture_output=True,
            check=True,
        )
        return list(_printed(done.stdout.decode("utf-8", "replace").splitlines()))


def all_of(path: Path) -> tuple[Scan, list[Transaction]]:
    found: list[Transaction] = []
    with path.open("rb") as stream:
        return scan(stream, on_transaction=found.append), found


def scanned(data: bytes) -> tuple[Scan, list[Transaction]]:
    found: list[Transaction] = []
    return scan(io.BytesIO(data), on_transaction=found.append), found


def changed(transaction: Transaction) -> dict[tuple[str, str], int]:
    """Its rows, in the writing of ``Printed.rows``."""
    return {(str(c.kind), f"{c.schema}.{c.name}"): c.rows for c in transaction.changes if c.rows}


def why_not(flavour: str) -> str:
    return MYSQL_CLONE.why_not() if flavour == "mysql" else ""


@functools.cache
def real_logs(flavour: str) -> Logs:
    """One server's story, a file for each chapter; ``growing`` was copied while the server wrote it, ``stopped`` is the
    same file after a clean shutdown."""
    folder = make_short_directory("bt-binlogs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options: dict[str, str | int | None] = {
        "sync_binlog": 0,
        "innodb_flush_log_at_trx_commit": 0,
        "max_allowed_packet": "64M",
        "innodb_buffer_pool_size": "64M",
    }
    server = (
        PrivateServer(options={**options, "binlog_annotate_row_events": 1})
        if flavour == "mariadb"
        else MYSQL_CLONE.make(options={**options, "binlog_rows_query_log_events": 1})
    )
    tool = find_program("mariadb-binlog") if flavour == "mariadb" else str(mysql.root_programs() / "mysqlbinlog")
    logs = Logs(flavour, tool, {})
    with server:
        connection = server.connect()
        try:
            story = _Story(server, connection, folder, logs)
            for chapter in (
                story.rows,
                story.statements,
                story.two_phases,
                story.conflicts,
                story.compressed,
                story.large,
                story.without_checksums,
                story.other_gtids,
            ):
                chapter()
                story.ended(chapter.__name__)
            story.growing()
        finally:
            connection.close()
        server.stop()
        story.keep("growing", "stopped", gtids=logs.files["growing"].gtids)
    return logs


class _Story:
    def __init__(self, server: Server, connection: Connection[Any], folder: Path, logs: Logs) -> None:
        self.server, self.connection, self.folder, self.logs = server, connection, folder, logs
        self.mariadb = logs.flavour == "mariadb"
        self.name = self.server.query("SHOW BINARY LOGS")[-1][0]

    def run(self, *statements: str) -> None:
        with self.connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def ended(self, chapter: str) -> None:
        gtids = self.executed()
        self.run("FLUSH BINARY LOGS")
        self.keep(chapter, chapter, gtids=gtids)
        self.name = self.server.query("SHOW BINARY LOGS")[-1][0]

    def executed(self) -> str:
        return str(self.server.scalar("SELECT @@gtid_binlog_pos" if self.mariadb else "SELECT @@gtid_executed"))

    def keep(self, source: str, chapter: str, *, gtids: str) -> None:
        name = self.name if source == chapter or source == "growing" else source
        target = self.folder / chapter
        shutil.copyfile(self.server.datadir / name, target)
        shown = (
            [(int(row[1]), int(row[4]), str(row[2])) for row in self.server.query(f"SHOW BINLOG EVENTS IN '{name}'")]
            if self.server.running
            else []
        )
        self.logs.files[chapter] = Log(target, gtids, tuple(shown))

    # --- chapters

    def rows(self) -> None:
        more, values = ", ai VECTOR(3)", ", TO_VECTOR('[1,2,3]')"
        if self.mariadb:
            more = ", ai UUID, aj INET6, ak VARCHAR(500) COMPRESSED, al BLOB COMPRESSED"
            values = ", UUID(), '::1', REPEAT('k', 400), REPEAT('l', 900)"
        self.run(
            "CREATE DATABASE shop",
            "USE shop",
            f"CREATE TABLE everything (id INT PRIMARY KEY, {COLUMNS}{more})",
            f"INSERT INTO everything VALUES (1, {VALUES}{values}), (2, {VALUES}{values})",
            "INSERT INTO everything (id) VALUES (3), (4), (5)",
            f"INSERT INTO everything VALUES (6, {VALUES}{values})",
            "UPDATE everything SET d = d + 1, w = NULL, ab = REPEAT('l', 200000)",
            "DELETE FROM everything WHERE id IN (2, 4)",
            "CREATE TABLE places (id INT PRIMARY KEY, p POINT)",
            "INSERT INTO places VALUES (1, NULL), (2, ST_GeomFromText('POINT(1 2)')), (3, NULL)",
            f"CREATE TABLE `{QUOTED}` (id INT AUTO_INCREMENT PRIMARY KEY, n INT, m BIGINT NOT NULL DEFAULT 7)",
            f"INSERT INTO `{QUOTED}` (n) VALUES {', '.join(f'({n})' for n in range(1500))}",
            f"INSERT INTO `{QUOTED}` (n) SELECT NULL FROM `{QUOTED}` WHERE id % 3 = 0",
            f"UPDATE `{QUOTED}` SET m = m + COALESCE(n, 1)",
            f"DELETE FROM `{QUOTED}` WHERE id % 2",
            "CREATE TABLE wide (id INT PRIMARY KEY, " + ", ".join(f"c{n} SMALLINT" for n in range(400)) + ")",
            "INSERT INTO wide (id, c3, c399) VALUES (1, 1, 1), (2, NULL, 5)",
            "UPDATE wide SET c200 = 3",
            "SET SESSION binlog_row_image = 'MINIMAL'",
            "UPDATE everything SET a = 9, z = 'zz' WHERE id < 6",
            "INSERT INTO everything (id, b) VALUES (20, 1), (21, 2)",
            "DELETE FROM everything WHERE id = 20",
            "SET SESSION binlog_row_image = 'NOBLOB'",
            "UPDATE everything SET a = 10",
            "SET SESSION binlog_row_image = 'FULL'",
            "CREATE TABLE copied AS SELECT id, s FROM everything",
            "BEGIN",
            "INSERT INTO copied VALUES (90, 'x')",
            "SAVEPOINT one",
            "UPDATE copied SET s = 'y'",
            "ROLLBACK TO one",
            "DELETE FROM copied WHERE id = 1",
            "INSERT INTO wide (id) VALUES (7)",
            "COMMIT",
        )
        if not self.mariadb:
            self.run(
                "SET SESSION binlog_row_value_options = PARTIAL_JSON",
                "CREATE TABLE j (id INT PRIMARY KEY, one JSON, two JSON)",
                "INSERT INTO j VALUES (1, JSON_OBJECT('a', 1, 'b', REPEAT('x', 300)), NULL), "
                "(2, JSON_OBJECT('a', 1, 'b', REPEAT('x', 300)), '{}')",
                "UPDATE j SET one = JSON_SET(one, '$.a', 2)",
                "SET SESSION binlog_row_value_options = ''",
                "UPDATE j SET one = JSON_SET(one, '$.a', 3)",
            )

    def statements(self) -> None:
        self.run(
            "CREATE TABLE IF NOT EXISTS s (id INT AUTO_INCREMENT PRIMARY KEY, t VARCHAR(20), r DOUBLE)",
            "ALTER TABLE s ADD COLUMN k INT, ADD INDEX (k)",
            "CREATE INDEX byt ON s (t)",
            "DROP INDEX byt ON s",
            "CREATE VIEW v AS SELECT * FROM s",
            "DROP VIEW v",
            "RENAME TABLE s TO s2",
            "ALTER TABLE s2 RENAME TO s",
            "CREATE TABLE s3 LIKE s",
            "TRUNCATE TABLE s3",
            "DROP TABLE IF EXISTS s3, nosuch",
            "CREATE USER u1@localhost IDENTIFIED BY 'S3cret-pass'",
            "GRANT SELECT ON shop.* TO u1@localhost",
            "CREATE PROCEDURE p() BEGIN INSERT INTO s (t) VALUES ('p'); UPDATE s SET k = 1; END",
            "CALL p()",
            "CREATE EVENT e ON SCHEDULE EVERY 1 DAY DO DELETE FROM s",
            "CREATE TRIGGER g BEFORE INSERT ON s FOR EACH ROW SET NEW.t = UPPER(NEW.t)",
            "CREATE DATABASE other",
            "DROP DATABASE other",
            "SET SESSION binlog_format = 'STATEMENT'",
            "INSERT INTO s (t) VALUES ('statement')",
            "CREATE TEMPORARY TABLE tmp (i INT)",
            "INSERT INTO tmp VALUES (1)",
            "BEGIN",
            "INSERT INTO s (k) SELECT i FROM tmp",
            "SAVEPOINT one",
            "SET @v = 'variable'",
            "UPDATE s SET r = RAND(), t = @v WHERE id = 1",
            "ROLLBACK TO one",
            "DELETE FROM s WHERE id = 2",
            "COMMIT",
            "DROP TEMPORARY TABLE tmp",
            "SET SESSION binlog_format = 'ROW'",
            "CREATE TABLE m (i INT PRIMARY KEY) ENGINE = MyISAM",
            "INSERT INTO m VALUES (1), (2)",
            "BEGIN",
            "INSERT INTO m VALUES (3)",
            "INSERT INTO s (t) VALUES ('gone')",
            "ROLLBACK",
        )
        if self.mariadb:
            loaded = self.server.base / "load.txt"
            loaded.write_text("a\nb\n")
            loaded.chmod(0o644)
            self.run(
                "SET SESSION binlog_format = 'STATEMENT'",
                f"LOAD DATA INFILE '{loaded}' INTO TABLE s (t)",
                "SET SESSION binlog_format = 'ROW'",
                "SET SESSION binlog_alter_two_phase = 1",
                "ALTER TABLE s ADD COLUMN two INT",
                "SET SESSION binlog_alter_two_phase = 0",
            )

    def two_phases(self) -> None:
        for name, end in (("one", "COMMIT 'one'"), ("two", "ROLLBACK 'two'")):
            self.run(
                f"XA START '{name}'",
                f"INSERT INTO s (t) VALUES ('{name}')",
                f"XA END '{name}'",
                f"XA PREPARE '{name}'",
                f"XA {end}",
            )
        self.run(
            "XA START 'three', 'branch', 7",
            "UPDATE s SET k = 3",
            "XA END 'three', 'branch', 7",
            "XA COMMIT 'three', 'branch', 7 ONE PHASE",
        )

    def conflicts(self) -> None:
        self.run(
            "CREATE TABLE c (id INT PRIMARY KEY, v VARCHAR(20))",
            "CREATE TABLE d (id INT PRIMARY KEY, v INT)",
            "INSERT INTO c VALUES (1, 'a'), (2, 'b'), (3, 'c')",
            "INSERT INTO d VALUES (1, 1), (2, 2)",
            "UPDATE c SET v = 'bad' WHERE id = 1",
            "UPDATE c SET v = 'fine' WHERE id = 2",
            "DELETE FROM d WHERE id = 2",
            "INSERT INTO d VALUES (2, 2)",
            "UPDATE c SET v = 'built' WHERE id = 1",
            "ALTER TABLE d ADD COLUMN w INT",
            "INSERT INTO d VALUES (5, 5, 5)",
            "SET SESSION binlog_row_image = 'MINIMAL'",
            "UPDATE c SET v = 'minimal' WHERE id = 3",
            "SET SESSION binlog_row_image = 'FULL'",
            "CREATE USER nobody@localhost",
        )

    def compressed(self) -> None:
        self.run(
            "SET GLOBAL log_bin_compress = 1", "SET GLOBAL log_bin_compress_min_len = 10"
        ) if self.mariadb else self.run("SET SESSION binlog_transaction_compression = ON")
        self.run(
            f"INSERT INTO copied SELECT id + 1000, REPEAT('z', 10) FROM `{QUOTED}`",
            "BEGIN",
            "UPDATE copied SET s = 'compressed'",
            "UPDATE everything SET ab = REPEAT('q', 100000) WHERE id = 1",
            "SAVEPOINT x",
            "DELETE FROM copied WHERE id > 1100",
            "COMMIT",
            "ALTER TABLE copied ADD COLUMN z INT",
            "SET SESSION binlog_format = 'STATEMENT'",
            "UPDATE copied SET z = 5",
            "SET SESSION binlog_format = 'ROW'",
        )
        self._large()
        self.run("SET GLOBAL log_bin_compress = 0") if self.mariadb else self.run(
            "SET SESSION binlog_transaction_compression = OFF"
        )

    def large(self) -> None:
        self._large()

    def _large(self) -> None:
        noise = random.Random(7).randbytes(1024 * 1024).hex()
        self.run(
            "CREATE TABLE IF NOT EXISTS l (id INT AUTO_INCREMENT PRIMARY KEY, b LONGBLOB, c LONGTEXT)",
            f"INSERT INTO l (b, c) VALUES (UNHEX('{noise}'), 'x'), ('', NULL)",
            "INSERT INTO l (b) VALUES (REPEAT('a', 2500000))",
            "UPDATE l SET c = 'y'",
            "SET SESSION binlog_format = 'STATEMENT'",
            f"UPDATE l SET c = '{noise}' WHERE id = 1",
            "SET SESSION binlog_format = 'ROW'",
            "DELETE FROM l",
        )

    def without_checksums(self) -> None:
        self.run("SET GLOBAL binlog_checksum = NONE")
        self.name = self.server.query("SHOW BINARY LOGS")[-1][0]
        self.run(
            "INSERT INTO copied (id, s) VALUES (5000, 'plain'), (5001, NULL)",
            "CREATE TABLE plain (i INT)",
            "INSERT INTO everything (id) VALUES (100)",
            "BEGIN",
            "UPDATE copied SET s = 'none'",
            "DELETE FROM copied WHERE id < 100",
            "COMMIT",
            "DROP TABLE plain",
        )

    def other_gtids(self) -> None:
        self.run("SET GLOBAL binlog_checksum = CRC32")
        self.name = self.server.query("SHOW BINARY LOGS")[-1][0]
        if self.mariadb:
            self.run(
                "SET SESSION gtid_domain_id = 5",
                "INSERT INTO m VALUES (11)",
                "INSERT INTO m VALUES (12)",
                "SET SESSION server_id = 77",
                "INSERT INTO m VALUES (13)",
                "SET SESSION gtid_domain_id = 0",
                "INSERT INTO m VALUES (14)",
                f"SET SESSION server_id = {self.server.server_id}",
                "INSERT INTO m VALUES (15)",
            )
            return
        self.run(
            "SET gtid_next = 'AUTOMATIC:a_tag'",
            "INSERT INTO m VALUES (11)",
            "INSERT INTO m VALUES (12)",
            "SET gtid_next = 'AAAAAAAA-BBBB-CCCC-DDDD-EEEEEEEEEEEE:7'",
            "BEGIN",
            "COMMIT",
            "SET gtid_next = 'AAAAAAAA-BBBB-CCCC-DDDD-EEEEEEEEEEEE:5'",
            "INSERT INTO m VALUES (13)",
            "SET gtid_next = 'AAAAAAAA-BBBB-CCCC-DDDD-EEEEEEEEEEEE:6'",
            "INSERT INTO m VALUES (14)",
            "SET gtid_next = 'AUTOMATIC'",
            "SET GLOBAL gtid_mode = ON_PERMISSIVE",
            "SET GLOBAL gtid_mode = OFF_PERMISSIVE",
            "SET GLOBAL gtid_mode = OFF",
        )
        self.ended("tagged")
        self.run(
            "INSERT INTO m VALUES (21)",
            "BEGIN",
            "INSERT INTO copied (id) VALUES (6000), (6001)",
            "COMMIT",
            "CREATE TABLE without_gtid (i INT)",
        )

    def growing(self) -> None:
        dice = random.Random(11)
        for number in range(60):
            self.run(
                dice.choice(
                    (
                        f"INSERT INTO m VALUES ({1000 + number})",
                        f"UPDATE m SET i = i + {5000 + number}",
                        f"CREATE TABLE g{number} (i INT)",
                        "ANALYZE TABLE m",
                        "DELETE FROM m LIMIT 2",
                    )
                )
            )
        self.keep("growing", "growing", gtids=self.executed())


def _printed(lines: list[str]) -> Iterator[Printed]:
    at = start = end = micros = 0
    gtid: str | None = None
    rows: dict[tuple[str, str], int] = {}
    for line in lines:
        if match := re.fullmatch(r"# at (\d+)", line):
            at = int(match[1])
        elif match := _HEADER.match(line):
            if match[2] in {"GTID", "Anonymous_GTID", "Rotate", "Stop"}:
                if gtid is not None:
                    yield Printed(gtid, start, end, rows, micros)
                told = re.search(r"immediate_commit_timestamp=(\d+)", line)
                gtid = {"GTID": match[3] if "-" in match[3] else "", "Anonymous_GTID": ""}.get(match[2])
                start, rows, micros = at, {}, int(told[1]) if told else 0
            if match[2] != "Binlog":  # a checkpoint, which belongs to nothing
                end = int(match[1])
        elif match := re.match(r"SET @@SESSION.GTID_NEXT= '(.*-.*)'", line):
            gtid = match[1]
        elif match := re.match(r"### (INSERT INTO|UPDATE|DELETE FROM) `(.*)`\.`(.*)`$", line):
            key = match[1].partition(" ")[0].lower(), f"{match[2]}.{match[3].replace('``', '`')}"
            rows[key] = rows.get(key, 0) + 1
    if gtid is not None:
        yield Printed(gtid, start, end, rows, micros)


def framed(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(type, from, to) of every event of a log, by the headers alone."""
    at = 4
    while at < len(data):
        length = int.from_bytes(data[at + 9 : at + 13], "little")
        yield data[at + 4], at, at + length
        at += length


def edited(event: bytes, at: int, change: Callable[[bytearray], None] | None = None, *, checksum: bool = True) -> bytes:
    """An event moved to byte ``at`` of a file, with its place and checksum right again."""
    new = bytearray(event)
    if change is not None:
        change(new)
    struct.pack_into("<I", new, 9, len(new))
    struct.pack_into("<I", new, 13, (at + len(new)) & 0xFFFFFFFF)
    if checksum:
        struct.pack_into("<I", new, len(new) - 4, zlib.crc32(new[:-4]))
    return bytes(new)
