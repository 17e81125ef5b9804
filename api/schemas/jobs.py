"""Jobs: work that goes on, or is over.

What is not as it should be, and the messages that tell of it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Dated, Name, Query, Shape, Text, Time, example
from backupd.model.event import MessageKind, MessageState, Severity
from backupd.model.job import JobKind, JobState

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


class Phase(Shape):
    """A step that is over."""

    name: str
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


class Job(Shape):
    """One run of something for a server (empty: of all)."""

    model_config = example(JOB)

    id: str
    kind: JobKind
    server: str
    state: JobState = Field(description="`queued`, `waiting` and `running` are not over yet.")
    queued_at: Time
    started_at: Time | None
    finished_at: Time | None
    due_at: Time | None = Field(description="The time of the schedule that it was started for.")
    not_before: Time | None = Field(description="A repetition waits until then.")
    attempt: int = Field(ge=1)
    previous: str | None = Field(description="The job that this one repeats.")
    leg: str = Field(description="Part of the policy that asked for it; empty when a person did.")
    requested_by: str
    arguments: dict[str, Any]
    cancel_by: str = Field(description="Who asked to stop it.")
    progress: Progress | dict[str, Any] | None
    result: str = Field(description="Id of what it made: a backup, a proof, a restore.")
    message: str = Field(description="What went wrong, or what it waits for.")
    detail: str
    hint: str
    bytes: int = Field(ge=0, description="Moved, before compression.")
    phases: list[Phase]


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

    number: int = Field(description="Its place among all; `Last-Event-ID` goes on after it.")
    at: Time
    kind: str
    severity: str = Field(pattern="^(info|warning|error)$")
    server: str
    subject: str
    message: str
    detail: str
    hint: str
    job: str


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


class Incident(Shape):
    """Something that is, or was, not as it should be, with the next step."""

    model_config = example(_INCIDENT)

    id: str
    kind: str
    server: str
    subject: str
    severity: str = Field(pattern="^(info|warning|error)$")
    message: str
    detail: str
    hint: str
    opened_at: Time
    last_at: Time
    count: int
    closed_at: Time | None
    job: str | None
    reminders: int
    next_reminder: Time | None
    acknowledged_by: str | None
    acknowledged_at: Time | None


class AlertsQuery(Dated):
    server: Name | None = Field(None, description="Only those of this server.")
    state: Literal["open", "closed", "all"] = Field("open", description="Which of them.")
    severity: Severity | None = Field(None, description="Only those as grave as this.")


class MessagesQuery(Dated):
    state: MessageState | None = Field(None, description="Only those in this state.")
    incident: Text | None = Field(None, max_length=64, description="Only those about this one.")


class Message(Shape):
    """A message on its way; `error`: why the last try failed."""

    model_config = example(_MESSAGE)

    id: str
    channel: str
    kind: MessageKind
    state: MessageState
    subject: str
    recipients: list[str]
    incident: str | None
    created_at: Time
    attempts: int
    next_try: Time | None
    sent_at: Time | None
    error: str
