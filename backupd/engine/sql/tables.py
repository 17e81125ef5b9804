"""The tables of a server: their names, engines and sizes, as its information schema lists them, and a check of those
that it may not be able to read.

``check`` looks at tables that the server cannot open, and at those of engines that crashes damage, before they are
read. ``CHECK TABLE ... QUICK`` reads the index and compares the sizes of the files; nobody writes to the table
meanwhile, nor would while it is dumped. Of large tables only those are looked at that were not closed properly or are
marked as damaged (``FAST``), which takes no time. Measured on MariaDB 10.11: FAST misses a data file that was cut off
behind the server's back, and ``SELECT`` then gives fewer rows or an error, by luck; QUICK finds it.

Foreign keys: which tables hold others to them, by which rules, and rows that have lost their parents.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from backupd.model.errors import CancelledError, ServerError
from backupd.model.table import TableName, quote_name

if TYPE_CHECKING:
    from backupd.engine.sql.client import Session

SYSTEM_SCHEMAS = ("information_schema", "mysql", "performance_schema", "sys")

_TABLES = """
SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE, ENGINE, COALESCE(DATA_LENGTH, 0) + COALESCE(INDEX_LENGTH, 0),
       COALESCE(CREATE_OPTIONS, '')
FROM information_schema.TABLES
WHERE TABLE_TYPE <> 'VIEW' AND TABLE_TYPE <> 'SYSTEM VIEW' AND TABLE_TYPE NOT LIKE '%TEMPORARY%'
"""

_DEFINITIONS = """
SELECT MIN(TABLE_SCHEMA), MIN(TABLE_NAME), CAST(SUM(CRC32(CONCAT_WS('|', ORDINAL_POSITION, COLUMN_NAME, COLUMN_TYPE,
       COALESCE(COLUMN_DEFAULT, '-'), IS_NULLABLE, COALESCE(COLLATION_NAME, '-')))) AS UNSIGNED)
FROM information_schema.COLUMNS
"""
_CHANGED = "SELECT TABLE_SCHEMA, TABLE_NAME, CREATE_TIME FROM information_schema.TABLES"

# InnoDB keeps names as file names: every special character is encoded, so "/" and "#P#" only separate.
_DECODED_IDS = """
SELECT CONVERT(CONVERT(CAST(SUBSTRING_INDEX(NAME, '/', 1) AS BINARY) USING filename) USING utf8mb4),
       CONVERT(CONVERT(CAST(SUBSTRING_INDEX(SUBSTRING_INDEX(REPLACE(NAME, '#p#', '#P#'), '/', -1), '#P#', 1)
       AS BINARY) USING filename) USING utf8mb4), TABLE_ID
FROM information_schema.{list} WHERE NAME LIKE '%/%'
"""
_IDS = "SELECT NAME, TABLE_ID FROM information_schema.{list} WHERE NAME LIKE '%/%'"
_FILE_NAME = re.compile(r"(?P<schema>[^/#]+)/(?P<table>[^/#]+)")
_PLAIN = re.compile(r"[0-9A-Za-z_]+")
_NO_CHARACTER_SET = 1115

_STORED_SUM = "SELECT COALESCE(SUM(CRC32(CONCAT_WS(',', {hashes})) + 4294967296), 0) FROM {table}"

LISTING_SECONDS = 2
"""How long a list may wait for one table that somebody else has locked."""
_NAMES = "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES"
_ENGINE = """
SELECT ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND ENGINE IN %s
"""
_LOCK_WAIT_TIMEOUT = 1205
_CLOCK_LAG = timedelta(milliseconds=50)
"""As much the clock of a file system may be behind."""

_COLUMNS = """
SELECT COLUMN_NAME, DATA_TYPE, EXTRA FROM information_schema.COLUMNS
WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s ORDER BY ORDINAL_POSITION
"""


@dataclass(frozen=True, slots=True)
class Table:
    """One base table or sequence. ``engine`` is empty for a table that the server cannot open.

    ``size``: bytes of data and indexes as the engine estimates them.
    """

    name: TableName
    kind: str
    engine: str
    size: int
    options: str

    @property
    def is_sequence(self) -> bool:
        """Is it a sequence of MariaDB?"""
        return self.kind == "SEQUENCE"

    @property
    def is_system(self) -> bool:
        """Is it in a schema of the server's own?"""
        return self.name.schema.lower() in SYSTEM_SCHEMAS


