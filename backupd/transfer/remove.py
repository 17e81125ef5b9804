"""Deleting a backup: a mark that can be taken back, a grace period, then manifest, tree, side files and objects.

Each step alone leaves either a whole backup or garbage that the next collection finds.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.model.backup import BackupKind
from backupd.model.clock import Clock, format_time, parse_time
from backupd.model.errors import DamagedError, NotFoundError, ObjectMissingError, RefusedError
from backupd.model.manifest import Header
from backupd.transfer.collect import Collected, collect, living_intents, living_pins
from backupd.transfer.inventory import Committed, committed, read
from backupd.transfer.keeping import Backup, Kept, kept_at
from backupd.transfer.lease import Alive, is_alive
from storage import layout, objects
from storage.destination import Destination, as_tree


@dataclass(frozen=True, slots=True)
class Mark:
    """Since when a backup is marked deleted, and why; ``reason`` is empty where nobody said."""

    at: datetime
    reason: str = ""


def mark(destination: Destination, server: str, backup_id: str, now: datetime, *, reason: str = "") -> datetime:
    """Mark a backup deleted; since when it is. Marking again keeps the first time and reason.

    Raises NotFoundError. Whether the backup may be deleted at all (last chain, pins of the catalog) is decided before.
    """
    try:
        destination.stat(layout.manifest_key(server, backup_id))
    except ObjectMissingError:
        raise _unknown(destination, server, backup_id) from None
    before = marked(destination, server).get((server, backup_id))
    if before is not None:
        return before.at
    note = json.dumps({"server": server, "backup": backup_id, "at": format_time(now), "reason": reason}, sort_keys=True)
    destination.put(layout.mark_key(server, backup_id), io.BytesIO(note.encode("ascii")))
    return now


def unmark(destination: Destination, server: str, backup_id: str, *, now: datetime, grace: timedelta) -> None:
    """Take the mark away; nothing happens where there is none.

    Raises RefusedError once the ``grace`` (the one that sweeps use) has passed, since a sweep may be at it right now,
    and NotFoundError when the backup is gone.
    """
    since = marks(destination).get((server, backup_id))
    if since is not None and now - since >= grace:
        raise RefusedError(
            f"backup {backup_id} of {server} at destination {destination.name} can no longer be undeleted",
            detail=f"it was marked deleted at {format_time(since)} and its grace period has passed",
            hint="a sweep may be removing it now; raise the grace period if its manifest is still there")
    destination.delete(layout.mark_key(server, backup_id))
    try:
        destination.stat(layout.manifest_key(server, backup_id))
    except ObjectMissingError:
        raise _unknown(destination, server, backup_id) from None


def marks(destination: Destination) -> dict[Backup, datetime]:
    """Backups marked deleted, and since when."""
    return {owner: note.at for owner, note in marked(destination).items()}


def marked(destination: Destination, server: str | None = None) -> dict[Backup, Mark]:
    """Backups (of ``server``) marked deleted. A mark that cannot be read counts from when it was stored."""
    found: dict[Backup, Mark] = {}
    for info in list(destination.list(layout.MARKS if server is None else f"{layout.MARKS}{server}/")):
        owner = layout.backup_of(info.key)
        if owner is None:
            continue
        try:
            with destination.get(info.key) as stream:
                note = json.loads(stream.read())
            found[owner] = Mark(parse_time(note["at"]), str(note.get("reason", "")))
        except ObjectMissingError:
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            found[owner] = Mark(info.modified_at)
    return found


def sweep(destination: Destination, *, clock: Clock, grace: timedelta, at_once: frozenset[Backup] = frozenset(),
          kept: Kept | None = None, alive: Alive = is_alive) -> Collected:
    """Remove the backups that were marked at least ``grace`` ago, then collect what nobody needs any more. Those of
    ``at_once`` (marked too) need not wait for their grace. What is kept on purpose, by ``kept`` or by what is written
    at the destination, stays whatever its mark says, and so does the last restorable chain of a server.

    A backup stays while a restore pins it, an unmarked backup builds on it, or a backup of its server is being
    written; ``held`` of the result says so. What builds on others goes before them, so that no step leaves an
    increment alone.
    """
    now = clock()
    # Marks before pins and intents: whoever pins, or begins to build on a backup, and then finds no mark was early
    # enough to be seen here. Manifests after intents: a backup that ended in between is seen as one of the two.
    dying = marks(destination)
    due = {owner for owner, since in dying.items() if owner in at_once or now - since >= grace}
    held: list[str] = []
    for keeping in (kept or Kept(), kept_at(destination)):
        staying = {owner for owner in due if keeping.covers(owner)}
        held += [f"{name} of {server}: {keeping.reason((server, name))}" for server, name in sorted(staying)]
        due -= staying
    removed: list[str] = []
    if due:
        removable = due - _in_use(destination, due, now, alive, held)
        found = list(committed(destination))
        removable -= _last_whole(destination, found, removable, set(dying), held)
        removable -= _needed(found, removable, held)
        for server, backup_id in _children_first(found, removable):
            _remove(destination, server, backup_id)
            removed.append(backup_id)
    result = collect(destination, clock=clock, alive=alive)
    result.backups = removed
    result.held = held + result.held
    return result


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


def _parents(found: list[Committed]) -> dict[Backup, str | None]:
    return {(item.server, item.backup_id): item.header.parent for item in found if isinstance(item.header, Header)}


def _chain(owner: Backup, parents: dict[Backup, str | None]) -> list[Backup]:
    """``owner`` and all that it builds on, itself first, as far as readable manifests tell."""
    chain = [owner]
    while (parent := parents.get(chain[-1])) is not None and (owner[0], parent) not in chain:
        chain.append((owner[0], parent))
    return chain


def _children_first(found: list[Committed], removable: set[Backup]) -> list[Backup]:
    parents = _parents(found)
    return sorted(removable, key=lambda owner: (-len(_chain(owner, parents)), owner))


def _needed(found: list[Committed], removable: set[Backup], held: list[str]) -> set[Backup]:
    """Those of ``removable`` on which a backup builds that stays, however many steps away."""
    damaged = {item.server for item in found if not isinstance(item.header, Header)
               and (item.server, item.backup_id) not in removable}
    needed = {owner for owner in removable if owner[0] in damaged}
    held.extend(f"{name} of {server}: a damaged manifest of this server may build on it"
                for server, name in sorted(needed))
    parents = _parents(found)
    for child in sorted(set(parents) - removable):
        for above in _chain(child, parents)[1:]:
            if above in removable - needed:
                needed.add(above)
                held.append(f"{above[1]} of {above[0]}: {child[1]} builds on it")
    return needed


def is_whole(destination: Destination, server: str, backup_id: str) -> bool:
    """Is the backup here, its manifest and body what was written, everything that it names present in its size, and
    nothing of it known to be damaged (in quarantine)? Reads no object."""
    found = read(destination, server, backup_id)
    if found is None or not isinstance(found.header, Header):
        return False
    header = found.header
    bad = objects.quarantined(destination)
    if any(item.name in bad for item in header.objects):
        return False
    folder = layout.backup_folder(server, backup_id)
    wanted = [(layout.object_key(item.name), item.size) for item in header.objects]
    wanted += [(folder + item.name, item.size) for item in header.side_files]
    try:
        if not all(destination.stat(key).size == size for key, size in wanted):
            return False
        # Without its body nothing can be restored, and there is no quarantine for what is not in the pool.
        objects.fetch_side(destination, layout.body_key(server, backup_id), header.body)
    except (ObjectMissingError, DamagedError):
        return False
    return True


def _last_whole(destination: Destination, found: list[Committed], removable: set[Backup], dying: set[Backup],
                held: list[str]) -> set[Backup]:
    """Of each server that would be left without anything restorable and unmarked: the newest whole one, which must stay
    (with what it builds on, as everything that stays). A dump may lack tables, so none stands in for the last physical
    one."""
    kept: set[Backup] = set()
    parents = _parents(found)

    def restorable(owner: Backup) -> bool:
        return all(is_whole(destination, *member) for member in _chain(owner, parents))

    dumps = {(item.server, item.backup_id) for item in found
             if isinstance(item.header, Header) and item.header.kind == BackupKind.LOGICAL}
    for server in sorted({owner[0] for owner in removable}):
        ours = sorted(((item.server, item.backup_id) for item in found if item.server == server), reverse=True)
        for family in ([owner for owner in ours if owner not in dumps], ours):
            if any(restorable(owner) for owner in family if owner not in dying or owner in kept):
                continue
            newest = next((owner for owner in family if owner in removable and restorable(owner)), None)
            if newest is not None:
                kept.add(newest)
                held.append(f"{newest[1]} of {server}: it is the last whole backup of this server here")
    return kept


def restorable_at(destination: Destination, server: str, backup_id: str) -> bool:
    """Are the backup and everything it builds on here, whole, and not marked deleted?"""
    dying = marked(destination, server)
    name: str | None = backup_id
    seen: set[str] = set()
    while name is not None:
        found = read(destination, server, name)
        if (found is None or not isinstance(found.header, Header) or name in seen or (server, name) in dying
                or not is_whole(destination, server, name)):
            return False
        seen.add(name)
        name = found.header.parent
    return True


def _remove(destination: Destination, server: str, backup_id: str) -> None:
    """Manifest first: from then on it is no backup, and the rest is garbage. The mark goes last of all."""
    destination.delete(layout.manifest_key(server, backup_id))
    tree = as_tree(destination)
    if tree is not None:
        tree.remove_tree(layout.tree_name(server, backup_id))
    for info in list(destination.list(layout.backup_folder(server, backup_id))):
        destination.delete(info.key)
    destination.delete(layout.mark_key(server, backup_id))


def _unknown(destination: Destination, server: str, backup_id: str) -> NotFoundError:
    return NotFoundError(f"destination {destination.name} has no backup {backup_id} of {server}",
                         hint="backupd backups lists what there is")
