"""Who may come in, and who did what."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from fastapi.responses import JSONResponse

from api.auth import CurrentActor, Wired
from api.routes.answers import ADMIN, VIEWER, cut, one, page, router_of
from api.schemas.access import AuditEntry, AuditQuery, NewToken, Token, TokenRequest, TokensQuery, WhoAmI
from backupd.app.context.access import create_token, require_all, revoke_token
from backupd.catalog.base.pages import Listed, number_of

router = router_of("access")


@router.get("/whoami", dependencies=[VIEWER], response_model=WhoAmI)
def who_am_i(actor: CurrentActor) -> JSONResponse:
    """Whose token this is, and what it may do."""
    return JSONResponse(
        {
            "name": actor.name,
            "role": str(actor.role),
            "via": str(actor.via),
            "servers": None if actor.servers is None else sorted(actor.servers),
            "token": actor.token_id,
            "address": actor.address,
        }
    )


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
    token_id: Annotated[
        str,
        Path(
            alias="id",
            pattern=r"^[A-Za-z0-9-]{1,64}$",
            description="Id of a token.",
            examples=["20261121T120000Z-0badcafe"],
        ),
    ],
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
    found = wiring.catalog.audit.list(
        actor=query.actor,
        action=query.action,
        server=query.server,
        subject=query.subject,
        outcome=query.outcome,
        span=query.span,
        limit=query.limit + 1,
        before=None if query.after is None else number_of(query.after),
    )
    return page(request, Listed.of(found, query.limit, lambda entry: str(entry.number)))
