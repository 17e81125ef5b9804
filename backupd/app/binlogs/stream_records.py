"""What a stream and its archive have done, written into the catalog; and the events that tell people of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from backupd.app.runtime.catalog_writer import Scribe
from backupd.catalog.session import Catalog
from backupd.model.binlog import Branch, BranchReason, Gap, Segment, SegmentKey
from backupd.model.event import Event, Severity
from backupd.model.text import Clock, format_time
from backupd.recovery.runs import without

CONFIRMATIONS = 5.0
"""Seconds between two writings of how far a destination is confirmed."""

_REASONS: Mapping[BranchReason, str] = {
    BranchReason.FIRST: "its binary log is archived from here on",
    BranchReason.RESTORE: "the server was restored",
    BranchReason.RESET: "the server's binary logs were reset",
    BranchReason.FAILOVER: "another server answers in its place",
    BranchReason.LOST_TAIL: "the server has lost the end of its binary log, which is archived",
    BranchReason.UNKNOWN: "the server's binary logs do not go on from those that were archived",
}


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A destination has everything that was committed by ``at``: the log up to ``place`` (file number, position)."""

    branch: str
    place: tuple[int, int]
    at: datetime


class CatalogRecorder:
    """The archive's ``Recorder``. Raises CatalogError where the catalog takes nothing; the archive asks again."""

    def __init__(self, server: str, scribe: Scribe, clock: Clock) -> None:
        self._server, self._scribe, self._clock = server, scribe, clock
        self._lock = threading.Lock()
        self._confirmed: dict[str, Confirmed] = {}
        self._written: dict[str, Confirmed] = {}
        self._lags: dict[str, tuple[float, datetime]] = {}

    # -- what the archive tells

    def branch_stored(self, branch: Branch) -> None:
        now = self._clock()

        def write(catalog: Catalog) -> None:
            known = catalog.binlogs.branches(branch.server)
            if all(one.id != branch.id for one in known):
                catalog.events.add(_branch_event(branch, known, now))
            catalog.binlogs.add_branch(branch)

        self._scribe.ask(write)

    def segment_stored(self, segment: Segment, destination: str, stored_bytes: int, at: datetime) -> None:
        now = self._clock()

        def write(catalog: Catalog) -> None:
            catalog.binlogs.add_segment(segment, destination, stored_bytes, at)
            if segment.is_final:
                _close_gap(catalog, segment, now)

        self._scribe.ask(write)

    def segments_dropped(self, server: str, keys: Sequence[SegmentKey], destination: str) -> None:
        self._scribe.ask(lambda catalog: catalog.binlogs.drop_segments(server, keys, destination))

    def confirmed(self, destination: str, branch: str, place: tuple[int, int], at: datetime) -> None:
        """Kept until ``flush``: on an idle server this is all that ever happens. An older moment tells nothing new, but
        for one of which the clock now says that it has not come yet: then that was told by a clock that was ahead."""
        now = self._clock()
        with self._lock:
            before = self._confirmed.get(destination)
            if before is not None and before.branch == branch:
                if before.at >= at and before.at <= now:
                    return
                # Until this moment it was as far behind as the last confirmation is old.
                seconds = max(0.0, (now - before.at).total_seconds())
                if seconds > self._lags.get(destination, (0.0, now))[0]:
                    self._lags[destination] = (seconds, now)
            self._confirmed[destination] = Confirmed(branch, place, at)

    def gap(self, gap: Gap) -> None:
        event = _gap_event(gap, self._clock())

        def write(catalog: Catalog) -> None:
            known = {
                (one.branch, one.destination, one.after.file, one.after.pos) for one in catalog.binlogs.gaps(gap.server)
            }
            if (gap.branch, gap.destination, gap.after.file, gap.after.pos) not in known:
                catalog.events.add(event)
            catalog.binlogs.add_gap(gap)

        self._scribe.ask(write)

    # -- for the stream

    def standing(self) -> Mapping[str, Confirmed]:
        """How far each destination is confirmed, as far as this process knows."""
        with self._lock:
            return dict(self._confirmed)

    def flush(self) -> None:
        """Write down how far the destinations are, and how far behind they were at worst. Raises CatalogError."""
        with self._lock:
            due = {name: one for name, one in self._confirmed.items() if self._written.get(name) != one}
            lags, self._lags = self._lags, {}

        now = self._clock()

        def write(catalog: Catalog) -> None:
            for name, one in due.items():
                if name not in self._written:  # the first of this process: what the one before it knew is the start
                    before = [
                        run.confirmed_at
                        for run in catalog.binlogs.runs(self._server, name)
                        if run.branch == one.branch and run.confirmed_at is not None
                    ]
                    if before:
                        catalog.lags.note(self._server, name, max(0.0, (now - max(before)).total_seconds()), now)
                catalog.binlogs.confirm(self._server, name, one.branch, one.place, one.at)
            for name, (seconds, at) in lags.items():
                catalog.lags.note(self._server, name, seconds, at)

        if not due and not lags:
            return
        try:
            self._scribe.ask(write)
        except BaseException:
            with self._lock:
                for name, lag in lags.items():
                    self._lags[name] = max(lag, self._lags.get(name, lag))
            raise
        self._written |= due


