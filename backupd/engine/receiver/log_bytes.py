"""Which of a dump's messages are bytes of the server's binary logs, and whether they are the right ones.

A server sends the events of a file, and others that are in no file. Seen with MariaDB 10.11 and MySQL 9.7:

- a Rotate event before each file, which names it (flag 0x20, or next position 0); a format description for a dump that
  begins within a file, and MariaDB's GTID list for one that begins by GTID; heartbeats (types 27 and 41);
- the events of the file, each with the position where the next one begins. What is stored is them and nothing else, so
  it equals the file; the in-use flag is cleared on the way, and the archive clears it in everything it compares.

To a semi-synchronous replica, each event comes behind two bytes more: 0xef, and whether it is to be acknowledged. It is
where a transaction ends that a session waits for; while the server has given up waiting, each one is.

With less than capability 4, MariaDB rewrites events: lengths, positions and checksums are right, bytes are not. The
position of the next event and the checksum do not show that. So a file of MariaDB must begin with its GTID list.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from backupd.engine.binlog.events import (
    CHECKED,
    CRC_SIZE,
    FORMAT,
    GTID_LIST,
    HEADER,
    IN_USE,
    ROTATE,
    START_ENCRYPTION,
    WITH_ALGORITHM,
)
from backupd.engine.receiver.endings import DamagedDumpError, EndedError, EndKind, end_kind
from backupd.engine.receiver.packets import Piece
from backupd.model.binlog import FIRST_EVENT, is_log_name
from backupd.model.errors import MisnamedError

HEARTBEATS = (27, 41)
LONGEST = 2**30 + 2**16
"""Bytes of an event: the highest max_allowed_packet, and its header."""
_ARTIFICIAL = 0x20
_OK, _END, _ERROR = 0x00, 0xFE, 0xFF
_MAGIC, _ASKED = 0xEF, 0x01
_FLAGS = 17
_VERSION = slice(HEADER.size + 2, HEADER.size + 52)
_CREATED = slice(_VERSION.stop, _VERSION.stop + 4)
_SAID = 9
"""Where the words of an error begin: 0xff, its number, '#' and a state of five characters."""
_U32 = struct.Struct("<I")
_MESSAGE, _MARKED_MESSAGE = struct.Struct("<IB4xB4xIIH"), struct.Struct("<I3s4xB4xIIH")
"""A packet's length (three bytes) and number, what is before its event; of the header of that: type, length, where the
next one begins, flags."""
_UNASKED_MARK, _ASKED_MARK = bytes([_OK, _MAGIC, 0]), bytes([_OK, _MAGIC, _ASKED])
_SHORTEST = HEADER.size + CRC_SIZE
_PACKET = 4
"""Bytes of a packet before its message."""


class LogPosition(NamedTuple):
    """A position in a binary log: behind an event."""

    file: str
    pos: int


class Sink(Protocol):
    """What takes the bytes. ``size``: of the current file, up to where the next bytes belong."""

    @property
    def size(self) -> int: ...

    def follow(self, name: str) -> None:
        """The server's file ``name`` begins, or is gone on with, by what is put from now on."""

    def describe(self, description: bytes, seconds: int, server_id: int) -> None:
        """What the server says of the file that it goes on with: its format (``format_of``), who began it, and when."""

    def put(self, data: bytes | memoryview) -> None:
        """The next bytes of the file."""

    def take_back(self, size: int) -> None:
        """What was put behind ``size`` is damaged."""


def format_of(event: bytes | memoryview) -> bytes:
    """What a format description says of its file, however often it is sent: not when, and not its checksum, which a
    server that changes that time leaves wrong in a log without checksums."""
    return bytes(event[HEADER.size : _CREATED.start]) + bytes(event[_CREATED.stop : -CRC_SIZE])


