"""The catalog's rows of one server's binary logs, brought into line with what is at a destination.

What is stored is the truth. What the catalog lacks is added first; only then goes what is not there any more:

* a piece that lies within a larger segment that is there was replaced by it, and goes at once;
* anything else goes, and leaves a gap where logs before and after it are there; but while a stream is at work not
  before its row is ``YOUNG`` old: another process may just be moving it. Whoever reconciles again later finishes that.

Branches are only added. Their descriptions are never removed, and one without logs still shows that a history went on.

A stream records what it stores in the catalog once. What a catalog that was lost, or restored from an older copy, lacks
of it is filled in when the stream begins: in a thread with a connection of its own, so that neither the copying nor the
archive ever waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import merge
from itertools import groupby, islice

from backupd.app.context.logging_setup import say
from backupd.binlog.spool_files import Spool
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.binlog import Branch, BranchReason, Gap, Run, Segment, SegmentKey, SegmentRecord
from backupd.model.errors import BackupdError, DamagedError, DestinationError, NotFoundError, ObjectMissingError
from backupd.model.event import Event, Severity
from backupd.model.server_facts import Position
from backupd.model.text import Clock
from backupd.recovery.runs import file_position, first_of, last_of
from backupd.transfer import log_segments
from backupd.transfer.records.segment_documents import SegmentHeader
from storage import layout
from storage.destination import Destination

YOUNG = timedelta(minutes=5)
"""A row that was written within that time stays while a stream is at work."""
_BATCH = 1_000
"""Segments that are looked at in one go: what bounds memory."""
_GONE = "the binary log is missing at the destination; backupd did not remove it"


@dataclass(frozen=True, slots=True)
class Settled:
    """What was done: ``added`` segments and ``branches``, ``replaced`` rows of pieces, ``gone``: what was forgotten;
    ``young``: how many rows stay for now, though nothing of them is there."""

    added: int = 0
    branches: int = 0
    replaced: int = 0
    gone: tuple[SegmentKey, ...] = ()
    young: int = 0

    @property
    def is_nothing(self) -> bool:
        """Did catalog and destination agree before?"""
        return not (self.added or self.branches or self.replaced or self.gone)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Of ``server`` at ``destination``. ``check`` is called now and then and may raise, to end it."""

    catalog: Catalog
    destination: Destination
    server: str
    clock: Clock
    check: Callable[[], None] = lambda: None

    def settle(self, *, at_work: bool) -> Settled:
        """``at_work``: does a stream of this server write there now? Raises DestinationError, and CatalogError."""
        self._be_there()
        before = {branch.id for branch in self.catalog.binlogs.branches(self.server)}
        for branch in self.unknown_branches():
            self.catalog.binlogs.add_branch(branch)
        added = 0
        unknown = self.unknown()
        while batch := list(islice(unknown, _BATCH)):
            self.check()
            added += self._adopt(batch)
        limit = self.clock() - YOUNG if at_work else None
        missing = [record.key for record in self.missing()]
        replaced = {key for key in missing if self.is_replaced(key)}
        rest = [key for key in missing if key not in replaced]
        self._be_there()  # one that was unmounted meanwhile has lost nothing
        self.check()
        name = self.destination.name
        dropped = self.catalog.binlogs.drop_segments(self.server, sorted(replaced), name)
        gone = self.catalog.binlogs.drop_segments(self.server, rest, name, stored_by=limit)
        self._set_gaps(gone)
        known = {branch.id for branch in self.catalog.binlogs.branches(self.server)}
        return Settled(added, len(known - before), len(dropped), gone, len(rest) - len(gone))

    # -- what both sides know

    def unknown_branches(self) -> list[Branch]:
        """Described at the destination, and not in the catalog."""
        known = {branch.id for branch in self.catalog.binlogs.branches(self.server)}
        return [
            branch
            for branch in log_segments.branches(self.destination, self.server)
            if isinstance(branch, Branch) and branch.id not in known
        ]

    def unknown(self) -> Iterator[SegmentKey]:
        """Segments at the destination of which the catalog has no row for it."""
        for branch, here in groupby(
            (key for _server, key in log_segments.keys(self.destination, self.server)), key=lambda key: key.branch
        ):
            for key, stored, recorded in _compared(here, self._known(branch)):
                if stored and not recorded:
                    yield key

    def missing(self) -> Iterator[SegmentRecord]:
        """Segments that the catalog expects at the destination and that are not there; those it calls damaged, too."""
        for branch in self.catalog.binlogs.branches(self.server):
            prefix = layout.branch_folder(self.server, branch.id)
            here = (key for _server, key in log_segments.keys(self.destination, prefix=prefix))
            for key, stored, recorded in _compared(here, self._known(branch.id)):
                if recorded and not stored and not self.is_there(key):
                    yield from (
                        record
                        for record in self._around(key)
                        if record.key == key and self.destination.name in record.destinations
                    )

    def header(self, key: SegmentKey) -> SegmentHeader | None:
        """None for one that is gone meanwhile, or damaged: fsck reports that."""
        try:
            return log_segments.load_header(self.destination, self.server, key)
        except (NotFoundError, DamagedError):
            return None

    def is_there(self, key: SegmentKey) -> bool:
        """Does the destination hold the segment of this key? Raises DestinationError."""
        try:
            self.destination.stat(layout.segment_key(self.server, key))
        except ObjectMissingError:
            return False
        return True

    def is_replaced(self, key: SegmentKey) -> bool:
        """Is a larger segment there that holds all of it?"""
        return any(
            other != key and other.start <= key.start and key.end <= other.end
            for other in log_segments.of_file(self.destination, self.server, key.branch, key.number)
        )

    def is_young(self, record: SegmentRecord, now: datetime) -> bool:
        """Was it stored at the destination less than ``YOUNG`` before ``now``?"""
        copy = record.destinations.get(self.destination.name)
        return copy is not None and copy.stored_at >= now - YOUNG

    def _around(self, key: SegmentKey) -> tuple[SegmentRecord, ...]:
        """What the catalog knows of the same bytes."""
        return self.catalog.binlogs.segments(
            self.server, key.branch, from_position=(key.number, key.start), to_position=(key.number, key.end)
        )

    def _known(self, branch: str) -> Iterator[SegmentKey]:
        return (
            record.key
            for record in self.catalog.binlogs.each_segment(self.server, branch)
            if self.destination.name in record.destinations
        )

    def _be_there(self) -> None:
        if not self.destination.is_initialised():
            raise DestinationError(f"destination {self.destination.name} is empty", hint="check that it is mounted")

    # -- what is done

    def _adopt(self, keys: Iterable[SegmentKey]) -> int:
        headers = [header for key in keys if (header := self.header(key)) is not None]
        known = {branch.id for branch in self.catalog.binlogs.branches(self.server)}
        for header in headers:
            if header.segment.branch not in known:
                known.add(header.segment.branch)
                self.catalog.binlogs.add_branch(self._stand_in(header.segment))
        self.catalog.binlogs.add_segments(
            [(header.segment, header.stored_bytes) for header in headers], self.destination.name, self.clock()
        )
        return len(headers)

    def _stand_in(self, segment: Segment) -> Branch:
        """For a branch whose description is lost everywhere: its logs can be replayed, but not across its beginning."""
        return Branch(
            segment.server,
            segment.branch,
            segment.first_at or self.clock(),
            BranchReason.UNKNOWN,
            "",
            segment.flavour,
            segment.file.rpartition(".")[0],
            segment.number,
            note="its record was lost; imported from its segments",
        )

    def _set_gaps(self, gone: Sequence[SegmentKey]) -> None:
        """Those that are closed now go, and those that ``gone`` leaves come."""
        binlogs, destination = self.catalog.binlogs, self.destination.name
        gaps = [gap for gap in binlogs.gaps(self.server) if gap.destination == destination]
        if not (gaps or gone):
            return
        runs = binlogs.runs(self.server, destination)
        for gap in gaps:
            if _is_closed(gap, runs):
                binlogs.remove_gap(gap)
        branches = {branch.id: branch for branch in binlogs.branches(self.server)}
        for key in gone:
            here = [run for run in runs if run.branch == key.branch]
            before = [run for run in here if last_of(run) <= (key.number, key.start)]
            after = [run for run in here if first_of(run) >= (key.number, key.end) or first_of(run)[0] > key.number]
            if before and after:  # else what is left only begins later or ends earlier
                branch, one, other = branches[key.branch], before[-1], after[0]
                binlogs.add_gap(
                    Gap(
                        self.server,
                        key.branch,
                        destination,
                        Position(branch.file(one.last_number), one.last_pos, one.gtids_after),
                        Position(branch.file(other.first_number), other.first_pos, other.gtids_before),
                        one.last_at,
                        other.first_at,
                        _GONE,
                        self.clock(),
                    )
                )


