"""Jobs that are run right here, by the process that was asked: the row is written before and after the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from backupd.app.run import JobRun
from backupd.app.wiring import Wiring, owner, owner_is_alive
from backupd.model.errors import BackupdError, CancelledError
from backupd.model.ids import new_id
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.progress import Report
from backupd.model.proof import Phase

T = TypeVar("T")


def run_here(wiring: Wiring, kind: JobKind, server: str, work: Callable[[JobRun], T], *, report: Report,
             arguments: dict[str, Any] | None = None) -> T:
    """Record a job, do ``work`` as that job in this process, and record how it ended. Raises what ``work`` raises."""
    wiring.catalog.jobs.abandon_dead(owner_is_alive, wiring.clock())
    now = wiring.clock()
    job = JobRecord(id=new_id(now), kind=str(kind), server=server, state=JobState.RUNNING, queued_at=now,
                    started_at=now, owner=owner(), arguments=arguments or {}, token=1)
    wiring.catalog.jobs.add(job)
    try:
        result = work(JobRun(job, report))
    except BaseException as error:
        shown = error if isinstance(error, BackupdError) else BackupdError(f"stopped: {type(error).__name__}")
        state = JobState.CANCELLED if isinstance(error, CancelledError) else JobState.FAILED
        wiring.catalog.jobs.finish(job.id, state, wiring.clock(), error=shown)
        raise
    seconds = (wiring.clock() - now).total_seconds()
    wiring.catalog.jobs.finish(job.id, JobState.SUCCEEDED, wiring.clock(), phases=[Phase("backup", seconds, 0)])
    return result
