"""The framing of binary logs of MySQL, Percona Server and MariaDB: header, checksum and length of every event.

An event is a header of 19 bytes (seconds, type, server id, length, where the next one starts (mod 2^32), flags), a body
and, where the log has checksums, CRC-32 of both. The first one, the format description, shows who wrote the log and
whether it has checksums; it has one itself in any case, computed with its in-use flag cleared.

Where the next one starts is compared always, so that a log without checksums, too, shows bytes that were lost, put in
or moved.

Compressed content. MySQL's Transaction_payload: fields of (type, length, value), then all events of a transaction in
one zstd frame or more, without checksums of their own. MariaDB's compressed queries and rows: one byte (bit 7 set,
algorithm in bits 4-6, size of the length in bits 0-2), the length before compression (big endian), then zlib's stream.

GTID events, and the set of GTIDs that they add up to, are at the end.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import BinaryIO, Final, NamedTuple, cast

import zstandard

from backupd.model.binlog import FIRST_EVENT, MAGIC, MariadbGtids, MysqlGtids
from backupd.model.errors import DamagedError, StreamError

HEADER: Final = struct.Struct("<IBIIIH")
CRC_SIZE: Final = 4
CHECKED: Final = 0x2144DF1C
"""CRC-32 of bytes that end with their own CRC-32 (little endian), whatever they are, and of no others with one."""
FLAGS_AT: Final = FIRST_EVENT + 17
"""The byte of a file that holds the in-use flag."""
IN_USE: Final = 0x01
LONG: Final = 0x100
"""Added to the type of an event that is too long to be held: its body is read piece by piece."""
LONG_EVENT: Final = 512 * 1024

QUERY, STOP, ROTATE, INTVAR, APPEND_BLOCK, DELETE_FILE, RAND, USER_VAR = 2, 3, 4, 5, 9, 11, 13, 14
FORMAT, XID, BEGIN_LOAD, EXECUTE_LOAD, TABLE_MAP, INCIDENT, IGNORABLE, ROWS_QUERY = 15, 16, 17, 18, 19, 26, 28, 29
WRITE_V1, UPDATE_V1, DELETE_V1, WRITE, UPDATE, DELETE, PARTIAL_UPDATE = 23, 24, 25, 30, 31, 32, 39
GTID, ANONYMOUS_GTID, PREVIOUS_GTIDS, XA_PREPARE, PAYLOAD, TAGGED_GTID = 33, 34, 35, 38, 40, 42
ANNOTATE, CHECKPOINT, MARIADB_GTID, GTID_LIST, START_ENCRYPTION, QUERY_COMPRESSED = 160, 161, 162, 163, 164, 165
WRITE_COMPRESSED_V1, UPDATE_COMPRESSED_V1, DELETE_COMPRESSED_V1 = 166, 167, 168
WRITE_COMPRESSED, UPDATE_COMPRESSED, DELETE_COMPRESSED = 169, 170, 171

_CHUNK = 512 * 1024
_FORMAT_FIXED = 2 + 50 + 4 + 1
WITH_ALGORITHM = 90
"""A format description that is as long names a checksum algorithm: MySQL's since 5.6 (97 bytes; 84 before), MariaDB's
since 5.3 (over 200). The version in it is not asked, since a flipped bit there must be noticed, too."""
_ENCRYPTED_MAGIC = b"\xfdbin"
_FETCH_AGAIN = "fetch the file from its server again; if the server's own copy is damaged too, take a full backup now"
_ENCRYPTED_HINT = "read it through the server, which decrypts: backupd streams binary logs and never copies their files"

Event = tuple[int, int, int, int, int, bytes, int, int]
"""type, seconds, server id, start and end in the file; the body is ``[from, to)`` of the bytes: bytes, from, to."""


class CutShortError(Exception):
    """The stream ended inside a long event."""


def damaged(offset: int, what: str) -> DamagedError:
    """The error for a log of which byte ``offset`` is not what a server writes there."""
    return DamagedError("a binary log is damaged", [f"at byte {offset}: {what}"], hint=_FETCH_AGAIN)


def encrypted(offset: int) -> DamagedError:
    """The error for a log that cannot be read from byte ``offset`` on."""
    return DamagedError(
        "a binary log is encrypted", [f"at byte {offset}: encrypted from here on"], hint=_ENCRYPTED_HINT
    )


def moment(seconds: int) -> datetime:
    """The time of an event: seconds since 1970, as UTC."""
    return datetime.fromtimestamp(seconds, UTC)


@dataclass(frozen=True, slots=True)
class Format:
    """The content of a format description. ``end``: where it ends in the file."""

    server_version: str
    mariadb: bool
    checksums: bool
    at: datetime
    server_id: int
    in_use: bool
    end: int


def read_format(stream: BinaryIO) -> Format:
    """Read magic number and format description. Raises DamagedError, and StreamError for a stream that ends in them."""
    magic = _exactly(stream, FIRST_EVENT)
    if magic == _ENCRYPTED_MAGIC:
        raise encrypted(0)
    if magic != MAGIC:
        raise damaged(0, f"the file begins with {magic.hex(' ')}, not with the magic number of a binary log")
    header = _exactly(stream, HEADER.size)
    when, kind, server_id, length, following, flags = HEADER.unpack(header)
    if kind != FORMAT or following != FIRST_EVENT + length or not HEADER.size + _FORMAT_FIXED < length < 4096:
        raise damaged(FIRST_EVENT, "it has no format description")
    body = _exactly(stream, length - HEADER.size)
    version = body[2:52].partition(b"\0")[0].decode("utf-8", "replace")
    mariadb = "MariaDB" in version
    if int.from_bytes(body[:2], "little") != 4 or body[56] != HEADER.size:
        raise damaged(FIRST_EVENT, f"format {int.from_bytes(body[:2], 'little')} of binary logs is not known")
    has_algorithm = len(body) >= WITH_ALGORITHM
    if has_algorithm:
        seen = bytearray(header + body[:-CRC_SIZE])
        seen[17] &= ~IN_USE
        if zlib.crc32(seen) != int.from_bytes(body[-CRC_SIZE:], "little"):
            raise damaged(FIRST_EVENT, "the format description's checksum is wrong")
        if body[-CRC_SIZE - 1] not in {0, 1}:
            raise damaged(FIRST_EVENT, f"checksum algorithm {body[-CRC_SIZE - 1]} is not known")
    return Format(
        server_version=version,
        mariadb=mariadb,
        checksums=has_algorithm and body[-CRC_SIZE - 1] == 1,
        at=moment(when),
        server_id=server_id,
        in_use=bool(flags & IN_USE),
        end=FIRST_EVENT + length,
    )


def _exactly(stream: BinaryIO, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = stream.read(size - len(found))
        if not more:
            raise StreamError(
                "a binary log ends before its format description does",
                hint="the server writes these first 300 bytes at once: try again in a moment",
            )
        found += more
    return found


class Pull:
    """Something long, ``size`` bytes of it, taken piece by piece. ``tap`` sees all that is taken."""

    def __init__(self, read: Callable[[int], bytes], size: int) -> None:
        self._read = read
        self.left = size
        self.tap: Callable[[bytes], object] | None = None

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes, and none only at the end."""
        wanted = min(self.left, _CHUNK if size < 0 else size)
        if not wanted:
            return b""
        piece = self._read(wanted)
        if not piece:
            raise CutShortError
        self.left -= len(piece)
        if self.tap is not None:
            self.tap(piece)
        return piece

    def take(self, size: int) -> bytes:
        """Exactly so many bytes. Raises ValueError when that is more than what is left."""
        if size > self.left:
            raise ValueError(f"{size} bytes of {self.left}")
        piece = self.read(size) if size else b""
        while len(piece) < size:
            piece += self.read(size - len(piece))
        return piece

    def skip(self, size: int) -> None:
        """Pass over ``size`` bytes, which ``tap`` sees. Raises ValueError when that is more than what is left."""
        if size > self.left:
            raise ValueError(f"{size} bytes of {self.left}")
        while size:
            size -= len(self.read(min(size, _CHUNK)))


