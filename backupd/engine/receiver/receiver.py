"""Receives a server's binary logs, file by file, and gives their bytes to a sink.

One thread reads the connection and writes the bytes; it holds one buffer of half a MiB, however long an event is. What
is slow behind the sink (a destination, say) does not slow the dump: the sink writes to a file.

An acknowledgement (semi-synchronous replication) goes back over the same connection, at any time, as a packet with the
sequence number 0; it covers everything before its position.
"""

from __future__ import annotations

import hashlib
import select
import ssl
import time
from collections.abc import Callable, Collection
from typing import Self

from backupd.engine.receiver.connection import Request, begin
from backupd.engine.receiver.endings import EndedError, EndKind
from backupd.engine.receiver.log_bytes import LogBytes, LogPosition, Sink
from backupd.engine.receiver.packets import Packets
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Position

_PATIENCE = 5.0
_ACKNOWLEDGEMENT = 0xEF
_LOWEST_ID, _HIGHEST_ID = 2**31, 2**32 - 2


class Receiver:
    """A dump, as ``request`` says; a context manager. ``strict``: as of LogBytes. Raises ServerError on entering.

    ``on_asked``: hears after each read up to where the server waits for an acknowledgement. ``alarm``: a descriptor; as
    long as it can be read, ``receive`` takes what is here and returns."""

    def __init__(
        self,
        connection: Connection,
        request: Request,
        sink: Sink,
        *,
        strict: bool = True,
        on_asked: Callable[[LogPosition], None] = lambda _position: None,
        alarm: int | None = None,
    ) -> None:
        self._connection = connection
        self._request = request
        self._bytes = LogBytes(
            sink,
            request.file,
            request.start,
            connection.address,
            strict=strict,
            source_id=request.source_id,
            semi_sync=request.semi_sync,
        )
        self._on_asked, self._alarm = on_asked, alarm
        self._packets = Packets()
        self._heard = 0.0
        self._is_alarmed = False

    def __enter__(self) -> Self:
        self._session, self._socket = begin(self._connection, self._request)
        self._heard = time.monotonic()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        if self._alarm is not None:
            self._poll.register(self._alarm, select.POLLIN)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._session.break_off()
        self._session.close()

    @property
    def thread_id(self) -> int:
        """The connection's id at the server."""
        return self._session.thread_id

    @property
    def silent_for(self) -> float:
        """Seconds since anything came, heartbeats included."""
        return time.monotonic() - self._heard

    @property
    def file(self) -> str:
        """The file that the server sends now."""
        return self._bytes.file

    def receive(self, seconds: float) -> None:
        """Take what comes for so long, or until the alarm is raised. Raises EndedError, DamagedDumpError,
        MisnamedError, and what the sink raises."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not (count := self._read(left)):
                return
            self._heard = time.monotonic()
            self._packets.came(count)
            self._packets.skip(self._bytes.run(*self._packets.here()))
            self._bytes.take(self._packets.pieces())
            if (asked := self._bytes.asked()) is not None:
                self._on_asked(asked)
            self._heard = time.monotonic()  # what was written to a slow disk meanwhile is no silence of the server
            if self._is_alarmed:
                return

    def acknowledge(self, position: LogPosition) -> None:
        """Everything up to ``position`` is durable: commits that wait for that end. Raises EndedError."""
        payload = bytes([_ACKNOWLEDGEMENT]) + position.pos.to_bytes(8, "little") + position.file.encode()
        try:
            self._socket.settimeout(_PATIENCE)
            self._socket.sendall(len(payload).to_bytes(3, "little") + b"\0" + payload)
        except OSError as error:
            raise EndedError(EndKind.LOST, str(error)) from error

    def _read(self, seconds: float) -> int:
        """0: nothing came."""
        try:
            if not self._is_ready(seconds):
                return 0
            self._socket.settimeout(max(seconds, 0.001))
            count = self._socket.recv_into(self._packets.space())
        except TimeoutError:
            return 0
        except OSError as error:
            raise EndedError(EndKind.LOST, str(error)) from error
        if not count:
            raise EndedError(EndKind.LOST, "the server closed the connection")
        return count

    def _is_ready(self, seconds: float) -> bool:
        """Has anything come, before the alarm was raised?"""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        found = {descriptor for descriptor, _event in self._poll.poll(max(seconds, 0.001) * 1000)}
        self._is_alarmed = self._alarm in found
        return self._socket.fileno() in found


class _Nowhere:
    """Takes nothing: a dump that begins where the log ends has no bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def follow(self, name: str) -> None:
        """The log was rotated meanwhile."""

    def describe(self, description: bytes, seconds: int, server_id: int) -> None:
        """Any will do."""

    def put(self, data: bytes | memoryview) -> None:
        self.size += len(data)

    def take_back(self, size: int) -> None:
        self.size = size


def trial(connection: Connection, position: Position, server_id: int) -> str:
    """Why the binary log cannot be received from ``position``, where it ends, on; "" where it can. Raises
    ServerError."""
    request = Request(position.file, position.pos, server_id, _PATIENCE, ends=True)
    with Receiver(connection, request, _Nowhere(position.pos), strict=False) as receiver:
        try:
            receiver.receive(_PATIENCE)
        except EndedError as end:
            return "" if end.kind is EndKind.ALL else end.said
    return f"the server sent no end of it within {_PATIENCE:.0f} s"


def connection_id(server: str, installation: str, taken: Collection[int] = ()) -> int:
    """The server id that the stream of ``server`` presents: always the same for one installation, far from those that
    people give, and none of ``taken``."""
    span = _HIGHEST_ID - _LOWEST_ID
    number = int.from_bytes(hashlib.sha256(f"{installation}/{server}".encode()).digest()[:8], "big")
    while (found := _LOWEST_ID + number % span) in taken:
        number += 1
    return found
