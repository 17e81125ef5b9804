"""That a job is well again: told once, when the last that was heard of it was bad.

The life of a job in the process that does it: the row before, a pulse meanwhile, the outcome afterwards.

A job ends as ``cancelled`` when somebody wanted that (`backupd jobs cancel`, a signal, Ctrl-C), as ``failed`` when it
went wrong by itself. A repetition is a new job that names this one as ``previous``.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from backupd.app.context.audit import REFUSALS
from backupd.app.context.logging_setup import job_log, redacted, remove_logs, say
from backupd.app.context.run import JobRun, Result
from backupd.app.context.wiring import Wiring, owner, owner_state, user
from backupd.app.jobs.heartbeat import BEAT, DAEMON_STOP, PATIENCE, Pulse
from backupd.app.schedule.calendar import KINDS, logical_leg
from backupd.model.errors import (
    BackupdError,
    CancelledError,
    CatalogError,
    ConfigurationError,
    DumpsOnlyError,
    ElsewhereError,
    NotFoundError,
    RefusedError,
    UnknownTableError,
)
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState, Report
from backupd.model.text import new_id
from policies.schema import Policy

RECOVERED = "job-recovered"
BAD = (
    "job-failed",
    "job-partial",
    "job-abandoned",
    "job-missed",
    "job-skipped",
    "job-hanging",
    "job-waiting",
    "job-not-followed",
    "schedule-broken",
)
_REMEMBERED = 1000
_FORGOTTEN = timedelta(days=1)
"""What was asked for by hand, and failed, is told as no trouble any more after so long."""
_GRAVE = (Severity.WARNING, Severity.ERROR)


def recovered(wiring: Wiring, job: JobRecord, now: datetime) -> list[Event]:
    """What to tell when ``job`` has gone well. What a person started counts for the schedule of the same thing, too.
    Raises CatalogError."""
    found = []
    legs = _legs(job)
    for subject in dict.fromkeys([*legs, job.kind]):
        bad = wiring.catalog.events.last(job.server, BAD, subject, severities=_GRAVE)
        well = wiring.catalog.events.last(job.server, (RECOVERED,), subject)
        after = well.number if well is not None else 0
        if bad is not None and after < bad.number and (subject in legs or _is_all_the_same(wiring, job, after, now)):
            whose = f"{subject} of {job.server}" if job.server else subject
            found.append(
                Event(
                    now,
                    RECOVERED,
                    Severity.INFO,
                    f"{whose} went well again",
                    server=job.server,
                    subject=subject,
                    job_id=job.id,
                )
            )
    return found


def _is_all_the_same(wiring: Wiring, job: JobRecord, after: int, now: datetime) -> bool:
    """Did everything of this kind that failed since then, and is not forgotten yet, do what ``job`` did? A restore
    into one folder says nothing about one into another."""
    bad = {
        event.job_id
        for event in wiring.catalog.events.list(server=job.server, after=after, limit=_REMEMBERED)
        if event.kind in BAD and event.severity in _GRAVE and event.subject == job.kind and now - event.at < _FORGOTTEN
    }
    for job_id in bad - {""}:
        try:
            if _task(wiring.catalog.jobs.get(job_id)) != _task(job):
                return False
        except NotFoundError:
            return False
    return True


def _task(job: JobRecord) -> dict[str, object]:
    """What was asked for, however often it is tried."""
    return {name: value for name, value in job.arguments.items() if name != "retry"}


def _legs(job: JobRecord) -> tuple[str, ...]:
    """Those that ``job`` makes good."""
    legs: tuple[str, ...]
    if job.kind == JobKind.LOGICAL:
        legs = () if job.arguments.get("tables") else (logical_leg(str(job.arguments.get("set") or "")),)
    else:
        legs = tuple(leg for leg, kind in KINDS.items() if kind == job.kind)
    return tuple(dict.fromkeys([*([job.leg] if job.leg else []), *legs]))


T = TypeVar("T")

KEPT = timedelta(days=90)
"""How long jobs that are over stay in the catalog, with their logs."""
RETENTION_LEG = "retention"
_SILENT = (JobKind.RETENTION, JobKind.CHALLENGE, JobKind.RESTORE, JobKind.REMOVAL)
"""Kinds that report no progress, or not in every phase, so that nobody can tell whether they make any."""
LONGEST_SILENCE = timedelta(hours=6)
"""How long those may take, and jobs of no server be without progress."""
_TELL_THEMSELVES = (JobKind.REPLICATE,)
"""Kinds that are tried again as often as it takes, with one event when that begins and one when it is over."""
BACKUPS = (JobKind.FULL, JobKind.INCREMENTAL, JobKind.LOGICAL)


@dataclass(frozen=True, slots=True)
class Asked:
    """``by`` whom a job is done in this process; ``begun`` is told its id once it has a row."""

    by: str
    begun: Callable[[str], None]


def _nothing(_done: object) -> Result:
    return Result()


def run_here(
    wiring: Wiring,
    kind: JobKind,
    server: str,
    work: Callable[[JobRun], T],
    *,
    report: Report,
    arguments: dict[str, Any] | None = None,
    result: Callable[[T], Result] = _nothing,
    asked: Asked | None = None,
) -> T:
    """Record a job, do ``work`` as that job in this process, and record how it ended. ``result`` tells what the row
    should say of what ``work`` gave.

    Raises what ``work`` raises, and RefusedError when the job was taken from this process meanwhile.
    """
    policy_of(wiring, server, kind)  # a broken one is told before there is a row
    abandon_dead(wiring)
    now = wiring.clock()
    job = JobRecord(
        id=new_id(now),
        kind=str(kind),
        server=server,
        state=JobState.RUNNING,
        queued_at=now,
        started_at=now,
        heartbeat_at=now,
        owner=owner(),
        requested_by=asked.by if asked else user(),
        arguments=arguments or {},
        token=1,
    )
    wiring.catalog.jobs.add(job)
    if asked is not None:
        asked.begun(job.id)
    return live(wiring, job, work, result, report, watched=True)


def live(
    wiring: Wiring,
    job: JobRecord,
    work: Callable[[JobRun], T],
    result: Callable[[T], Result],
    report: Report,
    *,
    watched: bool = False,
) -> T:
    """Do ``work`` as ``job``, which runs and is this process's, to its recorded end; see ``run_here``. ``watched``:
    whoever asked for it sees how it ends."""
    policy = policy_of(wiring, job.server, job.kind)
    if job.kind != JobKind.RESTORE:  # for which everybody else waits
        _yield_to_others(policy.limits.nice if policy is not None else None)
    pulse = Pulse(wiring, job, report, hang=_patience(policy, job), rates=wiring.catalog.rates.of(job.server))
    with job_log(wiring.settings, job.id) as log:
        say("job-started", f"{job.kind}, attempt {job.attempt}", server=job.server, job=job.id)
        done: list[T] = []
        try:
            with pulse:
                done.append(work(JobRun(job, pulse.report, pulse.cancel, pulse.fence, log)))
        except BaseException as error:
            # A signal after the last step came too late: what was committed is not cancelled.
            if not done or not isinstance(error, KeyboardInterrupt):
                with _undisturbed():
                    told = _ended_badly(wiring, job, pulse, error, watched=watched)
                if told is error:
                    raise
                raise told from error
        with _undisturbed():
            _ended_well(wiring, job, result(done[0]))
        return done[0]


def _patience(policy: Policy | None, job: JobRecord) -> timedelta:
    """How long it may be without progress."""
    if policy is None or job.kind in _SILENT:
        return max(LONGEST_SILENCE, policy.limits.hang if policy is not None else LONGEST_SILENCE)
    return policy.limits.hang


def _ended_well(wiring: Wiring, job: JobRecord, result: Result) -> None:
    state = JobState.SUCCEEDED
    if result.problem is not None:
        state = JobState.PARTIAL if result.partial else JobState.FAILED
    again = state is JobState.PARTIAL and not result.accepted
    _patiently(partial(close, wiring, job, state, error=result.problem, result=result, again=again))


def _ended_badly(wiring: Wiring, job: JobRecord, pulse: Pulse, error: BaseException, *, watched: bool) -> BaseException:
    """Record it; gives the error that the caller should see: the reason for a stop rather than the stop."""
    if pulse.lost is not None:
        say("job-lost", pulse.lost.message, level=logging.ERROR, server=job.server, job=job.id)
        return pulse.lost
    told: BaseException = error
    by = pulse.cancel_by or (_canceller(wiring, job) if isinstance(error, KeyboardInterrupt) else "")
    if pulse.problem is not None:
        told = pulse.problem
        ending = partial(close, wiring, job, JobState.FAILED, error=pulse.problem, again=True)
    elif by:
        told = CancelledError(f"job {job.id} was cancelled by {by}")
        ending = partial(close, wiring, replace(job, cancel_by=by), JobState.CANCELLED, error=told)
    elif isinstance(error, KeyboardInterrupt):
        name = signal.Signals(getattr(error, "number", signal.SIGINT)).name
        ending = partial(close, wiring, job, JobState.CANCELLED, error=CancelledError(f"stopped by {name}"))
    elif isinstance(error, (ElsewhereError, DumpsOnlyError, UnknownTableError)) or (
        watched and job.kind == JobKind.RESTORE and isinstance(error, REFUSALS)
    ):
        # Somebody forgot --confirm, mistyped a table, or asked for what no policy plans, and was told: nothing was
        # done, and nothing is broken.
        ending = partial(close, wiring, job, JobState.CANCELLED, error=error)
    else:
        shown = error if isinstance(error, BackupdError) else _internal(job, error)
        # A lease at a destination that was lost is a cancellation that nobody asked for.
        again = shown.retryable or isinstance(shown, CancelledError)
        ending = partial(close, wiring, job, JobState.FAILED, error=shown, again=again)
    _patiently(ending)
    return told


def _canceller(wiring: Wiring, job: JobRecord) -> str:
    """Who asked to stop this job: the signal may have come before the heartbeat that would have told."""
    with suppress(BackupdError):
        return wiring.catalog.jobs.get(job.id).cancel_by
    return ""


def _patiently(ending: Callable[[], JobRecord]) -> None:
    """A catalog that cannot be reached for a moment must not make a good run look lost."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            ending()
        except CatalogError:
            if time.monotonic() > deadline:
                raise
            time.sleep(BEAT)
        else:
            return


