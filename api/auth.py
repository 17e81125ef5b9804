"""Who asks, and whether they may.

``Doorkeeper`` finds out who before anything else is looked at; a route states who may use it by ``allowed(Role.X)`` or
``anybody``, and one that states neither keeps the program from starting. On the web page a token becomes a session,
which the browser's cookie represents (``enter``, ``leave``).
"""

from __future__ import annotations

from datetime import UTC, datetime
from http.cookies import CookieError, SimpleCookie
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from api.problems import TooManyError, answer, problem
from api.site import Layer, Site, site_of
from backupd.app.context.access import UnknownSecretError, actor_of, audit, log_in, log_out, session_of
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Service
from backupd.catalog.people import USED_EVERY
from backupd.model.access import Actor, Role, Session, Via
from backupd.model.errors import BackupdError, CatalogError, ForbiddenError, NotFoundError, UnauthenticatedError

API = "/v1/"
CSRF_HEADER = "x-csrf-token"
_CHANGING = ("POST", "PUT", "PATCH", "DELETE")
_OPEN = ("/static/", "/healthz", "/readyz", "/favicon.ico")
"""Below these nobody is asked who they are."""
_ASK = "send `Authorization: Bearer TOKEN`; `backupd token create` makes one"
_NEVER = datetime.min.replace(tzinfo=UTC)
_SCHEME = HTTPBearer(auto_error=False, description="A token of `backupd token create`.")


class Doorkeeper(Layer):
    """Puts into the request's state: ``actor`` (Actor or None) and ``session`` (Session or None, of the web page),
    ``csrf`` (what that session's forms bring along, or "")."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HTTPConnection(scope)
        state = scope.setdefault("state", {})
        state["actor"], state["session"], state["csrf"] = None, None, ""
        path = scope["path"]
        try:
            if not path.startswith(_OPEN):
                actor, session = await _identified(request)
                state.update(actor=actor, session=session, csrf=session.csrf if session else "")
            if path.startswith(API) and state["actor"] is None:
                raise UnauthenticatedError("a token is required", hint=_ASK)
        except BackupdError as error:
            await answer(request, *problem(error))(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _identified(request: HTTPConnection) -> tuple[Actor | None, Session | None]:
    """Raises UnauthenticatedError for a token that does not count, TooManyError, CatalogError, ForbiddenError."""
    site, address = site_of(request), address_of(request)
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise UnauthenticatedError("only bearer tokens are understood", hint=_ASK)
        return await run_in_threadpool(by_token, site, secret.strip(), address), None
    if request.scope["method"] in _CHANGING and request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise ForbiddenError("cross-site request rejected", hint="repeat it on backupd's own page")
    cookie = cookie_of(request)
    if not cookie:
        return None, None
    found = await run_in_threadpool(session_of, site.wiring, cookie, address)
    if found is None:
        return None, None
    session, actor = found
    if request.scope["path"].startswith(API):
        _check_csrf(request, session)
    return actor, session


def by_token(site: Site, secret: str, address: str, via: Via = Via.API) -> Actor:
    """Raises UnauthenticatedError, TooManyError; a guess counts against ``address``. A right token is let in whatever
    else came from there: it cannot be guessed, and nobody can lock others out by sending wrong ones."""
    try:
        actor = actor_of(site.wiring, secret, address, via)
    except UnknownSecretError:
        failed(site, address, via)
        raise
    passed(site, actor)
    return actor


def failed(site: Site, address: str, via: Via = Via.API) -> None:
    """A wrong token came; the first of a row is in the audit, and each that costs time. Raises TooManyError while
    wrong ones from ``address`` do not even learn that they are wrong; the login page uses this, too, and ``passed``."""
    seconds = site.throttle.wait(address)
    if seconds > 0:
        raise TooManyError(
            "too many wrong tokens came from this address",
            seconds,
            hint="this token is also invalid: find the client that sends it. A valid token is accepted immediately",
        )
    if site.throttle.failed(address) > 0 or site.throttle.count(address) == 1:
        nobody = Actor("", Role.VIEWER, via, address=address)
        site.aside.submit(audit, site.wiring, nobody, "login-failed", outcome="refused")


def passed(site: Site, actor: Actor) -> None:
    """A right one came."""
    site.throttle.passed(actor.address)
    now = site.wiring.clock()
    if now - site.noted.get(actor.token_id, _NEVER) >= USED_EVERY:
        site.noted[actor.token_id] = now
        site.aside.submit(_note_use, site.wiring, actor.token_id)


def _note_use(wiring: Wiring, token_id: str) -> None:
    try:
        wiring.catalog.tokens.used(token_id, wiring.clock())
    except CatalogError:
        return  # when a token was used last is shown only as far as that is known


def _check_csrf(request: HTTPConnection, session: Session) -> None:
    """A browser sends its cookie along with what other pages ask for; only our own know the session's word."""
    import secrets

    if request.scope["method"] in _CHANGING:
        given = request.headers.get(CSRF_HEADER, "")
        if not secrets.compare_digest(given.encode(), session.csrf.encode()):
            raise ForbiddenError(
                "the CSRF token is missing or does not belong to this session",
                hint=f"send the CSRF token of the page in {CSRF_HEADER}, or use a bearer token and no cookie",
            )


def address_of(request: HTTPConnection) -> str:
    return request.client.host if request.client is not None else ""


def cookie_name(site: Site) -> str:
    """With TLS its name keeps other hosts and plain HTTP from setting it."""
    return "__Host-backupd" if site.secure else "backupd"


