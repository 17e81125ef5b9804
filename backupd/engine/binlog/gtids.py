"""Events about global transaction ids, and the state that they add up to."""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import NamedTuple

from backupd.engine.binlog.events import Event
from backupd.model.gtid import MariadbGtids, MysqlGtids

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


def read_gtid_list(event: Event) -> MariadbGtids:
    """Raises ValueError."""
    *_, body, at, stop = event
    count = int.from_bytes(body[at : at + 4], "little") & 0x0FFFFFFF
    if at + 4 + count * _LISTED.size > stop:
        raise ValueError(f"a list of {count} GTIDs is longer than its event")
    last: dict[int, tuple[int, int]] = {}
    for number in range(count):
        domain, server, sequence = _LISTED.unpack_from(body, at + 4 + number * _LISTED.size)
        last[domain] = (server, sequence)
    return MariadbGtids(last)


class MysqlGtid(NamedTuple):
    """``source``: UUID, with ``:tag`` where there is one, empty in an anonymous event. ``micros``: of the commit on
    the server that wrote the log, 0 where it does not tell."""

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
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _variable(body: bytes, at: int) -> tuple[int, int]:
    """As many ones at the low end of the first byte as bytes follow it; 64 bits follow a byte of ones."""
    first = body[at]
    more = (~first & (first + 1)).bit_length() - 1
    if more >= 8:
        return int.from_bytes(body[at + 1 : at + 9], "little"), at + 9
    return int.from_bytes(body[at : at + 1 + more], "little") >> (more + 1), at + 1 + more


class MariadbState:
    """All that was executed, as MariaDB sees it: the last transaction of each domain."""

    def __init__(self, text: str) -> None:
        self.start(text)

    def add(self, source: str, server: int, number: int) -> None:
        """``source``: the domain."""
        self._last[int(source)] = (server, number)

    def start(self, state: str) -> None:
        self._last = dict(MariadbGtids.parse(state).last)

    def __str__(self) -> str:
        return str(MariadbGtids(self._last))


class MysqlState:
    """A set that grows by one, mostly at its end."""

    def __init__(self, text: str) -> None:
        self.start(text)

    def add(self, source: str, _server: int, number: int) -> None:
        runs = self._runs.setdefault(source, [])
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
            return
        place = bisect_right(runs, [number, number]) if runs else 0
        before = runs[place - 1] if place else None
        after = runs[place] if place < len(runs) else None
        if before is not None and before[0] <= number <= before[1]:
            return
        if before is not None and before[1] + 1 == number:
            before[1] = number
            if after is not None and after[0] == number + 1:
                before[1] = after[1]
                del runs[place]
        elif after is not None and after[0] == number + 1:
            after[0] = number
        elif after is None or after[0] != number:
            runs.insert(place, [number, number])

    def start(self, state: str) -> None:
        self._runs = {source: [[*run] for run in runs] for source, runs in MysqlGtids.parse(state).runs.items()}

    def __str__(self) -> str:
        return str(
            MysqlGtids(
                {source: tuple((first, last) for first, last in runs) for source, runs in self._runs.items() if runs}
            )
        )
