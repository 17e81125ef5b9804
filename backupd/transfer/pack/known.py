"""What a new backup may reuse instead of storing it again.

Only objects that a committed backup names and that nobody is about to collect count as known. An object alone proves
nothing: it may belong to a run that died, or be on its way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backupd.model.errors import ObjectMissingError
from backupd.model.manifest import Header, StoredObject
from backupd.transfer.guards.erase import each
from backupd.transfer.guards.marks import is_withdrawn
from backupd.transfer.records.inventory import backup_ids, read
from storage.contract import layout
from storage.contract.destination import Destination
from storage.contract.objects import quarantined


def load_known(destination: Destination, server: str, backups: int = 3) -> Mapping[str, StoredObject]:
    """Objects by identity, from the newest ``backups`` committed, unmarked and readable manifests of ``server``.

    Call it after the intent is written. Without those that are tombstoned or quarantined.
    """
    notes = [info.key for info in destination.list(f"{layout.MARKS}{server}/")]
    withdrawn = each(lambda key: is_withdrawn(destination, key), notes)
    marked = {layout.backup_of(key) for key, back in zip(notes, withdrawn, strict=True) if not back}
    headers: list[Header] = []
    for owner in reversed(backup_ids(destination, server)):
        if len(headers) == backups:
            break
        found = None if owner in marked else read(destination, *owner)
        if found is not None and isinstance(found.header, Header):
            headers.append(found.header)
    unusable = _tombstoned(destination) | quarantined(destination)
    return {
        layout.identity_of(item.name): item
        for header in reversed(headers)
        for item in header.objects
        if item.name not in unusable
    }


def confirm(destination: Destination, objects: Iterable[StoredObject]) -> list[str]:
    """Look at each object right before the commit: names of those that are gone, altered in size, or on their way out.

    Give it every object that the manifest is going to name, not only the reused ones.
    """
    # Tombstones first. A sweep removes the object before its tombstone, so whoever finds no tombstone and then the
    # object itself has seen it before any removal; in the other order both looks could fall around one.
    unusable = _tombstoned(destination) | quarantined(destination)
    return [item.name for item in objects if item.name in unusable or not _is_there(destination, item)]


def unusable_objects(destination: Destination) -> tuple[frozenset[str], frozenset[str]]:
    """Names of objects that somebody is about to remove, and of those that are known to be damaged."""
    return _tombstoned(destination), quarantined(destination)


def missing(destination: Destination, items: Iterable[StoredObject]) -> list[str]:
    """As ``confirm``, in few round trips: by listing, where a place is far away. Names, as far as they are missing or
    of another size."""
    wanted = {item.name: item.size for item in items}
    for info in destination.list(layout.OBJECTS):
        if wanted.get(name := layout.name_in(info.key)) == info.size:
            del wanted[name]
    return list(wanted)


def _is_there(destination: Destination, item: StoredObject) -> bool:
    try:
        return destination.stat(layout.object_key(item.name)).size == item.size
    except ObjectMissingError:
        return False


def _tombstoned(destination: Destination) -> frozenset[str]:
    return frozenset(layout.name_in(info.key) for info in destination.list(layout.TOMBSTONES))
