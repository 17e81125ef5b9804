"""What is right at a place between two transactions: a real replica of the source that was stopped there."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pymysql.cursors import DictCursor

from backupd.model.server_facts import Version
from tests.support.sample import checksum_everything
from tests.support.servers.datadir import Options
from tests.support.servers.server import Server
from tests.support.servers.stacks import MARIADB, MYSQL_CLONE, MYSQL_XTRABACKUP, Stack, stacks, whole

_BEGINS = frozenset({"Gtid", "Anonymous_Gtid", "Gtid_tagged_log"})
_GTID = re.compile(r"\d+-\d+-\d+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}:\d+")


@dataclass(frozen=True)
class Kind:
    """A flavour and how it names transactions. ``options``: of every server of it."""

    name: str
    stack: Stack
    options: Options
    gtids: bool = True

    def __str__(self) -> str:
        return self.name

    def programs(self) -> dict[str, str]:
        """What the configuration must name, those that copy and replay binary logs included."""
        return self.stack.all_programs()

    @property
    def mariadb(self) -> bool:
        return self.stack is MARIADB


WITH_MARIADB = Kind("mariadb", MARIADB, {})
WITH_MYSQL = Kind("mysql", MYSQL_CLONE, {})
WITH_XTRABACKUP = Kind("mysql-xtrabackup", MYSQL_XTRABACKUP, {})
NO_GTIDS: Options = {"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF"}
WITHOUT_GTIDS = Kind("mysql-without-gtids", MYSQL_CLONE, NO_GTIDS, gtids=False)
XTRABACKUP_WITHOUT_GTIDS = Kind("mysql-xtrabackup-without-gtids", MYSQL_XTRABACKUP, NO_GTIDS, gtids=False)
"""As MySQL 5.7 is by default."""


def params(kind: Kind, *, soak: bool = False) -> list[Any]:
    """A test's parameter (none or one)."""
    return [
        pytest.param(kind, id=str(kind), marks=one.marks)
        for one in stacks(*whole(kind.stack), soak=(kind.stack,) if soak else ())
    ]


@dataclass(frozen=True)
class Mark:
    """Where a transaction begins. ``gtid``: "" without."""

    file: str
    pos: int
    gtid: str

    @property
    def target(self) -> str:
        """What stops right before it."""
        return f"before-gtid:{self.gtid}" if self.gtid else f"{self.file}:{self.pos}"


def find(server: Server, text: str, *, since: str = "") -> Mark:
    """The last transaction of which an event says ``text``, by the source's own list of events. ``since``: the name of
    the first file to look at."""
    found: Mark | None = None
    mark = Mark("", 0, "")
    for name, *_rest in server.query("SHOW BINARY LOGS"):
        if str(name) < since:
            continue
        for _name, pos, kind, _id, _end, info in server.query(f"SHOW BINLOG EVENTS IN '{name}'"):
            if kind in _BEGINS:
                gtid = _GTID.search(str(info))
                mark = Mark(str(name), int(pos), gtid[0] if gtid else "")
            elif text in str(info):
                found = mark
    assert found is not None, text
    return found


class Oracle:
    """A replica that can be moved on, never back."""

    def __init__(self, kind: Kind, source: Server, replica: Server) -> None:
        self.kind, self.replica, self.words = kind, replica, source.words
        host = f"HOST='127.0.0.1', {{0}}PORT={source.port}, {{0}}USER='repl', {{0}}PASSWORD='Repl-s3cret-77'"
        if kind.mariadb:
            replica.execute(f"CHANGE MASTER TO MASTER_{host.format('MASTER_')}, MASTER_USE_GTID=slave_pos")
            return
        first = source.query("SHOW BINARY LOGS")[0][0]
        name = f"{self.words.source}_"
        where = f"{name}AUTO_POSITION=1" if kind.gtids else f"{name}LOG_FILE='{first}', {name}LOG_POS=4"
        with_key = f"GET_{name}PUBLIC_KEY=1, " if kind.stack.version() >= Version(8, 0) else ""
        replica.execute(f"{self.words.change} {name}{host.format(name)}, {name}SSL=0, {with_key}{where}")

    def before(self, mark: Mark) -> dict[str, int]:
        """Checksums of every table right before a transaction."""
        if self.kind.mariadb:
            domain, server, sequence = mark.gtid.split("-")
            return self._at(f"START SLAVE UNTIL master_gtid_pos='{domain}-{server}-{int(sequence) - 1}'")
        if mark.gtid:
            return self._at(f"START {self.words.replica} UNTIL SQL_BEFORE_GTIDS='{mark.gtid}'")
        name = self.words.source
        return self._at(f"START {self.words.replica} UNTIL {name}_LOG_FILE='{mark.file}', {name}_LOG_POS={mark.pos}")

    def after(self, gtid: str) -> dict[str, int]:
        """Checksums of every table when everything up to a state is applied, and nothing later."""
        if self.kind.mariadb:
            found = self._at(f"START SLAVE UNTIL master_gtid_pos='{gtid}'")
            assert self.replica.scalar("SELECT @@gtid_slave_pos") == gtid
            return found
        return self._at(f"START {self.words.replica} UNTIL SQL_AFTER_GTIDS='{gtid}'")

    def _at(self, start: str) -> dict[str, int]:
        self.replica.execute(start)
        deadline = time.monotonic() + 300
        while self._is_running():
            assert time.monotonic() < deadline, self.replica.log_text()[-2000:]
            time.sleep(0.02)
        self.replica.execute(f"STOP {self.words.replica}")
        with self.replica.connect() as connection:
            return checksum_everything(connection)

    def _is_running(self) -> bool:
        with self.replica.connect() as connection, connection.cursor(DictCursor) as cursor:
            cursor.execute(f"SHOW {self.words.replica} STATUS")
            (row,) = cursor.fetchall()
        assert not int(row["Last_SQL_Errno"]), row["Last_SQL_Error"]
        assert not int(row["Last_IO_Errno"]), row["Last_IO_Error"]
        return bool(row[f"{self.words.replica.capitalize()}_SQL_Running"] != "No")


@contextlib.contextmanager
def oracle(kind: Kind, source: Server) -> Iterator[Oracle]:
    """A replica that has nothing yet. The source needs ``tcp=True`` and all of its binary logs."""
    source.execute(
        "CREATE USER repl@'127.0.0.1' IDENTIFIED BY 'Repl-s3cret-77'",
        "GRANT REPLICATION SLAVE ON *.* TO repl@'127.0.0.1'",
    )
    quick = {"sync_binlog": 0, "innodb_flush_log_at_trx_commit": 0}
    with kind.stack.make(options={"read_only": 1, **quick, **kind.options}) as replica:
        yield Oracle(kind, source, replica)
