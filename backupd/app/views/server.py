"""What is shown of one server at a glance. Values; ``backupd.app.views.overview`` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from backupd.model.backup_record import BackupKind
from backupd.model.event import Incident
from backupd.model.hold import Hold
from backupd.model.job import JobKind, JobRecord
from backupd.model.proof import PROVED, RESTORED
from backupd.recovery.timeline import Objectives, Reach


class Status(StrEnum):
    """``good``: could be recovered as promised. ``warning``: it could, and somebody should look. ``bad``: it could not,
    or not as promised."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"

    @property
    def rank(self) -> int:
        """0 for good, 2 for bad: the worst has the highest."""
        return list(Status).index(self)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a status is not ``good``: what is wrong in one sentence, and the next step."""

    status: Status
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class LastBackup:
    """The newest one of its kind (and, of logical ones, of its set of tables) that is complete."""

    id: str
    kind: BackupKind
    table_set: str
    started_at: datetime
    finished_at: datetime
    bytes_source: int
    bytes_stored: int
    bytes_new: int
    tables_missing: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.finished_at - self.started_at).total_seconds()

    def age(self, now: datetime) -> timedelta:
        """Time since it ended, never negative."""
        return max(now - self.finished_at, timedelta())


@dataclass(frozen=True, slots=True)
class NextRun:
    """``at``: when the run starts, jitter and blackout applied."""

    leg: str
    kind: JobKind
    at: datetime


@dataclass(frozen=True, slots=True)
class LastProof:
    """The newest test restore. ``proved_at``: when the data was last found good and as new as it was asked for, by it
    or by one before it; ``warnings`` and ``older`` as in ``Proof``."""

    id: str
    backup_id: str
    outcome: str
    finished_at: datetime
    tables_compared: int
    error: str = ""
    proved_at: datetime | None = None
    warnings: tuple[str, ...] = ()
    older: bool = False

    @property
    def is_good(self) -> bool:
        """Was the data found good, and as new as it was asked for?"""
        return self.outcome in (PROVED, RESTORED) and not self.older

    def age(self, now: datetime) -> timedelta:
        """Time since it ended, never negative."""
        return max(now - self.finished_at, timedelta())


@dataclass(frozen=True, slots=True)
class StreamView:
    """The continuous copy of the binary log, as its process told last. ``state``: as `backupd binlog status` says it;
    ``spool_bytes`` wait on this host, ``spool_limit`` may."""

    state: str
    told_at: datetime | None = None
    spool_bytes: int = 0
    spool_limit: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ServerOverview:
    """Everything about one server that fits a line or a card.

    ``reasons``: the worst first, empty when ``status`` is good. ``latest`` and ``first``: the ends of what can be
    restored (with gaps between them, see the timeline), None for nothing. ``rpo``: what would be lost were the server
    lost now; ``rto``: how long a restore to ``latest`` would take, None where nothing tells. ``reach``: how far each
    destination alone goes. ``gaps``: holes in the binary logs. ``stream``: None where the policy asks for none.
    ``last_backups``: by kind. ``last_success``: when the newest of them ended. ``next_runs``: one for each schedule,
    soonest first. ``running``: jobs at work; ``waiting``: how many are queued or wait for somebody. ``incidents``: open
    ones, newest first. ``backups``: complete ones; ``protected``: of those, with as many verified copies as the policy
    wants; ``bytes_stored``: of all there are. ``held``, ``paused``: this server or all of them. ``absent_since``: when
    a backup took it out of rotation. ``looked_at``: how it stands was found out then; None: not yet, and nothing is
    known of what can be recovered. ``tables_only``: only dumps are taken of it, so ``latest``, ``first``, ``rpo`` and
    ``reach`` are of tables; the server as a whole cannot be restored. ``first_due``: when its first backup starts, as
    long as none was due.
    """

    name: str
    policy: str
    status: Status
    reasons: tuple[Reason, ...] = ()
    latest: datetime | None = None
    first: datetime | None = None
    rpo: timedelta | None = None
    rpo_objective: timedelta | None = None
    rto: timedelta | None = None
    rto_objective: timedelta | None = None
    windows: int = 0
    gaps: int = 0
    gap_noticed_at: datetime | None = None
    reach: tuple[Reach, ...] = ()
    stream: StreamView | None = None
    last_backups: tuple[LastBackup, ...] = ()
    next_runs: tuple[NextRun, ...] = ()
    last_proof: LastProof | None = None
    running: tuple[JobRecord, ...] = ()
    waiting: int = 0
    incidents: tuple[Incident, ...] = ()
    backups: int = 0
    protected: int = 0
    bytes_stored: int = 0
    held: Hold | None = None
    paused: Hold | None = None
    absent_since: datetime | None = None
    looked_at: datetime | None = None
    tables_only: bool = False
    first_due: datetime | None = None

    @property
    def last_success(self) -> datetime | None:
        """When the newest complete backup of any kind ended."""
        return max((one.finished_at for one in self.last_backups), default=None)

    @property
    def rpo_kept(self) -> bool | None:
        """Is objectives.rpo kept now? None where nothing is promised, or the first backup is not due yet."""
        return Objectives(rpo=self.rpo_objective).rpo_kept(self.rpo, young=self.first_due is not None)

    @property
    def rto_kept(self) -> bool | None:
        """Is objectives.rto kept now? None where nothing is promised or known."""
        return Objectives(rto=self.rto_objective).rto_kept(self.rto)
