"""Events: as a list, or as they come."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from api.auth import Acting, CurrentActor, OnSite, still_allowed
from api.events import Broadcaster, Wanted, stream
from api.routes.answers import VIEWER, page, router_of
from api.schemas.jobs import Event, EventsQuery

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
    actor: CurrentActor,
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
    accept = request.headers.get("accept", "")
    if "application/json" in accept and "text/event-stream" not in accept:
        return page(
            request,
            await run_in_threadpool(
                service.listings.events,
                query.server,
                kind=query.kind,
                job=query.job,
                severity=query.severity,
                span=query.span,
                limit=query.limit,
                after=query.after,
            ),
        )
    if query.job is not None:
        await run_in_threadpool(service.jobs.get, query.job)  # one that is not there is told at once
    pieces = stream(
        broadcaster,
        site.wiring,
        Wanted(actor, query.server, query.job),
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
