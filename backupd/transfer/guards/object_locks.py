"""What a backup counts on, and did not store itself, stays locked as long as what it stored does.

An object lock is given when something is stored. Without this, objects that are named again, and everything that an
increment builds on, would be locked until the first backup's date only, and could be deleted under the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime

from backupd.model.errors import ObjectMissingError
from backupd.model.manifest import Header
from backupd.transfer.guards.erase import each
from backupd.transfer.records.inventory import read
from storage.contract import layout
from storage.contract.destination import Destination, LockingDestination, as_locking


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
