"""Files on their way to and from an SFTP server. Both ways survive a lost connection: they go on on a new one at the
byte where the old one ended."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from backupd.model.errors import DestinationError
from storage.sftp.session import Session, Sessions
from storage.sftp.wire import BLOCK, END, WINDOW, Attributes, LostError, StatusError, Wire

_FILE_MODE = 0o640
SYNC_SECONDS = 40.0
"""How long a disk may take to make a file durable."""
_IN_A_ROW = 3
"""Lost connections without a byte in between after which nobody tries again."""

Result = TypeVar("Result")


class Upload:
    """A new file at ``path``. What the server has not confirmed is kept (2 MiB), to be sent again.

    Raises StatusError, LostError, DestinationError. Afterwards: ``finish`` or ``give_up``.
    """

    def __init__(self, sessions: Sessions, path: str) -> None:
        self._sessions = sessions
        self._path = path
        self._session, self._handle = sessions.begin(lambda wire: wire.create(path, _FILE_MODE))
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._under_way: deque[tuple[int, int, bytes]] = deque()
        self._size = 0
        self._lost = 0
        self._over = False

    def write(self, chunk: bytes) -> None:
        """Send ``chunk``; waits while too much is unconfirmed."""
        for start in range(0, len(chunk), BLOCK):
            piece = chunk[start : start + BLOCK]
            self._waiting.append((self._size, piece))
            self._size += len(piece)
            self._steadily(lambda wire: self._send(wire, WINDOW - 1))

    def finish(self) -> Attributes:
        """Everything has arrived and is durable."""
        found = self._steadily(self._end)
        self._over = True
        self._sessions.give(self._session)
        if found.size != self._size:
            raise StatusError(END, f"{self._size} bytes were sent, and the file has {found.size}")
        return found

    def give_up(self, *, sure: bool) -> None:
        """Let the connection go; ``sure``: what it said last was heard to its end."""
        if self._over:
            return
        self._over = True
        _part(self._sessions, self._session, self._handle, sure=sure)

    def _send(self, wire: Wire, open_ones: int) -> None:
        """Send what waits, and let no more than ``open_ones`` be unconfirmed."""
        while self._waiting:
            offset, piece = self._waiting[0]
            self._under_way.append((wire.ask_write(self._handle, offset, piece), offset, piece))
            self._waiting.popleft()
            self._confirm(wire, WINDOW)
        self._confirm(wire, open_ones)

    def _confirm(self, wire: Wire, open_ones: int) -> None:
        while len(self._under_way) > open_ones:
            wire.written(self._under_way[0][0])
            self._under_way.popleft()
            self._lost = 0

    def _end(self, wire: Wire) -> Attributes:
        self._send(wire, 0)
        return wire.finish(self._handle, seconds=SYNC_SECONDS)

    def _steadily(self, step: Callable[[Wire], Result]) -> Result:
        while True:
            try:
                return step(self._session.wire)
            except LostError as error:
                self._lost += 1
                if error.hangs or self._lost >= _IN_A_ROW:
                    raise
                self._sessions.drop(self._session)
                self._session, self._handle = self._sessions.begin(lambda wire: wire.reopen(self._path))
                self._waiting.extendleft(reversed([(offset, piece) for _number, offset, piece in self._under_way]))
                self._under_way.clear()


class Download(io.RawIOBase):
    """``length`` bytes of the file at ``path`` from ``offset`` (to its end when None); never others, never fewer.

    ``failed`` turns an error of reading into one of ours; opening raises StatusError, LostError, DestinationError.
    One piece is asked for at first, then more and more of them ahead, up to WINDOW.
    """

    def __init__(
        self,
        sessions: Sessions,
        path: str,
        offset: int,
        length: int | None,
        failed: Callable[[StatusError | LostError], DestinationError],
    ) -> None:
        super().__init__()
        self._sessions = sessions
        self._path = path
        self._failed = failed
        self._ahead: deque[tuple[int, int]] = deque()
        self._width = 1
        self._lost = 0
        self._rest = memoryview(b"")
        self._session: Session | None = None
        self._session, (self._handle, self._file) = sessions.begin(self._open)
        self._at = self._asked = offset
        self._end = self._file.size if length is None else min(self._file.size, offset + length)

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # Buffer is not in 3.11
        """The next bytes; asked for again on a new connection where the old one was lost. Raises DestinationError."""
        if not self._rest and self._at < self._end:
            try:
                self._rest = memoryview(self._piece())
            except (StatusError, LostError) as error:
                raise self._failed(error) from error
            except BaseException:  # in the middle of an answer, perhaps
                self._leave(sure=False)
                raise
        count = min(len(buffer), len(self._rest))
        memoryview(buffer)[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        """Close the file there and give the connection back."""
        if not self.closed:
            self._leave(sure=True)
        super().close()

    def _open(self, wire: Wire) -> tuple[bytes, Attributes]:
        handle = wire.open(self._path)
        return handle, wire.fstat(handle)

    def _piece(self) -> bytes:
        while True:
            if self._session is None:
                self._session, (self._handle, file) = self._sessions.begin(self._open)
                if file != self._file:
                    raise StatusError(END, "the connection was lost, and by then there was another file in its place")
            try:
                return self._next(self._session.wire)
            except LostError as error:
                self._leave(sure=False)
                self._lost += 1
                if error.hangs or self._lost >= _IN_A_ROW:
                    raise
            except StatusError as error:
                if error.code != END:
                    raise
                raise StatusError(END, f"it ends after {self._at} bytes, and it had {self._file.size}") from error

    def _next(self, wire: Wire) -> bytes:
        while len(self._ahead) < self._width and self._asked < self._end:
            wanted = min(BLOCK, self._end - self._asked)
            self._ahead.append((wire.ask_bytes(self._handle, self._asked, wanted), wanted))
            self._asked += wanted
        number, wanted = self._ahead.popleft()
        piece = wire.bytes_of(number)
        if not 0 < len(piece) <= wanted:
            raise LostError(f"the server sent {len(piece)} bytes where {wanted} were asked for")
        self._at += len(piece)
        if len(piece) < wanted:  # what was asked for ahead is not what comes next
            wire.settle()
            self._ahead.clear()
            self._asked = self._at
        self._width = min(WINDOW, self._width * 2)
        self._lost = 0
        return piece

    def _leave(self, *, sure: bool) -> None:
        """Give the connection back; ``sure``: what it said last was heard to its end."""
        session, self._session = self._session, None
        self._ahead.clear()
        self._asked, self._width = self._at, 1
        if session is not None:
            _part(self._sessions, session, self._handle, sure=sure)


def _part(sessions: Sessions, session: Session, handle: bytes, *, sure: bool) -> None:
    """Close a file and give its connection back; drop a connection that was not heard out for ``sure``. An open file
    keeps its room on the disk, even when it has no name any more."""
    if not sure:
        sessions.drop(session)
        return
    try:
        session.wire.close(handle)
    except LostError:
        sessions.drop(session)
    except StatusError:  # what could not be written is told with the close, too
        sessions.give(session)
    else:
        sessions.give(session)