class LogBytes:
    """The bytes of the binary logs that begin with ``file``, from ``start`` on. ``address``: of the server, for people.

    ``strict``: nothing damaged is put. Else it is put as it came, for those who must see what a server sends.
    ``source_id``: server id of the server that is meant, None for whoever answers. A server begins each dump with a
    Rotate event under the id that it has now. ``semi_sync``: as of Request.
    """

    def __init__(
        self,
        sink: Sink,
        file: str,
        start: int,
        address: str,
        *,
        strict: bool,
        source_id: int | None = None,
        semi_sync: bool = False,
    ) -> None:
        self._sink = sink
        self._file = file
        self._start = start
        self._address = address
        self._strict = strict
        self._source_id = source_id
        self._head = 3 if semi_sync else 1
        """Bytes before each event."""
        self._message = _MARKED_MESSAGE if semi_sync else _MESSAGE
        self._asked: LogPosition | None = None
        self._began = False
        self._checksums: bool | None = None
        self._mariadb = False
        self._is_plain = False
        """Is it known that the next events have checksums, and are in a file?"""
        self._parts: list[memoryview] = []
        self._size = 0
        self._long: _Long | None = None

    @property
    def file(self) -> str:
        """The file that is being received."""
        return self._file

    def asked(self) -> LogPosition | None:
        """Behind the last of the events that were put since this was asked before and are to be acknowledged."""
        asked, self._asked = self._asked, None
        return asked

    def run(self, view: memoryview, at: int, to: int) -> int:
        """Take the events that are packets of their own and follow each other in their file, which nearly all do, from
        byte ``at`` of a buffer on; where the first begins that is left to ``take``. Raises what the sink raises."""
        if not self._is_plain:
            return at
        # Slices of bytes are made and joined in half the time that those of a memoryview take.
        data, begun, at, to = bytes(view[at:to]), at, 0, to - at
        parts, size, head = list[bytes](), self._sink.size, self._head
        message, crc32, checked, add = self._message.unpack_from, zlib.crc32, CHECKED, parts.append
        marks, asked = (_UNASKED_MARK, _ASKED_MARK), 0
        last = to - self._message.size - CRC_SIZE
        while at <= last:
            packet, before, kind, length, following, flags = message(data, at)
            begin = at + _PACKET + head
            end = begin + length
            size += length
            if (
                length + head != packet & 0xFFFFFF
                or (before and before not in marks)  # 0 where there is no mark
                or end > to
                or length < _SHORTEST
                or following != size & 0xFFFFFFFF
                or flags & _ARTIFICIAL
                or kind in HEARTBEATS
                or crc32(event := data[begin:end]) != checked
            ):
                break
            add(event)
            at = end
            if before and before == _ASKED_MARK:
                asked = size
        if parts:
            self._sink.put(b"".join(parts))
        if asked:
            self._asked = LogPosition(self._file, asked)
        return begun + at

    def take(self, pieces: Iterable[Piece]) -> None:
        """Raises EndedError, DamagedDumpError, MisnamedError, and what the sink raises."""
        self._size = self._sink.size
        try:
            for first, last, data in pieces:
                if not first:
                    self._go_on(data, last=last)
                elif data and data[0] == _OK:
                    event, asked = data[self._head :], self._head > 1 and self._is_asked(data)
                    if last and self._is_next(event):
                        self._parts.append(event)
                        self._size += len(event)
                        if asked:
                            self._asked = LogPosition(self._file, self._size)
                    else:
                        self._event(event, whole=last, asked=asked)
                else:
                    self._end(data)
        finally:
            self._flush()

    def _flush(self) -> None:
        if self._parts:
            parts, self._parts = self._parts, []
            self._sink.put(b"".join(parts))

    def _end(self, data: memoryview) -> None:
        if data and data[0] == _ERROR:
            said = bytes(data[_SAID:1024]).decode("utf-8", "replace")
            raise EndedError(end_kind(said), f"{said} (error {int.from_bytes(data[1:3], 'little')})")
        if data and data[0] == _END and len(data) < _SAID:
            raise EndedError(EndKind.ALL, "the server ended the dump")
        raise self._damaged("a message that is neither an event nor an end")

    def _damaged(self, what: str) -> DamagedDumpError:
        return DamagedDumpError(self._file, self._size, self._address, what)

    def _is_asked(self, data: memoryview) -> bool:
        if len(data) < self._head or data[1] != _MAGIC:
            raise self._damaged("an event without the mark of those for a semi-synchronous replica")
        return bool(data[2] & _ASKED)

    # --- one event

    def _is_next(self, event: memoryview) -> bool:
        """The short way for nearly all events; what it does not let pass is looked at closely, and may be right."""
        size = len(event)
        if not self._is_plain or size < HEADER.size + CRC_SIZE:
            return False
        _seconds, kind, _server_id, length, following, flags = HEADER.unpack_from(event)
        return (
            length == size
            and following == (self._size + size) & 0xFFFFFFFF
            and not flags & _ARTIFICIAL
            and kind not in HEARTBEATS
            and zlib.crc32(event) == CHECKED
        )

    def _event(self, event: memoryview, *, whole: bool, asked: bool = False) -> None:
        """``whole``: it is all here, else its beginning. ``asked``: it is to be acknowledged."""
        if len(event) < HEADER.size:
            raise self._damaged(f"an event of {len(event)} bytes")
        seconds, kind, server_id, length, following, flags = HEADER.unpack_from(event)
        if length > LONGEST:
            raise self._damaged(f"an event of type {kind} is {length} bytes long")
        if self._strict and (length != len(event) if whole else length <= len(event)):
            raise self._damaged(f"an event of type {kind} is {length} bytes long, and {len(event)} came")
        right = following == (self._size + length) & 0xFFFFFFFF
        if flags & _ARTIFICIAL or kind in HEARTBEATS or (following == 0 and not right):
            if not whole:
                raise self._damaged(f"an event of type {kind} that is in no file is {length} bytes long")
            self._artificial(kind, event, seconds, server_id)
            return
        if self._strict:
            self._check(kind, event, following, right=right, whole=whole)
        if whole:
            self._parts.append(event)
            self._size += len(event)
            if asked:
                self._asked = LogPosition(self._file, self._size)
        else:
            self._flush()
            self._long = _Long(self._size, length, kind, asked=asked)
            self._go_on(event, last=False)

    def _check(self, kind: int, event: memoryview, following: int, *, right: bool, whole: bool) -> None:
        if not self._began:
            raise self._damaged(f"an event of type {kind} came before the name of its file")
        if not right:
            raise self._damaged(f"an event of type {kind} is {len(event)} bytes long and ends at {following}")
        if self._size == FIRST_EVENT:
            if kind != FORMAT or not whole:
                raise self._damaged(f"the file begins with an event of type {kind}")
            self._described(event, stored=True)
            return
        if self._checksums is None:
            raise self._damaged(f"an event of type {kind} came before the format description")
        if whole and self._checksums and zlib.crc32(event[:-CRC_SIZE]) != _U32.unpack_from(event, len(event) - 4)[0]:
            raise self._damaged(f"the checksum of an event of type {kind} is wrong")
        if self._mariadb:
            self._mariadb = False
            if kind not in (GTID_LIST, START_ENCRYPTION):
                raise self._damaged(f"an event of type {kind} is where the GTID list belongs: events are rewritten")
        self._is_plain = self._checksums

    def _described(self, event: memoryview, *, stored: bool) -> None:
        """By the format description: does the file have checksums? ``stored``: is it a part of the file?"""
        body = len(event) - HEADER.size
        if not 2 + 50 + 4 + 1 < body < 4096:
            raise self._damaged(f"its format description is {len(event)} bytes long")
        self._checksums = False
        if body >= WITH_ALGORITHM:
            if (algorithm := event[-CRC_SIZE - 1]) not in (0, 1):
                raise self._damaged(f"checksum algorithm {algorithm} is not known")
            plain = bytearray(event[:-CRC_SIZE])
            plain[_FLAGS] &= ~IN_USE
            if (stored or algorithm) and zlib.crc32(plain) != _U32.unpack_from(event, len(event) - 4)[0]:
                raise self._damaged("the checksum of the format description is wrong")
            self._checksums = algorithm == 1
        self._mariadb = self._size == FIRST_EVENT and b"MariaDB" in bytes(event[_VERSION])

    def _artificial(self, kind: int, event: memoryview, seconds: int, server_id: int) -> None:
        if kind == ROTATE:
            self._rotated(bytes(event), server_id)
        elif kind == FORMAT and self._strict:
            self._described(event, stored=False)
            self._flush()
            self._sink.describe(format_of(event), seconds, server_id)

    def _rotated(self, event: bytes, server_id: int) -> None:
        body = event[HEADER.size :]
        if len(body) > CRC_SIZE and zlib.crc32(event[:-CRC_SIZE]) == int.from_bytes(body[-CRC_SIZE:], "little"):
            body = body[:-CRC_SIZE]
        position, name = int.from_bytes(body[:8], "little"), body[8:].decode("utf-8", "backslashreplace")
        if not is_log_name(name) or name.rpartition(".")[0] != self._file.rpartition(".")[0]:
            raise MisnamedError(name, self._address)
        if not self._began:
            if name != self._file or position != self._start:
                raise self._damaged(f"the dump begins with {name}:{position}")
            if self._source_id is not None and server_id != self._source_id:
                said = f"the server with ID {server_id} answers, before it was that with ID {self._source_id}"
                raise EndedError(EndKind.LOST, said)
            self._began = True
            return
        if name == self._file:
            return
        if position != FIRST_EVENT:
            raise self._damaged(f"{name} begins at {position}")
        self._flush()
        self._sink.follow(name)
        self._file, self._checksums, self._is_plain = name, None, False
        self._size = self._sink.size

    # --- long ones

    def _go_on(self, data: memoryview, *, last: bool) -> None:
        long = self._long
        if long is None:
            raise self._damaged("a long message that is no event")
        if self._strict and long.came + len(data) > long.length:
            self._sink.take_back(long.start)
            raise self._damaged(f"an event of type {long.kind} is longer than its {long.length} bytes")
        long.add(data)
        self._sink.put(data)
        self._size += len(data)
        if not last:
            return
        self._long = None
        if self._strict and (why := long.trouble(checksums=bool(self._checksums))):
            self._sink.take_back(long.start)
            self._size = long.start
            raise self._damaged(why)
        if long.asked:
            self._asked = LogPosition(self._file, self._size)


class _Long:
    """An event of ``length`` bytes that begins at ``start`` and comes piece by piece. ``asked``: it is to be
    acknowledged."""

    def __init__(self, start: int, length: int, kind: int, *, asked: bool) -> None:
        self.start, self.length, self.kind, self.asked = start, length, kind, asked
        self.came = 0
        self._crc = 0
        self._told = b""

    def add(self, data: memoryview) -> None:
        content = max(0, min(len(data), self.length - CRC_SIZE - self.came))
        self._crc = zlib.crc32(data[:content], self._crc)
        self._told += bytes(data[content : content + CRC_SIZE])
        self.came += len(data)

    def trouble(self, *, checksums: bool) -> str:
        if self.came != self.length:
            return f"an event of type {self.kind} is {self.length} bytes long, and {self.came} came"
        if checksums and self._crc != int.from_bytes(self._told, "little"):
            return f"the checksum of an event of type {self.kind} is wrong"
        return ""