class Frames:
    """The events of a stream that is at byte ``start`` of its file.

    ``inside``: where the compressed transaction starts whose events these are; they do not know their positions.
    """

    def __init__(
        self,
        stream: BinaryIO | Pull,
        start: int,
        *,
        checksums: bool,
        limit: int | None = None,
        inside: int | None = None,
    ) -> None:
        self._stream = stream
        self._checksums = checksums
        self._left = limit
        self._inside = inside
        self._pending = b""
        self._crc = 0
        self.start = start
        self.read = 0
        self.long: Pull | None = None

    def events(self, skim: Callable[[bytes, int, int, int], int] | None = None) -> Iterator[Event]:
        """Every complete event. One that is too long to be held comes with LONG added to its type and no bytes: its
        body is in ``long``, and ``finish`` must be called before what it says is believed. But for what ``skim`` takes:
        of bytes, from a place on, up to a size (last: where in the file they begin); it gives where it has come to."""
        unpack, crc32, checked = HEADER.unpack_from, zlib.crc32, CHECKED
        checksums, outside = self._checksums, self._inside is None
        trailer = CRC_SIZE if checksums else 0
        least = HEADER.size + trailer
        data, view, at, size, start = b"", memoryview(b""), 0, 0, self.start
        while True:
            if skim is not None:
                taken = skim(data, at, size, start - at)
                at, start = taken, start + taken - at
            if size - at < 19:
                length = 19
            else:
                when, kind, server_id, length, following, _flags = unpack(data, at)
                end = start + length
                if length < least or (outside and following != end & 0xFFFFFFFF):
                    raise self._broken(start, kind, length, following)
                to = at + length
                if to <= size:
                    if checksums and crc32(view[at:to]) != checked:
                        raise damaged(start, f"the checksum of an event of type {kind} is wrong")
                    yield kind, when, server_id, start, end, data, at + 19, to - trailer
                    at, start = to, end
                    continue
                if length > LONG_EVENT:
                    self._pending = data[at + 19 : size]
                    self._crc = crc32(data[at : at + 19])
                    self.long = Pull(self._long_bytes, length - least)
                    yield kind + LONG, when, server_id, start, end, b"", 0, 0
                    self.finish(start)
                    data, at, start = b"", 0, end
                    size = 0
                    continue
            data = self._more(data[at:], length)
            if len(data) < length:
                if not outside and data:
                    raise damaged(self._inside or 0, "a compressed transaction ends inside an event")
                return
            view, at, size = memoryview(data), 0, len(data)

    def finish(self, start: int) -> None:
        """Read the rest of the long event at ``start`` and compare its checksum. Raises CutShortError."""
        if self.long is None:
            return
        long, self.long = self.long, None
        long.tap = None
        long.skip(long.left)
        if self._checksums:
            crc, stored_crc = self._crc, b""
            while len(stored_crc) < CRC_SIZE:
                more = self._long_bytes(CRC_SIZE - len(stored_crc))
                if not more:
                    raise CutShortError
                stored_crc += more
            if crc != int.from_bytes(stored_crc, "little"):
                raise damaged(start, "the checksum of a long event is wrong")
        if self._pending:
            raise AssertionError("a long event is longer than the buffer")

    def _long_bytes(self, size: int) -> bytes:
        if self._pending:
            piece, self._pending = self._pending[:size], self._pending[size:]
        else:
            piece = self._bytes(size)
        self._crc = zlib.crc32(piece, self._crc)
        return piece

    def _more(self, data: bytes, wanted: int) -> bytes:
        """``data`` and what follows it, at least ``wanted`` bytes unless the stream ends."""
        parts, have = [data], len(data)
        while have < wanted:
            piece = self._bytes(_CHUNK)
            if not piece:
                break
            parts.append(piece)
            have += len(piece)
        return b"".join(parts)

    def _bytes(self, size: int) -> bytes:
        if self._left is not None:
            size = min(size, self._left - self.read)
        piece = self._stream.read(size) if size > 0 else b""
        self.read += len(piece)
        return piece

    def _broken(self, start: int, kind: int, length: int, following: int) -> DamagedError:
        if self._inside is not None:
            return damaged(self._inside, f"an event of {length} bytes in a compressed transaction")
        return damaged(start, f"an event of type {kind} is {length} bytes long, but its header ends it at {following}")


