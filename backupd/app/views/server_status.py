"""What is shown of one server at a glance. Values; ``backupd.app.views.overview`` makes them.

The timeline of a server, and how each server stands by it, from what the catalog holds. Reads no destination.

Making a timeline takes milliseconds, and there may be a thousand servers, so what was found is kept while nothing
changed that it was made of. Between two looks only the end of the archived binary log moves on. That is followed
without a new look: as long as no backup, copy, run or gap came or went, the recoverable past goes on to what was
confirmed last.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from backupd.app.binlogs.status import one_line, stream_troubles
from backupd.app.binlogs.stream_report import behind_limit
from backupd.app.binlogs.targets import history
from backupd.app.context.destination_identity import identities
from backupd.app.context.logging_setup import say
from backupd.app.context.server_identity import kept_apart
from backupd.app.context.settings import ServerSettings, Settings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.protection import is_protected, protection_of, sites_of, verified
from backupd.app.restores.usable_backups import measured_rates, not_believed, within_reach
from backupd.app.schedule.calendar import Leg, due_times, start_of
from backupd.app.views.objectives import first_to_come
from backupd.catalog.overview import Marker
from backupd.catalog.session import Catalog
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Hold
from backupd.model.binlog import Gap
from backupd.model.document import HIDDEN, Document, computed, json_key, made_of
from backupd.model.errors import BackupdError, CatalogError, NotFoundError, RefusedError
from backupd.model.event import Incident
from backupd.model.job import JobKind, JobRecord
from backupd.model.proof import PROVED, RESTORED
from backupd.model.text import format_time, parse_time
from backupd.recovery.timeline import Objectives, Reach, Timeline
from backupd.recovery.timeline import timeline as made
from backupd.recovery.windows import nobody_knows
from policies.lint import streams
from restore.planning.planner import Preferences, make_plan
from restore.planning.target import Latest, Target


class Status(StrEnum):
    """``good``: could be recovered as promised. ``warning``: it could, and somebody should look. ``bad``: it could not,
    or not as promised."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"

    @property
    def rank(self) -> int:
        """0 for good, 2 for bad: the worst has the highest."""
        return list(Status).index(self)


@dataclass(frozen=True, slots=True)
class Reason(Document):
    """Why a status is not ``good``: what is wrong in one sentence, and the next step."""

    status: Status
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class LastBackup(Document):
    """The newest one of its kind (and, of logical ones, of its set of tables) that is complete."""

    id: str
    kind: BackupKind
    table_set: str = field(metadata=json_key("set"))
    started_at: datetime
    finished_at: datetime
    bytes_source: int
    bytes_stored: int
    bytes_new: int
    tables_missing: int = 0

    @property
    @computed(after="finished_at", digits=3)
    def seconds(self) -> float:
        """How long it took."""
        return (self.finished_at - self.started_at).total_seconds()


@dataclass(frozen=True, slots=True)
class NextRun(Document):
    """``at``: when the run starts, jitter and blackout applied."""

    leg: str
    kind: JobKind
    at: datetime


@dataclass(frozen=True, slots=True)
class LastProof(Document):
    """The newest test restore. ``proved_at``: when the data was last found good and as new as it was asked for, by it
    or by one before it; ``warnings`` and ``older`` as in ``Proof``."""

    id: str
    backup_id: str = field(metadata=json_key("backup"))
    outcome: str
    finished_at: datetime
    tables_compared: int
    error: str = ""
    proved_at: datetime | None = None
    warnings: tuple[str, ...] = ()
    older: bool = False

    @property
    def is_good(self) -> bool:
        """Was the data found good, and as new as it was asked for?"""
        return self.outcome in (PROVED, RESTORED) and not self.older


