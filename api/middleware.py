"""Headers of every answer that keep browsers from being used against us, and the names by which we may be called.

How much and how slowly anybody may send, and how slowly take.

Idempotency-Key: whoever does not know whether a POST arrived sends it again, and it is done once.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import API
from api.problems import MEDIA_TYPE, TooManyError, answer, document, problem
from api.site import Layer, site_of
from backupd.catalog.people import Asked
from backupd.model.access import Actor
from backupd.model.errors import BackupdError, BusyError, RefusedError, UsageError
from policies.configuration import Api, is_loopback

POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'; "
    "img-src 'self' data:"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_YEAR = "max-age=31536000"


class SecurityHeaders(Layer):
    """Adds them to every answer. ``secure``: served with TLS, to which browsers are then to keep."""

    def __init__(self, app: ASGIApp, *, secure: bool) -> None:
        super().__init__(app)
        self._secure = secure

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if self._secure:
                    headers["Strict-Transport-Security"] = _YEAR
                if "cache-control" not in headers:  # nobody between us and who asked is to keep an answer
                    headers["Cache-Control"] = "private, no-cache"
            await send(message)

        await self._app(scope, receive, sending)


class Hosts(Layer):
    """Refuses what was sent to a name that is not ours: a page of somebody else may have had its own name lead here
    (DNS rebinding). Addresses, this host's names and that of ``api.url`` are ours; where neither url is set nor only
    this host can connect, any name may be, and none is refused."""

    def __init__(self, app: ASGIApp, settings: Api) -> None:
        super().__init__(app)
        here = settings.host
        named = (urlsplit(settings.url).hostname or "").lower() if settings.url else ""
        self._names = {
            name for name in (here, named, "localhost", socket.gethostname().lower(), socket.getfqdn().lower()) if name
        }
        self._any = not named and not is_loopback(here)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_ours(HTTPConnection(scope)):
            await self._app(scope, receive, send)
            return
        body = document(
            "misdirected-request",
            421,
            "the Host header names another host",
            hint="use its address, or set api.url in the configuration to the name that people use",
        )
        await JSONResponse(body, 421, media_type=MEDIA_TYPE)(scope, receive, send)

    def _is_ours(self, request: HTTPConnection) -> bool:
        found = request.headers.getlist("host")
        if len(found) > 1:
            return False
        try:
            host = (urlsplit(f"//{found[0]}").hostname or "").lower().rstrip(".") if found else ""
        except ValueError:
            return False
        if not host:
            return not found and request.scope.get("http_version") == "1.0"
        return self._any or host in self._names or _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


LARGEST = 1024 * 1024
"""Bytes of a request's body."""
SENDING = 20.0
"""Seconds for a whole body to come."""
TAKING = 30.0
"""Seconds for a reader to take what fills the connection."""


BUSY_SECONDS = 2.0
"""After which it is worth asking again for what others are at."""


class Turns:
    """Lets ``most`` threads at a time do what takes a processor long; the next one is refused rather than kept
    waiting, because a thread that waits answers nobody else."""

    def __init__(self, most: int) -> None:
        self._free = threading.BoundedSemaphore(most)

    @contextmanager
    def one(self, what: str) -> Iterator[None]:
        """Raises TooManyError. ``what``: is being done for others, in words."""
        if not self._free.acquire(blocking=False):
            raise TooManyError(f"{what} for others just now", BUSY_SECONDS, hint="repeat the request in a moment")
        try:
            yield
        finally:
            self._free.release()


CHECKS = Turns(2)
"""Of texts that may become policies."""
SEARCHES = Turns(2)
"""Of archived binary logs."""
SEARCHING = 20.0
"""Seconds for a search."""


class _GoneError(Exception):
    """A reader took nothing for too long."""


class Limits(Layer):
    """Outside of whatever reads bodies."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        largest: int = LARGEST,
        sending: float = SENDING,
        taking: float = TAKING,
    ) -> None:
        super().__init__(app)
        self._largest, self._sending, self._taking = largest, sending, taking

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        deadline, size, whole, begun = loop.time() + self._sending, 0, False, False
        trouble: tuple[int, str, str] | None = None

        async def receiving() -> Message:
            nonlocal size, whole, trouble
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                trouble = (408, "request-timeout", f"the request was not complete after {self._sending:g} seconds")
                return {"type": "http.disconnect"}
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self._largest:
                trouble = self._too_large()
                return {"type": "http.disconnect"}
            return message

        async def sending(message: Message) -> None:
            nonlocal begun
            if trouble is not None and not begun:
                return  # whatever is made of half a body is not what is reported
            begun = True
            try:
                async with asyncio.timeout(self._taking):
                    await send(message)
            except TimeoutError:
                raise _GoneError from None

        if _declared(scope) > self._largest:
            trouble = self._too_large()
        else:
            try:
                await self._app(scope, receiving, sending)
            except _GoneError:
                return  # the server ends a connection whose answer is not whole
            except ClientDisconnect:  # what half a body looks like to a route: why it is half is reported below
                if trouble is None or begun:
                    raise
        if trouble is not None and not begun:
            status, kind, message = trouble
            # What still comes of it is not read: the connection ends.
            await JSONResponse(document(kind, status, message), status, {"Connection": "close"}, MEDIA_TYPE)(
                scope, receive, send
            )

    def _too_large(self) -> tuple[int, str, str]:
        return 413, "content-too-large", f"a request holds at most {self._largest} bytes"


def _declared(scope: Scope) -> int:
    try:
        return int(Headers(scope=scope).get("content-length", "0"))
    except ValueError:
        return 0


HEADER = "idempotency-key"
_LONGEST = 255
_KEPT = ("content-type", "location")
SECRET = "secret_answer"  # noqa: S105  the name of a mark, not a secret
"""Set in a request's state by a route whose answer holds a secret: that is not kept."""


class Idempotency(Layer):
    """Beneath the doorkeeper: keys belong to the token that sent them."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = Headers(scope=scope).getlist(HEADER)
        if scope["method"] != "POST" or not scope["path"].startswith(API) or not keys:
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
        requests = wiring.catalog.requests
        actor: Actor = scope["state"]["actor"]
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return  # whoever asked has gone
        kind = request.headers.get("content-type", "").encode()
        digest = hashlib.sha256(b"\0".join((scope["path"].encode(), scope["query_string"], kind, body))).hexdigest()
        earlier = await run_in_threadpool(requests.begin, actor.token_id, key, digest, wiring.clock())
        if earlier is not None:
            await _again(earlier, digest)(scope, receive, send)
            return
        recording = _Recording(send)
        try:
            await self._app(scope, _replay(body, receive), recording)
        finally:
            if 200 <= recording.status < 300:
                secret = scope["state"].get(SECRET)
                answer = ({}, b"") if secret else (recording.headers, bytes(recording.body))
                await run_in_threadpool(requests.finish, actor.token_id, key, recording.status, *answer)
            else:
                await run_in_threadpool(requests.forget, actor.token_id, key)


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
            hint="repeat it later; if the answer stays the same, the service was stopped meanwhile: check GET /v1/jobs "
            "for its job, and use a new key",
        )
    if not earlier.headers:
        raise RefusedError(
            "the request succeeded, and its answer contained a secret that is shown only once",
            hint="if it is lost, revoke the token and create another one with a new key",
        )
    return Response(earlier.body, earlier.status, {**earlier.headers, "Idempotency-Replayed": "true"})


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
