"""How much and how slowly anybody may send, and how slowly take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import MEDIA_TYPE, TooManyError, document

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
            raise TooManyError(f"{what} for others just now", BUSY_SECONDS, hint="ask again in a moment")
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


class Limits:
    """Outside of whatever reads bodies."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        largest: int = LARGEST,
        sending: float = SENDING,
        taking: float = TAKING,
    ) -> None:
        self._app, self._largest, self._sending, self._taking = app, largest, sending, taking

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
                trouble = (408, "request-timeout", f"the request did not come within {self._sending:g} seconds")
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
                return  # whatever is made of half a body is not what is told
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
            except Exception:  # what becomes of half a body is no news: why it is half is told below
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
