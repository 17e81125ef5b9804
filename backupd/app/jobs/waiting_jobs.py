"""Jobs that wait for others: why, told where people look for them, and loudly when it lasts."""

from __future__ import annotations

from datetime import datetime, timedelta

from backupd.app.context.wiring import Wiring
from backupd.app.jobs.admission import obstacle
from backupd.backup.checks.finding import Finding, warning
from backupd.model.event import Event, Severity
from backupd.model.hold import HoldKind
from backupd.model.job import JobRecord, JobState
from backupd.model.text import format_duration

NOTED = timedelta(minutes=1)
"""A job that has waited for so long has the reason in its row."""
LONG = timedelta(hours=1)
"""A job that has waited for so long deserves a look."""

NOTHING = "nothing keeps it, the service has not come to it"

_HINT = "see what runs: backupd jobs --state running; limits are under concurrency: in the configuration"


class QueueWatch:
    """Looks at the queue now and then, and tells of each job once."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()

    def look(self, wiring: Wiring, now: datetime) -> None:
        """Raises CatalogError."""
        late = waiting(wiring, now, NOTED)
        for job, message in late:
            if job.message != message:
                wiring.catalog.jobs.say_waiting(job.id, message, _HINT)
            if now - _since(job) >= LONG and job.id not in self._told:
                wiring.catalog.events.add(
                    Event(
                        at=now,
                        kind="job-waiting",
                        severity=Severity.WARNING,
                        server=job.server,
                        subject=job.leg or job.kind,
                        message=_sentence(job, message, now),
                        hint=_HINT,
                        job_id=job.id,
                    )
                )
                self._told |= {job.id}
        self._told &= {job.id for job, _message in late}


def waiting(wiring: Wiring, now: datetime, span: timedelta) -> list[tuple[JobRecord, str]]:
    """Queued jobs that have waited for others for ``span`` or longer: each with why it has not started."""
    queued = [job for job in wiring.catalog.jobs.list(state=JobState.QUEUED) if now - _since(job) >= span]
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
