"""Can a destination that gets copies keep up with the backups that are taken?"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from backupd.app.context.incidents import SLOW, Incidents
from backupd.app.context.wiring import Wiring
from backupd.backup.checks.speed import LIMITED, LONG_SECONDS
from backupd.model.backup_record import BackupRecord
from backupd.model.event import Event, Severity
from backupd.model.text import format_duration, format_size

_LOOKED_AT = timedelta(days=14)
_LEAST = timedelta(hours=1)
"""Backups that were all taken within it say nothing about how many are to come."""


def needed_rate(records: Iterable[BackupRecord]) -> float | None:
    """New bytes a second that the backups of the last two weeks brought; None where there are too few of them."""
    found = sorted(records, key=lambda record: record.finished_at)
    found = [record for record in found if found[-1].finished_at - record.finished_at <= _LOOKED_AT]
    if not found or (length := found[-1].finished_at - found[0].finished_at) < _LEAST:
        return None
    return sum(record.stats.bytes_new for record in found[1:]) / length.total_seconds()


def tell_speed(wiring: Wiring, server: str, place: str, sent: int, seconds: float) -> None:
    """``sent`` bytes of backups were copied to ``place`` in ``seconds``: one event when new backups bring more than
    that, and one when they do not any more. Copies of less than a minute are quick enough whatever their rate.
    Raises CatalogError."""
    needed = needed_rate(wiring.catalog.backups.list(server))
    if not sent or needed is None:
        return
    incidents, now, rate = Incidents(wiring.catalog), wiring.clock(), sent / max(seconds, 1e-9)
    configured = wiring.settings.destinations.get(place)
    limit = configured.max_upload if configured is not None else None
    if seconds > LONG_SECONDS and rate < needed and limit is not None and rate >= limit * LIMITED:
        incidents.broken(
            SLOW,
            Event(
                now,
                SLOW.broken,
                Severity.WARNING,
                server=server,
                subject=place,
                message=f"max_upload of {place} ({format_size(limit)}/s) is too low for the copies of {server}: the "
                f"backups of the last two weeks brought {format_size(needed)}/s",
                hint=f"it falls behind further with every backup: raise max_upload of {place}, copy fewer of them "
                "there "
                "(retention of that destination), or take backups less often",
            ),
        )
    elif seconds > LONG_SECONDS and rate < needed:
        incidents.broken(
            SLOW,
            Event(
                now,
                SLOW.broken,
                Severity.WARNING,
                server=server,
                subject=place,
                message=f"{place} is too slow for {server}: the last copies took {format_size(sent)} in "
                f"{format_duration(seconds)} ({format_size(rate)}/s), and the backups of the last two weeks "
                f"brought {format_size(needed)}/s",
                hint="it falls behind further with every backup: look at its line, copy fewer of them there "
                "(retention of that destination), or take backups less often",
            ),
        )
    else:
        incidents.mended(
            SLOW,
            Event(
                now,
                SLOW.mended,
                Severity.INFO,
                server=server,
                subject=place,
                message=f"copies of {server} to {place} keep up with its backups again",
            ),
        )
