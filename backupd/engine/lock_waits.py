"""Who waits for locks on tables, and for how long: the statements that a lock on all tables would wait for, and a limit
to how long a backup tool may keep everybody who writes waiting.

FLUSH TABLES WITH READ LOCK waits for every running statement, and from its first moment all writers wait behind it:
one forgotten SELECT stops the service. xtrabackup waits for as long as it takes (it sets lock_wait_timeout to a year),
and its own limit, --ftwrl-wait-timeout, holds only before the statement is sent. Ending the tool is not enough, since a
server does not notice in that wait that its client has gone; the statement has to be killed, too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from backupd.engine.binlog.statements import effect, masked
from backupd.engine.sql.client import Connection, Session
from backupd.model.binlog import ChangeKind
from backupd.model.errors import ServerError
from backupd.model.table import TableName

_NOT_STATEMENTS = frozenset(
    {
        "sleep",
        "daemon",
        "binlog dump",
        "binlog dump gtid",
        "connect",
        "delayed insert",
        "slave_io",
        "field list",
        "quit",
    }
)
_NO_TABLES = re.compile(r"\s*(?:SELECT|DO)\s+(?:SLEEP|GET_LOCK|\w*WAIT\w*)\s*\([^()]*\)\s*;?\s*", re.IGNORECASE)
_WAITS_FOR_US = re.compile(r"Waiting for (?:global read lock|backup lock|commit lock)", re.IGNORECASE)
_WAITS_FOR_DEFINITION = re.compile(r"Waiting for table metadata lock", re.IGNORECASE)
_SHOWN = 120
_STRUCTURE = frozenset({ChangeKind.CREATE, ChangeKind.ALTER, ChangeKind.DROP})
_ROWS = frozenset({ChangeKind.INSERT, ChangeKind.UPDATE, ChangeKind.DELETE})


@dataclass(frozen=True, slots=True)
class Running:
    """``statement``: its beginning, without secrets. ``seconds`` that it has been at it."""

    id: int
    user: str
    host: str
    schema: str
    seconds: int
    state: str
    statement: str

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (connection {self.id}) since {self.seconds} s: {self.statement}"


@dataclass(frozen=True, slots=True)
class Changing:
    """A statement that changes the definitions of ``tables``, or rebuilds them."""

    by: Running
    tables: tuple[TableName, ...]


def running(session: Session, seconds: float) -> tuple[Running, ...]:
    """Statements that have been running for ``seconds`` or longer, the oldest first. Those that only sleep or wait for
    a lock by name are none, nor are those that themselves wait for a lock on everything. Needs PROCESS to see those of
    other accounts. Raises ServerError."""
    return tuple(
        sorted(
            (one for one, _text in _statements(session) if one.seconds >= seconds),
            key=lambda one: (-one.seconds, one.id),
        )
    )


def changing(session: Session) -> tuple[Changing, ...]:
    """Statements that alter, create or drop tables just now, as far as their text tells. Raises ServerError."""
    found = []
    for one, text in _statements(session):
        tables = tuple(
            TableName(change.schema, change.name)
            for change in effect(text, one.schema).changes
            if change.kind in _STRUCTURE and change.name
        )
        if tables:
            found.append(Changing(one, tables))
    return tuple(found)


def waiting(session: Session) -> tuple[Changing, ...]:
    """Statements that wait just now until nobody uses a table any more whose definition (or all rows, or name) they
    change, as far as their text tells which. Raises ServerError."""
    found = []
    for one, text in _statements(session):
        if _WAITS_FOR_DEFINITION.match(one.state):
            tables = tuple(
                TableName(change.schema, change.name)
                for change in effect(text, one.schema).changes
                if change.kind not in _ROWS and change.name
            )
            if tables:
                found.append(Changing(one, tables))
    return tuple(found)


def _statements(session: Session) -> Iterator[tuple[Running, str]]:
    for row in session.records("SHOW FULL PROCESSLIST", shown=True):
        text = row["Info"]
        state = str(row["State"] or "")
        if (
            not text
            or int(row["Id"]) == session.thread_id
            or str(row["Command"]).lower() in _NOT_STATEMENTS
            or _NO_TABLES.fullmatch(str(text))
            or _WAITS_FOR_US.match(state)
        ):
            continue
        shown = " ".join(masked(str(text)).split())
        yield (
            Running(
                id=int(row["Id"]),
                user=str(row["User"]),
                host=str(row["Host"] or "").partition(":")[0],
                schema=str(row["db"] or ""),
                seconds=int(row["Time"] or 0),
                state=state,
                statement=shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ...",
            ),
            str(text),
        )


_SENT = ("Executing FLUSH NO_WRITE_TO_BINLOG TABLES", "Executing FLUSH TABLES WITH READ LOCK")
_STATEMENTS = ("FLUSH NO_WRITE_TO_BINLOG TABLES", "FLUSH TABLES WITH READ LOCK")
_MEANWHILE = ">> log scanned up to"
"""Printed every second by another thread of the tool."""


class LockWatch:
    """Hears the tool's lines; when none follows that of a lock statement for ``seconds``, kills the statement and
    calls ``stop``. A context manager; ``heard`` may be called from any thread."""

    def __init__(self, connection: Connection, stop: Callable[[], None], *, seconds: float) -> None:
        self._connection, self._stop, self._seconds = connection, stop, seconds
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False
        self.expired = False
        """The tool was stopped for this."""
        self.trouble = ""
        """Why the statement could not be killed; empty when it was."""

    def heard(self, line: str) -> None:
        """Take one line of the tool's log: that of a lock statement starts the clock, any other one stops it."""
        if not line.strip(" .") or _MEANWHILE in line:
            return
        with self._lock:
            self._disarm()
            if any(mark in line for mark in _SENT) and not self._closed:
                self._timer = threading.Timer(self._seconds, self._expire)
                self._timer.daemon = True
                self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        with self._lock:
            if self._closed or self._timer is not threading.current_thread():
                return
            self.expired = True
        try:
            kill_lock_statements(self._connection)
        except ServerError as error:
            self.trouble = str(error)
        self._stop()


def kill_lock_statements(connection: Connection) -> int:
    """Kill the account's own FLUSH TABLES statements that still wait; how many there were. Everybody may kill
    connections of his own account. Raises ServerError."""
    with connection.connect() as session:
        # Not out of information_schema: MySQL's has no answer at all while one statement there is no valid UTF-8.
        user = str(session.scalar("SELECT SUBSTRING_INDEX(USER(), '@', 1)"))
        waiting = [
            row["Id"]
            for row in session.records("SHOW PROCESSLIST", shown=True)
            if row["User"] == user and row["Info"] in _STATEMENTS
        ]
        for number in waiting:
            session.execute(f"KILL {int(number)}")
    return len(waiting)
