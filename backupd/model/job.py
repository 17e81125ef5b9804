"""Work as the catalog remembers it: jobs of any kind, restores, which can be taken up again, and the progress of
both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from backupd.model.document import HIDDEN, Document, json_key
from backupd.model.proof import Phase

HOST = "host:"
"""What ``runs_on`` of a job for one host begins with; the name of the host follows."""


class JobKind(StrEnum):
    """What jobs do. The backups' names are those of ``BackupKind``."""

    FULL = "physical-full"
    INCREMENTAL = "physical-incremental"
    LOGICAL = "logical"
    TEST_RESTORE = "test-restore"
    RETENTION = "retention"
    VERIFY = "verify"
    CHALLENGE = "challenge"
    WITNESS = "witness"
    CONSISTENCY = "consistency"
    REPLICATE = "replicate"
    THAW = "thaw"
    RESTORE = "restore"
    REMOVAL = "removal"
    SWEEP = "sweep"


BACKUPS = (JobKind.FULL, JobKind.INCREMENTAL, JobKind.LOGICAL)


class JobState(StrEnum):
    """``waiting``: no process runs it and none is needed: somebody else (an archive that thaws) is asked now and then.
    ``abandoned``: whoever ran it is gone without a word (killed, power cut). ``missed``: its time passed while
    nobody was there to start it. ``skipped``: its time came and a rule (pause, blackout, the run before it) kept it
    from starting. ``partial``: what came of it is there and can be used, and something that belongs to it is missing.
    """

    QUEUED = "queued"
    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"
    MISSED = "missed"
    SKIPPED = "skipped"


JOB_MOVES: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.SKIPPED}),
    JobState.RUNNING: frozenset(
        {JobState.SUCCEEDED, JobState.PARTIAL, JobState.FAILED, JobState.CANCELLED, JobState.ABANDONED}
    ),
    JobState.WAITING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.PARTIAL: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
    JobState.ABANDONED: frozenset(),
    JobState.MISSED: frozenset(),
    JobState.SKIPPED: frozenset(),
}
"""Where a job may go from each state. A repetition is a new job that names this one as ``previous``."""

NOT_COUNTED = frozenset({JobState.CANCELLED, JobState.SKIPPED})
"""Ends that say nothing of whether a job of its kind works."""
FIRST_STATES = frozenset({JobState.QUEUED, JobState.WAITING, JobState.RUNNING, JobState.MISSED, JobState.SKIPPED})
"""States in which a job may enter the catalog; RUNNING when somebody runs it in the foreground."""

RESTORE_MOVES: Mapping[JobState, frozenset[JobState]] = {
    **JOB_MOVES,
    JobState.QUEUED: JOB_MOVES[JobState.QUEUED] | {JobState.FAILED, JobState.ABANDONED},
    JobState.FAILED: frozenset({JobState.QUEUED, JobState.RUNNING}),
    JobState.CANCELLED: frozenset({JobState.QUEUED, JobState.RUNNING}),
    JobState.ABANDONED: frozenset({JobState.QUEUED, JobState.RUNNING}),
}
"""A restore keeps what it has fetched, so one that failed, was cancelled or abandoned may run again, or wait for a job
that does so. One that waits ends with its job, however that ends."""


