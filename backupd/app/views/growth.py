"""How the data of a server grows, and its share of each destination. Pure: records in, values out; see
``backupd.app.views.capacity`` for the formula."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.binlog import Run
from backupd.model.document import Document

SECONDS_A_DAY = 86400.0
LEAST_SAMPLES = 3
"""Two points always make a line, so they say nothing about how good it is."""
LEAST_DAYS = 1.0
HISTORY = timedelta(days=60)
"""Older backups say little about how it grows now."""
RECENT = timedelta(days=14)
"""What was added in this time gives what is added each day."""

_STUDENT_TABLE = (
    "12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131 "
    "2.120 2.110 2.101 2.093 2.086 2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045 2.042"
)
_STUDENT = tuple(map(float, _STUDENT_TABLE.split()))
"""Quantile 0.975 of Student's t for 1 to 30 degrees of freedom; 1.96 beyond."""
_MOST = 700.0
"""The largest exponent that a float holds."""


@dataclass(frozen=True, slots=True)
class Growth(Document):
    """``size_now``: bytes by the fitted line at the last sample, from where days are counted. ``rate``: logarithm of
    the factor per day. ``samples`` in number, over ``days``, around the day ``mean`` with a sum of ``squares``;
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
        return exponential(self.rate)

    def size_after(self, days: float) -> float:
        """Bytes after this time, if it goes on like that."""
        return self.size_now * exponential(self.rate * days)

    def bounds(self, days: float) -> tuple[float, float]:
        """The least and the largest size after ``days`` that are likely (19 times in 20)."""
        freedom = self.samples - 2
        student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96
        error = self.spread * math.sqrt(1 + 1 / self.samples + (days - self.mean) ** 2 / self.squares)
        return self.size_after(days) * exponential(-student * error), self.size_after(days) * exponential(
            student * error
        )


def fit(history: Sequence[tuple[datetime, int]]) -> Growth | None:
    """The growth of sizes (bytes) over time, in any order; None where there are too few samples, or from too short a
    time, to show anything."""
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
    return Growth(exponential(start), rate, count, -days[0], math.sqrt(misses / (count - 2)), mean, squares)


def exponential(exponent: float) -> float:
    """e to this power, as far as a float holds it."""
    return math.exp(min(exponent, _MOST))


@dataclass(frozen=True, slots=True)
class Share(Document):
    """Of a destination: bytes ``stored`` there of a server now, and ``added`` each day; None where too little is known
    of how its data grows."""

    destination: str
    stored: int
    added: float
    growth: Growth | None


def shares(records: Sequence[BackupRecord], runs: Iterable[Run], now: datetime) -> tuple[Share, ...]:
    """Of each destination that knows a copy or binary logs of the server."""
    logs: dict[str, list[Run]] = {}
    for run in runs:
        logs.setdefault(run.destination, []).append(run)
    names = {copy.destination for record in records for copy in record.copies} | logs.keys()
    return tuple(
        growth_of([one for one in records if one.state_at(name)], logs.get(name, []), name, now)
        for name in sorted(names)
    )


def growth_of(records: Sequence[BackupRecord], runs: Sequence[Run], destination: str, now: datetime) -> Share:
    """Shared objects are counted with the backup that stored them first; when that is gone, the largest of those that
    are left is the least that must be there."""
    physical = [record for record in records if record.kind is BackupKind.PHYSICAL_FULL]
    fulls = [
        (record.started_at, record.stats.bytes_source)
        for record in physical or records
        if record.started_at > now - HISTORY
    ]
    alive = [
        record.stats
        for record in records
        if record.state is not BackupState.DELETED and record.state_at(destination) not in ("", "deleted")
    ]
    stored = max(sum(stats.bytes_new for stats in alive), max((stats.bytes_stored for stats in alive), default=0))
    recent = [record for record in records if record.started_at > now - RECENT]
    # The first backup of all stores everything; that says nothing about a day.
    newer = recent if len(recent) < len(records) else sorted(recent, key=lambda record: record.started_at)[1:]
    since = min((record.started_at for record in records), default=now)
    days = max(1.0, min(RECENT, now - since).total_seconds() / SECONDS_A_DAY)
    logs = sum(run.stored for run in runs)
    added = sum(record.stats.bytes_new for record in newer) / days + logs / _days_of(runs)
    return Share(destination, stored + logs, added, fit(fulls))


def _days_of(runs: Iterable[Run]) -> float:
    """In how many days these binary logs were written."""
    moments = [at for run in runs for at in (run.first_at, run.last_at, run.confirmed_at) if at is not None]
    return max(1.0, (max(moments) - min(moments)).total_seconds() / SECONDS_A_DAY) if moments else 1.0
