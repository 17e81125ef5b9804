"""What the solver looks at: one server's backups and binary logs at one destination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from backupd.model.backup.record import BackupKind
from backupd.model.clock import format_time
from backupd.model.server.logs import Branch


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
