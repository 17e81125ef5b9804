"""What happened that somebody should know: events, the incidents that they open and close, and the messages about
those. The ground for mail, metrics and the audit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from backupd.model.text import format_time


class Severity(StrEnum):
    """``info``: good news or routine; ``warning``: look at it this week; ``error``: look at it now."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Event:
    """``kind``: a stable word (``job-failed``, ``job-missed``, ``key-overdue``); ``subject``: what it is about (a job's
    leg, a destination, a key); ``server`` empty when it concerns all. ``number``: its place in the catalog, 0 before.
    """

    at: datetime
    kind: str
    severity: Severity
    message: str
    server: str = ""
    subject: str = ""
    detail: str = ""
    hint: str = ""
    job_id: str = ""
    number: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "at": format_time(self.at),
            "kind": self.kind,
            "severity": str(self.severity),
            "server": self.server,
            "subject": self.subject,
            "message": self.message,
            "detail": self.detail,
            "hint": self.hint,
            "job": self.job_id,
        }


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
class Incident:
    """Something that is, or was, not as it should be. ``kind``: of the event that opened it; ``count``: how many such
    events there were; ``reminders``: how many were sent; ``next_reminder``: None for none any more; of one that is over
    it is when that is told, unless it comes back before; ``acknowledged_by``: who said that no reminder is needed."""

    id: str
    kind: str
    server: str
    subject: str
    severity: Severity
    message: str
    detail: str
    hint: str
    opened_at: datetime
    last_at: datetime
    count: int = 1
    closed_at: datetime | None = None
    job_id: str = ""
    reminders: int = 0
    next_reminder: datetime | None = None
    acknowledged_by: str = ""
    acknowledged_at: datetime | None = None

    @property
    def is_open(self) -> bool:
        return self.closed_at is None

    @property
    def settles(self) -> bool:
        """Is it over, and was nobody told yet, because it came and went?"""
        return self.closed_at is not None and self.next_reminder is not None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "server": self.server,
            "subject": self.subject,
            "severity": str(self.severity),
            "message": self.message,
            "detail": self.detail,
            "hint": self.hint,
            "opened_at": format_time(self.opened_at),
            "last_at": format_time(self.last_at),
            "count": self.count,
            "closed_at": _time(self.closed_at),
            "job": self.job_id or None,
            "reminders": self.reminders,
            "next_reminder": _time(self.next_reminder),
            "acknowledged_by": self.acknowledged_by or None,
            "acknowledged_at": _time(self.acknowledged_at),
        }


@dataclass(frozen=True, slots=True)
class Message:
    """A message on its way. ``channel``: ``email`` or the name of another one; ``incident_id`` empty for reports and
    tests; ``content``: the whole of it as it is sent (RFC 5322 for mail); ``attempts``: tries so far; ``error``: why
    the last one failed."""

    id: str
    channel: str
    kind: MessageKind
    state: MessageState
    subject: str
    recipients: tuple[str, ...]
    content: str
    created_at: datetime
    incident_id: str = ""
    attempts: int = 0
    next_try: datetime | None = None
    sent_at: datetime | None = None
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "channel": self.channel,
            "kind": str(self.kind),
            "state": str(self.state),
            "subject": self.subject,
            "recipients": list(self.recipients),
            "incident": self.incident_id or None,
            "created_at": format_time(self.created_at),
            "attempts": self.attempts,
            "next_try": _time(self.next_try),
            "sent_at": _time(self.sent_at),
            "error": self.error,
        }


def _time(moment: datetime | None) -> str | None:
    return format_time(moment) if moment else None