def _is_closed(gap: Gap, runs: Iterable[Run]) -> bool:
    after, before = file_position(gap.after), file_position(gap.before) if gap.before is not None else None
    return (
        after is not None
        and before is not None
        and any(run.branch == gap.branch and first_of(run) <= after and before <= last_of(run) for run in runs)
    )


def _compared(here: Iterable[SegmentKey], known: Iterable[SegmentKey]) -> Iterator[tuple[SegmentKey, bool, bool]]:
    """Each key of one branch with whether it is stored and whether it is recorded. Both are in the order of files; no
    more than one file's are in memory."""
    both = merge(((key, True) for key in here), ((key, False) for key in known), key=lambda one: one[0].number)
    for _number, group in groupby(both, key=lambda one: one[0].number):
        sides: tuple[set[SegmentKey], set[SegmentKey]] = (set(), set())
        for key, is_here in group:
            sides[0 if is_here else 1].add(key)
        for key in sorted(sides[0] | sides[1]):
            yield key, key in sides[0], key in sides[1]


_LOOK = 0.2
"""Seconds between two looks whether the archive has recorded its branches."""
_AGAIN = timedelta(seconds=30)
"""After something failed."""


class _OverError(Exception):
    """The process ends."""


@dataclass
class CatalogBackfill:
    """``destinations`` by name. ``stop`` ends it between two batches."""

    server: str
    url: str
    destinations: Mapping[str, Destination]
    spool: Spool
    stop: threading.Event
    clock: Clock
    _complaints: set[str] = field(default_factory=set)
    _tried: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="catalog backfill", daemon=True)

    def start(self) -> None:
        """Begin in a thread of its own."""
        self._thread.start()

    def join(self, timeout: float) -> None:
        """After ``stop`` was set."""
        self._thread.join(timeout)

    @property
    def was_tried(self) -> bool:
        """Was each destination compared once, or found out of reach?"""
        return self._tried.is_set()

    def _run(self) -> None:
        left = dict(self.destinations)
        while left and not self.stop.is_set():
            wait = _AGAIN
            try:
                with open_catalog(self.url, make=False) as catalog:
                    self._await_branches(catalog)
                    if self._round(catalog, left):
                        wait = YOUNG
            except BackupdError as error:
                self._complain(str(error))
            except _OverError:
                break
            self._tried.set()
            if left:
                self.stop.wait(wait.total_seconds())
        self._tried.set()

    def _round(self, catalog: Catalog, left: dict[str, Destination]) -> bool:
        """Takes those out of ``left`` that are through. Are the others only waiting for rows to be old enough?"""
        failed = False
        for name, destination in list(left.items()):
            try:
                found = Reconciliation(catalog, destination, self.server, self.clock, self._check).settle(at_work=True)
            except BackupdError as error:
                failed = True
                self._complain(f"{name}: {error}")
                continue
            self._report(catalog, name, found)
            if not found.young:
                del left[name]
        return not failed

    def _await_branches(self, catalog: Catalog) -> None:
        """The archive records those in the spool, and the event with them."""
        while {branch.id for branch in self.spool.branches()} - {
            branch.id for branch in catalog.binlogs.branches(self.server)
        }:
            self._check()
            self.stop.wait(_LOOK)

    def _check(self) -> None:
        if self.stop.is_set():
            raise _OverError

    def _complain(self, why: str) -> None:
        """Once."""
        if why not in self._complaints:
            self._complaints.add(why)
            say(
                "catalog-not-compared",
                f"the catalog's records of binary logs could not be compared with the archive: {why}",
                level=logging.WARNING,
                server=self.server,
            )

    def _report(self, catalog: Catalog, destination: str, found: Settled) -> None:
        if found.is_nothing:
            return
        forgotten = found.replaced + len(found.gone)
        say(
            "catalog-compared",
            f"{destination}: the catalog added {found.added} segments and {found.branches} branches found there, and "
            f"removed {forgotten} that are missing",
            server=self.server,
        )
        if found.gone:
            catalog.events.add(
                Event(
                    self.clock(),
                    "binlog-missing",
                    Severity.WARNING,
                    f"{len(found.gone)} archived binary logs of {self.server} are missing at destination "
                    f"{destination}; the catalog no longer lists them there",
                    server=self.server,
                    subject=destination,
                    detail="\n".join(
                        f"{key.branch}: file {key.number}, bytes {key.start} to {key.end}" for key in found.gone[:20]
                    ),
                    hint=f"`backupd timeline {self.server}` shows what is recoverable. This is normal if they had "
                    "expired and the catalog comes from an older copy",
                )
            )
