"""Answers that need not be computed or sent again: ETags (304 without a body for what has not changed), and answers
that requests share: two hundred pages that ask for the same are answered once, as long as nobody has written to the
catalog meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.site import Layer
from backupd.model.access import Actor

LONGEST = 8 * 1024 * 1024
"""Bytes of an answer that is looked at whole; a longer one goes out as it comes, without an ETag."""


class ETags(Layer):
    """A strong ETag, of the body, on each successful GET of JSON."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD"):
            send = _Holding(send, Headers(scope=scope).getlist("if-none-match"))
        await self._app(scope, receive, send)


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
                await self._send_part(self._start)
            elif self._size > LONGEST:
                start, self._start = self._start, None
                await self._send(start)
                await self._send({"type": "http.response.body", "body": b"".join(self._parts), "more_body": True})

    @staticmethod
    def _wanted(message: Message) -> bool:
        kind = Headers(raw=message["headers"]).get("content-type", "")
        return bool(message["status"] == 200 and kind.partition(";")[0] == "application/json")

    async def _send_part(self, start: Message) -> None:
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


FRESH = 1.0
"""Seconds after which it is asked anew in any case: answers show ages, and what a destination says."""
LARGEST = 512 * 1024
"""Bytes of an answer that is kept."""
MOST = 64
"""Answers that are kept."""
_STREAM = "/v1/events"
_API = "/v1/"

Version = Callable[[], int | None]


@dataclass(slots=True)
class _Answer:
    """``version`` of the catalog right before it was worked on. ``messages`` empty: not one to share."""

    version: int
    at: float
    done: asyncio.Event = field(default_factory=asyncio.Event)
    messages: tuple[Message, ...] = ()


class SharedAnswers(Layer):
    """Behind the door: who asks was let in already, and shares answers only with itself. An answer counts while
    ``version`` gives the number that it gave before the work on it began; where it gives none, nothing is shared."""

    def __init__(self, app: ASGIApp, version: Version) -> None:
        super().__init__(app)
        self._version = version
        self._answers: dict[tuple[object, ...], _Answer] = {}

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _key(scope)
        version = self._version() if key is not None else None
        if key is None or version is None:
            await self._app(scope, receive, send)
            return
        found = self._answers.get(key)
        if found is not None and found.version == version and time.monotonic() - found.at < FRESH:
            await found.done.wait()
            if found.messages:
                for message in found.messages:
                    await send(dict(message))
                return
            await self._app(scope, receive, send)
            return
        await self._work(key, _Answer(version, time.monotonic()), scope, receive, send)

    async def _work(self, key: tuple[object, ...], answer: _Answer, scope: Scope, receive: Receive, send: Send) -> None:
        self._answers.pop(key, None)
        while len(self._answers) >= MOST:
            del self._answers[next(iter(self._answers))]
        self._answers[key] = answer
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(_copy(message))
            await send(message)

        try:
            await self._app(scope, receive, keep)
            if _is_shared(messages):
                answer.messages = tuple(messages)
        finally:
            answer.done.set()
            if not answer.messages and self._answers.get(key) is answer:
                del self._answers[key]


def _key(scope: Scope) -> tuple[object, ...] | None:
    """None for what is not shared."""
    if scope["method"] != "GET":
        return None
    path = scope["path"]
    actor: Actor | None = scope.get("state", {}).get("actor")
    if actor is None or not actor.token_id or not path.startswith(_API) or path.startswith(_STREAM):
        return None
    return actor.token_id, actor.via, path, scope["query_string"], Headers(scope=scope).get("accept", "")


def _copy(message: Message) -> Message:
    """What is done to a message on its way out is not done to what is kept."""
    copied: dict[str, Any] = dict(message)
    if "headers" in copied:
        copied["headers"] = list(copied["headers"])
    return copied


def _is_shared(messages: list[Message]) -> bool:
    """A whole answer that says what was asked for, and may be kept."""
    if not messages or messages[-1].get("more_body", False):
        return False
    start: Mapping[str, Any] = messages[0]
    size = sum(len(message.get("body", b"")) for message in messages)
    return (
        start.get("status") == 200
        and size <= LARGEST
        and "no-store" not in Headers(raw=start["headers"]).get("cache-control", "")
    )
