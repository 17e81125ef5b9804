"""What keeps backups: an operator's hold or pause on a server, and what this installation itself knows of a mark of
deletion."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from backupd.model.text import format_time

EVERY_SERVER = "*"


class HoldKind(StrEnum):
    """``hold``: nothing of the server is deleted. ``pause``: no job of it starts by itself."""

    HOLD = "hold"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Hold:
    """``server`` may be ``*``: every server. ``set_by``: the person."""

    server: str
    kind: HoldKind
    reason: str
    set_by: str
    since: datetime

    @property
    def text(self) -> str:
        """``audit until March (held by anna since 2026-11-21T12:00:00Z)``"""
        word = "held" if self.kind is HoldKind.HOLD else "paused"
        whose = "every server is " if self.server == EVERY_SERVER else ""
        return f"{self.reason} ({whose}{word} by {self.set_by} since {format_time(self.since)})"

    def as_json(self) -> dict[str, Any]:
        return {
            "server": self.server,
            "kind": str(self.kind),
            "reason": self.reason,
            "by": self.set_by,
            "since": format_time(self.since),
        }


@dataclass(frozen=True, slots=True)
class Sighting:
    """``since``: when this installation put the mark, or first saw somebody else's, by its own clock. ``ours``: its own
    rules, or a person here, want the backup gone; ``confirmed``: a person here does, so no deletion limit holds it
    back."""

    since: datetime
    ours: bool = False
    confirmed: bool = False
