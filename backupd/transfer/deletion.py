"""Deleting a backup: a mark that can be taken back, a grace period, then manifest, tree, side files and objects.

Each step alone leaves either a whole backup or garbage that the next collection finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache

from backupd.model.backup_record import BackupKind, Sighting
from backupd.model.errors import (
    ArchivedError,
    BusyError,
    CatalogError,
    DamagedError,
    LockedError,
    NewerFormatError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.job import Report, silent
from backupd.model.manifest import Header
from backupd.model.text import Clock, format_time, parse_time
from backupd.recovery.restorable import Restorability, climb, here_if
from backupd.transfer.collection import (
    NOTHING,
    Collected,
    Expected,
    GarbageCollection,
    HeldBack,
    Steps,
    manifests,
    not_begun,
)
from backupd.transfer.deletion_limit import LIMIT, DeletionLimit
from backupd.transfer.holds_and_locks import (
    Backup,
    Kept,
    Locks,
    Mark,
    Sightings,
    each,
    explaining,
    is_due,
    kept_at,
    takes_back,
    withdraw,
)
from backupd.transfer.leases import Alive, await_sweeps, is_alive, living_intents, living_pins, sweeping
from backupd.transfer.records.manifests import Committed, backup_ids, read
from storage import layout, objects
from storage.destination import Destination, ObjectInfo, as_tree, exists, read_note, write_note

_MANY = 256
"""A backup of more objects than this is looked at by listing the pool, which is a page at a time."""
Sizes = Callable[[], Mapping[str, int]]
"""Gives the size of every stored object by its key."""


def mark(destination: Destination, server: str, backup_id: str, now: datetime, *, reason: str = "") -> datetime:
    """Mark a backup deleted; since when it is. Marking again keeps the first time and reason.

    Raises NotFoundError. Whether the backup may be deleted at all (last chain, pins of the catalog) is decided before.
    """
    _require(destination, server, backup_id)
    before = mark_of(destination, server, backup_id)
    if before is not None:
        return before.at
    note = {"server": server, "backup": backup_id, "at": format_time(now), "reason": reason}
    write_note(destination, layout.mark_key(server, backup_id), note)
    return now


def unmark(destination: Destination, server: str, backup_id: str, *, now: datetime, grace: timedelta) -> None:
    """Take the mark away, or back where nothing may be deleted; nothing happens where there is none. Whoever sweeps
    meanwhile may have read it before, so the end of that is waited for: afterwards the backup is there for good, or
    gone.

    Raises RefusedError once the ``grace`` has passed, and NotFoundError when the backup is gone.
    """
    found = mark_of(destination, server, backup_id)
    if found is not None and now - found.at >= grace:
        raise RefusedError(
            f"backup {backup_id} of {server} at destination {destination.name} can no longer be undeleted",
            detail=f"it was marked deleted at {format_time(found.at)} and its grace period has passed",
            hint="a sweep may be removing it now; raise the grace period if its manifest is still there",
        )
    withdraw(destination, server, backup_id, now)
    await_sweeps(destination, clock=lambda: now)
    _require(destination, server, backup_id)


def marks(destination: Destination) -> dict[Backup, datetime]:
    """Backups marked deleted, and since when."""
    return {owner: note.at for owner, note in marked(destination).items()}


def marked(destination: Destination, server: str | None = None) -> dict[Backup, Mark]:
    """Backups (of ``server``) marked deleted. A mark that cannot be read counts from when it was stored."""
    return _marked_below(destination, layout.MARKS if server is None else f"{layout.MARKS}{server}/")


def mark_of(destination: Destination, server: str, backup_id: str) -> Mark | None:
    """The same of one backup."""
    return _marked_below(destination, layout.mark_key(server, backup_id)).get((server, backup_id))


def _marked_below(destination: Destination, prefix: str) -> dict[Backup, Mark]:
    def look(info: ObjectInfo) -> tuple[Backup, Mark] | None:
        owner = layout.backup_of(info.key)
        if owner is None:
            return None
        try:
            note = read_note(destination, info.key)
            if takes_back(note):
                return None
            return owner, Mark(parse_time(note["at"]), str(note.get("reason", "")), info.modified_at)
        except ObjectMissingError:
            return None
        except (ArchivedError, ValueError, KeyError, TypeError, AttributeError):
            return owner, Mark(info.modified_at, "", info.modified_at)

    return dict(found for found in each(look, list(destination.list(prefix))) if found is not None)


def sweep(
    destination: Destination,
    *,
    clock: Clock,
    grace: timedelta,
    sightings: Sightings,
    at_once: frozenset[Backup] = frozenset(),
    kept: Callable[[Collection[Backup]], Kept] = lambda _marked: Kept(),
    alive: Alive = is_alive,
    limit: DeletionLimit = LIMIT,
    expected: Expected = NOTHING,
    gone: Callable[[Backup], None] = lambda _backup: None,
    report: Report = silent,
) -> Collected:
    """Remove the backups that were marked at least ``grace`` ago, then collect what nobody needs any more. Since when,
    and whether a person wants it, so that no limit holds it back, is said by ``sightings``, not by the marks. Those of
    ``at_once`` (marked too) need not wait for their grace. What is kept on purpose, by ``kept``, which is asked of
    those that are marked, or by what is written at the destination, stays whatever its mark says, and so does the last
    restorable chain of a server.

    A backup stays while a restore pins it, an unmarked backup or one that is being written builds on it, or the
    ``limit`` holds back what too many marks of one day ask for; ``held`` of the result says so, ``locked`` what may
    not be removed yet. What builds on others goes before them, so that no step leaves an increment alone. While another
    installation sweeps here, nothing is done. ``expected``: as with ``collect``; what a missing one may build on stays.
    ``gone`` is told each backup that was removed, before the next one is: whatever ends the rest, that is recorded.
    ``report``: of what was read and removed so far.

    It reads, then decides, then removes. Marks are read before pins and intents: whoever pins, or begins to build on a
    backup, and then finds no mark was early enough to be seen here. Manifests are read after intents: a backup that
    ended in between is seen as one of the two.
    """
    try:
        with sweeping(destination, clock=clock, alive=alive) as lease:
            now, steps = clock(), Steps(report)
            notes = marked(destination)
            known = sightings(notes)
            asked = _asked(notes, known, (kept(notes), kept_at(destination)), now, grace, at_once)
            held = asked.held
            stock = _read_stock(destination, asked.due, now, alive, held, steps)
            over_limit = _over_limit(asked, stock.present, limit)
            held += over_limit
            removable = stock.removable & asked.confirmed if over_limit else stock.removable
            locks = Locks()
            removed: list[Backup] = []
            if removable:
                removable -= _last_whole(destination, stock.outlines, removable, set(notes), held, asked.confirmed)
                missing = expected(
                    asked.dying | {one.backup for one in stock.outlines}, {server for server, _id in removable}
                )
                outlines = [*stock.outlines, *(_Outline(owner, readable=False) for owner in sorted(missing.backups))]
                removable -= _needed(outlines, removable, held)

                def removed_one(backup: Backup) -> None:
                    gone(backup)
                    steps.count("removing backups")

                removed = _remove_in_order(
                    destination, outlines, removable, locks, lease.assert_held, held, removed_one
                )
            explained = frozenset().union(*(stock.objects.get(owner, frozenset()) for owner in removed))
            collection = GarbageCollection(
                destination,
                clock,
                alive,
                limit,
                lease.assert_held,
                lambda present, servers: expected({*present, *removed}, servers),
                asked.dying,
                explained,
                locks,
                steps,
            )
            try:
                result = collection.run()
            except CatalogError as error:
                if not removed:
                    raise
                result = not_begun(error)  # what is gone is recorded all the same
            result.backups = [name for _server, name in removed]
            result.held_back = held + result.held_back
            result.over_limit = [one.why for one in over_limit] + result.over_limit
            return result
    except (BusyError, LockedError) as error:
        return not_begun(error)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the marks at a destination ask for. ``due``: backups to remove now; ``dying``: those whose mark explains a
    missing manifest; ``confirmed``: those that a person wants gone; ``waiting``: the others that nothing keeps, with
    the moment from which the limit counts their marks; ``strange``: those of them that somebody else marked; ``held``:
    what is kept on purpose."""

    due: frozenset[Backup]
    dying: frozenset[Backup]
    confirmed: frozenset[Backup]
    waiting: Mapping[Backup, datetime]
    strange: frozenset[Backup]
    held: list[HeldBack]


