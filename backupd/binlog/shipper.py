"""Work at one destination, on a separate thread: a destination that hangs or is slow delays no other one.

``DestinationProgress`` is how it goes there: what failed, and when it is tried again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from backupd.binlog.continuity import digest_of
from backupd.model.binlog import Branch, Segment, SegmentKey
from backupd.model.errors import CancelledError, DamagedError, NotFoundError
from backupd.model.text import Clock
from backupd.transfer import log_segments as segments
from backupd.transfer.holds_and_locks import lengthen_branch
from backupd.transfer.log_segments import SegmentConflictError, drop_pieces
from backupd.transfer.records.segment_documents import Sealed, SegmentHeader
from storage.destination import Destination, ObjectInfo
from storage.throttle_and_breaker import ForwardingDestination

_BOTH_KEPT = (
    "backupd keeps both. Either another installation streams to this destination, or the spool was altered: give each "
    "installation its own destination, or move the spool's folder away to begin a new branch"
)
_LOCKED_FOR = timedelta(days=1)
"""Time after which the lock of a branch's description is looked at again."""
SLOW = 300.0
"""Seconds after which one work at a destination is reported as trouble."""
_LONGEST_PAUSE = 300
_PAUSE_FOR_READERS = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A segment was stored. ``replaced``: pieces at this destination that it holds."""

    header: SegmentHeader
    replaced: tuple[SegmentKey, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Pieces were removed; the rest of them not now (``waits``): a restore is reading logs of this server, or the
    destination lets nobody remove them yet."""

    keys: tuple[SegmentKey, ...]
    waits: bool = False


Outcome = Delivery | Dropped | BaseException
Work = Callable[[], Delivery | Dropped]


class _UntilGivenUp(ForwardingDestination):
    """Changes nothing any more once its thread was ``given_up``, which cannot be ended and may hang for hours in a
    process that goes on: another one archives the spool by then."""

    def __init__(self, inner: Destination, given_up: threading.Event) -> None:
        super().__init__(inner)
        self._given_up = given_up

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        self._require()
        return super().put(key, stream)

    def delete(self, key: str) -> None:
        self._require()
        super().delete(key)

    def duplicate(self, source: str, target: str) -> bool:
        self._require()
        return super().duplicate(source, target)

    def _require(self) -> None:
        if self._given_up.is_set():
            raise CancelledError(f"the stream ended while {self.name} did not answer")


