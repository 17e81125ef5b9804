"""Whether and how a stream acknowledges what it receives, and what is shown of that.

A dump request is itself an acknowledgement of everything before its position. So a stream that is far behind receives
as any replica does first, with what comes brought to the disk, and asks anew as a semi-synchronous one when it has
caught up: from where all is durable. Commits wait for what is left, which is little then.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from backupd.binlog.acknowledgement import DESTINATION, OFF, SPOOL, Evidence, Look
from backupd.binlog.archive_state import Committed
from backupd.binlog.connection_start import Start
from backupd.binlog.session import Acknowledging, Session, Watch
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import StreamEvent, StreamEventKind
from backupd.engine.server.binary_logs import ListedLog, SourceState
from backupd.model.binlog import FIRST_EVENT
from backupd.model.text import Clock

_NEAR = 64 * 1024 * 1024
"""Bytes that a commit may have to wait for when a stream begins to acknowledge: half a second on a fast network."""


class Acknowledger:
    """Of the stream of ``server``; a context manager, while it runs. ``mode``: OFF, SPOOL or DESTINATION;
    ``committed``, ``on_asked``: as of Streamer."""

    def __init__(
        self,
        server: str,
        mode: str,
        spool: Spool,
        evidence: Evidence | None,
        *,
        committed: Callable[[], Committed | None],
        on_asked: Callable[[], None],
        clock: Clock,
        report: Callable[[StreamEvent], None],
    ) -> None:
        self._server, self._mode, self._spool = server, mode, spool
        self._committed, self._on_asked = committed, on_asked
        self._clock, self._report = clock, report
        self._guard = threading.Lock()
        self._alarm = -1
        self.evidence = evidence if evidence is not None or mode == OFF else Evidence(mode)
        """Since when RPO 0 holds; None where nothing is acknowledged."""

    def __enter__(self) -> Self:
        with self._guard:
            self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self

    def __exit__(self, *_exc: object) -> None:
        with self._guard:
            os.close(self._alarm)
            self._alarm = -1

    def rouse(self) -> None:
        """From any thread: the destinations have more."""
        with self._guard:
            if self._alarm >= 0:
                os.eventfd_write(self._alarm, 1)

    def how(self, start: Start, logs: Sequence[ListedLog]) -> Acknowledging | None:
        """How a dump that begins with ``start`` acknowledges; ``logs``: of the server. None: not at all."""
        if self._mode == OFF:
            return None
        durable = self._durable(start)
        behind = sum(log.size for log in logs if log.number >= start.number) - (durable or 0)
        attached = durable is not None and behind <= _NEAR
        if self._mode == SPOOL:
            return Acknowledging(attached)
        return Acknowledging(attached, durable, self._stored_at, self._on_asked, self._alarm)

    def may_begin(self, session: Session, watch: Watch) -> bool:
        """Has a stream that does not acknowledge yet caught up, so that the next dump may?"""
        if self._mode == OFF or session.acknowledges or session.current is None or not watch.is_asked:
            return False
        number, size = session.received
        at = watch.position
        if (number, size) < (int(at.file.rpartition(".")[2]), at.pos):
            return False
        self._on_asked()
        here = Start(session.start.branch, number, session.current.name, replace(session.current, size=size))
        durable = self._durable(here)
        return durable is not None and size - durable <= _NEAR // 2

    def acknowledge(self, session: Session) -> None:
        """What the destinations have by now."""
        if self._mode == DESTINATION:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._alarm)
            session.acknowledge_stored()

    def saw(self, state: SourceState, session: Session) -> None:
        """The server was as ``state`` says while ``session`` received."""
        if self.evidence is not None and state.semi_sync is not None:
            look = Look(state.server_time, session.acknowledges, state.semi_sync)
            self._take(self.evidence, self.evidence.after(look, session.start.branch.id))

    def interrupted(self, why: str) -> None:
        """Nothing is received."""
        if self.evidence is not None:
            self._take(self.evidence, self.evidence.interrupted(why, self._clock()))

    # --- how

    def _durable(self, start: Start) -> int | None:
        """Up to which byte of the first file a dump may acknowledge with its request; None: not even its beginning."""
        if self._mode == SPOOL:
            return start.kept.size if start.kept is not None else FIRST_EVENT
        stored = self._committed()
        if stored is None or stored.branch != start.branch.id:
            return FIRST_EVENT if start.number == start.branch.first_number else None
        if stored.number >= start.number:
            return max(stored.position, FIRST_EVENT)
        before = [file for file in self._spool.files() if file.branch == stored.branch and file.number < start.number]
        is_whole = all((file.number, file.size) <= (stored.number, stored.position) for file in before)
        return FIRST_EVENT if is_whole else None

    def _stored_at(self, branch: str) -> tuple[int, int] | None:
        stored = self._committed()
        return (stored.number, stored.position) if stored is not None and stored.branch == branch else None

    def _take(self, before: Evidence, after: Evidence) -> None:
        self.evidence = after
        if bool(before.why) is bool(after.why) and before.answered_at == after.answered_at:
            return
        kind, words = StreamEventKind.UNACKNOWLEDGED, f"RPO 0 does not hold for {self._server}: {after.why}"
        if not after.why:
            kind = StreamEventKind.ACKNOWLEDGED
            words = f"RPO 0: every commit of {self._server} waits until backupd has it (acknowledge: {self._mode})"
        self._report(StreamEvent(kind, self._clock(), words))
