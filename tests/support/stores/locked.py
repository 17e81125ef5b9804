"""A destination in memory that locks what is stored, as a bucket with object lock does, and tells until when."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import BinaryIO

from backupd.model.text import Clock
from storage import layout
from storage.destination import Capability, ObjectInfo
from tests.support.stores.memory import MemoryDestination

FOR = timedelta(days=14)


class LockedPlace(MemoryDestination):
    """``until`` by key. Nothing is kept from being deleted."""

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name, tree=False, clock=clock)
        self.until: dict[str, datetime] = {}
        self._now = clock

    @property
    def capabilities(self) -> Capability:
        return Capability.LOCKS

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        info = super().put(key, stream)
        if not layout.comes_and_goes(key):
            self.until[key] = self._now() + FOR
        return info

    def extend(self, key: str, since: datetime) -> bool:
        self.stat(key)
        late = layout.comes_and_goes(key) or self.until[key] >= since + FOR
        if not late:
            self.until[key] = since + FOR
        return not late

    def sooner_than(self, moment: datetime) -> set[str]:
        """What is locked for less than ``FOR`` after ``moment``."""
        return {key for key, until in self.until.items() if until < moment + FOR}
