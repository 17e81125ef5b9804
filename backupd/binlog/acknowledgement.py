"""Since when no commit that was reported to a client can be lost (RPO 0), by the source's own counters. Pure.

The source answers a commit when a semi-synchronous replica has acknowledged it. That is ours only while ours is the
only one, or every one of them is waited for. So a window in which RPO 0 held has a look at both of its ends, with
nothing in between that speaks against it: the counters of commits that were answered without an acknowledgement did not
move, and did not begin anew. Whatever cannot be shown is not claimed.

Two looks are a few seconds apart. A semi-synchronous replica of others that comes and goes in between is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from backupd.engine.server.semi_sync import AFTER_SYNC, SemiSync
from backupd.model.acknowledged import AcknowledgedWindow
from backupd.model.document import Document, json_key

OFF, SPOOL, DESTINATION = "off", "spool", "destination"
LONGEST_GAP = timedelta(seconds=30)
"""Between two looks: beyond, too much may have come and gone that no counter shows."""
_WINDOWS = 100
_SLACK = 3
"""Seconds that the server's clock and its uptime may differ by."""


@dataclass(frozen=True, slots=True)
class Look(Document):
    """The source at a moment, by its own clock. ``began_at``: before anything was read; ``attached``: did ours receive
    as a semi-synchronous replica all the while? ``branch``: of the history that was received."""

    began_at: datetime
    attached: bool
    counters: SemiSync
    branch: str = field(default="", metadata=json_key(later=True))

    def trouble(self) -> str:
        """Why nothing can be claimed now, "" where nothing speaks against it."""
        found = self.counters
        if not found.is_known or not found.on:
            return "semi-synchronous replication is off at the server"
        if found.wait_point != AFTER_SYNC:
            return f"the server shows commits to others before they are acknowledged ({found.wait_point})"
        if found.flushed < 0:
            return "the server does not say since when it counts (Uptime_since_flush_status)"
        return self._trouble_of_clients()

    def _trouble_of_clients(self) -> str:
        found = self.counters
        if not self.attached:
            return "backupd is not connected as a semi-synchronous replica yet: it catches up first"
        if not found.ours:
            return "the server has no dump of backupd's any more: the connection is dead"
        if not found.status:
            return "the server has fallen back to asynchronous replication"
        if found.clients != 1 and found.needed < found.clients:
            return (
                f"semi-synchronous, but not by backupd alone: {found.clients} replicas are connected, and the server "
                f"waits for {found.needed} of them"
            )
        return "" if found.clients else "the server counts no semi-synchronous replica"

    def contradiction(self, before: Look) -> str:
        """Why nothing can be claimed of the time between ``before`` and this look; "" where nothing speaks against
        it."""
        old, new = before.counters, self.counters
        if old.counted_at is None or new.counted_at is None:
            return "the server did not say when its counters were read"
        if self.began_at < old.counted_at:
            return "the server's clock was set back"
        if self.branch != before.branch:
            return "another history of the server began"
        return self._contradiction_of_counters(old, old.counted_at, new.counted_at)

    def _contradiction_of_counters(self, old: SemiSync, then_at: datetime, now_at: datetime) -> str:
        new = self.counters
        if self.began_at - then_at > LONGEST_GAP:
            return f"the server was not asked for {(self.began_at - then_at).total_seconds():.0f} s"
        passed = (now_at - then_at).total_seconds()
        begun_anew = (
            any(
                abs(now - then - passed) > _SLACK or then <= _SLACK  # one that began just before would not be noticed
                for then, now in ((old.uptime, new.uptime), (old.flushed, new.flushed))
            )
            or new.acknowledged < old.acknowledged
            or new.unacknowledged < old.unacknowledged
            or new.fell_back < old.fell_back
        )
        if begun_anew:
            return "the server was restarted, or its counters were reset"
        if new.fell_back > old.fell_back:
            return "the server fell back to asynchronous replication"
        if count := new.unacknowledged - old.unacknowledged:
            return f"the server answered {count} commits that nobody had acknowledged"
        return ""

    def is_answered_more_than(self, before: Look) -> bool:
        """Were commits answered since ``before`` that nobody had acknowledged?"""
        old, new = before.counters, self.counters
        return new.unacknowledged > old.unacknowledged or new.fell_back > old.fell_back


@dataclass(frozen=True, slots=True)
class Evidence(Document):
    """``windows``: the last ones, oldest first. ``why``: RPO 0 does not hold now, and why; "" while it does.
    ``lost_at``: since when it does not, as far as is known; None while it holds, or where it never did.
    ``answered_at``: when commits were last found to have been answered without an acknowledgement. ``last``: what the
    next look is compared with. ``shown_at``: when the last look was taken, by the clock of this host; all other times
    are the server's."""

    mode: str
    windows: tuple[AcknowledgedWindow, ...] = ()
    why: str = "the server was not asked yet"
    lost_at: datetime | None = None
    answered_at: datetime | None = None
    last: Look | None = field(default=None, metadata=json_key(later=True))
    shown_at: datetime | None = field(default=None, metadata=json_key(later=True))

    @property
    def since(self) -> datetime | None:
        """Since when RPO 0 holds; None while it does not."""
        return self.windows[-1].since if self.windows and not self.why else None

    @property
    def until(self) -> datetime | None:
        """Up to when that was shown."""
        return self.windows[-1].until if self.windows else None

    def after(self, look: Look) -> Evidence:
        """With what ``look`` shows."""
        why = look.trouble()
        if why:
            return self.interrupted(why, look.began_at, look)
        before, counted_at = self.last, look.counters.counted_at
        if before is None or counted_at is None or before.trouble():  # a window may begin with this look
            return replace(self, last=look)
        if contradiction := look.contradiction(before):
            found = self.interrupted(contradiction, look.began_at, look)
            counted = look.is_answered_more_than(before)
            return replace(found, answered_at=look.began_at if counted else self.answered_at)
        window = self.windows[-1] if self.windows else None
        start = before.counters.counted_at or look.began_at
        if window is not None and (window.branch, window.until) == (look.branch, before.began_at):
            windows = (*self.windows[:-1], replace(window, until=look.began_at))
        else:
            windows = (*self.windows, AcknowledgedWindow(look.branch, start, look.began_at))
        return replace(self, windows=windows[-_WINDOWS:], why="", lost_at=None, last=look)

    def interrupted(self, why: str, at: datetime, look: Look | None = None) -> Evidence:
        """RPO 0 does not hold now. ``look``: the one that showed it; without one, nobody is asked, and what the next
        one shows decides whether the window went on."""
        lost_at = (self.lost_at if self.why else self.until) or at
        return replace(self, why=why, lost_at=lost_at, last=look or self.last)
