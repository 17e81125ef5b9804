"""The brake on mass deletes: what all installations together may let go at one destination within a day.

Rules, a wrong clock, a catalog that was restored from an old copy, somebody else's service: whatever it was that marked
half of what a place holds, it is not swept until somebody has said that this is right. What a person named is theirs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from backupd.transfer.guards.holds_and_marks import Backup

DAY = timedelta(days=1)
_NAMED = 10
"""So many missing backups are told by name."""


@dataclass(frozen=True, slots=True)
class Brake:
    """``share``: the part (0 to 1) of what is there that may go within a day, besides as many as came within it.
    ``count``: so many may go in any case. ``objects``: so many objects may be collected in any case without anybody
    knowing why they are not named any more."""

    share: float = 0.5
    count: int = 10
    objects: int = 1000

    def holds(self, marked: Mapping[Backup, datetime], present: Collection[Backup]) -> bool:
        """Are more marked within some day than may be? ``marked``: those that the rules marked, and when."""
        return self.most(marked, present) > self.limit(len(present))

    def most(self, marked: Mapping[Backup, datetime], present: Collection[Backup]) -> int:
        """By how many more than came the backups of one day are marked: the worst day."""
        marks = sorted(marked.values())
        came = sorted(_taken(backup) for backup in present)
        return max((_within(marks, at) - _within(came, at) for at in marks), default=0)

    def limit(self, present: int) -> int:
        """How many more backups than came within a day may go in it, of ``present`` ones."""
        return max(self.count, int(self.share * present))

    def holds_objects(self, going: int, present: int) -> bool:
        """Are ``going`` objects, which nothing explains, too many of the ``present`` ones?"""
        return going > max(self.objects, int(self.share * present))


BRAKE = Brake()
RELEASED = Brake(1.0)
"""Somebody has said that all may go."""


def told_of_missing(place: str, missing: Collection[Backup]) -> str:
    """What to say where backups should be at ``place`` and are not, though nothing that was deleted here explains it:
    an unmounted file system looks like this."""
    names = [f"{name} of {server}" for server, name in sorted(missing)[:_NAMED]]
    names += [f"{len(missing) - _NAMED} more"] if len(missing) > _NAMED else []
    return (
        f"objects: no object is collected at destination {place}: the catalog expects {len(missing)} backups there "
        f"that have no manifest: {', '.join(names)}. Is a part of it not mounted, or a folder moved? `backupd "
        "verify` takes back what another destination has; `backupd backups delete ID` forgets what is gone"
    )


def told_of_headless(place: str, objects: int, trace: str) -> str:
    """What to say where not one manifest is there, but objects and other ``trace`` of backups."""
    return (
        f"{objects} objects at destination {place} stay: there is not one manifest, but {trace} is there, so "
        "backups were. Is a part of it not mounted, or a folder moved? The next backup there lets this go on"
    )


def _within(moments: list[datetime], end: datetime) -> int:
    """How many of the sorted ``moments`` lie in the day that ends at ``end``."""
    return bisect_right(moments, end) - bisect_right(moments, end - DAY)


def _taken(backup: Backup) -> datetime:
    """When it was begun, as its id says."""
    return datetime.strptime(backup[1][:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