def close(
    wiring: Wiring,
    job: JobRecord,
    state: JobState,
    *,
    error: BackupdError | None = None,
    result: Result | None = None,
    again: bool = False,
) -> JobRecord:
    """Record the end of ``job``, the event that tells of it, and the jobs that follow from it, all at once.

    ``again``: trying once more may help. Raises RefusedError when the job is over or somebody else's.
    """
    came_to, now = result or Result(), wiring.clock()
    shown = (
        None
        if error is None
        else BackupdError(redacted(error.message), detail=redacted(error.detail), hint=redacted(error.hint))
    )
    then: list[JobRecord] = []
    trouble = ""
    try:
        then = _follow_ups(wiring, job, state, again=again)
    except BackupdError:
        raise
    except Exception as unforeseen:  # noqa: BLE001  told in an event: no job may stay open because of what follows
        trouble = f"what follows from this job cannot be told: {type(unforeseen).__name__}: {unforeseen}"
    severity = Severity.INFO if state is JobState.CANCELLED else Severity.ERROR
    if state is JobState.PARTIAL and came_to.accepted:
        severity = Severity.WARNING
    quiet = job.kind in _TELL_THEMSELVES and state is JobState.FAILED
    events = (
        []
        if shown is None or quiet
        else [
            Event(
                at=now,
                kind=f"job-{state}",
                severity=severity,
                server=job.server,
                subject=job.leg or job.kind,
                message=shown.message,
                detail=shown.detail,
                hint=shown.hint,
                job_id=job.id,
            )
        ]
    )
    if state is JobState.SUCCEEDED:
        events += recovered(wiring, job, now)
    if trouble:
        say("job-not-followed", trouble, level=logging.ERROR, server=job.server, job=job.id)
        events.append(
            Event(
                at=now,
                kind="job-not-followed",
                severity=Severity.ERROR,
                server=job.server,
                subject=job.leg or job.kind,
                message=trouble,
                job_id=job.id,
                hint="neither a repetition nor retention was queued: run it again by hand, and look at the policy",
            )
        )
    ended = wiring.catalog.jobs.finish(
        job.id,
        state,
        now,
        token=job.token,
        error=shown,
        result=came_to.id,
        bytes=came_to.bytes,
        phases=came_to.phases,
        then=then,
        events=events,
    )
    if job.kind == JobKind.RESTORE:
        wiring.catalog.restores.settle(now)
        for follower in then:
            wiring.catalog.restores.requeue(str(follower.arguments["restore"]), follower.id)
    say(
        f"job-{state}",
        str(shown) if shown else f"{came_to.bytes} bytes",
        server=job.server,
        job=job.id,
        level=logging.ERROR if state in (JobState.FAILED, JobState.PARTIAL, JobState.ABANDONED) else logging.INFO,
    )
    for follower in then:
        say(
            "job-queued",
            f"{follower.kind}, attempt {follower.attempt}, follows from {job.id}",
            server=job.server,
            job=follower.id,
        )
    return ended