@dataclass(frozen=True, slots=True)
class StreamView(Document):
    """The continuous copy of the binary log, as its process told last. ``state``: as `backupd binlog status` says it;
    ``spool_bytes`` wait on this host, ``spool_limit`` may."""

    state: str
    told_at: datetime | None = None
    spool_bytes: int = 0
    spool_limit: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ServerOverview(Document):
    """Everything about one server that fits a line or a card."""

    name: str
    policy: str
    status: Status
    reasons: tuple[Reason, ...] = ()
    """Why it is not good, the worst first."""
    latest: datetime | None = None
    """The newest moment that can be restored; there may be gaps between it and ``first``, see the timeline."""
    tables_only: bool = False
    """Only dumps are taken of it: the moments are those of tables, and the server as a whole cannot be restored."""
    first: datetime | None = None
    """The oldest moment that can be restored."""
    rpo: timedelta | None = field(default=None, metadata=json_key("rpo_seconds", digits=3))
    """Seconds of commits that would be lost if the server failed now (current RPO)."""
    rpo_objective: timedelta | None = field(default=None, metadata=json_key("rpo_objective_seconds", digits=3))
    rto: timedelta | None = field(default=None, metadata=json_key("rto_seconds", digits=3))
    """How long a restore to the newest moment would take."""
    rto_objective: timedelta | None = field(default=None, metadata=json_key("rto_objective_seconds", digits=3))
    windows: int = 0
    gaps: int = 0
    """Holes in the binary logs."""
    gap_noticed_at: datetime | None = field(default=None, metadata=HIDDEN)
    reach: tuple[Reach, ...] = field(default=(), metadata=json_key("destinations"))
    """How far each destination alone goes."""
    stream: StreamView | None = None
    """Null where the policy asks for none."""
    last_backups: tuple[LastBackup, ...] = ()
    """By kind."""
    next_runs: tuple[NextRun, ...] = ()
    """One for each schedule, soonest first."""
    last_proof: LastProof | None = None
    running: tuple[JobRecord, ...] = ()
    waiting: int = field(default=0, metadata=json_key("jobs_waiting"))
    """Jobs that are queued or wait for somebody."""
    incidents: tuple[Incident, ...] = ()
    """Those that are open, newest first."""
    backups: int = 0
    """Complete ones."""
    protected: int = 0
    """Of those, backups with as many verified copies as the policy wants."""
    bytes_stored: int = 0
    """Of all backups."""
    held: Hold | None = None
    """Of this server, or of all."""
    paused: Hold | None = None
    absent_since: datetime | None = None
    """Since when a backup keeps it out of rotation."""
    looked_at: datetime | None = None
    """When all this was found out; null: not yet, and nothing is known of what can be recovered."""
    first_due: datetime | None = field(default=None, metadata=HIDDEN)
    """When its first backup starts, as long as none was due."""

    @property
    @computed(after="stream")
    def last_success(self) -> datetime | None:
        """When the newest complete backup of any kind ended."""
        return max((one.finished_at for one in self.last_backups), default=None)

    @property
    @computed(after="rpo_objective_seconds")
    def rpo_kept(self) -> bool | None:
        """Is objectives.rpo met now? Null where no objective is set, or the first backup is not due yet."""
        return Objectives(rpo=self.rpo_objective).rpo_kept(self.rpo, young=self.first_due is not None)

    @property
    @computed(after="rto_objective_seconds")
    def rto_kept(self) -> bool | None:
        """Is objectives.rto met now? Null where no objective is set or nothing is known."""
        return Objectives(rto=self.rto_objective).rto_kept(self.rto)


