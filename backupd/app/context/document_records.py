"""What the catalog knows of the documents at the destinations, and what becomes of one that is another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from backupd.app.context.incidents import Incidents, Pair
from backupd.catalog.session import Catalog
from backupd.model.backup_record import BackupState
from backupd.model.binlog import SegmentKey
from backupd.model.errors import CatalogError, NotFoundError, TamperedError
from backupd.model.event import Event, Severity
from backupd.model.text import Clock

TAMPERED = Pair("tampered", "tampered-mended")


class CatalogRecords:
    """Implements ``transfer.recorded.Records``. Without the catalog nothing is known: what is archived meanwhile, and
    what is read of it, goes on."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog, self._clock = catalog, clock

    def manifest(self, backup_id: str) -> str:
        with contextlib.suppress(CatalogError):
            return self._catalog.backups.digest(backup_id)
        return ""

    def segment(self, server: str, key: SegmentKey) -> str:
        with contextlib.suppress(CatalogError):
            return self._catalog.binlogs.digest(server, key)
        return ""

    def differs(self, destination: str, server: str, backup_id: str, error: TamperedError) -> None:
        with contextlib.suppress(CatalogError):
            told_tampered(self._catalog, self._clock, destination, server, backup_id, error)


def told_tampered(
    catalog: Catalog, clock: Clock, destination: str, server: str, backup_id: str, error: TamperedError
) -> None:
    """An incident, and the copy counts as damaged. It is over when a verification finds nothing like it any more."""
    if backup_id:
        with contextlib.suppress(NotFoundError):  # one that has no row, or none there, yet
            catalog.backups.mark_copy_damaged(backup_id, destination)
            record = catalog.backups.get(backup_id)
            if record.state is BackupState.COMPLETE and all(copy.state != "complete" for copy in record.copies):
                catalog.backups.set_state(backup_id, BackupState.DAMAGED)
    Incidents(catalog).broken(
        TAMPERED,
        Event(
            clock(),
            TAMPERED.broken,
            Severity.ERROR,
            error.message,
            server=server,
            subject=destination,
            detail=error.detail,
            hint=error.hint,
        ),
    )


def settle_tampering(catalog: Catalog, clock: Clock, destination: str, server: str, left: Iterable[str]) -> None:
    """After every document of ``server`` there was read: ``left`` are the keys of those that are damaged still."""
    if not any(left):
        Incidents(catalog).mended(
            TAMPERED,
            Event(
                clock(),
                TAMPERED.mended,
                Severity.INFO,
                f"every document of {server} at {destination} is what was stored there",
                server=server,
                subject=destination,
            ),
        )