_END, _SIZE, _ALGORITHM = 0, 1, 2
_ZSTD, _PLAIN = 0, 255
_ZLIB = 0
_INFLATED_PIECE = 64 * 1024


class CompressionError(Exception):
    """What is compressed cannot be read."""


def open_payload(body: Pull) -> BinaryIO | Pull:
    """The events in a Transaction_payload as a stream. Raises CompressionError."""
    algorithm = _PLAIN
    try:
        while (field := _packed(body)) != _END:
            value = Pull(body.take, length) if (length := _packed(body)) else None
            if field == _ALGORITHM and value is not None:
                algorithm = _packed(value)
            if value is not None:
                value.skip(value.left)
    except ValueError as error:
        raise CompressionError(f"the header of a compressed transaction is damaged: {error}") from None
    if algorithm == _PLAIN:
        return body
    if algorithm != _ZSTD:
        raise CompressionError(f"compression {algorithm} of transactions is not known")
    reader = zstandard.ZstdDecompressor().stream_reader(
        cast("BinaryIO", body), read_size=_INFLATED_PIECE, read_across_frames=True
    )
    return cast("BinaryIO", _Zstd(reader))


class _Zstd:
    def __init__(self, reader: zstandard.ZstdDecompressionReader) -> None:
        self._reader = reader

    def read(self, size: int) -> bytes:
        try:
            return self._reader.read(size)
        except zstandard.ZstdError as error:
            raise CompressionError(f"a compressed transaction cannot be read: {error}") from None


