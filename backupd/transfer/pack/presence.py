"""Which objects a destination's pool holds, asked of one listing instead of object by object, in 8 bytes for each."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left

from backupd.model.manifest import StoredObject
from storage.contract import layout, objects
from storage.contract.destination import Destination


class Presence:
    """What lay in the pool when this was made, but for what is in quarantine. Of a million objects one is mistaken for
    another one with a probability of 10^-8."""

    def __init__(self, destination: Destination) -> None:
        bad = objects.quarantined(destination)
        found = array(
            "Q",
            (
                _mark(name, info.size)
                for info in destination.list(layout.OBJECTS)
                if (name := layout.name_in(info.key)) not in bad
            ),
        )
        self._marks = array("Q", sorted(found))

    def holds(self, item: StoredObject) -> bool:
        """Is it there, in its size?"""
        mark = _mark(item.name, item.size)
        place = bisect_left(self._marks, mark)
        return place < len(self._marks) and self._marks[place] == mark


def _mark(name: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name} {size}".encode()).digest()[:8], "big")
