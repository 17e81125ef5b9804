"""Backups that a destination has not got, as the rules there would see them.

For how long the storage class of a copy has to be paid for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from backupd.app.context.wiring import Wiring
from backupd.app.retention.log_retention import Archive
from backupd.model.backup_record import BackupRecord, BackupState, Copy
from backupd.model.manifest import Stats
from backupd.model.thaw import GIB, MONTH_DAYS
from backupd.recovery.lineage import lineages, strangers
from backupd.retention.decisions import Minimum, Stored


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


def minimum_of(wiring: Wiring, copy: Copy, stats: Stats) -> Minimum | None:
    """Of a copy at a destination whose storage class has a minimum storage time; None for any other.

    It counts from when the copy was stored. Objects that it shares with earlier backups were stored before, and those
    that it shares with later ones stay: so it is over by then at the latest, and costs at most what is told.
    """
    settings = wiring.settings
    if copy.destination not in settings.destinations:
        return None
    storage_class = settings.destinations[copy.destination].kept_in(logs=False)
    prices = settings.configuration.archive.prices.as_prices()
    time = prices.minimum(storage_class)
    if not time:
        return None
    monthly = prices.per_gib_month.get(storage_class)
    per_day = None if monthly is None else stats.bytes_stored / GIB * monthly / MONTH_DAYS
    return Minimum(storage_class, copy.stored_at + time, per_day, prices.currency)


def logs_minimum(wiring: Wiring, place: str) -> tuple[str, timedelta] | None:
    """The storage class that complete binary logs lie in at a destination, and its minimum storage time."""
    settings = wiring.settings
    if place not in settings.destinations:
        return None
    storage_class = settings.destinations[place].kept_in(logs=True)
    time = settings.configuration.archive.prices.as_prices().minimum(storage_class)
    return (storage_class, time) if time else None
