"""The rows of a fleet, written in bulk into a catalog as its tables are declared now, on SQLite or PostgreSQL; and what
of it lies at destinations. A column that the fleet does not name gets what its table gives it, or the empty value of
its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any

from sqlalchemy import JSON, Boolean, Column, Integer, Numeric, Table
from sqlalchemy.engine import Dialect

from backupd.catalog.database import Database
from backupd.catalog.row_mapping import UtcTime
from backupd.catalog.session import open_catalog
from backupd.catalog.tables.backups import counted_stock, write_stock
from backupd.catalog.tables.changes import changed
from backupd.model.manifest import StoredObject, encode_header
from backupd.transfer.deletion import mark
from storage import layout
from storage.destination import Destination
from tests.support.catalog.fleet import CHAIN, HOUR, Fleet, Row, name_of
from tests.support.stores.stock import Stock, put

_SHA = "5f" * 32
_TOOK = timedelta(minutes=4)


def lay(fleet: Fleet, destination: Destination) -> None:
    """Put at ``destination`` the manifests of the server that is asked, and those of what is marked deleted, with the
    marks: whatever asks a place about them agrees with the catalog."""
    content = StoredObject(layout.object_name(_SHA, _SHA), 1, _SHA)
    put(destination, layout.object_key(content.name), b"x")
    for server in fleet.numbers:
        name = name_of(server)
        header = Stock(destination, name).header(1, (content,))
        for number in (one for one in range(fleet.backups) if fleet.is_laid(server, one)):
            backup, full = fleet.backup_id(server, number), number % CHAIN == 0
            finished = fleet.finished(server, number)
            mine = replace(
                header,
                backup_id=backup,
                kind="physical-full" if full else "physical-incremental",
                parent=None if full else fleet.backup_id(server, number - 1),
                started_at=finished - _TOOK,
                finished_at=finished,
            )
            for key in (layout.body_key, layout.unpack_key, layout.runbook_key):
                put(destination, key(name, backup), key.__name__.removesuffix("_key").encode())
            put(destination, layout.manifest_key(name, backup), encode_header(mine))
            if fleet.is_marked(server, number):
                mark(destination, name, backup, fleet.now - HOUR)


def fill(url: str, fleet: Fleet) -> dict[str, int]:
    """Make the catalog at ``url`` where there is none, and write the rows of ``fleet`` into it; gives how many of each
    table. Nobody else may be at it. A file that is not whole when this fails is of no use."""
    open_catalog(url).close()
    database = Database(url)
    try:
        write = _into_sqlite if database.sqlite else _into_postgresql
        found = write(database, fleet)
        with database.write() as connection:
            for name in fleet.names:
                changed(connection, name)
                write_stock(connection, name, counted_stock(connection, name))
        return found
    finally:
        database.close()


def _into_sqlite(database: Database, fleet: Fleet) -> dict[str, int]:
    found = {}
    with closing(database.engine.raw_connection()) as connection:
        cursor: Any = connection.cursor()
        for pragma in ("synchronous = OFF", "foreign_keys = OFF", "cache_size = -500000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.execute("BEGIN")
        for table, rows in fleet.rows():
            columns, first, rest = _begun(table, rows)
            if first is not None:
                marks = ", ".join("?" * len(columns))
                into = _named(database.engine.dialect, table, columns)
                values = _values(database.engine.dialect, columns, chain([first], rest))
                cursor.executemany(f"INSERT INTO {into} VALUES ({marks})", values)
                found[table.name] = cursor.rowcount
        cursor.execute("COMMIT")
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return found


def _into_postgresql(database: Database, fleet: Fleet) -> dict[str, int]:
    found = {}
    with closing(database.engine.raw_connection()) as connection:
        driver: Any = connection.driver_connection
        driver.hurried = False
        cursor = driver.cursor()
        cursor.execute("SET session_replication_role = replica")  # no look at a foreign key for each row
        for table, rows in fleet.rows():
            columns, first, rest = _begun(table, rows)
            if first is not None:
                into = _named(database.engine.dialect, table, columns)
                with cursor.copy(f"COPY {into} FROM STDIN") as copy:
                    for values in _values(database.engine.dialect, columns, chain([first], rest)):
                        copy.write_row(values)
                found[table.name] = cursor.rowcount
                _go_on_counting(cursor, table, columns)
        driver.commit()
        driver.autocommit = True
        cursor.execute("VACUUM ANALYZE")  # as autovacuum does in its time
    return found


def _go_on_counting(cursor: Any, table: Table, columns: Sequence[Column[Any]]) -> None:
    """The next row gets the number behind those that were given here."""
    own = table.autoincrement_column
    if own is not None and own in columns:
        cursor.execute(
            f"SELECT setval(pg_get_serial_sequence('{table.name}', '{own.name}'), max({own.name})) FROM {table.name}"
        )


def _begun(table: Table, rows: Iterator[Row]) -> tuple[list[Column[Any]], Row | None, Iterator[Row]]:
    """The columns to write, by the first row."""
    first = next(rows, None)
    named = first or {}
    if unknown := named.keys() - set(table.c.keys()):
        raise LookupError(f"{table.name} has no {', '.join(sorted(unknown))}")
    own = table.autoincrement_column
    columns = [
        column
        for column in table.columns
        if column.name in named or not (column.nullable or column.server_default is not None or column is own)
    ]
    return columns, first, rows


def _values(dialect: Dialect, columns: Sequence[Column[Any]], rows: Iterable[Row]) -> Iterator[list[Any]]:
    """As the driver takes them, by the types of the columns."""
    processors = [column.type.dialect_impl(dialect).bind_processor(dialect) for column in columns]
    empty = {column.name: _empty(column) for column in columns}
    named = [(column.name, processor) for column, processor in zip(columns, processors, strict=True)]
    for row in rows:
        whole = empty | row
        yield [value if processor is None else processor(value) for name, processor in named for value in [whole[name]]]


def _empty(column: Column[Any]) -> Any:
    """None where nothing is empty: a row has to say it."""
    kinds: tuple[tuple[type[Any], Any], ...] = (
        (JSON, []),
        (Boolean, False),
        (Numeric, 0),
        (Integer, 0),
        (UtcTime, None),
    )
    return next((value for kind, value in kinds if isinstance(column.type, kind)), "")


def _named(dialect: Dialect, table: Table, columns: Sequence[Column[Any]]) -> str:
    """``table (columns)``, quoted where that is needed."""
    quoted = dialect.identifier_preparer
    return f"{quoted.format_table(table)} ({', '.join(quoted.format_column(column) for column in columns)})"