@dataclass(frozen=True, slots=True)
class JobRecord(Document):
    """One run of ``kind`` (see ``JobKind``) for a server; empty: of all."""

    id: str
    kind: str
    server: str
    state: JobState
    """``queued``, ``waiting`` and ``running`` are not over yet."""
    queued_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    due_at: datetime | None = None
    """The time of the schedule that it was started for."""
    not_before: datetime | None = None
    """A repetition waits until then, and a waiting job is not looked at before."""
    attempt: int = 1
    """From 1."""
    previous: str = field(default="", metadata=json_key(or_null=True))
    """The job that this one repeats, or catches up."""
    leg: str = ""
    """The schedule of the policy that asked for it; empty when a person did."""
    requested_by: str = ""
    """The person who asked for it."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of its kind."""
    runs_on: str = ""
    """Where it can run: ``host:NAME``; empty for one of before hosts had names, which runs anywhere."""
    owner: str = field(default="", metadata=HIDDEN)
    """Which process runs it, in words of the caller (host, boot, process, start)."""
    token: int = field(default=0, metadata=HIDDEN)
    """Grows with each owner, and only the newest may write."""
    heartbeat_at: datetime | None = field(default=None, metadata=HIDDEN)
    cancel_by: str = ""
    """Who asked to stop it."""
    progress: Mapping[str, Any] | None = field(default=None, metadata=json_key(or_null=True))
    """The last report."""
    result: str = ""
    """Id of what it made: a backup, a proof, a restore."""
    message: str = ""
    """What went wrong, or what it waits for; empty without an error, as are ``detail`` and ``hint``."""
    detail: str = ""
    hint: str = ""
    bytes: int = 0
    """Bytes of plaintext that were moved, before compression."""
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """Queued jobs that need not be looked at: those that fit all that is given. ``kinds``: of these; ``but``: of all
    but these; ``servers``: of these; ``scheduled``: that a schedule asked for; ``destinations``: that name one of
    these."""

    kinds: Collection[str] | None = None
    but: Collection[str] | None = None
    servers: Collection[str] | None = None
    scheduled: bool = False
    destinations: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class RestoreRecord(Document):
    """One restore of ``backup_id`` to ``target`` into ``datadir`` (absolute path on the restoring host).

    ``phases`` are those that are over, in order: ``fetched``, ``prepared``, ``restored``, ``started``, ``verified``.
    ``error`` is the whole text of the last failure, empty without one. ``job_id``: the job that does it, or did so
    last. ``request``: what was asked for, where that was more than a folder (tables, options), JSON. One that waits for
    its job is ``queued``.
    """

    id: str
    server: str
    backup_id: str = field(metadata=json_key("backup"))
    target: str
    datadir: str
    state: JobState
    started_at: datetime
    finished_at: datetime | None = None
    phases: tuple[Phase, ...] = ()
    error: str = ""
    owner: str = field(default="", metadata=HIDDEN)
    job_id: str = field(default="", metadata=json_key("job", or_null=True))
    request: Mapping[str, Any] | None = field(default=None, metadata=json_key(or_null=True))


@dataclass(frozen=True, slots=True)
class LastJob:
    """The last one that ended of its server, kind and leg. ``succeeded_at``: when one of them last did what it
    should."""

    id: str
    server: str
    kind: str
    leg: str
    state: JobState
    finished_at: datetime | None
    message: str
    hint: str
    succeeded_at: datetime | None


@dataclass(frozen=True, slots=True)
class Progress:
    """One report. ``phase`` names the step (``copy``, ``fetch``, ``prepare`` ...); totals are None while unknown.

    ``waits``: for something that takes its time, and at which whoever reports goes on looking. Then a report is a sign
    of life even where it says the same as the one before.
    """

    phase: str
    bytes_done: int = 0
    bytes_total: int | None = None
    files_done: int = 0
    files_total: int | None = None
    note: str = ""
    waits: bool = False


Report = Callable[[Progress], None]
"""Called from any thread, often; must be cheap and must not raise."""


def silent(_progress: Progress) -> None:
    """A Report that drops everything."""


Key = tuple[str, str]
"""Server and leg."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A leg since ``since``; every due time up to ``handled`` has its row among the jobs.

    ``cadence`` is what was followed, in words of the caller; empty while the leg is in no configuration: then nothing
    after ``handled`` has a row yet.
    """

    server: str
    leg: str
    cadence: str
    since: datetime
    handled: datetime

    @property
    def key(self) -> Key:
        """What identifies it."""
        return self.server, self.leg
