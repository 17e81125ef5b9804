"""The policies' legs against the catalog's schedules: what is due becomes rows of jobs."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TypeVar

from backupd.app.context.logging_setup import say
from backupd.app.context.settings import Settings
from backupd.app.schedule.calendar import Leg, all_legs, due_times, former_leg, start_of
from backupd.app.schedule.missed_runs import (
    AHEAD,
    NOT_CONFIGURED,
    NOT_RUNNING,
    Action,
    Standing,
    absorb,
    account,
    conclude,
    given_up,
    records,
)
from backupd.catalog.jobs import Key, Schedule
from backupd.catalog.session import Catalog
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Severity
from backupd.model.hold import EVERY_SERVER, HoldKind
from backupd.model.job import JobRecord, JobState
from backupd.model.text import format_time

T = TypeVar("T")

FULL = "physical.full"


class Timetable:
    """One daemon uses one. It keeps in mind what the catalog says, and what comes next for each leg.

    A leg that cannot be computed stops no other: it is told once, and tried again.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._legs: dict[Key, Leg] = {}
        self._rows: dict[Key, Schedule] = {}
        self._next: dict[Key, datetime | None] = {}
        self._broken: dict[Key, str] = {}
        self._events: list[Event] = []

    def follow(self, settings: Settings, now: datetime, why: str = NOT_RUNNING) -> tuple[JobRecord, ...]:
        """Follow these settings from now on; gives the rows of jobs that this made.

        A leg that is new begins now. One that has another cadence than before, or is in no policy any more, ends here
        first: what was due until now and not dealt with (``why``) is accounted for. One that comes back is asked about
        the time between. One whose policy cannot be used stays as it is until that can. Raises CatalogError.
        """
        legs = {leg.key: leg for leg in all_legs(settings)}
        rows = self._catalog.schedules.all()
        standing = self._standing(why)
        actions: list[Action] = []
        changes: list[Schedule] = []
        events: list[Event] = []
        for key, leg in legs.items():
            if (row := rows.get(key)) is None:
                changes.append(Schedule(*key, cadence=leg.rhythm, since=now, handled=now))
            elif row.cadence != leg.rhythm:
                actions += self._safely(key, now, partial(_changed, leg, row, rows, now, standing(leg)))
                changes.append(replace(row, cadence=leg.rhythm, since=now, handled=max(now, row.handled)))
        for key, row in rows.items():
            if key not in legs and row.cadence and not _rests(settings, key[0]):
                actions += self._safely(key, now, partial(_ended, row, rows, now, why))
                changes.append(replace(row, cadence="", handled=max(now, row.handled)))
                events.append(_told_end(row, settings, now))
        jobs = self._write(rows, changes, absorb(actions), now, events)
        self._legs, self._rows = legs, rows | {row.key: row for row in changes}
        self._next = {}
        self._broken.clear()
        for key in legs:
            self._look_ahead(key, now)
        return jobs

    def refresh(self, now: datetime) -> None:
        """Read the schedules anew, in case somebody changed them. Raises CatalogError."""
        rows = self._catalog.schedules.all()
        changed = [key for key in self._legs if rows.get(key) != self._rows.get(key) or key in self._broken]
        self._rows = rows
        for key in changed:
            self._look_ahead(key, now)

    def coming(self) -> frozenset[datetime]:
        """When runs start next."""
        return frozenset(moment for moment in self._next.values() if moment is not None)

    def handle(self, now: datetime, why: str, *, settled: bool = True) -> tuple[JobRecord, ...]:
        """Deal with every due time whose start has come: gives the rows of jobs that this made, of whatever state.

        ``why`` those before the last were not dealt with at their time. ``settled``: the clock can be trusted more
        than what was written far ahead of it: schedules that were dealt with then, and jobs that wait for it. Raises
        CatalogError, and RefusedError when somebody else has dealt with the same due times; either way nothing was
        written, and trying again is right.
        """
        changes: dict[Key, Schedule] = {}
        events: list[Event] = []
        if settled:
            wrong = [row for key in self._legs if (row := self._rows.get(key)) and row.handled > now + AHEAD]
            pulled = self._catalog.jobs.pull_back(now, AHEAD)
            changes |= {row.key: replace(row, since=min(row.since, now), handled=now) for row in wrong}
            if wrong or pulled:
                # What was pulled back is written already, so that it is told even when the rest has to be tried again.
                (self._events if pulled else events).append(_corrected(wrong, pulled, now))
        due = [key for key, moment in self._next.items() if moment is not None and moment <= now and key not in changes]
        actions: tuple[Action, ...] = ()
        if due:
            standing = self._standing(why)
            actions = absorb(
                action for key in due for action in self._safely(key, now, partial(self._account, key, now, standing))
            )
        for action in actions:
            changes[action.leg.key] = replace(self._rows[action.leg.key], handled=action.due)
        jobs = self._write(self._rows, list(changes.values()), actions, now, events)
        self._rows |= changes
        for key in changes:
            self._look_ahead(key, now)
        return jobs

    # -- inside

    def _account(self, key: Key, now: datetime, standing: Callable[[Leg], Standing]) -> tuple[Action, ...]:
        leg = self._legs[key]
        return account(leg, self._rows[key].handled, now, standing(leg))

    def _write(
        self,
        before: dict[Key, Schedule],
        after: list[Schedule],
        actions: Iterable[Action],
        now: datetime,
        events: Iterable[Event],
    ) -> tuple[JobRecord, ...]:
        made = records(tuple(actions), now)
        events = (*self._events, *events, *made.events)
        if after or events or made.jobs:
            self._catalog.schedules.settle(before, after, jobs=made.jobs, events=events, skipped=made.skipped, now=now)
        self._events.clear()
        return made.jobs

    def _standing(self, why: str) -> Callable[[Leg], Standing]:
        """What is known about a leg, as the catalog has it now."""
        going = [job for job in self._catalog.jobs.list(state=(JobState.QUEUED, JobState.RUNNING)) if job.leg]
        going.sort(key=lambda job: job.state is JobState.RUNNING)  # a running one counts before one that waits
        open_jobs: dict[Key, JobRecord] = {}
        waiting: dict[Key, tuple[str, ...]] = {}
        for job in going:
            key = (job.server, job.leg)
            if job.state is JobState.QUEUED and job.not_before is not None:
                waiting[key] = (*waiting.get(key, ()), job.id)
            else:
                open_jobs[key] = job
        paused = {hold.server: hold.text for hold in self._catalog.holds.all() if hold.kind is HoldKind.PAUSE}
        return lambda leg: Standing(
            why, open_jobs.get(leg.key), waiting.get(leg.key, ()), paused.get(leg.server, paused.get(EVERY_SERVER))
        )

    def _look_ahead(self, key: Key, now: datetime) -> None:
        self._next[key] = next(iter(self._safely(key, now, partial(self._starts, key))), None)

    def _starts(self, key: Key) -> tuple[datetime, ...]:
        leg = self._legs[key]
        return tuple(start_of(leg, due) for due in due_times(leg, self._rows[key].handled, count=1))

    def _safely(self, key: Key, now: datetime, work: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
        """``work`` about one leg, which must not stop the others; nothing when it fails."""
        try:
            return work()
        except BackupdError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a cadence can bring about; all is told
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if self._broken.get(key) != problem:
                self._broken[key] = problem
                say("schedule-broken", "".join(traceback.format_exception(error)), level=logging.ERROR, server=key[0])
                self._events.append(
                    Event(
                        at=now,
                        kind="schedule-broken",
                        severity=Severity.ERROR,
                        server=key[0],
                        subject=key[1],
                        message=f"the schedule {'/'.join(filter(None, key))} cannot be followed: {problem}",
                        hint="write it otherwise in the policy and reload; the service's log says more",
                    )
                )
            return ()


def _rests(settings: Settings, server: str) -> bool:
    """Does nobody know what is scheduled for it, since its policy cannot be used?"""
    return server in settings.servers and not settings.server(server).usable


def _changed(
    leg: Leg,
    row: Schedule,
    rows: dict[Key, Schedule],
    now: datetime,
    standing: Standing,
) -> tuple[Action, ...]:
    """What becomes of the time up to now of a leg whose cadence is not that of its row."""
    if not row.cadence:
        return account(leg, row.handled, now, replace(standing, why=NOT_CONFIGURED))
    return tuple(
        replace(action, leg=leg)
        for action in conclude(leg.at_rhythm(row.cadence, _full(row, rows)), row.handled, now, standing)
    )


def _ended(row: Schedule, rows: dict[Key, Schedule], now: datetime, why: str) -> tuple[Action, ...]:
    return given_up(former_leg(row.server, row.leg, row.cadence, _full(row, rows)), row.handled, now, why)


def _full(row: Schedule, rows: dict[Key, Schedule]) -> str | None:
    """The cadence of the full backups beside a leg, as long as there was one."""
    full = rows.get((row.server, FULL))
    return full.cadence if full is not None else None


def _told_end(row: Schedule, settings: Settings, now: datetime) -> Event:
    gone = bool(row.server) and row.server not in settings.servers
    reason = f"server {row.server} is not configured any more" if gone else "its policy has no such schedule any more"
    return Event(
        at=now,
        kind="schedule-ended",
        severity=Severity.WARNING if gone else Severity.INFO,
        server=row.server,
        subject=row.leg,
        message=f"{row.leg}{' of ' + row.server if row.server else ''} is not started any more: {reason}",
        detail=f"it was: {row.cadence}",
    )


def _corrected(rows: list[Schedule], jobs: tuple[JobRecord, ...], now: datetime) -> Event:
    furthest = max([*(row.handled for row in rows), *(job.queued_at for job in jobs)])
    said = []
    if rows:
        said.append(f"{len(rows)} schedules had been dealt with up to")
    if jobs:
        said.append(f"{len(jobs)} jobs were queued at")
    return Event(
        at=now,
        kind="clock-jump",
        severity=Severity.WARNING,
        subject="schedules",
        message=f"{' and '.join(said)} {format_time(furthest)}, which is still to come: the clock was wrong then. They "
        f"go on from now",
        detail=", ".join(job.id for job in jobs),
        hint="look at this host's time service, and at the jobs of that time, which went by the wrong clock",
    )
