"""Policies: look, validate, reload."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError

from api.auth import Acting, CurrentActor, OnSite
from api.limits import CHECKS
from api.routes.answers import ADMIN, VIEWER, one, router_of, several
from api.schemas.policies import Policy, Reloaded, Validation, ValidationRequest
from backupd.app.context.access import require_all
from backupd.app.context.audit import audit
from policies.reference import policy_schema

policy_routes = router_of("policies")

_YAML = ("text/yaml", "application/yaml", "application/x-yaml", "text/plain")
_ASKED = TypeAdapter(ValidationRequest)
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/ValidationRequest"}},
            "text/yaml": {"schema": {"type": "string"}, "example": "destinations: {required: [local]}\n"},
        },
    }
}


@policy_routes.get("/policies", dependencies=[VIEWER], response_model=list[Policy])
def list_policies(service: Acting) -> JSONResponse:
    """Every policy file, which servers follow it, and what is wrong with it."""
    return several(service.listings.policies())


@policy_routes.get("/policies/schema", dependencies=[VIEWER], response_model=dict[str, Any])
def show_policy_schema() -> JSONResponse:
    """The JSON schema of policy files, for editors."""
    return JSONResponse(policy_schema())


@policy_routes.get("/policies/{name}", dependencies=[VIEWER], response_model=Policy)
def show_policy(
    name: Annotated[
        str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", examples=["gold"], description="Name of a policy.")
    ],
    service: Acting,
) -> JSONResponse:
    """One policy file."""
    return one(service.listings.policy(name))


async def _asked(request: Request) -> ValidationRequest:
    """The text itself, or JSON with its name. Raises RequestValidationError."""
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind in _YAML:
            return ValidationRequest(text=body.decode())
        return _ASKED.validate_json(body)
    except UnicodeDecodeError as error:
        raise RequestValidationError([{"loc": ("body",), "msg": f"it is not UTF-8: {error.reason}"}]) from error
    except ValidationError as error:
        raise RequestValidationError(
            [{"loc": ("body", *one["loc"]), "msg": one["msg"]} for one in error.errors()]
        ) from error


@policy_routes.post("/policies/validate", dependencies=[VIEWER], response_model=Validation, openapi_extra=_BODY)
def validate_policy(asked: Annotated[ValidationRequest, Depends(_asked)], service: Acting) -> JSONResponse:
    """Everything that is wrong with the text of a policy file, of 64 KiB at most, by line. Nothing is kept."""
    with CHECKS.one("texts of policies are checked"):
        return one(service.listings.validate_policy(asked.text, asked.name))


@policy_routes.post("/policies/reload", dependencies=[ADMIN], response_model=Reloaded, status_code=202)
def reload_policies(actor: CurrentActor, site: OnSite) -> JSONResponse:
    """Ask the service to read its configuration and policies anew, as SIGHUP does. What is wrong with them is an event;
    then it goes on with those that it has."""
    require_all(actor)
    site.reload()
    audit(site.wiring, actor, "policies-reloaded")
    return JSONResponse({"asked": True}, 202)
