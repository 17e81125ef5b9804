"""Work as the catalog remembers it: jobs of any kind, restores, which can be taken up again, and the progress of
both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from backupd.model.proof import Phase
from backupd.model.text import format_time


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
    REPLICATE = "replicate"
    THAW = "thaw"
    RESTORE = "restore"
    REMOVAL = "removal"


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
class JobRecord:
    """One run of ``kind`` (see ``JobKind``) for a server.

    ``leg`` and ``due_at``: which schedule of the policy asked for it, and for when; empty and None when a person did
    (``requested_by``). ``not_before``: a repetition waits until then, and a waiting job is not looked at before.
    ``attempt`` counts from 1; ``previous`` is the job that this one repeats, or catches up. ``arguments``: of the kind,
    JSON. ``owner`` tells which process runs it, in words of the caller (host, boot, process, start); ``token`` grows
    with each owner, and only the newest may write.
    ``cancel_by``: who asked to stop it. ``progress``: the last report, JSON. ``result``: what it made (the id of a
    backup or proof). ``bytes`` of plaintext that were moved. ``message``, ``detail`` and ``hint`` are those of the
    error, empty without one.
    """

    id: str
    kind: str
    server: str
    state: JobState
    queued_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    due_at: datetime | None = None
    not_before: datetime | None = None
    attempt: int = 1
    previous: str = ""
    leg: str = ""
    requested_by: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    owner: str = ""
    token: int = 0
    heartbeat_at: datetime | None = None
    cancel_by: str = ""
    progress: Mapping[str, Any] | None = None
    result: str = ""
    message: str = ""
    detail: str = ""
    hint: str = ""
    bytes: int = 0
    phases: tuple[Phase, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "server": self.server,
            "state": str(self.state),
            "queued_at": format_time(self.queued_at),
            "started_at": _time(self.started_at),
            "finished_at": _time(self.finished_at),
            "due_at": _time(self.due_at),
            "not_before": _time(self.not_before),
            "attempt": self.attempt,
            "previous": self.previous or None,
            "leg": self.leg,
            "requested_by": self.requested_by,
            "arguments": dict(self.arguments),
            "cancel_by": self.cancel_by,
            "progress": dict(self.progress) if self.progress else None,
            "result": self.result,
            "message": self.message,
            "detail": self.detail,
            "hint": self.hint,
            "bytes": self.bytes,
            "phases": [phase.as_json() for phase in self.phases],
        }


def _time(moment: datetime | None) -> str | None:
    return format_time(moment) if moment else None


@dataclass(frozen=True, slots=True)
class RestoreRecord:
    """One restore of ``backup_id`` to ``target`` into ``datadir`` (absolute path on the restoring host).

    ``phases`` are those that are over, in order: ``fetched``, ``prepared``, ``restored``, ``started``, ``verified``.
    ``error`` is the whole text of the last failure, empty without one. ``job_id``: the job that does it, or did so
    last. ``request``: what was asked for, where that was more than a folder (tables, options), JSON. One that waits for
    its job is ``queued``.
    """

    id: str
    server: str
    backup_id: str
    target: str
    datadir: str
    state: JobState
    started_at: datetime
    finished_at: datetime | None = None
    phases: tuple[Phase, ...] = ()
    error: str = ""
    owner: str = ""
    job_id: str = ""
    request: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "server": self.server,
            "backup": self.backup_id,
            "target": self.target,
            "datadir": self.datadir,
            "state": str(self.state),
            "started_at": format_time(self.started_at),
            "finished_at": _time(self.finished_at),
            "phases": [phase.as_json() for phase in self.phases],
            "error": self.error,
            "job": self.job_id or None,
            "request": dict(self.request) if self.request else None,
        }


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
