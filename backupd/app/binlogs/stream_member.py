"""A stream in a process that it shares with others: it ends alone, when it is asked to by a file of its spool, and what
is known of it is who holds the spool's lock.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from backupd.app.binlogs.stream_holder import Holder
from backupd.app.context.settings import spool_folder
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.child_process import ChildProcess
from backupd.app.runtime.other_process import OtherProcess
from backupd.binlog.spool_files import Spool

BEGINNING = 90.0
"""Seconds that it may take to hold the lock: it may wait for the catalog, and for the process before it."""
LOOKS = 2.0
"""Seconds between two looks at the lock."""


class StreamMember:
    """The stream of ``server`` in ``process``. ``asked``: when it was asked to end; monotonic. ``holds``: was it seen
    to stream?"""

    def __init__(self, process: ChildProcess | OtherProcess, wiring: Wiring, server: str, *, holds: bool) -> None:
        self.process = process
        self.asked: float | None = None
        self._wiring, self._server, self._holds = wiring, server, holds
        self._spool = Spool(spool_folder(wiring.settings, server))
        self._began = time.monotonic()
        self._due = 0.0
        self._how = ""
        self._why = ""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.child.pid if isinstance(self.process, ChildProcess) else self.process.pid

    @property
    def settings(self) -> Path | None:
        """The file that the process goes by, where it was started by this one."""
        return self.process.settings if isinstance(self.process, ChildProcess) else None

    def ended(self) -> str:
        """How it ended while its process goes on; empty as long as it lives."""
        now = time.monotonic()
        if self._how or (now < self._due and self.asked is None):
            return self._how
        self._due = now + LOOKS
        said = self._spool.holder()
        if said is not None:
            holder = Holder.of(self._wiring, self._server)
            if holder is None:
                return ""  # it writes that just now, or who holds it is none of ours
            if holder.pid == self.pid:
                self._holds = True
                return ""
        if (why := self._spool.why_over(self.pid)) is not None:
            self._how, self._why = "has ended", why
        elif self._holds:
            self._how = "has ended"
        elif now - self._began > BEGINNING:
            self._how = f"did not begin within {BEGINNING:.0f} s"
        return self._how

    def end(self, now: float, grace: float) -> None:
        """Ask it to end. Where it does not, its process is asked, which ends all of its streams, and killed at last:
        they are begun again."""
        if self.asked is None:
            self.asked = now
            with suppress(OSError):
                self._spool.ask_to_leave()
        elif now - self.asked > 2 * grace and not self.ended():
            self.process.end(now, grace)

    def last_words(self) -> str:
        """Why it ended, or the end of what its process said."""
        return self._why or self.process.last_words()

    def close(self) -> None:
        """Let it go, and whatever becomes of it."""
        if isinstance(self.process, OtherProcess):
            self.process.close()
