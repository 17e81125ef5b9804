"""A catalog as one file: every row of one moment in an SQLite file, whatever database the catalog is in.

And back: the history in such a file that no destination has (jobs, events, schedules ...) taken into a catalog.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Connection, Select, Table, insert, select, tuple_

from backupd.catalog.alerts import events
from backupd.catalog.database import Database
from backupd.catalog.destinations import binlog_lags
from backupd.catalog.hosts import hosts
from backupd.catalog.people import audit, challenges, holds
from backupd.catalog.proofs import consistency_checks, proofs, witnesses
from backupd.catalog.restores import restores
from backupd.catalog.standings import server_standings
from backupd.catalog.tables.backups import identities
from backupd.catalog.tables.changes import changed
from backupd.catalog.tables.jobs import jobs, schedules
from backupd.model.backup_record import HoldKind
from backupd.model.errors import CatalogError

_MADE_ANEW = (server_standings, hosts)
"""No history: a service writes them again."""
every_table = _MADE_ANEW[0].metadata
"""All tables of the catalog: this module imports every module that declares some."""

_BATCH = 250
_FINISHED = (jobs, restores)
"""Of these only what has ended: nobody is at the rest any more."""
_HISTORY = (
    jobs,
    restores,
    challenges,
    schedules,
    binlog_lags,
    proofs,
    witnesses,
    consistency_checks,
    holds,
    identities,
)
"""Tables whose rows are identified by their keys."""


def take_history(source: Database, target: Database) -> int:
    """Rows of ``source`` that ``target`` lacks and that only a catalog knows; how many they were. Both have the form
    that this program knows. What was running in ``source`` is left out, and so are its holds, which destinations
    have."""
    count = 0
    for table in _HISTORY:
        with source.read() as there:
            for batch in _batches(there, select(table)):
                wanted = [row for row in batch if _counts(table, row)]
                with target.write() as here:
                    count += _insert_missing(here, table, wanted)
    return count + _take_events(source, target) + _take_audit(source, target)


def _counts(table: Table, row: dict[str, Any]) -> bool:
    if table is holds:
        return bool(row["kind"] == str(HoldKind.PAUSE))
    return table not in _FINISHED or row["finished_at"] is not None


def _insert_missing(here: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> int:
    keys = tuple(table.primary_key.columns)
    asked = [tuple(row[key.name] for key in keys) for row in rows]
    found = {tuple(row) for row in here.execute(select(*keys).where(tuple_(*keys).in_(asked)))} if rows else set()
    new = [row for row in rows if tuple(row[key.name] for key in keys) not in found]
    if new:
        here.execute(insert(table), new)
    if table is identities:
        for server in sorted({row["server"] for row in new}):
            changed(here, server)
    return len(new)


def _take_events(source: Database, target: Database) -> int:
    """Events have numbers that mean nothing elsewhere: they are the same when moment, kind and subject are."""
    count = 0
    same = (events.c.at, events.c.kind, events.c.subject)
    with source.read() as there:
        for batch in _batches(there, select(events).order_by(events.c.number)):
            with target.write() as here:
                known = {
                    tuple(row)
                    for row in here.execute(select(*same).where(events.c.at.in_([row["at"] for row in batch])))
                }
                new = [
                    {name: value for name, value in row.items() if name != events.c.number.name}
                    for row in batch
                    if (row["at"], row["kind"], row["subject"]) not in known
                ]
                if new:
                    here.execute(insert(events), new)
                count += len(new)
    return count


def _take_audit(source: Database, target: Database) -> int:
    """The audit goes over as it was written, where none was begun yet: in between, its entries would not follow from
    each other."""
    count = 0
    with source.read() as there, target.write() as here:
        if here.execute(select(audit.c.number).limit(1)).first() is not None:
            return 0
        for batch in _batches(there, select(audit).order_by(audit.c.number)):
            here.execute(insert(audit), batch)
            count += len(batch)
    return count


def copy_file(database: Database, target: Path) -> None:
    with database.read() as connection, closing(sqlite3.connect(target)) as copy:
        ours = cast("sqlite3.Connection", connection.connection.driver_connection)
        try:
            ours.backup(copy)
            _make_one_file(copy)
        except sqlite3.Error as error:
            raise CatalogError(
                f"the catalog {database.name} cannot be copied to {target}", detail=str(error)
            ) from error


def _make_one_file(copy: sqlite3.Connection) -> None:
    copy.execute("PRAGMA journal_mode = DELETE")  # else some of it is in a second file


def copy_rows(database: Database, target: Path) -> None:
    from backupd.catalog.migrations import bring_up_to_date  # slow to import, and hardly ever needed

    copy = Database(f"sqlite:///{target}")
    try:
        bring_up_to_date(copy, every_table.tables)
        # Repeatable read: all tables as they are at one moment, while others go on writing.
        with (
            database.errors(),
            database.engine.connect().execution_options(isolation_level="REPEATABLE READ") as there,
            there.begin(),
            copy.write() as here,
        ):
            for table in every_table.sorted_tables:
                for batch in _batches(there, select(table)):
                    here.execute(insert(table), batch)
    finally:
        copy.close()
    with closing(sqlite3.connect(target)) as file:
        _make_one_file(file)


def _batches(connection: Connection, query: Select[Any]) -> Iterator[list[dict[str, Any]]]:
    rows = iter(connection.execution_options(yield_per=_BATCH).execute(query).mappings())
    while batch := [dict(row) for row in islice(rows, _BATCH)]:
        yield batch