def timeline(wiring: Wiring, server_name: str) -> Timeline:
    """Raises NotFoundError for a server that is not configured."""
    server = wiring.settings.server(server_name)
    promised = server.policy.objectives if server.usable else None  # a broken policy must not hide what is there
    records = counted(wiring, server_name)
    archived = history(wiring, server, exact=False)
    now = wiring.clock()
    preferences = Preferences(
        destinations=server.preferred, rates=measured_rates(wiring, server_name), start=True, accept_older=True
    )
    try:
        plan = make_plan(server_name, records, Target(Latest()), preferences, now=now, history=archived)
    except (NotFoundError, RefusedError):
        plan = None  # the windows say why
    said = wiring.catalog.binlogs.stream_state(server_name)
    is_streamed = server.usable and streams(server.policy)
    return made(
        server_name,
        records,
        archived.branches if archived else (),
        archived.runs if archived else (),
        archived.gaps if archived else (),
        now=now,
        proofs=wiring.catalog.proofs.list(server_name, limit=1),
        predicted_rto=timedelta(seconds=plan.seconds) if plan else None,
        objectives=Objectives(promised.rpo, promised.rto) if promised else None,
        troubles=place_troubles(server, said[0] if said else None, now),
        doubts=(*kept_apart(wiring, server_name), *not_believed(wiring, server_name)),
        warnings=stream_troubles(server_name, said, now) if is_streamed else (),
        places=server.others if server.usable else (),
        by_dumps=by_dumps(server),
        repeats=archived.resolver.repeats if archived else nobody_knows,
        first_due=None if records or not server.usable else first_to_come(wiring, server_name, now),
    )


def by_dumps(server: ServerSettings) -> bool:
    """Does its policy take dumps and nothing else?"""
    return server.usable and server.policy.physical is None and server.policy.logical is not None


def counted(wiring: Wiring, server_name: str) -> list[BackupRecord]:
    """The backups that a timeline is made of."""
    return [one for one in within_reach(wiring, wiring.catalog.backups.list(server_name)) if not one.apart]


def place_troubles(server: ServerSettings, row: Mapping[str, Any] | None, now: datetime) -> Mapping[str, str]:
    """By destination, of those that there is something to tell of. ``row``: what the stream said of itself last."""
    found: dict[str, str] = {}
    if row is None or not server.usable or not streams(server.policy):
        return found
    for name, one in row.get("destinations", {}).items():
        since = parse_time(one["behind_since"]) if one.get("behind_since") else None
        late = f"lacks binary logs since {format_time(since)}" if since else ""
        if error := one_line(one.get("error") or ""):
            found[name] = f"{late}: {error}" if late else error
        elif since is not None and now - since >= behind_limit(server.policy):
            found[name] = late
    return found


KEPT = timedelta(minutes=5)
"""Then a server is looked at again though nothing changed: time itself changes what a restore takes."""
BUDGET = 1.0
"""Seconds that somebody may wait for servers that nobody has looked at since they changed."""
SHARED = 1.0
"""Seconds for which one answer serves everybody, while nothing is written into the catalog."""
SCOPES = 64
"""So many answers, for tokens that see different servers, are kept."""

Confirmed = Mapping[str, datetime]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """``at``: when it was looked at; ``view``: what was seen; ``confirmed``: what the destinations had confirmed then.
    ``trouble``: what kept it from being looked at; then nothing else is known. ``bare``: there is no backup that
    counts. ``doubts``: as of a timeline."""

    at: datetime
    view: ServerOverview
    gaps: tuple[Gap, ...] = ()
    unprotected_since: datetime | None = None
    confirmed: Confirmed = field(default_factory=dict)
    trouble: str = ""
    bare: bool = False
    doubts: tuple[str, ...] = ()

    def moved(self, confirmed: Confirmed, now: datetime) -> ServerStatus:
        """The same with what is ``confirmed`` by ``now``."""
        latest = self.view.latest
        if latest is not None and latest == max(self.confirmed.values(), default=None):
            latest = max([latest, *(at for at in confirmed.values() if at <= now)])
        reach = tuple(self._reached(one, confirmed, latest, now) for one in self.view.reach)
        return replace(self, view=replace(self.view, latest=latest, reach=reach))

    def _reached(self, one: Reach, confirmed: Confirmed, latest: datetime | None, now: datetime) -> Reach:
        end = one.latest
        if end is None or latest is None:
            return one
        if end == self.confirmed.get(one.name):
            end = max(end, min(confirmed.get(one.name, end), now))
        zero = timedelta()
        return replace(one, latest=end, behind=max(latest - end, zero), rpo=max(now - end, zero))


