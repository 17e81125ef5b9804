"""What the server says while its binary log comes: does it contradict that, and will it remove a file too early?

The server removes a file when it was last written to longer ago than its setting says, or when all its files together
are larger than another setting allows. It looks when it begins a new file and when it starts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.binlog import continuity
from backupd.binlog.evidence import Seen
from backupd.engine.server.binary_logs import Expiry, SourceState
from backupd.model.gtid import covers
from backupd.model.text import Clock

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
            return f"the server is at {at.file}:{at.pos}, before the place up to which its log came: it began anew"
        if self._last.position.gtid and not covers(at.gtid, self._last.position.gtid, mariadb=state.mariadb):
            return "the server lacks transactions that it had executed: its log began anew"
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
    at: datetime | None
    gone: bool
    message: str


def purge_alarm(number: int, written_until: datetime | None, state: SourceState, expiry: Expiry) -> PurgeAlarm | None:
    """``number``: of the oldest file that is not archived everywhere. ``written_until``: when the server wrote the last
    event of it, as far as known, by its own clock; None while it is still written to."""
    name = f"{state.basename}.{number:06d}"
    listed = {log.number: log for log in state.logs}
    if number not in listed:
        if number < state.logs[0].number:
            return PurgeAlarm(
                name,
                None,
                True,
                f"the server has removed {name}, which is not archived everywhere yet:"
                " only the spool has it, if anything has",
            )
        return None
    if number == state.logs[-1].number:
        return None  # never removed while the server writes to it
    if expiry.age is not None and written_until is not None:
        at = written_until + expiry.age
        if at - state.server_time <= max(_EARLY, expiry.age * _SHARE):
            return PurgeAlarm(
                name,
                at,
                False,
                f"the server will remove {name} from {at:%Y-%m-%d %H:%M} UTC on, and it is not archived everywhere yet",
            )
    if expiry.total_bytes is not None:
        size = sum(log.size for log in state.logs if log.number >= number)
        if size >= expiry.total_bytes * (1 - _SHARE):
            return PurgeAlarm(
                name,
                None,
                False,
                f"the server will soon remove {name} because its binary logs may take"
                f" {expiry.total_bytes} bytes, and it is not archived everywhere yet",
            )
    return None
