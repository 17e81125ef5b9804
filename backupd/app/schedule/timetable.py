"""What becomes of the due times of a leg that have passed: started, made up for, missed, skipped. A pure decision.

However many runs were missed, at most one makes up for them. Everything that was due is accounted for: a run that did
not happen is in the catalog with its reason.

The policies' legs against the catalog's schedules: what is due becomes rows of jobs.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import TypeVar

from backupd.app.context.logging_setup import say
from backupd.app.context.settings import Settings
from backupd.app.schedule.calendar import SECOND, Leg, all_legs, due_times, former_leg, last_due, start_of
from backupd.catalog.session import Catalog
from backupd.model.backup_record import EVERY_SERVER, HoldKind
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState, Key, Schedule
from backupd.model.text import format_time, new_id

TOLERANCE = timedelta(minutes=5)
"""A run that could not start in its minute still starts within this time (after jitter and blackout), as if on time."""
AHEAD = timedelta(hours=2)
"""Due times may be handled up to this far ahead of the clock, which was set back then; more was never true."""

NOT_RUNNING = "the service was not running"
CLOCK_MOVED = "the machine slept or its clock was moved"
BUSY = "the service was held up"
NOT_CONFIGURED = "it was not configured"

_COUNTED = 1000


class Outcome(StrEnum):
    """What becomes of a due time."""

    START = "start"
    CATCH_UP = "catch-up"
    MISSED = "missed"
    SKIPPED = "skipped"


STARTING = frozenset({Outcome.START, Outcome.CATCH_UP})


@dataclass(frozen=True, slots=True)
class Action:
    """``due``: the newest due time that this is about. ``not_before``: a run made up for waits until then.
    ``routine``: nobody has to look at it. ``replaces``: repetitions of older runs that wait; this one covers them.
    """

    outcome: Outcome
    leg: Leg
    due: datetime
    message: str = ""
    hint: str = ""
    not_before: datetime | None = None
    routine: bool = False
    replaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known beside the clock. ``why`` runs were not started at their time; ``open_job``: the leg's run that is
    queued or going on; ``waiting``: repetitions of the leg and runs made up for, which wait for their moment;
    ``paused``: why nothing of the server starts by schedule, None without a pause."""

    why: str
    open_job: JobRecord | None = None
    waiting: tuple[str, ...] = ()
    paused: str | None = None


def account(leg: Leg, handled: datetime, now: datetime, standing: Standing) -> tuple[Action, ...]:
    """What to do about the due times after ``handled`` whose start has come by ``now``; nothing when there are none.

    Everything up to the ``due`` of the last action is handled then.
    """
    newest = last_due(leg, handled, now)
    if newest is None:
        return ()
    passed = _between(leg, handled, newest)
    if standing.paused is not None:
        return (_paused(leg, passed, newest, standing.paused),)
    if now - start_of(leg, newest) <= TOLERANCE:
        return _on_time(leg, handled, newest, standing)
    return _late(leg, passed, newest, now, standing)


def conclude(leg: Leg, handled: datetime, now: datetime, standing: Standing) -> tuple[Action, ...]:
    """The same for a leg whose schedule ends here: also the due times by ``now`` whose start would have come later."""
    found = account(leg, handled, now, standing)
    after = found[-1].due if found else handled
    rest = _between(leg, after, now)
    if not rest:
        return found
    newest = rest[-1]
    if standing.paused is not None:
        return (*found, _paused(leg, rest, newest, standing.paused))
    if standing.open_job is not None:
        return (*found, _overtaken(leg, rest, newest, standing.open_job))
    begun = next((action for action in found if action.outcome in STARTING), None)
    if begun is not None:
        covered = f"the one due at {format_time(begun.due)} covers them"
        message = f"{_runs(rest, newest, 'did not start')} because {covered}"
        return (*found, Action(Outcome.SKIPPED, leg, newest, message, routine=True))
    return (*found, Action(Outcome.START, leg, newest, not_before=start_of(leg, newest), replaces=standing.waiting))


def given_up(leg: Leg, handled: datetime, now: datetime, why: str) -> tuple[Action, ...]:
    """What was due by ``now`` of a leg that is in no policy any more: nothing makes up for it."""
    passed = _between(leg, handled, now)
    if not passed:
        return ()
    hint = "the schedule was removed from the configuration: backupd does not make up for it"
    return _missed(leg, passed, passed[-1], why, hint)


def _between(leg: Leg, after: datetime, until: datetime) -> list[datetime]:
    """The first of many, and the last: enough to say how many there were."""
    found = list(islice(due_times(leg, after, until=until), _COUNTED + 1))
    if len(found) > _COUNTED:
        found[-1] = last_due(replace(leg, jitter=timedelta(0), blackout=()), after, until) or found[-1]
    return found


