"""Access and administration: whoami, tokens, the audit, and policies (show, validate, reload)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError

from api.auth import Acting, CurrentActor, OnSite, Wired
from api.middleware import CHECKS
from api.routes.answers import ADMIN, VIEWER, cut, id_of, listed, one, page, part, router_of
from api.schemas.access import (
    AuditEntry,
    AuditQuery,
    NewToken,
    Policy,
    Reloaded,
    Token,
    TokenRequest,
    TokensQuery,
    Validation,
    ValidationRequest,
    WhoAmI,
)
from api.schemas.base import Name, Whole
from backupd.app.context.access import audit, create_token, require_all, revoke_token
from backupd.catalog.row_mapping import Listed, number_of
from policies.reference import policy_schema

router = router_of("access")


@router.get("/whoami", dependencies=[VIEWER], response_model=WhoAmI)
def who_am_i(actor: CurrentActor) -> JSONResponse:
    """Whose token this is, and what it may do."""
    return one(actor)


@router.get("/tokens", dependencies=[ADMIN], response_model=list[Token])
def list_tokens(
    request: Request, query: Annotated[TokensQuery, Query()], actor: CurrentActor, wiring: Wired
) -> JSONResponse:
    """Tokens, newest first, with those that count no more."""
    require_all(actor)
    found = [token for token in wiring.catalog.tokens.list() if query.after is None or token.id < query.after]
    return page(request, cut(sorted(found, key=lambda token: token.id, reverse=True), query.limit))


@router.post("/tokens", dependencies=[ADMIN], response_model=NewToken, status_code=201)
def make_token(request: Request, asked: TokenRequest, actor: CurrentActor, wiring: Wired) -> JSONResponse:
    """Make a token. Its secret is told this once: nobody can ask for it again."""
    require_all(actor)
    token, secret = create_token(
        wiring, actor, asked.name, asked.role, servers=asked.servers, expires_at=asked.expires_at
    )
    request.state.secret_answer = True
    return JSONResponse({**token.as_json(), "token": secret}, 201, {"Cache-Control": "no-store"})


@router.delete("/tokens/{id}", dependencies=[ADMIN], response_model=Token)
def revoke(
    token_id: Annotated[str, id_of("a token", "20261121T120000Z-0badcafe")],
    actor: CurrentActor,
    wiring: Wired,
) -> JSONResponse:
    """It counts no more, nor do sessions of the web page that were begun with it."""
    require_all(actor)
    return one(revoke_token(wiring, actor, token_id))


@router.get("/audit", dependencies=[ADMIN], response_model=list[AuditEntry])
def list_audit(
    request: Request, query: Annotated[AuditQuery, Query()], actor: CurrentActor, wiring: Wired
) -> JSONResponse:
    """Who did what, newest first."""
    require_all(actor)

    def found(*, limit: int, after: str | None, **chosen: Any) -> Listed[Any]:
        before = None if after is None else number_of(after)
        entries = wiring.catalog.audit.list(before=before, limit=limit + 1, **chosen)
        return Listed.of(entries, limit, lambda entry: str(entry.number))

    return listed(request, query, found)


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
def list_policies(request: Request, query: Annotated[Whole, Query()], service: Acting) -> JSONResponse:
    """Every policy file, which servers follow it, and what is wrong with it."""
    return part(request, service.listings.policies(), query, lambda one: str(one.name))


@policy_routes.get("/policies/schema", dependencies=[VIEWER], response_model=dict[str, Any])
def show_policy_schema() -> JSONResponse:
    """The JSON schema of policy files, for editors."""
    return JSONResponse(policy_schema())


@policy_routes.get("/policies/{name}", dependencies=[VIEWER], response_model=Policy)
def show_policy(
    name: Annotated[Name, Path(examples=["gold"], description="Name of a policy.")], service: Acting
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
    """Reload configuration and policies, as SIGHUP does. If they are invalid, the service keeps the active ones and
    records an event."""
    require_all(actor)
    site.reload()
    audit(site.wiring, actor, "policies-reloaded")
    return JSONResponse({"asked": True}, 202)
