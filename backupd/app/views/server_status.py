"""What is shown of one server at a glance, from what the catalog holds. Reads no destination.

Values, which ``backupd.app.views.overview`` makes of what is kept of each server (``backupd.app.views.standings``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from backupd.model.acknowledged import Acknowledged
from backupd.model.backup_record import BackupKind, Hold
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.event import Incident
from backupd.model.job import JobKind, JobRecord, LastJob
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
class Reason(Document):
    """Why a status is not ``good``: what is wrong in one sentence, and the next step."""

    status: Status
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class LastBackup(Document):
    """The newest one of its kind (and, of logical ones, of its set of tables) that is complete."""

    id: str
    kind: BackupKind
    table_set: str = field(metadata=json_key("set"))
    started_at: datetime
    finished_at: datetime
    bytes_source: int
    bytes_stored: int
    bytes_new: int
    tables_missing: int = 0

    @property
    @computed(after="finished_at", digits=3)
    def seconds(self) -> float:
        """How long it took."""
        return (self.finished_at - self.started_at).total_seconds()


@dataclass(frozen=True, slots=True)
class NextRun(Document):
    """``at``: when the run starts, jitter and blackout applied."""

    leg: str
    kind: JobKind
    at: datetime


@dataclass(frozen=True, slots=True)
class LastProof(Document):
    """The newest test restore. ``proved_at``: when the data was last found good and as new as it was asked for, by it
    or by one before it; ``warnings`` and ``older`` as in ``Proof``."""

    id: str
    backup_id: str = field(metadata=json_key("backup"))
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


@dataclass(frozen=True, slots=True)
class StreamView(Document):
    """The continuous copy of the binary log, as its process reported last. ``state``: as `backupd binlog status` says
    it; ``spool_bytes`` wait on this host, ``spool_limit`` may."""

    state: str
    told_at: datetime | None = None
    spool_bytes: int = 0
    spool_limit: int = 0
    error: str = ""
    acknowledgement: Acknowledged | None = None
    """Null where no commit waits for it."""


@dataclass(frozen=True, slots=True)
class ServerOverview(Document):
    """Everything about one server that fits a line or a card."""

    name: str
    policy: str
    status: Status
    reasons: tuple[Reason, ...] = ()
    """Why it is not good, the worst first."""
    latest: datetime | None = None
    """The newest moment that can be restored; there may be gaps between it and ``first``, see the timeline."""
    tables_only: bool = False
    """Only dumps are taken of it: the moments are those of tables, and the server as a whole cannot be restored."""
    first: datetime | None = None
    """The oldest moment that can be restored."""
    rpo: timedelta | None = field(default=None, metadata=json_key("rpo_seconds", digits=3))
    """Seconds of commits that would be lost if the server failed now (current RPO)."""
    rpo_objective: timedelta | None = field(default=None, metadata=json_key("rpo_objective_seconds", digits=3))
    rto: timedelta | None = field(default=None, metadata=json_key("rto_seconds", digits=3))
    """How long a restore to the newest moment would take."""
    rto_objective: timedelta | None = field(default=None, metadata=json_key("rto_objective_seconds", digits=3))
    windows: int = 0
    gaps: int = 0
    """Holes in the binary logs."""
    gap_noticed_at: datetime | None = field(default=None, metadata=HIDDEN)
    reach: tuple[Reach, ...] = field(default=(), metadata=json_key("destinations"))
    """How far each destination alone goes."""
    stream: StreamView | None = None
    """Null where the policy asks for none."""
    last_backups: tuple[LastBackup, ...] = ()
    """By kind."""
    next_runs: tuple[NextRun, ...] = ()
    """One for each schedule, soonest first."""
    last_proof: LastProof | None = None
    running: tuple[JobRecord, ...] = ()
    waiting: int = field(default=0, metadata=json_key("jobs_waiting"))
    """Jobs that are queued or wait for somebody."""
    incidents: tuple[Incident, ...] = ()
    """Those that are open, newest first."""
    backups: int = 0
    """Complete ones."""
    protected: int = 0
    """Of those, backups with as many verified copies as the policy wants."""
    bytes_stored: int = 0
    """Of all backups."""
    held: Hold | None = None
    """Of this server, or of all."""
    paused: Hold | None = None
    absent_since: datetime | None = None
    """Since when a backup keeps it out of rotation."""
    looked_at: datetime | None = None
    """When all this was found out; null: not yet, and nothing is known of what can be recovered."""
    first_due: datetime | None = field(default=None, metadata=HIDDEN)
    """When its first backup starts, as long as none was due."""
    last_jobs: tuple[LastJob, ...] = field(default=(), metadata=HIDDEN)
    """By kind and schedule."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """As the configuration has them."""

    @property
    @computed(after="stream")
    def last_success(self) -> datetime | None:
        """When the newest complete backup of any kind ended."""
        return max((one.finished_at for one in self.last_backups), default=None)

    @property
    @computed(after="rpo_objective_seconds")
    def rpo_kept(self) -> bool | None:
        """Is objectives.rpo met now? Null where no objective is set, or the first backup is not due yet."""
        return Objectives(rpo=self.rpo_objective).rpo_kept(self.rpo, young=self.first_due is not None)

    @property
    @computed(after="rto_objective_seconds")
    def rto_kept(self) -> bool | None:
        """Is objectives.rto met now? Null where no objective is set or nothing is known."""
        return Objectives(rto=self.rto_objective).rto_kept(self.rto)
