"""How a repository grows, and on which day it is full.

**Input**: when each full backup of a server was taken and how many bytes its source had (both from the catalog), what
is stored of it now, what is added each day, whether its destination has rules, and the free bytes.

**Formula**: data grows by the same factor each day, ``size(t) = e^(a + b t)``; ``a`` and ``b`` are the least squares
line through the logarithms of the sizes. What a destination with rules holds grows with the data,
``stored x (e^(b t) - 1)`` more after ``t`` days; one that keeps everything grows by what each day adds,
``added x (e^(b t) - 1) / b``.

**Error bound**: the prediction interval of that line which holds 19 times in 20, for growth that is geometric with
independent errors. It widens with the distance from the data. A change of behaviour (a new table, a purge, a holiday)
is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

SECONDS_A_DAY = 86400.0
LEAST_SAMPLES = 3
"""Two points always lie on a line, so they say nothing about how good it is."""
LEAST_DAYS = 1.0
HORIZON = 365
"""Days that are looked ahead."""

_STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
"""Quantile 0.975 of Student's t for 1 to 30 degrees of freedom; 1.96 beyond."""
_MOST = 700.0
"""The largest exponent that a float holds."""


@dataclass(frozen=True, slots=True)
class Growth:
    """``size_now``: bytes by the fitted line at the last sample, from where days are counted. ``rate``: logarithm of
    the factor per day. ``samples`` in number, over so many ``days``, around the day ``mean`` with a sum of ``squares``;
    ``spread``: residual standard error of the logarithms."""

    size_now: float
    rate: float
    samples: int
    days: float
    spread: float
    mean: float
    squares: float

    @property
    def factor(self) -> float:
        """By what the size is multiplied each day."""
        return _exp(self.rate)

    def size_after(self, days: float) -> float:
        """Bytes after this time, if it goes on like that."""
        return self.size_now * _exp(self.rate * days)

    def bounds(self, days: float) -> tuple[float, float]:
        """The least and the largest size after ``days`` that are likely (19 times in 20)."""
        freedom = self.samples - 2
        student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96
        error = self.spread * math.sqrt(1 + 1 / self.samples + (days - self.mean) ** 2 / self.squares)
        return self.size_after(days) * _exp(-student * error), self.size_after(days) * _exp(student * error)


def fit(history: Sequence[tuple[datetime, int]]) -> Growth | None:
    """The growth of sizes (bytes) over time, in any order; None where there are too few samples, or from too short a
    time, to tell anything."""
    samples = sorted((moment, size) for moment, size in history if size > 0)
    if len(samples) < LEAST_SAMPLES:
        return None
    last = samples[-1][0]
    days = [(moment - last).total_seconds() / SECONDS_A_DAY for moment, _size in samples]
    if -days[0] < LEAST_DAYS:
        return None
    logs = [math.log(size) for _moment, size in samples]
    count = len(samples)
    mean, height = sum(days) / count, sum(logs) / count
    squares = sum((day - mean) ** 2 for day in days)
    rate = sum((day - mean) * (log - height) for day, log in zip(days, logs, strict=True)) / squares
    start = height - rate * mean
    misses = sum((log - start - rate * day) ** 2 for day, log in zip(days, logs, strict=True))
    return Growth(_exp(start), rate, count, -days[0], math.sqrt(misses / (count - 2)), mean, squares)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One server's part of a destination: bytes ``stored`` now and ``added`` each day; ``expires``: it has rules.
    Without a ``growth`` its data is taken to stay as it is."""

    stored: int
    added: float
    expires: bool
    growth: Growth | None

    def more_after(self, days: float, *, rate: float | None = None) -> float:
        """Bytes that are there after ``days`` beyond those of now. ``rate`` replaces that of the growth."""
        speed = rate if rate is not None else self.growth.rate if self.growth else 0.0
        swollen = _exp(speed * days) - 1
        if self.expires:
            return max(0.0, self.stored * swollen)
        return self.added * (swollen / speed if abs(speed) > 1e-9 else days)

    def most_after(self, days: float) -> float:
        """The same at the upper error bound."""
        if self.growth is None:
            return self.more_after(days)
        upper = math.log(max(self.growth.bounds(days)[1], 1) / self.growth.size_now) / days
        return self.more_after(days, rate=upper)


@dataclass(frozen=True, slots=True)
class Filling:
    """Days from now until there is no room left; ``earliest`` at the upper error bound. None: not within a year."""

    day: int | None
    earliest: int | None


def days_until_full(tenants: Sequence[Tenant], free: int) -> Filling:
    """When the growth of all ``tenants`` of a destination has used up its ``free`` bytes."""
    return Filling(
        _first(lambda day: sum(tenant.more_after(day) for tenant in tenants) >= free),
        _first(lambda day: sum(tenant.most_after(day) for tenant in tenants) >= free),
    )


def _first(full: Callable[[int], bool]) -> int | None:
    return next((day for day in range(1, HORIZON + 1) if full(day)), None)


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, _MOST))
