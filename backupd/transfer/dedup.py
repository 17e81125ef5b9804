"""What a new backup need not store again: the key that recognises content, and what a destination holds already.

Losing the key costs only dedup: the next backup stores everything again.

Only objects that a committed backup names and that nobody is about to collect count as known. An object alone proves
nothing: it may belong to a run that died, or be on its way out. ``Presence`` asks one listing instead of object by
object, and takes 8 bytes for each.

One part goes to every destination of a backup: it is looked up, sealed once, stored everywhere, and linked where
destinations keep trees.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import BackupdError, LockedError, ObjectMissingError, RefusedError
from backupd.model.manifest import CODEC, Entry, Header, StoredObject
from backupd.transfer.holds_and_locks import each, is_withdrawn
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.manifests import backup_ids, read
from storage import layout, objects
from storage.destination import Destination, as_tree, size_of
from storage.objects import quarantined

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
            hint="move it away; the next backup makes a new key and stores everything again",
        )
    return key


def _unusable(path: Path, error: OSError) -> RefusedError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"free space for the folder {path.parent}, then repeat the command"
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
    return [
        item.name
        for item in objects
        if item.name in unusable or size_of(destination, layout.object_key(item.name)) != item.size
    ]


def unusable_objects(destination: Destination) -> tuple[frozenset[str], frozenset[str]]:
    """Names of objects that somebody is about to remove, and of those that are known to be damaged."""
    return _tombstoned(destination), quarantined(destination)


def missing(destination: Destination, items: Iterable[StoredObject]) -> list[str]:
    """As ``confirm``, in few round trips: by listing, where a destination is far away. Names, as far as they are
    missing or of another size."""
    wanted = {item.name: item.size for item in items}
    for info in destination.list(layout.OBJECTS):
        if wanted.get(name := layout.name_in(info.key)) == info.size:
            del wanted[name]
    return list(wanted)


def _tombstoned(destination: Destination) -> frozenset[str]:
    return frozenset(layout.name_in(info.key) for info in destination.list(layout.TOMBSTONES))


class Presence:
    """What lay in the pool when this was made, but for what is in quarantine. Of a million objects one is mistaken for
    another one with a probability of 10^-8."""

    def __init__(self, destination: Destination) -> None:
        bad = objects.quarantined(destination)
        there = ((layout.name_in(info.key), info.size) for info in destination.list(layout.OBJECTS))
        found = array("Q", (_mark(name, size) for name, size in there if name not in bad))
        self._marks = array("Q", sorted(found))

    def holds(self, item: StoredObject) -> bool:
        """Is it there, in its size?"""
        mark = _mark(item.name, item.size)
        index = bisect_left(self._marks, mark)
        return index < len(self._marks) and self._marks[index] == mark


def _mark(name: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name} {size}".encode()).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a part went. ``new`` is False when every destination held it already."""

    object: StoredObject
    new: bool


@dataclass(frozen=True, slots=True)
class Load:
    """What one destination was given: bytes, and the seconds in which at least one of them was on its way."""

    destination: str
    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second, however many streams there were beside each other."""
        return self.bytes / max(self.seconds, 1e-9)


class LoadMeter:
    """Measures a destination's load; for any number of threads."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name, self._clock = name, clock
        self._lock = threading.Lock()
        self._bytes = self._active = 0
        self._seconds = self._since = 0.0

    @contextmanager
    def measure(self, size: int) -> Iterator[None]:
        """Count the ``size`` bytes that the block gives the destination, and the time that it takes."""
        with self._lock:
            if not self._active:
                self._since = self._clock()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                self._bytes += size
                if not self._active:
                    self._seconds += self._clock() - self._since

    def load(self) -> Load:
        """What was measured until now."""
        with self._lock:
            return Load(self._name, self._bytes, self._seconds)


def known_everywhere(known: Sequence[Mapping[str, StoredObject]]) -> dict[str, StoredObject]:
    """Of one identity map per destination keep what all of them hold under the very same object name."""
    first, *rest = known
    return {
        identity: stored
        for identity, stored in first.items()
        if all(identity in other and other[identity].name == stored.name for other in rest)
    }


