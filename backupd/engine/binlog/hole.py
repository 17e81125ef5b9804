"""Binary logs of which the beginning was not fetched: a head that says what is executed before it, then a hole.

A replay that begins in the middle of a file needs its format description and what follows its start. The rest of the
file is a hole on the disk, so that every position is the server's. To whoever reads the file it is a valid log: the
hole consists of events that servers and programs pass over, each with its length, position and checksum, and the list
of earlier GTIDs names what the bytes of the hole held, too. So nobody takes the transactions there for missing or for
executed wrongly: one who asks for them by GTID is told that they are gone.

Where an applier or mysqlbinlog reads it, the hole is closed: nobody has to read all of it. Events keep the positions of
the original; neither family compares these with where it reads (tried, MariaDB 10.11 and MySQL 9.7).
With a hole of zeros in it instead, both answer a replica that asks by GTID with "bogus data in log event", and MySQL's
mysqlbinlog stops.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.binlog.events import (
    CRC_SIZE,
    GTID_LIST,
    HEADER,
    IGNORABLE,
    LONG_EVENT,
    PREVIOUS_GTIDS,
    clear_flag,
    read_format,
)
from backupd.model.binlog import FIRST_EVENT, MariadbGtids, MysqlGtids

MARK = b"backupd did not fetch these bytes of the binary log"
"""How the body of each event of a hole begins."""
_MAY_BE_IGNORED = 0x80
_LEAST = HEADER.size + len(MARK) + CRC_SIZE
_LISTED = struct.Struct("<IIQ")
_INTERVAL = struct.Struct("<QQ")
_CHUNK = 8 * 1024 * 1024
_ZEROS = bytes(LONG_EVENT)


@dataclass(frozen=True, slots=True)
class Hole:
    """Bytes ``[start, end)`` of a file: nothing of the log is in them."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes by which the file is shorter without it."""
        return self.end - self.start


def begin_behind_hole(path: Path, beginning: bytes, gtids: str, end: int) -> bool:
    """Make ``path`` a new file (0600) that goes on at byte ``end`` of a log, between two transactions.

    ``beginning``: of the log, its format description at least; ``gtids``: all that is executed at ``end``, as the log
    records it. False, and no file, where so little would be left out that the head does not fit. Raises DamagedError,
    StreamError for what is no beginning of a log, ValueError for other GTIDs.
    """
    form = read_format(io.BytesIO(beginning))
    head = bytearray(clear_flag(beginning[: form.end]))
    when, _kind, server_id, *_ = HEADER.unpack_from(head, FIRST_EVENT)
    trailer = CRC_SIZE if form.checksums else 0

    def event(kind: int, at: int, body: bytes, flags: int, zeros: int = 0) -> tuple[bytes, bytes]:
        size = HEADER.size + len(body) + zeros + trailer
        first = HEADER.pack(when, kind, server_id, size, (at + size) & 0xFFFFFFFF, flags) + body
        return first, zlib.crc32(memoryview(_ZEROS)[:zeros], zlib.crc32(first)).to_bytes(4, "little")[:trailer]

    kind, body, flags = (
        (GTID_LIST, _mariadb_list(gtids), 0) if form.mariadb else (PREVIOUS_GTIDS, _mysql_set(gtids), _MAY_BE_IGNORED)
    )
    head += b"".join(event(kind, len(head), body, flags))
    if end - len(head) < _LEAST:
        return False
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
        stream.write(head)
        at = len(head)
        while at < end:
            size = end - at
            if size > LONG_EVENT:
                size = LONG_EVENT if size - LONG_EVENT >= _LEAST else size // 2
            first, last = event(IGNORABLE, at, MARK, _MAY_BE_IGNORED, size - _LEAST + CRC_SIZE - trailer)
            stream.write(first)
            at += size
            stream.seek(at - len(last))
            stream.write(last)
        stream.truncate(end)
    return True


def hole_of(path: Path) -> Hole | None:
    """The hole of a log, None as a rule. Raises DamagedError and StreamError for what is no log."""
    with path.open("rb") as stream:
        at = read_format(stream).end
        start = 0
        while True:
            stream.seek(at)
            event = stream.read(HEADER.size + len(MARK))
            if len(event) < HEADER.size:
                break
            _when, kind, _server, length, *_ = HEADER.unpack_from(event)
            if kind == IGNORABLE and event.endswith(MARK):
                start = start or at
            elif start or kind not in (GTID_LIST, PREVIOUS_GTIDS):
                break
            at += length
        return Hole(start, at) if start else None


def copy_without(hole: Hole, source: Path, target: Path) -> None:
    """A new file ``target`` that holds what ``source`` does but its hole."""
    with source.open("rb") as one, target.open("xb") as other:
        other.write(one.read(hole.start))
        one.seek(hole.end)
        while block := one.read(_CHUNK):
            other.write(block)


def _mariadb_list(gtids: str) -> bytes:
    """The body of a Gtid_list event."""
    last = sorted(MariadbGtids.parse(gtids).last.items())
    listed = (_LISTED.pack(domain, server, sequence) for domain, (server, sequence) in last)
    return len(last).to_bytes(4, "little") + b"".join(listed)


def _mysql_set(gtids: str) -> bytes:
    """The body of a Previous_gtids event. One with tags says so in the first and the last byte of the count."""
    runs = sorted(MysqlGtids.parse(gtids).runs.items())
    tagged = any(":" in source for source, _intervals in runs)
    body = bytearray((len(runs) << 8 | 1 << 56 | 1 if tagged else len(runs)).to_bytes(8, "little"))
    for source, intervals in runs:
        uuid, _, tag = source.partition(":")
        body += bytes.fromhex(uuid.replace("-", ""))
        if tagged:
            body += bytes([len(tag) << 1]) + tag.encode("ascii")
        body += len(intervals).to_bytes(8, "little")
        for first, last in intervals:
            body += _INTERVAL.pack(first, last + 1)
    return bytes(body)
