"""Holds and pauses."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from fastapi.responses import JSONResponse

from api.auth import Acting
from api.routes.answers import ADMIN, VIEWER, router_of, several
from api.schemas.holds import Held, Hold, HoldRequest, Paused, PauseRequest, Released, ReleaseQuery
from backupd.model.hold import HoldKind

hold_routes = router_of("holds")


@hold_routes.get("/holds", dependencies=[VIEWER], response_model=list[Hold])
def list_holds(service: Acting) -> JSONResponse:
    """Of which servers nothing is deleted."""
    return several(hold for hold in service.retention.holds() if hold.kind is HoldKind.HOLD)


@hold_routes.post("/holds", dependencies=[ADMIN], response_model=Held, status_code=201)
def set_hold(asked: HoldRequest, service: Acting) -> JSONResponse:
    """Delete nothing of a server until that is released: neither by rule nor by hand."""
    return JSONResponse(service.retention.hold(asked.server, asked.reason).as_json(), 201)


@hold_routes.delete("/holds", dependencies=[ADMIN], response_model=Released)
def release_hold(query: Annotated[ReleaseQuery, Query()], service: Acting) -> JSONResponse:
    """Let the rules go on."""
    return _released(service, query.server, HoldKind.HOLD)


@hold_routes.get("/pauses", dependencies=[VIEWER], response_model=list[Hold])
def list_pauses(service: Acting) -> JSONResponse:
    """Of which servers nothing starts by itself."""
    return several(hold for hold in service.retention.holds() if hold.kind is HoldKind.PAUSE)


@hold_routes.post("/pauses", dependencies=[ADMIN], response_model=Paused, status_code=201)
def set_pause(asked: PauseRequest, service: Acting) -> JSONResponse:
    """Start nothing of a server by itself until that is released; its binary log is not streamed meanwhile, either."""
    paused = service.retention.pause(asked.server, asked.reason, stop_running=asked.stop_running)
    return JSONResponse(paused.as_json(), 201)


@hold_routes.delete("/pauses", dependencies=[ADMIN], response_model=Released)
def release_pause(query: Annotated[ReleaseQuery, Query()], service: Acting) -> JSONResponse:
    """Let its jobs start by themselves again."""
    return _released(service, query.server, HoldKind.PAUSE)


def _released(service: Acting, server: str, kind: HoldKind) -> JSONResponse:
    problems = service.retention.release(server, kind)
    return JSONResponse({"server": server, "kind": str(kind), "released": True, "problems": list(problems)})