def _asked(
    notes: Mapping[Backup, Mark],
    known: Mapping[Backup, Sighting],
    keepings: Iterable[Kept],
    now: datetime,
    grace: timedelta,
    at_once: frozenset[Backup],
) -> _Asked:
    """Pure. ``keepings``: what is kept on purpose, by a catalog and by what is written at the destination."""
    due = {
        owner
        for owner, note in notes.items()
        if owner in at_once or (owner in known and is_due(note, known[owner], now, grace))
    }
    dying = due | explaining(notes, known, now, grace)
    since = {owner: known[owner].since for owner in notes if owner in known}
    held: list[HeldBack] = []
    for kept in keepings:
        staying = {owner for owner in due if kept.covers(owner)}
        held += [HeldBack.of(owner, kept.reason(owner)) for owner in sorted(staying)]
        due -= staying
        since = {owner: at for owner, at in since.items() if not kept.covers(owner)}
    confirmed = at_once | {owner for owner in since if known[owner].confirmed}
    waiting = {owner: at for owner, at in since.items() if owner not in confirmed}
    strange = {owner for owner in waiting if not known[owner].ours}
    return _Asked(frozenset(due), frozenset(dying), frozenset(confirmed), waiting, frozenset(strange), held)


@dataclass(frozen=True, slots=True)
class _Stock:
    """What is at a destination. ``present``: the backups whose manifests count for the limit; ``removable``: those due
    that nobody uses and that this version can remove; ``objects``: the names of the objects of each of these."""

    present: Collection[Backup]
    removable: frozenset[Backup] = frozenset()
    outlines: Sequence[_Outline] = ()
    objects: Mapping[Backup, frozenset[str]] = field(default_factory=dict)


