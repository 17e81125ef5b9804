"""How a message fared, whichever way it went."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar

from backupd.model.errors import BackupdError

FIRST_PAUSE = timedelta(minutes=1)
LONGEST_PAUSE = timedelta(hours=1)
GIVEN_UP = timedelta(days=3)
TRIES = 75
"""A message that is as old as this, was tried so often (with the pauses between them that takes as long), and still
cannot be delivered, never will be. Age alone says nothing: the clock may be wrong for a minute."""


class DeliveryError(BackupdError):
    """A message reached nobody. ``permanent``: it would not the next time either."""

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, detail: str = "", hint: str = "", permanent: bool = False) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.permanent = permanent


@dataclass(frozen=True, slots=True)
class Delivered:
    """It was taken, for some at least. ``again``: recipients to try once more; ``refused``: those that it will never be
    taken for, and what was said about each; ``problem``: what was said about both."""

    again: tuple[str, ...] = ()
    problem: str = ""
    refused: tuple[tuple[str, str], ...] = ()


def pause_after(attempts: int) -> timedelta:
    """How long to wait after so many tries in vain."""
    return min(FIRST_PAUSE * (1 << min(attempts - 1, 10)), LONGEST_PAUSE)


def is_over(attempts: int, age: timedelta) -> bool:
    """Is a message given up after so many tries? A negative ``age`` is one of a clock that was ahead."""
    return attempts >= TRIES and not timedelta(0) <= age < GIVEN_UP


@dataclass
class Deadline:
    """Cuts a connection when all takes too long: whoever sends a byte now and then never runs into the time for one
    answer. ``with Deadline(seconds) as deadline`` begins it."""

    seconds: float
    _found: list[Callable[[], socket.socket | None]] = field(default_factory=list, init=False)
    _over: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _timer: threading.Timer | None = field(default=None, init=False)

    def __enter__(self) -> Deadline:
        self._timer = threading.Timer(self.seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()
        return self

    def watch(self, find: Callable[[], socket.socket | None]) -> None:
        """``find`` gives the connection's socket as soon as there is one."""
        with self._lock:
            self._found.append(find)
            if self._over:
                _shut(find())

    def _cut(self) -> None:
        with self._lock:
            self._over = True
            for find in self._found:
                _shut(find())

    def __exit__(self, *_reason: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _shut(sock: socket.socket | None) -> None:
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
