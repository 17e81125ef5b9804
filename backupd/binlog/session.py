"""One dump of the server's binary log into the spool, and what the server says meanwhile.

A dump begins a little before the end of what is here of the newest file: those bytes come again, and are compared. What
follows them is appended, from file to file. The server is asked meanwhile whether it contradicts that.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

from backupd.binlog import continuity
from backupd.binlog.connection_start import Start
from backupd.binlog.continuity import Seen, ending_at_server, head_of, resume_at
from backupd.binlog.spool_files import Spool, Spooled
from backupd.binlog.spool_repair import DamagedCopyError
from backupd.engine.binlog.events import FLAGS_AT, FORMAT, HEADER, IN_USE
from backupd.engine.receiver.connection import Request
from backupd.engine.receiver.endings import EndedError, EndKind
from backupd.engine.receiver.log_bytes import LogPosition, format_of
from backupd.engine.receiver.receiver import Receiver
from backupd.engine.server.binary_logs import SourceState
from backupd.engine.sql.client import Connection
from backupd.model.binlog import FIRST_EVENT, MAGIC, FilePosition, covers
from backupd.model.errors import CancelledError, ToolError
from backupd.model.server_facts import Position
from backupd.model.text import Clock

_NOTE_SECONDS = 30.0
_ROOM_SECONDS = 1.0
_ROOM_BYTES = 8 * 1024 * 1024
"""A server that is caught up with sends more than 100 MB in a second."""
_HEARTBEAT = 2.0
_HEARTBEATS_A_STALL = 4
_TURN = 0.1
_SYNC_BYTES = 8 * 1024 * 1024
_MOST_WAITING = 1024
_LONGEST_FORMAT = 4096
"""Bytes of a format description, of which 200 are usual."""


class Watch:
    """Of one connection, which began when the server was as ``begun`` says.

    ``poll`` and ``stall`` in seconds: how often the server is asked, and after how long without a byte nothing more is
    expected; ``quiet``: after how long it is asked only every ``seldom``.
    """

    def __init__(
        self, begun: SourceState, *, poll: float, stall: float, clock: Clock, quiet: float, seldom: float
    ) -> None:
        self._begun = begun
        self._last = begun
        self._looked_at = clock()
        self._poll = poll
        self._stall = stall
        self._quiet, self._seldom = quiet, max(poll, seldom)
        self._clock = clock
        now = time.monotonic()
        self._asked = now
        self._noted = 0.0
        self._moved = self._room = (0, now)

    def is_due(self) -> bool:
        """Is it time to ask the server?"""
        return time.monotonic() - self._asked >= (self._seldom if self.is_quiet() else self._poll)

    def is_quiet(self) -> bool:
        """Has nothing come for a while?"""
        return time.monotonic() - self._moved[1] >= self._quiet

    def asked(self) -> None:
        """The server was asked just now."""
        self._asked = time.monotonic()

    def is_room_due(self) -> bool:
        """Is it time to look how full the spool is?"""
        now, count = time.monotonic(), self._moved[0]
        if now - self._room[1] < _ROOM_SECONDS and count - self._room[0] < _ROOM_BYTES:
            return False
        self._room = (count, now)
        return True

    def moved(self, count: int) -> None:
        """``count``: bytes that have come."""
        if count != self._moved[0]:
            self._moved = (count, time.monotonic())

    def is_stalled(self) -> bool:
        """Has nothing come for as long as ``stall`` says?"""
        return time.monotonic() - self._moved[1] >= self._stall

    def contradiction(self, state: SourceState, number: int, size: int) -> str:
        """Why ``state`` cannot be the server that sent ``size`` bytes of file ``number`` before; "" when it can."""
        at = state.position
        if continuity.another(self._seen(self._begun), state):
            return "another server answers than the one that the log came from"
        if why := continuity.restored(self._seen(self._last), state):
            return f"the server's data was replaced: {why}"
        if state.basename != self._begun.basename or (int(at.file.rpartition(".")[2]), at.pos) < (number, size):
            return f"the server is at {at.file}:{at.pos}, before the last position received: its log was reset"
        if self._last.position.gtid and not covers(at.gtid, self._last.position.gtid, mariadb=state.mariadb):
            return "the server lacks transactions that it had executed: its log was reset"
        self._last = state
        self._looked_at = self._clock()
        return ""

    def is_note_due(self) -> bool:
        """Is it time to write down what the server is?"""
        now = time.monotonic()
        if self._noted and now - self._noted < _NOTE_SECONDS:
            return False
        self._noted = now
        return True

    @property
    def is_asked(self) -> bool:
        """Was the server asked since this began?"""
        return self._last is not self._begun

    @property
    def position(self) -> Position:
        """Where the server was at the last look."""
        return self._last.position

    @property
    def seen(self) -> Seen:
        """What is to be remembered of the server, as of the last look that contradicted nothing."""
        return self._seen(self._last)

    def _seen(self, state: SourceState) -> Seen:
        return continuity.seen_now(state, self._looked_at)


@dataclass(frozen=True, slots=True)
class Question:
    """Where does the server stand? Asked at ``asked_at``, when ``received`` was here, as of Session."""

    asked_at: datetime
    received: FilePosition
    state: Future[SourceState]


def answered(ask: Callable[[], SourceState]) -> Future[SourceState]:
    """What ``ask`` will give, in a thread of its own: a server that does not let in anybody new may still send its
    binary log."""
    answer: Future[SourceState] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001  carried to who waits for the answer
            answer.set_exception(error)

    threading.Thread(target=run, name="look", daemon=True).start()
    return answer


@dataclass(frozen=True, slots=True)
class Acknowledging:
    """How commits at the server are acknowledged. ``attached``: from this dump on; else it only catches up, with what
    comes brought to the disk. ``durable_to``: up to where that may be asked for which the dump begins with, a byte of
    its first file; None: whatever is on this disk is durable.

    ``stored_at``: up to where the destinations have a branch (file number and position), where they must have it before
    it is acknowledged; ``on_asked`` hears that somebody waits for that, and ``alarm`` can be read when there is more.
    ``ahead``: may a position in a branch be acknowledged before they have it, where they are that many seconds behind?
    """

    attached: bool
    durable_to: int | None = None
    stored_at: Callable[[str], FilePosition | None] | None = None
    on_asked: Callable[[], None] = lambda: None
    alarm: int | None = None
    ahead: Callable[[str, FilePosition, float], bool] = lambda _branch, _position, _behind: False


@dataclass(frozen=True, slots=True)
class End:
    """How the dump ended; ``said``: the server's last words."""

    kind: EndKind
    said: str


