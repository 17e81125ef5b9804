"""Tokens: who may come in, as what, to which servers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from api.auth import Acting, allowed
from api.problems import status_of
from api.web.forms import Form, form
from api.web.notices import back_to
from api.web.site import render
from api.web.words import problem_of
from backupd.app.context.access import require_all
from backupd.app.service.facade import Service
from backupd.model.access import Role, Token
from backupd.model.errors import BackupdError

router = APIRouter(include_in_schema=False)

_ADMIN = [Depends(allowed(Role.ADMIN))]


@router.get("/tokens", dependencies=_ADMIN)
def list_tokens(request: Request, service: Acting) -> Response:
    require_all(service.actor)
    return _shown(request, service, Form())


@router.post("/tokens", dependencies=_ADMIN)
def create(request: Request, service: Acting, sent: Annotated[Form, Depends(form)]) -> Response:
    """The answer shows the secret, this once: it is nowhere else."""
    require_all(service.actor)
    try:
        token, secret = service.access.create(
            sent.text("name"),
            sent.text("role"),
            servers=sent.lines("servers") or None,
            expires=sent.text("expires") or None,
        )
    except BackupdError as error:
        return _shown(request, service, sent, error=error)
    return _shown(request, service, Form(), made=token, secret=secret)


@router.post("/tokens/{token_id}/revoke", dependencies=_ADMIN)
def revoke(token_id: str, service: Acting, sent: Annotated[Form, Depends(form)]) -> Response:
    """It counts no more, as of now."""
    del sent  # it was ours, which is all that had to be known
    require_all(service.actor)
    service.access.revoke(token_id)
    return back_to("/tokens", "token-revoked")


def _shown(
    request: Request,
    service: Service,
    asked: Form,
    *,
    error: BackupdError | None = None,
    made: Token | None = None,
    secret: str = "",
) -> Response:
    return render(
        request,
        "tokens.html",
        status=200 if error is None else status_of(error),
        made=made,
        secret=secret,
        tokens=service.access.tokens(),
        servers=service.listings.servers(),
        problem=problem_of(error) if error is not None else None,
        asked={
            "name": asked.text("name"),
            "role": asked.text("role") or "viewer",
            "expires": asked.text("expires"),
            "servers": asked.lines("servers"),
        },
    )
