"""The rules of a policy, each applied to the backups that count: which it keeps and, of any other, why it does not.
Hours, days, weeks, months and years are those of the policy's time zone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from typing import Protocol

from backupd.model.backup_record import BackupKind
from backupd.model.text import format_duration, format_time
from backupd.retention.values import Stored
from policies.schema import Keep


class Period(StrEnum):
    """The rules that keep the last backup of each; the names are those of the policy."""

    HOURLY = "hourly"
    DAILY = "daily"
    WEEKLY = "weekly"
    MONTHLY = "monthly"
    YEARLY = "yearly"


UNITS = {
    Period.HOURLY: "hour",
    Period.DAILY: "day",
    Period.WEEKLY: "week",
    Period.MONTHLY: "month",
    Period.YEARLY: "year",
}
"""What one bucket of each is called."""


def bucket(period: Period, moment: datetime, zone: tzinfo) -> str:
    """The one ``moment`` (aware) falls into, as people write it: ``2026-11-21``, ``2026-W47``, ``2026-11``."""
    return bucket_of_local(period, moment.astimezone(zone))


def bucket_of_local(period: Period, local: datetime) -> str:
    """The same for a moment that is given in the zone already.

    Weeks are those of ISO 8601: they begin on Monday, and the first days of January may belong to the last week of the
    year before. An hour carries its distance from UTC, because the night in which clocks go back has one hour twice.
    """
    if period is Period.HOURLY:
        return f"{local.year:04}-{local.month:02}-{local.day:02} {local.hour:02}:00 {local:%z}"
    if period is Period.DAILY:
        return f"{local.year:04}-{local.month:02}-{local.day:02}"
    if period is Period.WEEKLY:
        year, week, _day = local.isocalendar()
        return f"{year:04}-W{week:02}"
    if period is Period.MONTHLY:
        return f"{local.year:04}-{local.month:02}"
    return f"{local.year:04}"


_EARLIEST = datetime.min.replace(tzinfo=UTC)

Families = Sequence[Sequence[Stored]]
"""Backups that count, newest first, those of each leg by themselves: a dump never stands in for a physical backup, nor
for a dump of other tables. Where tables are missing in some, the others are a family, too: a dump without a table never
stands in for one with it."""


class Rule(Protocol):
    """``kept``: of each backup it keeps, the reason. ``denied``: why another one is not among them."""

    name: str
    kept: dict[str, str]

    def denied(self, backup: Stored) -> str: ...


def family(backup: Stored) -> str:
    """The leg it belongs to, of its own server: where two servers have one name, neither stands in for the other, and
    what nobody here took stands in for nothing."""
    leg = f"logical/{backup.table_set}" if backup.kind is BackupKind.LOGICAL else "physical"
    if backup.lineage:
        return f"{leg} of {backup.lineage}"
    return f"{leg} that nobody here took" if backup.strange else leg


def families_of(backups: Sequence[Stored]) -> Families:
    """``backups`` newest first. None is empty; the physical backups, if any, come first."""
    found: dict[str, list[Stored]] = defaultdict(list)
    for backup in backups:
        found[family(backup)].append(backup)
    families = [found[name] for name in sorted(found, key=lambda name: (name != "physical", name))]
    whole = [[backup for backup in one if not backup.missing] for one in families]
    return (*families, *(less for one, less in zip(families, whole, strict=True) if 0 < len(less) < len(one)))


def rules_of(keep: Keep, families: Families, *, now: datetime, zone: tzinfo) -> tuple[Rule, ...]:
    """Every rule that ``keep`` sets."""
    found: list[Rule] = []
    if keep.recovery_window is not None:
        found.append(Window(families, keep.recovery_window, now))
    if keep.keep_fulls is not None:
        found.append(Fulls(families, keep.keep_fulls))
    local = Local(zone)
    for period in Period:
        count = getattr(keep, period.value)
        if count is not None:
            found.append(Buckets(families, period, count, local))
    return tuple(found)


class Local:
    """When each backup ended by the clocks of a zone; each is computed once."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._known: dict[str, datetime] = {}

    def of(self, backup: Stored) -> datetime:
        """When the backup ended, by the clock of the policy's time zone."""
        known = self._known.get(backup.id)
        if known is None:
            known = self._known[backup.id] = backup.finished_at.astimezone(self._zone)
        return known


class Window:
    """Keeps what ended inside the window, and of each leg the newest from before it: the first moments need that one.

    ``start`` is where the window begins; ``bases`` the backups that the kept ones of each leg begin with.
    """

    def __init__(self, families: Families, window: timedelta, now: datetime) -> None:
        self.length = format_duration(window.total_seconds())
        self.name = "recovery_window"
        self.start = now - min(window, now - _EARLIEST)
        self.kept: dict[str, str] = {}
        self.bases: list[Stored] = []
        inside = f"{self.name} {self.length}: it ended within the window"
        for backups in families:
            for backup in backups:
                if backup.finished_at <= self.start:
                    self.kept[backup.id] = (
                        f"{self.name} {self.length}: it is the newest from before the window, so "
                        "the window's first moments need it"
                    )
                    self.bases.append(backup)
                    break
                self.kept[backup.id] = inside
            else:
                self.bases.append(backups[-1])

    def denied(self, backup: Stored) -> str:
        base = next(iter(base.id for base in self.bases if family(base) == family(backup)), "none")
        return (
            f"{self.name} {self.length}: it ended before the window, which begins at {format_time(self.start)}, "
            f"and {base} is the newest from before it"
        )


class Fulls:
    """Keeps the newest backups of each leg that build on nothing."""

    def __init__(self, families: Families, count: int) -> None:
        self.name = "keep_fulls"
        self.count = count
        self.kept: dict[str, str] = {}
        for backups in families:
            number = 0
            for backup in backups:
                if backup.kind is BackupKind.PHYSICAL_INCREMENTAL:
                    continue
                number += 1
                if number > count:
                    break
                self.kept[backup.id] = f"{self.name}: full backup {number} of the newest {count}"

    def denied(self, backup: Stored) -> str:
        if backup.kind is BackupKind.PHYSICAL_INCREMENTAL:
            return f"{self.name} {self.count}: it is not a full one"
        return f"{self.name} {self.count}: there are {self.count} newer full ones"


class Buckets:
    """Keeps the last backup of each of the newest periods that have one."""

    def __init__(self, families: Families, period: Period, count: int, local: Local) -> None:
        self.name = period.value
        self.kept: dict[str, str] = {}
        self._period, self._count, self._local = period, count, local
        self._last: dict[tuple[str, str], str] = {}
        for backups in families:
            number = 0
            label = ""
            for backup in backups:
                before, label = label, bucket_of_local(period, local.of(backup))
                if label == before:
                    continue
                number += 1
                if number > count:
                    break
                self.kept[backup.id] = f"{self.name}: the last one of {label} ({number} of {count})"
                self._last.setdefault((family(backup), label), backup.id)

    def denied(self, backup: Stored) -> str:
        label = bucket_of_local(self._period, self._local.of(backup))
        last = self._last.get((family(backup), label))
        if last is not None:
            return f"{self.name} {self._count}: {last} is the last one of {label}"
        newest = f"the newest {self._count} {UNITS[self._period]}s"
        return f"{self.name} {self._count}: {newest} that have a backup are all later than {label}"