def _paused(leg: Leg, passed: Sequence[datetime], newest: datetime, reason: str) -> Action:
    message = f"{_runs(passed, newest, 'did not start')} because of a pause: {reason}"
    return Action(Outcome.SKIPPED, leg, newest, message, "to resume its jobs: backupd resume")


def _on_time(leg: Leg, handled: datetime, newest: datetime, standing: Standing) -> tuple[Action, ...]:
    before = last_due(leg, handled, start_of(leg, newest) - SECOND)  # the newest that should have started earlier
    found = (
        _missed(leg, _between(leg, handled, before), before, standing.why, "the next run follows now") if before else ()
    )
    joined = _between(leg, before or handled, newest)
    if standing.open_job is not None:
        return (*found, _overtaken(leg, joined, newest, standing.open_job))
    if len(joined) > 1:
        covered = f"the one due at {format_time(newest)} covers them"
        message = f"{_runs(joined[:-1], joined[-2], 'did not start')} because of the blackout: {covered}"
        found = (*found, Action(Outcome.SKIPPED, leg, joined[-2], message, routine=True))
    return (*found, Action(Outcome.START, leg, newest, replaces=standing.waiting))


def _late(
    leg: Leg, passed: Sequence[datetime], newest: datetime, now: datetime, standing: Standing
) -> tuple[Action, ...]:
    why, open_job = standing.why, standing.open_job
    if open_job is not None:
        return _missed(leg, passed, newest, why, f"job {open_job.id} is {open_job.state} and covers them")
    if not leg.catch_up:
        hint = "timing.catch_up is off, so backupd does not make up for it: start it by hand if you need it now"
        return _missed(leg, passed, newest, why, hint)
    soonest = start_of(leg, now)
    return (
        *_missed(leg, passed, newest, why, "one run replaces all of them"),
        Action(Outcome.CATCH_UP, leg, newest, not_before=soonest if soonest > now else None, replaces=standing.waiting),
    )


def absorb(actions: Iterable[Action]) -> tuple[Action, ...]:
    """A full backup that is about to be taken covers the increments of its server that would start beside it."""
    found = tuple(actions)
    fulls = {action.leg.server for action in found if action.leg.kind is JobKind.FULL and action.outcome in STARTING}
    kept = []
    for action in found:
        if action.leg.kind is not JobKind.INCREMENTAL or action.leg.server not in fulls:
            kept.append(action)
        elif action.outcome is Outcome.MISSED:
            kept.append(replace(action, hint="the full backup that is taken now replaces it"))
        elif action.outcome is Outcome.START:
            kept.append(
                replace(
                    action,
                    outcome=Outcome.SKIPPED,
                    routine=True,
                    replaces=(),
                    not_before=None,
                    message=f"the run due at {format_time(action.due)} did not start because a full backup "
                    "is taken at the same time",
                )
            )
        elif action.outcome is Outcome.SKIPPED:
            kept.append(action)
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Records:
    """What the catalog gets: rows of jobs, what somebody should know, and which waiting jobs (id: why) end skipped."""

    jobs: tuple[JobRecord, ...]
    events: tuple[Event, ...]
    skipped: Mapping[str, str]


def records(actions: Sequence[Action], now: datetime, name: Callable[[datetime], str] = new_id) -> Records:
    """Rows for ``actions``; a run that makes up for missed ones, or replaces a repetition, names their row as
    ``previous``."""
    jobs: list[JobRecord] = []
    skipped: dict[str, str] = {}
    events: list[Event] = []
    missed: dict[tuple[str, str], str] = {}
    for action in actions:
        leg = action.leg
        whose = f"{leg.leg} of {leg.server}" if leg.server else leg.leg
        job = JobRecord(
            id=name(now),
            kind=str(leg.kind),
            server=leg.server,
            state=_STATES[action.outcome],
            queued_at=now,
            due_at=action.due,
            leg=leg.leg,
            arguments=leg.arguments,
            requested_by="schedule",
            message=action.message,
            hint=action.hint,
        )
        if action.outcome in STARTING:
            before = missed.get(leg.key, "") if action.outcome is Outcome.CATCH_UP else ""
            job = replace(job, previous=before or next(iter(action.replaces), ""), not_before=action.not_before)
            skipped |= dict.fromkeys(action.replaces, f"the next run came before it: job {job.id}")
        if job.state is not JobState.QUEUED:
            job = replace(job, finished_at=now)
            missed[leg.key] = job.id
            events.append(
                Event(
                    at=now,
                    kind=f"job-{job.state}",
                    severity=Severity.INFO if action.routine else Severity.WARNING,
                    message=f"{whose}: {action.message}",
                    server=leg.server,
                    subject=leg.leg,
                    hint=action.hint,
                    job_id=job.id,
                )
            )
        jobs.append(job)
    return Records(tuple(jobs), tuple(events), skipped)


