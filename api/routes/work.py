"""Work that people ask for: test restores, verifications, copies, thaws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from api.auth import Acting
from api.routes.answers import OPERATOR, VERSION, VIEWER, accepted, page, router_of
from api.schemas.base import Name, Page
from api.schemas.jobs import Accepted, AcceptedJobs
from api.schemas.proofs import ReplicationRequest, TestRestoreRequest, VerificationRequest
from api.schemas.restores import Thaw, Thawed, ThawRequest
from backupd.catalog.base.pages import Listed
from backupd.model.job import JobRecord
from backupd.model.thaw import Thawing

work_routes = router_of("work")


class ThawsQuery(Page):
    """Which thaws."""

    server: Name | None = Field(None, description="Only those of this server.")


@dataclass(frozen=True, slots=True)
class _Thaw:
    """One, with its job."""

    job: JobRecord
    thaw: Thawing

    def as_json(self) -> dict[str, Any]:
        return {"job": self.job.as_json(), "thaw": self.thaw.as_json()}


@work_routes.post("/test-restores", dependencies=[OPERATOR], response_model=Accepted, status_code=202)
def request_test_restore(asked: TestRestoreRequest, service: Acting) -> JSONResponse:
    """Restore onto a throw-away server, check the data, keep the proof."""
    return accepted(service.requests.test_restore(asked.server, asked.target))


@work_routes.post("/verifications", dependencies=[OPERATOR], response_model=Accepted, status_code=202)
def request_verification(asked: VerificationRequest, service: Acting) -> JSONResponse:
    """Read stored objects again and compare them with their hashes."""
    return accepted(service.requests.verify(asked.server, asked.subset))


@work_routes.post("/replications", dependencies=[OPERATOR], response_model=AcceptedJobs, status_code=202)
def request_replication(asked: ReplicationRequest, service: Acting) -> JSONResponse:
    """Bring destinations up to date: a job for each."""
    jobs = service.requests.replicate(asked.server, asked.destination)
    headers = {"Location": f"{VERSION}/jobs/{jobs[0].id}"} if jobs else {}
    return JSONResponse({"jobs": [job.as_json() for job in jobs]}, 202, headers)


@work_routes.post("/thaws", dependencies=[OPERATOR], response_model=Thawed, status_code=202)
def request_thaw(asked: ThawRequest, service: Acting) -> JSONResponse:
    """Ask for what a restore needs out of archives. It costs money: a plan says how much."""
    done = service.restores.thaw(asked.server, asked.target, tier=asked.tier, days=asked.days, tables=asked.tables)
    headers = {"Location": f"{VERSION}/jobs/{done.job.id}"} if done.job is not None else {}
    return JSONResponse(done.as_json(), 202, headers)


@work_routes.get("/thaws", dependencies=[VIEWER], response_model=list[Thaw])
def list_thaws(request: Request, query: Annotated[ThawsQuery, Query()], service: Acting) -> JSONResponse:
    """What is being thawed, and what was, newest first."""
    found = service.listings.thaws(query.server, limit=query.limit, after=query.after)
    return page(request, Listed(tuple(_Thaw(*one) for one in found.items), found.next))
