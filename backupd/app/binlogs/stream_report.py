"""What a stream writes into the catalog: how far each destination has the binary log, branches, gaps, a row of status
every few seconds, and one event for each incident.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import ACKNOWLEDGE, DESTINATION, PURGE, SPOOL, STREAM
from backupd.app.context.incidents import Incidents
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import owner
from backupd.binlog.acknowledgement import Evidence
from backupd.binlog.stream_status import NO_ROOM, StreamEvent, StreamEventKind, StreamState, StreamStatus
from backupd.catalog.session import Catalog
from backupd.model.binlog import Branch, BranchReason, FilePosition, Gap, Segment, SegmentKey
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Severity
from backupd.model.text import Clock, format_duration, format_size, format_time
from backupd.recovery.runs import without

if TYPE_CHECKING:
    from backupd.app.runtime.child_process import CatalogWriter
    from backupd.binlog.archiver import Behind
    from backupd.binlog.spool_files import Spool
    from policies.policy import Policy

OUT_OF_REACH = timedelta(minutes=1)
"""A server that cannot be reached for so long is an incident; a restart of it takes less."""
UNACKNOWLEDGED = timedelta(seconds=15)
"""Commits that do not wait for so long are an incident, where the policy asks for that. A stream that begins anew, and
a reconnection, take less."""
LATE = timedelta(minutes=5)
"""A destination that is behind for so long is an incident, where no objective says less."""
_CHECKPOINTS = 6
SUBJECT = "stream"
SILENT = timedelta(minutes=1)
"""A stream writes a row every few seconds."""
STOPPED = "stopped"
"""The state in the last row of a process that ended well; all others are those of ``StreamState``."""

_REASONS: Mapping[BranchReason, str] = {
    BranchReason.FIRST: "its binary log is archived from here",
    BranchReason.RESTORE: "the server was restored",
    BranchReason.RESET: "the server's binary logs were reset",
    BranchReason.FAILOVER: "another server answers at its address",
    BranchReason.NODE_CHANGED: "another node of the same Galera cluster answers",
    BranchReason.LOST_TAIL: "the server has lost the end of its binary log, which is archived",
    BranchReason.UNKNOWN: "the server's binary logs do not continue the archived ones",
}


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A destination has everything that was committed by ``at``: the log up to ``position``."""

    branch: str
    position: FilePosition
    at: datetime


