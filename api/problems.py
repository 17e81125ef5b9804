"""What goes wrong, as problem+json (RFC 9457) with the message, detail and hint that the command line shows."""

from __future__ import annotations

import logging
import secrets
import traceback
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import Message, Receive, Scope, Send

from api.openapi import methods_at
from api.site import Layer, site_of
from backupd.app.context.logging_setup import redacted, say
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    CatalogError,
    ConfigurationError,
    DamagedError,
    DestinationError,
    ForbiddenError,
    LockedError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
    ServerError,
    StreamError,
    ToolError,
    UnauthenticatedError,
    UsageError,
)

MEDIA_TYPE = "application/problem+json"
TYPE = "urn:backupd:problem:"
RETRY_SECONDS = 10

_STATUSES: Sequence[tuple[type[BackupdError], int]] = (
    (UsageError, 422),
    (ConfigurationError, 422),
    (UnauthenticatedError, 401),
    (ForbiddenError, 403),
    (NotFoundError, 404),
    (RefusedError, 409),
    (ArchivedError, 409),
    (LockedError, 409),
    (ObjectMissingError, 502),
    (CatalogError, 503),
    (DestinationError, 502),
    (ServerError, 502),
    (ToolError, 502),
    (StreamError, 502),
    (DamagedError, 502),
)


class TooManyError(BackupdError):
    """Somebody asks too often. ``seconds``: until it is worth trying again."""

    problem_type = "too-many-requests"

    def __init__(self, message: str, seconds: float, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.seconds = seconds


def status_of(error: BackupdError) -> int:
    if isinstance(error, TooManyError):
        return 429
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 409)


def problem(error: BackupdError, status: int | None = None) -> tuple[int, dict[str, Any], dict[str, str]]:
    """The status, the document and the headers of ``error``."""
    status = status or status_of(error)
    headers = {}
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = 'Bearer realm="backupd"'
    if isinstance(error, TooManyError):
        headers["Retry-After"] = str(max(1, round(error.seconds + 0.5)))
    elif (error.retryable and status in (409, 502, 503)) or isinstance(error, CatalogError):
        headers["Retry-After"] = str(RETRY_SECONDS)
    body = document(
        error.problem_type, status, error.message, detail=error.detail, hint=error.hint, errors=_errors(error)
    )
    return status, body, headers


def document(
    kind: str, status: int, message: str, *, detail: str = "", hint: str = "", errors: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """``kind``: the stable last word of its type."""
    return {
        "type": TYPE + kind,
        "title": kind.replace("-", " "),
        "status": status,
        "message": redacted(message),
        "detail": redacted(detail),
        "hint": redacted(hint),
        "errors": [dict(error) for error in errors],
    }


def answer(request: HTTPConnection, status: int, body: dict[str, Any], headers: Mapping[str, str]) -> Response:
    """As JSON, or as a page for who came with a browser; who is not known there is asked to log in."""
    if wants_page(request):
        if status == 401:
            return RedirectResponse(login_address(request), 303)
        return site_of(request).page(request, status, body, headers)
    return JSONResponse(body, status, headers, MEDIA_TYPE)


def wants_page(request: HTTPConnection) -> bool:
    return not request.url.path.startswith("/v1/") and "text/html" in request.headers.get("accept", "")


def login_address(request: HTTPConnection) -> str:
    """The login page, from which it goes back to the page that was asked for."""
    from urllib.parse import quote

    path = request.url.path
    if path == "/" or request.scope.get("method") != "GET":
        return "/login"
    query = f"?{request.url.query}" if request.url.query else ""
    return f"/login?next={quote(path + query, safe='')}"


def install(app: FastAPI) -> None:
    """Errors of a request become answers."""
    app.add_exception_handler(BackupdError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_http)


def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, BackupdError)  # noqa: S101  it is installed for these alone
    return answer(request, *problem(error))


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101  as above
    errors = [
        {
            "field": ".".join(str(part) for part in one["loc"] if part != "body") or "body",
            "message": str(one["msg"]).removeprefix("Value error, "),
        }
        for one in error.errors()
    ]
    count = len(errors)
    body = document(
        "invalid-request",
        422,
        f"{count} problem{'s' if count != 1 else ''} in the request",
        detail="\n".join(f"{one['field']}: {one['message']}" for one in errors),
        hint="/docs describes each request, with an example",
        errors=errors,
    )
    return answer(request, 422, body, {})


def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  as above
    status = HTTPStatus(error.status_code)
    kind = status.phrase.lower().replace(" ", "-")
    message = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.method} is not supported at {request.url.path}",
    }.get(status, str(error.detail))
    hint = {
        404: "/docs lists every request",
        405: "/docs lists every request",
        400: "/docs describes each request, with an example",
    }.get(status, "")
    detail = "it is nested too deeply" if isinstance(error.__cause__, RecursionError) else ""
    headers = dict(error.headers or {})
    if status == 405 and (methods := methods_at(request.app, request.url.path)):
        headers["Allow"] = ", ".join(methods)  # of all routes there, not of the first one alone
    return answer(request, status, document(kind, status, message, detail=detail, hint=hint), headers)


def _errors(error: BackupdError) -> list[dict[str, Any]]:
    if not isinstance(error, ConfigurationError):
        return []
    return [
        {"field": one.field, "message": redacted(one.message), "file": one.file, "line": one.line}
        for one in error.problems
    ]


class Unforeseen(Layer):
    """The outermost layer: whatever nobody foresaw is reported with an id that is beside its traceback in the log."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:  # noqa: BLE001  the last resort of a request; all is reported
            number = secrets.token_hex(6)
            say(
                "api-trouble",
                f"{number}: {scope['method']} {scope['path']!r}\n" + "".join(traceback.format_exception(error)),
                level=logging.ERROR,
            )
            if begun:
                return  # the server ends a connection whose answer is not whole
            body = document(
                "internal",
                500,
                f"internal error {number}",
                hint=f"report this with the lines of the service's log about {number}",
            )
            await JSONResponse(body, 500, media_type=MEDIA_TYPE)(scope, receive, sending)
