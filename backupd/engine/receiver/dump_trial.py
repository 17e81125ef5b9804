"""Would a server send its binary log from a position on? Asked as a replica asks, and broken off at the first event.

The server's own answer counts: it alone knows which files it still has, and whether a GTID is of its history. No is an
error (1236), before any event or behind those that every dump begins with.

A file and a byte say nothing of the history that they are of: after RESET MASTER, or on another server, there are files
of the same names. So a dump by position tells when its file was begun, too.
"""

from __future__ import annotations

import select
import ssl
import time
from dataclasses import dataclass

from backupd.engine.binlog.events import CHECKPOINT, FORMAT, GTID_LIST, PREVIOUS_GTIDS, ROTATE, START_ENCRYPTION
from backupd.engine.receiver.connection import Request, begin
from backupd.engine.receiver.log_bytes import HEARTBEATS
from backupd.engine.receiver.packets import Packets
from backupd.engine.sql.client import Connection
from backupd.model.errors import ServerError
from backupd.model.server_facts import Position

_SECONDS = 10.0
_FIRST_BYTE = 4
"""Of a binary log, behind its magic number."""
_ERROR, _END = 0xFF, 0xFE
_WORDS = 9
"""Where those of an error begin: 0xff, its number, '#' and a state of five characters."""
_KIND = 5
"""Where the type of an event is."""
_BEFORE = frozenset({ROTATE, FORMAT, GTID_LIST, CHECKPOINT, START_ENCRYPTION, PREVIOUS_GTIDS, *HEARTBEATS})
"""Events with which a dump begins although what was asked for may not be there."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a server answers. ``refused``: why it does not send what follows, in its own words, "" where it does.
    ``begun``: when the file was begun in which that is, in seconds of the server's clock, 0 where it did not say."""

    refused: str = ""
    begun: int = 0


def try_dump(connection: Connection, position: Position, server_id: int, *, by_gtid: bool) -> Trial:
    """Ask for what follows ``position``. ``by_gtid``: by the GTIDs of ``position``, as MariaDB is asked, else by file
    and byte. ``server_id``: no other replica's. Raises ServerError: it cannot be reached, or the account may not."""
    request = Request(
        "" if by_gtid else position.file,
        _FIRST_BYTE if by_gtid else position.pos,
        server_id,
        _SECONDS,
        ends=True,
        gtids=position.gtid if by_gtid else "",
    )
    session, opened = begin(connection, request)
    begun = 0
    try:
        packets, give_up = Packets(), time.monotonic() + _SECONDS
        while (left := give_up - time.monotonic()) > 0:
            is_here = isinstance(opened, ssl.SSLSocket) and opened.pending()
            if not is_here and not select.select([opened], [], [], left)[0]:
                break
            if not (count := opened.recv_into(packets.space())):
                break
            packets.came(count)
            for piece in packets.pieces():
                packet = bytes(piece.data)
                begun = begun or _begun(packet)
                if (answer := _answer(packet)) is not None:
                    return Trial(answer, begun)
    except OSError as error:
        raise ServerError(
            f"lost the server at {connection.address} while its binary log was asked for", detail=str(error)
        ) from error
    finally:
        session.break_off()
        session.close()
    raise ServerError(f"the server at {connection.address} sent no event of its binary log within {_SECONDS:.0f} s")


def _begun(packet: bytes) -> int:
    """The time of the event that every file begins with; 0 of any other packet."""
    if packet[:1] != b"\0" or len(packet) <= _KIND or packet[_KIND] != FORMAT:
        return 0
    return int.from_bytes(packet[1:_KIND], "little")


def _answer(packet: bytes) -> str | None:
    """What the server says to the request; None for an event of the beginning, behind which more comes."""
    if packet[:1] == bytes([_ERROR]):
        return packet[_WORDS:].decode("utf-8", "replace") or "it refuses"
    if packet[:1] == bytes([_END]):
        return ""
    return None if len(packet) > _KIND and packet[_KIND] in _BEFORE else ""
