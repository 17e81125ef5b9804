"""Backups that a time target must not begin from without a word: what they hold was partly stamped later than it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import Branch, Stop
from backupd.model.text import format_time
from backupd.recovery.runs import Place, place_of

LOOK_BACK = timedelta(hours=1)
"""Of log in front of a backup, in which later times than the target's are looked for."""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """The log in front of ``base``, which is of branch ``home``, carries times later than the target, as one does when
    the server's clock was set back; ``stop``: before the first of these transactions."""

    base: BackupRecord
    home: Branch
    stop: Stop

    def __str__(self) -> str:
        first = self.stop.next_gtid or f"{self.stop.file}:{self.stop.pos}"
        later = f" of {format_time(self.stop.next_at)}" if self.stop.next_at else ""
        return (
            f"before backup {self.base.id} the log holds transactions with times later than the target (the "
            f"server's clock was set back), from {first}{later} on"
        )


def overtaken(
    base: BackupRecord,
    home: Branch,
    moment: datetime,
    later_before: Callable[[str, Place, datetime, datetime], Stop | None],
) -> Overtaken | None:
    """``later_before``: of the resolver."""
    place = place_of(base.position)
    stop = later_before(home.id, place, moment, base.started_at - LOOK_BACK) if place is not None else None
    return Overtaken(base, home, stop) if stop is not None else None
