"""Which moments the kept backups and binary logs allow to restore, and which of a window they do not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime, timedelta

from backupd.model.clock import format_time
from backupd.retention.decisions import Recoverable
from backupd.retention.rules import Families, Window
from backupd.retention.view import BinlogRun, Stored

_TOLD = 3
_RECENT = timedelta(hours=1)
"""How far what can be restored may end behind now: whether it follows closely enough is no question of retention."""


def recoverable(
    backups: Sequence[Stored], runs: Sequence[BinlogRun], *, since: datetime | None, now: datetime
) -> tuple[Recoverable, ...]:
    """The spans that restorable ``backups`` (oldest first) and ``runs`` (by their beginning) cover, in order; only what
    lies between ``since`` and ``now``. A backup outside of every run is a span of its one moment."""
    times = [backup.finished_at for backup in backups]
    found: list[Recoverable] = []
    covered: list[tuple[datetime, datetime]] = []
    for first, last in _merged(runs):
        place = bisect_left(times, first)
        if place < len(times) and times[place] <= last:
            begin = times[place] if since is None else max(times[place], since)
            end = min(last, now)
            covered.append((times[place], last))
            if begin <= end:
                found.append(Recoverable(begin, end, backups[place].id))
    position = 0
    for backup in backups:
        while position < len(covered) and covered[position][1] < backup.finished_at:
            position += 1
        inside = position < len(covered) and covered[position][0] <= backup.finished_at
        if not inside and (since is None or backup.finished_at >= since):
            found.append(Recoverable(backup.finished_at, backup.finished_at, backup.id))
    return tuple(sorted(found, key=lambda span: (span.since, span.until, span.base)))


def gaps(
    spans: Sequence[Recoverable],
    window: Window,
    families: Families,
    now: datetime,
    *,
    has_logs: bool,
    oldest: datetime | None = None,
) -> list[str]:
    """What of the window's promise is not kept, as sentences. ``oldest``: when the first backup that is known here
    ended, whole or not: before that there was nothing to keep."""
    name = f"{window.name} {window.length}"
    if not any(families):
        return [f"{name}: there is no restorable backup here at all"]
    if not has_logs:
        only = f"only the moments of its {len(spans)} backups can be restored, none between them"
        return [f"{name}: no binary logs are stored here, so {only}"]
    missing: list[tuple[datetime, datetime]] = []
    reached = window.start
    for span in spans:
        if span.since > reached and (oldest is None or span.since > oldest):
            missing.append((reached, span.since))
        reached = max(reached, span.until)
    told = [
        f"{name}: nothing between {format_time(since)} and {format_time(until)} can be restored"
        for since, until in missing[:_TOLD]
    ]
    if len(missing) > _TOLD:
        told.append(f"{name}: and {len(missing) - _TOLD} more gaps")
    if now - reached > _RECENT:
        told.append(f"{name}: the newest moment that can be restored is {format_time(reached)}")
    return told


def _merged(runs: Sequence[BinlogRun]) -> list[tuple[datetime, datetime]]:
    spans: list[tuple[datetime, datetime]] = []
    for run in runs:
        if spans and run.first_at <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], run.last_at))
        else:
            spans.append((run.first_at, run.last_at))
    return spans
