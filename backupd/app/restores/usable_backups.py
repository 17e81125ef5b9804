"""Which of the backups in the catalog a restore may use, and how fast the phases of a restore were. Timelines are made
of it, too, so it imports nothing that acts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime

from backupd.app.context.wiring import Wiring
from backupd.catalog.restores import Rate as Measured
from backupd.model.backup_record import BackupRecord, BackupState
from backupd.model.text import format_time
from restore.planning.plan import DEFAULT_RATES, Rate

_NO_BYTES = 1e18
"""Bytes a second for a phase whose time does not depend on the size."""


def within_reach(wiring: Wiring, records: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """``records`` without copies at destinations that are not configured any more."""
    configured = wiring.settings.destinations
    return tuple(
        record
        if all(copy.destination in configured for copy in record.copies)
        else replace(record, copies=tuple(copy for copy in record.copies if copy.destination in configured))
        for record in records
    )


def not_believed(wiring: Wiring, server: str, *, since: datetime | None = None) -> tuple[str, ...]:
    """What to say of whole backups that nothing shows to be ours, of those that ended after ``since``. Where an older
    catalog was put back, they are."""
    found = [
        record
        for record in wiring.catalog.backups.foreign(server)
        if record.state is BackupState.COMPLETE and (since is None or record.finished_at > since)
    ]
    if not found:
        return ()
    newest = max(found, key=lambda record: record.finished_at)
    words = (
        f"{len(found)} backups are not used, the newest {newest.id} of "
        f"{format_time(newest.finished_at)}, since nothing in this catalog shows that this installation took "
        f"them; if an older catalog was put back, check them, then: backupd catalog adopt {newest.id}"
    )
    return (words,)


def measured_rates(wiring: Wiring, server: str, *, tables: bool = False) -> Mapping[str, Rate]:
    """Measured rates of a server by phase, as the planner wants them; with ``tables`` of restores of tables, too."""
    found = wiring.catalog.rates.of(server)
    if tables:
        found = {**found, **wiring.catalog.rates.of_tables(server)}
    return {
        name: _replay_rate(rate)
        if name == "rolled_forward"
        else Rate(
            bytes_per_second=rate.bytes_per_second or _NO_BYTES,
            seconds=0.0 if rate.bytes_per_second else rate.seconds,
            samples=rate.samples,
        )
        for name, rate in found.items()
    }


def _replay_rate(measured: Measured) -> Rate:
    """Of a replay both what it takes to begin and its speed count; what was not measured is assumed."""
    usual = DEFAULT_RATES["rolled_forward"]
    return Rate(
        measured.bytes_per_second or usual.bytes_per_second,
        measured.start if measured.start is not None else usual.seconds,
        measured.samples,
        speed_assumed=measured.bytes_per_second is None,
    )
