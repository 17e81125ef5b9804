"""Binary logs as a Galera node writes them, made of a list of what happened in its cluster: transactions of rows with
their seqno as Xid, statements that define something without one, and what leaves no event at all."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

WHEN = 1_790_000_000
SERVER_ID = 100
DOMAIN = 10


class Happened(Enum):
    """What used up one seqno. ``NOTHING``: a view, or a transaction that failed its certification."""

    ROWS = "rows"
    DDL = "ddl"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Written:
    """``data``: the file. ``ends``: seqno to the byte where its group ends, of what has events."""

    data: bytes
    ends: dict[int, int]


def write(history: Sequence[Happened], *, first: int, gtid: int = 1, schema: str = "shop") -> Written:
    """The file of a node in which ``history`` happened from seqno ``first`` on; ``gtid``: number of the first group;
    ``schema``: what is changed."""
    data = bytearray(b"\xfebin")

    def add(kind: int, body: bytes, flags: int = 0) -> None:
        length = 19 + len(body) + 4
        event = struct.pack("<IBIIIH", WHEN, kind, SERVER_ID, length, len(data) + length, flags) + body
        data.extend(event + struct.pack("<I", zlib.crc32(event)))

    version = b"10.11.19-MariaDB-log".ljust(50, b"\0")
    add(15, struct.pack("<H", 4) + version + struct.pack("<IB", 0, 19) + bytes(180) + b"\x01")
    before = (
        struct.pack("<I", 1) + struct.pack("<IIQ", DOMAIN, SERVER_ID, gtid - 1) if gtid > 1 else struct.pack("<I", 0)
    )
    add(163, before)
    ends = {}
    for seqno, happened in enumerate(history, start=first):
        if happened is Happened.NOTHING:
            continue
        standalone = happened is Happened.DDL
        add(162, struct.pack("<QIB", gtid, DOMAIN, int(standalone)) + bytes(6))
        gtid += 1
        defines, changes = f"CREATE TABLE {schema}.t{seqno} (i INT)", f"INSERT INTO {schema}.t VALUES (1)"
        text = f"{defines} /* xid=7 */" if standalone else changes
        add(2, struct.pack("<IIBHH", 1, 0, len(schema), 0, 0) + schema.encode() + b"\0" + text.encode())
        if not standalone:
            add(16, struct.pack("<Q", seqno))
        ends[seqno] = len(data)
    return Written(bytes(data), ends)
