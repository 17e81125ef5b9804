"""How fast bytes may flow: a token bucket of one process, and one that several processes share.

Each job, copy and stream of the service is a separate process, and they keep to a destination's rate together.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from backupd.model.errors import CancelledError, RefusedError
from backupd.process.runtime import shared_directory

BURST_SECONDS = 1
"""What was not used lately may be caught up at once, but not more than this much of it."""


class Throttle(Protocol):
    """Something that bytes have to pass."""

    def take(self, size: int) -> None:
        """Return when ``size`` more bytes may flow. Raises CancelledError when somebody asked to stop, and what the
        throttle gives up with."""
        ...


class Unlimited:
    """Lets everything pass at once."""

    def take(self, size: int) -> None:
        """Never waits."""
        del size


class TokenBucket:
    """``rate`` bytes a second for all threads together, in the order in which they ask.

    Whoever asks gets a place in the queue at once and waits until its bytes are due: so the sum of what has passed
    never exceeds ``rate`` times the time since the bucket was made plus one burst, whatever the sizes, and nobody is
    overtaken. ``cancel``: set it to end all waiting. ``clock`` (monotonic seconds) and ``wait`` (seconds; True when
    cancelled) are for tests.
    """

    def __init__(
        self,
        rate: float,
        *,
        cancel: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        if rate <= 0:
            raise ValueError("a rate must be more than 0")
        self._rate = rate
        self._burst = rate * BURST_SECONDS
        self._clock = clock
        self._wait = wait or (cancel or threading.Event()).wait
        self._lock = threading.Lock()
        self._level: float = self._burst
        self._seen = clock()
        self._taken = 0

    def take(self, size: int) -> None:
        """Return when ``size`` bytes are due. Raises CancelledError."""
        delay = self._reserve(size)
        if delay > 0 and self._wait(delay):
            raise CancelledError("stopped while it waited for its share of the bandwidth")

    @property
    def taken(self) -> int:
        """Bytes that were asked for so far."""
        with self._lock:
            return self._taken

    def _reserve(self, size: int) -> float:
        """Seconds until the ``size`` bytes are due. A level below zero is what earlier callers still wait for."""
        with self._lock:
            now = self._clock()
            self._level = min(self._burst, self._level + (now - self._seen) * self._rate) - size
            self._seen = now
            self._taken += size
            return max(0, -self._level / self._rate)


_STATE = struct.Struct("<dd")
"""The level of the bucket, and the moment at which it had that: monotonic, so the same for all processes since boot."""


class SharedBucket(TokenBucket):
    """A ``TokenBucket`` for all processes of this user that use the same ``name`` on this host. Its state is a file in
    ``folder``, by default in the runtime directory; nothing is touched before something is taken. ``take`` raises
    RefusedError, too, where that file cannot be used."""

    def __init__(
        self,
        rate: float,
        name: str,
        *,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__(rate, clock=clock, wait=wait)
        self._name, self._folder = name, folder
        self._turn = threading.Lock()

    def _reserve(self, size: int) -> float:
        with self._turn, self._opened() as file:
            found = os.pread(file, _STATE.size, 0)
            level, seen = _STATE.unpack(found) if len(found) == _STATE.size else (self._burst, self._clock())
            if seen <= self._clock():  # else it is of the time before the machine was started
                self._level, self._seen = min(level, self._burst), seen
            delay = super()._reserve(size)
            os.pwrite(file, _STATE.pack(self._level, self._seen), 0)
            return delay

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, locked."""
        path = (self._folder or shared_directory("rates")) / self._name
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
            finally:
                os.close(file)
        except OSError as error:
            raise RefusedError(
                f"the file {path}, by which processes share a rate limit, cannot be used: {error.strerror}",
                hint="check free space and permissions there",
            ) from error
