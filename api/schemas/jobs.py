"""Jobs: work that goes on, or is over.

What is not as it should be, and the messages that tell of it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Dated, Name, Query, Shape, Text, example, of
from backupd.model import event, proof
from backupd.model.event import MessageState, Severity
from backupd.model.job import JobKind, JobRecord, JobState

JOB: dict[str, Any] = {
    "id": "20261121T020000Z-7f3a9c01",
    "kind": "physical-full",
    "server": "shop-db1",
    "state": "running",
    "queued_at": "2026-11-21T02:00:00Z",
    "started_at": "2026-11-21T02:00:01.120000Z",
    "finished_at": None,
    "due_at": "2026-11-21T02:00:00Z",
    "not_before": None,
    "attempt": 1,
    "previous": None,
    "leg": "physical.full",
    "requested_by": "",
    "arguments": {},
    "cancel_by": "",
    "progress": {
        "phase": "copy",
        "bytes": 1073741824,
        "bytes_total": 2147483648,
        "files": 120,
        "files_total": None,
        "note": "",
        "seconds_left": 12.5,
    },
    "result": "",
    "message": "",
    "detail": "",
    "hint": "",
    "bytes": 0,
    "phases": [],
}
QUEUED_JOB: dict[str, Any] = {
    **JOB,
    "state": "queued",
    "started_at": None,
    "due_at": None,
    "leg": "",
    "requested_by": "anna",
    "progress": None,
}


@of(proof.Phase)
class Phase(Shape):
    """A step that is over."""

    seconds: float = Field(ge=0)
    bytes: int = Field(ge=0)


class Progress(Shape):
    """How far a job is; totals and the time that is left are null while nobody knows."""

    phase: str
    bytes: int = Field(ge=0)
    bytes_total: int | None
    files: int = Field(ge=0)
    files_total: int | None
    note: str
    seconds_left: float | None


@of(JobRecord)
class Job(Shape):
    """One run of something for a server (empty: of all)."""

    model_config = example(JOB)

    kind: JobKind
    attempt: int = Field(ge=1)
    progress: Progress | dict[str, Any] | None
    bytes: int = Field(ge=0)


class Accepted(Shape):
    """Long work was begun: follow it at the address in `Location`, or in `GET /v1/events?job=ID`."""

    model_config = example({"job": QUEUED_JOB})

    job: Job


class AcceptedJobs(Shape):
    """Several jobs were begun; `Location` is that of the first."""

    model_config = example({"jobs": [{**QUEUED_JOB, "kind": "replicate", "arguments": {"destination": "offsite"}}]})

    jobs: list[Job]


class JobLog(Shape):
    """What a job did and what its tools said."""

    model_config = example({"id": "20261121T020000Z-7f3a9c01", "log": "2026-11-21T02:00:01Z job-started ...\n"})

    id: str
    log: str


class LogQuery(Query):
    tail: int | None = Field(None, ge=1, le=100_000, description="Only so many last lines.")


class JobsQuery(Dated):
    server: Name | None = Field(None, description="Only those of this server.")
    kind: JobKind | None = Field(None, description="Only those of this kind.")
    state: JobState | None = Field(None, description="Only those in this state.")


class EventsQuery(Dated):
    server: Name | None = Field(None, description="Only what concerns this server.")
    job: Text | None = Field(None, max_length=64, description="Only what concerns this job.")
    kind: Text | None = Field(None, max_length=64, description="Only events of this kind.", examples=["job-failed"])
    severity: Severity | None = Field(None, description="Only those as grave as this.")


@of(event.Event)
class Event(Shape):
    """Something that happened that somebody should know."""

    model_config = example(
        {
            "number": 4711,
            "at": "2026-11-21T02:07:12Z",
            "kind": "job-failed",
            "severity": "error",
            "server": "shop-db1",
            "subject": "physical.full",
            "message": "mariadb-backup ended with 1",
            "detail": "Too many connections",
            "hint": "raise max_connections, then run it again",
            "job": "20261121T020000Z-7f3a9c01",
        }
    )

    severity: str = Field(pattern="^(info|warning|error)$")


_INCIDENT: dict[str, Any] = {
    "id": "20261121T020712Z-c0ffee01",
    "kind": "job-failed",
    "server": "shop-db1",
    "subject": "physical.full",
    "severity": "error",
    "message": "mariadb-backup ended with 1",
    "detail": "Too many connections",
    "hint": "raise max_connections, then run it again",
    "opened_at": "2026-11-21T02:07:12Z",
    "last_at": "2026-11-21T02:07:12Z",
    "count": 1,
    "closed_at": None,
    "job": "20261121T020000Z-7f3a9c01",
    "reminders": 0,
    "next_reminder": "2026-11-21T03:07:12Z",
    "acknowledged_by": None,
    "acknowledged_at": None,
}
_MESSAGE: dict[str, Any] = {
    "id": "20261121T020713Z-badc0de1",
    "channel": "email",
    "kind": "alert",
    "state": "sent",
    "subject": "[backupd] shop-db1: mariadb-backup ended with 1",
    "recipients": ["dba@example.com"],
    "incident": "20261121T020712Z-c0ffee01",
    "created_at": "2026-11-21T02:07:13Z",
    "attempts": 1,
    "next_try": None,
    "sent_at": "2026-11-21T02:07:14Z",
    "error": "",
}


@of(event.Incident)
class Incident(Shape):
    """Something that is, or was, not as it should be, with the next step."""

    model_config = example(_INCIDENT)

    severity: str = Field(pattern="^(info|warning|error)$")


class AlertsQuery(Dated):
    server: Name | None = Field(None, description="Only those of this server.")
    state: Literal["open", "closed", "all"] = Field("open", description="Which of them.")
    severity: Severity | None = Field(None, description="Only those as grave as this.")


class MessagesQuery(Dated):
    state: MessageState | None = Field(None, description="Only those in this state.")
    incident: Text | None = Field(None, max_length=64, description="Only those about this one.")


@of(event.Message)
class Message(Shape):
    """A message on its way."""

    model_config = example(_MESSAGE)
