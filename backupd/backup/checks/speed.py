"""Who was slow: the source, or one of the destinations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from backupd.model.manifest import Entry
from backupd.model.text import format_duration, format_size
from backupd.transfer.fanout import Load

REDO_NAMES = frozenset({"ib_logfile0", "xtrabackup_logfile"})
"""What the physical tools call the redo log that they copied while they ran."""
LONG_SECONDS = 60.0
"""A run that was over sooner says nothing about a destination, and annoys nobody."""
FACTOR = 3.0
"""So many times slower than the source counts as slow."""

NO_LIMITS: Mapping[str, int] = MappingProxyType({})
LIMITED = 0.7
"""From this share of its max_upload on it is the limit that holds a destination back."""

T = TypeVar("T")


class Stopwatch:
    """``seconds`` spent waiting for the items of an iterable, none of those spent with them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seconds = 0.0

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The same items."""
        iterator = iter(items)
        while True:
            begun = self._clock()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += self._clock() - begun
            yield item


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one backup: ``size`` bytes of plaintext that the source delivered in ``source_seconds`` of waiting for it,
    ``redo`` of them its copied redo log, ``new`` bytes to store at each of the destinations (``loads``)."""

    size: int
    source_seconds: float
    redo: int
    new: int
    loads: tuple[Load, ...]

    @property
    def source_rate(self) -> float:
        """Bytes a second that the source would deliver to somebody who never makes it wait."""
        return self.size / max(self.source_seconds, 1e-9)


def redo_size(entries: Iterable[Entry]) -> int:
    """Bytes of redo log among ``entries``."""
    return sum(entry.size for entry in entries if entry.path in REDO_NAMES)


def slow_destinations(
    speeds: Speeds, *, seconds: float, prepare_seconds: float, limits: Mapping[str, int] = NO_LIMITS
) -> tuple[str, ...]:
    """A warning for each destination that held the backup up: its own rate is less than a third of what it would need
    to keep up with the source, and it was busy for at least half of the time (else something between was slower, such
    as sealing). Nothing for runs of up to a minute (``seconds``).

    ``prepare_seconds``: how long preparing this backup for a restore is estimated to take. ``limits``: max_upload of
    those that have one, in bytes a second.
    """
    if seconds <= LONG_SECONDS or not speeds.size:
        return ()
    # What is stored is compressed, and partly there already: so many bytes of it go with each byte of the source.
    needed = speeds.source_rate * speeds.new / speeds.size
    return tuple(
        f"{_blamed(load, limits.get(load.destination))} where {format_size(needed)}/s would keep up "
        f"with the source ({format_size(speeds.source_rate)}/s before compression); the redo log copied "
        f"meanwhile has {format_size(speeds.redo)}, and preparing this backup will take about "
        f"{format_duration(prepare_seconds)}"
        for load in speeds.loads
        if load.bytes and load.rate * FACTOR < needed and load.seconds * 2 >= seconds
    )


def _blamed(load: Load, limit: int | None) -> str:
    if limit is not None and load.rate >= limit * LIMITED:
        return (
            f"max_upload of destination {load.destination} ({format_size(limit)}/s) held this backup up: "
            f"{format_size(load.rate)}/s were sent"
        )
    return f"destination {load.destination} is slow: it took {format_size(load.rate)}/s"
