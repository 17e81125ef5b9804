"""Backups that a destination has not got, as the rules there would see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from backupd.app.retention.log_retention import Archive
from backupd.model.backup_record import BackupRecord, BackupState
from backupd.recovery.lineage import lineages, strangers
from backupd.retention.decisions import Stored


def as_if_there(records: Sequence[BackupRecord], candidates: Iterable[BackupRecord], logs: Archive) -> list[Stored]:
    """``candidates``, of all the ``records`` of a server, as a destination would have them that does not yet."""
    lineage = lineages(tuple(records))
    strange = {name for one in strangers(records) for name in one.backups}
    return [
        Stored(
            record.id,
            record.kind,
            record.parent,
            record.started_at,
            record.finished_at,
            pinned=record.pinned,
            bytes=record.stats.bytes_stored,
            place=logs.places.get(record.id),
            table_set=record.table_set,
            missing=record.not_dumped,
            lineage=lineage[record.id],
            strange=record.id in strange,
            doubtful=bool(record.doubtful),
        )
        for record in candidates
    ]


def is_complete(record: BackupRecord, place: str) -> bool:
    return any(copy.destination == place and copy.state == "complete" for copy in record.copies)


def may_come(record: BackupRecord, place: str, by_id: Mapping[str, BackupRecord]) -> bool:
    """Was it never at ``place``, and can it come there, with all that it builds on?"""
    if any(copy.destination == place for copy in record.copies):
        return False
    one: BackupRecord | None = record
    seen: set[str] = set()
    while one is not None and one.id not in seen:
        seen.add(one.id)
        if one.state is not BackupState.COMPLETE or not any(copy.state == "complete" for copy in one.copies):
            return False
        if one.parent is None:
            return True
        one = by_id.get(one.parent)
    return False
