"""A connection to PostgreSQL that waits for an answer only so long.

A server that hangs (its disk is dead, its processes are stopped) keeps its sockets open and acknowledges every packet,
so no timeout of TCP, and none that the server itself watches, ends the waiting. Here the socket is shut after the time,
and the waiting ends as with any server that went away.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import psycopg

SECONDS = 30.0
"""For one statement; none of ours takes seconds."""


class PatientConnection(psycopg.Connection[Any]):
    """``hurried`` False: wait as long as it takes."""

    hurried = True

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """All that waits for the server passes here."""
        if not self.hurried:
            return super().wait(*arguments, **options)
        guard = _Guard(self._shut)
        try:
            return super().wait(*arguments, **options)
        finally:
            guard.over()

    def _shut(self) -> None:
        with socket.socket(fileno=os.dup(self.pgconn.socket)) as ours:
            ours.shutdown(socket.SHUT_RDWR)


class _Guard:
    """Calls ``act`` after the time, but never once it is ``over``."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._open, self._lock = act, True, threading.Lock()
        self._timer = threading.Timer(SECONDS, self._due)
        self._timer.daemon = True
        self._timer.start()

    def over(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._open = False

    def _due(self) -> None:
        with self._lock:
            if self._open:
                self._act()
