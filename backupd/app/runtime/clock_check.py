"""Does this machine's clock go as time goes? Compares it with clocks that nobody can set."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from backupd.catalog.session import Catalog
from backupd.model.text import Clock

AT_ONCE = 1.0
"""Seconds within which all clocks are read; what took longer is read again."""
NOTICED = timedelta(seconds=30)
"""Smaller steps are a time service's work."""
DOUBTED = timedelta(hours=1)
"""After a larger step forward the clock is believed only once it has stood for a while."""
PROBATION = 300.0
"""Seconds for that."""

CAREFUL = timedelta(days=1)
"""For so long after such a step nothing expires by it: whoever looks at the machine meanwhile loses nothing."""
_SET_AT, _SET_BY = "clock-set-at", "clock-set-by"


@dataclass(frozen=True, slots=True)
class Jump:
    """The clock was set by ``step`` (negative: back), or the machine slept for ``slept``."""

    step: timedelta = timedelta(0)
    slept: timedelta = timedelta(0)


def boottime() -> float:
    """Seconds that only go on, also while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClockWatch:
    """Look often. ``running`` gives seconds that pass while the machine runs, ``passing`` also those that it sleeps."""

    def __init__(
        self, clock: Clock, running: Callable[[], float] = time.monotonic, passing: Callable[[], float] = boottime
    ) -> None:
        self._clock, self._running, self._passing = clock, running, passing
        self._seen = self._read()
        self._displaced = timedelta(0)
        self._since = passing()

    def look(self) -> Jump | None:
        """What happened to the clock since the last look; None when nothing did."""
        wall, running, passing = self._read()
        before, self._seen = self._seen, (wall, running, passing)
        step = (wall - before[0]) - timedelta(seconds=passing - before[2])
        slept = timedelta(seconds=(passing - before[2]) - (running - before[1]))
        jump = Jump(step if abs(step) > NOTICED else timedelta(0), slept if slept > NOTICED else timedelta(0))
        if jump.step:
            self._displaced += jump.step
            self._since = passing
        elif self._displaced and passing - self._since >= PROBATION:
            self._displaced = timedelta(0)
        return jump if jump.step or jump.slept else None

    @property
    def now(self) -> datetime:
        """What the clock showed at the last look."""
        return self._seen[0]

    @property
    def doubtful(self) -> bool:
        """Was the clock set far ahead a short while ago? Then nothing should be concluded from it yet."""
        return self._displaced > DOUBTED

    @property
    def settled(self) -> bool:
        """Has the clock stood since we know it for long enough to trust it more than what was written before?"""
        return self._passing() - self._since >= PROBATION

    def _read(self) -> tuple[datetime, float, float]:
        """All three of one moment: a machine that stands still between two of them would look like a clock that was
        set."""
        while True:
            passing = self._passing()
            wall, running = self._clock(), self._running()
            if self._passing() - passing < AT_ONCE:
                return wall, running, passing


def note_step(catalog: Catalog, now: datetime, step: timedelta) -> None:
    """The clock was set far ahead, to ``now``: ``careful`` goes by that. Raises CatalogError."""
    if step > DOUBTED:
        before = now - step
        catalog.cursors.move(
            {_SET_AT: int(now.timestamp()), _SET_BY: int((step + (before - careful(catalog, before))).total_seconds())}
        )


def careful(catalog: Catalog, now: datetime) -> datetime:
    """The moment by which backups expire: ``now``, but for a day after the clock was set far ahead what it would be
    without that. Raises CatalogError."""
    rows = catalog.cursors.all()
    if _SET_AT not in rows:
        return now
    passed = now - datetime.fromtimestamp(rows[_SET_AT], UTC)
    return now - timedelta(seconds=rows[_SET_BY]) if timedelta(0) <= passed < CAREFUL else now
