"""Why a dump of the binary log ended, by what the server said last; and what must not be stored of what it sent."""

from __future__ import annotations

from enum import StrEnum

from backupd.model.errors import ToolError


class EndKind(StrEnum):
    """Why a dump ended."""

    LOST = "lost"
    """The connection broke, or the server shut down."""
    NOT_THERE = "not-there"
    """The server has no such file."""
    UNOPENED = "unopened"
    """The server cannot open a file that it lists: it is gone from its disk, or the server has too many open."""
    NO_NEXT = "no-next"
    """The server threw its files away (RESET)."""
    TORN = "torn"
    """A file of the server ends within an event, or before the requested position, or cannot be read by it."""
    TWIN = "twin"
    """Another connection with the same server ID."""
    DENIED = "denied"
    ALL = "all"
    """Everything that was asked for has come."""
    OTHER = "other"


_SAID = (
    ("Could not find first log file name", EndKind.NOT_THERE),
    ("not found (Errcode: 2 ", EndKind.NOT_THERE),
    ("not found (", EndKind.UNOPENED),
    ("Could not open log file", EndKind.UNOPENED),
    ("could not find next log", EndKind.NO_NEXT),
    ("same server_uuid/server_id", EndKind.TWIN),
    ("truncated in the middle of event", EndKind.TORN),
    ("log truncated", EndKind.TORN),
    ("bogus data in log event", EndKind.TORN),
    ("event read from binlog did not pass", EndKind.TORN),
    ("I/O error reading log event", EndKind.TORN),
    ("I/O error reading the header", EndKind.TORN),
    ("bad magic number", EndKind.TORN),
    ("found invalid event in binary log", EndKind.TORN),
    ("exceeded max_allowed_packet", EndKind.TORN),  # 1 GiB for a dump, whatever the server's setting is
    ("position > file size", EndKind.TORN),
    ("impossible position", EndKind.TORN),
    ("Access denied", EndKind.DENIED),
    ("REPLICATION SLAVE", EndKind.DENIED),
    ("shutdown in progress", EndKind.LOST),
    ("connection was killed", EndKind.LOST),
)


def end_kind(said: str) -> EndKind:
    """What the server's last words mean."""
    return next((kind for words, kind in _SAID if words.lower() in said.lower()), EndKind.OTHER)


class EndedError(Exception):
    """The dump ended; ``said``: the server's last words, or what the connection's failure was."""

    def __init__(self, kind: EndKind, said: str) -> None:
        super().__init__(said)
        self.kind = kind
        self.said = said


class DamagedDumpError(ToolError):
    """What came is not what a server sends; nothing of it was stored."""

    def __init__(self, file: str, position: int, address: str, what: str) -> None:
        super().__init__(
            f"what {address} sent of {file} is damaged",
            detail=f"at byte {position}: {what}",
            hint="backupd requests it again; if this recurs, check the network between the hosts",
        )