def _follow_ups(wiring: Wiring, job: JobRecord, state: JobState, *, again: bool) -> list[JobRecord]:
    now = wiring.clock()
    if state is JobState.CANCELLED and job.cancel_by == DAEMON_STOP:
        return [repetition(job, now, attempt=job.attempt)]
    try:
        policy = policy_of(wiring, job.server, job.kind)
    except ConfigurationError:  # what waits in the queue waits there until the policy is whole
        killed = state is JobState.ABANDONED and bool(job.leg)
        return [repetition(job, now, attempt=job.attempt + 1)] if killed else []
    if policy is None:
        return []
    then: list[JobRecord] = []
    if (
        state in (JobState.SUCCEEDED, JobState.PARTIAL)
        and job.kind in BACKUPS
        and policy.retention
        and not wiring.catalog.jobs.list(job.server, kind=JobKind.RETENTION, state=JobState.QUEUED, limit=1)
    ):
        then.append(
            JobRecord(
                id=new_id(now),
                kind=JobKind.RETENTION,
                server=job.server,
                state=JobState.QUEUED,
                queued_at=now,
                leg=RETENTION_LEG,
            )
        )
    wanted = job.leg or job.arguments.get("retry")
    if (again or state is JobState.ABANDONED) and wanted and job.attempt < policy.retry.attempts:
        then.append(repetition(job, now, attempt=job.attempt + 1, wait=policy.retry.wait(job.attempt)))
    return then


