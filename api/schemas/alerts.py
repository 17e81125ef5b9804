"""What is not as it should be, and the messages that tell of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Dated, Name, Shape, Text, Time, example
from backupd.model.event import MessageKind, MessageState, Severity

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
