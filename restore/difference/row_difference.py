"""What replacing a live table by a restored one would change, row by row, computed on the server that has both.

Both are read in one snapshot, without locks, and nothing but counts and a few keys leaves the server. Rows belong
together by a key that both have, and are equal when every column that both store is, to the byte. Where there is no
such key, whole rows are counted: one that occurs three times here and once there is missing twice. Definitions are
compared, too: the same rows in another table are not the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from backupd.engine.schema.definitions import Definitions, TableDefinition, read_tables
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import CancelledError, ServerError
from backupd.model.table import TableName, quote_name
from restore.cutover.table_inventory import Shelf
from restore.difference.column_comparison import Common, Shape, same_key, same_value
from restore.difference.definitions import definition_differs

SAMPLE = 20
"""Keys that are shown of rows that are missing, of added ones and of changed ones, unless somebody wants more."""
_LOOK_SECONDS = 0.2
_BOTH = """
SELECT COUNT(*), COALESCE(SUM({absent}), 0), COALESCE(SUM(NOT ({absent}) AND NOT ({same})), 0)
FROM {staged} s LEFT JOIN {live} l {live_index} ON {join}
"""
_ADDED = "SELECT COUNT(*), COALESCE(SUM({absent}), 0) FROM {live} l LEFT JOIN {staged} s {staged_index} ON {join}"
_SAMPLE = "SELECT {columns} FROM {one} LEFT JOIN {other} ON {join} WHERE {where} LIMIT {limit}"
_WHOLE = """
SELECT COALESCE(SUM(here), 0), COALESCE(SUM(there), 0),
       COALESCE(SUM(GREATEST(here - there, 0)), 0), COALESCE(SUM(GREATEST(there - here, 0)), 0)
FROM (SELECT SUM(origin) AS here, SUM(1 - origin) AS there
      FROM (SELECT 1 AS origin, {staged_row} AS content FROM {staged} s
            UNION ALL SELECT 0, {live_row} FROM {live} l) AS both_rows
      GROUP BY content) AS counted
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """A restored table, and the live one whose place it is to take. ``definition``: as the backup has it, with the
    foreign keys and triggers that the staged table has not yet; None: these are not compared. ``triggers``: are they?
    """

    staged: TableName
    live: TableName
    definition: TableDefinition | None = None
    triggers: bool = True


