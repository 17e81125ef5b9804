"""A limit to how long a backup tool may stand in the way of everybody who writes.

FLUSH TABLES WITH READ LOCK waits for every running statement, and from its first moment all writers wait behind it:
one forgotten SELECT stops the service. xtrabackup waits for as long as it takes (it sets lock_wait_timeout to a year),
and its own limit, --ftwrl-wait-timeout, holds only before the statement is sent. Ending the tool is not enough, since a
server does not notice in that wait that its client has gone; the statement has to be killed, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from backupd.engine.sql.client import Connection
from backupd.model.errors import ServerError

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
