"""A small shop whose tables hold each other by foreign keys and triggers, and restored tables that wait to be handed
over."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pymysql

from backupd.engine.server import definitions as ddl
from backupd.engine.server.definition_text import without_foreign_keys
from backupd.engine.server.definitions import TableDefinition
from backupd.engine.sql.client import Connection, Session
from backupd.model.job import Progress
from backupd.model.table import TableName, quote_name
from backupd.process.run_context import RunContext
from restore.cutover.cutover import cut_over
from restore.cutover.plan import CutOverResult, Goal, Patience
from tests.support.restores.rolling import Kind
from tests.support.servers.server import Server

STAGING = "backupd_restore_7_0"
ASIDE = "__before_7"
IMPATIENT = Patience(seconds=1, attempts=30, pause=0.05)
ORDERS = TableName("shop", "orders")
CUSTOMERS = TableName("shop", "customers")
LINES = TableName("shop", "lines")
NOTES = TableName("shop", "notes")

_SHOP = (
    "CREATE TABLE shop.customers (id INT PRIMARY KEY, name VARCHAR(20))",
    """CREATE TABLE shop.orders (id INT AUTO_INCREMENT PRIMARY KEY, customer INT, parent INT, total INT NOT NULL,
       twice INT AS (total * 2), KEY (customer), KEY (parent), CONSTRAINT positive CHECK (total > 0),
       CHECK (total < 10000), CONSTRAINT of_customer FOREIGN KEY (customer) REFERENCES customers (id) ON DELETE CASCADE,
       FOREIGN KEY (parent) REFERENCES orders (id))""",
    """CREATE TABLE shop.`lines` (id INT AUTO_INCREMENT PRIMARY KEY, o INT, KEY (o), CONSTRAINT of_order FOREIGN KEY (o)
       REFERENCES orders (id) ON DELETE CASCADE ON UPDATE CASCADE)""",
    "CREATE TABLE shop.notes (id INT AUTO_INCREMENT PRIMARY KEY, o INT, t VARCHAR(20))",
    "CREATE TABLE shop.audit (id INT AUTO_INCREMENT PRIMARY KEY, o INT, total INT)",
    """CREATE TRIGGER shop.audited AFTER INSERT ON shop.orders FOR EACH ROW
       INSERT INTO shop.audit (o, total) VALUES (NEW.id, NEW.total)""",
    "CREATE TRIGGER shop.`r``ounded` BEFORE INSERT ON shop.orders FOR EACH ROW SET NEW.total = NEW.total + 1",
    "INSERT INTO shop.customers VALUES (1, 'a'), (2, 'b'), (3, 'c')",
    "INSERT INTO shop.orders (id, customer, parent, total) VALUES (1, 1, NULL, 10), (2, 2, 1, 20), (3, 3, 1, 30)",
    "INSERT INTO shop.`lines` VALUES (1, 1), (2, 2), (3, 3)",
)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def connection_of(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user="root")


@dataclass
class Shop:
    """``definitions``: of the tables as they were in the backup. All schemas of earlier tests are gone."""

    kind: Kind
    server: Server

    def __post_init__(self) -> None:
        rows = self.server.query(
            "SELECT SCHEMA_NAME FROM information_schema.SCHEMATA WHERE SCHEMA_NAME NOT IN "
            "('mysql', 'information_schema', 'performance_schema', 'sys')"
        )
        self.server.execute(
            "SET foreign_key_checks = 0, sql_mode = 'STRICT_ALL_TABLES'",
            *(f"DROP DATABASE {quote_name(name)}" for (name,) in rows),
            "CREATE DATABASE shop",
            f"CREATE DATABASE {STAGING}",
            *_SHOP,
        )
        self.definitions = self.define([ORDERS, CUSTOMERS, LINES])

    @property
    def connection(self) -> Connection:
        return connection_of(self.server)

    def define(self, names: Iterable[TableName]) -> dict[TableName, TableDefinition]:
        with self.connection.connect() as session:
            found = ddl.read_tables(session, names)
        assert not found.failed
        return dict(found.tables)

    def stage(self, name: TableName, *, rows: str = "", number: int = 0) -> TableName:
        """A restored table as the loader makes it; ``rows``: what follows INSERT INTO it, else what is live."""
        staged = TableName(STAGING.replace("_0", f"_{number}"), name.table)
        columns = ", ".join(quote_name(column) for column in self.definitions[name].columns.written)
        create = without_foreign_keys(name, self.definitions[name].create)
        with self.connection.connect() as session:
            session.execute("SET SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO'")
            session.execute(f"CREATE DATABASE IF NOT EXISTS {staged.schema}")
            session.execute(f"USE {staged.schema}")
            session.execute(create)
            session.execute(f"INSERT INTO {staged} {rows or f'({columns}) SELECT {columns} FROM {name}'}")
        return staged

    def goal(self, name: TableName, target: TableName | None = None, *, rows: str = "") -> Goal:
        return Goal(self.stage(name, rows=rows), target or name, self.definitions[name])

    def hand(self, *goals: Goal, connection: Connection | None = None, **options: Any) -> CutOverResult:
        given = {"context": RunContext(), "replace": True, "aside": ASIDE, "patience": IMPATIENT, **options}
        return cut_over(connection or self.connection, goals, **given)

    def created(self, name: TableName) -> str:
        return str(self.server.query(f"SHOW CREATE TABLE {name}")[0][1])

    def keys(self, name: TableName) -> dict[str, TableName]:
        """The parent of each foreign key."""
        return {key.name: key.parent for key in self.define([name])[name].foreign_keys}

    def triggers(self, name: TableName) -> list[str]:
        return sorted(
            row[0]
            for row in self.server.query(
                "SELECT TRIGGER_NAME FROM information_schema.TRIGGERS WHERE EVENT_OBJECT_SCHEMA = %s "
                "AND EVENT_OBJECT_TABLE = %s",
                (name.schema, name.table),
            )
        )

    def tables(self) -> list[TableName]:
        return sorted(
            TableName(*row)
            for row in self.server.query(
                "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA NOT IN "
                "('mysql', 'information_schema', 'performance_schema', 'sys') AND TABLE_NAME NOT LIKE 'backupd%%'"
            )
        )

    def picture(self) -> dict[str, Any]:
        """Everything that a hand-over may change: definitions, triggers, rows."""
        with self.connection.connect() as session:
            found = ddl.read_tables(session, self.tables())
        return {
            str(name): (one.create, one.triggers, self.server.query(f"SELECT * FROM {name}"))
            for name, one in sorted(found.tables.items())
        }


@functools.cache
def shared(kind: Kind) -> Server:
    """One server of each flavour for all tests of hand-overs and differences in this process."""
    server = kind.make().start()
    atexit.register(server.remove)
    return server


class _Counted(Session):
    """Dies with the whole process instead of sending a statement too many."""

    sent = 0
    limit: int | None = None

    def _run(self, cursor_class: type[Any], sql: str, args: Sequence[Any]) -> Sequence[Any]:
        if _Counted.sent == _Counted.limit:
            os.kill(os.getpid(), signal.SIGKILL)
        _Counted.sent += 1
        return super()._run(cursor_class, sql, args)


class CountingConnection(Connection):
    """Counts the statements of all its sessions."""

    __slots__ = ()

    def connect(self) -> Session:
        return _Counted(self)


def counted() -> int:
    """Statements that were counted since the last time."""
    found, _Counted.sent = _Counted.sent, 0
    return found


def killed_at(
    connection: Connection, goals: Sequence[Goal], statements: int | None = None, *, note: str = "rename"
) -> bool:
    """Hand over in a process that is killed before it sends one more than ``statements`` (None: when it tells a
    step that begins with ``note``, by default right before the RENAME); False: it had ended."""
    mortal = CountingConnection(socket=connection.socket, user=connection.user)

    def run() -> None:
        _Counted.sent, _Counted.limit = 0, statements
        cut_over(mortal, goals, RunContext(report=die), replace=True, aside=ASIDE, patience=IMPATIENT)

    def die(progress: Progress) -> None:
        if statements is None and progress.note.lower().startswith(note) and not progress.note.startswith("rename: "):
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(300)
    code = process.exitcode
    process.close()
    assert code in (0, -signal.SIGKILL)
    return code != 0


class Writing:
    """Clients that write orders, lines of order 1, and notes, one row at a time, and remember what was acknowledged."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._over = threading.Event()
        self.orders: set[int] = set()
        self.lines: set[int] = set()
        self.notes: set[int] = set()
        self._errors: list[pymysql.err.Error] = []
        self._threads = [
            threading.Thread(target=self._write, args=pair)
            for pair in (
                ("INSERT INTO shop.orders (customer, total) VALUES (1, 5)", self.orders),
                ("INSERT INTO shop.orders (customer, total) VALUES (2, 5)", self.orders),
                ("INSERT INTO shop.`lines` (o) VALUES (1)", self.lines),
                ("INSERT INTO shop.notes (o) VALUES (1)", self.notes),
            )
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        assert self._errors == []

    def wait_for_more(self, rows: int = 20) -> None:
        goals = [len(one) + rows for one in (self.orders, self.lines, self.notes)]
        deadline = time.monotonic() + 300
        while any(len(one) < goal for one, goal in zip((self.orders, self.lines, self.notes), goals, strict=True)):
            assert time.monotonic() < deadline
            assert self._errors == []
            time.sleep(0.005)

    def _write(self, statement: str, acknowledged: set[int]) -> None:
        connection = self._shop.server.connect()
        try:
            with connection.cursor() as cursor:
                while not self._over.is_set():
                    cursor.execute(statement)
                    acknowledged.add(cursor.lastrowid)
        except pymysql.err.Error as error:
            self._errors.append(error)
        finally:
            connection.close()
