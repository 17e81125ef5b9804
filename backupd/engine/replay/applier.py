"""The replication applier of a restored copy, pointed at a scratch source: what both families have in common.

The served files end where the replay ends, so the applier needs no UNTIL for the stop: it runs, with all its workers,
until it has applied all there is. Both threads are watched. A receiving thread that ended (1236: the files do not
continue the copy) leaves the applying one waiting for ever; and a copy whose server id occurs in the events would skip
those silently and reach the end all the same, which is why transactions are counted.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from backupd.engine.instance.launch import LaunchedServer
from backupd.model.errors import CancelledError, ServerError, ToolError
from backupd.process.output import redact

CHANNEL = "backupd"
"""The replication connection that a replay uses: others of the copy are not touched."""
OF_SOME_TABLES = (
    "restore the whole server beside it (--datadir DIR --start) and copy the tables, or choose another "
    "target (backup:ID needs no replay)"
)
"""What to do when some tables cannot be replayed: there is no other way to narrow a replay down."""
QUIET_SECONDS = 5.0
"""How long an applier that says it has nothing to do may stand somewhere else than at the end."""
_PAUSES = (0.02, 0.15)


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the applier is. ``io`` and ``sql``: error number and text of the receiving and the applying thread.
    ``running``: is the applying thread? ``idle``: it says that it waits for more. ``file``, ``pos``: applied."""

    io: tuple[int, str]
    sql: tuple[int, str]
    running: bool
    idle: bool
    file: str
    pos: int
    gtids: str


class Applier(Protocol):
    """One replay by the copy's own replication; ``close`` makes the copy forget it."""

    def prepare(self) -> None:
        """Say what is executed already, leave out what is excluded, point at the source. Raises ServerError,
        RefusedError."""
        ...

    def apply(self, moved: Callable[[Standing], None], cancel: threading.Event | None) -> None:
        """Run to the end of the served files. Raises ServerError, ToolError, CancelledError."""
        ...

    def executed(self) -> str:
        """All that the copy has executed, in the writing of model.gtid."""
        ...

    def applied(self) -> int:
        """Transactions applied, as the server itself counted them."""
        ...

    def close(self) -> None: ...


def wait(
    server: LaunchedServer,
    look: Callable[[], Standing],
    done: Callable[[Standing], bool],
    moved: Callable[[Standing], None],
    cancel: threading.Event | None,
    *,
    narrowed: bool = False,
) -> Standing:
    """Look until ``done``; gives the last look. ``narrowed``: are only some tables replayed? Raises as
    ``Applier.apply``."""
    pause, longest = _PAUSES
    last: Standing | None = None
    since = time.monotonic()
    while True:
        if cancel is not None and cancel.is_set():
            raise CancelledError("the replay was cancelled", hint="the copy stands somewhere between start and target")
        now = _looked(server, look, narrowed=narrowed)
        for code, text, thread in ((*now.sql, "apply"), (*now.io, "receive")):
            if code:
                _fail(code, text, thread, now, narrowed=narrowed)
        if done(now):
            return now
        if now != last:
            last, since = now, time.monotonic()
            moved(now)
        elif not now.running or (now.idle and time.monotonic() - since > QUIET_SECONDS):
            return now  # it did not come to the end: whoever compares says so
        time.sleep(pause)
        pause = min(pause * 1.3, longest)


def other_way(*, narrowed: bool) -> str:
    """The hint where nothing better is known."""
    return OF_SOME_TABLES if narrowed else "the pipe (--replay-with pipe) is the other way"


def _looked(server: LaunchedServer, look: Callable[[], Standing], *, narrowed: bool) -> Standing:
    try:
        return look()
    except ServerError as error:
        if server.running:
            raise
        raise ToolError(
            "the restored copy ended while logs were replayed onto it",
            detail=server.log_tail(),
            hint=f"its own log above tells why; {other_way(narrowed=narrowed)}",
        ) from error


_ELSEWHERE = re.compile(r"\b(DATA|INDEX)\s+DIRECTORY\b", re.IGNORECASE)
NO_FOLDER_ELSEWHERE = (
    "the statement makes files in a folder of its own (DATA DIRECTORY), and a copy writes into no folder but its own, "
    "whichever way it is replayed: restore to right before it (--to before-gtid: or its place), then do it by hand"
)
_ENGINE_FAILED, _ENGINE_SAYS = 1030, "Got error 168"
_UNTOLD = (
    f"the storage engine could not make a file, and this server does not tell which; most likely {NO_FOLDER_ELSEWHERE}"
)
_XAER_NOTA = 1397
_HINTS: Mapping[int, str] = {
    1032: "the copy lacks a row that the logs change: backup and logs are not of one history, or the source changed "
    "rows without logging them; test an older backup",
    _XAER_NOTA: "an XA transaction was prepared before the place that the backup stands for, and ended behind it, so "
    "that the copy does not know it: take a backup from before it was prepared or after it ended; physical "
    "backups hold prepared transactions (--from physical)",
    _ENGINE_FAILED: _UNTOLD,
    1062: "the copy has a row already that the logs insert: the replay began too early, or rows were written without "
    "logging them; test an older backup",
    1146: "the copy lacks a table that the logs use, such as a temporary one from before the backup",
    1236: "the logs do not continue where the copy stands; nothing after that can be replayed",
    2003: "the scratch source ended: look at memory and disk, then restore again",
    13114: "the logs do not continue where the copy stands; nothing after that can be replayed",
}


_OF_HISTORY = frozenset({1032, 1062})
"""Errors whose hints are as likely when only some tables are replayed."""


def hint_of_statement(text: str) -> str:
    """What to do when a statement failed whose text is in ``text``; "" where it tells nothing."""
    if _ELSEWHERE.search(text):
        return NO_FOLDER_ELSEWHERE
    return _UNTOLD if _ENGINE_SAYS in text else ""


def _fail(code: int, text: str, thread: str, now: Standing, *, narrowed: bool) -> NoReturn:
    hint = _HINTS.get(code, f"the text above is the server's; {other_way(narrowed=narrowed)}")
    if narrowed and thread == "apply" and code != _XAER_NOTA:
        known = f"{_HINTS[code]}; or " if code in _OF_HISTORY else ""
        hint = f"{known}it needs tables that this replay leaves out: {OF_SOME_TABLES}"
    raise ServerError(
        f"the copy cannot {thread} the logs any further (error {code})",
        detail=f"{redact(text)}\nit stands at {now.file}:{now.pos} {now.gtids}".rstrip(),
        hint=hint_of_statement(text) or hint,
    )


def place(file: str, pos: int, files: Sequence[tuple[str, int]]) -> int:
    """Bytes of ``files`` (names and sizes) up to ``file:pos``; all of them for a file that comes behind."""
    done = 0
    for name, size in files:
        if name == file:
            return done + min(pos, size)
        done += size
    return done if file else 0
