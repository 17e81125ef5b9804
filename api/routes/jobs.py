"""Jobs: list, show, read, cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from fastapi.responses import JSONResponse

from api.auth import Acting
from api.routes.answers import OPERATOR, VIEWER, one, page, router_of
from api.schemas.jobs import Job, JobLog, JobsQuery, LogQuery

router = router_of("jobs")

JobId = Annotated[
    str,
    Path(
        alias="id", pattern=r"^[A-Za-z0-9-]{1,64}$", examples=["20261121T020000Z-7f3a9c01"], description="Id of a job."
    ),
]


@router.get("/jobs", dependencies=[VIEWER], response_model=list[Job])
def list_jobs(request: Request, query: Annotated[JobsQuery, Query()], service: Acting) -> JSONResponse:
    """Jobs, newest first."""
    return page(
        request,
        service.listings.jobs(
            query.server, kind=query.kind, state=query.state, span=query.span, limit=query.limit, after=query.after
        ),
    )


@router.get("/jobs/{id}", dependencies=[VIEWER], response_model=Job)
def show_job(job_id: JobId, service: Acting) -> JSONResponse:
    """One job, and how far it is. `GET /v1/events?job=ID` tells of every change."""
    return one(service.jobs.get(job_id))


@router.get("/jobs/{id}/log", dependencies=[VIEWER], response_model=JobLog)
def show_job_log(job_id: JobId, query: Annotated[LogQuery, Query()], service: Acting) -> JSONResponse:
    """What a job did and what its tools said."""
    text = service.jobs.log(job_id)
    if query.tail is not None:
        text = "".join(text.splitlines(keepends=True)[-query.tail :])
    return JSONResponse({"id": job_id, "log": text})


@router.post("/jobs/{id}/cancel", dependencies=[OPERATOR], response_model=Job)
def cancel_job(job_id: JobId, service: Acting) -> JSONResponse:
    """Cancel a job that waits, or ask one that runs to stop: it is over when its state says so."""
    return one(service.jobs.cancel(job_id))
