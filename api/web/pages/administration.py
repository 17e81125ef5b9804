"""Coming in and going out: with a token once, then by the session's cookie.

Pages of administration: tokens (who has access, with which role, to which servers), the audit, and policies.

Policies are shown as their files say, with a note where the service follows another version. A change can be validated
here; no file is written.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from api import auth
from api.auth import Acting, Wired, allowed, anybody, current_session
from api.middleware import CHECKS
from api.problems import problem
from api.web.site import OF_OURS, Form, Sent, back_to, link, login_form, own_path, render
from api.web.words import problem_of
from backupd.app.context.access import require_all
from backupd.app.service.facade import Service
from backupd.catalog.row_mapping import number_of
from backupd.model.access import Role, Token
from backupd.model.errors import BackupdError, UnauthenticatedError
from policies import reference

router = APIRouter(include_in_schema=False)


@router.get("/login", dependencies=[Depends(anybody)])
def ask(request: Request) -> Response:
    """The login; who is logged in already goes on."""
    goal = own_path(request.query_params.get("next", "/"))
    if current_session(request) is not None:
        return RedirectResponse(goal, status_code=303)
    return render(request, "login.html", next=goal, problem=None)


@router.post("/login", dependencies=[Depends(anybody)])
def enter(request: Request, sent: Annotated[Form, Depends(login_form)]) -> Response:
    """Begin a session, and go to where one was led away from. The session of before, where there is one, ends."""
    goal = own_path(sent.text("next") or "/")
    try:
        session, cookie, _actor = auth.enter(request, sent.text("token"))
    except BackupdError as error:
        status, _document, headers = problem(error)
        kept = {name: value for name, value in headers.items() if name == "Retry-After"}
        # 401 would have the browser ask by itself, and in the way of the form.
        return render(
            request,
            "login.html",
            status=403 if isinstance(error, UnauthenticatedError) else status,
            headers=kept,
            next=goal,
            problem=problem_of(error),
        )
    answer = RedirectResponse(goal, status_code=303)
    auth.leave(request, answer)
    auth.set_cookie(request, answer, session, cookie)
    return answer


@router.post("/logout", dependencies=[Depends(allowed(Role.VIEWER)), OF_OURS])
def leave(request: Request) -> Response:
    """The session ends here and in the catalog, so that the cookie is worth nothing any more."""
    answer = back_to("/login", "logged-out")
    auth.leave(request, answer)
    return answer


_ADMIN = [Depends(allowed(Role.ADMIN))]


@router.get("/tokens", dependencies=_ADMIN)
def list_tokens(request: Request, service: Acting) -> Response:
    require_all(service.actor)
    return _shown(request, service, Form())


@router.post("/tokens", dependencies=_ADMIN)
def create(request: Request, service: Acting, sent: Sent) -> Response:
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


@router.post("/tokens/{token_id}/revoke", dependencies=[*_ADMIN, OF_OURS])
def revoke(token_id: str, service: Acting) -> Response:
    """It counts no more, as of now."""
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
        refused=error,
        made=made,
        secret=secret,
        tokens=service.access.tokens(),
        servers=service.listings.servers(),
        asked={
            "name": asked.text("name"),
            "role": asked.text("role") or "viewer",
            "expires": asked.text("expires"),
            "servers": asked.lines("servers"),
        },
    )


audit_routes = APIRouter(include_in_schema=False)

PAGE = 100


@audit_routes.get("/audit", dependencies=[Depends(allowed(Role.ADMIN))])
def list_audit(request: Request, service: Acting, wiring: Wired) -> Response:
    """Newest first; ``?verify=1``: whether it is as it was written, which reads all of it."""
    require_all(service.actor)
    asked = {name: request.query_params.get(name, "").strip() or None for name in ("actor", "action", "server")}
    before = request.query_params.get("before")
    rows = wiring.catalog.audit.list(
        actor=asked["actor"],
        action=asked["action"],
        server=asked["server"],
        before=number_of(before) if before else None,
        limit=PAGE + 1,
    )
    return render(
        request,
        "audit.html",
        entries=rows[:PAGE],
        asked=asked,
        filtered=any(asked.values()),
        newest=link("audit", **asked) if before else "",
        older=link("audit", before=str(rows[PAGE - 1].number), **asked) if len(rows) > PAGE else "",
        verified=service.access.verify_audit() if "verify" in request.query_params else None,
    )


policy_routes = APIRouter(include_in_schema=False)

_VIEWER = [Depends(allowed(Role.VIEWER))]


@policy_routes.get("/policies", dependencies=_VIEWER)
def list_policies(request: Request, service: Acting) -> Response:
    return render(request, "policies.html", policies=service.listings.policies())


@policy_routes.get("/policies/new", dependencies=_VIEWER)
def example(request: Request) -> Response:
    """A complete example to start from."""
    return render(request, "policy_check.html", name="", text=reference.example("gold"), checked=None)


@policy_routes.get("/policies/{name}", dependencies=_VIEWER)
def show_policy(request: Request, name: str, service: Acting) -> Response:
    return render(request, "policy.html", policy=service.listings.policy(name))


@policy_routes.get("/policies/{name}/check", dependencies=_VIEWER)
def change(request: Request, name: str, service: Acting) -> Response:
    """Its text, to be changed and checked; no file is written."""
    found = service.listings.policy(name)
    return render(request, "policy_check.html", name=found.name, text=found.text, checked=None)


@policy_routes.post("/policies/validate", dependencies=_VIEWER)
def check(request: Request, service: Acting, sent: Sent) -> Response:
    """Everything that is wrong with a text, each with its line; no file is written."""
    text, name = sent.raw("text"), sent.text("name")
    with CHECKS.one("texts of policies are checked"):
        found = service.listings.validate_policy(text, name or "policy")
    return render(request, "policy_check.html", status=200 if found.valid else 422, name=name, text=text, checked=found)
