"""Idempotency-Key: whoever does not know whether a POST arrived sends it again, and it is done once."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import API
from api.problems import answer, problem
from api.site import site_of
from backupd.catalog.people import Asked
from backupd.model.access import Actor
from backupd.model.errors import BackupdError, BusyError, RefusedError, UsageError

HEADER = "idempotency-key"
_LONGEST = 255
_KEPT = ("content-type", "location")
SECRET = "secret_answer"  # noqa: S105  the name of a mark, not a secret
"""Set in a request's state by a route whose answer holds a secret: that is not kept."""


class Idempotency:
    """Beneath the doorkeeper: keys belong to the token that sent them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(API):
            await self._app(scope, receive, send)
            return
        keys = Headers(scope=scope).getlist(HEADER)
        if not keys:
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        try:
            await self._once(request, _valid(keys), receive, send)
        except BackupdError as error:
            await answer(request, *problem(error))(scope, receive, send)

    async def _once(self, request: HTTPConnection, key: str, receive: Receive, send: Send) -> None:
        """Raises UsageError for a key of another request, BusyError while the first one is worked on, CatalogError."""
        scope = request.scope
        wiring = site_of(request).wiring
        actor: Actor = scope["state"]["actor"]
        body = await _whole(receive)
        if body is None:
            return  # whoever asked has gone
        digest = hashlib.sha256(
            b"\0".join(
                (
                    scope["path"].encode(),
                    scope["query_string"],
                    request.headers.get("content-type", "").encode(),
                    body,
                )
            )
        ).hexdigest()
        earlier = await run_in_threadpool(wiring.catalog.requests.begin, actor.token_id, key, digest, wiring.clock())
        if earlier is not None:
            await _again(earlier, digest)(scope, receive, send)
            return
        recording = _Recording(send)
        try:
            await self._app(scope, _replay(body, receive), recording)
        finally:
            if 200 <= recording.status < 300:
                kept = b"" if scope["state"].get(SECRET) else bytes(recording.body)
                headers = {} if scope["state"].get(SECRET) else recording.headers
                await run_in_threadpool(
                    wiring.catalog.requests.finish, actor.token_id, key, recording.status, headers, kept
                )
            else:
                await run_in_threadpool(wiring.catalog.requests.forget, actor.token_id, key)


def _valid(keys: list[str]) -> str:
    key = keys[0]
    if len(keys) > 1 or not key or len(key) > _LONGEST or not key.isascii() or not key.isprintable():
        raise UsageError(
            f"an Idempotency-Key is one header of 1 to {_LONGEST} printable ASCII characters",
            hint="a random UUID is a good one",
        )
    return key


def _again(earlier: Asked, digest: str) -> Response:
    if earlier.digest != digest:
        raise UsageError("this Idempotency-Key was used for another request", hint="a new request needs a new key")
    if earlier.status is None:
        raise BusyError(
            "the first request with this Idempotency-Key is still being worked on",
            hint="ask again later; when it stays so, the service ended meanwhile: see in GET /v1/jobs "
            "whether it was done, and use a new key",
        )
    if not earlier.headers:
        raise RefusedError(
            "this was done, and its answer held a secret that is told only once",
            hint="if it got lost, revoke the token and make another one with a new key",
        )
    return Response(earlier.body, earlier.status, {**earlier.headers, "Idempotency-Replayed": "true"})


async def _whole(receive: Receive) -> bytes | None:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read already, then what comes after it."""
    waiting: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return waiting.pop() if waiting else await receive()

    return receiving


class _Recording:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.status, self.headers, self.body = 0, dict[str, str](), bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            found = Headers(raw=message["headers"])
            self.headers = {name: found[name] for name in _KEPT if name in found}
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
        await self._send(message)
