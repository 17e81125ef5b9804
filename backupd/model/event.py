"""What happened that somebody should know: events, the incidents that they open and close, and the messages about
those. The ground for mail, metrics and the audit."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from backupd.model.document import HIDDEN, Document, json_key


class Severity(StrEnum):
    """``info``: good news or routine; ``warning``: look at it this week; ``error``: look at it now."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Event(Document):
    """Something that happened that somebody should know."""

    number: int = field(default=0, kw_only=True)
    """Its place among all, 0 before it has one; `Last-Event-ID` goes on after it."""
    at: datetime
    kind: str
    """A stable word: ``job-failed``, ``job-missed``, ``key-overdue`` ..."""
    severity: Severity
    server: str = field(default="", kw_only=True)
    """Empty when it concerns all."""
    subject: str = field(default="", kw_only=True)
    """What it is about: a job's schedule, a destination, a key."""
    message: str
    detail: str = ""
    hint: str = ""
    job_id: str = field(default="", metadata=json_key("job"))


class MessageState(StrEnum):
    """``failed``: given up; everything before that is tried again."""

    QUEUED = "queued"
    SENT = "sent"
    FAILED = "failed"


class MessageKind(StrEnum):
    """``alert`` opens an incident, ``reminder`` says that it is still open, ``recovery`` that it is over."""

    ALERT = "alert"
    REMINDER = "reminder"
    RECOVERY = "recovery"
    REPORT = "report"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Incident(Document):
    """Something that is, or was, not as it should be."""

    id: str
    kind: str
    """Of the event that opened it."""
    server: str
    subject: str
    severity: Severity
    message: str
    detail: str
    hint: str
    opened_at: datetime
    last_at: datetime
    count: int = 1
    """Number of such events."""
    closed_at: datetime | None = None
    job_id: str = field(default="", metadata=json_key("job", or_null=True))
    reminders: int = 0
    """Number of reminders that were sent."""
    next_reminder: datetime | None = None
    """Null for none any more; of an incident that is over: when that is reported, unless it comes back before."""
    acknowledged_by: str = field(default="", metadata=json_key(or_null=True))
    """Who said that no reminder is needed."""
    acknowledged_at: datetime | None = None

    @property
    def is_open(self) -> bool:
        return self.closed_at is None

    @property
    def settles(self) -> bool:
        """Is it over, and was nobody notified yet, because it came and went?"""
        return self.closed_at is not None and self.next_reminder is not None


@dataclass(frozen=True, slots=True)
class Message(Document):
    """A message on its way."""

    id: str
    channel: str
    """``email`` or the name of another one."""
    kind: MessageKind
    state: MessageState
    subject: str
    recipients: tuple[str, ...]
    content: str = field(metadata=HIDDEN)
    """The whole of it as it is sent (RFC 5322 for mail)."""
    incident_id: str = field(default="", metadata=json_key("incident", or_null=True), kw_only=True)
    """Null for reports and tests."""
    created_at: datetime
    attempts: int = 0
    """Tries so far."""
    next_try: datetime | None = None
    sent_at: datetime | None = None
    error: str = ""
    """Why the last try failed."""
