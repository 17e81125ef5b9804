"""Taking away what no backup needs: what dead runs left, and objects that nobody names.

The order of looking is what makes it safe beside running backups. A backup writes its intent, stores and reuses
objects, puts its manifest, removes its intent. So whoever lists *candidates first, then intents, then manifests* meets
every run that touched a candidate: as an intent, or, when the intent is gone already, as a manifest.

Reuse needs one step more, since a run may hold on to an object that it has not touched: an unnamed object first gets a
tombstone; then intents and manifests are listed again; it goes only if still nobody names it and the tombstone is
older than every living intent, because a run that began later saw the tombstone and left the object alone.

Dead intents are removed before the manifests are listed. A run that was only asleep finds its intent gone
(``Holder.assert_held``) and does not count its commit.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from backupd.model.clock import Clock, format_time, parse_time
from backupd.model.errors import ObjectMissingError
from backupd.model.manifest import Header
from backupd.transfer.intent import intents
from backupd.transfer.inventory import backup_ids, committed
from backupd.transfer.lease import Alive, Lease, is_alive
from backupd.transfer.pin import pins
from backupd.transfer.segments import clear_strays
from storage import layout
from storage.destination import Destination, ObjectInfo, as_tree

SKEW = timedelta(minutes=5)
"""Clocks of several machines may differ so much, and a put may last so long."""


@dataclass(slots=True)
class Collected:
    """What one collection did; sizes in bytes. ``held`` says what was left alone, and why."""

    backups: list[str] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    trees: list[str] = field(default_factory=list)
    side_files: list[str] = field(default_factory=list)
    """Keys of side files, marks and keeps of backups that are no more."""
    leftovers: int = 0
    tombstoned: int = 0
    rescued: int = 0
    objects: int = 0
    bytes_freed: int = 0
    log_parts: list[str] = field(default_factory=list)
    """Keys of parts of binary logs whose upload died."""
    held: list[str] = field(default_factory=list)


@dataclass(slots=True)
class References:
    """Who names what. ``names``: objects of all readable manifests; ``damaged``: manifests that cannot be read."""

    backups: set[tuple[str, str]] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    damaged: list[str] = field(default_factory=list)

    def load(self, destination: Destination) -> None:
        """Add every manifest that was not read before; they are immutable."""
        for found in committed(destination, skip=self.backups):
            self.backups.add((found.server, found.backup_id))
            if isinstance(found.header, Header):
                self.names.update(item.name for item in found.header.objects)
            else:
                self.damaged.append(f"{found.backup_id} of {found.server}")


def living_intents(destination: Destination, now: datetime, alive: Alive = is_alive) -> list[Lease]:
    return [lease for lease in intents(destination) if alive(lease, now)]


def living_pins(destination: Destination, now: datetime, alive: Alive = is_alive) -> list[Lease]:
    return [lease for lease in pins(destination) if alive(lease, now)]


def collect(destination: Destination, *, clock: Clock, alive: Alive = is_alive) -> Collected:
    """Remove the garbage of dead runs and every object that nobody names and no living run can count on.

    Safe beside running backups, restores and other collections. Never removes a committed backup. Call it before
    writing one's own intent: objects that become garbage while any intent lives wait for the next collection.
    """
    return _Collection(destination, clock, alive).run()


def unfinished(destination: Destination) -> tuple[list[str], list[ObjectInfo]]:
    """Trees and side files that may belong to no committed backup: compare with intents, then manifests, in this order.
    """
    complete = set(backup_ids(destination))
    tree = as_tree(destination)
    trees = [] if tree is None else [name for name, published in tree.trees()
                                     if not published or layout.backup_of(name) not in complete]
    sides = [info for info in destination.list(layout.SERVERS) if layout.backup_of(info.key) not in complete]
    return trees, sides


def pooled(destination: Destination) -> tuple[dict[str, ObjectInfo], list[str]]:
    """The stored objects by name, and the keys of files among them that are not ours.

    A stranger's name makes no key, so whoever looked it up would take it for an altered manifest.
    """
    pool: dict[str, ObjectInfo] = {}
    strangers: list[str] = []
    for info in destination.list(layout.OBJECTS):
        name = layout.name_in(info.key)
        if layout.is_object_name(name) and layout.object_key(name) == info.key:
            pool[name] = info
        else:
            strangers.append(info.key)
    return pool, strangers


def entombed(destination: Destination) -> tuple[list[ObjectInfo], list[str]]:
    """The tombstones, and the keys of files among them that are not ours."""
    tombs: list[ObjectInfo] = []
    strangers: list[str] = []
    for info in destination.list(layout.TOMBSTONES):
        name = layout.name_in(info.key)
        if layout.is_object_name(name) and layout.tombstone_key(name) == info.key:
            tombs.append(info)
        else:
            strangers.append(info.key)
    return tombs, strangers


def orphans(pool: dict[str, ObjectInfo], references: References, running: list[Lease]) -> list[str]:
    """Objects in ``pool`` that nobody names, without those that may have been stored by a run that still lives."""
    born = min((lease.started_at for lease in running), default=None)
    return [name for name, info in pool.items() if name not in references.names
            and (born is None or info.modified_at < born - SKEW)]


def _tombstones(destination: Destination) -> dict[str, datetime]:
    """When each tombstone was put. One that cannot be read counts from when it was stored."""
    found: dict[str, datetime] = {}
    for info in entombed(destination)[0]:
        try:
            with destination.get(info.key) as stream:
                raw = stream.read()
        except ObjectMissingError:
            continue
        try:
            found[layout.name_in(info.key)] = parse_time(json.loads(raw)["at"])
        except (ValueError, KeyError, TypeError):
            found[layout.name_in(info.key)] = info.modified_at
    return found


class _Collection:
    """One run of ``collect``."""

    def __init__(self, destination: Destination, clock: Clock, alive: Alive) -> None:
        self._destination = destination
        self._clock = clock
        self._alive = alive
        self._result = Collected()
        self._references = References()

    def run(self) -> Collected:
        self._result.leftovers = self._destination.clear_leftovers()
        self._result.log_parts = clear_strays(self._destination, now=self._clock())
        trees, sides = unfinished(self._destination)
        sides += self._destination.list(layout.MARKS)
        sides += self._destination.list(layout.HELD)
        pool, _ = pooled(self._destination)
        tombs = _tombstones(self._destination)
        running = self._look()
        self._clear_unfinished(trees, sides, running)
        if self._references.damaged:
            # What a damaged manifest names is unknown, and it may yet be mended from another copy.
            self._result.held.append("objects: no object is collected while manifests cannot be read: "
                                     + ", ".join(self._references.damaged))
            return self._result
        for name in orphans(pool, self._references, running):
            if name not in tombs:
                tombs[name] = self._tombstone(name)
        if tombs:
            running = self._look()
            if not self._references.damaged:
                self._remove_objects(pool, tombs, running)
        return self._result

    def _look(self) -> list[Lease]:
        """Remove dead intents and pins, list the living intents, *then* read the manifests; the living intents."""
        now = self._clock()
        for lease in [*intents(self._destination), *pins(self._destination)]:
            if not self._alive(lease, now):
                self._destination.delete(lease.key)
                self._result.leases.append(lease.key)
        running = living_intents(self._destination, now, self._alive)
        self._references.load(self._destination)
        return running

    def _clear_unfinished(self, trees: list[str], sides: list[ObjectInfo], running: list[Lease]) -> None:
        if any(lease.owner is None for lease in running):
            return  # an intent that cannot be read: whose backup it protects is unknown
        kept = self._references.backups | {backup for lease in running for backup in lease.backups}
        tree = as_tree(self._destination)
        for name in dict.fromkeys(trees):
            if tree is not None and layout.backup_of(name) not in kept:
                tree.remove_tree(name)
                self._result.trees.append(name)
        for info in sides:
            owner = layout.backup_of(info.key)
            if owner is not None and owner not in kept:
                self._destination.delete(info.key)
                self._result.side_files.append(info.key)

    def _tombstone(self, name: str) -> datetime:
        """Put a tombstone; the time in it is not older than its appearance by more than the allowance for that."""
        while True:
            at = self._clock()
            note = json.dumps({"object": name, "at": format_time(at)}, sort_keys=True).encode("ascii")
            self._destination.put(layout.tombstone_key(name), io.BytesIO(note))
            if self._clock() - at < SKEW:
                self._result.tombstoned += 1
                return at

    def _remove_objects(self, pool: dict[str, ObjectInfo], tombs: dict[str, datetime], running: list[Lease]) -> None:
        waiting = 0
        for name, at in tombs.items():
            if name in self._references.names:
                self._destination.delete(layout.tombstone_key(name))
                self._result.rescued += 1
            elif all(at + SKEW < lease.started_at for lease in running):
                if name in pool:
                    self._destination.delete(layout.object_key(name))
                    self._result.objects += 1
                    self._result.bytes_freed += pool[name].size
                # Last of all: as long as the object may be there, its tombstone must be.
                self._destination.delete(layout.quarantine_key(name))
                self._destination.delete(layout.tombstone_key(name))
            else:
                waiting += 1
        if waiting:
            names = ", ".join(lease.id for lease in running)
            self._result.held.append(f"{waiting} unnamed objects wait until these backups have ended: {names}")
