"""That a job is well again: told once, when the last that was heard of it was bad."""

from __future__ import annotations

from datetime import datetime, timedelta

from backupd.app.context.wiring import Wiring
from backupd.app.schedule.calendar import KINDS, logical_leg
from backupd.model.errors import NotFoundError
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord

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
