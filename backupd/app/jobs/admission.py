"""Which queued jobs may start beside those that run, why one may not, and the warning about one that waits for long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.app.jobs.jobs import event_of
from backupd.backup.finding import Finding, warning
from backupd.model.backup_record import EVERY_SERVER, HoldKind
from backupd.model.errors import BackupdError, NotFoundError
from backupd.model.event import Severity
from backupd.model.job import BACKUPS, Bar, JobKind, JobRecord, JobState
from backupd.model.text import format_duration

_COPY = JobKind.REPLICATE
_APART = (JobKind.REPLICATE, JobKind.RESTORE, JobKind.REMOVAL, JobKind.SWEEP)
"""Kinds that take none of the slots of the others."""
_NO_POLICY = (JobKind.RESTORE, JobKind.REMOVAL)
"""Kinds that a person asked for and that no policy has a say in, nor in where they read and write."""
_SWEEP = JobKind.SWEEP
"""One at a time on a host: it holds the lock of removals from end to end. No pause concerns it."""


def obstacle(settings: Settings, paused: Collection[str], job: JobRecord, running: Sequence[JobRecord]) -> str:
    """What keeps ``job`` from starting beside ``running``, in words; empty when nothing does. ``paused``: servers,
    ``*`` for all; of those only what a person asked for starts."""
    limits = settings.configuration.concurrency
    # Copies to a slow destination may take a day, and somebody waits for a restore, or for room: each of these kinds
    # has as many slots as all the others, and takes none of theirs.
    alike = [other for other in running if other.kind == job.kind or not {other.kind, job.kind} & set(_APART)]
    if job.kind == _SWEEP:
        here = _sweeps_beside(job, running)
        return f"one sweep runs at a time on a host, and {_named(here)} runs already" if here else ""
    if len(alike) >= limits.jobs:
        return f"{len(alike)} jobs run already (concurrency.jobs: {limits.jobs}; {_named(alike)})"
    if job.leg and (job.server in paused or EVERY_SERVER in paused):
        return "a pause (`backupd hold` lists it)"
    if job.kind == JobKind.RETENTION and (sweeps := _sweeps_beside(job, running)):
        # It would take the slot of a backup, and wait there for the lock until it fails.
        return f"{_named(sweeps)} holds the lock of removals"
    return _of_server(settings, job, running) if job.server else ""


def _sweeps_beside(job: JobRecord, running: Sequence[JobRecord]) -> list[JobRecord]:
    """On the host that ``job`` is addressed to."""
    return [other for other in running if other.kind == _SWEEP and other.runs_on == job.runs_on]


def _of_server(settings: Settings, job: JobRecord, running: Sequence[JobRecord]) -> str:
    """What keeps a job of one server from starting."""
    if broken := _unusable(settings, job):
        return broken
    limits = settings.configuration.concurrency
    beside = [other for other in running if other.server == job.server and other.kind not in _APART]
    if len(beside) >= limits.per_server and job.kind not in _APART:
        return f"of {job.server} runs already {_named(beside)} (concurrency.per_server: {limits.per_server})"
    if job.kind in BACKUPS and (backups := [other for other in beside if other.kind in BACKUPS]):
        return f"another backup of {job.server} runs: {_named(backups)}"
    return _crowded(settings, job, running)


def _unusable(settings: Settings, job: JobRecord) -> str:
    """Does it need a policy that is broken, or a server whose file was not read?"""
    if job.kind in _NO_POLICY:
        return ""
    if settings.is_unread(job.server):
        return f"the file of servers with {job.server} cannot be used: correct it, then reload the service"
    if job.server not in settings.servers:
        return ""
    found = settings.server(job.server)
    why = f"policy {found.policy_name} of {job.server} cannot be used: correct it, then reload the service"
    return "" if found.usable else why


def _crowded(settings: Settings, job: JobRecord, running: Sequence[JobRecord]) -> str:
    reasons = (_crowd(settings, name, running) for name in sorted(_destinations(settings, job)))
    return next(filter(None, reasons), "")


def _crowd(settings: Settings, name: str, running: Sequence[JobRecord]) -> str:
    limit = settings.configuration.concurrency.per_destination
    users = [other for other in running if name in _destinations(settings, other)]
    if len(users) < limit:
        return ""
    return f"destination {name} is used by {_named(users)} (concurrency.per_destination: {limit})"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job that waits for destinations, ``since`` then. ``full``: those that it waits for; ``keeps``: those at which a
    slot is kept for it; ``first``: it uses several, and no older one of that kind waits for the same."""

    since: tuple[datetime, str]
    full: frozenset[str]
    keeps: frozenset[str]
    first: bool