def _read_stock(
    destination: Destination, due: frozenset[Backup], now: datetime, alive: Alive, held: list[HeldBack], steps: Steps
) -> _Stock:
    """Reads who uses what, then every manifest; where nothing is ``due`` only their names."""
    if not due:
        return _Stock(backup_ids(destination))
    removable = due - _in_use(destination, due, now, alive, held)
    outlines: list[_Outline] = []
    named: dict[Backup, frozenset[str]] = {}
    newer: set[Backup] = set()
    for one in manifests(destination, backup_ids(destination)):
        steps.count("reading manifests")
        outlines.append(_outline(one))
        owner = outlines[-1].backup
        if owner in removable and isinstance(one.header, Header):
            named[owner] = frozenset(item.name for item in one.header.objects)
        elif isinstance(one.header, NewerFormatError):
            newer.add(owner)
    why = "a newer version of backupd wrote it, and only that version removes it"
    held += [HeldBack.of(owner, why) for owner in sorted(removable & newer)]
    # Whoever may put marks could put manifests, too, to make them few among many: those that are believed count.
    present = [item.backup for item in outlines if item.readable]
    return _Stock(present, removable - newer, outlines, named)


def _over_limit(asked: _Asked, present: Collection[Backup], limit: DeletionLimit) -> list[HeldBack]:
    """Why marks are not followed, when nobody has said that so many of one day are right; it is said before they are
    due. Pure."""
    if not asked.waiting or not limit.exceeded_by(asked.waiting, present):
        return []
    text = (
        f"mass-deletion limit: {len(asked.waiting)} of {len(present)} backups are marked deleted, "
        f"{limit.worst_day(asked.waiting, present)} more within one day than were taken in it; the limit is "
        f"{limit.limit(len(present))}. To remove those of a server: `backupd retention SERVER --apply --really`"
    )
    if asked.strange:
        text += (
            f". {len(asked.strange)} of these marks were not written by this installation: find out who wrote them. To "
            "remove a mark: `backupd backups undelete ID`"
        )
    return [HeldBack(text)]


def _in_use(
    destination: Destination, due: frozenset[Backup], now: datetime, alive: Alive, held: list[HeldBack]
) -> frozenset[Backup]:
    """Those of ``due`` that a restore reads, that are being written (copied or repaired), or that a backup builds on
    which is being written: its intent names all of these."""
    writing = living_intents(destination, now, alive)
    written = {owner for lease in writing for owner in lease.backups}
    needed = {(server, name): one for lease in writing for server, one in lease.backups for name in lease.parents}
    pinned = {backup for lease in living_pins(destination, now, alive) for backup in lease.backups}
    unreadable = [lease.id for lease in writing if lease.owner is None]
    if unreadable:
        why = f"every backup: the intent {unreadable[0]} cannot be read, so the running backups are unknown"
        held.append(HeldBack(why, frozenset(unreadable[:1])))
        return due
    held += [HeldBack.of(owner, "a restore is reading it") for owner in sorted(due & pinned)]
    held += [HeldBack.of(owner, "it is being written") for owner in sorted(due & written - pinned)]
    for owner in sorted(due & set(needed) - written - pinned):
        held.append(HeldBack.of(owner, f"{needed[owner]}, which is being written, builds on it", needed[owner]))
    return due & (pinned | written | set(needed))