class LockedTableError(ServerError):
    """A list is not whole: a statement keeps a table of it locked."""


def hurry(session: Session) -> None:
    """Let lists that ``session`` reads wait for a moment only. MariaDB opens each table to describe it, and waits for
    one that a CREATE TABLE ... SELECT is filling until that has ended. Raises ServerError."""
    session.execute(f"SET SESSION lock_wait_timeout = {LISTING_SECONDS}")


@dataclass(frozen=True, slots=True)
class Mark:
    """Tells a table from what it was before an ALTER TABLE. ``columns``: a number that changes with them.
    ``changed_at``: naive, in the session's zone, whole seconds; None for engines that do not record it."""

    columns: int
    changed_at: datetime | None = None


def schemas_named(session: Session, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are schemas of the server. Raises ServerError."""
    present = {str(row[0]) for row in session.query("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA")}
    return sorted(present & set(names))


def with_a_backtick(session: Session, engines: Collection[str]) -> list[TableName]:
    """Tables of ``engines`` that have a backtick in their name or in that of their schema. Raises ServerError."""
    odd = sorted(name for name in table_names(session) if "`" in name.schema + name.table)
    return [name for name in odd if session.query(_ENGINE, name.schema, name.table, tuple(engines))]


def table_names(session: Session) -> frozenset[TableName]:
    """Every table and view that the account may see; no server opens or waits for one to answer. Raises ServerError."""
    return frozenset(TableName(str(schema), str(name)) for schema, name in session.query(_NAMES))


def list_tables(session: Session, *, strict: bool = False) -> list[Table]:
    """Every table that the account may see, no views, by name. Raises ServerError; with ``strict`` LockedTableError
    where it could not wait for one (see ``hurry``), of which nothing but the name would be reported."""
    rows = session.query(_TABLES)
    if strict:
        _refuse_locked(session)
    found = [
        Table(TableName(schema, name), str(kind), engine or "", int(size), options)
        for schema, name, kind, engine, size, options in rows
    ]
    return sorted(found, key=lambda table: table.name)


def definitions(session: Session, table: TableName | None = None, *, strict: bool = False) -> dict[TableName, Mark]:
    """What changes with each ALTER TABLE (of all user tables, or of ``table`` alone). ``strict``: raise
    LockedTableError rather than leave out one that somebody else has locked.

    An instant one keeps a table's pages and its identity, so nothing else shows an old snapshot that it now
    reads the old rows through new columns; these may even look like the old ones, when one is dropped and added
    in the same statement.
    """
    args: tuple[str, ...] = SYSTEM_SCHEMAS
    where = f"WHERE TABLE_SCHEMA NOT IN ({', '.join(['%s'] * len(args))})"
    if table is not None:
        where, args = "WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s", (table.schema, table.table)
    # As bytes: names that differ in case alone are equal in MariaDB's information schema.
    groups = "GROUP BY CAST(TABLE_SCHEMA AS BINARY), CAST(TABLE_NAME AS BINARY)"
    rows = session.query(f"{_DEFINITIONS} {where} {groups}", *args)
    if strict:
        _refuse_locked(session)
    changed = {TableName(schema, name): moment for schema, name, moment in session.query(f"{_CHANGED} {where}", *args)}
    if strict:
        _refuse_locked(session)
    columns = {TableName(schema, name): int(number) for schema, name, number in rows}
    return {name: Mark(number, changed.get(name)) for name, number in columns.items()}


def settled_definitions(session: Session, *, strict: bool = False) -> dict[TableName, Mark]:
    """Those of all user tables, when each further change will show: a moment is given in whole seconds, so that one in
    the second of the last change is waited out."""
    now: datetime = session.scalar("SELECT NOW(6)")
    found = definitions(session, strict=strict)
    second = (now - _CLOCK_LAG).replace(microsecond=0)
    if any(mark.changed_at is not None and second <= mark.changed_at <= now for mark in found.values()):
        time.sleep((second + timedelta(seconds=1) + _CLOCK_LAG - now).total_seconds())
    return found


def _refuse_locked(session: Session) -> None:
    """MariaDB reports a table that it did not wait for by a warning alone."""
    if any(int(code) == _LOCK_WAIT_TIMEOUT for _level, code, _text in session.query("SHOW WARNINGS")):
        raise LockedTableError(
            f"the tables of the server at {session.connection.address} cannot be listed",
            detail=f"another session locked a table for more than {LISTING_SECONDS} s",
            hint="SHOW PROCESSLIST lists the statement, such as CREATE TABLE ... SELECT: wait for it or end it",
        )


class TableIds:
    """InnoDB's ids of every table (one per partition) at one moment."""

    def __init__(self, known: Iterable[tuple[TableName, int]], encoded: Iterable[int] = ()) -> None:
        """``encoded``: ids of tables whose names only InnoDB can read."""
        found: dict[TableName, set[int]] = defaultdict(set)
        for table, number in known:
            found[table].add(number)
        self._known = {table: frozenset(ids) for table, ids in found.items()}
        self._encoded = frozenset(encoded)

    def of(self, table: TableName) -> frozenset[int]:
        """The ids of ``table``; where its name is encoded those of all such tables, so that each of them counts as
        changed when one does. Empty when there is none."""
        if self._encoded and not (_PLAIN.fullmatch(table.schema) and _PLAIN.fullmatch(table.table)):
            return self._encoded
        return self._known.get(table, frozenset())

    def bearer(self, ids: frozenset[int]) -> TableName | None:
        """The table that has just these ids."""
        return next((table for table, found in self._known.items() if found == ids), None) if ids else None


def table_ids(session: Session, innodb_tables: str) -> TableIds:
    """InnoDB's ids of every table as they are now, whatever the session's snapshot.

    ``innodb_tables``: the dialect's. An id follows its table through RENAME and is new after a rebuild.
    Needs PROCESS. Raises ServerError.
    """
    from backupd.engine.sql.client import error_code

    try:
        rows = session.query(_DECODED_IDS.format(list=innodb_tables))
    except ServerError as error:
        if error_code(error) != _NO_CHARACTER_SET:  # MySQL does not offer the encoding of file names
            raise
    else:
        return TableIds((TableName(str(schema), str(name)), int(number)) for schema, name, number in rows)
    known: list[tuple[TableName, int]] = []
    encoded: list[int] = []
    for name, number in session.query(_IDS.format(list=innodb_tables)):
        match = _FILE_NAME.match(str(name))
        if match is None:
            continue  # on its way to be a table, or no longer one
        if "@" in match[0]:
            encoded.append(int(number))
        else:
            known.append((TableName(match["schema"], match["table"]), int(number)))
    return TableIds(known, encoded)


def checksum_statement(session: Session, table: TableName) -> str:
    """The statement whose first row ends with a checksum of ``table``, or with NULL. Raises ServerError.

    CHECKSUM TABLE ... EXTENDED reads virtual columns without computing them, so that it hashes what an
    earlier row or statement left in the record buffer. Such tables get a sum over what they store. It depends on
    nothing of the session: strings count as their bytes, TIMESTAMP as seconds rather than in a time zone,
    and each column is hashed alone, because a concatenation over max_allowed_packet would become NULL.
    """
    columns = session.query(_COLUMNS, table.schema, table.table)
    stored = [(str(name), str(kind).lower()) for name, kind, extra in columns if "VIRTUAL" not in str(extra).upper()]
    if len(stored) == len(columns):
        return f"CHECKSUM TABLE {table} EXTENDED"
    hashes = ", ".join(f"IFNULL(CRC32(CAST({_plain(quote_name(name), kind)} AS BINARY)), 'N')" for name, kind in stored)
    # 2^32 for each row: rows that hash to 0 count as well.
    return _STORED_SUM.format(hashes=hashes or "''", table=table)


def _plain(column: str, kind: str) -> str:
    return f"UNIX_TIMESTAMP({column})" if kind == "timestamp" else column


CRASH_UNSAFE = frozenset({"MyISAM", "Aria", "ARCHIVE", "CSV"})
LARGE = 1 << 30
"""Bytes from which on a table is looked at only where its own mark asks for it."""
LOCK_SECONDS = 5
"""How long one table may be waited for."""

_GOOD = ("ok", "table is already up to date")


def check(
    session: Session,
    tables: Iterable[Table],
    *,
    repair: bool = False,
    report: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Mapping[TableName, str]:
    """Why each damaged one of ``tables`` cannot be read, in the server's words; nothing for the others. Only those of
    engines that crashes damage are looked at, and those that the server cannot open.

    ``repair``: repair what is damaged, which may cost rows and needs INSERT on it; ``report`` gets a sentence about
    each that was. Nothing of it is written to the binary log. Raises ServerError when the server went away,
    CancelledError.
    """
    found: dict[TableName, str] = {}
    with session.connection.connect() as own:
        # A look that MariaDB ends for its length would speak for a damaged table; MySQL ends only SELECTs so.
        own.execute(f"SET SESSION lock_wait_timeout = {LOCK_SECONDS} /*M!100101 , max_statement_time = 0 */")
        for table in tables:
            if cancel is not None and cancel.is_set():
                raise CancelledError("cancelled while the tables were checked")
            if table.engine and table.engine not in CRASH_UNSAFE:
                continue
            fast = " FAST" if table.size > LARGE else ""
            damage, _said = _ask(own, f"CHECK TABLE {table.name}{fast} QUICK")
            if damage and repair:
                still, said = _ask(own, f"REPAIR NO_WRITE_TO_BINLOG TABLE {table.name}")
                if not still and report is not None:
                    report(f"{table.name.shown} was damaged ({damage}) and was repaired: {said or 'no rows were lost'}")
                damage = f"{damage}; it cannot be repaired: {still}" if still else ""
            if damage:
                found[table.name] = damage
    return found


def _ask(session: Session, statement: str) -> tuple[str, str]:
    """What is wrong, in the server's words, empty when nothing is; and what else it says."""
    try:
        rows = session.query(statement)
    except ServerError as error:
        session.ping()
        return error.detail, ""
    said = [(str(kind).lower(), str(text)) for _table, _operation, kind, text in rows]
    words = "; ".join(dict.fromkeys(text for kind, text in said if kind in ("error", "warning")))
    if any(kind == "status" and text.lower() in _GOOD for kind, text in said):
        return "", words
    if all(kind == "note" for kind, _text in said):  # an engine that has no such statement
        return "", ""
    return words or "; ".join(text for _kind, text in said), ""


NO_ACTION = frozenset({"RESTRICT", "NO ACTION"})
"""Rules that change nothing in the child."""

_KEYS = """
SELECT CONSTRAINT_SCHEMA, CONSTRAINT_NAME, TABLE_NAME, UPDATE_RULE, DELETE_RULE
FROM information_schema.REFERENTIAL_CONSTRAINTS
"""
_FOREIGN_KEY_COLUMNS = """
SELECT TABLE_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, COLUMN_NAME, REFERENCED_TABLE_SCHEMA, REFERENCED_TABLE_NAME,
       REFERENCED_COLUMN_NAME
FROM information_schema.KEY_COLUMN_USAGE WHERE REFERENCED_TABLE_NAME IS NOT NULL
ORDER BY TABLE_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, ORDINAL_POSITION
"""
_NO_PARENT = " AND NOT EXISTS (SELECT 1 FROM {parent} p WHERE {same})"
_COUNT = "SELECT COUNT(*) FROM {child} c WHERE {where}"
_SAMPLE = "SELECT DISTINCT {columns} FROM {child} c WHERE {where} LIMIT {limit}"


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """One constraint of ``child``. The rules in the server's words: ``RESTRICT`` and ``NO ACTION``, which are the same
    to InnoDB, ``CASCADE``, ``SET NULL``, ``SET DEFAULT``."""

    name: str
    child: TableName
    columns: tuple[str, ...]
    parent: TableName
    parent_columns: tuple[str, ...]
    on_delete: str = "NO ACTION"
    on_update: str = "NO ACTION"

    @property
    def clause(self) -> str:
        """As it may stand behind ``ALTER TABLE ... ADD``; the parent with its schema."""
        columns, others = (", ".join(map(quote_name, names)) for names in (self.columns, self.parent_columns))
        rules = "".join(
            f" ON {change} {rule}"
            for change, rule in (("DELETE", self.on_delete), ("UPDATE", self.on_update))
            if rule != "NO ACTION"
        )
        return f"CONSTRAINT {quote_name(self.name)} FOREIGN KEY ({columns}) REFERENCES {self.parent} ({others}){rules}"

    @property
    def acts(self) -> bool:
        """Does a change of the parent change rows of the child? InnoDB logs no row events for those."""
        return self.on_delete not in NO_ACTION or self.on_update not in NO_ACTION


def graph(session: Session) -> tuple[ForeignKey, ...]:
    """Every foreign key that the account may see. Raises ServerError."""
    rules = {
        (str(schema), str(table), str(name)): (str(on_delete), str(on_update))
        for schema, name, table, on_update, on_delete in session.query(_KEYS)
    }
    columns: dict[tuple[str, str, str], list[tuple[str, TableName, str]]] = defaultdict(list)
    for schema, table, name, column, parent_schema, parent, parent_column in session.query(_FOREIGN_KEY_COLUMNS):
        columns[schema, table, name].append((column, TableName(parent_schema, parent), parent_column))
    found = []
    for (schema, table, name), pairs in sorted(columns.items()):
        own, parents, others = zip(*pairs, strict=True)
        rule = rules.get((schema, table, name), ("NO ACTION", "NO ACTION"))
        found.append(ForeignKey(name, TableName(schema, table), own, parents[0], others, *rule))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Orphans:
    """Rows of a child whose key is in no row of the parent. ``sample``: a few of those keys, by ``columns`` of the
    constraint. ``missing``: the parent table itself is not there, so every row with a key is one."""

    key: ForeignKey
    rows: int
    sample: tuple[tuple[Any, ...], ...] = ()
    missing: bool = False


def orphans(session: Session, key: ForeignKey, *, sample: int = 5) -> Orphans:
    """Count them. A key with a NULL in it references nothing, so it is none. Raises ServerError."""
    present = session.scalar(
        "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        key.parent.schema,
        key.parent.table,
    )
    child = [f"c.{quote_name(name)}" for name in key.columns]
    where = " AND ".join(f"{column} IS NOT NULL" for column in child)
    if present:
        same = " AND ".join(
            f"p.{quote_name(parent)} = {column}" for parent, column in zip(key.parent_columns, child, strict=True)
        )
        where += _NO_PARENT.format(parent=key.parent, same=same)
    rows = int(session.scalar(_COUNT.format(child=key.child, where=where)))
    keys: list[tuple[Any, ...]] = []
    if rows and sample:
        keys = session.query(_SAMPLE.format(columns=", ".join(child), child=key.child, where=where, limit=sample))
    return Orphans(key, rows, tuple(keys), missing=not present)
