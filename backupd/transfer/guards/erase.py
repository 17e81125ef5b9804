"""Removing many things at a place: several at once, since each takes a round trip, and past what may not go yet.

What is locked is no failure of whoever removes: it is told, and tried again by the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from backupd.model.errors import LockedError
from storage.contract.destination import Destination

WORKERS = 16
_FEW = 4
"""So many are done one after the other: a pool would cost more than it saves."""

Item = TypeVar("Item")
Found = TypeVar("Found")


def each(act: Callable[[Item], Found], items: Iterable[Item], *, workers: int = WORKERS) -> list[Found]:
    """``act`` of every item, several at once, in their order. The first error is raised, once the others have ended."""
    todo = list(items)
    if len(todo) <= _FEW:
        return [act(item) for item in todo]
    with ThreadPoolExecutor(max_workers=min(workers, len(todo)), thread_name_prefix="each") as pool:
        return list(pool.map(act, todo))


class Locks:
    """What may not be removed yet, by key: for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, LockedError] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def delete(self, destination: Destination, key: str) -> bool:
        """Remove ``key``; False when that may not be. Raises DestinationError for every other failure."""
        try:
            destination.delete(key)
        except LockedError as error:
            with self._lock:
                self._found[key] = error
            return False
        return True

    def delete_all(self, destination: Destination, keys: Sequence[str]) -> int:
        """How many of ``keys`` went."""
        return sum(each(lambda key: self.delete(destination, key), keys))

    @property
    def text(self) -> str:
        """What to say of all of them: how many, and the words of one; empty when there are none."""
        if not self._found:
            return ""
        key, error = min(self._found.items())
        more = f" and {len(self._found) - 1} more" if len(self._found) > 1 else ""
        reason = error.line
        return f"{len(self._found)} files may not be removed yet: {key}{more}: {reason}"
