"""Is a stream quiet? Then its process rests: it looks at the archive, and reports to the catalog, a few times a minute
instead of each second. 40 idle servers would take a sixth of a core otherwise.

The first byte that comes, a lack of a destination, any trouble and any other state end that at once; what is copied
while it rests is archived as soon as ever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from backupd.binlog.acknowledgement import OFF
from backupd.binlog.archiver import Behind
from backupd.binlog.stream_status import StreamState, StreamStatus
from policies.policy import Policy

QUIET = 60.0
"""Seconds without a byte after which a stream is quiet."""
HEAVY_BYTES = 256 * 1024
"""Bytes a second, for so many seconds, that take a few per cent of a core: too much for a process that others share."""
HEAVY_SECONDS = 5.0
HEAVY_LASTS = 30.0
"""Seconds for which that is said afterwards: who reads it looks seldom."""
USUAL, STILL, HEAVY = "usual", "still", "heavy"
"""How much comes, in words of one length: they take each other's place in a file that others read."""
SELDOM = 30.0
"""Seconds between two looks then, at most."""
_LOOKS = 6
"""In the time that an objective allows: what is confirmed may be two looks old."""


def seldom(policy: Policy) -> float:
    """Seconds between two looks at a stream that is quiet; 0: one that acknowledges commits never is."""
    if policy.binlog is not None and policy.binlog.acknowledge != OFF:
        return 0.0
    rpo = policy.objectives.rpo
    return SELDOM if rpo is None else min(SELDOM, rpo.total_seconds() / _LOOKS)


class Rest:
    """``every``: seconds between two looks while it is quiet."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._last: tuple[StreamState, str, str, int, str] | None = None
        self._since = self._looked = time.monotonic()

    def is_due(self, status: StreamStatus, behind: Mapping[str, Behind], troubles: Mapping[str, str]) -> bool:
        """Is it time to look? ``behind``, ``troubles``: as of the last look."""
        now = time.monotonic()
        found = (status.state, status.branch, status.file, status.pos, status.error)
        if (
            found != self._last
            or troubles
            or status.state is not StreamState.STREAMING
            or any(one.bytes for one in behind.values())
        ):
            self._last, self._since = found, now
        rests = now - self._since >= QUIET and now - self._looked < self._every
        if not rests:
            self._looked = now
        return not rests


class Activity:
    """How much comes of a binary log: the service goes by that where streams share a process."""

    def __init__(self) -> None:
        self._at: tuple[str, str, int] | None = None
        self._came = self._since = time.monotonic()
        self._from = 0
        self._heavy_until = 0.0

    def look(self, status: StreamStatus) -> str:
        """STILL: nothing for ``QUIET``; HEAVY: as of ``HEAVY_BYTES``; USUAL: anything else."""
        now, at = time.monotonic(), (status.branch, status.file, status.pos)
        if status.state is not StreamState.STREAMING:
            self._at, self._came = None, now
            return USUAL
        before, self._at = self._at, at
        if before is None or before[:2] != at[:2]:
            self._since, self._from = now, 0 if before is not None else at[2]
        if before != at:
            self._came = now
        passed = now - self._since
        if at[2] - self._from > HEAVY_BYTES * max(passed, HEAVY_SECONDS):
            self._heavy_until = now + HEAVY_LASTS
        if passed >= HEAVY_SECONDS:
            self._since, self._from = now, at[2]
        return STILL if now - self._came >= QUIET else HEAVY if now < self._heavy_until else USUAL
