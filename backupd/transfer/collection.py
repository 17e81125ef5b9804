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

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    BusyError,
    DamagedError,
    LockedError,
    MissingRightsError,
    ObjectMissingError,
)
from backupd.model.job import Progress, Report, silent
from backupd.model.manifest import Header
from backupd.model.text import Clock, format_time, parse_time
from backupd.transfer.deletion_limit import DAY, LIMIT, DeletionLimit, missing_backups_text, no_manifest_text
from backupd.transfer.holds_and_locks import Backup, Locks, each, is_withdrawn
from backupd.transfer.leases import Alive, Lease, intents, is_alive, living_intents, pins, sweeping
from backupd.transfer.log_segments import clear_strays
from backupd.transfer.records.manifests import Committed, backup_ids, read
from storage import layout
from storage.destination import Destination, ObjectInfo, as_tree, is_listed, read_note, write_note

SKEW = timedelta(minutes=5)
"""Clocks of several machines may differ so much, and a put may last so long."""
_READERS = 4
"""Manifests that are read at once: one of a large backup takes tens of megabytes."""
_TRACES = (layout.SERVERS, layout.BINLOGS, layout.PROOFS, layout.CATALOGS)
_BATCH = 512
"""Objects that are removed between two looks whether we are still the one who removes."""


@dataclass(frozen=True, slots=True)
class Missing:
    """``count`` backups that a catalog says are here, and are not. ``backups``: all of them of the servers that were
    asked about, and some of the others, so that a destination which lacks a million is reported without all their
    names."""

    count: int = 0
    backups: frozenset[Backup] = frozenset()

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def names(self) -> str:
        """Of all of them, or of as many as are known by name."""
        known = [f"{name} of {server}" for server, name in sorted(self.backups)]
        return ", ".join([*known, *([f"{self.count - len(known)} more"] if self.count > len(known) else [])])


Expected = Callable[[Collection[Backup], Collection[str]], Missing]
"""What a catalog says is here beyond the backups that it is given; asked about their servers and those named besides.
"""


def expecting(backups: Collection[Backup]) -> Expected:
    """Of a catalog that says that these are here."""
    known = frozenset(backups)

    def beyond(present: Collection[Backup], _servers: Collection[str]) -> Missing:
        left = known.difference(present)
        return Missing(len(left), left)

    return beyond


