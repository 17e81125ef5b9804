"""Copies that the catalog knows and the destination does not hold any more, though nobody here removed them."""

from __future__ import annotations

from collections.abc import Sequence

from backupd.app.context.incidents import Pair
from backupd.app.context.wiring import Wiring
from backupd.model.backup_record import BackupRecord, BackupState
from backupd.model.event import Event, Severity
from backupd.transfer.guards.holds_and_marks import is_marked
from backupd.transfer.records.manifests import backup_ids
from storage.contract.destination import Destination

LOST = Pair("copy-lost", "replication-caught-up")
_COMPLETE, _DAMAGED = str(BackupState.COMPLETE), str(BackupState.DAMAGED)


def find_lost(wiring: Wiring, target: Destination, server: str) -> tuple[BackupRecord, ...]:
    """Backups of ``server`` of which the catalog knows a copy at ``target``, where their manifests are not, nor a mark;
    each after what it builds on. Their copies count as damaged from then on, and an event tells of those that are new.
    One listing. Raises DestinationError, CatalogError."""
    known = wiring.catalog.backups.list(server)  # before the listing: a row comes after its manifest
    there = {name for _server, name in backup_ids(target, server)}
    gone = [
        record
        for record in sorted(known, key=lambda one: (one.finished_at, one.id))
        if record.id not in there
        and _state(record, target.name) in (_COMPLETE, _DAMAGED)
        and not is_marked(target, server, record.id)
    ]
    news = [record.id for record in gone if _state(record, target.name) == _COMPLETE]
    for name in news:
        wiring.catalog.backups.set_copy_state(name, target.name, _DAMAGED)
    if news:
        wiring.catalog.events.add(_event(wiring, server, target.name, news))
    return tuple(gone)


def _state(record: BackupRecord, place: str) -> str:
    return next((copy.state for copy in record.copies if copy.destination == place), "")


def _event(wiring: Wiring, server: str, place: str, names: Sequence[str]) -> Event:
    return Event(
        wiring.clock(),
        LOST.broken,
        Severity.ERROR,
        server=server,
        subject=place,
        message=f"{len(names)} backups of {server} are not at {place} any more, and nobody marked them deleted",
        detail="\n".join(names),
        hint=f"they are copied there again from another destination, by itself; at once: backupd replicate {server} "
        f"--to {place}. Look who else deletes there: a rule of the bucket, or somebody with its credentials",
    )
