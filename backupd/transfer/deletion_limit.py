"""The mass-deletion limit: how much may be deleted at one destination without a person's word. Pure.

Rules, a wrong clock, a catalog that was restored from an old copy, somebody else's service: whatever marked half of
what a destination holds, the backups are not swept until a person has confirmed it. What a person named is exempt.

There are two measures: ``DeletionLimit``, for all servers and installations together within a day, is asked before
rules mark and again before a sweep removes; ``is_most`` is about the rules of one server, and asked before they mark.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from backupd.transfer.holds_and_locks import Backup

DAY = timedelta(days=1)
FEW = 3
"""This many backups of one server may always expire at once."""
_NAMED = 10
"""Missing backups that are listed by name, at most."""


@dataclass(frozen=True, slots=True)
class DeletionLimit:
    """``share``: the part (0 to 1) of the backups at a destination that may go within a day, besides as many as came
    within that day. ``count``: this many may always go. ``objects``: this many objects may always be collected though
    nothing explains why no backup names them any more."""

    share: float = 0.5
    count: int = 10
    objects: int = 1000

    def exceeded_by(self, marked: Mapping[Backup, datetime], present: Collection[Backup]) -> bool:
        """Are more backups marked within some day than may be? ``marked``: those that no person confirmed, and since
        when; ``present``: all that are there."""
        return self.worst_day(marked, present) > self.limit(len(present))

    def worst_day(self, marked: Mapping[Backup, datetime], present: Collection[Backup]) -> int:
        """On the worst day: how many more backups were marked within 24 hours than were taken within them."""
        marks = sorted(marked.values())
        came = sorted(_taken(backup) for backup in present)
        return max((_within(marks, at) - _within(came, at) for at in marks), default=0)

    def limit(self, present: int) -> int:
        """How many of ``present`` backups may go within a day."""
        return max(self.count, int(self.share * present))

    def objects_exceeded_by(self, going: int, present: int) -> bool:
        """Are ``going`` of ``present`` objects, which nothing explains, too many to be collected within a day?"""
        return going > max(self.objects, int(self.share * present))


LIMIT = DeletionLimit()
"""Where nobody has set another one."""


def is_most(going: int, present: int, *, backups: int) -> bool:
    """Do the rules of one server let go of too much at once? More than half, ``going`` of ``present`` (backups, or
    bytes of binary logs), is too much where it concerns more ``backups`` than FEW."""
    return backups > FEW and 2 * going > present


def missing_backups_text(destination: str, missing: Collection[Backup], count: int) -> str:
    """What to say where ``count`` backups, some of them ``missing``, should be at ``destination`` and are not, though
    nothing that was deleted here explains it: an unmounted file system looks like this."""
    names = [f"{name} of {server}" for server, name in sorted(missing)[:_NAMED]]
    names += [f"{count - len(names)} more"] if count > len(names) else []
    return (
        f"objects: no object is collected at destination {destination}: the catalog expects {count} backups there "
        f"that have no manifest: {', '.join(names)}. Check that all of it is mounted and no folder was moved. `backupd "
        "verify` restores what another destination has; `backupd backups delete ID` removes a lost backup from the "
        "catalog"
    )


def no_manifest_text(destination: str, objects: int, trace: str) -> str:
    """What to say where not one manifest is there, but objects and other ``trace`` of backups."""
    return (
        f"{objects} objects at destination {destination} are kept: it has no manifest, but {trace} shows that it held "
        "backups. Check its mounts and folders; removal resumes after the next backup there"
    )


def _within(moments: list[datetime], end: datetime) -> int:
    """How many of the sorted ``moments`` are in the day that ends at ``end``."""
    return bisect_right(moments, end) - bisect_right(moments, end - DAY)


def _taken(backup: Backup) -> datetime:
    """When it was begun, as its id says."""
    return datetime.strptime(backup[1][:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
