"""What is not as it should be, and the messages that tell of it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import JSONResponse

from api.auth import Acting
from api.routes.answers import ADMIN, OPERATOR, VIEWER, cut, id_of, listed, one, router_of
from api.schemas.jobs import AlertsQuery, Incident, Message, MessagesQuery
from backupd.catalog.row_mapping import Listed

router = router_of("alerts")

_OPEN = {"open": True, "closed": False, "all": None}


@router.get("/alerts", dependencies=[VIEWER], response_model=list[Incident])
def list_alerts(request: Request, query: Annotated[AlertsQuery, Query()], service: Acting) -> JSONResponse:
    """What is not as it should be, newest first, each with the next step."""

    def found(*, state: str, limit: int, after: str | None, **chosen: Any) -> Listed[Any]:
        return cut(service.alerts.list(is_open=_OPEN[state], before=after, limit=limit + 1, **chosen), limit)

    return listed(request, query, found)


@router.post("/alerts/test", dependencies=[ADMIN], response_model=list[Message], status_code=202)
def test_alerts(service: Acting) -> JSONResponse:
    """Have a test message sent by every channel. `GET /v1/messages` tells what became of them."""
    return JSONResponse([message.as_json() for message in service.alerts.test(wait=False)], 202)


@router.post("/alerts/{id}/acknowledge", dependencies=[OPERATOR], response_model=Incident)
def acknowledge_alert(
    incident_id: Annotated[str, id_of("an alert", "20261121T020712Z-c0ffee01")], service: Acting
) -> JSONResponse:
    """Acknowledge an incident: backupd sends no more reminders, only the recovery message."""
    return one(service.alerts.acknowledge(incident_id))


@router.get("/messages", dependencies=[VIEWER], response_model=list[Message])
def list_messages(request: Request, query: Annotated[MessagesQuery, Query()], service: Acting) -> JSONResponse:
    """Messages that were sent, or wait to be, newest first."""

    def found(*, limit: int, after: str | None, **chosen: Any) -> Listed[Any]:
        return cut(service.alerts.messages(before=after, limit=limit + 1, **chosen), limit)

    return listed(request, query, found)
