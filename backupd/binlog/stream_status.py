"""What a stream reports: its state at a moment, and what happened to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from backupd.binlog.acknowledgement import Evidence
from backupd.model.binlog import Branch, Gap
from backupd.model.document import Document, json_key
from backupd.model.server_facts import Position

NO_ROOM = "there is no room in the spool's file system"


class StreamState(StrEnum):
    """What a stream does: see each."""

    STREAMING = "streaming"
    """Every event comes as the server writes it."""
    WAITING = "waiting"
    """Not connected; it is tried again with growing pauses, of a few seconds while the server is out of reach."""
    PAUSED = "paused"
    """The spool has no room; it goes on when there is some."""
    FAILED = "failed"
    """Somebody has to change something (an account, an option, a program); tried again every minute all the same,
    and every few seconds where the server writes no binary log."""


@dataclass(frozen=True, slots=True)
class StreamStatus(Document):
    """``branch``, ``file``, ``pos``: up to where the spool holds the log. ``server_position``: where the server was at
    the last look, and ``server_time``: its own clock or ours, whichever was behind, right *before* that look; both None
    while they are not known to be of ``branch``. ``since``: when ``state`` began. ``restarts``: of the
    connection, since the stream was started. ``away``: it waits because the server is out of reach.
    ``acknowledgement``: since when RPO 0 holds; None where no commit waits for this stream.
    """

    state: StreamState
    since: datetime
    branch: str = ""
    file: str = ""
    pos: int = 0
    server_position: Position | None = None
    server_time: datetime | None = None
    error: str = ""
    restarts: int = 0
    away: bool = field(default=False, metadata=json_key(later=True))
    acknowledgement: Evidence | None = field(default=None, metadata=json_key(later=True))


class StreamEventKind(StrEnum):
    """What may happen to a stream, by the names that events have."""

    CONNECTED = "connected"
    LOST = "lost"
    """The connection broke, or the server cannot be reached."""
    FAILED = "failed"
    """It will not work again before somebody changes something."""
    PAUSED = "paused"
    BRANCH = "branch"
    """A branch began; ``branch`` says why."""
    MENDED = "mended"
    """A file of the spool was damaged, and its server had it whole."""
    GAP = "gap"
    """Binary logs are missing for ever; ``gap`` says which."""
    PURGE_ALARM = "purge-alarm"
    """The server will soon remove binary logs that are not archived."""
    PURGE_OVER = "purge-over"
    """That danger is over."""
    ACKNOWLEDGED = "acknowledged"
    """Every commit waits for this stream from now on."""
    UNACKNOWLEDGED = "unacknowledged"
    """That is not so any more."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """Something that people or other rooms want to know. ``detail``: evidence; ``hint``: what to do."""

    kind: StreamEventKind
    at: datetime
    message: str
    detail: str = ""
    hint: str = ""
    branch: Branch | None = None
    gap: Gap | None = None