def inflated(body: Pull) -> bytes | Pull:
    """Compressed bytes of MariaDB; a Pull where they are too many to be held. Raises CompressionError."""
    try:
        head = body.take(1)[0]
        length = int.from_bytes(body.take(head & 0x07), "big")
    except ValueError:
        raise CompressionError("compressed data ends inside its header") from None
    if not head & 0x80 or (head >> 4) & 0x07 != _ZLIB:
        raise CompressionError(f"compression {head:#x} is not known")
    pull = Pull(_Inflater(body).read, length)
    return pull if length > LONG_EVENT else pull.take(length)


class _Inflater:
    def __init__(self, body: Pull) -> None:
        self._body = body
        self._zlib = zlib.decompressobj()
        self._input = b""

    def read(self, size: int) -> bytes:
        while True:
            try:
                piece = self._zlib.decompress(self._input, size)
            except zlib.error as error:
                raise CompressionError(f"compressed data cannot be read: {error}") from None
            self._input = self._zlib.unconsumed_tail
            if piece:
                return piece
            if self._zlib.eof or not (self._input or (more := self._body.read(_INFLATED_PIECE))):
                raise CompressionError("compressed data ends early")
            self._input = self._input or more


def _packed(body: Pull) -> int:
    """An integer as the protocol packs them: one byte up to 250, else 252, 253, 254 and 2, 3 or 8 bytes."""
    first = body.take(1)[0]
    if first <= 250:
        return first
    if first not in {252, 253, 254}:
        raise ValueError(f"{first} is not a packed integer")
    return int.from_bytes(body.take({252: 2, 253: 3, 254: 8}[first]), "little")


_MARIADB = struct.Struct("<QIB")
_LISTED = struct.Struct("<IIQ")
_U64 = struct.Struct("<Q")
_XID = struct.Struct("<IBB")

_STANDALONE, _GROUP_COMMIT = 0x01, 0x02
_PREPARED_XA, _COMPLETED_XA = 0x40, 0x80
_START_ALTER, _ROLLBACK_ALTER = 0x02, 0x08


class MariadbGtid(NamedTuple):
    """``unfinished_alter``: the first half of an ALTER in two parts, or the one that takes it back."""

    domain: int
    sequence: int
    standalone: bool
    xid: str = ""
    state: str = ""
    unfinished_alter: bool = False