class Admission:
    """Which queued jobs may start, for one look at the queue, whose jobs are asked about from the oldest on.

    A slot at a destination is kept for an older job that waits for it: a steady stream of younger ones, each content
    with fewer destinations, would keep it waiting for ever. Of those that wait for one destination and use others, too,
    only the first keeps slots at these: behind it, a whole queue for a full destination would empty the others.
    """

    def __init__(self, settings: Settings, paused: Collection[str]) -> None:
        self._settings, self._paused = settings, paused
        self._waiting: dict[str, _Waiting] = {}

    def allows(self, job: JobRecord, running: Sequence[JobRecord]) -> bool:
        """May ``job`` start beside ``running``, and beside what is older and waits for its destinations?"""
        why = obstacle(self._settings, self._paused, job, running)
        since, needed = (job.queued_at, job.id), _destinations(self._settings, job)
        older = [one for one in self._waiting.values() if one.since < since]
        full = self._full(needed, running, older)
        if not why and not full:
            self._waiting.pop(job.id, None)
            return True
        if not why or why == _crowded(self._settings, job, running):
            first = len(needed) > 1 and not any(one.first and one.full & full for one in older)
            self._waiting[job.id] = _Waiting(since, full, needed if first else full, first)
        return False

    def _full(
        self, names: Collection[str], running: Sequence[JobRecord], waiting: Collection[_Waiting]
    ) -> frozenset[str]:
        """Those of these destinations at which no slot is left beside those that are used and kept."""
        used = Counter(name for job in running for name in _destinations(self._settings, job))
        used.update(name for one in waiting for name in one.keeps)
        limit = self._settings.configuration.concurrency.per_destination
        return frozenset(name for name in names if used[name] >= limit)

    def bars(self, running: Sequence[JobRecord]) -> list[Bar]:
        """What ``allows`` would say no to, of jobs that are younger than all that it was asked about: most of a long
        queue need not be read."""
        settings, limits = self._settings, self._settings.configuration.concurrency
        beside_it = Counter(other.kind for other in running)
        # A few sweeps wait at most, and those that run may be other hosts'.
        found = [Bar(kinds={kind}) for kind in _APART if kind != _SWEEP and beside_it[kind] >= limits.jobs]
        if sum(other.kind not in _APART for other in running) >= limits.jobs:
            found.append(Bar(but=_APART))
        if self._paused:
            whose = None if EVERY_SERVER in self._paused else self._paused
            found.append(Bar(scheduled=True, servers=whose, but=(_SWEEP,)))
        beside = Counter(other.server for other in running if other.server and other.kind not in _APART)
        if busy := {server for server, count in beside.items() if count >= limits.per_server}:
            found.append(Bar(servers=busy, but=_APART))
        if broken := {name for name, one in settings.servers.items() if one.policy not in settings.policies}:
            found.append(Bar(servers=broken, but=_NO_POLICY))
        if full := self._full(settings.destinations, running, self._waiting.values()):
            found.append(Bar(kinds={_COPY}, destinations=full))
            # The first job that waits for a full one and uses others keeps a slot at those, so it has to be asked.
            queues = full & {name for one in self._waiting.values() if one.first for name in one.full}

            def keeps_nothing(needed: set[str]) -> bool:
                return bool(needed & queues) or (len(needed) == 1 and needed <= full)

            needs = {
                name: (set(one.destinations.required), set(one.destinations.others))
                for name, one in settings.policies.items()
            }
            using = [(name, *needs[one.policy]) for name, one in settings.servers.items() if one.policy in needs]
            barred = [name for name, required, _others in using if keeps_nothing(required)]
            found.append(Bar(servers=barred, kinds=BACKUPS))
            every = [name for name, required, others in using if keeps_nothing(required | others)]
            found.append(Bar(servers=every, but=(*BACKUPS, _COPY, *_NO_POLICY)))
        return found


