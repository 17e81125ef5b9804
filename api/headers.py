"""Headers of every answer that keep browsers from being used against us, and the names by which we may be called."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import MEDIA_TYPE, document
from policies.access import Api, is_loopback

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


class SecurityHeaders:
    """Adds them to every answer. ``secure``: served with TLS, to which browsers are then to keep."""

    def __init__(self, app: ASGIApp, *, secure: bool) -> None:
        self._app, self._secure = app, secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

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


class Hosts:
    """Refuses what was sent to a name that is not ours: a page of somebody else may have had its own name lead here
    (DNS rebinding). Addresses, this host's names and that of ``api.url`` are ours; where neither url is set nor only
    this host can connect, any name may be, and none is refused."""

    def __init__(self, app: ASGIApp, settings: Api) -> None:
        self._app = app
        here = settings.host
        named = (urlsplit(settings.url).hostname or "").lower() if settings.url else ""
        self._names = {
            name for name in (here, named, "localhost", socket.gethostname().lower(), socket.getfqdn().lower()) if name
        }
        self._any = not named and not is_loopback(here)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_ours(HTTPConnection(scope)):
            await self._app(scope, receive, send)
            return
        told = document(
            "misdirected-request",
            421,
            "the Host header names another host",
            hint="call it by its address, or set api.url in the configuration to the name that people use",
        )
        await JSONResponse(told, 421, media_type=MEDIA_TYPE)(scope, receive, send)

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
