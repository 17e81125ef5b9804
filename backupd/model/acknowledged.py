"""Since when no commit that a client was told of can be lost (RPO 0): what is shown of that."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from backupd.model.document import Document
from backupd.model.text import format_time


@dataclass(frozen=True, slots=True)
class AcknowledgedWindow(Document):
    """From ``since`` to ``until`` no commit was answered before backupd had it on its disk, or its destinations had
    it. ``branch``: of the server's history."""

    branch: str
    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True)
class Acknowledged(Document):
    """``mode``: as of the policy: ``spool`` or ``destination``. ``holds``: RPO 0 holds now, ``since`` then; where it
    does not, ``why``, and since when (``lost_at``; null: it never held). ``until``: up to when it was last shown.
    ``windows``: in which it held, oldest first."""

    mode: str
    holds: bool
    since: datetime | None
    until: datetime | None
    why: str
    lost_at: datetime | None
    windows: tuple[AcknowledgedWindow, ...]

    def words(self, server: str) -> str:
        """In one sentence."""
        if self.holds and self.since is not None:
            place = "on the spool's disk" if self.mode == "spool" else "at every required destination"
            return f"RPO 0 since {format_time(self.since)}: each commit of {server} is answered when it is {place}"
        since = f" since {format_time(self.lost_at)}" if self.lost_at is not None else ""
        return f"RPO 0 does not hold for {server}{since}: {self.why}"
