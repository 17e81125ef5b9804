"""Whether and how a stream acknowledges what it receives, and what is shown of that.

A dump request is itself an acknowledgement of everything before its position. So a stream that is far behind receives
as any replica does first, with what comes brought to the disk, and asks anew as a semi-synchronous one when it has
caught up: from where all is durable. Commits wait for what is left, which is little then.

A server that has fallen back to asynchronous replication comes back when its last commit is acknowledged. What the
destinations have is behind that by an upload, and under load there is another commit by then; so it would stay away.
While it waits for nobody, and the destinations store again and lack little, what the spool has is acknowledged *ahead*
of them. When the server is back, commits are held up a little each until the destinations have caught up; then they
wait for the destinations again. Nothing is claimed before these have all that was acknowledged ahead.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
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
from backupd.engine.server.semi_sync import SemiSync
from backupd.model.binlog import FIRST_EVENT, FilePosition
from backupd.model.text import Clock

_KEEPING_UP = 0.5
"""Share of the server's timeout that destinations may be behind which keep up: a commit waits for the upload under way,
and for its own."""
_HELD_UP, _MOST_HELD_UP = 0.25, 1.0
"""Share of it, and seconds, that a commit waits while they catch up."""
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
        self._timeout = 0.0
        self._hold_up: float | None = None
        """Seconds from one position that is acknowledged ahead of the destinations to the next; None: none is."""
        self._ahead_at = self._stored = 0.0
        """When a position was last acknowledged ahead, and when the destinations last had more."""
        self._ahead_to: tuple[str, int, int] | None = None
        """Up to where, as long as the destinations do not have that."""
        self._is_strict = True
        """As of the last look: nothing is acknowledged ahead, and the destinations have all that was."""
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
        self._stored = time.monotonic()
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
        distrusted = self._is_distrusted(start)  # then all of it is compared
        if self._mode == SPOOL:
            return Acknowledging(attached, FIRST_EVENT if distrusted else None)
        first = FIRST_EVENT if distrusted else durable
        return Acknowledging(attached, first, self._stored_at, self._on_asked, self._alarm, self._ahead)

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
            was_strict = self._look_ahead(state.semi_sync, session)
            attached = session.acknowledges and (was_strict or not state.semi_sync.status)
            look = Look(state.server_time, attached, state.semi_sync, session.start.branch.id)
            self._take(self.evidence, replace(self.evidence.after(look), shown_at=self._clock()))

    def interrupted(self, why: str) -> None:
        """Nothing is received."""
        if self.evidence is not None:
            self._take(self.evidence, self.evidence.interrupted(why, self._clock()))

    # --- ahead of the destinations

    def _look_ahead(self, found: SemiSync, session: Session) -> bool:
        """From now on, is anything acknowledged ahead? Gives whether nothing was since the look before this one."""
        was_strict, self._timeout = self._is_strict, found.timeout
        branch, stored = session.start.branch.id, self._committed()
        if self._ahead_to is not None and stored is not None and stored.branch == branch:  # and all earlier ones
            of, number, position = self._ahead_to
            if of != branch or (number, position) <= (stored.number, stored.position):
                self._ahead_to = None
        if self._mode != DESTINATION or not session.acknowledges or not found.on:
            self._hold_up = None
        elif not found.status:
            self._hold_up = 0.0 if stored is not None and self._lacking(stored, branch) <= _NEAR else None
        elif self._hold_up is not None:
            held_up = min(found.timeout * _HELD_UP, _MOST_HELD_UP)
            self._hold_up = held_up if self._ahead_to is not None else None
        self._is_strict = self._hold_up is None and self._ahead_to is None
        return was_strict

    def _lacking(self, stored: Committed, branch: str) -> int:
        """Bytes of ``branch`` in the spool that the destinations do not have."""
        here = [file for file in self._spool.files() if file.branch == branch]
        if stored.branch != branch:
            return sum(file.size for file in here)
        return sum(
            file.size - (stored.position if file.number == stored.number else 0)
            for file in here
            if file.number >= stored.number
        )

    def _ahead(self, branch: str, position: FilePosition, behind: float) -> bool:
        """May ``position`` be acknowledged before the destinations have it? They are ``behind`` seconds late."""
        now = time.monotonic()
        if self._hold_up and behind <= self._timeout * _KEEPING_UP:
            self._hold_up = None
        if (
            self._hold_up is None
            or now - self._ahead_at < self._hold_up
            or now - self._stored > self._timeout  # they hang
            or self._ahead_to == (branch, *position)
        ):
            return False
        self._ahead_at, self._ahead_to = now, (branch, *position)
        return True

    # --- how

    def _durable(self, start: Start) -> int | None:
        """Up to which byte of the first file a dump may acknowledge with its request; None: not even its beginning."""
        found = self._kept_to(start)
        return FIRST_EVENT if found is not None and self._is_distrusted(start) else found

    def _kept_to(self, start: Start) -> int | None:
        """The same, of bytes that no disk has refused."""
        if start.kept is None and start.number != start.branch.first_number:
            return None  # something may be missing before it: a request for its beginning would acknowledge that, too
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

    def _is_distrusted(self, start: Start) -> bool:
        return start.kept is not None and self._spool.is_distrusted(start.kept)

    def _stored_at(self, branch: str) -> FilePosition | None:
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
