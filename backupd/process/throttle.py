"""How fast bytes may flow: a token bucket, and what anything that slows a backup down looks like."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from backupd.model.errors import CancelledError

BURST_SECONDS = 1
"""What was not used lately may be caught up at once, but not more than this much of it."""


class Throttle(Protocol):
    """Something that bytes have to pass."""

    def take(self, size: int) -> None:
        """Return when ``size`` more bytes may flow. Raises CancelledError when somebody asked to stop, and what the
        throttle itself gives up with."""
        ...


class Unlimited:
    """Lets everything pass at once."""

    def take(self, size: int) -> None:
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
        self._waited: float = 0

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

    @property
    def waited(self) -> float:
        """Seconds of waiting that were imposed so far, of all threads together."""
        with self._lock:
            return self._waited

    def _reserve(self, size: int) -> float:
        """Seconds until the ``size`` bytes are due. A level below zero is what earlier places still wait for."""
        with self._lock:
            now = self._clock()
            self._level = min(self._burst, self._level + (now - self._seen) * self._rate) - size
            self._seen = now
            self._taken += size
            delay = max(0, -self._level / self._rate)
            self._waited += delay
            return delay