def read_mariadb_gtid(event: Event) -> MariadbGtid:
    """Raises ValueError."""
    *_, body, at, stop = event
    sequence, domain, flags = _MARIADB.unpack_from(body, at)
    standalone = bool(flags & _STANDALONE)
    at += _MARIADB.size + (8 if flags & _GROUP_COMMIT else 0)
    xid = state = ""
    if flags & (_PREPARED_XA | _COMPLETED_XA):
        form, branch_at, branch_size = _XID.unpack_from(body, at)
        begin = at + _XID.size
        at = begin + branch_at + branch_size
        if at > stop:
            raise ValueError("an XA identifier is longer than its event")
        xid = xid_text(form, body[begin : begin + branch_at], body[begin + branch_at : at])
        state = "prepared" if flags & _PREPARED_XA else ""
    extra = body[at] if at < stop else 0
    return MariadbGtid(domain, sequence, standalone, xid, state, bool(extra & (_START_ALTER | _ROLLBACK_ALTER)))


def xid_text(form: int, transaction: bytes, branch: bytes) -> str:
    """As servers write it into XA statements."""
    return f"X'{transaction.hex()}',X'{branch.hex()}',{form}"


def listed_gtids(body: bytes) -> Iterator[tuple[int, tuple[int, int]]]:
    """Domain, server and sequence of each GTID in the body of a Gtid_list event. Raises ValueError."""
    count = int.from_bytes(body[:4], "little") & 0x0FFFFFFF
    if len(body) < 4 + count * _LISTED.size:
        raise ValueError(f"a list of {count} GTIDs is longer than its event")
    for domain, server, sequence in _LISTED.iter_unpack(body[4 : 4 + count * _LISTED.size]):
        yield domain, (server, sequence)


def read_gtid_list(event: Event) -> MariadbGtids:
    """Raises ValueError."""
    *_, body, at, stop = event
    return MariadbGtids(dict(listed_gtids(body[at:stop])))


class MysqlGtid(NamedTuple):
    """``source``: UUID, with ``:tag`` where there is one, empty in an anonymous event. ``micros``: of the commit on
    the server that wrote the log, 0 where it does not say."""

    source: str
    number: int
    micros: int


def read_mysql_gtid(event: Event, uuids: dict[bytes, str], *, anonymous: bool) -> MysqlGtid:
    """``uuids``: texts that were made before. Raises IndexError and struct.error."""
    *_, body, at, stop = event
    micros = int.from_bytes(body[at + 42 : at + 49], "little") & 0x7FFFFFFFFFFFFF if stop - at >= 49 else 0
    if anonymous:
        return MysqlGtid("", 0, micros)
    raw = body[at + 1 : at + 17]
    uuid = uuids.get(raw) or uuids.setdefault(raw, uuid_text(raw))
    return MysqlGtid(uuid, _U64.unpack_from(body, at + 17)[0], micros)


def read_tagged_gtid(event: Event) -> MysqlGtid:
    """Of MySQL 8.3 and later: numbered fields, every integer in as many bytes as its first one says. Raises
    ValueError and IndexError."""
    *_, body, at, stop = event
    _version, at = _variable(body, at)
    size, at = _variable(body, at)
    _last, at = _variable(body, at)
    uuid, tag, number, micros = b"", "", 0, 0
    while at < stop:
        name, at = _variable(body, at)
        if name == 1:
            units = []
            for _ in range(16):
                unit, at = _variable(body, at)
                units.append(unit)
            uuid = bytes(units)
        elif name == 3:
            length, at = _variable(body, at)
            tag = body[at : at + length].decode("ascii")
            at += length
        else:
            value, at = _variable(body, at)
            number = value >> 1 if name == 2 else number
            micros = value if name == 6 else micros
    if at != stop or len(uuid) != 16 or not number:
        raise ValueError(f"fields of {size} bytes do not add up")
    return MysqlGtid(f"{uuid_text(uuid)}:{tag}" if tag else uuid_text(uuid), number, micros)


