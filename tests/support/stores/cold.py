"""A destination in memory whose objects lie in an archive class, with a clock that a test moves."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import BinaryIO

from backupd.model.errors import ArchivedError, DestinationError, RefusedError
from backupd.model.text import Clock
from storage import layout
from storage.destination import Capability, Coldness, ColdState, Tier
from tests.support.stores.memory import MemoryDestination

HOURS = {Tier.BULK: 48.0, Tier.STANDARD: 12.0, Tier.EXPEDITED: 1.0}


@dataclass(frozen=True)
class _Thaw:
    ready_at: datetime
    until: datetime


class ColdPlace(MemoryDestination):
    """Everything that may be cold is. ``requests`` counts, by key, how often a thaw was asked for; ``silent``: nothing
    answers; ``after``: that many thaws are taken, then nothing answers; ``late``: so much longer each takes than it
    should; ``stubborn``: what is under way cannot be made faster; ``expected`` False: a rule has done it that no
    configuration knows."""

    def __init__(self, name: str, clock: Clock, storage_class: str = "DEEP_ARCHIVE", *, expected: bool = True) -> None:
        super().__init__(name, tree=False, clock=clock)
        self._now = clock
        self._class = storage_class
        self._thaws: dict[str, _Thaw] = {}
        self._guard = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.order: list[str] = []
        self.looks = 0
        self.silent = False
        self.stubborn = False
        self.late = timedelta(0)
        self.after: int | None = None
        self._capabilities_told = (Capability.ARCHIVE if expected else Capability.RULES) | Capability.CHECKSUMS

    @property
    def capabilities(self) -> Capability:
        return self._capabilities_told

    def checksum(self, key: str) -> str | None:
        with super().get(key) as stream:
            return hashlib.sha256(stream.read()).hexdigest()

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        if self._state(key).state in (ColdState.ARCHIVED, ColdState.THAWING):
            raise ArchivedError(f"{key} at destination {self.name} is archived", hint="thaw it")
        return super().get(key, offset=offset, length=length)

    def coldness(self, key: str) -> Coldness:
        self._answer()
        self.looks += 1
        return self._state(key)

    def thaw(self, key: str, tier: Tier, days: int) -> Coldness:
        self._answer()
        before = self._state(key)
        if before.storage_class == "DEEP_ARCHIVE" and tier is Tier.EXPEDITED:
            raise RefusedError(f"{key} has no expedited tier")
        if self.stubborn and before.state is ColdState.THAWING:
            return replace(before, refused=True)
        with self._guard:
            if self.after is not None:
                if self.after == 0:
                    self.silent = True
                    raise DestinationError(f"destination {self.name} does not answer")
                self.after -= 1
            self.requests[key] += 1
            self.order.append(key)
            now = self._now()
            ready = now if before.state is ColdState.THAWED else now + timedelta(hours=HOURS[tier])
            earlier = self._thaws.get(key)
            if earlier is not None and before.state is ColdState.THAWING:
                ready = min(ready, earlier.ready_at)
            self._thaws[key] = _Thaw(ready, ready + timedelta(days=days))
        return self._state(key)

    def expire(self) -> None:
        """Every thawed copy goes away."""
        self._thaws.clear()

    def _answer(self) -> None:
        if self.silent:
            raise DestinationError(f"destination {self.name} does not answer", hint="wait")

    def _state(self, key: str) -> Coldness:
        size = self.stat(key).size
        if layout.cold_kind(key) is None:
            return Coldness(key, size, "STANDARD", ColdState.WARM)
        thaw, now = self._thaws.get(key), self._now()
        if thaw is None or thaw.until <= now:
            return Coldness(key, size, self._class, ColdState.ARCHIVED)
        if thaw.ready_at + self.late > now:
            return Coldness(key, size, self._class, ColdState.THAWING)
        return Coldness(key, size, self._class, ColdState.THAWED, thaw.until)


class Cooled(MemoryDestination):
    """A bucket with a rule that moves whatever ``is_cold`` names into an archive class."""

    def __init__(self, is_cold: Callable[[str], bool], clock: Clock) -> None:
        super().__init__("bucket", tree=False, clock=clock)
        self.is_cold = is_cold

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        if self.is_cold(key):
            raise ArchivedError(f"{self.name}: {key} lies in an archive class")
        return super().get(key, offset=offset, length=length)