def _remove_in_order(
    destination: Destination,
    outlines: Sequence[_Outline],
    removable: frozenset[Backup],
    locks: Locks,
    fence: Callable[[], None],
    held: list[HeldBack],
    gone: Callable[[Backup], None],
) -> list[Backup]:
    """Remove ``removable``, what builds on others before them, and tell ``gone``; gives those that went."""
    removed: list[Backup] = []
    stuck: set[Backup] = set()
    for owner in _children_first(outlines, removable):
        fence()
        if stuck and owner in _needed(outlines, removable - stuck, held):
            continue  # what builds on it could not go
        if _remove(destination, *owner, locks):
            gone(owner)
            removed.append(owner)
        else:
            stuck.add(owner)
    return removed


@dataclass(frozen=True, slots=True)
class _Outline:
    """What has to be remembered of a manifest: those of a large installation together fill the memory."""

    backup: Backup
    readable: bool
    kind: str = ""
    parent: str | None = None
    server_uuid: str = ""

    @property
    def id(self) -> str:
        return self.backup[1]


def _outline(found: Committed) -> _Outline:
    backup = (found.server, found.backup_id)
    if not isinstance(found.header, Header):
        return _Outline(backup, readable=False)
    return _Outline(
        backup, readable=True, kind=found.header.kind, parent=found.header.parent, server_uuid=found.header.server_uuid
    )


def _parents(found: Iterable[_Outline]) -> dict[Backup, str | None]:
    return {item.backup: item.parent for item in found if item.readable}


def _chain(owner: Backup, parents: dict[Backup, str | None]) -> list[Backup]:
    """``owner`` and all that it builds on, itself first, as far as readable manifests say."""
    return [(owner[0], one) for one in climb(owner[1], lambda one: parents.get((owner[0], one)))]


def _children_first(found: Sequence[_Outline], removable: Collection[Backup]) -> list[Backup]:
    parents = _parents(found)
    return sorted(removable, key=lambda owner: (-len(_chain(owner, parents)), owner))


def _needed(found: Sequence[_Outline], removable: AbstractSet[Backup], held: list[HeldBack]) -> set[Backup]:
    """Those of ``removable`` on which a backup builds that stays, however many steps away."""
    damaged = {item.backup[0] for item in found if not item.readable and item.backup not in removable}
    needed = {owner for owner in removable if owner[0] in damaged}
    why = "a backup of this server whose manifest is missing or damaged may build on it"
    held += [HeldBack.of(owner, why) for owner in sorted(needed)]
    parents = _parents(found)
    for child in sorted(set(parents) - removable):
        for above in _chain(child, parents)[1:]:
            if above in removable - needed:
                needed.add(above)
                held.append(HeldBack.of(above, f"{child[1]} builds on it", child[1]))
    return needed


def is_whole(destination: Destination, server: str, backup_id: str, sizes: Sizes | None = None) -> bool:
    """Is the backup here, its manifest and body what was written, everything that it names present in its size, and
    nothing of it known to be damaged (in quarantine)? Reads no object. ``sizes`` where somebody has listed the pool."""
    found = read(destination, server, backup_id)
    if found is None or not isinstance(found.header, Header):
        return False
    header = found.header
    bad = objects.quarantined(destination)
    if any(item.name in bad for item in header.objects):
        return False
    folder = layout.backup_folder(server, backup_id)
    try:
        there = all(destination.stat(folder + item.name).size == item.size for item in header.side_files)
        if not (there and _has_objects(destination, header, sizes)):
            return False
        # Without its body nothing can be restored, and there is no quarantine for what is not in the pool.
        objects.fetch_side(destination, layout.body_key(server, backup_id), header.body)
    except ArchivedError:
        pass  # a rule of the destination moved the body: it is there in its size, and can be thawed
    except (ObjectMissingError, DamagedError):
        return False
    return True