class CatalogRecorder:
    """The archive's ``Recorder``. Raises CatalogError where the catalog takes nothing; the archive asks again."""

    def __init__(self, server: str, writer: CatalogWriter, clock: Clock) -> None:
        self._server, self._writer, self._clock = server, writer, clock
        self._lock = threading.Lock()
        self._confirmed: dict[str, Confirmed] = {}
        self._written: dict[str, Confirmed] = {}
        self._lags: dict[str, tuple[float, datetime]] = {}

    # -- what the archive reports

    def branch_stored(self, branch: Branch) -> None:
        """Write down a branch of the archive, and an event for a new one. Raises CatalogError."""
        now = self._clock()

        def write(catalog: Catalog) -> None:
            known = catalog.binlogs.branches(branch.server)
            if all(one.id != branch.id for one in known):
                catalog.events.add(_branch_event(branch, known, now))
            catalog.binlogs.add_branch(branch)

        self._writer.ask(write)

    def segment_stored(self, segment: Segment, destination: str, stored_bytes: int, at: datetime) -> None:
        """Write down a segment of ``stored_bytes`` at ``destination``, and close the gaps that it fills. Raises
        CatalogError."""
        now = self._clock()

        def write(catalog: Catalog) -> None:
            catalog.binlogs.add_segment(segment, destination, stored_bytes, at)
            if segment.is_final:
                _close_gap(catalog, segment, now)

        self._writer.ask(write)

    def segments_dropped(self, server: str, keys: Sequence[SegmentKey], destination: str) -> None:
        """Forget segments that ``destination`` has no more: a larger one holds what they held. Raises CatalogError."""
        self._writer.ask(lambda catalog: catalog.binlogs.drop_segments(server, keys, destination))

    def confirmed(self, destination: str, branch: str, position: FilePosition, at: datetime) -> None:
        """Kept until ``flush``: on an idle server this is all that ever happens. An older moment adds nothing,
        unless the known one has not come yet by the clock now: then it was taken from a clock that was ahead."""
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
            self._confirmed[destination] = Confirmed(branch, position, at)

    def gap(self, gap: Gap) -> None:
        """Write down binary logs that are lost, and an event for a new gap. Raises CatalogError."""
        event = _gap_event(gap, self._clock())

        def write(catalog: Catalog) -> None:
            known = {
                (one.branch, one.destination, one.after.file, one.after.pos) for one in catalog.binlogs.gaps(gap.server)
            }
            if (gap.branch, gap.destination, gap.after.file, gap.after.pos) not in known:
                catalog.events.add(event)
            catalog.binlogs.add_gap(gap)

        self._writer.ask(write)

    # -- for the stream

    def standing(self) -> Mapping[str, Confirmed]:
        """How far each destination is confirmed, as far as this process knows."""
        with self._lock:
            return dict(self._confirmed)

    def flush(self) -> None:
        """Write down how far the destinations are, and their largest lag since the last call, in seconds. Raises
        CatalogError."""
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
                catalog.binlogs.confirm(self._server, name, one.branch, one.position, one.at)
            for name, (seconds, at) in lags.items():
                catalog.lags.note(self._server, name, seconds, at)

        if not due and not lags:
            return
        try:
            self._writer.ask(write)
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
            f"the spool of {branch.server} was replaced: archiving restarted at {branch.file(branch.first_number)}, "
            "and transactions before it may be missing",
            server=branch.server,
            subject=branch.id,
            detail=branch.note,
            hint="take a full backup now: earlier backups cannot be rolled forward past this point",
        )
    known = branch.parent is None or branch.fork is not None
    is_node = branch.reason is BranchReason.NODE_CHANGED  # one history, which goes on at a known GTID
    why = branch.note if branch.reason is BranchReason.UNKNOWN and known else _REASONS[branch.reason]
    return Event(
        now,
        "branch-begun",
        Severity.INFO if branch.reason is BranchReason.FIRST or (is_node and known) else Severity.WARNING,
        f"a branch of {branch.server}'s history begins with {branch.file(branch.first_number)}: {why}",
        server=branch.server,
        subject=branch.id,
        detail=branch.note,
        hint="" if known else "no restore can cross it: take a full backup now, so that this branch has one",
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
                f"no binary log of {segment.server} is missing any more: {segment.file} is now archived completely",
                server=segment.server,
                subject=segment.branch,
            )
        )


def _gap_event(gap: Gap, now: datetime) -> Event:
    until = f"{gap.before.file}:{gap.before.pos}" if gap.before is not None else "the end of the archive"
    times = " to ".join(format_time(moment) if moment else "an unknown moment" for moment in (gap.from_at, gap.to_at))
    return Event(
        now,
        "binlog-gap",
        Severity.ERROR,
        f"binary logs of {gap.server} are missing between {gap.after.file}:{gap.after.pos} and {until}: {gap.reason}",
        server=gap.server,
        subject=gap.branch,
        detail=f"no moment in between can be recovered: {times}",
        hint="take a full backup now: later transactions are then recoverable again",
    )


class Follower(Protocol):
    """Copies what is stored to ``destination``, one of the others. ``standing``: ``behind_since``, ``error``."""

    destination: str

    def standing(self) -> Mapping[str, Any]:
        """As a stream's row reports a destination."""

    def start(self) -> None:
        """Begin to copy."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for ``timeout`` seconds at most."""


