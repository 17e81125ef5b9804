"""What was promised against what is: the policy's objectives, looked at all the time, reported when one is broken.

``rpo``: the age of the latest moment that could be restored now. ``rto``: how long a restore to that moment would take,
by what restores took so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import PLACE_RPO, RPO, RTO
from backupd.app.context.incidents import Incidents
from backupd.app.context.settings import ServerSettings, Settings
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.periodic import PeriodicCheck
from backupd.app.schedule.calendar import due_times, legs, start_of
from backupd.catalog.jobs import OPEN as UNDER_WAY
from backupd.model.backup_record import BackupRecord
from backupd.model.event import Severity
from backupd.model.job import BACKUPS, NOT_COUNTED, Schedule
from backupd.model.job import Key as LegKey
from backupd.model.text import format_duration, format_time
from backupd.recovery.timeline import Reach, Timeline
from policies.lint import streams

Read = Callable[[Wiring, str], Timeline]
"""The timeline of a server as it is now."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What is kept of a server that nothing changed since: as of a timeline. ``rto``: predicted."""

    latest: datetime | None
    rto: timedelta | None
    reach: tuple[Reach, ...]


Kept = Callable[[Wiring, datetime], Mapping[str, Glance]]

EVERY = timedelta(seconds=30)
NEW = timedelta(days=1)
"""A destination that never had a backup of a server is new for so long."""
BEGINNING = timedelta(minutes=2)
"""So long a binary log that was never streamed before may take until something of it is stored."""
_LATE_CHECKPOINTS = 3
_NEAR = 0.8
"""With more than this part of a promised time to restore it is looked at each time: that grows with the logs."""
_SLACK = timedelta(minutes=2)
"""A run that is due is a job only a moment later."""

Found = Iterator[Condition | tuple[Key, str]]
"""Of each key the condition that holds, or the key and what to say of it where none does."""


class ObjectivesWatch(PeriodicCheck):
    """Looks at every server, but for those of which what is kept is far from every limit, with no incident open."""

    def __init__(self, read: Read, kept: Kept = lambda _wiring, _now: {}) -> None:
        super().__init__("objectives", EVERY)
        self._read, self._kept = read, kept
        self._incidents: Incidents | None = None
        self._seen: dict[tuple[str, str], datetime] = {}
        self._begun: dict[str, datetime] = {}

    def _names(self, wiring: Wiring) -> Iterable[str]:
        if self._incidents is None:
            self._incidents = Incidents(wiring.catalog)
        now = wiring.clock()
        kept, is_open = self._kept(wiring, now), self._incidents.is_open
        for name in wiring.settings.servers:
            server = wiring.settings.server(name)
            if name not in kept or not _is_calm(server, kept[name], now) or any(map(is_open, _keys(server))):
                yield name

    def _look(self, wiring: Wiring, name: str, now: datetime) -> None:
        server = wiring.settings.server(name)
        if not server.usable:
            return
        if self._incidents is None:
            self._incidents = Incidents(wiring.catalog)
        promised = server.policy.objectives
        if promised.rpo is None and promised.rto is None and not streams(server.policy):
            return
        timeline = self._read(wiring, server.name)
        self._note_lags(wiring, server, timeline)
        records = wiring.catalog.backups.list(server.name)
        young = timeline.is_young
        begins = self._stream_begins(wiring, server, now) and timeline.latest is not None
        new = frozenset() if young else self._new(records, timeline, server, now)
        found = [*_rpo(timeline, server), *_rto(timeline, server), *_rpo_of_destinations(timeline, server, new)]
        holds = [
            replace(one, opens=one.opens and not young and not (begins and one.key.kind is not RTO))
            for one in found
            if isinstance(one, Condition)
        ]
        looked = dict(one for one in found if not isinstance(one, Condition))
        self._incidents.settle(now, *holds, looked=looked)

    def _stream_begins(self, wiring: Wiring, server: ServerSettings, now: datetime) -> bool:
        """Is the binary log about to be streamed for the first time? The service has only just begun to look after it,
        and of no other time anything is archived."""
        begun = self._begun.setdefault(server.name, now)
        return (
            streams(server.policy)
            and now - begun < BEGINNING
            and all(branch.noticed_at >= begun - BEGINNING for branch in wiring.catalog.binlogs.branches(server.name))
        )

    def _new(
        self, records: Sequence[BackupRecord], timeline: Timeline, server: ServerSettings, now: datetime
    ) -> frozenset[str]:
        """Destinations that were added and whose first copies are not due yet: the next backup is the first that goes
        to a required one; others get theirs within a day, or something else says why not."""
        had = {copy.destination for record in records for copy in record.copies}
        names = {reach.name for reach in timeline.destinations if reach.latest is None} - had
        return frozenset(
            name
            for name in names
            if name in server.required or now - self._seen.setdefault((server.name, name), now) < NEW
        )

    def _note_lags(self, wiring: Wiring, server: ServerSettings, timeline: Timeline) -> None:
        """What a stream that does not run cannot report: how far behind its destinations are."""
        leg = server.policy.binlog
        if leg is None or not streams(server.policy):
            return
        late = _late(leg.checkpoint)
        for reach in timeline.destinations:
            if reach.rpo is not None and reach.rpo > late:
                wiring.catalog.lags.note(server.name, reach.name, reach.rpo.total_seconds(), timeline.now)


def _keys(server: ServerSettings) -> Iterator[Key]:
    """Of all incidents that a look may open."""
    yield from (Key(RPO, server.name), Key(RTO, server.name))
    yield from (Key(PLACE_RPO, server.name, destination) for destination in server.preferred)


