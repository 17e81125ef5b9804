"""A thread that reads gauges of pressure, so that whoever moves bytes only has to look at its last word."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from backupd.engine.pressure.gauges import Gauge, Reading

INTERVAL_SECONDS = 2.0
STALE_SECONDS = 60.0
"""A gauge that has not answered for so long tells nothing any more."""
RESUME = 0.5
"""The share of a limit below which work goes on: at the limit itself it would start and stop all the time."""
_LEAVE_SECONDS = 5.0


class Judge:
    """Compares readings with one limit (seconds), with hysteresis: ``resume`` is the share of it below which it is well
    again."""

    def __init__(self, limit: float, resume: float = RESUME) -> None:
        self._limit, self._resume = limit, resume
        self._over = False

    def judge(self, reading: Reading) -> str:
        """Why to wait; empty when there is no reason."""
        if reading.value is None:
            self._over = True
            return reading.text
        bound = self._limit * self._resume if self._over else self._limit
        was, self._over = self._over, reading.value > bound
        if not self._over:
            return ""
        if was and reading.value <= self._limit:
            return f"{reading.text}, more than half of {_limit(self._limit)}"
        return f"{reading.text} > {_limit(self._limit)}"


def _limit(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"


@dataclass(frozen=True, slots=True)
class Watched:
    """A gauge, its limit in seconds, and the share of it below which work goes on."""

    gauge: Gauge
    limit: float
    resume: float = RESUME


class PressureWatch:
    """A context manager; ``pressure`` may be asked by any thread. All gauges are read once on entering."""

    def __init__(
        self,
        watched: Sequence[Watched],
        *,
        interval: float = INTERVAL_SECONDS,
        stale: float = STALE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pairs = [(one.gauge, Judge(one.limit, one.resume)) for one in watched]
        self._interval, self._stale, self._clock = interval, stale, clock
        self._reason = ""
        self._read_at = clock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pressure", daemon=True)

    def __enter__(self) -> Self:
        if self._pairs:
            self._look()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._pairs:
            # A server that hangs may hold the thread; it is a daemon, so it cannot keep the process.
            self._thread.join(_LEAVE_SECONDS)

    @property
    def pressure(self) -> str:
        """Why to wait now; empty when there is no reason."""
        if not self._pairs:
            return ""
        silent = self._clock() - self._read_at
        return self._reason or (f"the server has not answered for {silent:.0f} s" if silent > self._stale else "")

    def _look(self) -> None:
        reasons = [judge.judge(gauge.read()) for gauge, judge in self._pairs]
        self._reason = "; ".join(reason for reason in reasons if reason)
        self._read_at = self._clock()

    def _run(self) -> None:
        try:
            while not self._end.wait(self._interval):
                self._look()
        finally:
            for gauge, _judge in self._pairs:
                gauge.close()
