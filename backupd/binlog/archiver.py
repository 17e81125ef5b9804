"""The archive: scans, seals and stores what the spool holds, at every destination, and reports to the recorder.

Everything that must survive a kill is on the disk before the next thing depends on it, and each step may be done again:

    decided how a file is cut (archive.json) ─▶ sealed (folder) ─▶ parts, then segment.json, read back (destination)
    ─▶ recorder ─▶ stored (archive.json) ─▶ smaller pieces removed (destination) ─▶ recorder ─▶ ... everywhere whole:
    passed (archive.json) ─▶ file leaves the spool

A segment is sealed once for all destinations. Each of them has a thread, takes the segments in log order and is tried
again with growing pauses; none waits for another. Only the thread that calls ``step`` talks to spool and recorder.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Self

from backupd.binlog.archive_state import ArchiveState, Committed, Ledger, Recorder, SpoolView, StateFile
from backupd.binlog.segment_cutter import LogCoordinate, Marks, next_piece
from backupd.binlog.segment_sealer import Cutter, DamagedLogError
from backupd.binlog.shipper import Delivery, DestinationProgress, Dropped, Outcome, Shipper
from backupd.binlog.spool_files import Doubt, Spool, Spooled
from backupd.binlog.spool_repair import last_of
from backupd.model.binlog import FilePosition, SegmentKey, Transaction
from backupd.model.errors import BackupdError, BusyError
from backupd.model.text import Clock
from backupd.transfer.log_segments import PartsGoneError
from backupd.transfer.records.encryption import Sealer
from storage.destination import Destination, as_copying

MOST_SEALED = 1 << 30
"""Bytes of sealed segments that are kept for destinations that are down."""
_LOCK = "archive.lock"
_SEALED = "sealed"


@dataclass(frozen=True, slots=True)
class Behind:
    """How far a destination is behind the spool: ``bytes`` of logs that are not there, ``since`` when there have been
    such bytes (None: it has everything), ``error``: why, "" where it is only a matter of the checkpoint."""

    bytes: int
    since: datetime | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Shipped:
    """What one step did. ``stored``: (destination, segment), ``bytes`` of them, sealed; ``dropped``: pieces that a
    larger segment replaced; ``removed``: files that left the spool. ``trouble``: what did not work, in words, by
    destination ("": it concerns all of them); it is tried again. ``unrecorded``: why the recorder did not take what was
    done, "" when it did."""

    stored: tuple[tuple[str, SegmentKey], ...] = ()
    bytes: int = 0
    dropped: int = 0
    removed: int = 0
    trouble: Mapping[str, str] = field(default_factory=dict)
    unrecorded: str = ""


@dataclass(frozen=True, slots=True)
class _Fruitless:
    """A file was scanned and nothing new could be cut: not once more before it changes."""

    size: int
    modified: int
    trouble: str = ""


@dataclass(slots=True)
class _Tally:
    """What one step did so far."""

    stored: list[tuple[str, SegmentKey]] = field(default_factory=list)
    bytes: int = 0
    dropped: int = 0


@dataclass
class Archiver:
    """``with Archiver(spool, destinations, sealer, recorder, checkpoint=..., clock=...) as archiver:``

    ``destinations`` by name: all of them get everything. ``patience``: seconds that a step waits for them at most, and
    no longer than until the next piece is due: that is sealed while the one before is being stored. ``letting_go``:
    seconds at the end for all uploads that are under way; what hangs is given up.
    ``on_committed``: hears from the thread that calls ``step`` as soon as all of them hold more, whether the recorder
    knows it or not.
    """

    spool: Spool
    destinations: Mapping[str, Destination]
    sealer: Sealer
    recorder: Recorder
    _: KW_ONLY
    checkpoint: timedelta
    clock: Clock
    patience: float = 10.0
    letting_go: float = 5.0
    most_sealed: int = MOST_SEALED
    on_committed: Callable[[Committed], None] = lambda _committed: None
    _outcomes: queue.SimpleQueue[tuple[str, Outcome]] = field(default_factory=queue.SimpleQueue)
    _state: ArchiveState = field(default_factory=ArchiveState)
    _growth: Marks = field(default_factory=Marks)
    _claims: Marks = field(default_factory=Marks)
    _positions: deque[tuple[str, int, int, datetime]] = field(default_factory=lambda: deque(maxlen=64))
    _trouble: str = ""
    _stuck: bool = False
    _was_cut: bool = False
    _fruitless: dict[tuple[str, int], _Fruitless] = field(default_factory=dict)
    _archived_to: FilePosition | None = None
    _committed: Committed | None = None
    _urged: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._progress = {
            name: DestinationProgress(Shipper(destination, self.clock, self._outcomes))
            for name, destination in self.destinations.items()
        }
        self._state_file = StateFile(self.spool.folder)
        self._ledger = Ledger(self.recorder)
        self._behind = {name: Behind(0, None) for name in self.destinations}
        self._copying = all(as_copying(destination) is not None for destination in self.destinations.values())

    def __enter__(self) -> Self:
        """Raises BusyError when another process archives this spool, OSError."""
        self.spool.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.spool.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BusyError(
                f"another process already archives {self.spool.folder}",
                hint="one stream per server: stop the other process, or do not start this one",
            ) from None
        try:
            self._state = self._state_file.load(self._progress)
            self._cutter = Cutter(self.spool.folder / _SEALED, self.sealer, most_bytes=self.most_sealed)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        deadline = time.monotonic() + self.letting_go
        for progress in self._progress.values():
            progress.shipper.stop(deadline)
        os.close(self._lock)

    # -- from any thread

    def note_position(self, branch: str, number: int, pos: int, at: datetime) -> None:
        """The source was at this position of ``branch`` when its clock had shown ``at``."""
        self._positions.append((branch, number, pos, at))

    def behind(self) -> Mapping[str, Behind]:
        """By destination, as of the last step."""
        return dict(self._behind)

    def archived_to(self) -> FilePosition | None:
        """In the newest branch: number of the oldest file that some destination does not have whole, and how far all of
        them have it; None while there is none. As of the last step."""
        return self._archived_to

    def committed(self) -> Committed | None:
        """Up to where every destination holds the log; None while that is not known. Never from what the recorder
        says: a catalog that is out of reach does not matter."""
        return self._committed

    def urge(self) -> None:
        """Somebody waits for what has come: the next step stores it, whatever the checkpoint is."""
        self._urged.set()

    def due_in(self) -> float:
        """Seconds until the next piece is due, where more came since the last step; ``inf`` where nothing did, or that
        step could cut nothing."""
        growing = (file for file in self.spool.files() if file.ended is None)
        if self._state.cut_at is None or all(file.size <= self._state.file(*file.key).cut_to for file in growing):
            return math.inf
        left = (self._state.cut_at + self.checkpoint - self.clock()).total_seconds()
        return left if left > 0 else 0.0 if self._was_cut else math.inf

    # -- the step

    def step(self, now: datetime) -> Shipped:
        """Ship what is due, wait for it a little, and take what was done since the last step.

        What passes is not raised but reported in the result. Raises DamagedError and RefusedError where the spool
        cannot be used.
        """
        view = self._look(now)
        tally = _Tally()
        self._trouble, self._stuck, self._was_cut = "", False, False
        self._decide(view, now)
        self._note_committed(view)
        deadline = time.monotonic() + min(self.patience, self.due_in())
        unrecorded = self._write(view, now)
        while (found := self._next_outcome(deadline)) is not None:
            self._take(view, *found, tally, now)
            self._note_committed(view)
            unrecorded = self._write(view, now)
        removed = self._remove(view)
        busy = [key for progress in self._progress.values() if (key := progress.shipper.key) is not None]
        with self._staying():
            self._cutter.tidy(view.unfinished(), busy, view.pieces(), light=self._copying)
            self._state_file.save(self._state)
        unrecorded = self._confirm(view) or unrecorded
        self._show(view)
        trouble = {name: behind.error for name, behind in self._behind.items() if behind.error}
        if self._trouble:
            trouble[""] = self._trouble
        return Shipped(tuple(tally.stored), tally.bytes, tally.dropped, removed, trouble, unrecorded)

    def _look(self, now: datetime) -> SpoolView:
        view = SpoolView(self.spool.branches(), self.spool.files(), self._state)
        self._state.prune((file.branch, file.number) for file in view.files)
        for branch in view.branches:
            self._ledger.branch(branch)
        for gap in self.spool.gaps():
            self._ledger.gap(gap)
        if (end := view.end()) is not None:
            self._growth.add(end, now)
        while self._positions:
            branch_id, number, pos, at = self._positions.popleft()
            if (coordinate := view.coordinate(branch_id, number, pos)) is not None:
                self._claims.add(coordinate, at)
        return view

    def _note_committed(self, view: SpoolView) -> None:
        committed = view.committed(self._ledger.held(name, self._state) for name in self._progress)
        if committed is not None and committed != self._committed:
            self._committed = committed
            self.on_committed(committed)

    def _decide(self, view: SpoolView, now: datetime) -> None:
        """How files are cut from now on. A piece is sealed at once, since only scanning finds where it ends."""
        if self._urged.is_set():
            self._urged.clear()
            self._state.cut_at = None
        for file in view.files:
            log = view.log(file)
            if file.ended is None:
                if log.whole is not None:  # it is written to again
                    self._state.keep(replace(log, whole=None))
                with self._staying():
                    self._cut_piece(view, file, now)
            elif not log.damage and (log.whole is None or (log.whole.end, log.whole.ending) != (file.size, file.ended)):
                self._state.keep(log.ended_at(file.size, file.ended))
            self._report_gap(view, file)

    def _report_gap(self, view: SpoolView, file: Spooled) -> None:
        if (gap := view.gap_of(file)) is not None:
            self._ledger.gap(gap)

    def _cut_piece(self, view: SpoolView, file: Spooled, now: datetime) -> None:
        log = view.log(file)
        start = next_piece(log, file.size, now=now, cut_at=self._state.cut_at, checkpoint=self.checkpoint)
        if start is None or self._is_fetched_again(file):
            return
        seen = _Fruitless(file.size, file.path.stat().st_mtime_ns)
        before = self._fruitless.get((file.branch, file.number))
        if before is not None and replace(before, trouble="") == seen:
            self._trouble = before.trouble
            return
        branch = view.branch(file.branch)
        safe = replace(file, size=min(file.size, self.spool.sync(file)))
        try:
            found = self._cutter.piece(safe, branch, log, start)
        except DamagedLogError as error:
            self._trouble = _damage_text(error, self.spool.doubt(file, error.good, "; ".join(error.damages)))
            found = (
                self._cutter.piece(replace(safe, size=error.good), branch, log, start)
                if error.good > log.cut_to
                else None
            )
        if found is None:
            self._fruitless[file.branch, file.number] = replace(seen, trouble=self._trouble)
            return
        self._fruitless.pop((file.branch, file.number), None)
        self._state.keep(log.with_piece(*found))
        self._state.cut_at, self._was_cut = now, True

    def _is_fetched_again(self, file: Spooled) -> bool:
        """Was it found to be damaged, and may a new copy mend it? Until then it is not archived, and neither is what
        follows it: it is late, not lost."""
        doubt = self.spool.doubted(file)
        if doubt is None or doubt.verdict:
            return False
        self._trouble = (
            f"binary log {file.name} in the spool is damaged behind byte {doubt.good} ({doubt.why}): backupd fetches "
            "it from the server again before it is archived"
        )
        return True

    @contextlib.contextmanager
    def _staying(self) -> Iterator[None]:
        """Whatever goes wrong on this side stops the step's work, and is tried again in the next."""
        try:
            yield
        except (BackupdError, OSError) as error:
            self._trouble, self._stuck = str(error), True

    def _write(self, view: SpoolView, now: datetime) -> str:
        """Report to the recorder, write down the state, and then give everybody the next work."""
        unrecorded = self._ledger.write(self._state)
        with self._staying():
            self._state_file.save(self._state)
        for name, progress in self._progress.items():
            if not self._stuck and progress.may_start(now):
                with self._staying():
                    self._start_next(view, name, progress, now)
        return unrecorded

    def _start_next(self, view: SpoolView, name: str, progress: DestinationProgress, now: datetime) -> None:
        lacking = view.lacking(self._ledger.held(name, self._state))
        if lacking:
            file, cut = lacking[0]
            branch = view.branch(file.branch)
            if self._is_fetched_again(file):
                return
            try:
                sealed = self._cutter.sealed(file, branch, view.log(file), cut)
            except DamagedLogError as error:
                doubt = self.spool.doubt(file, error.good, "; ".join(error.damages))
                self._trouble, self._stuck = _damage_text(error, doubt), True
                if doubt.verdict and file.ended is not None:
                    self._state.keep(view.log(file).damaged(error.good, f"{doubt.why}; {doubt.verdict}", now))
                    self._report_gap(view, file)
                return
            progress.shipper.store(sealed, branch, file.path)
            return
        pieces = self._ledger.to_drop(name, self._state)
        if pieces and view.branches and progress.may_drop(now):
            progress.shipper.drop(view.server, pieces)

    def _next_outcome(self, deadline: float) -> tuple[str, Outcome] | None:
        """What a destination has done. Waits for those that began lately; who hangs does not delay each step."""
        waits = [
            self.patience - progress.busy_for
            for progress in self._progress.values()
            if progress.shipper.busy_since is not None
        ]
        timeout = min(deadline - time.monotonic(), max(waits, default=0.0))
        try:
            return self._outcomes.get(block=timeout > 0, timeout=max(timeout, 0.0))
        except queue.Empty:
            return None

    def _take(self, view: SpoolView, name: str, outcome: Outcome, tally: _Tally, now: datetime) -> None:
        progress = self._progress[name]
        progress.shipper.done()
        match outcome:
            case Delivery():
                progress.went_well()
                self._ledger.stored(name, outcome, now)
                tally.stored.append((name, outcome.header.segment.key))
                tally.bytes += outcome.header.stored_bytes
            case Dropped():
                progress.went_well()
                progress.drops_wait(now, waits=outcome.waits)
                self._ledger.dropped(name, view.server, outcome.keys)
                tally.dropped += len(outcome.keys)
            case PartsGoneError():
                progress.went_well()
                self._cutter.seal_anew(outcome.key)
            case BackupdError() | OSError():
                progress.failed(str(outcome), now)
            case _:
                raise outcome

    def _remove(self, view: SpoolView) -> int:
        """Files that every destination has whole leave the spool, oldest first, and not before the recorder knows."""
        removed = 0
        if self._stuck or not self._ledger.is_clear:
            return removed
        for file in view.files:
            if file.ended is None or not all(
                view.log(file).is_complete(holding.stored) for holding in self._state.holdings.values()
            ):
                break
            before = view.coordinate(*self._state.passed) if self._state.passed else None
            coordinate = view.coordinate(file.branch, file.number, file.size)
            if before is None or (coordinate is not None and coordinate > before):  # else it was brought back
                self._state.passed = (file.branch, file.number, file.size)
            with self._staying():
                self._state_file.save(self._state)
                self.spool.remove(file, self._last_of(view, file))
                removed += 1
        return removed

    def _last_of(self, view: SpoolView, file: Spooled) -> tuple[Transaction, ...]:
        """Where another server takes over right after a rotation, only the file before shows what both share."""
        following = view.files[view.files.index(file) + 1 :]
        if [one.branch for one in following] != [file.branch]:
            return ()
        return last_of(file.path, [cut.start for cut in view.log(file).cuts])

    def _confirm(self, view: SpoolView) -> str:
        """What the source had at a moment is there when the file that it wrote then is, as far as it had come. A later
        file says nothing: the end of the one before may have been lost before it was copied."""
        unrecorded = ""
        reached = {name: view.frontier(holding.stored) for name, holding in self._state.holdings.items()}
        for name, coordinate in reached.items():
            mark = self._claims.latest_within(coordinate)
            if mark is not None and coordinate is not None and mark[0][:2] == coordinate[:2]:
                (turn, number, pos), at = mark
                unrecorded = self._ledger.confirm(name, view.branches[turn].id, (number, pos), at) or unrecorded
        lowest = min(reached.values(), key=lambda coordinate: coordinate or LogCoordinate(-1, 0, 0), default=None)
        self._claims.forget_within(lowest)
        self._growth.forget_within(lowest)
        self._archived_to = view.archived_to()
        return unrecorded

    def _show(self, view: SpoolView) -> None:
        for name, progress in self._progress.items():
            held = self._state.holdings[name].stored
            lacking = view.missing_bytes(held)
            since = self._growth.first_beyond(view.frontier(held)) if lacking else None
            error = progress.trouble or self._trouble
            self._behind[name] = Behind(lacking, since, error)


def _damage_text(error: DamagedLogError, doubt: Doubt) -> str:
    """What is to be known of a file that cannot be read, and was fetched again or will be."""
    return f"{error.message} ({doubt.why}): {doubt.verdict or 'backupd fetches it from the server again'}"
