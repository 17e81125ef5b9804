"""Which share of what is stored is read again in a run, so that all of it is within a time. Pure.

Everything stored belongs to one of ``SHARES`` shares, by its name. When each was last read stands in the catalog. A run
reads the oldest ones, as many as the time since the last run calls for; so after a run that was missed the next one
reads more, and a changed period or schedule loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.transfer.scrub import SHARES

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a run has to read. ``subset``: at least this part of everything (0 to 1), None where nobody said so;
    ``period``: whatever was not read for so long. With neither: everything."""

    subset: float | None = None
    period: timedelta | None = None

    @property
    def is_whole(self) -> bool:
        """Is everything read?"""
        return self.subset is None and self.period is None


WHOLE = Rotation()


def due(done: Mapping[int, datetime], rotation: Rotation, now: datetime) -> frozenset[int]:
    """The shares to read now. ``done``: when each was last read, without those that never were."""
    if rotation.is_whole:
        return frozenset(range(SHARES))
    read = {share: at for share, at in done.items() if 0 <= share < SHARES}
    # What was never read is as old as the rotation: it began with its first row.
    began = min(read.values(), default=now)
    order = sorted(range(SHARES), key=lambda share: (read.get(share, began - _DAY), share))
    count = 1
    if rotation.subset is not None:
        count = max(count, math.ceil(SHARES * rotation.subset - 1e-6))
    if rotation.period is not None:
        since = now - max(read.values()) if read else _DAY
        count = max(count, math.ceil(SHARES * (since / rotation.period) - 1e-6))
        # The next run will come about as late as this one: nothing may become too old until then.
        limit = now + max(since, min(_DAY, rotation.period)) - rotation.period
        count = max(count, sum(1 for share in range(SHARES) if read.get(share, began) <= limit and read))
    return frozenset(order[:count])


def read_since(done: Mapping[int, datetime]) -> datetime | None:
    """Since when everything was read again at least once; None while something never was."""
    if any(share not in done for share in range(SHARES)):
        return None
    return min(done[share] for share in range(SHARES))
