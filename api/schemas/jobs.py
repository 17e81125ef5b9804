"""Jobs: work that goes on, or is over.

What is not as it should be, and the messages that tell of it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import LABELS, Dated, Label, Name, OfServer, Query, Shape, Text, of
from backupd.model import event, proof
from backupd.model.event import MessageState, Severity
from backupd.model.job import JobKind, JobRecord, JobState


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

    kind: JobKind
    attempt: int = Field(ge=1)
    progress: Progress | dict[str, Any] | None
    bytes: int = Field(ge=0)


class Accepted(Shape):
    """Long work was begun: follow it at the address in `Location`, or in `GET /v1/events?job=ID`."""

    job: Job


class AcceptedJobs(Shape):
    """Several jobs were begun; `Location` is that of the first."""

    jobs: list[Job]


class JobLog(Shape):
    """What a job did and what its tools said."""

    id: str
    log: str


class LogQuery(Query):
    tail: int | None = Field(None, ge=1, le=100_000, description="Maximum number of lines, counted from the end.")


class JobsQuery(OfServer):
    kind: JobKind | None = Field(None, description="Only those of this kind.")
    state: JobState | None = Field(None, description="Only those in this state.")


class EventsQuery(Dated):
    server: Name | None = Field(None, description="Only what concerns this server.")
    label: list[Label] = Field([], max_length=20, description=LABELS)
    job: Text | None = Field(None, max_length=64, description="Only what concerns this job.")
    kind: Text | None = Field(None, max_length=64, description="Only events of this kind.", examples=["job-failed"])
    severity: Severity | None = Field(None, description="Only those of this severity.")


@of(event.Event)
class Event(Shape):
    """Something that happened that somebody should know."""

    severity: str = Field(pattern="^(info|warning|error)$")


@of(event.Incident)
class Incident(Shape):
    """Something that is, or was, not as it should be, with the next step."""

    severity: str = Field(pattern="^(info|warning|error)$")


class AlertsQuery(OfServer):
    state: Literal["open", "closed", "all"] = Field("open", description="Which of them.")
    severity: Severity | None = Field(None, description="Only those of this severity.")


class MessagesQuery(Dated):
    state: MessageState | None = Field(None, description="Only those in this state.")
    incident: Text | None = Field(None, max_length=64, description="Only those about this one.")


@of(event.Message)
class Message(Shape):
    """A message on its way."""
