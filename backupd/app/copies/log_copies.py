"""The binary logs of a server at one of the ``others``: copied as they are stored elsewhere, soon after they are.

The catalog says what is missing. In log order, so that what is there is as long without a hole as can be; a segment
that is damaged everywhere is passed over and reported, since what comes after it is good for backups that begin there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from backupd.app.context.wiring import Wiring
from backupd.catalog.session import Catalog
from backupd.model.binlog import Branch, Run, SegmentKey, SegmentRecord
from backupd.model.errors import BackupdError, DamagedError, DestinationError, NotFoundError
from backupd.model.text import Clock
from backupd.recovery.runs import first_of, last_of
from backupd.transfer.copies import copy_branch, copy_segment
from backupd.transfer.holds_and_locks import lengthen_branch
from backupd.transfer.log_segments import SegmentConflictError, drop_pieces, replaced_pieces
from backupd.transfer.relay import Check, Relay
from storage.destination import Destination


@dataclass(slots=True)
class LogsCopied:
    """``segments`` that arrived, ``bytes`` of them, sealed; ``dropped`` pieces. ``lacking``: how many could not be
    copied, ``since`` when the oldest of them was stored elsewhere, ``troubles`` why, ``failure``: what ended it."""

    segments: int = 0
    bytes: int = 0
    dropped: int = 0
    lacking: int = 0
    since: datetime | None = None
    troubles: tuple[str, ...] = ()
    failure: DestinationError | None = None

    def lacks(self, record: SegmentRecord, error: BackupdError) -> None:
        """One that could not be copied."""
        stored_at = min(copy.stored_at for copy in record.destinations.values())
        self.lacking += 1
        self.since = stored_at if self.since is None else min(self.since, stored_at)
        self.troubles = tuple(dict.fromkeys((*self.troubles, str(error))))


@dataclass(slots=True)
class LogCopies:
    """Of ``server`` at ``target``. One object may be asked again and again: it remembers from which file on something
    may be missing. ``pieces``: whether those of files that grow are copied, too."""

    catalog: Catalog
    clock: Clock
    server: str
    target: Destination
    pieces: bool
    check: Check = lambda: None
    moved: Callable[[int], None] = lambda _size: None
    pauses: Sequence[float] | None = None
    _reached: dict[str, int] = field(default_factory=dict)
    _described: set[Branch] = field(default_factory=set)

    def step(self, sources: Sequence[Destination], first: Mapping[str, int]) -> LogsCopied:
        """Copy what is missing. ``first``: of each branch the first file that is needed; all where none is named.

        Raises CatalogError, and what ``check`` raises.
        """
        relay = Relay(
            sources,
            self.target,
            check=self.check,
            moved=self.moved,
            **({} if self.pauses is None else {"pauses": self.pauses}),
        )
        names = {source.name for source in sources}
        # Before anything is looked for: what these confirm is in what is found below.
        runs = [run for run in self.catalog.binlogs.runs(self.server) if run.destination in names]
        done = LogsCopied()
        try:
            for branch in self.catalog.binlogs.branches(self.server):
                self._branch(relay, branch, first.get(branch.id, 0), names, done)
        except DestinationError as error:
            done.failure = error
        self._confirm(runs)
        return done

    def forget(self) -> None:
        """Look at everything again: somebody else may have removed something."""
        self._reached.clear()
        self._described.clear()

    # -- inside

    def _branch(self, relay: Relay, branch: Branch, first: int, names: Collection[str], copied: LogsCopied) -> None:
        name, in_pieces = self.target.name, self.catalog.binlogs.in_pieces(self.server, branch.id)
        unbroken = True
        covered: tuple[int, int] = (-1, 0)
        for record in self.catalog.binlogs.each_segment(
            self.server, branch.id, from_position=(max(first, self._reached.get(branch.id, 0)), 0)
        ):
            self.check()
            key = record.key
            within = key.number == covered[0] and key.end <= covered[1]
            if _is_at(record, {name}) and not _is_older(record, name, names):
                done = True
            elif within or not (self.pieces or is_whole(record)) or not _is_at(record, names):
                done = False
            else:
                done = self._segment(relay, branch, record, copied)
            if done and key.end > (covered[1] if covered[0] == key.number else 0):
                covered = (key.number, key.end)
            if is_whole(record):
                unbroken = unbroken and done
                if done and key.number in in_pieces:
                    self._clear(key, copied)
                if unbroken:
                    self._reached[branch.id] = key.number

    def _segment(self, relay: Relay, branch: Branch, record: SegmentRecord, copied: LogsCopied) -> bool:
        try:
            if branch not in self._described:
                copy_branch(relay, branch)
                lengthen_branch(self.target, branch.server, branch.id, self.clock())
                self._described.add(branch)
            header = copy_segment(relay, self.server, record.key, clock=self.clock)
        except NotFoundError:
            return False  # a larger one has replaced it meanwhile
        except (DamagedError, SegmentConflictError, DestinationError) as error:
            copied.lacks(record, error)
            if isinstance(error, DestinationError):
                raise
            return False
        self.catalog.binlogs.add_segment(header.segment, self.target.name, header.stored_bytes, self.clock())
        copied.segments += 1
        copied.bytes += header.stored_bytes
        return True

    def _clear(self, key: SegmentKey, copied: LogsCopied) -> None:
        """Pieces that the whole file has made superfluous."""
        known = [
            record.key
            for record in self.catalog.binlogs.segments(
                self.server, key.branch, from_position=(key.number, 0), to_position=(key.number, key.end)
            )
            if record.key != key and self.target.name in record.destinations
        ]
        if not known:
            return
        pieces = sorted({*known, *replaced_pieces(self.target, self.server, key)})
        # Those that are locked take room and do no harm: what comes after them must not wait for the lock.
        gone = drop_pieces(self.target, self.server, pieces, now=self.clock())
        self.catalog.binlogs.drop_segments(self.server, gone, self.target.name)
        copied.dropped += len(gone)

    def _confirm(self, runs: Sequence[Run]) -> None:
        """What a source's run holds up to a moment, the target holds when its own run reaches as far."""
        name, binlogs = self.target.name, self.catalog.binlogs
        own = binlogs.runs(self.server, name)
        now = self.clock()
        newest: dict[str, tuple[Run, datetime]] = {}
        for run in runs:
            if run.confirmed_at is not None and any(_covers(mine, run) for mine in own if mine.branch == run.branch):
                best = newest.get(run.branch)
                if best is None or best[1] < run.confirmed_at:
                    newest[run.branch] = (run, run.confirmed_at)
        for branch, (run, at) in newest.items():
            before = max(
                (mine.confirmed_at for mine in own if mine.branch == branch and mine.confirmed_at is not None),
                default=None,
            )
            if before is not None and before >= at:
                continue
            if before is not None:
                self.catalog.lags.note(self.server, name, max(0.0, (now - before).total_seconds()), now)
            binlogs.confirm(self.server, name, branch, last_of(run), at)


def copies_of(
    wiring: Wiring, server: str, target: Destination, *, check: Check, moved: Callable[[int], None] = lambda _size: None
) -> LogCopies:
    """As the configuration of the target says."""
    return LogCopies(
        wiring.catalog,
        wiring.clock,
        server,
        target,
        wiring.settings.destination(target.name).takes_pieces,
        check,
        moved,
    )


def is_whole(record: SegmentRecord) -> bool:
    """Is this segment all of a binary log file that is complete, not a piece of one that grows?"""
    return record.key.start == 0 and record.segment.is_final


def _is_at(record: SegmentRecord, names: Collection[str]) -> bool:
    return any(copy.is_complete for name, copy in record.destinations.items() if name in names)


def _is_older(record: SegmentRecord, name: str, names: Collection[str]) -> bool:
    """Was it stored elsewhere once more since it was copied? A piece that turned out to be all of its file was."""
    return is_whole(record) and record.destinations[name].stored_at < max(
        (copy.stored_at for other, copy in record.destinations.items() if other in names and copy.is_complete),
        default=record.destinations[name].stored_at,
    )


def _covers(mine: Run, run: Run) -> bool:
    return first_of(mine) <= last_of(run) <= last_of(mine)
