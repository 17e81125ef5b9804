"""What retention decides on, one server's backups and binary logs at one destination, and the rules of a policy.

The decisions say of each backup and log whether it stays, and why. Each rule is applied to the backups that count: it
says which it keeps and, of any other, why it does not. Hours, days, weeks, months and years are those of the policy's
time zone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from typing import NamedTuple, Protocol

from backupd.model.backup_record import BackupKind
from backupd.model.binlog import Branch
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.text import format_duration, format_time
from policies.policy import Keep


@dataclass(frozen=True, slots=True)
class LogPosition:
    """File ``number`` of a branch of the server's history."""

    branch: str
    number: int


@dataclass(frozen=True, slots=True)
class Minimum:
    """A storage class is paid for until then, whether the copy is there or not. ``per_day``: what each day of that
    costs at most, in ``currency``; None where nobody knows."""

    storage_class: str
    until: datetime
    per_day: float | None = None
    currency: str = ""

    def words(self, now: datetime) -> str:
        """What deleting it now would cost."""
        days = (self.until - now) / timedelta(days=1)
        cost = "" if self.per_day is None else f", at most {days * self.per_day:.2f} {self.currency}"
        return (
            f"deleting it now costs {max(1, round(days))} days of minimum storage ({self.storage_class} is paid "
            f"for until {format_time(self.until)}{cost})"
        )


@dataclass(frozen=True, slots=True)
class Stored(Document):
    """One backup's copy at the destination.

    ``usable``: as far as is known everything of this copy is there and sound; what it builds on is not asked.
    ``marked``: marked deleted here, so no longer offered. ``proved_at``: when a test restore of it last found it equal
    to its witness, ``restored_at``: when one last found nothing wrong, with or without a witness; None when none did or
    a later one found it bad. ``bytes``: stored by it, shared objects included. ``log_position``: the
    binary log that it goes on from; None where that is not certain. ``table_set``: of a logical backup; ``missing``:
    how many tables of it could not be dumped, or of a physical one: are not in it. ``doubtful``: a restore of it is not
    expected to work. ``minimum``: of its storage class, None where there is none. ``lineage``:
    the uuid of a server that is not ours but has its name, "" for ours; ``strange``: this installation never backed it
    up.
    """

    id: str
    kind: BackupKind
    parent: str | None
    started_at: datetime = field(metadata=HIDDEN)
    finished_at: datetime
    usable: bool = field(default=True, metadata=HIDDEN)
    marked: bool = False
    """It is marked as deleted already."""
    pinned: bool = field(default=False, metadata=HIDDEN)
    proved_at: datetime | None = field(default=None, metadata=HIDDEN)
    restored_at: datetime | None = field(default=None, metadata=HIDDEN)
    bytes: int = field(default=0, metadata=json_key(after="finished_at"))
    log_position: LogPosition | None = field(default=None, metadata=HIDDEN)
    table_set: str = field(default="", metadata=HIDDEN)
    missing: int = field(default=0, metadata=HIDDEN)
    minimum: Minimum | None = field(default=None, metadata=HIDDEN)
    lineage: str = field(default="", metadata=HIDDEN)
    strange: bool = field(default=False, metadata=HIDDEN)
    doubtful: bool = field(default=False, metadata=HIDDEN)


@dataclass(frozen=True, slots=True)
class BinlogRun(Document):
    """Binary logs without a gap: every moment from ``first_at`` to ``last_at`` can be replayed onto an earlier backup
    between the two. ``branch`` with its files ``first`` to ``last``; empty where only times are known.
    """

    name: str
    first_at: datetime = field(metadata=json_key("from"))
    last_at: datetime = field(metadata=json_key("to"))
    bytes: int = 0
    branch: str = field(default="", metadata=HIDDEN)
    first: int = field(default=0, metadata=HIDDEN)
    last: int = field(default=0, metadata=HIDDEN)

    @property
    def log_position(self) -> LogPosition | None:
        """Its branch and where it begins."""
        return LogPosition(self.branch, self.first) if self.branch else None


@dataclass(frozen=True, slots=True)
class View:
    """``being_read``: ids that running restores read here; ``built_on``: ids that running backups build on.
    ``hold``: why nothing of the server may be deleted, empty when it may. ``unconfigured``: why there are no rules.
    ``branches``: of the server's history, oldest first. ``logs_minimum``: the storage class of binary logs here, and
    for how long it has to be paid for; None without one. ``awaited``: ids of what another destination has yet to get
    from here, with the reason in words.
    """

    server: str
    destination: str
    backups: tuple[Stored, ...]
    runs: tuple[BinlogRun, ...] = ()
    being_read: frozenset[str] = frozenset()
    built_on: frozenset[str] = frozenset()
    hold: str = ""
    unconfigured: str = ""
    branches: tuple[Branch, ...] = ()
    logs_minimum: tuple[str, timedelta] | None = None
    awaited: Mapping[str, str] = field(default_factory=dict)


BYTES_NOTE = (
    "the bytes count every object of these backups; objects shared with other backups stay, so less space is freed: "
    "the sweep reports how much"
)


