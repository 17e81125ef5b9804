"""What taking a backup of any kind begins and ends with: times that are in order, and the row of what was committed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import timedelta

from backupd.app.context.wiring import Wiring
from backupd.backup.commit import BackupSpec
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy
from backupd.model.errors import RefusedError, TamperedError
from backupd.model.manifest import BodyFacts, Header, encode_header
from backupd.model.text import format_duration
from backupd.transfer.records.manifests import get_bytes
from storage.contract import layout


def behind(wiring: Wiring, server: str) -> timedelta:
    """How far this host's clock is before the end of the newest backup, normally not at all.

    The recorded times of the next backup follow that one: their order must survive a clock that was set back. Leases
    and tombstones go by the clock itself, which is the same for everybody here.
    """
    last = max((record.finished_at for record in wiring.catalog.backups.list(server)), default=None)
    now = wiring.clock()
    return timedelta(0) if last is None or now > last else last + timedelta(seconds=1) - now


def clock_warning(late: timedelta) -> tuple[str, ...]:
    """What to say of a clock that is ``behind``."""
    if not late:
        return ()
    text = f"this host's clock is {format_duration(late.total_seconds())} before the end of the newest backup"
    return (f"{text}: the recorded times of this one follow that one, not the clock",)


def add_row(wiring: Wiring, spec: BackupSpec, record: BackupRecord) -> None:
    """Write the row of a backup that was committed just now. Between its manifest and its row another process may have
    taken it in; then its row gives way to this one, which knows more, where every destination has the very manifest
    that was stored.

    Raises RefusedError where one has another manifest of that id, DestinationError.
    """
    try:
        wiring.catalog.backups.add(record)
    except RefusedError:
        key = layout.manifest_key(record.server, record.id)
        for destination in spec.destinations:
            try:
                found = hashlib.sha256(get_bytes(destination, key)).hexdigest()
                told = "" if found == record.manifest else f"SHA-256 {found} where {record.manifest} was stored"
            except TamperedError as error:
                told = error.detail
            if told:
                raise RefusedError(
                    f"backup {record.id} is in the catalog already, and its manifest at destination "
                    f"{destination.name} is not the one that was stored just now",
                    detail=told,
                    hint="find out who writes there, then take the backup again",
                ) from None
        known = wiring.catalog.backups.get(record.id)
        copies = {copy.destination: copy for copy in (*known.copies, *record.copies)}
        wiring.catalog.backups.add(replace(record, copies=tuple(copies.values()), pinned=known.pinned), replace=True)


def record_of(spec: BackupSpec, header: Header, facts: BodyFacts, warnings: tuple[str, ...]) -> BackupRecord:
    """The row of a backup that was committed just now."""
    return BackupRecord(
        id=header.backup_id,
        server=header.server,
        kind=BackupKind(header.kind),
        state=BackupState.COMPLETE,
        parent=header.parent,
        started_at=header.started_at,
        finished_at=header.finished_at,
        stats=header.stats,
        position=facts.position,
        flavour=str(facts.server.flavour),
        server_version=str(facts.server.version),
        tool_version=str(facts.tool.version),
        warnings=warnings,
        copies=tuple(Copy(d.name, "complete", header.finished_at) for d in spec.destinations),
        from_lsn=header.from_lsn,
        to_lsn=header.to_lsn,
        server_uuid=header.server_uuid,
        reason=header.reason,
        table_set=header.table_set,
        tables_missing=header.tables_missing,
        missing=None if facts.inventory is None else tuple(name.shown for name in facts.missing),
        manifest=hashlib.sha256(encode_header(header)).hexdigest(),
    )