class _DivergedError(Exception):
    """The server's file is not the one that is here."""


class _OtherFileError(Exception):
    """The file that was asked for has ended."""


class _CopySink:
    """One file, as it comes."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.size = 0
        self.put(MAGIC)

    def follow(self, name: str) -> None:
        raise _OtherFileError(name)

    def describe(self, description: bytes, seconds: int, server_id: int) -> None:
        """The dump begins with the file: it describes itself."""

    def put(self, data: bytes | memoryview) -> None:
        self.size += _write(self._descriptor, data)

    def take_back(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        os.lseek(self._descriptor, size, os.SEEK_SET)
        self.size = size

    def close(self) -> None:
        os.close(self._descriptor)


def _write(descriptor: int, data: bytes | memoryview) -> int:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.write(descriptor, view[done:])
    return done


def heartbeat_for(stall: float) -> float:
    """Seconds between heartbeats, where a silence of ``stall`` seconds means that a connection is dead."""
    return min(_HEARTBEAT, stall / _HEARTBEATS_A_STALL)


def fetch(
    connection: Connection,
    spool: Spool,
    name: str,
    *,
    connection_id: int,
    stall: float,
    cancel: threading.Event,
    at_least: int = 0,
    source_id: int | None = None,
) -> Path:
    """Copy one of the server's files as it is now into ``spool.incoming``: as it comes, damaged or not. ``at_least``:
    its size right before, as the server lists it. A dump that was broken off (a shutdown; KILL QUERY on MariaDB) ends
    with the same message as one of which everything came. ``source_id``: as of Session.

    Raises ServerError, ToolError (also when nothing has come for ``stall`` seconds), MisnamedError, CancelledError,
    OSError.
    """
    spool.clear_incoming()
    target = spool.incoming / name
    request = Request(name, FIRST_EVENT, connection_id, heartbeat_for(stall), ends=True, source_id=source_id)
    with contextlib.closing(_CopySink(target)) as sink, Receiver(connection, request, sink, strict=False) as receiver:
        size, moved = 0, time.monotonic()
        while True:
            if cancel.is_set():
                raise CancelledError(f"stopped while {name} was copied from {connection.address}")
            try:
                receiver.receive(_TURN)
            except _OtherFileError:
                return target
            except EndedError as end:
                if end.kind is EndKind.ALL and sink.size >= at_least:
                    return target
                said = f"it ended after {sink.size} of {at_least} bytes" if end.kind is EndKind.ALL else end.said
                raise ToolError(
                    f"{name} cannot be copied from {connection.address}", detail=said, hint="backupd retries"
                ) from end
            if sink.size != size:
                size, moved = sink.size, time.monotonic()
            if time.monotonic() - moved > stall:
                raise ToolError(
                    f"no data of {name} was received from {connection.address} for {stall:.0f} s",
                    hint="backupd retries",
                )


class Session:
    """Receives from ``start`` on; a context manager. ``written``: how far the server had written the first file right
    before, None where it had begun another one since. ``is_whole``: asks the server whether a file has just this size
    and a successor; ``follows``: whether it has nothing between two files, which are not neighbours by their numbers.
    ``stall``: as of Pace. ``source_id``: server id of the server that was asked for all that; None: not known. Behind
    the same address another one may answer by now, of which nothing belongs to this branch. ``acknowledging``: as a
    semi-synchronous replica, see there; the dump begins no later than at a position that is durable then.

    ``end`` is set when the dump has ended. ``diverged``: the server's first file is not the one that is here, or
    shorter; nothing was taken then. ``current``: the file that is being written now; None until the first one was found
    to go on from what is here.
    """

    def __init__(
        self,
        spool: Spool,
        connection: Connection,
        start: Start,
        *,
        connection_id: int,
        written: int | None,
        stall: float,
        is_whole: Callable[[int, int], bool],
        follows: Callable[[int, int], bool] = lambda _number, _following: True,
        source_id: int | None = None,
        acknowledging: Acknowledging | None = None,
    ) -> None:
        self.start = start
        self.end: End | None = None
        self.diverged = False
        self.current: Spooled | None = None
        self.moved = 0
        """Bytes of files that came: grows as long as anything comes from the server."""
        self._spool, self._connection = spool, connection
        self._connection_id, self._written, self._heartbeat = connection_id, written, heartbeat_for(stall)
        self._is_whole, self._follows, self._source_id = is_whole, follows, source_id
        self._acknowledging = acknowledging
        self._waiting: deque[tuple[LogPosition, float]] = deque()
        """What is not acknowledged yet, and since when that is asked for."""
        self._behind = math.inf
        """Seconds that the last of it took which the destinations have."""
        self._unsynced = 0
        self._open = contextlib.ExitStack()
        self._receiver: Receiver | None = None
        self._kept: Spooled | None = None
        """What is compared still."""
        self._whole = False
        """Is it compared from its first event on?"""
        self._fresh: tuple[int, str] | None = None
        """The file in ``incoming``, whose head has not come yet."""
        self._descriptor = -1
        self._size = 0

    def __enter__(self) -> Self:
        self._spool.clear_incoming()
        first = FIRST_EVENT
        if self.start.kept is None:
            self._begin(self.start.number, self.start.name)
        else:
            first = self._resume(self.start.kept)
        request = Request(
            self.start.name,
            first,
            self._connection_id,
            self._heartbeat,
            source_id=self._source_id,
            semi_sync=self.acknowledges,
        )
        alarm = self._acknowledging.alarm if self._acknowledging is not None else None
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            if not self.diverged:
                self._receiver = stack.enter_context(
                    Receiver(self._connection, request, self, on_asked=self._was_asked, alarm=alarm)
                )
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._open.close()

    def receive(self, seconds: float) -> None:
        """Take what comes for so long. Raises DamagedDumpError, MisnamedError, OSError, and as ``is_whole``."""
        if self._receiver is not None:
            try:
                self._receiver.receive(seconds)
            except _DivergedError:
                self.diverged = True
            except EndedError as end:
                self.end = End(end.kind, end.said)
        if self._kept is not None and self._written is not None and self._written <= self._size:
            self.diverged = True  # the server has less than what is here

    def is_written(self, position: Position) -> None:
        """How far the server has written by now."""
        if position.file == self.start.name:
            self._written = position.pos

    @property
    def acknowledges(self) -> bool:
        """Do commits at the server wait for what is received here?"""
        return self._acknowledging is not None and self._acknowledging.attached

    def acknowledge_stored(self) -> None:
        """Acknowledge what the destinations have by now."""
        if self._acknowledging is None or self._receiver is None or self._acknowledging.stored_at is None:
            return
        stored = self._acknowledging.stored_at(self.start.branch.id) if self._waiting else None
        position: LogPosition | None = None
        while self._waiting and stored is not None and self._coordinate(self._waiting[0][0]) <= stored:
            position, asked = self._waiting.popleft()
            self._behind = time.monotonic() - asked
        try:
            if position is not None:
                self._receiver.acknowledge(position)
            self._acknowledge_ahead(self._acknowledging)
        except EndedError as end:
            self.end = End(end.kind, end.said)

    @property
    def received(self) -> FilePosition:
        """Number of the current file, and its size; (0, 0) before anything was taken."""
        if self.current is None:
            return 0, 0
        return self.current.number, self.current.size if self._fresh is not None else self._size

    @property
    def dumped(self) -> str:
        """The file that the server sends now."""
        return self._receiver.file if self._receiver is not None else self.start.name

    @property
    def thread_id(self) -> int:
        """The dump's id at the server; 0 without one."""
        return self._receiver.thread_id if self._receiver is not None else 0

    @property
    def silent_for(self) -> float:
        """Seconds since anything came, heartbeats included."""
        return self._receiver.silent_for if self._receiver is not None else 0.0

    # --- as the sink of the receiver

    @property
    def size(self) -> int:
        """Where what comes next belongs."""
        return self._size

    def follow(self, name: str) -> None:
        """The server goes on with another file."""
        if self._kept is not None:
            raise _DivergedError
        number = self.start.branch.number(name)
        self._expect(number, name)
        if self._fresh is not None:
            self._take(*self._fresh)
        self._sync()
        self._close()
        if self.current is not None:
            self.current = replace(self.current, size=self._size)
        self._begin(number, name)

    def describe(self, description: bytes, seconds: int, server_id: int) -> None:
        """Was the file that is here begun by the same server at the same second?"""
        if self._kept is None:
            return
        with self._kept.path.open("rb") as file:
            file.seek(FIRST_EVENT)
            header = file.read(HEADER.size)
            when, kind, server, length, _following, _flags = HEADER.unpack(header)
            mine = format_of(header + file.read(max(0, min(length, _LONGEST_FORMAT) - HEADER.size)))
        if (kind, when, server, mine) != (FORMAT, seconds, server_id, description):
            raise _DivergedError

    def put(self, data: bytes | memoryview) -> None:
        """Bytes of the file: compared where they are here, else appended."""
        self.moved += len(data)
        if self._kept is not None:
            data = self._compare(self._kept, data)
        if not len(data):
            return
        if self.current is not None and self._fresh is None and self.current.ended is not None:
            self.current = self._spool.cut(self.current, self._size)  # it ended too early here
        self._size += _write(self._descriptor, data)
        self._unsynced += len(data)
        if self._unsynced > _SYNC_BYTES:  # else the first commit that waits for this end would pay for all of it
            self._sync()
        if self._fresh is not None and head_of(self._spool.incoming / self._fresh[1]) is not None:
            self._take(*self._fresh)

    def take_back(self, size: int) -> None:
        """What was appended behind ``size`` is damaged."""
        if self._kept is None:
            os.ftruncate(self._descriptor, size)
            self._size = size

    # --- how

    def _sync(self) -> None:
        """What was received of the file is on the disk; nothing of it is acknowledged otherwise, now or by the next
        dump."""
        if self._acknowledging is not None:
            try:
                os.fdatasync(self._descriptor)
            except OSError:
                file = self._kept or self.current
                if file is not None and self._fresh is None:  # what is in ``incoming`` is thrown away
                    self._spool.distrust(file)
                raise
        self._unsynced = 0

    def _was_asked(self, position: LogPosition) -> None:
        """Commits up to ``position`` wait. Its file is synced where another one has begun since."""
        if self._acknowledging is None or self._receiver is None:
            return
        if self._fresh is not None and self._coordinate(position)[0] >= self._fresh[0]:
            return  # its head has not come: it would not be kept
        if self._kept is None and self._fresh is None:  # what is compared was synced before
            self._sync()
        if self._acknowledging.stored_at is None:
            self._receiver.acknowledge(position)
        else:
            self._wait(position, self._acknowledging)

    def _wait(self, position: LogPosition, acknowledging: Acknowledging) -> None:
        """``position`` is for the destinations to have first, but for what is acknowledged ahead of them."""
        if len(self._waiting) >= _MOST_WAITING:  # a server that waits for nothing asks again and again
            self._waiting.pop()
        self._waiting.append((position, time.monotonic()))
        acknowledging.on_asked()
        self._acknowledge_ahead(acknowledging)

    def _acknowledge_ahead(self, acknowledging: Acknowledging) -> None:
        if self._receiver is None or not self._waiting:
            return
        position, _asked = self._waiting[-1]
        behind = max(self._behind, time.monotonic() - self._waiting[0][1])
        if acknowledging.ahead(self.start.branch.id, self._coordinate(position), behind):
            self._receiver.acknowledge(position)

    def _coordinate(self, position: LogPosition) -> FilePosition:
        return self.start.branch.number(position.file) or 0, position.pos

    def _resume(self, kept: Spooled) -> int:
        """Where the dump begins."""
        found = resume_at(kept.path)
        if found is None:
            self.diverged = True
            return FIRST_EVENT
        if kept.ended is None and found.end < kept.size and not found.is_damaged:
            kept = self._spool.cut(kept, found.end)  # half an event, written when the process was killed
        durable_to = self._acknowledging.durable_to if self._acknowledging is not None else None
        self._size = found.start if durable_to is None else min(found.start, durable_to)
        self._descriptor = os.open(kept.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._kept, self._whole = kept, self._size == FIRST_EVENT
        self._sync()
        if self._size == kept.size:
            self.current, self._kept = kept, None
        return self._size

    def _compare(self, kept: Spooled, data: bytes | memoryview) -> bytes | memoryview:
        """Gives what is not here yet. Raises _DivergedError."""
        size = min(len(data), kept.size - self._size)
        here, there = bytearray(os.pread(self._descriptor, size, self._size)), bytearray(data[:size])
        if self._size <= FLAGS_AT < self._size + size:
            here[FLAGS_AT - self._size] &= ~IN_USE
            there[FLAGS_AT - self._size] &= ~IN_USE
        if here != there:
            raise _DivergedError
        self._size += size
        if self._size == kept.size:
            self.current, self._kept = kept, None
            if self._whole:
                self._spool.trust(kept)
        return data[size:]

    def _begin(self, number: int, name: str) -> None:
        path = self._spool.incoming / name
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = _write(self._descriptor, MAGIC)
        self._fresh = (number, name)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _expect(self, number: int, name: str) -> None:
        """A name that was altered on its way would make one file another. Raises DamagedCopyError."""
        before = self._fresh[0] if self._fresh is not None else self.current.number if self.current is not None else 0
        if number != before + 1 and (number < before or not self._follows(before, number)):
            due = f"the file after {self.start.branch.file(before)}"
            raise DamagedCopyError(name, self._connection.address, f"it was received where {due} was expected")

    def _take(self, number: int, name: str) -> None:
        """Its head has come: it becomes the branch's file, and the one before it has ended."""
        if (last := self.current) is not None and last.ended is None:
            size = last.path.stat().st_size
            is_next = number == last.number + 1
            ending = ending_at_server(last.path, size, lambda: is_next and self._is_whole(last.number, size))
            self._spool.end(last, ending)
        self.current = self._spool.take(self.start.branch, number, name)
        self._fresh = None
