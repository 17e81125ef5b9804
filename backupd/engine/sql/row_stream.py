"""Rows of one query as they arrive, in the server's own bytes.

PyMySQL makes objects of every value of every row, and several copies of a long one. A reader that only passes bytes on
takes the packets of the text protocol as they are: measured, some ten times as many rows per second.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator
from typing import Any, BinaryIO

import pymysql

_FULL = 0xFFFFFF
"""A packet of this size goes on in the next one."""
_PIECE = 1024 * 1024
_LONGEST = 1024 * 1024 * 1024
"""The highest max_allowed_packet."""
_END, _ERROR = 0xFE, 0xFF
_END_SIZE = 9
"""A packet that begins like the end and is longer is a row with a very long first value."""
NULL = 0xFB
WIDTHS = {0xFC: 2, 0xFD: 3, 0xFE: 8}
"""The first byte of a value is its length, or one of these: how many bytes of length follow."""

Row = bytes | bytearray


def packets(raw: Any, sql: str) -> Generator[Row, None, None]:
    """Each row's packet, while the server still reads. ``raw``: a connection of PyMySQL; left before the end, it is
    closed, because the rest of the rows is still on its way. Raises what PyMySQL raises."""
    raw.query(sql, unbuffered=True)
    result = raw._result  # noqa: SLF001 - PyMySQL has no other way to its packets, here and below
    if not result.unbuffered_active:
        raise pymysql.err.ProgrammingError(0, "a statement without rows was asked for its rows")
    ended = False
    try:
        source = raw._rfile  # noqa: SLF001
        while True:
            row = _packet(source)
            if row[0] == _END and len(row) < _END_SIZE:
                ended = True
                return
            if row[0] == _ERROR:
                ended = True
                pymysql.err.raise_mysql_exception(bytes(row))
            yield row
    finally:
        # Else it would read the rest when it is forgotten.
        result.unbuffered_active = False
        result.connection = None
        if not ended:
            raw._force_close()  # noqa: SLF001


def values(row: Row, count: int) -> list[memoryview | None]:
    """The ``count`` values of a row's packet, uncopied; None for NULL."""
    view = memoryview(row)
    found: list[memoryview | None] = []
    at = 0
    for _ in range(count):
        size = row[at]
        at += 1
        if size == NULL:
            found.append(None)
            continue
        if size > NULL:
            width = WIDTHS[size]
            size = int.from_bytes(view[at : at + width], "little")
            at += width
        found.append(view[at : at + size])
        at += size
    return found


def break_off(raw: Any) -> None:
    """From another thread: whoever waits for an answer on ``raw`` gets an error instead."""
    opened: socket.socket | None = raw._sock  # noqa: SLF001
    if opened is not None:
        with contextlib.suppress(OSError):  # already gone
            opened.shutdown(socket.SHUT_RDWR)


def _packet(source: BinaryIO) -> Row:
    size = _announced(source)
    if size < _FULL:
        return _read(source, size)
    whole = bytearray()
    while True:
        # In little pieces: a long row is there once.
        if len(whole) > _LONGEST:
            raise pymysql.err.OperationalError(2027, f"a row of the server is longer than {_LONGEST:,} bytes")
        for start in range(0, size, _PIECE):
            whole += _read(source, min(_PIECE, size - start))
        if size < _FULL:
            return whole
        size = _announced(source)


def _announced(source: BinaryIO) -> int:
    return int.from_bytes(_read(source, 4)[:3], "little")


def _read(source: BinaryIO, size: int) -> bytes:
    found = source.read(size)
    if len(found) < size:
        raise pymysql.err.OperationalError(2013, "Lost connection to MySQL server during query")
    return found
