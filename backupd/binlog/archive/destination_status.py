"""How it goes at one destination: what it is at, what failed, and when it is tried again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.binlog.archive.shipper import Shipper

SLOW = 300.0
"""Seconds after which one work at a destination is told of as trouble."""
_LONGEST_PAUSE = 300
_PAUSE_FOR_READERS = timedelta(minutes=1)


@dataclass(slots=True)
class Standing:
    """How it goes at one destination."""

    shipper: Shipper
    _failures: int = 0
    _error: str = ""
    _not_before: datetime | None = None
    _no_drop_before: datetime | None = None

    def failed(self, error: str, now: datetime) -> None:
        self._failures += 1
        self._error = error
        self._not_before = now + timedelta(seconds=min(_LONGEST_PAUSE, 2 ** min(self._failures - 1, 20)))

    def went_well(self) -> None:
        self._failures, self._error, self._not_before = 0, "", None

    @property
    def busy_for(self) -> float:
        """Seconds; 0 when it has nothing to do."""
        since = self.shipper.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def may_start(self, now: datetime) -> bool:
        return self.shipper.busy_since is None and not _is_ahead(self._not_before, now)

    def drops_wait(self, now: datetime, *, waits: bool) -> None:
        """Pieces could not be removed while somebody reads; or they could."""
        self._no_drop_before = now + _PAUSE_FOR_READERS if waits else None

    def may_drop(self, now: datetime) -> bool:
        return not _is_ahead(self._no_drop_before, now)

    @property
    def trouble(self) -> str:
        """What is wrong there, in words; "" while all is well."""
        if not self._error and self.busy_for > SLOW:
            return f"it has been at one binary log for {self.busy_for:.0f} s"
        return self._error


def _is_ahead(moment: datetime | None, now: datetime) -> bool:
    """One that is too far ahead was set before the clock was put back: it does not count."""
    return moment is not None and now < moment <= now + timedelta(seconds=_LONGEST_PAUSE)
