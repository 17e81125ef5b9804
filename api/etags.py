"""ETags: who asks again for what has not changed gets 304 and no body."""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LONGEST = 8 * 1024 * 1024
"""Bytes of an answer that is looked at whole; a longer one goes out as it comes, without an ETag."""


class ETags:
    """A strong ETag, of the body, on each successful GET of JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Holding(send, Headers(scope=scope).getlist("if-none-match")))


class _Holding:
    """Holds a JSON answer back until it is whole."""

    def __init__(self, send: Send, known: list[str]) -> None:
        self._send, self._known = send, known
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._size = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._wanted(message):
            self._start = message
        elif self._start is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._parts.append(message.get("body", b""))
            self._size += len(self._parts[-1])
            if not message.get("more_body", False):
                await self._tell(self._start)
            elif self._size > LONGEST:
                start, self._start = self._start, None
                await self._send(start)
                await self._send({"type": "http.response.body", "body": b"".join(self._parts), "more_body": True})

    @staticmethod
    def _wanted(message: Message) -> bool:
        kind = Headers(raw=message["headers"]).get("content-type", "")
        return bool(message["status"] == 200 and kind.partition(";")[0] == "application/json")

    async def _tell(self, start: Message) -> None:
        body = b"".join(self._parts)
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = MutableHeaders(scope=start)
        headers["ETag"] = tag
        if self._is_known(tag):
            start["status"], body = 304, b""
            for name in ("content-length", "content-type"):
                if name in headers:
                    del headers[name]
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    def _is_known(self, tag: str) -> bool:
        tags = [one.strip().removeprefix("W/") for line in self._known for one in line.split(",")]
        return "*" in tags or tag in tags
