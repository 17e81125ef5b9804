"""Jobs: list, show, read the log, cancel; requests for test restores, verifications, copies and thaws; and events, as a
list or as a stream. What is not as it should be, and the messages that tell of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from api.auth import Acting, OnSite, still_allowed
from api.events import Broadcaster, Wanted, stream
from api.routes.answers import ADMIN, OPERATOR, VERSION, VIEWER, accepted, cut, id_of, listed, one, page, router_of
from api.schemas.backups import ReplicationRequest, TestRestoreRequest, VerificationRequest
from api.schemas.base import LABELS, Label, Name, Page
from api.schemas.jobs import (
    Accepted,
    AcceptedJobs,
    AlertsQuery,
    Event,
    EventsQuery,
    Incident,
    Job,
    JobLog,
    JobsQuery,
    LogQuery,
    Message,
    MessagesQuery,
)
from api.schemas.restores import Thaw, Thawed, ThawRequest
from backupd.catalog.row_mapping import Listed
from backupd.model.job import JobRecord
from backupd.model.thaw import Thawing

router = router_of("jobs")
alert_routes = router_of("alerts")

JobId = Annotated[str, id_of("a job", "20261121T020000Z-7f3a9c01")]


@router.get("/jobs", dependencies=[VIEWER], response_model=list[Job])
def list_jobs(request: Request, query: Annotated[JobsQuery, Query()], service: Acting) -> JSONResponse:
    """Jobs, newest first."""
    return listed(request, query, service.labelled(query.label, query.server).listings.jobs)


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


work_routes = router_of("work")


class ThawsQuery(Page):
    """Which thaws."""

    server: Name | None = Field(None, description="Only those of this server.")
    label: list[Label] = Field([], max_length=20, description=LABELS)


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
    listings = service.labelled(query.label, query.server).listings
    found = listings.thaws(query.server, limit=query.limit, after=query.after)
    return page(request, Listed(tuple(_Thaw(*one) for one in found.items), found.next))


event_routes = router_of("events")

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'id: 4711\nevent: event\ndata: {"number": 4711, "kind": "job-failed", "server": '
                '"shop-db1"}\n\n'
                'event: job\ndata: {"id": "20261121T020000Z-7f3a9c01", "state": "running"}\n\n',
            }
        }
    }
}


async def _broadcaster(request: Request) -> Broadcaster:
    found: Broadcaster = request.app.state.broadcaster
    return found


@event_routes.get("/events", dependencies=[VIEWER], response_model=list[Event], responses=_STREAM)
async def list_events(
    request: Request,
    query: Annotated[EventsQuery, Query()],
    service: Acting,
    site: OnSite,
    broadcaster: Annotated[Broadcaster, Depends(_broadcaster)],
    last_event_id: Annotated[
        str | None, Header(pattern=r"^[0-9]{1,18}$", examples=["4711"], description="Go on after this event.")
    ] = None,
) -> Response:
    """As a list, newest first, with `Accept: application/json`. Else as an endless stream (server-sent events): pieces
    named `event`, whose id is the event's number, and `job`, whenever the state or the progress of a job changes; of
    one `job` also as it is now. `Last-Event-ID` goes on where an earlier stream ended; `limit`, `after`, `kind`,
    `severity`, `since` and `until` are of the list alone."""
    service = await run_in_threadpool(service.labelled, query.label, query.server)
    accept = request.headers.get("accept", "")
    if "application/json" in accept and "text/event-stream" not in accept:
        return await run_in_threadpool(listed, request, query, service.listings.events)
    if query.job is not None:
        await run_in_threadpool(service.jobs.get, query.job)  # one that is not there is reported at once
    pieces = stream(
        broadcaster,
        site.wiring,
        Wanted(service.actor, query.server, query.job),
        None if last_event_id is None else int(last_event_id),
        still=partial(still_allowed, request),
    )
    first = await anext(pieces)

    async def whole() -> Any:
        try:
            yield first
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    return StreamingResponse(
        whole(), media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )


# -- alerts

_OPEN = {"open": True, "closed": False, "all": None}


@alert_routes.get("/alerts", dependencies=[VIEWER], response_model=list[Incident])
def list_alerts(request: Request, query: Annotated[AlertsQuery, Query()], service: Acting) -> JSONResponse:
    """What is not as it should be, newest first, each with the next step."""
    alerts = service.labelled(query.label, query.server).alerts

    def found(*, state: str, limit: int, after: str | None, **chosen: Any) -> Listed[Any]:
        return cut(alerts.list(is_open=_OPEN[state], before=after, limit=limit + 1, **chosen), limit)

    return listed(request, query, found)


@alert_routes.post("/alerts/test", dependencies=[ADMIN], response_model=list[Message], status_code=202)
def test_alerts(service: Acting) -> JSONResponse:
    """Have a test message sent by every channel. `GET /v1/messages` tells what became of them."""
    return JSONResponse([message.as_json() for message in service.alerts.test(wait=False)], 202)


@alert_routes.post("/alerts/{id}/acknowledge", dependencies=[OPERATOR], response_model=Incident)
def acknowledge_alert(
    incident_id: Annotated[str, id_of("an alert", "20261121T020712Z-c0ffee01")], service: Acting
) -> JSONResponse:
    """Acknowledge an incident: backupd sends no more reminders, only the recovery message."""
    return one(service.alerts.acknowledge(incident_id))


@alert_routes.get("/messages", dependencies=[VIEWER], response_model=list[Message])
def list_messages(request: Request, query: Annotated[MessagesQuery, Query()], service: Acting) -> JSONResponse:
    """Messages that were sent, or wait to be, newest first."""

    def found(*, limit: int, after: str | None, **chosen: Any) -> Listed[Any]:
        return cut(service.alerts.messages(before=after, limit=limit + 1, **chosen), limit)

    return listed(request, query, found)