@dataclass(frozen=True, slots=True)
class Keys:
    """Samples of keys, by ``columns``; without a key all are empty."""

    columns: tuple[str, ...] = ()
    missing: tuple[tuple[Any, ...], ...] = ()
    added: tuple[tuple[Any, ...], ...] = ()
    changed: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class TableDifference:
    """Rows that are in the restored table only (``missing`` from the live one), in the live one only (``added`` since),
    in both with other values (``changed``; without a key these are missing and added). ``comparable`` False:
    ``why_not`` says why, and the numbers mean nothing. ``columns_differ``: in words; only what both store is compared.
    ``definition_differs``: likewise, all else of the definitions. ``remarks``: on how the rows were compared."""

    live: TableName
    staged_rows: int = 0
    live_rows: int = 0
    missing: int = 0
    added: int = 0
    changed: int = 0
    keys: Keys = Keys()
    comparable: bool = True
    why_not: str = ""
    columns_differ: tuple[str, ...] = ()
    definition_differs: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Are rows and definitions?"""
        return (
            self.comparable
            and not (self.missing or self.added or self.changed)
            and not (self.columns_differ or self.definition_differs)
        )


def difference(
    connection: Connection, pairs: Sequence[Pair], *, sample: int = SAMPLE, cancel: Event | None = None
) -> tuple[TableDifference, ...]:
    """One for each of ``pairs``, with at most ``sample`` keys of each sort. What cannot be compared does not keep the
    others from being compared.

    Raises CancelledError soon after ``cancel``; ServerError when the server went away.
    """
    with connection.connect() as session:
        _prepare(session)
        shelf = Shelf.look(session, {name.schema for pair in pairs for name in (pair.staged, pair.live)})
        defined = read_tables(session, {shelf.fold(name) for pair in pairs for name in (pair.staged, pair.live)})
        try:
            with _cancelling(session, cancel):
                session.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
                return tuple(
                    replace(
                        _tell(session, pair, shelf, sample, cancel),
                        definition_differs=tuple(_definitions(pair, shelf, defined)),
                    )
                    for pair in pairs
                )
        except ServerError as error:
            if cancel is not None and cancel.is_set():
                raise CancelledError("the comparison was cancelled") from error
            raise


def _definitions(pair: Pair, shelf: Shelf, defined: Definitions) -> Iterator[str]:
    if _is_view(shelf, pair.live):
        return
    staged, live = (defined.tables.get(shelf.fold(name)) for name in (pair.staged, pair.live))
    if staged is not None and live is not None:
        try:
            yield from definition_differs(staged, live, pair.definition, triggers=pair.triggers)
        except ValueError as error:
            yield f"the definitions could not be compared: {error}"
        return
    for name in (pair.staged, pair.live):
        why = defined.failed.get(shelf.fold(name))
        if why is not None and shelf.has(name):
            yield f"the definition of {name.shown} cannot be read: {why}"


def _is_view(shelf: Shelf, name: TableName) -> bool:
    return "VIEW" in shelf.kind(name).upper()


def _tell(session: Session, pair: Pair, shelf: Shelf, sample: int, cancel: Event | None) -> TableDifference:
    if _is_view(shelf, pair.live):
        return TableDifference(pair.live, comparable=False, why_not="a view has this name on the server, not a table")
    try:
        found = _compare(session, pair, sample)
    except ServerError as error:
        if cancel is not None and cancel.is_set():
            raise
        session.ping()
        return TableDifference(pair.live, comparable=False, why_not=error.detail)
    if any("VERSIONED" in shelf.kind(name).upper() for name in (pair.staged, pair.live)):
        return replace(found, remarks=(*found.remarks, "only present rows are compared, not their history"))
    return found


def _compare(session: Session, pair: Pair, sample: int) -> TableDifference:
    staged, live = Shape.read(session, pair.staged), Shape.read(session, pair.live)
    if staged is None or live is None:
        gone = pair.staged if staged is None else pair.live
        return TableDifference(pair.live, comparable=False, why_not=f"there is no table {gone.shown}")
    common = Common.of(staged, live)
    if not common.pairs:
        return TableDifference(
            pair.live,
            comparable=False,
            why_not="the two tables have no column in common",
            columns_differ=common.differ,
            remarks=common.remarks,
        )
    return _by_key(session, pair, common, sample) if common.key else _by_rows(session, pair, common)


def _by_key(session: Session, pair: Pair, common: Common, sample: int) -> TableDifference:
    staged_key = [f"s.{quote_name(field.name)}" for field, _ in common.key]
    live_key = [f"l.{quote_name(field.name)}" for _, field in common.key]
    same = " AND ".join(same_value(one, other) for one, other in common.pairs)
    # A key is never NULL, so a NULL there means that no row was found.
    no_live, no_staged = f"{live_key[0]} IS NULL", f"{staged_key[0]} IS NULL"
    # The statistics of a table that was loaded just now may say that it is empty.
    staged_index, live_index = (
        f"FORCE INDEX ({quote_name(name)})" for name in (common.staged_index, common.live_index)
    )
    from_staged, from_live = same_key(common.key, driving="s"), same_key(common.key, driving="l")
    rows, missing, changed = session.query(
        _BOTH.format(
            absent=no_live, same=same, staged=pair.staged, live=pair.live, live_index=live_index, join=from_staged
        )
    )[0]
    live_rows, added = session.query(
        _ADDED.format(absent=no_staged, staged=pair.staged, live=pair.live, staged_index=staged_index, join=from_live)
    )[0]

    def keys(count: int, columns: Sequence[str], where: str, *, driving: str) -> tuple[tuple[Any, ...], ...]:
        if not count or not sample:
            return ()
        one, other, join = f"{pair.staged} s", f"{pair.live} l {live_index}", from_staged
        if driving == "l":
            one, other, join = f"{pair.live} l", f"{pair.staged} s {staged_index}", from_live
        return tuple(
            session.query(
                _SAMPLE.format(columns=", ".join(columns), one=one, other=other, join=join, where=where, limit=sample)
            )
        )

    return TableDifference(
        pair.live,
        staged_rows=int(rows),
        live_rows=int(live_rows),
        missing=int(missing),
        added=int(added),
        changed=int(changed),
        columns_differ=common.differ,
        remarks=common.remarks,
        keys=Keys(
            columns=tuple(field.name for field, _ in common.key),
            missing=keys(int(missing), staged_key, no_live, driving="s"),
            added=keys(int(added), live_key, no_staged, driving="l"),
            changed=keys(int(changed), staged_key, f"NOT ({no_live}) AND NOT ({same})", driving="s"),
        ),
    )


def _by_rows(session: Session, pair: Pair, common: Common) -> TableDifference:
    rows, live_rows, missing, added = session.query(
        _WHOLE.format(
            staged=pair.staged,
            live=pair.live,
            staged_row=_row([one.digest("s", other) for one, other in common.pairs]),
            live_row=_row([other.digest("l", one) for one, other in common.pairs]),
        )
    )[0]
    return TableDifference(
        pair.live,
        staged_rows=int(rows),
        live_rows=int(live_rows),
        missing=int(missing),
        added=int(added),
        columns_differ=common.differ,
        remarks=common.remarks,
    )


def _row(digests: Sequence[str]) -> str:
    return f"SHA2(CONCAT({', '.join(digests)}), 256)"


def _prepare(session: Session) -> None:
    """Long reads that disturb nobody, and see every stored value as it is."""
    limit = next(
        (
            name
            for name in ("max_statement_time", "max_execution_time")  # neither before MySQL 5.7.8
            if session.query("SHOW VARIABLES LIKE %s", name)
        ),
        "",
    )
    session.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    session.execute(
        "SET SESSION sql_mode = '', SESSION time_zone = '+00:00', SESSION lock_wait_timeout = 5"
        + (f", SESSION {limit} = 0" if limit else "")
    )


@contextmanager
def _cancelling(session: Session, cancel: Event | None) -> Iterator[None]:
    """Ends the statement that runs when ``cancel`` is set."""
    if cancel is None:
        yield
        return
    over = Event()
    number, connection = session.thread_id, session.connection

    def watch() -> None:
        while not over.is_set():
            if cancel.wait(_LOOK_SECONDS):
                _kill(connection, number, over)
                return

    watcher = threading.Thread(target=watch, name="cancel", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _kill(connection: Connection, number: int, over: Event) -> None:
    """Again and again, because the statement that was killed may have been the one before."""
    with connection.connect() as killer:
        while not over.is_set():
            try:
                killer.execute(f"KILL QUERY {number}")
            except ServerError:
                return  # it is gone
            over.wait(_LOOK_SECONDS)