_STATES: Mapping[Outcome, JobState] = {
    Outcome.START: JobState.QUEUED,
    Outcome.CATCH_UP: JobState.QUEUED,
    Outcome.MISSED: JobState.MISSED,
    Outcome.SKIPPED: JobState.SKIPPED,
}


def _missed(leg: Leg, passed: Sequence[datetime], newest: datetime, why: str, hint: str) -> tuple[Action, ...]:
    return (Action(Outcome.MISSED, leg, newest, f"{_runs(passed, newest, 'missed')} because {why}", hint),)


def _overtaken(leg: Leg, passed: Sequence[datetime], newest: datetime, open_job: JobRecord) -> Action:
    going = "still runs"
    if open_job.state is JobState.QUEUED:
        going = f"still waits to start{': ' + open_job.message if open_job.message else ''}"
    return Action(
        Outcome.SKIPPED,
        leg,
        newest,
        f"{_runs(passed, newest, 'did not start')} because the one before it (job {open_job.id}) {going}",
        f"leave more time between runs in the schedule, or check that job: backupd jobs show {open_job.id}",
    )


def _runs(passed: Sequence[datetime], newest: datetime, verb: str) -> str:
    if len(passed) == 1:
        return f"the run due at {format_time(newest)} {'was missed' if verb == 'missed' else verb}"
    count = f"more than {_COUNTED:,}" if len(passed) > _COUNTED else f"{len(passed):,}"
    happened = "were missed" if verb == "missed" else verb
    return f"{count} runs {happened} between {format_time(passed[0])} and {format_time(newest)}"


T = TypeVar("T")

FULL = "physical.full"


class Timetable:
    """One daemon uses one. It keeps in mind what the catalog says, and what comes next for each leg.

    A leg that cannot be computed stops no other: it is reported once, and tried again.
    """

    def __init__(self, catalog: Catalog, runs_on: Callable[[], str] = str) -> None:
        """``runs_on``: what jobs are addressed to."""
        self._catalog, self._runs_on = catalog, runs_on
        self._legs: dict[Key, Leg] = {}
        self._rows: dict[Key, Schedule] = {}
        self._next: dict[Key, datetime | None] = {}
        self._broken: dict[Key, str] = {}
        self._events: list[Event] = []

    def follow(self, settings: Settings, now: datetime, why: str = NOT_RUNNING) -> tuple[JobRecord, ...]:
        """Follow these settings from now on; gives the rows of jobs that this made.

        A leg that is new begins now. One that has another cadence than before, or is in no policy any more, ends here
        first: what was due until now and not dealt with (``why``) is accounted for. One that comes back is asked about
        the time between. One whose policy, or file of servers, cannot be used stays as it is until that can.
        Raises CatalogError.
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
                # What was pulled back is written already, so that it is reported even when the rest is tried again.
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
        jobs = tuple(replace(job, runs_on=self._runs_on()) for job in made.jobs)
        events = (*self._events, *events, *made.events)
        if after or events or jobs:
            self._catalog.schedules.settle(before, after, jobs=jobs, events=events, skipped=made.skipped, now=now)
        self._events.clear()
        return jobs

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
        except Exception as error:  # noqa: BLE001  whatever a cadence can bring about; all is reported
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
                        hint="correct it in the policy and reload; see the service's log",
                    )
                )
            return ()


def _rests(settings: Settings, server: str) -> bool:
    """Does nobody know what is scheduled for it, since its policy, or the file that it may be in, cannot be used?"""
    return settings.is_unread(server) or (server in settings.servers and not settings.server(server).usable)


def _changed(
    leg: Leg, row: Schedule, rows: dict[Key, Schedule], now: datetime, standing: Standing
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
    reason = f"server {row.server} is no longer configured" if gone else "its policy no longer has this schedule"
    return Event(
        at=now,
        kind="schedule-ended",
        severity=Severity.WARNING if gone else Severity.INFO,
        server=row.server,
        subject=row.leg,
        message=f"{row.leg}{' of ' + row.server if row.server else ''} is no longer started: {reason}",
        detail=f"it was: {row.cadence}",
    )


def _corrected(rows: list[Schedule], jobs: tuple[JobRecord, ...], now: datetime) -> Event:
    furthest = max([*(row.handled for row in rows), *(job.queued_at for job in jobs)])
    said = []
    if rows:
        said.append(f"{len(rows)} schedules were handled up to")
    if jobs:
        said.append(f"{len(jobs)} jobs were queued at")
    return Event(
        at=now,
        kind="clock-jump",
        severity=Severity.WARNING,
        subject="schedules",
        message=f"the host clock was wrong: {' and '.join(said)} {format_time(furthest)}, which is in the future. "
        "backupd reset these times to the current time",
        detail=", ".join(job.id for job in jobs),
        hint="check this host's time service, and the jobs that ran on the wrong clock",
    )
