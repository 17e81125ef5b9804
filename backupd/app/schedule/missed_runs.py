"""What becomes of the due times of a leg that have passed: started, made up for, missed, skipped. A pure decision.

However many runs were missed, at most one makes up for them. Everything that was due is accounted for: a run that did
not happen is in the catalog with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice

from backupd.app.schedule.calendar import SECOND, Leg, due_times, last_due, start_of
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState
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
    ``routine``: nobody has to look at it. ``replaces``: repetitions of older runs that wait; this one stands for them.
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
    queued or going on; ``waiting``: repetitions of the leg and runs made up for, which wait for a moment of their own;
    ``paused``: why nothing of the server starts by itself, None without a pause."""

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
        return (
            *found,
            Action(
                Outcome.SKIPPED,
                leg,
                newest,
                routine=True,
                message=(
                    f"{_runs(rest, newest, 'did not start')} because the one due at {format_time(begun.due)} "
                    "stands for all"
                ),
            ),
        )
    return (*found, Action(Outcome.START, leg, newest, not_before=start_of(leg, newest), replaces=standing.waiting))


def given_up(leg: Leg, handled: datetime, now: datetime, why: str) -> tuple[Action, ...]:
    """What was due by ``now`` of a leg that is in no policy any more: nothing makes up for it."""
    passed = _between(leg, handled, now)
    return (
        _missed(
            leg, passed, passed[-1], why, "its schedule was taken out of the configuration, so nothing makes up for it"
        )
        if passed
        else ()
    )


def _between(leg: Leg, after: datetime, until: datetime) -> list[datetime]:
    """The first of many, and the last: enough to say how many there were."""
    found = list(islice(due_times(leg, after, until=until), _COUNTED + 1))
    if len(found) > _COUNTED:
        found[-1] = last_due(replace(leg, jitter=timedelta(0), blackout=()), after, until) or found[-1]
    return found


def _paused(leg: Leg, passed: Sequence[datetime], newest: datetime, reason: str) -> Action:
    message = f"{_runs(passed, newest, 'did not start')} because of a pause: {reason}"
    return Action(Outcome.SKIPPED, leg, newest, message, "`backupd resume` lets its jobs start again")


def _on_time(leg: Leg, handled: datetime, newest: datetime, standing: Standing) -> tuple[Action, ...]:
    before = last_due(leg, handled, start_of(leg, newest) - SECOND)  # the newest that should have started earlier
    found = (
        _missed(leg, _between(leg, handled, before), before, standing.why, "the next run follows now") if before else ()
    )
    joined = _between(leg, before or handled, newest)
    if standing.open_job is not None:
        return (*found, _overtaken(leg, joined, newest, standing.open_job))
    if len(joined) > 1:
        found = (
            *found,
            Action(
                Outcome.SKIPPED,
                leg,
                joined[-2],
                routine=True,
                message=f"{_runs(joined[:-1], joined[-2], 'did not start')} because of the "
                f"blackout: the one due at {format_time(newest)} stands for all",
            ),
        )
    return (*found, Action(Outcome.START, leg, newest, replaces=standing.waiting))


def _late(
    leg: Leg,
    passed: Sequence[datetime],
    newest: datetime,
    now: datetime,
    standing: Standing,
) -> tuple[Action, ...]:
    why, open_job = standing.why, standing.open_job
    if open_job is not None:
        return _missed(leg, passed, newest, why, f"job {open_job.id} is {open_job.state} and stands for all")
    if not leg.catch_up:
        return _missed(
            leg,
            passed,
            newest,
            why,
            "timing.catch_up is off, so nothing makes up for it: start one by hand if you need it now",
        )
    soonest = start_of(leg, now)
    return (
        *_missed(leg, passed, newest, why, "one run makes up for it"),
        Action(Outcome.CATCH_UP, leg, newest, not_before=soonest if soonest > now else None, replaces=standing.waiting),
    )


def absorb(actions: Iterable[Action]) -> tuple[Action, ...]:
    """A full backup that is about to be taken stands for the increments of its server that would start beside it."""
    found = tuple(actions)
    fulls = {action.leg.server for action in found if action.leg.kind is JobKind.FULL and action.outcome in STARTING}
    kept = []
    for action in found:
        if action.leg.kind is not JobKind.INCREMENTAL or action.leg.server not in fulls:
            kept.append(action)
        elif action.outcome is Outcome.MISSED:
            kept.append(replace(action, hint="the full backup that is taken now stands for it"))
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
    """Rows for ``actions``; a run that makes up for missed ones, or takes the place of a repetition, names their row as
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
        "let the schedule leave more time between runs, or see what holds that one up: "
        f"backupd jobs show {open_job.id}",
    )


def _runs(passed: Sequence[datetime], newest: datetime, verb: str) -> str:
    if len(passed) == 1:
        return f"the run due at {format_time(newest)} {'was missed' if verb == 'missed' else verb}"
    count = f"more than {_COUNTED:,}" if len(passed) > _COUNTED else f"{len(passed):,}"
    happened = "were missed" if verb == "missed" else verb
    return f"{count} runs {happened} between {format_time(passed[0])} and {format_time(newest)}"
