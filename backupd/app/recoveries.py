"""That a job is well again: told once, when the last that was heard of it was bad."""

from __future__ import annotations

from datetime import datetime

from backupd.app.schedule import KINDS, logical_leg
from backupd.app.wiring import Wiring
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord

RECOVERED = "job-recovered"
BAD = ("job-failed", "job-partial", "job-abandoned", "job-missed", "job-skipped", "job-hanging", "job-waiting",
       "job-not-followed", "schedule-broken")
_GRAVE = (Severity.WARNING, Severity.ERROR)


def recovered(wiring: Wiring, job: JobRecord, now: datetime) -> list[Event]:
    """What to tell when ``job`` has gone well. What a person started counts for the schedule of the same thing, too.
    Raises CatalogError."""
    found = []
    for subject in _subjects(job):
        bad = wiring.catalog.events.last(job.server, BAD, subject, severities=_GRAVE)
        well = wiring.catalog.events.last(job.server, (RECOVERED,), subject)
        if bad is not None and (well is None or well.number < bad.number):
            whose = f"{subject} of {job.server}" if job.server else subject
            found.append(Event(now, RECOVERED, Severity.INFO, f"{whose} went well again", server=job.server,
                               subject=subject, job_id=job.id))
    return found


def _subjects(job: JobRecord) -> tuple[str, ...]:
    """Legs and kinds that ``job`` makes good."""
    legs: tuple[str, ...]
    if job.kind == JobKind.LOGICAL:
        legs = () if job.arguments.get("tables") else (logical_leg(str(job.arguments.get("set") or "")),)
    else:
        legs = tuple(leg for leg, kind in KINDS.items() if kind == job.kind)
    return tuple(dict.fromkeys([*([job.leg] if job.leg else []), *legs, job.kind]))
