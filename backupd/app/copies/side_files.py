"""What lies beside a backup at its destinations, read from the first copy where it is what was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from backupd.app.context.wiring import Wiring
from backupd.app.copies.protection import with_protection
from backupd.model.backup_record import BackupDetail, BackupRecord
from backupd.model.errors import BackupdError, NotFoundError
from backupd.model.manifest import Header
from backupd.transfer.records.manifests import load_header, load_side_file
from storage.contract.destination import Destination

T = TypeVar("T")


def detail(wiring: Wiring, backup_id: str) -> BackupDetail:
    """Raises NotFoundError, and the first reason where no copy can be read."""
    (record,) = with_protection(wiring, [wiring.catalog.backups.get(backup_id)])
    return _of_first(
        wiring,
        record,
        lambda _destination, header: BackupDetail(
            record, len(header.objects), header.recipients, header.codec, header.is_bound, header.runbook.sha256
        ),
    )


def runbook(wiring: Wiring, backup_id: str) -> str:
    """How to restore it by hand. Raises as ``detail`` does."""
    return _of_first(
        wiring,
        wiring.catalog.backups.get(backup_id),
        lambda destination, header: load_side_file(destination, header, header.runbook).decode(),
    )


def _of_first(wiring: Wiring, record: BackupRecord, read: Callable[[Destination, Header], T]) -> T:
    errors: list[BackupdError] = []
    for copy in record.copies:
        try:
            destination = wiring.destination(copy.destination)
            return read(destination, load_header(destination, record.server, record.id))
        except BackupdError as error:
            errors.append(error)
    raise errors[0] if errors else NotFoundError(f"no destination holds backup {record.id}")
