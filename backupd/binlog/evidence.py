"""By what a server's binary logs are known again: what it says of itself, and the bytes of its files.

Files are compared with their in-use flag (byte 21, bit 0x1) cleared: the server clears it when it closes a file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from backupd.model.binlog import MAGIC, Ending
from backupd.model.text import format_time, parse_time

_HEADER = struct.Struct("<IBIIIH")
"""Time, type, server id, size, position of the next event, flags."""
_STOP, _ROTATE = 3, 4
_PREVIOUS_GTIDS, _GTID_LIST, _START_ENCRYPTION = 35, 163, 164
_LIST_COUNT = 0x0FFFFFFF
_CHECKSUM = 4
_ROTATE_POSITION = 8
_IN_USE = 21
_HEAD, _TAIL = 512, 16 * 1024
_BLOCK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Seen:
    """What a server was when its stream was last known to be whole.

    ``at``: by our clock. ``lsn``: on its disk then, None where the account may not know. ``marker``: of the restore its
    datadir came from, "" for none. ``gtids``: executed then.
    """

    at: datetime
    server_uuid: str
    server_id: int
    lsn: int | None
    marker: str
    gtids: str

    def as_json(self) -> dict[str, Any]:
        """The form in ``state.json`` of the spool."""
        return {
            "at": format_time(self.at),
            "server_uuid": self.server_uuid,
            "server_id": self.server_id,
            "lsn": self.lsn,
            "marker": self.marker,
            "gtids": self.gtids,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Seen:
        """Reads ``as_json``. Raises KeyError, ValueError, TypeError."""
        return cls(
            parse_time(data["at"]),
            str(data["server_uuid"]),
            int(data["server_id"]),
            None if data["lsn"] is None else int(data["lsn"]),
            str(data["marker"]),
            str(data["gtids"]),
        )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What an ended file was: its size, and SHA-256 of its beginning and its end."""

    branch: str
    number: int
    size: int
    digest: str


def fingerprint_of(path: Path, branch: str, number: int, size: int) -> Fingerprint:
    """Of the first ``size`` bytes of a file. Raises OSError."""
    with path.open("rb") as file:
        head = without_flag(file.read(min(_HEAD, size)))
        file.seek(max(size - _TAIL, len(head)))
        tail = file.read(max(0, size - file.tell()))
    return Fingerprint(branch, number, size, hashlib.sha256(head + tail).hexdigest())


def ending_of(path: Path, size: int) -> Ending:
    """How a file that others followed ends, by its last event. Raises OSError."""
    lengths = [
        _HEADER.size + body + checksum
        for body in (0, *(_ROTATE_POSITION + len(path.name) + longer for longer in (0, 1)))
        for checksum in (0, _CHECKSUM)
    ]
    with path.open("rb") as file:
        for length in lengths:
            if size < len(MAGIC) + length:
                continue
            file.seek(size - length)
            _at, kind, _server, told, next_position, _flags = _HEADER.unpack(file.read(_HEADER.size))
            if told == length and next_position == size & 0xFFFFFFFF:
                if kind == _STOP:
                    return Ending.STOPPED
                if kind == _ROTATE:
                    return Ending.ROTATED
    return Ending.CUT


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, before its transactions. ``size``: where they begin. ``gtids``: MariaDB's list of the
    last transaction of each server in each domain; empty for MySQL."""

    size: int
    gtids: tuple[str, ...] = ()


def head_of(path: Path) -> Head | None:
    """None while the file does not hold all of it yet. Raises OSError."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
        size, first = len(MAGIC), True
        gtids: tuple[str, ...] = ()
        while len(raw := file.read(_HEADER.size)) == _HEADER.size:
            _at, kind, _server, length, _next, _flags = _HEADER.unpack(raw)
            if not first and kind not in (_PREVIOUS_GTIDS, _GTID_LIST, _START_ENCRYPTION):
                return Head(size, gtids)
            if length < _HEADER.size:
                return None  # damaged
            body = file.read(length - _HEADER.size)
            if len(body) < length - _HEADER.size:
                return None
            if kind == _GTID_LIST:
                gtids = _gtid_list(body)
            first = False
            size += length
            if kind in (_PREVIOUS_GTIDS, _GTID_LIST):
                return Head(size, gtids)
    return None


def _gtid_list(body: bytes) -> tuple[str, ...]:
    count = min(int.from_bytes(body[:4], "little") & _LIST_COUNT, (len(body) - 4) // 16)
    return tuple("{}-{}-{}".format(*struct.unpack_from("<IIQ", body, 4 + 16 * place)) for place in range(count))


def without_flag(beginning: bytes) -> bytes:
    """The beginning of a file with its in-use flag cleared."""
    if len(beginning) <= _IN_USE:
        return beginning
    return beginning[:_IN_USE] + bytes([beginning[_IN_USE] & ~0x1]) + beginning[_IN_USE + 1 :]


def first_moment(path: Path) -> datetime:
    """When a file began, to the second, by its server's clock. Raises OSError."""
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        return datetime.fromtimestamp(int.from_bytes(file.read(4), "little"), UTC)


class Comparison:
    """Compares a file that grows with one that is there, as far as both go, without reading anything twice.

    ``equal``: bytes from the beginning that are the same; ``differs``: is the next byte of both another one?
    """

    def __init__(self, kept: BinaryIO, fresh: BinaryIO) -> None:
        self._kept = kept
        self._fresh = fresh
        self.equal = 0
        self.differs = False

    def go_on(self) -> int:
        """Compare what came since. Gives ``equal``. Raises OSError."""
        while not self.differs:
            self._kept.seek(self.equal)
            self._fresh.seek(self.equal)
            one, other = self._kept.read(_BLOCK), self._fresh.read(_BLOCK)
            if self.equal == 0:
                if min(len(one), len(other)) <= _IN_USE and len(one) > _IN_USE:
                    break  # the byte with the flag is not there yet
                one, other = without_flag(one), without_flag(other)
            size = min(len(one), len(other))
            if size == 0:
                break
            if one[:size] == other[:size]:
                self.equal += size
            else:
                self.equal += next(place for place in range(size) if one[place] != other[place])
                self.differs = True
        return self.equal