class Fanout:
    """Thread-safe; one per running backup.

    ``known`` must have been read after the backup's intent was written (see ``transfer.known``): only then can a
    concurrent sweep not take away what is reused here.
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        *,
        sealer: Sealer,
        identity_key: bytes,
        known: Mapping[str, StoredObject],
        tree: str,
    ) -> None:
        self._destinations = tuple(destinations)
        self._meters = tuple(LoadMeter(destination.name, time.monotonic) for destination in destinations)
        self._trees = tuple(tree for tree in map(as_tree, destinations) if tree is not None)
        self._sealer = sealer
        self._identity_key = identity_key
        self._known = dict(known)
        self._tree = tree
        self._lock = threading.Lock()
        self._new: dict[str, StoredObject] = {}
        self._reused: dict[str, StoredObject] = {}

    def place(
        self, plain: bytes | memoryview, digest: bytes, path: Callable[[str], str], *, read: Callable[[], None]
    ) -> Placed:
        """Store ``plain`` (SHA-256 ``digest``) everywhere and show it in the trees as ``path(object name)``.

        ``read`` is called once, when ``plain`` is needed no longer, unless this raises before.

        Raises ToolError when sealing fails, DestinationError when a destination does.
        """
        identity = objects.identity(self._identity_key, digest, len(plain), CODEC, self._sealer.recipients)
        with self._lock:
            hit = self._known.get(identity)
        if hit is not None and self._reuse(hit, path(hit.name)):
            read()
            with self._lock:
                fresh = hit.name in self._new
                if not fresh:
                    self._reused[hit.name] = hit
            return Placed(hit, new=fresh)
        sealed = self._sealer.seal(plain, compressed=read)
        stored = objects.named(identity, sealed)
        with self._lock:  # noted before the first byte is stored, so that a failure in between is cleaned too
            self._new[stored.name] = stored
        self._store(stored, sealed)
        self._link(stored, path(stored.name))
        with self._lock:
            self._known[identity] = stored
        return Placed(stored, new=True)

    def _store(self, stored: StoredObject, sealed: bytes) -> None:
        """At all destinations side by side: an object is as slow as the slowest of them, not as all together."""

        def at(destination: Destination, meter: LoadMeter) -> None:
            with meter.measure(stored.size):
                objects.store(destination, stored, sealed)

        targets = list(zip(self._destinations, self._meters, strict=True))
        if len(targets) == 1:
            at(*targets[0])
            return
        with ThreadPoolExecutor(len(targets), "fan-out") as pool:
            puts = [pool.submit(at, *target) for target in targets]
        for put in puts:
            put.result()

    def _reuse(self, hit: StoredObject, path: str) -> bool:
        """Look at the object before trusting the hit: a truncated or vanished one is stored afresh instead."""
        try:
            for destination in self._destinations:
                if destination.stat(layout.object_key(hit.name)).size != hit.size:
                    return False
            self._link(hit, path)
        except ObjectMissingError:
            return False
        return True

    def _link(self, stored: StoredObject, path: str) -> None:
        for tree in self._trees:
            tree.link(layout.object_key(stored.name), self._tree, path)

    def relink(self, entries: Iterable[Entry]) -> None:
        """Make the trees afresh from the finished ``entries``."""
        for tree in self._trees:
            tree.remove_tree(self._tree)
            for path, name in layout.tree_links(entries):
                tree.link(layout.object_key(name), self._tree, path)

    @property
    def new_objects(self) -> tuple[StoredObject, ...]:
        """What this backup stored."""
        with self._lock:
            return tuple(self._new.values())

    @property
    def reused_objects(self) -> tuple[StoredObject, ...]:
        """What the backup names and all destinations held already."""
        with self._lock:
            return tuple(self._reused.values())

    @property
    def loads(self) -> tuple[Load, ...]:
        """What each destination was given so far, and how fast it took it."""
        return tuple(meter.load() for meter in self._meters)

    def forget(self, used: Collection[str]) -> None:
        """Take back new objects that are not among the names ``used``: what they were for is not part of the backup
        any more. What may not be deleted is garbage for a sweep. Raises DestinationError."""
        with self._lock:
            idle = [name for name in self._new if name not in used]
        for name in idle:
            for destination in self._destinations:
                with suppress(LockedError):  # no manifest will name it
                    destination.delete(layout.object_key(name))
        with self._lock:
            for name in idle:
                del self._new[name]
            self._known = {identity: stored for identity, stored in self._known.items() if stored.name not in idle}

    def publish(self) -> None:
        """Make the finished trees visible, where there are trees."""
        for tree in self._trees:
            tree.publish(self._tree)

    def discard(self, *, committed: bool) -> list[BackupdError]:
        """Take back everything this backup stored. Nobody else can have reused it as long as it was in no manifest;
        once a manifest may have been seen (``committed``), the objects are left to a sweep, which asks first.

        Gives the errors met; what could not be removed stays garbage for the next sweep.
        """
        errors: list[BackupdError] = []
        for destination in self._destinations:
            try:
                tree = as_tree(destination)
                if tree is not None:
                    tree.remove_tree(self._tree)
                for stored in () if committed else self.new_objects:
                    destination.delete(layout.object_key(stored.name))
            except BackupdError as error:
                errors.append(error)
        return errors
