"""What every program that writes rows of tables into files has in common: what it is asked, what it answers.

One run writes the rows of many tables, as INSERT statements without the schema, into a folder. Entering it prepares
what needs no lock. ``open`` is called while the caller blocks commits: when it returns, every session of the tool has
its snapshot, and all of them are the same one. Then ``files`` gives each file away as soon as it is complete, so that
no more than the files under way lie on the disk. ``verdicts`` says of each table whether all of its rows were written.
Definitions, triggers, views and routines are no business of these tools.

INSERT statements that bring back every bit: what is asked of the server, how a row is written, files of bounded size
with each row on a line of its own, and a check of the files that mydumper writes.

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

mydumper's loop over ``write()`` begins a repeated write at the right place but with the length of the whole statement
(0.10.1 and 1.0 alike): after a write that was cut short by a full disk, when room is there again, it writes on with
what is behind its buffer, and notices nothing. So each file is looked at: every line must be one that belongs there.
Strings hold no line end (it is written as ``
``), so lines can be counted without understanding them.

What is before the first INSERT depends on its version and lacks settings without which some rows come back as
others (an id 0, dates that are none): it is for our own head to stand there.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from backupd.engine.server.definition_text import Column, Columns
from backupd.engine.sql.answers import NULL as _NULL
from backupd.engine.sql.answers import WIDTHS, Row, values
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Tool
from backupd.model.table import TableName, quote_name

_BLOCK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DumpTable:
    """A table to dump. ``size``: bytes, as the server estimates them."""

    name: TableName
    engine: str
    size: int


@dataclass(frozen=True, slots=True)
class DumpRequest:
    """``folder``: empty, private to this run, on the spool's disk. ``threads``: sessions that read at the same time;
    ``chunk_bytes``: the rows of larger tables go into several files of about this size. ``log``: a file for what the
    tool prints; ``on_stderr`` is called with each line, from a thread. ``cancel``: when set, the run raises
    CancelledError."""

    connection: Connection
    tables: tuple[DumpTable, ...]
    folder: Path
    threads: int = 4
    chunk_bytes: int = 64 * 1024 * 1024
    log: Path | None = None
    cancel: threading.Event | None = None
    on_stderr: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class DumpedFile:
    """One complete file: nobody writes it any more. Whoever gets it removes it. ``rows``: in this file, None where they
    were not counted. ``head``: what is in the place of the first ``skip`` bytes of it; ``size`` is that of
    ``blocks``."""

    table: TableName
    path: Path
    size: int
    rows: int | None = None
    head: bytes = b""
    skip: int = 0

    def blocks(self) -> Iterator[bytes]:
        """Its content. Raises OSError."""
        with self.path.open("rb") as source:
            source.seek(self.skip)
            if self.head:
                yield self.head
            while content := source.read(_BLOCK):
                yield content


class DumpRun(AbstractContextManager["DumpRun"], Protocol):
    """One run. Entering it prepares, and nothing runs yet (raises ServerError, ToolError); leaving it, at any moment,
    leaves no process and no connection."""

    def open(self, seconds: float) -> None:
        """Start; returns when every session has its snapshot. The caller keeps commits blocked meanwhile. Raises
        ToolError when that takes longer than ``seconds`` or the tool fails, ServerError, CancelledError."""

    def files(self) -> Iterator[DumpedFile]:
        """Every file as it becomes complete, in any order; ends when the tool has ended. Raises ToolError only where
        nothing can be said any more of single tables; ServerError, CancelledError."""

    def verdicts(self) -> Mapping[TableName, str | None]:
        """After ``files``: of every table of the request, None when all of its rows were written, else why not."""

    def pause(self) -> None:
        """Stop reading until ``resume``; from any thread. Connections and snapshots stay."""

    def resume(self) -> None:
        """Read on after ``pause``; from any thread."""


class DumpTool(Protocol):
    """A program (or our own reader) that can dump tables."""

    @property
    def tool(self) -> Tool:
        """The program and its version, as backups name it."""

    def refuses(self, table: DumpTable, columns: Columns) -> str:
        """Why this tool would not bring the table back exactly; empty when it does."""

    def run(self, request: DumpRequest) -> DumpRun:
        """Nothing is started yet."""


_PIECE = 1024 * 1024
_SKIPPED = {first: 1 + width for first, width in WIDTHS.items()}
_NO_TEXT = "the text of a row is longer than the server's max_allowed_packet: raise max_allowed_packet on the server"

_NUMBERS = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint", "decimal"})
_FLOATS = frozenset({"float", "double"})
_MOMENTS = frozenset({"year", "date", "datetime", "timestamp", "time"})
_SHORT = frozenset({"char", "varchar", "binary", "varbinary", "tinytext", "tinyblob"})
CONVERTED = frozenset({"inet4", "inet6", "uuid"})
_SINGLE_SHAPES = frozenset({"geometry", "point", "linestring", "polygon", "geometrycollection", "geomcollection"})
SHAPES = _SINGLE_SHAPES | {"multipoint", "multilinestring", "multipolygon"}
_LONG = SHAPES | {"text", "mediumtext", "longtext", "blob", "mediumblob", "longblob", "vector"}
_JSON = "json"
CHOICES = frozenset({"enum", "set"})
_KNOWN = _NUMBERS | _FLOATS | _MOMENTS | _SHORT | CONVERTED | _LONG | CHOICES | {_JSON, "bit"}

_TEXT = "REPLACE(REPLACE(QUOTE(CAST({0} AS BINARY)), '\\n', '\\\\n'), '\\r', '\\\\r')"
_TEMPLATES = {
    **dict.fromkeys(_NUMBERS, "IFNULL({0}, 'NULL')"),
    **dict.fromkeys(_FLOATS, "QUOTE({0} * 1e0)"),
    **dict.fromkeys(_MOMENTS, "QUOTE({0})"),
    **dict.fromkeys(CONVERTED, "IF({0} IS NULL, 'NULL', CONCAT('_latin1', QUOTE({0})))"),
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


LONG = 1_000_000
"""Bytes after which a statement ends; a longer row has one of its own. Less than any server's max_allowed_packet."""