def _branch_event(branch: Branch, others: Sequence[Branch], now: datetime) -> Event:
    """``others``: what the catalog knows of the server already."""
    if branch.reason is BranchReason.FIRST and any(one.noticed_at < branch.noticed_at for one in others):
        return Event(
            now,
            "branch-begun",
            Severity.WARNING,
            f"the binary log of {branch.server} is archived anew from {branch.file(branch.first_number)} on: its spool "
            "is another one than before, and nothing shows that no transaction is missing in between",
            server=branch.server,
            subject=branch.id,
            detail=branch.note,
            hint="take a full backup now: nothing before is rolled forward past this point",
        )
    known = branch.parent is None or branch.fork is not None
    why = branch.note if branch.reason is BranchReason.UNKNOWN and known else _REASONS[branch.reason]
    return Event(
        now,
        "branch-begun",
        Severity.INFO if branch.reason is BranchReason.FIRST else Severity.WARNING,
        f"a branch of {branch.server}'s history begins with {branch.file(branch.first_number)}: {why}",
        server=branch.server,
        subject=branch.id,
        detail=branch.note,
        hint=""
        if known
        else "nothing is recovered across it: take a full backup now, so that there is one on this branch",
    )


def _close_gap(catalog: Catalog, segment: Segment, now: datetime) -> None:
    """A file that was given up is archived whole after all: what was recorded as missing behind it is there."""
    gaps = catalog.binlogs.gaps(segment.server)
    for gap in gaps:
        left = without(gap, segment)
        if left == gap:
            continue
        catalog.binlogs.remove_gap(gap)
        if left is not None:
            catalog.binlogs.add_gap(left)
    rest = catalog.binlogs.gaps(segment.server)
    if len(rest) < len(gaps) and all(gap.branch != segment.branch for gap in rest):
        catalog.events.add(
            Event(
                now,
                "binlog-gap-closed",
                Severity.INFO,
                f"no binary log of {segment.server} is missing any more: {segment.file} is archived whole after all",
                server=segment.server,
                subject=segment.branch,
            )
        )


def _gap_event(gap: Gap, now: datetime) -> Event:
    until = f"{gap.before.file}:{gap.before.pos}" if gap.before is not None else "the end of what there is"
    times = " to ".join(format_time(moment) if moment else "an unknown moment" for moment in (gap.from_at, gap.to_at))
    return Event(
        now,
        "binlog-gap",
        Severity.ERROR,
        f"binary logs of {gap.server} are missing between {gap.after.file}:{gap.after.pos} and {until}: {gap.reason}",
        server=gap.server,
        subject=gap.branch,
        detail=f"no moment in between can be recovered: {times}",
        hint="take a full backup now: what comes after it is recoverable again",
    )
