"""What happened that somebody should know: the ground for mail, metrics and the audit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from backupd.model.clock import format_time


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