def _has_objects(destination: Destination, header: Header, sizes: Sizes | None) -> bool:
    """Raises ObjectMissingError, too."""
    wanted = {layout.object_key(item.name): item.size for item in header.objects}
    if sizes is None and len(wanted) <= _MANY:
        return all(each(lambda key: destination.stat(key).size == wanted[key], wanted))
    there = sizes() if sizes is not None else pool_sizes(destination)
    return all(there.get(key) == size for key, size in wanted.items())


def pool_sizes(destination: Destination) -> dict[str, int]:
    """The size of every stored object by its key."""
    return {info.key: info.size for info in destination.list(layout.OBJECTS)}


def _last_whole(
    destination: Destination,
    found: Sequence[_Outline],
    removable: frozenset[Backup],
    dying: Collection[Backup],
    held: list[HeldBack],
    confirmed: Collection[Backup] = (),
) -> set[Backup]:
    """Of each server that would be left without anything restorable and unmarked: the newest whole one, which must stay
    (with what it builds on, as everything that stays)."""
    kept: set[Backup] = set()

    @cache
    def sizes() -> Mapping[str, int]:
        return pool_sizes(destination)

    readable = {item.backup: item for item in found if item.readable}

    @cache
    def walk(server: str) -> Restorability[_Outline]:
        return Restorability(
            lambda name: readable.get((server, name)),
            lambda one: here_if(is_whole(destination, *one.backup, sizes=sizes)),
        )

    def restorable(owner: Backup) -> bool:
        return owner in readable and bool(walk(owner[0]).of(readable[owner]).destinations)

    for family, uuid in _families(found, removable, confirmed):
        if any(restorable(owner) for owner in family if owner not in dying or owner in kept):
            continue
        newest = next((owner for owner in family if owner in removable and restorable(owner)), None)
        if newest is not None:
            kept.add(newest)
            held.append(HeldBack.of(newest, f"it is the last whole backup of this server{uuid} here"))
    return kept


def _families(
    found: Iterable[_Outline], removable: frozenset[Backup], confirmed: Collection[Backup]
) -> Iterator[tuple[list[Backup], str]]:
    """Backups that stand in for each other, newest first, one of which has to stay; and a server's uuid where it is
    only about that. Pure. A dump may lack tables, so none stands in for the last physical one. Neither does one of a
    server with another uuid, which may be another installation's server of the same name; unless a person wants it gone
    (``confirmed``)."""
    for server in sorted({owner[0] for owner in removable}):
        ours = sorted((item for item in found if item.backup[0] == server), key=lambda item: item.backup, reverse=True)
        physical = [item for item in ours if item.kind != BackupKind.LOGICAL]
        yield [item.backup for item in physical], ""
        yield [item.backup for item in ours], ""
        for uuid in sorted({item.server_uuid for item in ours if item.server_uuid}):
            going = {item.backup for item in ours if item.server_uuid == uuid} & removable
            if going and not going <= set(confirmed):
                yield [item.backup for item in physical if item.server_uuid == uuid], f" {uuid}"


def restorable_at(destination: Destination, server: str, backup_id: str) -> bool:
    """Are the backup and everything it builds on here, whole, and not marked deleted?"""
    dying = marked(destination, server)

    def find(name: str) -> _Outline | None:
        found = read(destination, server, name)
        return _outline(found) if found is not None and isinstance(found.header, Header) else None

    found = find(backup_id)
    walk = Restorability(find, lambda one: here_if(one.backup not in dying and is_whole(destination, server, one.id)))
    return found is not None and bool(walk.of(found).destinations)


def _remove(destination: Destination, server: str, backup_id: str, locks: Locks) -> bool:
    """Manifest first: from then on it is no backup, and the rest is garbage. The mark goes last of all. False when it
    may not be removed yet, and then nothing of it was."""
    if not locks.delete(destination, layout.manifest_key(server, backup_id)):
        return False
    tree = as_tree(destination)
    if tree is not None:
        tree.remove_tree(layout.tree_name(server, backup_id))
    folder = layout.backup_folder(server, backup_id)
    locks.delete_all(destination, [info.key for info in destination.list(folder)])
    locks.delete(destination, layout.mark_key(server, backup_id))
    return True


def _require(destination: Destination, server: str, backup_id: str) -> None:
    if not exists(destination, layout.manifest_key(server, backup_id)):
        raise NotFoundError(
            f"destination {destination.name} has no backup {backup_id} of {server}",
            hint="backupd backups lists the backups",
        )