def repetition(job: JobRecord, now: datetime, *, attempt: int, wait: timedelta = timedelta(0)) -> JobRecord:
    """The same job again, as its successor."""
    return JobRecord(
        id=new_id(now),
        kind=job.kind,
        server=job.server,
        state=JobState.QUEUED,
        queued_at=now,
        due_at=job.due_at,
        not_before=now + wait,
        attempt=attempt,
        previous=job.id,
        leg=job.leg,
        requested_by=job.requested_by,
        arguments=job.arguments,
    )


def abandon_dead(wiring: Wiring) -> tuple[JobRecord, ...]:
    """End jobs whose process is gone, with an event each; those of a schedule are tried again. Gives them.

    Each by itself: one that cannot be ended is told, and the next one is looked at.
    """
    wiring.catalog.restores.settle(wiring.clock())
    gone = BackupdError(
        "the process that ran this job is gone",
        hint="run it again; whatever it left at a destination is removed by the next run",
    )
    stopped = CancelledError("the process that ran this job was killed because the service had to stop")
    ended = []
    for job in wiring.catalog.jobs.dead(owner_state, wiring.clock()):
        mark = _stop_mark(wiring, job)
        try:
            if mark.exists():
                ended.append(close(wiring, replace(job, cancel_by=DAEMON_STOP), JobState.CANCELLED, error=stopped))
            else:
                ended.append(close(wiring, job, JobState.ABANDONED, error=gone))
            mark.unlink(missing_ok=True)
        except RefusedError:
            continue  # it ended by itself, or another process was faster
        except CatalogError:
            raise
        except (BackupdError, OSError) as error:
            say(
                "job-not-ended",
                f"it has no process and cannot be ended: {error}",
                level=logging.ERROR,
                server=job.server,
                job=job.id,
            )
    return tuple(ended)