class Shipper:
    """Does one work after the other; ``outcomes`` gets (destination, outcome) of each. The thread lasts until
    ``stop``."""

    def __init__(
        self, destination: Destination, clock: Clock, outcomes: queue.SimpleQueue[tuple[str, Outcome]]
    ) -> None:
        self._given_up = threading.Event()
        self._destination = _UntilGivenUp(destination, self._given_up)
        self._clock = clock
        self._outcomes = outcomes
        self._works: queue.Queue[Work | None] = queue.Queue(maxsize=1)
        self._described: set[Branch] = set()
        self._locked: dict[str, datetime] = {}
        self._thread = threading.Thread(target=self._run, name=f"archive {destination.name}", daemon=True)
        self.key: SegmentKey | None = None
        """The segment that is being stored."""
        self.busy_since: float | None = None
        """Of time.monotonic; None while there is nothing to do."""

    def store(self, sealed: Sealed, branch: Branch, plain: Path) -> None:
        """Only while not busy. ``plain``: the file in the spool."""
        self._begin(sealed.header.segment.key, lambda: self._store(sealed, branch, plain))

    def drop(self, server: str, keys: tuple[SegmentKey, ...]) -> None:
        """Only while not busy."""
        self._begin(None, lambda: self._drop(server, keys))

    def done(self) -> None:
        """The outcome was taken: the next work may come."""
        self.key = self.busy_since = None

    def stop(self, deadline: float) -> None:
        """No more work; waits until ``deadline`` (of time.monotonic) for the one that is being done. What hangs then
        stores nothing any more."""
        while self._thread.is_alive():
            try:
                self._works.put(None, timeout=0.05)
                break
            except queue.Full:
                if time.monotonic() > deadline:
                    break
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._given_up.set()

    def _begin(self, key: SegmentKey | None, work: Work) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self.key, self.busy_since = key, time.monotonic()
        self._works.put(work)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            outcome: Outcome
            try:
                outcome = work()
            except BaseException as error:  # noqa: BLE001  not hidden: whoever takes the outcome judges it
                outcome = error
            self._outcomes.put((self._destination.name, outcome))

    def _store(self, sealed: Sealed, branch: Branch, plain: Path) -> Delivery:
        if branch not in self._described:
            segments.put_branch(self._destination, branch)
            self._described.add(branch)
        now = self._clock()
        if now - self._locked.get(branch.id, now - _LOCKED_FOR) >= _LOCKED_FOR:
            lengthen_branch(self._destination, branch.server, branch.id, now)
            self._locked[branch.id] = now
        header = segments.put(self._destination, sealed, now=self._clock())
        segment = sealed.header.segment
        return Delivery(header, self._replaced(segment, sealed.pieces, plain) if segment.start == 0 else ())

    def _replaced(self, segment: Segment, pieces: Mapping[SegmentKey, str], plain: Path) -> tuple[SegmentKey, ...]:
        """The pieces that ``segment`` holds, each compared with ``pieces``, of which it was put together, or with the
        file that it is said to be of."""
        key = segment.key
        found = []
        for other in segments.of_file(self._destination, segment.server, key.branch, key.number):
            if other.end > key.end and segment.is_final:
                raise SegmentConflictError(
                    f"destination {self._destination.name} holds more of {segment.file} than the server ever wrote",
                    detail=f"bytes {other.start} to {other.end} of branch {key.branch} are there, and the file ended "
                    f"at {key.end}",
                    hint=_BOTH_KEPT,
                )
            if other != key and other.end <= key.end:
                self._compare(segment.server, other, pieces.get(other), plain)
                found.append(other)
        return tuple(found)

    def _compare(self, server: str, key: SegmentKey, known: str | None, plain: Path) -> None:
        try:
            there = segments.load_header(self._destination, server, key).segment.sha256
        except (DamagedError, NotFoundError):
            return  # worth nothing, or gone: the larger one is what counts
        here = known or digest_of(plain, key.start, key.end)
        if here != there:
            raise SegmentConflictError(
                f"destination {self._destination.name} holds a piece of binary log {key.number} of {server} that "
                "differs from the server's file",
                detail=f"bytes {key.start} to {key.end} of branch {key.branch}: SHA-256 {there} there, {here} here",
                hint=_BOTH_KEPT,
            )

    def _drop(self, server: str, keys: tuple[SegmentKey, ...]) -> Dropped:
        gone = drop_pieces(self._destination, server, keys, now=self._clock())
        return Dropped(gone, waits=len(gone) < len(keys))


@dataclass(slots=True)
class DestinationProgress:
    """How the work at one destination goes, and what it waits for."""

    shipper: Shipper
    _failures: int = 0
    _error: str = ""
    _not_before: datetime | None = None
    _no_drop_before: datetime | None = None

    def failed(self, error: str, now: datetime) -> None:
        """Pause before the next try: twice as long after each failure, up to five minutes."""
        self._failures += 1
        self._error = error
        self._not_before = now + timedelta(seconds=min(_LONGEST_PAUSE, 2 ** min(self._failures - 1, 20)))

    def went_well(self) -> None:
        """Forget earlier failures."""
        self._failures, self._error, self._not_before = 0, "", None

    @property
    def busy_for(self) -> float:
        """Seconds; 0 when it has nothing to do."""
        since = self.shipper.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def may_start(self, now: datetime) -> bool:
        """Is nothing under way there, and the pause after a failure over?"""
        return self.shipper.busy_since is None and not _is_ahead(self._not_before, now)

    def drops_wait(self, now: datetime, *, waits: bool) -> None:
        """Pieces could not be removed while somebody reads; or they could."""
        self._no_drop_before = now + _PAUSE_FOR_READERS if waits else None

    def may_drop(self, now: datetime) -> bool:
        """May pieces be removed, or did somebody read them a moment ago?"""
        return not _is_ahead(self._no_drop_before, now)

    @property
    def trouble(self) -> str:
        """What is wrong there, in words; "" while all is well."""
        if not self._error and self.busy_for > SLOW:
            return f"the upload of one binary log has taken {self.busy_for:.0f} s so far"
        return self._error


def _is_ahead(moment: datetime | None, now: datetime) -> bool:
    """One that is too far ahead was set before the clock was put back: it does not count."""
    return moment is not None and now < moment <= now + timedelta(seconds=_LONGEST_PAUSE)
