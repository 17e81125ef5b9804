"""What the decisions look at, one server's backups and binary logs at one destination, and what they say of each:
whether it stays, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from backupd.model.backup_record import BackupKind
from backupd.model.binlog import Branch
from backupd.model.text import format_time


@dataclass(frozen=True, slots=True)
class LogPlace:
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
class Stored:
    """One backup's copy at the destination.

    ``usable``: as far as is known everything of this copy is there and sound; what it builds on is not asked.
    ``marked``: marked deleted here, so no longer offered. ``proved_at``: when a test restore of it last found it equal
    to its witness, ``restored_at``: when one last found nothing wrong, with or without a witness; None when none did or
    a later one found it bad. ``bytes``: stored by it, shared objects included. ``place``: the
    binary log that it goes on from; None where that is not certain. ``table_set``: of a logical backup; ``missing``:
    how many tables of it could not be dumped, or of a physical one: are not in it. ``doubtful``: a restore of it is not
    expected to work. ``minimum``: of its storage class, None where there is none. ``lineage``:
    the uuid of a server that is not ours but has its name, "" for ours; ``strange``: this installation never backed it
    up.
    """

    id: str
    kind: BackupKind
    parent: str | None
    started_at: datetime
    finished_at: datetime
    usable: bool = True
    marked: bool = False
    pinned: bool = False
    proved_at: datetime | None = None
    restored_at: datetime | None = None
    bytes: int = 0
    place: LogPlace | None = None
    table_set: str = ""
    missing: int = 0
    minimum: Minimum | None = None
    lineage: str = ""
    strange: bool = False
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class BinlogRun:
    """Binary logs without a gap: every moment from ``first_at`` to ``last_at`` can be replayed onto an earlier backup
    that lies between the two. ``branch`` with its files ``first`` to ``last``; empty where only times are known.
    """

    name: str
    first_at: datetime
    last_at: datetime
    bytes: int = 0
    branch: str = ""
    first: int = 0
    last: int = 0

    @property
    def place(self) -> LogPlace | None:
        """Its branch and where it begins."""
        return LogPlace(self.branch, self.first) if self.branch else None


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
    "bytes are what these backups name; objects that others share stay, so what becomes free is less, and "
    "is known only once they are swept"
)


class Ground(NamedTuple):
    """Why a backup stays. ``rule`` is a stable word: a rule of the policy, ``pinned``, ``parent``, ``read``,
    ``building``, ``newest``, ``proved``, ``remains``, ``future``, ``foreign``, ``awaited``, ``hold``, ``minimum`` or
    ``everything``."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Decision:
    """``grounds`` is empty for a backup that goes; ``reasons`` are for people in either case."""

    backup: Stored
    grounds: tuple[Ground, ...]
    explain: Callable[[Stored], tuple[str, ...]] = field(compare=False, repr=False)

    @property
    def keep(self) -> bool:
        """Does the backup stay?"""
        return bool(self.grounds)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every rule that keeps it; or, for one that goes, of every rule why it does not. Made when asked for."""
        return tuple(ground.text for ground in self.grounds) or self.explain(self.backup)

    def as_json(self) -> dict[str, Any]:
        """As the REST interface and ``--json`` give it."""
        backup = self.backup
        return {
            "id": backup.id,
            "kind": str(backup.kind),
            "parent": backup.parent,
            "finished_at": format_time(backup.finished_at),
            "bytes": backup.bytes,
            "marked": backup.marked,
            "keep": self.keep,
            "rules": [ground.rule for ground in self.grounds],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True)
class RunDecision:
    """Of a run of binary logs whether it stays, and why."""

    run: BinlogRun
    keep: bool
    reason: str

    def as_json(self) -> dict[str, Any]:
        """As the REST interface and ``--json`` give it."""
        return {
            "name": self.run.name,
            "from": format_time(self.run.first_at),
            "to": format_time(self.run.last_at),
            "bytes": self.run.bytes,
            "keep": self.keep,
            "reasons": [self.reason],
        }


@dataclass(frozen=True, slots=True)
class Recoverable:
    """Every moment from ``since`` to ``until`` can be restored, beginning with ``base``; one moment where both are
    the same."""

    since: datetime
    until: datetime
    base: str

    def as_json(self) -> dict[str, Any]:
        """As the REST interface and ``--json`` give it."""
        return {"from": format_time(self.since), "to": format_time(self.until), "base": self.base}


@dataclass(frozen=True, slots=True)
class Decisions:
    """For one server at one destination, backups newest first.

    ``stopped``: ids that the rules would expire and that only a hold, or being the newest proved chain, keeps.
    ``recoverable``: what the kept ones allow, within the recovery window where there is one.
    """

    server: str
    destination: str
    at: datetime
    backups: tuple[Decision, ...]
    runs: tuple[RunDecision, ...] = ()
    recoverable: tuple[Recoverable, ...] = ()
    stopped: tuple[str, ...] = ()
    hold: str = ""
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
    def bytes_expired(self) -> int:
        """Bytes that go with the backups that do not stay."""
        return sum(decision.backup.bytes for decision in self.expired)

    def as_json(self) -> dict[str, Any]:
        """As the REST interface and ``--json`` give it."""
        return {
            "server": self.server,
            "destination": self.destination,
            "at": format_time(self.at),
            "hold": self.hold or None,
            "keep": len(self.kept),
            "expire": len(self.expired),
            "bytes_expire": self.bytes_expired,
            "note": BYTES_NOTE,
            "backups": [decision.as_json() for decision in self.backups],
            "binlogs": [run.as_json() for run in self.runs],
            "recoverable": [span.as_json() for span in self.recoverable],
            "stopped": list(self.stopped),
            "warnings": list(self.warnings),
        }
