"""Destinations in memory that do not let go of everything, or know the checksums of what they hold."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, BinaryIO

from backupd.model.errors import ArchivedError, LockedError
from backupd.model.text import format_time
from storage import layout
from storage.destination import Capability, Coldness, ColdState, ObjectInfo, Tier
from tests.support.stores.memory import MemoryDestination


class LockingDestination(MemoryDestination):
    """``until`` a moment nothing under the prefixes ``locked`` may be deleted; what begins with ``free`` always may."""

    def __init__(
        self, name: str, until: datetime, now: Callable[[], datetime], locked: tuple[str, ...] = ("",), **more: Any
    ) -> None:
        super().__init__(name, clock=now, **more)
        self.until, self._now, self._locked = until, now, locked

    def delete(self, key: str) -> None:
        leases = (layout.INTENTS, layout.PINS, layout.SWEEPS, layout.MARKS, layout.TOMBSTONES, layout.QUARANTINE)
        if self._now() < self.until and key.startswith(self._locked) and not key.startswith(leases):
            raise LockedError(
                f"destination {self.name}: {key} may not be deleted",
                detail=f"it is locked until {format_time(self.until)}",
            )
        super().delete(key)


class UndeletableDestination(MemoryDestination):
    """Where nobody may delete anything: credentials without that right. What is not there cannot be deleted either."""

    def delete(self, key: str) -> None:
        if key not in self._blobs:
            return
        raise LockedError(f"destination {self.name} deletes nothing", detail=f"{key}: delete: false")


class SlowDestination(MemoryDestination):
    """Deletions of objects take their time until ``wanted`` are under way at once; ``most`` is how many were."""

    wanted = 0
    patience = 20.0
    """Seconds, for all deletions together."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__(name, **more)
        self._running = 0
        self._guard = threading.Condition()
        self._until: float | None = None
        self.most = 0

    def delete(self, key: str) -> None:
        if not key.startswith(layout.OBJECTS):
            super().delete(key)
            return
        with self._guard:
            self._running += 1
            self.most = max(self.most, self._running)
            self._guard.notify_all()
            if self.wanted and self._until is None:
                self._until = time.monotonic() + self.patience
            while self._until is not None and self.most < self.wanted and time.monotonic() < self._until:
                self._guard.wait(0.05)
        super().delete(key)
        with self._guard:
            self._running -= 1


class ColdDestination(MemoryDestination):
    """Objects go cold when they are stored. ``thawing``: keys that were asked for; ``thawed``: those that can be read.
    ``reads`` counts bodies that were opened."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__(name, tree=False, **more)
        self.asked: list[tuple[str, Tier]] = []
        self.thawing: set[str] = set()
        self.thawed: set[str] = set()
        self.recorded: dict[str, str] = {}

    @property
    def capabilities(self) -> Capability:
        return Capability.ARCHIVE | Capability.CHECKSUMS

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        info = super().put(key, stream)
        with super().get(key) as stored:
            self.recorded[key] = hashlib.sha256(stored.read()).hexdigest()
        return info

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        if self.coldness(key).state not in {ColdState.WARM, ColdState.THAWED}:
            raise ArchivedError(f"{key} is in an archive class")
        return super().get(key, offset=offset, length=length)

    def checksum(self, key: str) -> str | None:
        self.stat(key)
        return self.recorded.get(key)

    def coldness(self, key: str) -> Coldness:
        size = self.stat(key).size
        if not key.startswith(layout.OBJECTS):
            return Coldness(key, size, "STANDARD", ColdState.WARM)
        state = (
            ColdState.THAWED if key in self.thawed else ColdState.THAWING if key in self.thawing else ColdState.ARCHIVED
        )
        return Coldness(key, size, "DEEP_ARCHIVE", state)

    def thaw(self, key: str, tier: Tier, days: int) -> Coldness:
        self.asked.append((key, tier))
        self.thawing.add(key)
        return self.coldness(key)

    def cold_keys(self) -> Iterator[str]:
        return (info.key for info in self.list(layout.OBJECTS))
