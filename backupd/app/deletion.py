"""Deleting backups: marked first, gone after the grace period, and never the last one by accident."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta

from backupd.app.wiring import GRACE, Wiring
from backupd.model.backup import BackupRecord, BackupState
from backupd.model.errors import NotFoundError, RefusedError
from backupd.transfer.remove import mark, sweep, unmark
from storage.destination import Destination


def delete(wiring: Wiring, backup_id: str, *, now: bool) -> list[str]:
    """Mark a backup deleted at every destination; ``now`` also removes it at once. Gives what was held back, and why.

    Raises NotFoundError, and RefusedError for a pinned backup or the only restorable one of its server.
    """
    record = wiring.catalog.backups.get(backup_id)
    with _alone(wiring, record.server):
        return _delete(wiring, wiring.catalog.backups.get(backup_id), now=now)


def _delete(wiring: Wiring, record: BackupRecord, *, now: bool) -> list[str]:
    _may_go(wiring, record)
    destinations = _holding(wiring, record)
    moment = wiring.clock()
    for destination in destinations:
        mark(destination, record.server, record.id, moment)
    wiring.catalog.backups.set_state(record.id, BackupState.DELETED)
    held: list[str] = []
    if now:
        for destination in destinations:
            # With no grace at all a sweep takes every marked backup, and only this one was given up for good.
            held += _remove(wiring, destination, record)
    return held


def _remove(wiring: Wiring, destination: Destination, record: BackupRecord) -> list[str]:
    swept = sweep(destination, clock=wiring.clock, grace=GRACE, at_once=frozenset({(record.server, record.id)}))
    forget_swept(wiring, destination, swept.backups)
    return swept.held


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


def undelete(wiring: Wiring, backup_id: str, *, grace: timedelta = GRACE) -> None:
    """Take the mark away. Raises NotFoundError, RefusedError once the grace period is over."""
    record = wiring.catalog.backups.get(backup_id)
    if record.state is not BackupState.DELETED:
        raise RefusedError(f"backup {backup_id} is not marked as deleted: it is {record.state}")
    with _alone(wiring, record.server):
        for destination in _holding(wiring, record):
            unmark(destination, record.server, backup_id, now=wiring.clock(), grace=grace)
        wiring.catalog.backups.set_state(backup_id, BackupState.COMPLETE)


def _alone(wiring: Wiring, server: str) -> AbstractContextManager[None]:
    """Deleting and undeleting at once could leave a backup that is both back and gone."""
    return wiring.locked(f"delete-{server}", f"backups of {server} are being deleted or undeleted right now")


def _may_go(wiring: Wiring, record: BackupRecord) -> None:
    if record.pinned:
        raise RefusedError(f"backup {record.id} is kept on purpose",
                           hint=f"`backupd backups keep {record.id} --release` takes that back")
    children = [other.id for other in wiring.catalog.backups.list(record.server)
                if other.parent == record.id and other.state is not BackupState.DELETED]
    if children:
        raise RefusedError(f"backup {record.id} is needed by {', '.join(children)}, which build on it",
                           hint="delete those first")
    usable = wiring.catalog.backups.list(record.server, state=BackupState.COMPLETE)
    if record.state is BackupState.COMPLETE and {other.id for other in usable} == {record.id}:
        raise RefusedError(f"backup {record.id} is the only restorable backup of {record.server}: the last one is kept",
                           hint=f"take another one first: backupd backup {record.server} --kind full")


def _holding(wiring: Wiring, record: BackupRecord) -> list[Destination]:
    return [wiring.destination(copy.destination) for copy in record.copies]
