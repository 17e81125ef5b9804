"""Deleting a backup: a mark that can be taken back, a grace period, then manifest, tree, side files and objects.

Each step alone leaves either a whole backup or garbage that the next collection finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache

from backupd.model.backup_record import BackupKind
from backupd.model.errors import (
    ArchivedError,
    BusyError,
    DamagedError,
    LockedError,
    NewerFormatError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.manifest import Header
from backupd.model.text import Clock, format_time, parse_time
from backupd.transfer.guards.holds_and_marks import (
    Backup,
    Kept,
    Mark,
    Sightings,
    explaining,
    is_due,
    kept_at,
    takes_back,
    withdraw,
)
from backupd.transfer.guards.lease import Alive, is_alive
from backupd.transfer.guards.object_locks import Locks, each
from backupd.transfer.records.manifests import Committed, backup_ids, read
from backupd.transfer.sweep.clean_up_lease import await_sweeps, sweeping
from backupd.transfer.sweep.collection import Collected, collect_held, living_intents, living_pins, manifests, not_begun
from backupd.transfer.sweep.deletion_limit import BRAKE, Brake
from storage.contract import layout, objects
from storage.contract.destination import Destination, ObjectInfo, as_tree, read_note, write_note

_MANY = 256
"""A backup of more objects than this is looked at by listing the pool, which is a page at a time."""
Sizes = Callable[[], Mapping[str, int]]
"""Gives the size of every stored object by its key."""


def mark(destination: Destination, server: str, backup_id: str, now: datetime, *, reason: str = "") -> datetime:
    """Mark a backup deleted; since when it is. Marking again keeps the first time and reason.

    Raises NotFoundError. Whether the backup may be deleted at all (last chain, pins of the catalog) is decided before.
    """
    try:
        destination.stat(layout.manifest_key(server, backup_id))
    except ObjectMissingError:
        raise _unknown(destination, server, backup_id) from None
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
    try:
        destination.stat(layout.manifest_key(server, backup_id))
    except ObjectMissingError:
        raise _unknown(destination, server, backup_id) from None


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
    kept: Kept | None = None,
    alive: Alive = is_alive,
    brake: Brake = BRAKE,
    expected: Collection[Backup] = (),
) -> Collected:
    """Remove the backups that were marked at least ``grace`` ago, then collect what nobody needs any more. Since when,
    and whether a person wants it, so that no brake holds it, is said by ``sightings``, not by the marks. Those of
    ``at_once`` (marked too) need not wait for their grace. What is kept on purpose, by ``kept`` or by what is written
    at the destination, stays whatever its mark says, and so does the last restorable chain of a server.

    A backup stays while a restore pins it, an unmarked backup builds on it, a backup of its server is being written, or
    the ``brake`` holds what too many marks of one day ask for; ``held`` of the result says so, ``locked`` what may not
    be removed yet. What builds on others goes before them, so that no step leaves an increment alone. While another
    installation sweeps here, nothing is done. ``expected``: as with ``collect``; what a missing one may build on stays.
    """
    try:
        with sweeping(destination, clock=clock, alive=alive) as lease:
            return sweep_held(
                destination,
                clock=clock,
                grace=grace,
                sightings=sightings,
                at_once=at_once,
                kept=kept or Kept(),
                alive=alive,
                brake=brake,
                fence=lease.assert_held,
                expected=expected,
            )
    except (BusyError, LockedError) as error:
        return not_begun(error)


def sweep_held(
    destination: Destination,
    *,
    clock: Clock,
    grace: timedelta,
    sightings: Sightings,
    at_once: frozenset[Backup],
    kept: Kept,
    alive: Alive,
    brake: Brake,
    fence: Callable[[], None],
    expected: Collection[Backup] = (),
) -> Collected:
    """The same by a caller that is ``sweeping`` already; ``fence`` raises when that has ended."""
    now = clock()
    # Marks before pins and intents: whoever pins, or begins to build on a backup, and then finds no mark was early
    # enough to be seen here. Manifests after intents: a backup that ended in between is seen as one of the two.
    marks = _read_marks(destination, now, grace, sightings, at_once, kept)
    held = marks.held
    removable = marks.due - _in_use(destination, marks.due, now, alive, held) if marks.due else set()
    seen = _read_manifests(destination, removable) if marks.due else _Manifests()
    held += [
        f"{name} of {server}: a newer version of backupd wrote it, and only that removes it"
        for server, name in sorted(removable & seen.newer)
    ]
    removable -= seen.newer
    # Whoever may put marks could put manifests, too, to make them few among many: those that are believed count.
    present = [item.backup for item in seen.outlines if item.readable] if marks.due else backup_ids(destination)
    braked = _braked(marks.unconfirmed, marks.strange, present, brake)
    held += braked
    removable = removable & marks.confirmed if braked else removable
    locks = Locks()
    removed: list[Backup] = []
    if removable:
        removable -= _last_whole(destination, seen.outlines, removable, marks.all, held, marks.confirmed)
        missing = set(expected) - marks.dying - {one.backup for one in seen.outlines}
        outlines = seen.outlines + [_Outline(owner, readable=False) for owner in sorted(missing)]
        removable -= _needed(outlines, removable, held)
        removed = _remove_children_first(destination, outlines, removable, held, locks, fence)
    result = collect_held(
        destination,
        clock=clock,
        alive=alive,
        brake=brake,
        fence=fence,
        explained=frozenset().union(*(seen.objects.get(owner, frozenset()) for owner in removed)),
        locks=locks,
        expected=set(expected) - set(removed),
        dying=marks.dying,
    )
    result.backups = [name for _server, name in removed]
    result.held = held + result.held
    result.braked = braked + result.braked
    return result


@dataclass(frozen=True, slots=True)
class _Marks:
    """The marks at a destination. ``due``: their backups may go; ``dying``: their marks explain a missing manifest;
    ``unconfirmed``: what no person wanted, and since when it is marked; ``strange``: marked by nobody here; ``held``:
    why what is due stays."""

    all: set[Backup]
    due: set[Backup]
    dying: set[Backup]
    confirmed: frozenset[Backup]
    unconfirmed: Mapping[Backup, datetime]
    strange: set[Backup]
    held: list[str]


def _read_marks(
    destination: Destination,
    now: datetime,
    grace: timedelta,
    sightings: Sightings,
    at_once: frozenset[Backup],
    kept: Kept,
) -> _Marks:
    notes = marked(destination)
    known = sightings(notes)
    since = {owner: known[owner].since for owner in notes if owner in known}
    due = {
        owner
        for owner, note in notes.items()
        if owner in at_once or (owner in known and is_due(note, known[owner], now, grace))
    }
    dying = due | explaining(notes, known, now, grace)
    held: list[str] = []
    for keeping in (kept, kept_at(destination)):
        staying = {owner for owner in due if keeping.covers(owner)}
        held += [f"{name} of {server}: {keeping.reason((server, name))}" for server, name in sorted(staying)]
        due = due - staying
        since = {owner: at for owner, at in since.items() if not keeping.covers(owner)}
    confirmed = at_once | {owner for owner in since if known[owner].confirmed}
    return _Marks(
        all=set(notes),
        due=due,
        dying=dying,
        confirmed=confirmed,
        unconfirmed={owner: at for owner, at in since.items() if owner not in confirmed},
        strange={owner for owner in since if not known[owner].ours},
        held=held,
    )


@dataclass(slots=True)
class _Manifests:
    """What is remembered of all manifests. ``objects``: names, only of backups that may be removed; ``newer``: backups
    that a newer version of this program wrote."""

    outlines: list[_Outline] = field(default_factory=list)
    objects: dict[Backup, frozenset[str]] = field(default_factory=dict)
    newer: set[Backup] = field(default_factory=set)


def _read_manifests(destination: Destination, removable: set[Backup]) -> _Manifests:
    seen = _Manifests()
    for one in manifests(destination, backup_ids(destination)):
        outline = _outline(one)
        seen.outlines.append(outline)
        if outline.backup in removable and isinstance(one.header, Header):
            seen.objects[outline.backup] = frozenset(item.name for item in one.header.objects)
        elif isinstance(one.header, NewerFormatError):
            seen.newer.add(outline.backup)
    return seen


def _remove_children_first(
    destination: Destination,
    outlines: list[_Outline],
    removable: set[Backup],
    held: list[str],
    locks: Locks,
    fence: Callable[[], None],
) -> list[Backup]:
    """Remove those of ``removable`` on which nothing builds that cannot go; the backups that went."""
    removed: list[Backup] = []
    stuck: set[Backup] = set()
    for server, backup_id in _children_first(outlines, removable):
        fence()
        if stuck and (server, backup_id) in _needed(outlines, removable - stuck, held):
            continue  # what builds on it could not go
        if _remove(destination, server, backup_id, locks):
            removed.append((server, backup_id))
        else:
            stuck.add((server, backup_id))
    return removed


def _braked(
    waiting: Mapping[Backup, datetime], strange: Collection[Backup], present: Collection[Backup], brake: Brake
) -> list[str]:
    """Why marks are not followed, when nobody has said that so many of one day are right; it is said before they are
    due. ``strange``: marks that this installation did not put."""
    if not waiting or not brake.holds(waiting, present):
        return []
    theirs = sum(1 for owner in waiting if owner in strange)
    told = (
        f"{len(waiting)} of {len(present)} backups are marked deleted, {brake.most(waiting, present)} more in one "
        f"day than came in it, and no more than {brake.limit(len(present))} may: `backupd retention SERVER --apply "
        "--really` lets those of a server go"
    )
    if theirs:
        told += (
            f". {theirs} of these marks were not put by this installation: find out who did it. `backupd backups "
            "undelete ID` takes a mark away"
        )
    return [told]


def _in_use(destination: Destination, due: set[Backup], now: datetime, alive: Alive, held: list[str]) -> set[Backup]:
    """Those of ``due`` that a restore reads or whose server is being backed up."""
    writing = living_intents(destination, now, alive)
    running = {server for lease in writing for server, _id in lease.backups}
    pinned = {backup for lease in living_pins(destination, now, alive) for backup in lease.backups}
    unreadable = [lease.id for lease in writing if lease.owner is None]
    if unreadable:
        held.append(f"every backup: the intent {unreadable[0]} cannot be read, so what is being written is unknown")
        return due
    busy = {owner for owner in due - pinned if owner[0] in running}
    held += [f"{name} of {server}: a restore is reading it" for server, name in sorted(due & pinned)]
    held += [f"{name} of {server}: a backup of this server is being written" for server, name in sorted(busy)]
    return (due & pinned) | busy


@dataclass(frozen=True, slots=True)
class _Outline:
    """What has to be remembered of a manifest: those of a large installation together fill the memory."""

    backup: Backup
    readable: bool
    kind: str = ""
    parent: str | None = None
    server_uuid: str = ""


def _outline(found: Committed) -> _Outline:
    backup = (found.server, found.backup_id)
    if not isinstance(found.header, Header):
        return _Outline(backup, readable=False)
    return _Outline(
        backup, readable=True, kind=found.header.kind, parent=found.header.parent, server_uuid=found.header.server_uuid
    )


def _parents(found: list[_Outline]) -> dict[Backup, str | None]:
    return {item.backup: item.parent for item in found if item.readable}


def _chain(owner: Backup, parents: dict[Backup, str | None]) -> list[Backup]:
    """``owner`` and all that it builds on, itself first, as far as readable manifests tell."""
    chain = [owner]
    while (parent := parents.get(chain[-1])) is not None and (owner[0], parent) not in chain:
        chain.append((owner[0], parent))
    return chain


def _children_first(found: list[_Outline], removable: set[Backup]) -> list[Backup]:
    parents = _parents(found)
    return sorted(removable, key=lambda owner: (-len(_chain(owner, parents)), owner))


def _needed(found: list[_Outline], removable: set[Backup], held: list[str]) -> set[Backup]:
    """Those of ``removable`` on which a backup builds that stays, however many steps away."""
    damaged = {item.backup[0] for item in found if not item.readable and item.backup not in removable}
    needed = {owner for owner in removable if owner[0] in damaged}
    held.extend(
        f"{name} of {server}: a backup of this server whose manifest is missing or damaged may build on it"
        for server, name in sorted(needed)
    )
    parents = _parents(found)
    for child in sorted(set(parents) - removable):
        for above in _chain(child, parents)[1:]:
            if above in removable - needed:
                needed.add(above)
                held.append(f"{above[1]} of {above[0]}: {child[1]} builds on it")
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
        pass  # a rule of the place moved the body: it is there in its size, and can be thawed
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
    found: list[_Outline],
    removable: set[Backup],
    dying: set[Backup],
    held: list[str],
    confirmed: Collection[Backup] = (),
) -> set[Backup]:
    """Of each server that would be left without anything restorable and unmarked: the newest whole one, which must stay
    (with what it builds on, as everything that stays). A dump may lack tables, so none stands in for the last physical
    one. Neither does one of a server with another uuid, which may be another installation's server of the same name;
    unless a person wants it gone (``confirmed``)."""
    kept: set[Backup] = set()
    parents = _parents(found)

    @cache
    def sizes() -> Mapping[str, int]:
        return pool_sizes(destination)

    def restorable(owner: Backup) -> bool:
        return all(is_whole(destination, *member, sizes=sizes) for member in _chain(owner, parents))

    dumps = {item.backup for item in found if item.kind == BackupKind.LOGICAL}
    of_uuid: dict[tuple[str, str], set[Backup]] = {}
    for item in found:
        if item.server_uuid:
            of_uuid.setdefault((item.backup[0], item.server_uuid), set()).add(item.backup)
    for server in sorted({owner[0] for owner in removable}):
        ours = sorted((item.backup for item in found if item.backup[0] == server), reverse=True)
        families = [([owner for owner in ours if owner not in dumps], ""), (ours, "")]
        for (name, uuid), some in sorted(of_uuid.items()):
            if name == server and some & removable and not some & removable <= set(confirmed):
                families.append(([owner for owner in ours if owner in some and owner not in dumps], f" {uuid}"))
        for family, uuid in families:
            if any(restorable(owner) for owner in family if owner not in dying or owner in kept):
                continue
            newest = next((owner for owner in family if owner in removable and restorable(owner)), None)
            if newest is not None:
                kept.add(newest)
                held.append(f"{newest[1]} of {server}: it is the last whole backup of this server{uuid} here")
    return kept


def restorable_at(destination: Destination, server: str, backup_id: str) -> bool:
    """Are the backup and everything it builds on here, whole, and not marked deleted?"""
    dying = marked(destination, server)
    name: str | None = backup_id
    seen: set[str] = set()
    while name is not None:
        found = read(destination, server, name)
        if (
            found is None
            or not isinstance(found.header, Header)
            or name in seen
            or (server, name) in dying
            or not is_whole(destination, server, name)
        ):
            return False
        seen.add(name)
        name = found.header.parent
    return True


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


def _unknown(destination: Destination, server: str, backup_id: str) -> NotFoundError:
    return NotFoundError(
        f"destination {destination.name} has no backup {backup_id} of {server}",
        hint="backupd backups lists what there is",
    )