UNSEEN = ServerStatus(datetime.min.replace(tzinfo=UTC), ServerOverview("", "", Status.GOOD))
"""Of a server that nobody has looked at yet."""


@dataclass(frozen=True, slots=True)
class _Answer:
    mark: tuple[int, int] | None
    made: float
    at: datetime
    servers: tuple[ServerOverview, ...]

    def serves(self, mark: tuple[int, int] | None, now: datetime) -> bool:
        return (
            self.mark == mark
            and time.monotonic() - self.made < SHARED
            and abs(now - self.at) < timedelta(seconds=SHARED)
        )


class StatusCache:
    """Of one catalog. Threads may share it: of those who ask at once one looks, and the others get the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._basis: tuple[object, object] = (None, None)
        self._known: dict[str, tuple[Marker, ServerStatus]] = {}
        self._coming: dict[tuple[str, str], tuple[Leg, datetime | None]] = {}
        self._thread: threading.Thread | None = None
        self._answers: dict[tuple[str, ...], _Answer] = {}

    def shared(
        self, wiring: Wiring, now: datetime, names: tuple[str, ...], make: Callable[[], tuple[ServerOverview, ...]]
    ) -> tuple[ServerOverview, ...]:
        """What ``make`` gives, or gave a moment ago, for the servers of these names."""
        with self._lock:
            if not self._is_same(wiring.settings):
                self._basis = wiring.settings.policies, wiring.settings.destinations
                for memory in (self._known, self._coming, self._answers):
                    memory.clear()
            mark = wiring.catalog.glances.mark()
            last = self._answers.get(names)
            if last is not None and last.serves(mark, now):
                return last.servers
            begun = time.monotonic()
            answer = _Answer(mark, begun, now, make())
            if len(self._answers) >= SCOPES:
                self._answers.clear()
            self._answers[names] = answer
            return answer.servers

    def _is_same(self, settings: Settings) -> bool:
        """Were these read in one go with those that all here was found by? They may be narrowed to some servers."""
        policies, destinations = self._basis
        return policies is settings.policies and destinations is settings.destinations

    def of(
        self, wiring: Wiring, names: Iterable[str], now: datetime, only: Collection[str] | None = None
    ) -> dict[str, ServerStatus]:
        """Those that came or changed are looked at now, as far as BUDGET allows; the rest in the background, and one
        that nobody has looked at yet is missing meanwhile. Raises CatalogError."""
        markers = wiring.catalog.glances.markers(only)
        seen = tuple(sorted(identities(wiring).items()))
        configured = wiring.settings.destinations
        confirmed = {
            name: {place: at for place, at in places.items() if place in configured}
            for name, places in wiring.catalog.glances.confirmed(only).items()
        }
        busy = self._thread is not None and self._thread.is_alive()
        deadline = time.monotonic() + (BUDGET / 4 if busy else BUDGET)
        later: list[tuple[str, Marker]] = []
        for name in names:
            marker, known = (*markers.get(name, ()), seen), self._known.get(name)
            if known is not None and known[0] == marker:
                if not timedelta(0) <= now - known[1].at < KEPT:
                    later.append((name, marker))
            elif time.monotonic() < deadline:
                self._known[name] = marker, _look(wiring, name, now, confirmed.get(name, {}))
            else:
                later.append((name, marker))
        if later and not busy:
            # A daemon thread: whoever asks next begins where it was.
            self._thread = threading.Thread(
                target=self._catch_up, args=(wiring, later, confirmed), name="standing", daemon=True
            )
            self._thread.start()
        return {name: self._known[name][1].moved(confirmed.get(name, {}), now) for name in names if name in self._known}

    def _catch_up(
        self, wiring: Wiring, names: Sequence[tuple[str, Marker]], confirmed: Mapping[str, Confirmed]
    ) -> None:
        """Work at half speed: those who ask meanwhile come first."""
        for name, marker in names:
            begun = time.monotonic()
            if not self._is_same(wiring.settings):
                return
            try:
                self._known[name] = marker, _look(wiring, name, wiring.clock(), confirmed.get(name, {}))
            except BackupdError as error:  # whoever asks next is told, where it is more than a moment's trouble
                say("standing-trouble", f"{name}: {error}", level=logging.WARNING)
                return
            time.sleep(time.monotonic() - begun)

    def coming(self, leg: Leg, now: datetime) -> datetime | None:
        """When the next run of ``leg`` starts."""
        known = self._coming.get(leg.key)
        if known is None or known[0] != leg or (known[1] is not None and known[1] <= now):
            starts = (start_of(leg, due) for due in due_times(leg, now - leg.jitter))
            known = (leg, next((start for start in starts if start > now), None))
            self._coming[leg.key] = known
        return known[1]


_ALL: weakref.WeakKeyDictionary[Catalog, StatusCache] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def status_cache(catalog: Catalog) -> StatusCache:
    """Those of an open catalog, the same ones each time."""
    with _MAKING:
        return _ALL.setdefault(catalog, StatusCache())


def _look(wiring: Wiring, name: str, now: datetime, confirmed: Confirmed) -> ServerStatus:
    """Raises CatalogError; any other trouble is that of this server alone."""
    try:
        return _looked(wiring, name, now, confirmed)
    except CatalogError:
        raise
    except BackupdError as error:
        return replace(UNSEEN, at=now, trouble=str(error))


def _looked(wiring: Wiring, name: str, now: datetime, confirmed: Confirmed) -> ServerStatus:
    found = timeline(wiring, name)
    records = wiring.catalog.backups.list(name)
    complete = [one for one in records if one.state is BackupState.COMPLETE]
    wanted, sites = protection_of(wiring, name), sites_of(wiring)
    walk = verified(records, sites)
    good = [one for one in complete if is_protected(one, walk, wanted, sites)]
    newest = max((one.finished_at for one in good), default=None)
    later = [one.finished_at for one in complete if newest is None or one.finished_at > newest]
    alive = [one for one in records if one.state is not BackupState.DELETED]
    view = replace(
        UNSEEN.view,
        latest=found.latest,
        first=min((window.begin for window in found.windows), default=None),
        windows=len(found.windows),
        gaps=len(found.gaps),
        gap_noticed_at=max((gap.noticed_at for gap in found.gaps), default=None),
        reach=found.destinations,
        rto=found.predicted_rto,
        last_backups=_last(complete),
        backups=len(complete),
        protected=len(good),
        bytes_stored=max(
            sum(one.stats.bytes_new for one in alive), max((one.stats.bytes_stored for one in alive), default=0)
        ),
        tables_only=found.tables_only,
    )
    return ServerStatus(
        now,
        view,
        found.gaps,
        min(later, default=None),
        confirmed,
        bare=all(one.apart for one in records),
        doubts=found.doubts,
    )


def _last(complete: Iterable[BackupRecord]) -> tuple[LastBackup, ...]:
    """By kind, then by set of tables."""
    newest: dict[tuple[int, str], BackupRecord] = {}
    for one in complete:
        key = list(BackupKind).index(one.kind), one.table_set
        if key not in newest or newest[key].finished_at < one.finished_at:
            newest[key] = one
    return tuple(
        made_of(
            LastBackup,
            one,
            bytes_source=one.stats.bytes_source,
            bytes_stored=one.stats.bytes_stored,
            bytes_new=one.stats.bytes_new,
        )
        for _key, one in sorted(newest.items(), key=lambda item: item[0])
    )
