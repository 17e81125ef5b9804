"""Object locks: removing many keys past those that are locked, and keeping locked what a backup builds on.

A locked key is no failure of the caller that removes: it is reported, and the next caller tries again.

A destination locks an object when it is stored. Without ``lengthen``, objects that a backup names again, and everything
that an increment builds on, would be locked until the first backup's date only, and could be deleted under the last
one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TypeVar

from backupd.model.errors import LockedError, ObjectMissingError
from backupd.model.manifest import Header
from backupd.transfer.records.manifests import read
from storage.contract import layout
from storage.contract.destination import Destination, LockingDestination, as_locking

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
    def keys(self) -> tuple[str, ...]:
        """All that may not be removed yet."""
        return tuple(self._found)

    @property
    def text(self) -> str:
        """What to say of all of them: how many, and the words of one; empty when there are none."""
        if not self._found:
            return ""
        key, error = min(self._found.items())
        more = f" and {len(self._found) - 1} more" if len(self._found) > 1 else ""
        reason = error.line
        return f"{len(self._found)} files may not be removed yet: {key}{more}: {reason}"


def lengthen(destination: Destination, keys: Iterable[str], since: datetime) -> int:
    """Lock each of ``keys`` that is there as if it had been stored at ``since``; for how many that had to be asked for.
    Nothing happens where nothing is locked. Raises DestinationError."""
    locking = as_locking(destination)
    return 0 if locking is None else sum(each(lambda key: _extend(locking, key, since), keys))


def lengthen_all(
    destination: Destination, header: Header, above: Collection[str], since: datetime, *, stored: Collection[str]
) -> int:
    """The same for everything at ``destination`` that the backup ``header`` counts on, but for the keys ``stored``,
    which are locked already. ``above``: ids of what it builds on."""
    if as_locking(destination) is None:
        return 0
    keys = dict.fromkeys(_names(header))
    for backup_id in above:
        found = read(destination, header.server, backup_id)
        if found is not None and isinstance(found.header, Header):
            keys |= dict.fromkeys((*_names(found.header), *_described(layout.manifest_key(header.server, backup_id))))
    keys |= dict.fromkeys(_of_the_place(destination))
    return lengthen(destination, [key for key in keys if key not in stored], since)


def lengthen_branch(destination: Destination, server: str, branch: str, since: datetime) -> int:
    """The same for what describes a branch of binary logs: it is stored once, and all its logs count on it."""
    return lengthen(destination, _described(layout.branch_key(server, branch)), since)


def _extend(locking: LockingDestination, key: str, since: datetime) -> bool:
    try:
        return locking.extend(key, since)
    except ObjectMissingError:
        return False


def _names(header: Header) -> Iterator[str]:
    folder = layout.backup_folder(header.server, header.backup_id)
    yield from (layout.object_key(item.name) for item in header.objects)
    yield from (folder + item.name for item in header.side_files)


def _of_the_place(destination: Destination) -> Iterator[str]:
    """The marker, and of each installation the newest copy of its configuration: both are stored once."""
    yield layout.REPOSITORY
    newest = {
        made[1]: info.key
        for info in destination.list(layout.CONFIGURATIONS)
        if (made := layout.copy_of(info.key)) is not None
    }
    for key in newest.values():
        yield from _described(key)


def _described(key: str) -> tuple[str, str]:
    return key, layout.signature_key(key)