class Ground(NamedTuple):
    """Why a backup stays. ``rule`` is a stable word: a rule of the policy, ``pinned``, ``parent``, ``read``,
    ``building``, ``newest``, ``proved``, ``remains``, ``future``, ``foreign``, ``awaited``, ``hold``, ``minimum`` or
    ``everything``."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Decision(Document):
    """``grounds`` is empty for a backup that goes; ``reasons`` are for people in either case."""

    backup: Stored = field(metadata=json_key(inline=True))
    grounds: tuple[Ground, ...] = field(metadata=HIDDEN)
    explain: Callable[[Stored], tuple[str, ...]] = field(compare=False, repr=False, metadata=HIDDEN)

    @property
    @computed()
    def keep(self) -> bool:
        """Does the backup stay?"""
        return bool(self.grounds)

    @property
    @computed()
    def rules(self) -> tuple[str, ...]:
        """The stable words of what keeps it."""
        return tuple(ground.rule for ground in self.grounds)

    @property
    @computed()
    def reasons(self) -> tuple[str, ...]:
        """Every rule that keeps it; or, for one that goes, of every rule why it does not."""
        return tuple(ground.text for ground in self.grounds) or self.explain(self.backup)


@dataclass(frozen=True, slots=True)
class RunDecision(Document):
    """Of a run of binary logs whether it stays, and why."""

    run: BinlogRun = field(metadata=json_key(inline=True))
    keep: bool
    reason: str = field(metadata=HIDDEN)

    @property
    @computed()
    def reasons(self) -> tuple[str, ...]:
        """Why it stays or goes."""
        return (self.reason,)


@dataclass(frozen=True, slots=True)
class Recoverable(Document):
    """Every moment from ``since`` to ``until`` can be restored, beginning with ``base``; one moment where both are
    the same."""

    since: datetime = field(metadata=json_key("from"))
    until: datetime = field(metadata=json_key("to"))
    base: str


@dataclass(frozen=True, slots=True)
class Decisions(Document):
    """For one server at one destination, backups newest first.

    ``stopped``: ids that the rules would expire and that only a hold, or being the newest proved chain, keeps.
    ``recoverable``: what the kept ones allow, within the recovery window where there is one.
    """

    server: str
    destination: str
    at: datetime
    backups: tuple[Decision, ...]
    runs: tuple[RunDecision, ...] = field(default=(), metadata=json_key("binlogs"))
    recoverable: tuple[Recoverable, ...] = ()
    stopped: tuple[str, ...] = ()
    """Backups that only a hold, or being the newest proved chain, keeps."""
    hold: str = field(default="", metadata=json_key(or_null=True, after="at"))
    """Why nothing of it is deleted now, whatever the rules say."""
    warnings: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[Decision, ...]:
        """Of the backups that stay."""
        return tuple(decision for decision in self.backups if decision.keep)

    @property
    def expired(self) -> tuple[Decision, ...]:
        """Those to be marked now: those that carry a mark already are left out."""
        return tuple(decision for decision in self.backups if not decision.keep and not decision.backup.marked)

    @property
    @computed("keep", after="hold")
    def count_kept(self) -> int:
        """How many backups stay."""
        return len(self.kept)

    @property
    @computed("expire", after="keep")
    def count_expired(self) -> int:
        """How many backups are to be marked."""
        return len(self.expired)

    @property
    @computed("bytes_expire", after="expire")
    def bytes_expired(self) -> int:
        """Bytes that go with the backups that do not stay."""
        return sum(decision.backup.bytes for decision in self.expired)

    @property
    @computed(after="bytes_expire")
    def note(self) -> str:
        """What the bytes are."""
        return BYTES_NOTE


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


def bucket(period: Period, local: datetime) -> str:
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
"""Backups that count, newest first, those of each leg separately: a dump never counts as a physical backup, nor
for a dump of other tables. Where tables are missing in some, the others are a family, too: a dump without a table never
counts as one with it."""


class Rule(Protocol):
    """``kept``: of each backup it keeps, the reason. ``denied``: why another one is not among them."""

    name: str
    kept: dict[str, str]

    def denied(self, backup: Stored) -> str: ...


def family(backup: Stored) -> str:
    """The leg it belongs to, of its own server: where two servers have one name, neither's backups count as the
    other's, and what nobody here took counts as nothing."""
    leg = f"logical/{backup.table_set}" if backup.kind is BackupKind.LOGICAL else "physical"
    if backup.lineage:
        return f"{leg} of {backup.lineage}"
    return f"{leg} not taken by this installation" if backup.strange else leg


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
                before, label = label, bucket(period, local.of(backup))
                if label == before:
                    continue
                number += 1
                if number > count:
                    break
                self.kept[backup.id] = f"{self.name}: the last one of {label} ({number} of {count})"
                self._last.setdefault((family(backup), label), backup.id)

    def denied(self, backup: Stored) -> str:
        label = bucket(self._period, self._local.of(backup))
        last = self._last.get((family(backup), label))
        if last is not None:
            return f"{self.name} {self._count}: {last} is the last one of {label}"
        newest = f"the newest {self._count} {UNITS[self._period]}s"
        return f"{self.name} {self._count}: {newest} that have a backup are all later than {label}"
