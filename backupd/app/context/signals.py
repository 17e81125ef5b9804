"""Waking a thread that waits: from signal handlers, from other threads, by time."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Self


class Waker:
    """A wait that ``wake`` ends at once. Unlike threading.Event it may be called by a signal handler that interrupts
    the very wait."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        os.close(self._read)
        os.close(self._write)

    def wake(self) -> None:
        try:
            os.write(self._write, b"!")
        except BlockingIOError:
            return  # it is full of calls already

    def wait(self, seconds: float) -> None:
        """Until somebody woke us, now or since the last wait, or ``seconds`` are over."""
        if select.select([self._read], [], [], max(0.0, seconds))[0]:
            os.read(self._read, 65536)


class Wishes:
    """What signals have asked of the service, for it to look at when it has time."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self.stops = 0
        self._reload = False

    def handlers(self) -> Mapping[signal.Signals, Callable[[], None]]:
        return {signal.SIGTERM: self._stop, signal.SIGINT: self._stop, signal.SIGHUP: self._ask_to_reload}

    def take_reload(self) -> bool:
        """Was a reload asked for since the last look?"""
        wanted, self._reload = self._reload, False
        return wanted

    def _stop(self) -> None:
        self.stops += 1
        self._waker.wake()

    def _ask_to_reload(self) -> None:
        self._reload = True
        self._waker.wake()


_Before = signal.Handlers | Callable[[int, FrameType | None], object] | int | None


class Signals:
    """Within the block these signals call their handlers; afterwards what they called before. Main thread only."""

    def __init__(self, handlers: Mapping[signal.Signals, Callable[[], None]]) -> None:
        self._handlers = handlers
        self._before: dict[signal.Signals, _Before] = {}

    def __enter__(self) -> Self:
        for number in self._handlers:
            self._before[number] = signal.signal(number, self._call)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _call(self, number: int, _frame: FrameType | None) -> None:
        self._handlers[signal.Signals(number)]()
