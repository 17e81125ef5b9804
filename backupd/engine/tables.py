"""The tables of a server: their names, engines and sizes, as its information schema lists them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from backupd.engine.client import Session, error_code
from backupd.model.errors import ServerError
from backupd.model.table import TableName, quote_name

SYSTEM_SCHEMAS = ("information_schema", "mysql", "performance_schema", "sys")

_TABLES = """
SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE, ENGINE, COALESCE(DATA_LENGTH, 0) + COALESCE(INDEX_LENGTH, 0),
       CREATE_TIME, COALESCE(CREATE_OPTIONS, '')
FROM information_schema.TABLES
WHERE TABLE_TYPE <> 'VIEW' AND TABLE_TYPE <> 'SYSTEM VIEW' AND TABLE_TYPE NOT LIKE '%TEMPORARY%'
"""

_DEFINITIONS = """
SELECT MIN(TABLE_SCHEMA), MIN(TABLE_NAME), CAST(SUM(CRC32(CONCAT_WS('|', ORDINAL_POSITION, COLUMN_NAME, COLUMN_TYPE,
       COALESCE(COLUMN_DEFAULT, '-'), IS_NULLABLE, COALESCE(COLLATION_NAME, '-')))) AS UNSIGNED)
FROM information_schema.COLUMNS
"""

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

_COLUMNS = """
SELECT COLUMN_NAME, DATA_TYPE, EXTRA FROM information_schema.COLUMNS
WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s ORDER BY ORDINAL_POSITION
"""


@dataclass(frozen=True, slots=True)
class Table:
    """One base table or sequence. ``engine`` is empty for a table that the server cannot open.

    ``size``: bytes of data and indexes as the engine estimates them. ``created_at``: naive, the server's
    clock; on MariaDB the moment of the last change of definition.
    """

    name: TableName
    kind: str
    engine: str
    size: int
    created_at: datetime | None
    options: str

    @property
    def is_sequence(self) -> bool:
        return self.kind == "SEQUENCE"

    @property
    def is_system(self) -> bool:
        return self.name.schema.lower() in SYSTEM_SCHEMAS


def schemas_named(session: Session, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are schemas of the server. Raises ServerError."""
    present = {str(row[0]) for row in session.query("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA")}
    return sorted(present & set(names))


def list_tables(session: Session) -> list[Table]:
    """Every table that the account may see, no views, by name. Raises ServerError."""
    return sorted(
        (
            Table(TableName(schema, name), str(kind), engine or "", int(size), created_at, options)
            for schema, name, kind, engine, size, created_at, options in session.query(_TABLES)
        ),
        key=lambda table: table.name,
    )


def definitions(session: Session, table: TableName | None = None) -> dict[TableName, int]:
    """A number per table that changes with its columns (of all user tables, or of ``table`` alone).

    An instant ALTER TABLE keeps a table's pages and its identity, so nothing else tells an old snapshot
    that it now reads the old rows through new columns.
    """
    args: tuple[str, ...] = SYSTEM_SCHEMAS
    where = f"WHERE TABLE_SCHEMA NOT IN ({', '.join(['%s'] * len(args))})"
    if table is not None:
        where, args = "WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s", (table.schema, table.table)
    # As bytes: names that differ in case alone are equal in MariaDB's information schema.
    groups = "GROUP BY CAST(TABLE_SCHEMA AS BINARY), CAST(TABLE_NAME AS BINARY)"
    rows = session.query(f"{_DEFINITIONS} {where} {groups}", *args)
    return {TableName(schema, name): int(number) for schema, name, number in rows}


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


def table_ids(session: Session, innodb_tables: str) -> TableIds:
    """InnoDB's ids of every table as they are now, whatever the session's snapshot.

    ``innodb_tables``: the dialect's. An id follows its table through RENAME and is new after a rebuild.
    Needs PROCESS. Raises ServerError.
    """
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
    hashes = ", ".join(
        f"IFNULL(CRC32(CAST({_plain(quote_name(name), kind)} AS BINARY)), 'N')" for name, kind in stored
    )
    # 2^32 for each row: rows that hash to 0 count as well.
    return _STORED_SUM.format(hashes=hashes or "''", table=table)


def _plain(column: str, kind: str) -> str:
    return f"UNIX_TIMESTAMP({column})" if kind == "timestamp" else column
