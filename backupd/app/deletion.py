"""Deleting backups: marked first, gone after the grace period, and never the last one by accident.

The catalog's row changes before the mark is put and after it is taken away, so that a process that dies in between
leaves a backup that nobody offers but everybody can undelete, never one that is offered and swept.
"""

from __future__ import annotations

from datetime import timedelta

from backupd.app.wiring import GRACE, Wiring
from backupd.model.backup import BackupRecord, BackupState
from backupd.model.errors import BackupdError, NotFoundError, RefusedError
from backupd.transfer.inventory import read
from backupd.transfer.remove import is_whole, mark, marks, sweep, unmark
from storage.destination import Destination


def delete(wiring: Wiring, backup_id: str, *, now: bool) -> list[str]:
    """Mark a backup deleted at every destination; ``now`` also removes it at once. Gives what was held back, and why.

    A backup whose manifest is nowhere any more is forgotten. Raises NotFoundError, and RefusedError for a pinned
    backup or the only restorable one of its server.
    """
    with wiring.removing():
        record = wiring.catalog.backups.get(backup_id)
        _may_go(wiring, record)
        wiring.catalog.backups.set_state(backup_id, BackupState.DELETED)
        held: list[str] = []
        for destination in _holding(wiring, record):
            if read(destination, record.server, backup_id) is None:
                forget_swept(wiring, destination, [backup_id])
                continue
            mark(destination, record.server, backup_id, wiring.clock())
            if now:
                held += _remove(wiring, destination, record)
        return held


def _remove(wiring: Wiring, destination: Destination, record: BackupRecord) -> list[str]:
    swept = sweep(destination, clock=wiring.clock, grace=GRACE, kept=kept_on_purpose(wiring),
                  at_once=frozenset({(record.server, record.id)}))
    forget_swept(wiring, destination, swept.backups)
    return [reason for reason in swept.held if record.id in reason] if record.id not in swept.backups else []


def sweep_destination(wiring: Wiring, destination: Destination) -> list[str]:
    """Remove what is due and what dead runs left, and the rows of what is gone; gives what was held back, and why."""
    with wiring.removing():
        reconcile(wiring, destination)
        swept = sweep(destination, clock=wiring.clock, grace=GRACE, kept=kept_on_purpose(wiring))
        forget_swept(wiring, destination, swept.backups)
        return swept.held


def kept_on_purpose(wiring: Wiring) -> frozenset[tuple[str, str]]:
    """Backups that no sweep may take."""
    return frozenset((record.server, record.id) for record in wiring.catalog.backups.list() if record.pinned)


def reconcile(wiring: Wiring, destination: Destination) -> list[str]:
    """Make rows agree with ``destination``: what carries a mark is deleted, and the copy of a deleted backup whose
    manifest is gone is forgotten. Gives the ids changed. An older catalog, or a process that died, leaves such rows."""
    marked = {owner[1] for owner in marks(destination)}
    changed = []
    for record in wiring.catalog.backups.list():
        if not any(copy.destination == destination.name for copy in record.copies):
            continue
        if record.id in marked and record.state is not BackupState.DELETED:
            wiring.catalog.backups.set_state(record.id, BackupState.DELETED)
            changed.append(record.id)
        elif record.state is BackupState.DELETED and read(destination, record.server, record.id) is None:
            forget_swept(wiring, destination, [record.id])
            changed.append(record.id)
    return changed


def forget_swept(wiring: Wiring, destination: Destination, backups: list[str]) -> None:
    """Take removed copies out of the catalog; a backup without any copy is forgotten."""
    for backup_id in backups:
        wiring.catalog.backups.remove_copy(backup_id, destination.name)
        try:
            left = wiring.catalog.backups.get(backup_id).copies
        except NotFoundError:
            continue
        if not left:
            wiring.catalog.backups.remove(backup_id)
            wiring.catalog.witnesses.forget(backup_id)


def undelete(wiring: Wiring, backup_id: str) -> None:
    """Take the mark away, whatever the catalog says; possible as long as no sweep has removed the backup.

    Raises NotFoundError, RefusedError when it is not marked at all.
    """
    with wiring.removing():
        record = wiring.catalog.backups.get(backup_id)
        owner = (record.server, backup_id)
        holding = _holding(wiring, record)
        if record.state is not BackupState.DELETED and not any(owner in marks(d) for d in holding):
            raise RefusedError(f"backup {backup_id} is not marked as deleted: it is {record.state}")
        for destination in holding:
            # Sweeps of this installation wait for our lock, so the grace period need not have time left.
            unmark(destination, record.server, backup_id, now=wiring.clock(), grace=timedelta.max)
        wiring.catalog.backups.set_state(backup_id, BackupState.COMPLETE)


def keep(wiring: Wiring, backup_id: str, *, pinned: bool) -> None:
    """Keep a backup whatever rules say, or no longer. Raises NotFoundError, RefusedError for a deleted one."""
    with wiring.removing():
        record = wiring.catalog.backups.get(backup_id)
        if pinned and record.state is BackupState.DELETED:
            raise RefusedError(f"backup {backup_id} is marked as deleted, so it cannot be kept",
                               hint=f"first: backupd backups undelete {backup_id}")
        wiring.catalog.backups.pin(backup_id, pinned=pinned)


def _may_go(wiring: Wiring, record: BackupRecord) -> None:
    if record.pinned:
        raise RefusedError(f"backup {record.id} is kept on purpose",
                           hint=f"`backupd backups keep {record.id} --release` takes that back")
    others = [other for other in wiring.catalog.backups.list(record.server) if other.id != record.id]
    children = [other.id for other in others if other.parent == record.id and other.state is not BackupState.DELETED]
    if children:
        raise RefusedError(f"backup {record.id} is needed by {', '.join(children)}, which build on it",
                           hint="delete those first")
    # The catalog alone may be wrong in both directions, so the destinations are asked.
    if _is_somewhere(wiring, record) and not any(_is_restorable(wiring, other) for other in others):
        raise RefusedError(f"backup {record.id} is the only restorable backup of {record.server}: the last one is kept",
                           hint=f"take another one first: backupd backup {record.server} --kind full")


def _is_somewhere(wiring: Wiring, record: BackupRecord) -> bool:
    return any(read(destination, record.server, record.id) is not None for destination in _holding(wiring, record))


def _is_restorable(wiring: Wiring, record: BackupRecord) -> bool:
    """Complete by the catalog, and whole and unmarked at one destination at least."""
    if record.state is not BackupState.COMPLETE:
        return False
    for destination in _holding(wiring, record):
        try:
            if (record.server, record.id) not in marks(destination) and is_whole(destination, record.server, record.id):
                return True
        except BackupdError:
            continue  # a destination that cannot be reached does not vouch for anything
    return False


def _holding(wiring: Wiring, record: BackupRecord) -> list[Destination]:
    return [wiring.destination(copy.destination) for copy in record.copies]