class RowFiles:
    """``head``: the beginning of each file; ``insert``: of each statement, up to VALUES; ``path``: the folder and the
    beginning of the files' names. A context manager: left with an error, it removes the file that is not complete.
    Raises OSError where a file cannot be written.

    What takes rows returns the file that is complete with them, if one is.
    """

    def __init__(self, table: TableName, path: str, chunk_bytes: int, *, head: bytes, insert: bytes) -> None:
        self._table, self._path, self._chunk = table, path, chunk_bytes
        self._head, self._insert = head, insert + b"\n("
        self._rows: list[bytes] = []
        self._size = 0
        self._file: BinaryIO | None = None
        self._number = self._count = 0

    def add(self, row: bytes) -> DumpedFile | None:
        """A row's literals, without parentheses."""
        self._rows.append(row)
        self._size += len(row)
        return self._filled() if self._size >= LONG else None

    def add_long(self, pieces: Iterable[bytes]) -> DumpedFile | None:
        """The same, in pieces."""
        self._flush()
        file = self._opened()
        file.write(self._insert)
        for piece in pieces:
            file.write(piece)
        file.write(b");\n")
        self._count += 1
        return self._filled()

    def finish(self) -> DumpedFile | None:
        """Complete the file; None when there is nothing in it."""
        self._flush()
        file, self._file = self._file, None
        if file is None:
            return None
        size = file.tell()
        file.close()
        rows, self._count = self._count, 0
        self._number += 1
        return DumpedFile(self._table, Path(file.name), size, rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        file, self._file = self._file, None
        if file is not None:
            path = Path(file.name)
            try:
                file.close()
            finally:
                path.unlink(missing_ok=True)

    def _filled(self) -> DumpedFile | None:
        self._flush()
        return self.finish() if self._opened().tell() >= self._chunk else None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = Path(f"{self._path}-{self._number:05d}.sql").open("xb")  # noqa: SIM115  closed by finish
            self._file.write(self._head)
        return self._file

    def _flush(self) -> None:
        if self._rows:
            file = self._opened()
            file.write(self._insert)
            file.write(b"),\n(".join(self._rows))
            file.write(b");\n")
            self._count += len(self._rows)
            self._rows.clear()
            self._size = 0


_ROW, _NEXT_ROW, _INSERT = b"\n(", b"\n,(", b"\nINSERT INTO `"
_STRANGE = re.compile(rb"\n(?!\(|,\(|INSERT INTO `|/\*|;|SET )")
_LONGEST = len(_INSERT)
_END = b";\n"
_CHARSET = re.compile(rb"\bSET NAMES '?(?P<charset>[0-9a-z]+)", re.IGNORECASE)


class RowMeter:
    """Counts the rows of one file as its bytes come by, in pieces of any size. 0.10.1 and our own files begin each row
    on a line of its own; later versions of mydumper begin the first row of a statement behind VALUES, each other one
    with a comma."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys((_ROW, _NEXT_ROW, _INSERT), 0)
        self._last = b"\n"  # so that the first line begins like the others

    def add(self, content: bytes) -> None:
        """The next bytes of the file."""
        text = self._last + content
        for pattern in self._counts:  # what ends within ``content``; the rest was counted before
            self._counts[pattern] += text.count(pattern, max(0, len(self._last) - len(pattern) + 1))
        self._last = text[1 - _LONGEST :]

    @property
    def statements(self) -> int:
        """INSERT statements so far."""
        return self._counts[_INSERT]

    @property
    def rows(self) -> int:
        """Rows so far, whichever version wrote the file."""
        first = self._counts[_ROW]
        return first + self._counts[_NEXT_ROW] + (0 if first else self._counts[_INSERT])


@dataclass(frozen=True, slots=True)
class Inspected:
    """``fault``: why it is not what mydumper writes, or empty. ``head``: bytes before the first INSERT; ``charset``: of
    the texts, as they say. Without any INSERT both are empty."""

    rows: int
    fault: str = ""
    head: int = 0
    charset: str = ""


def inspect(path: Path) -> Inspected:
    """Read the file once. Raises OSError."""
    meter = RowMeter()
    text = b"\n"  # so that the first line begins like the others
    strange = head = 0
    charset: str | None = None
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            if charset is None:
                head = max(0, block.find(_INSERT[1:]))
                match = _CHARSET.search(block, 0, head)
                charset = match["charset"].decode() if match else ""
            meter.add(block)
            text += block
            # What begins further back may go on in the next block. The last line end begins no line.
            limit = max(0, len(text) - _LONGEST) if block else len(text) - 1
            strange += sum(match.start() < limit for match in _STRANGE.finditer(text))
            if not block:
                break
            text = text[limit:]
    if not text.endswith(_END):
        return Inspected(0, "it does not end with a whole statement")
    if strange:
        return Inspected(0, f"{strange} of its lines are not part of an INSERT statement")
    if meter.statements and not charset:
        return Inspected(0, "it does not declare the character set of its text")
    return Inspected(meter.rows, head=head, charset=charset or "")