def cookie_of(request: HTTPConnection) -> str:
    """The session's cookie; of two of that name the first one counts."""
    name = cookie_name(site_of(request))
    for header in request.headers.getlist("cookie"):
        try:
            jar = SimpleCookie(header)
        except CookieError:
            continue
        if name in jar:
            return jar[name].value
    return ""


# -- what a route asks for


class Gate:
    """A dependency: lets in who has ``role`` and sees the server that is named."""

    def __init__(self, role: Role) -> None:
        self.role = role

    async def __call__(
        self,
        request: Request,
        _scheme: Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)] = None,
    ) -> Actor:
        actor = current_actor(request)
        if not actor.has(self.role):
            if request.method in _CHANGING:
                await run_in_threadpool(
                    audit,
                    site_of(request).wiring,
                    actor,
                    "access-refused",
                    outcome="refused",
                    subject=f"{request.method} {request.url.path}",
                    server=request.path_params.get("server", ""),
                )
            raise ForbiddenError(
                f"this needs the role {self.role}; yours is {actor.role}",
                hint="ask an administrator for a token with that role",
            )
        for server in (request.path_params.get("server"), request.query_params.get("server")):
            if server is not None and not actor.sees(server):
                raise NotFoundError(f"there is no server {server!r}", hint="GET /v1/servers lists them")
        return actor


async def anybody() -> None:
    """A dependency that asks for nothing: for a route that everybody may use."""


def allowed(role: Role) -> Gate:
    """A dependency that gives the Actor: ``Depends(allowed(Role.OPERATOR))``."""
    return Gate(role)


def current_actor(request: Request) -> Actor:
    """Raises UnauthenticatedError where nobody is known."""
    actor: Actor | None = request.state.actor
    if actor is None:
        raise UnauthenticatedError("a token is required", hint=_ASK)
    return actor


def current_session(request: Request) -> Session | None:
    """That of the web page, for who is logged in there."""
    session: Session | None = request.state.session
    return session


def still_allowed(request: Request) -> bool:
    """May who asked still come in? For an answer that lasts. Raises CatalogError."""
    wiring, actor = site_of(request).wiring, current_actor(request)
    session = current_session(request)
    if session is not None and wiring.catalog.sessions.find(session.digest, wiring.clock()) is None:
        return False  # it is over, or was ended by logging out
    return wiring.catalog.tokens.get(actor.token_id).is_valid(wiring.clock())


async def _current_actor(request: Request) -> Actor:
    return current_actor(request)


async def _acting(request: Request) -> Service:
    return site_of(request).service.acting(current_actor(request))


async def _wiring(request: Request) -> Wiring:
    return site_of(request).wiring


async def _site(request: Request) -> Site:
    return site_of(request)


CurrentActor = Annotated[Actor, Depends(_current_actor)]
Acting = Annotated[Service, Depends(_acting)]
"""The service, acting for who asks: sees and does what they may, and is in the audit under their name."""
Wired = Annotated[Wiring, Depends(_wiring)]
OnSite = Annotated[Site, Depends(_site)]


def stated_role(route: APIRoute) -> tuple[bool, Role | None]:
    """Whether ``route`` says who may use it, and the role; None: anybody."""
    found: list[Role | None] = []
    waiting = list(route.dependant.dependencies)
    while waiting:
        one = waiting.pop()
        if isinstance(one.call, Gate):
            found.append(one.call.role)
        elif one.call is anybody:
            found.append(None)
        waiting += one.dependencies
    roles = [role for role in found if role is not None]
    return bool(found), max(roles, key=lambda role: role.rank, default=None)


def operations_of(app: FastAPI) -> tuple[tuple[str, str, Role | None], ...]:
    """(method, path, role) of every operation; role None: anybody."""
    return tuple(
        (method, route.path, stated_role(route)[1])
        for router in app.state.routers
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    )


def require_stated_roles(routes: list[BaseRoute]) -> None:
    """Raises TypeError, at the start, for a route that everybody could use because nobody thought of it."""
    for route in routes:
        path = str(getattr(route, "path", route))
        if not path.startswith(_OPEN) and not (isinstance(route, APIRoute) and stated_role(route)[0]):
            raise TypeError(f"{path} says nothing of who may use it: add Depends(allowed(Role...)) or Depends(anybody)")


def enter(request: HTTPConnection, secret: str) -> tuple[Session, str, Actor]:
    """A session, what the cookie is to hold, and whose it is. Raises UnauthenticatedError, TooManyError."""
    site, address = site_of(request), address_of(request)
    try:
        session, cookie, actor = log_in(site.wiring, secret.strip(), address)
    except UnknownSecretError:
        failed(site, address, Via.PAGE)
        raise
    passed(site, actor)
    return session, cookie, actor


def set_cookie(request: HTTPConnection, response: Response, session: Session, cookie: str) -> None:
    """Have the browser keep it for as long as the session lasts; no script of a page can read it."""
    site = site_of(request)
    response.set_cookie(
        cookie_name(site),
        cookie,
        expires=session.expires_at,
        path="/",
        httponly=True,
        secure=site.secure,
        samesite="strict",
    )


def leave(request: Request, response: Response) -> None:
    """End the session of who asks, if there is one."""
    site, session = site_of(request), current_session(request)
    if session is not None:
        log_out(site.wiring, session, current_actor(request))
    response.delete_cookie(cookie_name(site), path="/", httponly=True, secure=site.secure, samesite="strict")