def _named(running: Sequence[JobRecord]) -> str:
    return ", ".join(f"{job.kind} {job.id}" for job in running)


def _destinations(settings: Settings, job: JobRecord) -> frozenset[str]:
    """Where a job writes or reads, as far as that is known."""
    if job.kind in _NO_POLICY:
        return frozenset()
    if job.kind == _COPY:
        return frozenset({str(job.arguments.get("destination", ""))})
    try:
        found = settings.server(job.server)
    except NotFoundError:  # of no server, or of one that is no longer configured
        return frozenset()
    if not found.usable:  # then only restores start, and what began before ends
        return frozenset()
    return frozenset(found.required if job.kind in BACKUPS else (*found.required, *found.others))


NOTED = timedelta(minutes=1)
"""A job that has waited longer has the reason in its row."""
LONG = timedelta(hours=1)
"""A job that has waited longer deserves a look."""
_OLDEST = 1000
"""Of a long queue, how many of the jobs that have waited longest are reported with their reasons."""

NOTHING = "nothing blocks it, the service has not started it yet"

_HINT = "to list running jobs: backupd jobs --state running; the limits are under concurrency: in the configuration"


class QueueWatch:
    """Looks at the queue now and then, and reports each job once."""

    def __init__(self) -> None:
        self._reported: frozenset[str] = frozenset()

    def look(self, wiring: Wiring, now: datetime) -> None:
        """Raises CatalogError."""
        late = waiting(wiring, now, NOTED)
        wiring.catalog.jobs.say_waiting({job.id: why for job, why in late if job.message != why}, _HINT)
        news = {
            job.id: event_of(
                job, now, "job-waiting", BackupdError(_sentence(job, why, now), hint=_HINT), Severity.WARNING
            )
            for job, why in late
            if now - _since(job) >= LONG and job.id not in self._reported
        }
        wiring.catalog.events.add(*news.values())
        self._reported = self._reported.union(news) & {job.id for job, _message in late}


def waiting(wiring: Wiring, now: datetime, span: timedelta) -> list[tuple[JobRecord, str]]:
    """Queued jobs that have waited for others for ``span`` or longer: each with why it has not started."""
    queued = wiring.catalog.jobs.late(now - span, _OLDEST)
    if not queued:
        return []
    running = wiring.catalog.jobs.list(state=JobState.RUNNING)
    paused = {hold.server for hold in wiring.catalog.holds.all() if hold.kind is HoldKind.PAUSE}
    return [(job, f"waits: {obstacle(wiring.settings, paused, job, running) or NOTHING}") for job in queued]


def findings(wiring: Wiring) -> list[Finding]:
    """What `backupd check` says about jobs that have waited for long."""
    now = wiring.clock()
    return [
        warning("jobs", _sentence(job, message, now), f"is the service running? {_HINT}")
        for job, message in waiting(wiring, now, LONG)
    ]


def _since(job: JobRecord) -> datetime:
    """Since when it could have started."""
    return max(job.queued_at, job.not_before or job.queued_at)


def _sentence(job: JobRecord, message: str, now: datetime) -> str:
    whose = f" of {job.server}" if job.server else ""
    waited = format_duration((now - _since(job)).total_seconds())
    return f"{job.leg or job.kind}{whose} (job {job.id}) has not started for {waited}: {message}"
