"""How rows become INSERT statements that bring back every bit: what is asked of the server, what is written.

The server writes the literals of short columns itself, joined into one text for a row (``CONCAT_WS``), so that nothing
here looks at each value. What may be long comes as its bytes and is quoted here, piece by piece: a text that the server
makes must not be longer than its max_allowed_packet.

What a literal must look like (measured on MariaDB 10.11 and MySQL 9.7, ``SET NAMES binary``):

- FLOAT as the double that it is: by itself it prints six digits. Floating point numbers as strings, since the number
  ``-0`` has no sign.
- Texts and binary values as their bytes, whatever the column's character set; line ends escaped, so that a line is a
  row. ENUM's value for errors (index 0) as the number, since as a string it may also be a member.
- JSON of MySQL as utf8mb4, because a binary string makes no JSON; INET and UUID with a character set, because a binary
  string of the right length would be taken for their bytes.
- Geometry and vectors as the bytes that are stored: with SRID, nothing rounded.
- Rows of the past (system versioning) with the columns that say when they were valid; MariaDB accepts these from 10.11
  on while ``system_versioning_insert_history`` is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from backupd.engine.schema.definition_text import Column, Columns
from backupd.engine.sql.row_stream import NULL as _NULL
from backupd.engine.sql.row_stream import WIDTHS, Row, values
from backupd.model.table import TableName, quote_name

_PIECE = 1024 * 1024
_SKIPPED = {first: 1 + width for first, width in WIDTHS.items()}
_NO_TEXT = "the text of a row is longer than max_allowed_packet of the server: raise it there"

_NUMBERS = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint", "decimal"})
_FLOATS = frozenset({"float", "double"})
_MOMENTS = frozenset({"year", "date", "datetime", "timestamp", "time"})
_SHORT = frozenset({"char", "varchar", "binary", "varbinary", "tinytext", "tinyblob"})
_CONVERTED = frozenset({"inet4", "inet6", "uuid"})
_LONG = frozenset(
    {
        "text",
        "mediumtext",
        "longtext",
        "blob",
        "mediumblob",
        "longblob",
        "vector",
        "geometry",
        "point",
        "linestring",
        "polygon",
        "multipoint",
        "multilinestring",
        "multipolygon",
        "geometrycollection",
        "geomcollection",
    }
)
_JSON = "json"
_CHOICES = frozenset({"enum", "set"})
_KNOWN = _NUMBERS | _FLOATS | _MOMENTS | _SHORT | _CONVERTED | _LONG | _CHOICES | {_JSON, "bit"}

_TEXT = "REPLACE(REPLACE(QUOTE(CAST({0} AS BINARY)), '\\n', '\\\\n'), '\\r', '\\\\r')"
_TEMPLATES = {
    **dict.fromkeys(_NUMBERS, "IFNULL({0}, 'NULL')"),
    **dict.fromkeys(_FLOATS, "QUOTE({0} * 1e0)"),
    **dict.fromkeys(_MOMENTS, "QUOTE({0})"),
    **dict.fromkeys(_CONVERTED, "IF({0} IS NULL, 'NULL', CONCAT('_latin1', QUOTE({0})))"),
    "bit": "IFNULL(CAST({0} AS UNSIGNED), 'NULL')",
    "enum": "IF({0} + 0 = 0, '0', " + _TEXT + ")",
}
"""How the server is asked for the literal of a short column."""

_EMPTY_MEMBER = re.compile(r"[(,]''[,)]")
_ESCAPES = ((b"\\", b"\\\\"), (b"'", b"\\'"), (b"\0", b"\\0"), (b"\n", b"\\n"), (b"\r", b"\\r"), (b"\x1a", b"\\Z"))

_HISTORY_HEAD = b"/*M!101100 SET system_versioning_insert_history=1*/;\n"


def settings(charset: str) -> bytes:
    """What a file whose texts are in ``charset`` must say before its rows, so that they come back as they were."""
    return (
        f"/*!40101 SET NAMES {charset}*/;\n"
        "/*!40014 SET FOREIGN_KEY_CHECKS=0*/;\n"
        "/*M!100201 SET CHECK_CONSTRAINT_CHECKS=0*/;\n"
        "/*!40101 SET SQL_MODE='NO_AUTO_VALUE_ON_ZERO,ALLOW_INVALID_DATES'*/;\n"
        "/*!40103 SET TIME_ZONE='+00:00'*/;\n"
    ).encode()


@dataclass(frozen=True, slots=True)
class Reading:
    """``select``: the query; its values are, in order, ready texts (``prefixes`` is None there) or bytes to be quoted
    (the prefix of the literal). ``head``: the beginning of each file; ``insert``: of each statement, up to VALUES."""

    select: str
    prefixes: tuple[bytes | None, ...]
    head: bytes
    insert: bytes


def unknown_types(columns: Columns) -> str:
    """The columns whose type nothing is known of, for people; empty when there is none."""
    return ", ".join(f"{column.name} ({column.kind})" for column in _wanted(columns) if column.kind not in _KNOWN)


def keeps_transaction_ids(columns: Columns) -> bool:
    """Does a versioned table know its past by transaction ids, which no server takes back?"""
    return any(column.period and column.kind == "bigint" for column in columns.all)


def has_empty_member(printed: str) -> bool:
    """Of the type of an ENUM or SET, as printed."""
    return _EMPTY_MEMBER.search(printed) is not None


def reading_of(name: TableName, columns: Columns) -> Reading:
    """For a table whose types are all known."""
    names = [column.name for column in _wanted(columns)]
    pieces: list[tuple[bytes | None, list[str]]] = []
    for column in _wanted(columns):
        _add(pieces, *_expression(column))
    if columns.versioned:
        periods = {column.period: column.name for column in columns.all if column.period}
        for which, usual in (("START", "row_start"), ("END", "row_end")):
            names.append(periods.get(which, usual))
            _add(pieces, None, f"QUOTE({quote_name(names[-1])})")
    if not pieces:
        _add(pieces, None, "''")
    asked = ", ".join(texts[0] if len(texts) == 1 else f"CONCAT_WS(',', {', '.join(texts)})" for _, texts in pieces)
    # No index: one that holds all columns would be read instead, in its own order.
    source = f"{name}{' FOR SYSTEM_TIME ALL' if columns.versioned else ''} USE INDEX ()"
    listed = ", ".join(quote_name(column) for column in names)
    return Reading(
        select=f"SELECT {asked} FROM {source}",  # noqa: S608  all of it names, quoted
        prefixes=tuple(prefix for prefix, _ in pieces),
        head=settings("binary") + (_HISTORY_HEAD if columns.versioned else b""),
        insert=f"INSERT INTO {quote_name(name.table)} ({listed}) VALUES".encode("utf-8", "surrogateescape"),
    )


def row_text(row: Row, reading: Reading) -> bytes:
    """The literals of a row, as the server sent it. Raises ValueError when the server could not make its text, which
    is then longer than its max_allowed_packet."""
    if reading.prefixes == (None,):
        first = row[0]
        if first == _NULL:
            raise ValueError(_NO_TEXT)
        return bytes(row[_SKIPPED.get(first, 1) :])
    return b",".join(
        _ready(value) if prefix is None else b"NULL" if value is None else prefix + b"'" + _escaped(bytes(value)) + b"'"
        for prefix, value in zip(reading.prefixes, values(row, len(reading.prefixes)), strict=True)
    )


def row_pieces(row: Row, reading: Reading) -> Iterator[bytes]:
    """The same in pieces, so that a long row is not copied as a whole."""
    mark = b""
    for prefix, value in zip(reading.prefixes, values(row, len(reading.prefixes)), strict=True):
        yield mark
        mark = b","
        if prefix is None:
            yield _ready(value)
        elif value is None:
            yield b"NULL"
        else:
            yield prefix + b"'"
            for start in range(0, len(value), _PIECE):
                yield _escaped(bytes(value[start : start + _PIECE]))
            yield b"'"


def _ready(value: memoryview | None) -> bytes:
    if value is None:
        raise ValueError(_NO_TEXT)
    return bytes(value)


def _escaped(value: bytes) -> bytes:
    for plain, escape in _ESCAPES:
        value = value.replace(plain, escape)
    return value


def _wanted(columns: Columns) -> Iterator[Column]:
    for column in columns.all:
        if not column.generated:
            yield column


def _add(pieces: list[tuple[bytes | None, list[str]]], prefix: bytes | None, expression: str) -> None:
    if prefix is None and pieces and pieces[-1][0] is None:
        pieces[-1][1].append(expression)
    else:
        pieces.append((prefix, [expression]))


def _expression(column: Column) -> tuple[bytes | None, str]:
    """The prefix of the literal (None: the server writes it) and what is asked for."""
    name, kind = quote_name(column.name), column.kind
    if kind in _LONG:
        return b"", name
    if kind == _JSON:
        return b"_utf8mb4", name
    return None, _literal(name, kind, column.type)


def _literal(name: str, kind: str, printed: str) -> str:
    if kind == "set" and has_empty_member(printed):
        return f"IFNULL({name} + 0, 'NULL')"
    return _TEMPLATES.get(kind, _TEXT).format(name)
