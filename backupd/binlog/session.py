"""One run of the program that copies the binary log, and what the server says meanwhile.

What the program writes is compared, taken into the spool, and followed from file to file. The server is asked whether
it contradicts that, and whether it will remove a file too early: it removes a file when it was last written to longer
ago than its setting says, or when all its files together are larger than another setting allows. It looks when it
begins a new file and when it starts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Self

from backupd.binlog import continuity
from backupd.binlog.connection_start import Start
from backupd.binlog.continuity import Comparison, Seen, ending_at_server, head_of
from backupd.binlog.spool_files import Spool, Spooled
from backupd.binlog.spool_repair import DamagedCopyError
from backupd.engine.log_client import BinlogTool, EndKind, end_kind, log_client, not_made
from backupd.engine.server.binary_logs import Expiry, SourceState
from backupd.engine.sql.client import Connection
from backupd.model.binlog import Branch, covers, is_log_name
from backupd.model.errors import CancelledError, MisnamedError, ToolError
from backupd.model.text import Clock
from backupd.process.pipeline import Heard

_NOTE_SECONDS = 30.0
_ROOM_SECONDS = 1.0


class Watch:
    """Of one connection, which began when the server was as ``begun`` says.

    ``poll`` and ``stall`` in seconds: how often the server is asked, and after how long without a byte nothing more is
    expected.
    """

    def __init__(self, begun: SourceState, *, poll: float, stall: float, clock: Clock) -> None:
        self._begun = begun
        self._last = begun
        self._looked_at = clock()
        self._poll = poll
        self._stall = stall
        self._clock = clock
        now = time.monotonic()
        self._asked = self._room = now
        self._noted = 0.0
        self._moved = (0, now)

    def is_due(self) -> bool:
        """Is it time to ask the server?"""
        return time.monotonic() - self._asked >= self._poll

    def asked(self) -> None:
        """The server was asked just now."""
        self._asked = time.monotonic()

    def is_room_due(self) -> bool:
        """Is it time to look how full the spool is?"""
        now = time.monotonic()
        if now - self._room < _ROOM_SECONDS:
            return False
        self._room = now
        return True

    def moved(self, count: int) -> None:
        """``count`` changes with everything that comes."""
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
    def seen(self) -> Seen:
        """What is to be remembered of the server, as of the last look that contradicted nothing."""
        return self._seen(self._last)

    def _seen(self, state: SourceState) -> Seen:
        return continuity.seen_now(state, self._looked_at)


_EARLY = timedelta(hours=1)
_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class PurgeAlarm:
    """``file``: the oldest one that is not archived everywhere. ``at``: when the server may remove it; None: it is
    about to, by size; ``gone``: it has."""

    file: str
    message: str
    at: datetime | None = None
    gone: bool = False


def purge_alarm(number: int, written_until: datetime | None, state: SourceState, expiry: Expiry) -> PurgeAlarm | None:
    """``number``: of the oldest file that is not archived everywhere. ``written_until``: when the server wrote the last
    event of it, as far as known, by its own clock; None while it is still written to."""
    name = f"{state.basename}.{number:06d}"
    listed = {log.number: log for log in state.logs}
    if number not in listed:
        if number < state.logs[0].number:
            return PurgeAlarm(
                name,
                f"the server purged {name} before it was archived at every destination; the only copy may be in "
                "the spool",
                gone=True,
            )
        return None
    if number == state.logs[-1].number:
        return None  # never removed while the server writes to it
    if expiry.age is not None and written_until is not None:
        at = written_until + expiry.age
        if at - state.server_time <= max(_EARLY, expiry.age * _SHARE):
            return PurgeAlarm(
                name,
                f"the server will remove {name} from {at:%Y-%m-%d %H:%M} UTC on, and it is not archived everywhere yet",
                at,
            )
    if expiry.total_bytes is not None:
        size = sum(log.size for log in state.logs if log.number >= number)
        if size >= expiry.total_bytes * (1 - _SHARE):
            return PurgeAlarm(
                name,
                f"the server will soon remove {name} because its binary logs may take"
                f" {expiry.total_bytes} bytes, and it is not archived everywhere yet",
            )
    return None


@dataclass(frozen=True, slots=True)
class End:
    """How the program ended; ``said``: its last words."""

    kind: EndKind
    code: int
    said: str


class Copier(Heard):
    """The program, running; a context manager that leaves no process behind."""

    def ended(self) -> End | None:
        """None while it runs."""
        if (code := self.child.poll()) is None:
            return None
        self.voice.finish()
        said = self.last_words(20).strip()
        return End(end_kind(said), code, said)


def fetch(
    tool: BinlogTool,
    connection: Connection,
    spool: Spool,
    name: str,
    *,
    connection_id: int,
    stall: float,
    cancel: threading.Event,
) -> Path:
    """Copy one of the server's files as it is now into ``spool.incoming``.

    Raises ToolError (also when nothing has come for ``stall`` seconds), MisnamedError, CancelledError, OSError.
    """
    spool.clear_incoming()
    target = spool.incoming / name

    def collect() -> None:
        spool.collect(connection.address, lambda found: found == name)

    with log_client(tool, connection) as client, Copier(client.fetch(spool.intake, name, connection_id)) as copier:
        size, moved = -1, time.monotonic()
        while (end := copier.ended()) is None:
            collect()
            if cancel.wait(0.05):
                raise CancelledError(f"stopped while {name} was copied from {connection.address}")
            if target.exists() and (now := target.stat().st_size) != size:
                size, moved = now, time.monotonic()
            if time.monotonic() - moved > stall:
                raise ToolError(
                    f"no data of {name} was received from {connection.address} for {stall:.0f} s",
                    hint="backupd retries",
                )
    collect()
    refuse_misnamed(end, connection)
    if end.code != 0:
        raise ToolError(f"{name} cannot be copied from {connection.address}", detail=end.said, hint="backupd retries")
    return target


def refuse_misnamed(end: End, connection: Connection) -> None:
    """Raises MisnamedError where the program was told to write what it cannot reach, and is no binary log's name."""
    if end.kind is EndKind.MISNAMED and not is_log_name(name := not_made(end.said)):
        raise MisnamedError(name, connection.address)


