"""PyMySQL's connection for a server that may lie: an answer has an end, and whatever it is, the worst it can be is an
error of the connection.

An answer is held in memory until its last row has come, and a server that never sends that one would fill all of it:
no answer may take more than half of the machine's. One that cannot be read at all ends the connection, for what comes
after it means nothing. Who says nothing when he is called (a server that stands still: its kernel answers for it) is
not waited for as for an answer.

Rows can also be read as they arrive, in the server's own bytes (``packets``): PyMySQL makes objects of every value of
every row, and several copies of a long one. A reader that only passes bytes on takes the packets of the text protocol:
measured, some ten times as many rows per second.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

import pymysql
import pymysql.connections
from pymysql.constants import CR

_GIB = 1024**3
_TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_GREETING_SECONDS = 60.0
_EACH = 100
"""Bytes that a packet's header, or its content, takes beside its own."""


def most() -> int:
    """Bytes of memory that one answer may take."""
    return max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, _GIB)


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


_Plain: Any = pymysql.connections.Connection


class Answering(_Plain):  # type: ignore[misc]  # its stubs do not know what is changed here
    """Raises pymysql.err.Error, OSError or UnicodeError, and nothing else."""

    _read_timeout: float | None
    _taken, _limit = 0, _GIB

    def connect(self, sock: Any = None) -> None:
        """Connect, and wait no longer than a minute for the greeting."""
        patience, self._read_timeout = self._read_timeout, _GREETING_SECONDS
        try:
            super().connect(sock)
            self._read_timeout = patience
        except (pymysql.err.Error, OSError, UnicodeError):
            raise
        except Exception as error:
            raise self._unreadable(error) from error

    def peer(self) -> tuple[int, int] | None:
        """Process and user at the other end of a socket of this host, by the kernel's word (0 is a process in another
        pid namespace); None over TCP."""
        opened: socket.socket = self._sock
        if opened.family != socket.AF_UNIX:
            return None
        process, user, _group = struct.unpack(
            "3i", opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        return process, user

    def server_uid(self) -> int | None:
        """Whose process is at the other end, by the kernel's word; None where it is not on this host's network."""
        if (peer := self.peer()) is not None:
            return peer[1]
        opened: socket.socket = self._sock
        ends = opened.getpeername()[1], opened.getsockname()[1]
        for table in _TCP_TABLES:
            for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
                _number, local, remote, _state, _queues, _timer, _retries, uid, *_rest = line.split()
                if (_port_of(local), _port_of(remote)) == ends:
                    return int(uid)
        return None

    def _execute_command(self, command: int, sql: str | bytes) -> None:
        self._taken, self._limit = 0, most()
        super()._execute_command(command, sql)

    def _read_query_result(self, unbuffered: bool = False) -> int:
        try:
            return int(super()._read_query_result(unbuffered=unbuffered))
        except (pymysql.err.Error, OSError, UnicodeError):
            raise
        except Exception as error:
            raise self._unreadable(error) from error

    def _read_bytes(self, num_bytes: int) -> bytes:
        self._taken += num_bytes + _EACH
        if self._taken > self._limit:
            self._force_close()
            raise pymysql.err.OperationalError(
                CR.CR_MALFORMED_PACKET, f"its answer is longer than {self._limit:,} bytes"
            )
        return bytes(super()._read_bytes(num_bytes))

    def _unreadable(self, error: Exception) -> pymysql.err.OperationalError:
        self._force_close()
        return pymysql.err.OperationalError(CR.CR_MALFORMED_PACKET, f"its answer cannot be read: {error!r}")


# -- rows as they arrive

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


def begin_dump(raw: Any, command: int, arguments: bytes) -> socket.socket:
    """Send a command whose answer never ends, and give the (encrypted) socket. All earlier answers must have been read:
    then nothing of this one is in PyMySQL's buffer. Raises what PyMySQL raises."""
    raw._execute_command(command, arguments)  # noqa: SLF001 - PyMySQL has no other way to its packets
    opened: socket.socket = raw._sock  # noqa: SLF001
    return opened


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