class StreamReport:
    """``heard`` from any thread, everything else from one."""

    def __init__(
        self,
        server: ServerSettings,
        writer: CatalogWriter,
        recorder: CatalogRecorder,
        spool: Spool,
        clock: Clock,
        followers: Sequence[Follower] = (),
    ) -> None:
        self.followers = tuple(followers)
        self._server, self._writer, self._recorder, self._spool = server, writer, recorder, spool
        self._clock = clock
        self._started_at = clock()
        self._incidents = Incidents(writer.catalog)
        self._limit = behind_limit(server.policy)
        self._purge: StreamEvent | None = None
        self._missed_since: datetime | None = None
        """Since when RPO 0 is not claimed, by the clock of this host: the evidence has the server's."""
        self._answered: tuple[datetime | None, datetime | None] | None = None
        """When commits were answered without us, as the evidence says, and by the clock of this host."""
        self._lock = threading.Lock()

    def heard(self, event: StreamEvent) -> None:
        """Of what happens to the stream: the danger of a purge has no state that could be asked for later."""
        if event.kind in (StreamEventKind.PURGE_ALARM, StreamEventKind.PURGE_OVER):
            with self._lock:
                self._purge = event

    def beat(self, status: StreamStatus, behind: Mapping[str, Behind], troubles: Mapping[str, str]) -> None:
        """Write everything down. A catalog that takes nothing is reported in the log, once, by the catalog writer."""
        now = self._clock()
        holds, looked = self._conditions(status, behind, now)
        document = self._document(status, behind, troubles, now)
        try:
            self._recorder.flush()
            self._writer.ask(lambda catalog: catalog.binlogs.set_stream_state(self._server.name, document, now))
            self._writer.ask(lambda _catalog: self._incidents.settle(now, *holds, looked=looked))
        except BackupdError:
            return  # it was logged, and the next report holds all of it again

    def over(self, status: StreamStatus, behind: Mapping[str, Behind]) -> None:
        """The process ends."""
        now = self._clock()
        document = {**self._document(status, behind, {}, now), "state": STOPPED, "ended": str(status.state)}
        try:
            self._recorder.flush()
            self._writer.ask(lambda catalog: catalog.binlogs.set_stream_state(self._server.name, document, now))
        except BackupdError as error:
            say(
                "stream-trouble",
                f"its last status was not recorded: {error.message}",
                level=logging.WARNING,
                server=self._server.name,
            )

    # -- the row

    def _document(
        self, status: StreamStatus, behind: Mapping[str, Behind], troubles: Mapping[str, str], now: datetime
    ) -> dict[str, Any]:
        standing, policy = self._recorder.standing(), self._server.policy.binlog
        destinations = {}
        for name in self._server.required:
            one, confirmed = behind.get(name), standing.get(name)
            destinations[name] = {
                "bytes_behind": one.bytes if one else None,
                "behind_since": format_time(one.since) if one and one.since else None,
                "error": (one.error if one else "") or troubles.get(name, ""),
                "confirmed_at": format_time(confirmed.at) if confirmed else None,
                "lag_seconds": round(max(0.0, (now - confirmed.at).total_seconds()), 3) if confirmed else None,
            }
        destinations |= {
            follower.destination: {
                "bytes_behind": None,
                "confirmed_at": None,
                "lag_seconds": None,
                **follower.standing(),
            }
            for follower in self.followers
        }
        return {
            **status.as_json(),
            "pid": os.getpid(),
            "owner": owner(),
            "started_at": format_time(self._started_at),
            "spool_bytes": self._spool.bytes(),
            "max_spool_bytes": policy.max_spool if policy is not None else 0,
            "rss_bytes": _resident(),
            "destinations": destinations,
            "trouble": troubles.get("", ""),
        }

    # -- the incidents

    def _conditions(
        self, status: StreamStatus, behind: Mapping[str, Behind], now: datetime
    ) -> tuple[list[Condition], dict[Key, str]]:
        """What is broken now; what was looked at, with the words for the case that it is well."""
        name = self._server.name
        stream, spool, purging = (Key(kind, name, SUBJECT) for kind in (STREAM, SPOOL, PURGE))
        holds: list[Condition] = []
        looked: dict[Key, str] = {}
        lost = status.state is StreamState.WAITING and now - status.since >= OUT_OF_REACH
        if status.state is StreamState.FAILED or lost:
            holds.append(
                Condition(
                    stream,
                    Severity.ERROR,
                    f"the binary log of {name} is not streamed: {status.error}",
                    hint=f"check that the server is up; `backupd check {name}` lists missing privileges and programs. "
                    "backupd retries continuously, and continues where the stream stopped",
                )
            )
        elif status.state in (StreamState.STREAMING, StreamState.PAUSED):
            looked[stream] = f"the binary log of {name} is streamed again"
        if status.state is StreamState.PAUSED:
            hint = "find out why a destination does not accept them (backupd binlog status), or raise binlog.max_spool"
            if status.error == NO_ROOM:
                hint = "free space there; check what else is stored in it"
            holds.append(
                Condition(
                    spool,
                    Severity.ERROR,
                    f"the spool of {name} is full, so its binary log is no longer copied: "
                    f"{format_size(self._spool.bytes())} wait for a destination",
                    status.error,
                    f"{hint}; the server must keep its binary log until then; copying continues when there is room",
                )
            )
        elif status.state is StreamState.STREAMING:
            looked[spool] = f"the spool of {name} has room again"
        with self._lock:
            purge = self._purge
        if purge is not None and purge.kind is StreamEventKind.PURGE_ALARM:
            holds.append(Condition(purging, Severity.ERROR, purge.message, purge.detail, purge.hint))
        elif purge is not None or status.state is StreamState.STREAMING:
            looked[purging] = purge.message if purge else f"no binary log of {name} is about to be lost"
        if status.acknowledgement is not None:
            self._acknowledged(status.acknowledgement, now, holds, looked)
        for destination, one in behind.items():
            lacking = Key(DESTINATION, name, destination)
            if one.since is None:
                looked[lacking] = f"{destination} has all binary logs of {name} again"
            elif now - one.since >= self._limit:
                late = format_duration((now - one.since).total_seconds())
                holds.append(
                    Condition(
                        lacking,
                        Severity.ERROR,
                        f"{destination} lacks binary logs of {name} since {late}: {format_size(one.bytes)} wait in the "
                        "spool",
                        one.error,
                        "nothing is lost: backupd stores them when the destination accepts them; until then they are "
                        "only on this host",
                    )
                )
        return holds, looked

    def _acknowledged(self, evidence: Evidence, now: datetime, holds: list[Condition], looked: dict[Key, str]) -> None:
        name = self._server.name
        key, lost_at = Key(ACKNOWLEDGE, name, SUBJECT), evidence.lost_at or self._started_at
        self._missed_since = (self._missed_since or now) if evidence.why else None
        missed = self._missed_since is not None and now - min(lost_at, self._missed_since) >= UNACKNOWLEDGED
        if self._answered is None or self._answered[0] != evidence.answered_at:
            self._answered = evidence.answered_at, evidence.answered_at if self._answered is None else now
        lately = (answered_at := self._answered[1]) is not None and now - answered_at < SILENT
        if lately or missed:
            since = evidence.answered_at if lately and not evidence.why else lost_at
            holds.append(
                Condition(
                    key,
                    Severity.ERROR,
                    f"RPO 0 does not hold for {name} since {format_time(since or lost_at)}: "
                    f"{evidence.why or 'commits were answered without an acknowledgement'}",
                    "commits that the server answers meanwhile are lost if it is lost before they are copied",
                    f"`backupd check {name}` names what to change at the server; backupd connects again by itself",
                )
            )
        elif not evidence.why:
            looked[key] = f"every commit of {name} waits again until backupd has it"


def behind_limit(policy: Policy) -> timedelta:
    """How long a destination may lack something before somebody has to know."""
    checkpoint = policy.binlog.checkpoint if policy.binlog is not None else timedelta(0)
    return max(policy.objectives.rpo or LATE, _CHECKPOINTS * checkpoint)


def _resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