@dataclass(slots=True)
class Session:
    """Copies from ``start`` on. ``written``: how far the server had written the first file right before, None where it
    had begun another one since. ``is_whole``: asks the server whether a file has just this size and a successor;
    ``follows``: whether it has nothing between two files, which are not neighbours by their numbers.

    ``tick`` moves what came into the spool. ``end`` is set when the program has ended. ``diverged``: how much of the
    first file is the same as what is here, once it is certain that the rest is not; nothing was taken then.
    """

    spool: Spool
    tool: BinlogTool
    connection: Connection
    start: Start
    connection_id: int
    written: int | None
    is_whole: Callable[[int, int], bool]
    follows: Callable[[int, int], bool] = lambda _number, _following: True
    end: End | None = None
    diverged: int | None = None
    current: Spooled | None = None
    """The file that is being written now; None until the first one was found to go on from what is here."""
    came: int = 0
    """Bytes that were not here before."""
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _copier: Copier | None = None
    _comparison: Comparison | None = None
    _kept_size: int = 0

    def __enter__(self) -> Self:
        self.spool.clear_incoming()
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(log_client(self.tool, self.connection))
            command = client.stream(self.spool.intake, self.start.name, self.connection_id)
            self._copier = stack.enter_context(Copier(command))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._open.close()

    def tick(self) -> None:
        """Look at what came. Raises MisnamedError, OSError, and what ``is_whole`` raises."""
        # First the program, then its files: after its end nothing more comes to them.
        end = self._copier.ended() if self._copier else None
        self._look()
        if end is not None:
            refuse_misnamed(end, self.connection)
            self.end = end

    @property
    def received(self) -> tuple[int, int]:
        """Number of the current file, and its size; (0, 0) before anything was taken."""
        if self.current is None:
            return 0, 0
        with contextlib.suppress(FileNotFoundError):
            return self.current.number, self.current.path.stat().st_size
        return self.current.number, self.current.size

    @property
    def moved(self) -> int:
        """Grows as long as anything comes from the server."""
        compared = self._comparison.equal if self._comparison is not None else 0
        return compared + self.came + self.received[1]

    def _look(self) -> None:
        branch = self.start.branch
        self.spool.collect(self.connection.address, lambda name: is_log_name(name) and branch.number(name) > 0)
        found = sorted((number, path) for path in self.spool.incoming.iterdir() if (number := branch.number(path.name)))
        for index, (number, path) in enumerate(found):
            self._expect(number, path)
            if not self._take(branch, number, path, finished=index + 1 < len(found)):
                break

    def _expect(self, number: int, path: Path) -> None:
        """The program names files as it is told from the other side: a name that was altered on its way would make one
        file another. Raises DamagedCopyError."""
        before = self.current
        right = number == self.start.number if before is None else number in (before.number, before.number + 1)
        if not right and (before is None or number < before.number or not self.follows(before.number, number)):
            due = self.start.name if before is None else f"the file after {before.name}"
            raise DamagedCopyError(path.name, self.connection.address, f"it was received where {due} was expected")

    def _take(self, branch: Branch, number: int, path: Path, *, finished: bool) -> bool:
        """Move it into the spool. False: not yet, or never."""
        if head_of(path) is None:
            return False  # its first events are still on their way
        kept = self.start.kept if self.current is None else None
        if kept is not None and not self._goes_on(kept, path, finished=finished):
            return False
        if self.current is not None and self.current.ended is None:
            last, size = self.current, self.current.path.stat().st_size
            is_next = number == last.number + 1
            ending = ending_at_server(last.path, size, lambda: is_next and self.is_whole(last.number, size))
            self.spool.end(last, ending)
            self.came += size
        if kept is not None and kept.ended is not None and path.stat().st_size == kept.size:
            path.unlink()  # it is here already, whole
            self.current = kept
            return True
        self.current = self.spool.take(branch, number, path.name)
        return True

    def _goes_on(self, kept: Spooled, path: Path, *, finished: bool) -> bool:
        """Is the server's file the one that is here, and as long? Sets ``diverged`` where it is not."""
        if self._comparison is None:
            self._comparison = Comparison(self._opened(kept.path), self._opened(path))
            self._kept_size = kept.path.stat().st_size
        equal = self._comparison.go_on()
        if equal >= self._kept_size:
            return kept.ended is None or finished
        size = path.stat().st_size
        shorter = equal == size and (finished or (self.written is not None and self.written <= equal))
        if self._comparison.differs or shorter:
            self.diverged = equal
        return False

    def _opened(self, path: Path) -> BinaryIO:
        return self._open.enter_context(path.open("rb"))
