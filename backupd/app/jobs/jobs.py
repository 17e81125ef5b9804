"""What becomes of jobs: closed with their event and the jobs that follow, cancelled, abandoned where their process is
gone, forgotten after a while; and the event that one went well again, once, after the last one reported was bad.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from backupd.app.context.logging_setup import redacted, remove_logs, say
from backupd.app.context.run import Result
from backupd.app.context.wiring import Wiring, owner_state
from backupd.app.jobs.heartbeat import DAEMON_STOP
from backupd.app.schedule.calendar import KINDS, logical_leg
from backupd.model.errors import (
    BackupdError,
    CancelledError,
    CatalogError,
    ConfigurationError,
    NotFoundError,
    RefusedError,
)
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState
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
"""How long a failure of what was asked for by hand counts as trouble."""
_GRAVE = (Severity.WARNING, Severity.ERROR)
KEPT = timedelta(days=90)
"""How long jobs that are over stay in the catalog, with their logs."""
RETENTION_LEG = "retention"
_TELL_THEMSELVES = (JobKind.REPLICATE,)
"""Kinds that are tried again as often as it takes, with one event when that begins and one when it is over."""
BACKUPS = (JobKind.FULL, JobKind.INCREMENTAL, JobKind.LOGICAL)


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
    except Exception as unforeseen:  # noqa: BLE001  reported as an event: no job may stay open because of what follows
        trouble = f"the jobs that follow this one cannot be determined: {type(unforeseen).__name__}: {unforeseen}"
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


# -- well again


def recovered(wiring: Wiring, job: JobRecord, now: datetime) -> list[Event]:
    """The events that report that ``job`` has gone well. What a person started counts for the schedule of the same
    thing, too. Raises CatalogError."""
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