NOTHING = expecting(())


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Why something was left alone. ``why``: a sentence; ``about``: the ids of backups and leases that it names."""

    why: str
    about: frozenset[str] = frozenset()

    @classmethod
    def of(cls, backup: Backup, why: str, *others: str) -> HeldBack:
        """About one ``backup``. ``others``: further ids that ``why`` names."""
        server, name = backup
        return cls(f"{name} of {server}: {why}", frozenset((name, *others)))


@dataclass(slots=True)
class Collected:
    """What one collection, or one sweep, did; sizes in bytes. ``held_back``: what was left alone, and why."""

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
    held_back: list[HeldBack] = field(default_factory=list)
    locked: int = 0
    """Files that may not be removed yet: an object lock, or missing rights. The next collection tries again."""
    lock: str = ""
    """What to say of them."""
    missing_rights: str = ""
    """Which rights are missing for some of them."""
    skipped: bool = False
    """Nothing was done: somebody else removes here, or nothing may be removed."""
    over_limit: list[str] = field(default_factory=list)
    """What the mass-deletion limit held back; each is among ``held``, too."""
    missing: Missing = field(default_factory=Missing)
    """What was expected here and is not, so that no object was collected; ``held`` says it."""

    @property
    def held(self) -> list[str]:
        """The sentences of ``held_back``."""
        return [one.why for one in self.held_back]


@dataclass(slots=True)
class Steps:
    """What was read and removed so far, for whoever watches that a sweep of many backups goes on."""

    report: Report = silent
    _done: int = 0

    def count(self, doing: str, steps: int = 1) -> None:
        """Add what was done just now."""
        self._done += steps
        self.report(Progress("sweep", files_done=self._done, note=doing))


@dataclass(slots=True)
class References:
    """Who names what. ``names``: objects of all readable manifests; ``damaged``: manifests that cannot be read."""

    backups: set[Backup] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    damaged: list[Backup] = field(default_factory=list)

    def load(self, destination: Destination, steps: Steps) -> None:
        """Add every manifest that was not read before; they are immutable."""
        for found in manifests(destination, [one for one in backup_ids(destination) if one not in self.backups]):
            self.add(found)
            steps.count("reading manifests")

    def add(self, found: Committed) -> None:
        """Add one manifest."""
        self.backups.add((found.server, found.backup_id))
        if isinstance(found.header, Header):
            self.names.update(item.name for item in found.header.objects)
        else:
            self.damaged.append((found.server, found.backup_id))


def manifests(destination: Destination, owners: Sequence[Backup]) -> Iterator[Committed]:
    """Those of ``owners``, which were just listed, that are there, in their order, a few read at a time. One that is
    listed still, though the destination says that it is not there, counts as one that cannot be read."""

    def look(owner: Backup) -> Committed | None:
        found = read(destination, *owner)
        if found is None and is_listed(destination, key := layout.manifest_key(*owner)):
            where = f"{destination.name}: {key}"
            return Committed(*owner, DamagedError(f"{where} cannot be read", [f"{where}: listed, but missing"]))
        return found

    for start in range(0, len(owners), 2 * _READERS):
        reads = each(look, owners[start : start + 2 * _READERS], workers=_READERS)
        yield from (found for found in reads if found is not None)


def collect(
    destination: Destination,
    *,
    clock: Clock,
    alive: Alive = is_alive,
    limit: DeletionLimit = LIMIT,
    expected: Expected = NOTHING,
    dying: Iterable[Backup] = (),
) -> Collected:
    """Remove the garbage of dead runs and every object that nobody names and no living run can count on.

    Safe beside running backups, restores and other collections. Never removes a committed backup. Call it before
    writing one's own intent: objects that become garbage while any intent lives wait for the next collection. While
    somebody else removes here, or where nothing may be removed, nothing is done, and ``held`` says so.

    ``expected``: backups that a catalog says are here. While one of them has no manifest, and is not one of
    ``dying``, no object goes.
    ``dying``: backups whose marks are due, or this installation's own. Any other mark explains nothing: whoever takes a
    manifest away could have put it.
    """
    try:
        with sweeping(destination, clock=clock, alive=alive) as lease:
            fence = lease.assert_held
            return GarbageCollection(destination, clock, alive, limit, fence, expected, set(dying)).run()
    except (BusyError, LockedError) as error:
        return not_begun(error)


def not_begun(error: BackupdError) -> Collected:
    """What to say when nothing could be done."""
    locked = isinstance(error, LockedError)
    lock = error.line if locked else ""
    rights = error.hint if isinstance(error, MissingRightsError) else ""
    return Collected(
        held_back=[HeldBack(error.line)], locked=int(locked), lock=lock, missing_rights=rights, skipped=True
    )


def unfinished(destination: Destination) -> tuple[list[str], list[ObjectInfo]]:
    """Trees and side files that may belong to no committed backup: compare with intents, then manifests, in this
    order."""
    complete = set(backup_ids(destination))
    tree = as_tree(destination)
    found = () if tree is None else tree.trees()
    trees = [name for name, published in found if not published or layout.backup_of(name) not in complete]
    sides = [info for info in destination.list(layout.SERVERS) if layout.backup_of(info.key) not in complete]
    return trees, sides


def pooled(destination: Destination) -> tuple[dict[str, ObjectInfo], list[str]]:
    """The stored objects by name, and the keys of files among them that are not ours.

    A stranger's name makes no key, so whoever looked it up would take it for an altered manifest.
    """
    return _named_below(destination, layout.OBJECTS, layout.object_key)


def entombed(destination: Destination) -> tuple[list[ObjectInfo], list[str]]:
    """The tombstones, and the keys of files among them that are not ours."""
    tombs, strangers = _named_below(destination, layout.TOMBSTONES, layout.tombstone_key)
    return list(tombs.values()), strangers


def _named_below(
    destination: Destination, folder: str, key_of: Callable[[str], str]
) -> tuple[dict[str, ObjectInfo], list[str]]:
    """What is in ``folder`` under the key that ``key_of`` gives for an object's name, by name; other files' keys."""
    found: dict[str, ObjectInfo] = {}
    strangers: list[str] = []
    for info in destination.list(folder):
        name = layout.name_in(info.key)
        if layout.is_object_name(name) and key_of(name) == info.key:
            found[name] = info
        else:
            strangers.append(info.key)
    return found, strangers


def orphans(pool: dict[str, ObjectInfo], references: References, running: list[Lease]) -> list[str]:
    """Objects in ``pool`` that nobody names, without those that may have been stored by a run that still lives."""
    born = min((lease.started_at for lease in running), default=None)
    return [
        name
        for name, info in pool.items()
        if name not in references.names and (born is None or info.modified_at < born - SKEW)
    ]


def _tombstones(destination: Destination) -> dict[str, datetime]:
    """When each tombstone was put. One that cannot be read counts from when it was stored."""

    def look(info: ObjectInfo) -> tuple[str, datetime] | None:
        try:
            return layout.name_in(info.key), parse_time(read_note(destination, info.key)["at"])
        except ObjectMissingError:
            return None
        except (ArchivedError, ValueError, KeyError, TypeError):
            return layout.name_in(info.key), info.modified_at

    return dict(found for found in each(look, entombed(destination)[0]) if found is not None)


@dataclass(slots=True)
class GarbageCollection:
    """One run of ``collect`` by somebody who is ``sweeping`` already. ``fence`` raises when that has ended;
    ``explained``: objects of backups that were just removed; ``locks`` takes what may not be removed."""

    destination: Destination
    clock: Clock
    alive: Alive
    limit: DeletionLimit = LIMIT
    fence: Callable[[], None] = lambda: None
    expected: Expected = NOTHING
    dying: Collection[Backup] = ()
    explained: Collection[str] = ()
    locks: Locks = field(default_factory=Locks)
    steps: Steps = field(default_factory=Steps)
    _died: datetime | None = None
    _result: Collected = field(default_factory=Collected)
    _references: References = field(default_factory=References)

    def run(self) -> Collected:
        """What was done; see ``collect``."""
        self._collect()
        self._result.locked, self._result.lock = len(self.locks), self.locks.text
        self._result.missing_rights = self.locks.missing_rights
        if self.locks:
            owners = map(layout.backup_of, self.locks.keys)
            self._hold(self.locks.text, (owner[1] for owner in owners if owner is not None))
        return self._result

    def _collect(self) -> None:
        self._result.leftovers = self.destination.clear_leftovers()
        try:
            self._result.log_parts = clear_strays(self.destination, now=self.clock())
        except LockedError as error:
            self._hold(error.line)
        trees, sides = unfinished(self.destination)
        marks = list(self.destination.list(layout.MARKS))
        sides += marks
        sides += self.destination.list(layout.HELD)
        pool, _ = pooled(self.destination)
        tombs = _tombstones(self.destination)
        running = self._look()
        missing = self._missing(marks, {*trees, *(info.key for info in sides)}, running)
        self._clear_unfinished(trees, sides, running, missing)
        if missing:
            return
        if self._references.damaged:
            # What a damaged manifest names is unknown, and it may yet be mended from another copy.
            names = ", ".join(f"{name} of {server}" for server, name in self._references.damaged)
            why = f"objects: no object is collected while manifests cannot be read: {names}"
            self._hold(why, (name for _server, name in self._references.damaged))
            return
        if self._is_headless(pool, running):
            return
        fresh = [name for name in orphans(pool, self._references, running) if name not in tombs]
        for start in range(0, len(fresh), _BATCH):
            self.fence()
            batch = fresh[start : start + _BATCH]
            tombs.update(zip(batch, each(self._tombstone, batch), strict=True))
            self.steps.count("marking objects", len(batch))
        self._result.tombstoned = len(fresh)
        if tombs:
            running = self._look()
            if not self._references.damaged:
                self._remove_objects(pool, tombs, running)

    def _look(self) -> list[Lease]:
        """Remove dead intents and pins, list the living intents, *then* read the manifests; the living intents."""
        now = self.clock()
        for lease in [*intents(self.destination), *pins(self.destination)]:
            if not self.alive(lease, now) and self.locks.delete(self.destination, lease.key):
                self._result.leases.append(lease.key)
                if lease.key.startswith(layout.INTENTS):
                    self._died = min(self._died or lease.started_at, lease.started_at)
        running = living_intents(self.destination, now, self.alive)
        self._references.load(self.destination, self.steps)
        return running

    def _missing(self, marks: list[ObjectInfo], unfinished: Collection[str], running: list[Lease]) -> Missing:
        """What is expected and has no manifest, and that is not because it was being removed: its mark goes last.
        ``unfinished``: keys of what may belong to it."""
        known = self._references.backups | {one for lease in running for one in lease.backups}
        known |= {
            owner
            for info in marks
            if (owner := layout.backup_of(info.key)) is not None
            and owner not in known
            and self._tells_of_removal(owner, info.key)
        }
        servers = {owner[0] for key in unfinished if (owner := layout.backup_of(key)) is not None}
        self._result.missing = missing = self.expected(known, servers)
        if missing:
            names = (name for _server, name in missing.backups)
            self._hold(missing_backups_text(self.destination.name, missing.backups, missing.count), names)
        return missing

    def _tells_of_removal(self, owner: Backup, key: str) -> bool:
        """Is this a mark that explains that the manifest of ``owner`` is gone?"""
        return owner in self.dying and key.startswith(layout.MARKS) and not is_withdrawn(self.destination, key)

    def _is_headless(self, pool: dict[str, ObjectInfo], running: list[Lease]) -> bool:
        """Objects that nothing explains, not one manifest, and yet a trace of backups: they are out of sight."""
        strange = (
            []
            if self._references.backups
            else [name for name in orphans(pool, self._references, running) if not self._is_explained(pool[name])]
        )
        trace = next((info.key for prefix in _TRACES for info in self.destination.list(prefix)), "") if strange else ""
        if trace:
            self._hold_over_limit(no_manifest_text(self.destination.name, len(strange), trace))
        return bool(trace)

    def _hold_over_limit(self, text: str) -> None:
        self._result.over_limit.append(text)
        self._hold(text)

    def _hold(self, why: str, about: Iterable[str] = ()) -> None:
        self._result.held_back.append(HeldBack(why, frozenset(about)))

    def _clear_unfinished(
        self, trees: list[str], sides: list[ObjectInfo], running: list[Lease], missing: Missing
    ) -> None:
        if any(lease.owner is None for lease in running):
            return  # an intent that cannot be read: whose backup it protects is unknown
        kept = self._references.backups | {backup for lease in running for backup in lease.backups} | missing.backups
        kept |= self._headless(sides, kept)
        tree = as_tree(self.destination)
        for name in dict.fromkeys(trees):
            if tree is not None and layout.backup_of(name) not in kept:
                tree.remove_tree(name)
                self._result.trees.append(name)
        keys = [info.key for info in sides if (owner := layout.backup_of(info.key)) is not None and owner not in kept]
        self.locks.delete_all(self.destination, keys)
        self._result.side_files += [key for key in keys if key not in self.locks]

    def _headless(self, sides: list[ObjectInfo], kept: set[Backup]) -> set[Backup]:
        """The backups without a manifest that the deletion limit holds back: so many of them, of which neither a dead
        run nor a removal explains, have lost it by other hands."""
        found: dict[Backup, bool] = {}
        for info in sides:
            owner = layout.backup_of(info.key)
            if owner is not None and owner not in kept:
                known = (
                    info.key.startswith(layout.HELD)
                    or self._tells_of_removal(owner, info.key)
                    or (self._died is not None and info.modified_at >= self._died - SKEW)
                )
                found[owner] = found.get(owner, False) or known
        strange = {owner for owner, known in found.items() if not known}
        if not strange or (self._references.backups and len(strange) <= self.limit.limit(len(kept) + len(strange))):
            return set()
        text = (
            f"{len(strange)} of {len(kept) + len(strange)} backups have lost their manifests, and no deletion by "
            "backupd explains it: their remaining objects are kept. To restore the manifests from another destination: "
            "`backupd verify`"
        )
        self._hold_over_limit(text)
        return strange

    def _tombstone(self, name: str) -> datetime:
        """Put a tombstone; the time in it is not older than its appearance by more than the allowance for that."""
        while True:
            at = self.clock()
            write_note(self.destination, layout.tombstone_key(name), {"object": name, "at": format_time(at)})
            if self.clock() - at < SKEW:
                return at

    def _remove_objects(self, pool: dict[str, ObjectInfo], tombs: dict[str, datetime], running: list[Lease]) -> None:
        rescued = [name for name in tombs if name in self._references.names]
        self._result.rescued += self.locks.delete_all(self.destination, list(map(layout.tombstone_key, rescued)))
        free = {name: at for name, at in tombs.items() if name not in self._references.names}
        going = [name for name, at in free.items() if all(at + SKEW < lease.started_at for lease in running)]
        if len(free) > len(going):
            ids = [lease.id for lease in running]
            waiting = len(free) - len(going)
            self._hold(f"{waiting} unnamed objects wait until these backups have ended: {', '.join(ids)}", ids)
        going = self._allowed(pool, going, tombs)
        for start in range(0, len(going), _BATCH):
            self.fence()
            self.steps.count("removing objects", len(going[start : start + _BATCH]))
            for size in each(lambda name: self._bury(name, pool), going[start : start + _BATCH]):
                self._result.objects += size is not None
                self._result.bytes_freed += size or 0

    def _allowed(self, pool: dict[str, ObjectInfo], going: list[str], tombs: dict[str, datetime]) -> list[str]:
        """Without what the deletion limit holds back: much of the pool that nobody names, and nobody knows why.
        Manifests that went by other hands look like this."""
        now = self.clock()
        strange = {
            name for name in going if name in pool and not self._is_explained(pool[name]) and now - tombs[name] < DAY
        }
        if not self.limit.objects_exceeded_by(len(strange), len(pool)):
            return going
        text = (
            f"{len(strange)} of {len(pool)} objects are no longer referenced by any backup, and no deletion by "
            "backupd explains it: backupd removes them after one day. If manifests were lost, restore them before "
            "that: `backupd verify`"
        )
        self._hold_over_limit(text)
        return [name for name in going if name not in strange]

    def _is_explained(self, info: ObjectInfo) -> bool:
        """Was it a removed backup's, or may a dead run have stored it?"""
        return layout.name_in(info.key) in self.explained or (
            self._died is not None and info.modified_at >= self._died - SKEW
        )

    def _bury(self, name: str, pool: dict[str, ObjectInfo]) -> int | None:
        """Remove an object and what was noted about it; its size, None when there was none or it may not go yet."""
        if name in pool and not self.locks.delete(self.destination, layout.object_key(name)):
            return None
        # Last of all: as long as the object may be there, its tombstone must be.
        self.locks.delete(self.destination, layout.quarantine_key(name))
        self.locks.delete(self.destination, layout.tombstone_key(name))
        return pool[name].size if name in pool else None
