"""Coming in by the web page: a token becomes a session, which the browser's cookie stands for."""

from __future__ import annotations

from fastapi import Request
from starlette.requests import HTTPConnection
from starlette.responses import Response

from api.auth import address_of, cookie_name, current_actor, current_session, failed, passed
from api.site import site_of
from backupd.app.context.access import UnknownSecretError, log_in, log_out
from backupd.model.access import Actor, Session, Via


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
