"""The pages of jobs: what runs, what ran, how far it is, and its log."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from api.auth import Acting, allowed
from api.web.site import link, render
from api.web.words import Shown, problem_of
from backupd.app.restores.progress import RestoreView
from backupd.app.service.facade import Service
from backupd.model.access import Role
from backupd.model.errors import BackupdError, NotFoundError
from backupd.model.job import JobKind, JobRecord, JobState

PAGE = 60
_LINES = 300
"""Of a log, the last, unless the whole is asked for."""
_GOING = (JobState.RUNNING, JobState.QUEUED, JobState.WAITING)

router = APIRouter(include_in_schema=False, dependencies=[Depends(allowed(Role.VIEWER))])


@router.get("/jobs")
def jobs(
    request: Request,
    service: Acting,
    server: str = "",
    kind: str = "",
    state: str = "",
    after: Annotated[str | None, Query()] = None,
) -> HTMLResponse:
    """Words that are no kind or state choose nothing."""
    wanted = JobState(state) if state in set(JobState) else None
    wanted_kind = kind if kind in set(JobKind) else None
    lists = service.listings
    going = (
        []
        if after or wanted or wanted_kind
        else [job for one in _GOING for job in lists.jobs(server or None, state=one, limit=PAGE).items]
    )
    found = lists.jobs(server or None, kind=wanted_kind, state=wanted, limit=PAGE, after=after or None)
    at_work = {job.id for job in going}
    chosen = {"server": server, "kind": kind, "state": state}
    return render(
        request,
        "jobs.html",
        going=going,
        jobs=[job for job in found.items if job.id not in at_work],
        servers=lists.servers(),
        kinds=list(JobKind),
        states=list(JobState),
        chosen=chosen,
        newer=link("jobs", **chosen) if after else "",
        older=link("jobs", **chosen, after=found.next) if found.next else "",
    )


@router.get("/jobs/{job_id}")
def job(request: Request, service: Acting, job_id: str, log: str = "", read: str = "") -> HTMLResponse:
    """``log``: all for the whole of it. With ``read`` also the runbook of a restore, which asks a destination."""
    found = service.jobs.get(job_id)
    restore = _restore_of(service, found)
    text, problem = _log(service, job_id)
    lines = text.splitlines()
    shown = lines if log == "all" else lines[-_LINES:]
    return render(
        request,
        "job.html",
        job=found,
        log="\n".join(shown),
        left_out=len(lines) - len(shown),
        log_problem=problem,
        restore=restore,
        runbook=service.requests.runbook_of_restore(restore.record.id) if read and restore else "",
        is_going=found.state in _GOING,
        percent=_percent(found),
        made=_made(found),
        took=_took(found),
    )


def _log(service: Service, job_id: str) -> tuple[str, Shown | None]:
    try:
        return service.jobs.log(job_id), None
    except BackupdError as error:
        return "", problem_of(error)


def _restore_of(service: Service, found: JobRecord) -> RestoreView | None:
    """The restore that the job does, or did."""
    restore_id = found.result or str(found.arguments.get("restore", ""))
    if found.kind != JobKind.RESTORE or not restore_id:
        return None
    try:
        return service.requests.restore_view(restore_id)
    except NotFoundError:
        return None  # one in the foreground that ended before it had begun


def _percent(found: JobRecord) -> float | None:
    progress = found.progress or {}
    done, total = progress.get("bytes"), progress.get("bytes_total")
    return min(max(done / total * 100, 0.0), 100.0) if done is not None and total else None


def _made(found: JobRecord) -> str:
    """Where what it made is shown, "" where that is nothing with a page."""
    if not found.result:
        return ""
    if found.kind in (JobKind.FULL, JobKind.INCREMENTAL, JobKind.LOGICAL):
        return link("backups", found.result)
    return link("proofs", found.result) if found.kind == JobKind.TEST_RESTORE else ""


def _took(found: JobRecord) -> timedelta | None:
    end: datetime | None = found.finished_at
    return end - found.started_at if end is not None and found.started_at is not None else None
