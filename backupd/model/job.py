"""Work as the catalog remembers it: jobs of any kind, and restores, which can be taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from backupd.model.clock import format_time
from backupd.model.proof import Phase


class JobState(StrEnum):
    """``abandoned``: whoever ran it is gone without a word (killed, power cut)."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABANDONED = "abandoned"


JOB_MOVES: Mapping[JobState, frozenset[JobState]] = {
    JobState.RUNNING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.ABANDONED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.ABANDONED: frozenset(),
}
"""Where a job may go from each state. A repetition is a new job."""

RESTORE_MOVES: Mapping[JobState, frozenset[JobState]] = {
    **JOB_MOVES,
    JobState.FAILED: frozenset({JobState.RUNNING}),
    JobState.ABANDONED: frozenset({JobState.RUNNING}),
}
"""A restore keeps what it has fetched, so a failed or abandoned one may run again."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One run of ``kind`` (``backup``, ``test-restore``, ``verify`` ...) for a server.

    ``owner`` tells later which process ran it, in words of the caller (host, boot, process, start). ``bytes`` of
    plaintext that were moved. ``message``, ``detail`` and ``hint`` are those of the error, empty without one.
    """

    id: str
    kind: str
    server: str
    state: JobState
    started_at: datetime
    finished_at: datetime | None = None
    message: str = ""
    detail: str = ""
    hint: str = ""
    bytes: int = 0
    phases: tuple[Phase, ...] = ()
    owner: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "kind": self.kind, "server": self.server, "state": str(self.state),
                "started_at": format_time(self.started_at),
                "finished_at": format_time(self.finished_at) if self.finished_at else None,
                "message": self.message, "detail": self.detail, "hint": self.hint, "bytes": self.bytes,
                "phases": [phase.as_json() for phase in self.phases]}


@dataclass(frozen=True, slots=True)
class RestoreRecord:
    """One restore of ``backup_id`` to ``target`` into ``datadir`` (absolute path on the restoring host).

    ``phases`` are those that are over, in order: ``fetched``, ``prepared``, ``restored``, ``started``, ``verified``.
    ``error`` is the whole text of the last failure, empty without one.
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

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "server": self.server, "backup": self.backup_id, "target": self.target,
                "datadir": self.datadir, "state": str(self.state), "started_at": format_time(self.started_at),
                "finished_at": format_time(self.finished_at) if self.finished_at else None,
                "phases": [phase.as_json() for phase in self.phases], "error": self.error}
