"""What a new backup need not store again: the key that recognises content, and what a destination holds already.

Losing the key costs only dedup: the next backup stores everything once more.

Only objects that a committed backup names and that nobody is about to collect count as known. An object alone proves
nothing: it may belong to a run that died, or be on its way out.

``Presence`` asks one listing instead of object by object, and takes 8 bytes for each.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path

from backupd.model.errors import ObjectMissingError, RefusedError
from backupd.model.manifest import Header, StoredObject
from backupd.transfer.guards.holds_and_marks import is_withdrawn
from backupd.transfer.guards.object_locks import each
from backupd.transfer.records.manifests import backup_ids, read
from storage.contract import layout, objects
from storage.contract.destination import Destination
from storage.contract.objects import quarantined

KEY_SIZE = 32


def identity_key(path: Path) -> bytes:
    """Read the key in ``path``, making it (0600, 32 random bytes) where there is none. Safe for two at once.

    Raises RefusedError when the file is not a key of ours, or cannot be read or made.
    """
    try:
        key = _read_or_make(path)
    except OSError as error:
        raise _unusable(path, error) from error
    if len(key) != KEY_SIZE:
        raise RefusedError(
            f"{path} is not an identity key: {len(key)} bytes where {KEY_SIZE} were expected",
            hint="move it away; the next backup makes a new key and stores everything once more",
        )
    return key


def _unusable(path: Path, error: OSError) -> RefusedError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"make room for the folder {path.parent}, then try again"
    elif error.errno == errno.EISDIR:
        hint = "a folder is in place of the key: move it away; the next backup makes a new key"
    else:
        hint = f"this user must be able to read {path} and to write into {path.parent}"
    return RefusedError(f"the identity key {path} cannot be used: {reason}", hint=hint)


def _read_or_make(path: Path) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        fresh = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_SIZE))
                file.flush()
                os.fsync(file.fileno())
            # A hard link, not a rename: the first of two wins and both read the same key.
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            fresh.unlink()
    return path.read_bytes()


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
