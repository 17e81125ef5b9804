"""The way back: plan, start, follow, and the runbook for doing it by hand."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Discriminator, Tag

from api.auth import Acting
from api.problems import MEDIA_TYPE, problem
from api.routes.answers import OPERATOR, VERSION, VIEWER, accepted, id_of, listed, one, router_of
from api.routes.backups import runbook
from api.schemas.restores import (
    Plan,
    PlanRequest,
    Restore,
    RestoreAtOnce,
    RestoreRunbook,
    RestoresQuery,
    RestoreStarted,
    StartRequest,
)
from backupd.app.restores.jobs import PlanChangedError, UnconfirmedError
from backupd.app.restores.request import RestoreRequest

router = router_of("restores")

RestoreId = Annotated[str, id_of("a restore", "20261121T094500Z-aabbccdd")]


def _sort_of(body: Any) -> str:
    """Of a plan by its id, or all in one step."""
    return "start" if isinstance(body, dict) and "plan" in body else "restore"


Wanted = Annotated[
    Annotated[StartRequest, Tag("start")] | Annotated[RestoreAtOnce, Tag("restore")], Discriminator(_sort_of), Body()
]


@router.post("/restores/plan", dependencies=[VIEWER], response_model=Plan, status_code=201)
def make_plan(asked: PlanRequest, service: Acting) -> JSONResponse:
    """What a restore would do, how many bytes it moves and how long it takes. Moves nothing. `POST /v1/restores` with
    the plan's id starts it, until it expires."""
    made = service.requests.plan(_request(asked))
    return JSONResponse(made.as_json(), 201, {"Location": f"{VERSION}/restores/plan/{made.id}"})


@router.get("/restores/plan/{id}", dependencies=[VIEWER], response_model=Plan)
def show_plan(plan_id: Annotated[str, id_of("a plan", "20261121T094300Z-5e6f7a8b")], service: Acting) -> JSONResponse:
    """A plan that was made before and has not expired."""
    return one(service.requests.stored_plan(plan_id))


@router.post("/restores", dependencies=[OPERATOR], response_model=RestoreStarted, status_code=202)
def start_restore(asked: Wanted, service: Acting) -> JSONResponse:
    """Start a plan, or plan and start in one step. Where data may be replaced, `confirm` has to be the name of that
    server. A plan that would come out differently now is refused, with the new plan (`plan` of the answer)."""
    wanted = asked.plan if isinstance(asked, StartRequest) else _request(asked)
    try:
        restore, job = service.requests.restore(wanted, asked.confirm)
    except PlanChangedError as error:
        return _refused(error, {"plan": error.plan.as_json()})
    except UnconfirmedError as error:
        return _refused(error, {"confirm": error.confirm})
    return accepted(job, {"restore": service.requests.restore_view(restore.id).as_json()})


@router.get("/restores", dependencies=[VIEWER], response_model=list[Restore])
def list_restores(request: Request, query: Annotated[RestoresQuery, Query()], service: Acting) -> JSONResponse:
    """Restores, newest first."""
    return listed(request, query, service.labelled(query.label, query.server).listings.restores)


@router.get("/restores/{id}", dependencies=[VIEWER], response_model=Restore)
def show_restore(restore_id: RestoreId, service: Acting) -> JSONResponse:
    """How far a restore is: its phases, and the progress of the one that runs."""
    return one(service.requests.restore_view(restore_id))


@router.get(
    "/restores/{id}/runbook",
    dependencies=[VIEWER],
    response_model=RestoreRunbook,
    responses={200: {"content": {"text/markdown": {"schema": {"type": "string"}}}}},
)
def show_runbook_of_restore(restore_id: RestoreId, request: Request, service: Acting) -> Response:
    """How to do this restore by hand: JSON, or Markdown for who accepts that."""
    return runbook(request, restore_id, service.requests.runbook_of_restore(restore_id))


def _request(asked: PlanRequest | RestoreAtOnce) -> RestoreRequest:
    return RestoreRequest.from_json(asked.model_dump(by_alias=True, exclude_none=True, exclude={"confirm"}))


def _refused(error: PlanChangedError | UnconfirmedError, more: dict[str, Any]) -> JSONResponse:
    status, body, headers = problem(error)
    return JSONResponse({**body, **more}, status, headers, MEDIA_TYPE)