def read_previous_gtids(event: Event) -> MysqlGtids:
    """Raises ValueError, IndexError and struct.error."""
    *_, body, at, stop = event
    tagged = body[at + 7] == 1
    count = int.from_bytes(body[at + 1 : at + 7] if tagged else body[at : at + 8], "little")
    at += 8
    runs: dict[str, tuple[tuple[int, int], ...]] = {}
    for _ in range(count):
        source = uuid_text(body[at : at + 16])
        at += 16
        if tagged:
            length, at = _variable(body, at)
            source += ":" + body[at : at + length].decode("ascii") if length else ""
            at += length
        intervals, at = _U64.unpack_from(body, at)[0], at + 8
        if at + intervals * 16 > stop:
            raise ValueError(f"{intervals} intervals are longer than their event")
        numbers = struct.unpack_from(f"<{2 * intervals}Q", body, at)
        at += intervals * 16
        runs[source] = tuple((numbers[i], numbers[i + 1] - 1) for i in range(0, len(numbers), 2))
    return MysqlGtids(runs)


def uuid_text(raw: bytes) -> str:
    """16 bytes as servers print a UUID."""
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _variable(body: bytes, at: int) -> tuple[int, int]:
    """As many ones at the low end of the first byte as bytes follow it; 64 bits follow a byte of ones."""
    first = body[at]
    more = (~first & (first + 1)).bit_length() - 1
    if more >= 8:
        return int.from_bytes(body[at + 1 : at + 9], "little"), at + 9
    return int.from_bytes(body[at : at + 1 + more], "little") >> (more + 1), at + 1 + more


def add_to_runs(runs: list[list[int]], number: int) -> bool:
    """Put ``number`` into sorted runs (first and last) of consecutive ones; was it there already?"""
    at = len(runs) if not runs or number >= runs[-1][0] else bisect_right(runs, number, key=itemgetter(0))
    before = runs[at - 1] if at else None
    after = runs[at] if at < len(runs) and runs[at][0] == number + 1 else None
    if before is not None and number <= before[1]:
        return True
    if before is not None and before[1] + 1 == number:
        before[1] = after[1] if after is not None else number
        if after is not None:
            del runs[at]
    elif after is not None:
        after[0] = number
    else:
        runs.insert(at, [number, number])
    return False


class MariadbState:
    """All that was executed, as MariaDB sees it: the last transaction of each domain."""

    def __init__(self, text: str) -> None:
        self.start(text)

    def add(self, source: str, server: int, number: int) -> None:
        """``source``: the domain."""
        self._last[int(source)] = (server, number)

    def start(self, state: str) -> None:
        """Begin anew with ``state``, a list of GTIDs."""
        self._last = dict(MariadbGtids.parse(state).last)

    def __str__(self) -> str:
        return str(MariadbGtids(self._last))


class MysqlState:
    """A set that grows by one, mostly at its end."""

    def __init__(self, text: str) -> None:
        self.start(text)

    def add(self, source: str, _server: int, number: int) -> None:
        """``source``: UUID, with ``:tag`` where there is one. A number that is in the set already changes nothing."""
        add_to_runs(self._runs.setdefault(source, []), number)

    def start(self, state: str) -> None:
        """Begin anew with ``state``, a set of GTIDs."""
        self._runs = {source: [[*run] for run in runs] for source, runs in MysqlGtids.parse(state).runs.items()}

    def __str__(self) -> str:
        return str(
            MysqlGtids(
                {source: tuple((first, last) for first, last in runs) for source, runs in self._runs.items() if runs}
            )
        )


def clear_flag(first_bytes: bytes) -> bytes:
    """The beginning of a whole file (22 bytes or more) with its in-use flag cleared, as the archive keeps it."""
    if len(first_bytes) <= FLAGS_AT:
        raise ValueError(f"the flag is in byte {FLAGS_AT}; these are {len(first_bytes)} bytes")
    cleared = first_bytes[FLAGS_AT] & ~IN_USE
    return first_bytes[:FLAGS_AT] + bytes((cleared,)) + first_bytes[FLAGS_AT + 1 :]