def mark_stopped(wiring: Wiring, job: JobRecord) -> None:
    """Note, where the catalog does not answer, that the service's stop ended this job: ``abandon_dead`` queues it
    again."""
    mark = _stop_mark(wiring, job)
    try:
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)
    except OSError as error:
        say(
            "job-not-ended",
            f"the note {mark} cannot be written: {error.strerror}",
            level=logging.ERROR,
            server=job.server,
            job=job.id,
        )


def _stop_mark(wiring: Wiring, job: JobRecord) -> Path:
    return wiring.settings.spool / "stopped" / job.id


def cancel(wiring: Wiring, job_id: str, by: str) -> JobRecord:
    """Cancel a queued job, or ask whoever runs it to stop. Raises RefusedError when it is over, NotFoundError."""
    job = wiring.catalog.jobs.request_cancel(job_id, by, wiring.clock())
    if job.kind == JobKind.RESTORE:
        wiring.catalog.restores.settle(wiring.clock())
    say("job-cancel-requested", f"by {by}", server=job.server, job=job.id)
    return job


def prune(wiring: Wiring) -> tuple[str, ...]:
    """Forget jobs that were over long ago, and their logs; gives their ids."""
    gone = wiring.catalog.jobs.prune(wiring.clock() - KEPT)
    remove_logs(wiring.settings, gone)
    return gone


def policy_of(wiring: Wiring, server: str, kind: str = "") -> Policy | None:
    """None for a server that is not configured (any more). Raises ConfigurationError for a policy that is broken, but
    for a restore: that does without."""
    with suppress(NotFoundError):
        found = wiring.settings.server(server)
        return found.found if kind == JobKind.RESTORE else found.policy
    return None


def _internal(job: JobRecord, error: BaseException) -> BackupdError:
    """An error that is none of ours, in a sentence; its traceback goes to the job's log."""
    say("job-traceback", "".join(traceback.format_exception(error)), level=logging.ERROR, server=job.server, job=job.id)
    hint = f"`backupd jobs log {job.id}` says where it happened"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return BackupdError(f"{job.kind} failed: {place}{error.strerror or error}", hint=hint)
    first = (str(error).splitlines() or [""])[0]
    return BackupdError(f"internal error: {type(error).__name__}: {first}", hint=hint)


def _yield_to_others(nice: int | None) -> None:
    """Lower the priority of this process and of all that it starts. Linux derives the I/O priority from it."""
    if nice is not None and os.getpriority(os.PRIO_PROCESS, 0) < nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No signal keeps the outcome from being recorded: those that ask to stop come too late."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def too_late(_number: int, _frame: FrameType | None) -> None:
        """The work is over already."""

    before = {number: signal.signal(number, too_late) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