def _late(checkpoint: timedelta) -> timedelta:
    return max(EVERY, _LATE_CHECKPOINTS * checkpoint)


def _is_calm(server: ServerSettings, kept: Glance, now: datetime) -> bool:
    """Would a look find nothing to report?"""
    if not server.usable or kept.latest is None:
        return False
    promised, leg = server.policy.objectives, server.policy.binlog
    lost = [now - kept.latest, *(one.rpo for one in kept.reach)]
    limits = [promised.rpo, _late(leg.checkpoint) if leg is not None and streams(server.policy) else None]
    if any(rpo is None or rpo > limit for limit in limits if limit is not None for rpo in lost):
        return False
    return promised.rto is None or (kept.rto is not None and kept.rto <= _NEAR * promised.rto)


def first_to_come(wiring: Wiring, name: str, now: datetime) -> datetime | None:
    """When the first backup of the server starts, as long as none was due since its policy came into force; ``now``
    while that one is under way. None where none is scheduled. Raises CatalogError."""
    states = {job.state for job in wiring.catalog.jobs.list(name) if job.kind in BACKUPS}
    return first_backup(
        wiring.settings,
        name,
        wiring.catalog.schedules.all(),
        now,
        busy=not states.isdisjoint(UNDER_WAY),
        ended=bool(states - {*UNDER_WAY, *NOT_COUNTED}),
    )


def first_backup(
    settings: Settings, name: str, rows: Mapping[LegKey, Schedule], now: datetime, *, busy: bool, ended: bool
) -> datetime | None:
    """As ``first_to_come``. ``busy``: a backup is under way; ``ended``: one came to an end, good or bad."""
    scheduled = [leg for leg in legs(settings, name) if leg.kind in BACKUPS]
    if not scheduled or ended:
        return None
    if busy:
        return now
    first = min(
        (
            start_of(leg, due)
            for leg in scheduled
            for due in due_times(leg, rows[leg.key].since if leg.key in rows else now, count=1)
        ),
        default=None,
    )
    return first if first is not None and now < first + _SLACK else None


def _rpo(timeline: Timeline, server: ServerSettings) -> Found:
    promised = server.policy.objectives.rpo
    if promised is None:
        return
    name, latest, lost = server.name, timeline.latest, timeline.rpo
    key, limit = Key(RPO, name), format_duration(promised.total_seconds())
    if latest is None or lost is None:
        yield Condition(
            key,
            Severity.ERROR,
            f"{name} is not recoverable at all; objectives.rpo is {limit}",
            hint=f"take a dump now: backupd backup {name} --kind logical"
            if timeline.tables_only
            else f"take a full backup now: backupd backup {name} --kind full",
        )
    elif lost > promised:
        lines = [
            f"{reach.name}: {format_time(reach.latest) if reach.latest else 'nothing'}"
            f"{f' ({reach.trouble})' if reach.trouble else ''}"
            for reach in timeline.destinations
        ]
        yield Condition(
            key,
            Severity.ERROR,
            f"data loss if {name} failed now: {format_duration(lost.total_seconds())}; objectives.rpo is {limit}",
            detail="\n".join(["latest recoverable point in time, by destination", *lines, *timeline.warnings]),
            hint=f"to find the cause: backupd binlog status {name}; backupd jobs {name}",
        )
    else:
        yield key, f"{name}: objectives.rpo ({limit}) is met again"


def _rpo_of_destinations(timeline: Timeline, server: ServerSettings, new: frozenset[str]) -> Found:
    """What would be lost were nothing left but one of several destinations. Those that are ``new``, and while all
    together break the promise required ones and those that have as much as all, open no incidents of their own."""
    promised = server.policy.objectives.rpo
    if promised is None or len(server.preferred) < 2:
        return
    name, limit = server.name, format_duration(promised.total_seconds())
    kept = timeline.rpo is not None and timeline.rpo <= promised
    for reach in timeline.destinations:
        if reach.name not in server.preferred:
            continue
        key = Key(PLACE_RPO, name, reach.name)
        if reach.rpo is not None and reach.rpo <= promised:
            yield key, f"{reach.name} alone keeps objectives.rpo ({limit}) of {name} again"
            continue
        lost = "everything" if reach.rpo is None else format_duration(reach.rpo.total_seconds())
        follows = reach.name in server.required or (reach.behind is not None and reach.behind <= promised)
        yield Condition(
            key,
            Severity.WARNING,
            f"data loss if only {reach.name} survived: {lost}; objectives.rpo of {name} is {limit}",
            detail=reach.trouble,
            hint=f"copy the missing data: backupd replicate {name} --to {reach.name}. If the destination is "
            "always behind, raise objectives.rpo or add it to destinations.required"
            if reach.name in server.others
            else f"to find the cause: backupd binlog status {name}; backupd check {name}",
            opens=reach.name not in new and (kept or not follows),
        )


def _rto(timeline: Timeline, server: ServerSettings) -> Found:
    promised = server.policy.objectives.rto
    if promised is None or timeline.predicted_rto is None:
        return  # what nothing is known of is neither kept nor broken
    name, limit = server.name, format_duration(promised.total_seconds())
    key = Key(RTO, name)
    if timeline.predicted_rto > promised:
        yield Condition(
            key,
            Severity.ERROR,
            f"estimated restore time of {name}: {format_duration(timeline.predicted_rto.total_seconds())}; "
            f"objectives.rto is {limit}",
            hint="take full backups more often, so that less is replayed; to see how long each step takes: "
            f"backupd plan {name}",
        )
    else:
        yield key, f"{name}: objectives.rto ({limit}) is met again"
