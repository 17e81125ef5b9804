"""Binary logs of both families made of nothing but GTIDs: which, in which file, and where each transaction ends."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

WHEN = 1_790_000_000
_FORMAT, _QUERY, _XID = 15, 2, 16
_GTID, _PREVIOUS = 33, 35
_MARIADB_GTID, _MARIADB_LIST = 162, 163

MariadbGroup = tuple[int, int, int]
"""Domain, server, number."""
MysqlGroup = tuple[str, int]
"""UUID, number."""


@dataclass(frozen=True)
class Written:
    """``data``: the file; ``ends``: the byte behind each of its transactions, in their order."""

    data: bytes
    ends: tuple[int, ...]


class _File:
    def __init__(self, version: bytes) -> None:
        self.data = bytearray(b"\xfebin")
        self.add(
            _FORMAT, struct.pack("<H", 4) + version.ljust(50, b"\0") + struct.pack("<IB", 0, 19) + bytes(180) + b"\x01"
        )

    def add(self, kind: int, body: bytes, server: int = 1) -> None:
        length = 19 + len(body) + 4
        event = struct.pack("<IBIIIH", WHEN, kind, server, length, len(self.data) + length, 0) + body
        self.data.extend(event + struct.pack("<I", zlib.crc32(event)))

    def rows(self, server: int, number: int, *, begun: bool) -> int:
        """A transaction's statement and its end; gives where that is. ``begun``: its GTID says that it begins."""
        if not begun:
            self.add(_QUERY, struct.pack("<IIBHH", 1, 0, 4, 0, 0) + b"shop\0BEGIN", server)
        self.add(_QUERY, struct.pack("<IIBHH", 1, 0, 4, 0, 0) + b"shop\0INSERT INTO shop.t VALUES (1)", server)
        self.add(_XID, struct.pack("<Q", number), server)
        return len(self.data)


def mariadb_log(before: Iterable[MariadbGroup], groups: Sequence[MariadbGroup]) -> Written:
    """``before``: the file's list of GTIDs."""
    file, listed = _File(b"10.11.19-MariaDB-log"), list(before)
    file.add(_MARIADB_LIST, struct.pack("<I", len(listed)) + b"".join(struct.pack("<IIQ", *one) for one in listed))
    ends = []
    for domain, server, number in groups:
        file.add(_MARIADB_GTID, struct.pack("<QIB", number, domain, 0) + bytes(6), server)
        ends.append(file.rows(server, number, begun=True))
    return Written(bytes(file.data), tuple(ends))


def mysql_log(before: Mapping[str, Iterable[int]], groups: Sequence[MysqlGroup]) -> Written:
    """``before``: the numbers of each UUID that the file says were executed."""
    file = _File(b"8.0.36")
    body = struct.pack("<Q", len(before))
    for uuid, numbers in sorted(before.items()):
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and runs[-1][1] == number:
                runs[-1][1] = number + 1
            else:
                runs.append([number, number + 1])
        body += UUID(uuid).bytes + struct.pack("<Q", len(runs)) + b"".join(struct.pack("<QQ", *run) for run in runs)
    file.add(_PREVIOUS, body)
    ends = []
    for uuid, number in groups:
        file.add(_GTID, b"\x01" + UUID(uuid).bytes + struct.pack("<Q", number) + bytes(17))
        ends.append(file.rows(1, number, begun=False))
    return Written(bytes(file.data), tuple(ends))
