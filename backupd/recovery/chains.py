"""Chains: a full backup and the increments that build on it, one on the other. Pure, and linear in what it is given.

Parents are named by their ids and by nothing else: log sequence numbers of some tools stay the same over several
increments, and times follow a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.errors import DamagedError, NotFoundError


@dataclass(frozen=True, slots=True)
class Chain:
    """``members`` in the order in which they are applied: the full backup, then each increment on the one before."""

    members: tuple[BackupRecord, ...]

    @property
    def full(self) -> BackupRecord:
        """The full backup that the chain begins with."""
        return self.members[0]

    @property
    def increments(self) -> tuple[BackupRecord, ...]:
        """What is applied to the full one, in this order."""
        return self.members[1:]

    @property
    def last(self) -> BackupRecord:
        """The backup that is restored: the full one, or the last increment."""
        return self.members[-1]


def chain_of(backup_id: str, backups: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """What a restore of ``backup_id`` needs: the full backup first, ``backup_id`` last.

    Raises NotFoundError naming the parent that is not among ``backups`` (or ``backup_id`` itself), DamagedError for
    parents that lead round in a circle or to another server.
    """
    by_id = {backup.id: backup for backup in backups}
    if backup_id not in by_id:
        raise NotFoundError(f"there is no backup {backup_id}", hint="`backupd backups` lists those that are known")
    members = [by_id[backup_id]]
    seen = {backup_id}
    while members[-1].kind is BackupKind.PHYSICAL_INCREMENTAL:
        child = members[-1]
        parent = by_id.get(child.parent or "")
        if parent is None:
            raise NotFoundError(
                f"backup {child.id} builds on {child.parent or 'a backup that is not named'}, which is not there",
                hint="choose another backup; `backupd fsck` says what happened to this one",
            )
        wrong = _wrong_parent(child, parent, seen)
        if wrong:
            raise DamagedError(f"backup {backup_id} cannot be restored", [wrong], hint="choose another backup")
        seen.add(parent.id)
        members.append(parent)
    return tuple(reversed(members))


def _wrong_parent(child: BackupRecord, parent: BackupRecord, seen: set[str]) -> str:
    if parent.id in seen:
        return f"{child.id} builds on {parent.id}, which builds on it"
    if parent.server != child.server:
        return f"{child.id} of {child.server} builds on {parent.id}, which is of {parent.server}"
    if parent.kind is BackupKind.LOGICAL:
        return f"{child.id} builds on {parent.id}, which is a logical backup"
    return ""


def chains(backups: Iterable[BackupRecord]) -> tuple[Chain, ...]:
    """Every chain, oldest full backup first: from each physical full backup to each increment that nothing builds on.

    Where two increments have the same parent there are two chains. An increment without a whole line back to a full
    backup is in none; ``orphans`` gives those.
    """
    listed = list(backups)
    children = _children(listed)
    found: list[Chain] = []
    for full in sorted((b for b in listed if b.kind is BackupKind.PHYSICAL_FULL), key=_order):
        line: list[BackupRecord] = []
        pending = [(0, full)]
        while pending:
            depth, backup = pending.pop()
            del line[depth:]
            line.append(backup)
            following = children.get(backup.id, ())
            if not following:
                found.append(Chain(tuple(line)))
            pending += [(depth + 1, child) for child in reversed(following)]
    return tuple(found)


def orphans(backups: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """Increments whose line back to a full backup is broken, oldest first: none of them can be restored."""
    listed = list(backups)
    children = _children(listed)
    reached: set[str] = set()
    pending = [backup for backup in listed if backup.kind is BackupKind.PHYSICAL_FULL]
    while pending:
        backup = pending.pop()
        reached.add(backup.id)
        pending += children.get(backup.id, ())
    lost = [b for b in listed if b.kind is BackupKind.PHYSICAL_INCREMENTAL and b.id not in reached]
    return tuple(sorted(lost, key=_order))


def restorable(backups: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """Complete physical backups whose every parent is complete, too, with one destination that holds them all and has
    none of them marked deleted, and none of them doubtful or foreign; oldest first. A copy that is known to be damaged
    counts: the others may fill in."""
    listed = [
        b
        for b in backups
        if b.state is BackupState.COMPLETE and b.kind is not BackupKind.LOGICAL and not b.doubtful and not b.foreign
    ]
    children = _children(listed)
    pending = [(b, _places(b)) for b in listed if b.kind is BackupKind.PHYSICAL_FULL]
    found: dict[str, BackupRecord] = {}
    while pending:
        backup, places = pending.pop()
        if places and backup.id not in found:
            found[backup.id] = backup
            pending += [(child, places & _places(child)) for child in children.get(backup.id, ())]
    return tuple(sorted(found.values(), key=_order))


def dumps(backups: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """Complete logical backups that one destination holds, oldest first: those of the set without a name, which is the
    server's main one, or, where there is none, of all sets. Out of them tables are restored, never a server."""
    listed = [
        b
        for b in backups
        if b.state is BackupState.COMPLETE and b.kind is BackupKind.LOGICAL and _places(b) and not b.foreign
    ]
    return tuple(sorted([b for b in listed if not b.table_set] or listed, key=_order))


def _places(backup: BackupRecord) -> frozenset[str]:
    return frozenset(copy.destination for copy in backup.copies if copy.state != "deleted")


def dependants(backup_id: str, backups: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """Everything that cannot be restored without ``backup_id``, however many steps away, oldest first."""
    children = _children(backups)
    found: dict[str, BackupRecord] = {}
    pending = list(children.get(backup_id, ()))
    while pending:
        child = pending.pop()
        if child.id not in found and child.id != backup_id:
            found[child.id] = child
            pending += children.get(child.id, ())
    return tuple(sorted(found.values(), key=_order))


def _children(backups: Iterable[BackupRecord]) -> dict[str, list[BackupRecord]]:
    """Increments by the backup they build on, oldest first."""
    children: dict[str, list[BackupRecord]] = {}
    for backup in sorted(backups, key=_order):
        if backup.kind is BackupKind.PHYSICAL_INCREMENTAL and backup.parent is not None:
            children.setdefault(backup.parent, []).append(backup)
    return children


def _order(backup: BackupRecord) -> tuple[object, ...]:
    return backup.finished_at, backup.id
