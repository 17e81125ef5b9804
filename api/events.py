"""Server-sent events: one thread looks at the catalog for all who listen."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool

from api.problems import TooManyError
from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring
from backupd.app.views.listing import CatalogChanges, Change
from backupd.model.access import Actor
from backupd.model.errors import BackupdError, CatalogError, RefusedError
from backupd.model.event import Event
from backupd.model.job import JobRecord

BEAT = 15.0
"""Seconds after which a comment shows both sides that the other one is there."""
ASKED_AGAIN = 5.0
"""Seconds after which nothing more is sent before it is known that whoever listens still may."""
MOST = 500
"""Listeners at a time."""
MOST_OF_ONE = 20
"""Of them with one token, or with sessions that were begun with it."""
_PAUSE = 0.5
_PAUSE_IN_TROUBLE = 3.0
_BACKLOG = 5000
"""Events that may wait for a listener that does not read; then it has to come again, with Last-Event-ID."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whose ears, and what for: None for everything."""

    actor: Actor
    server: str | None = None
    job: str | None = None

    def has_event(self, event: Event) -> bool:
        return (
            self.actor.sees(event.server) and self.server in (None, event.server) and self.job in (None, event.job_id)
        )

    def has_job(self, job: JobRecord) -> bool:
        return self.actor.sees(job.server) and self.server in (None, job.server) and self.job in (None, job.id)


@dataclass(eq=False)
class Listener:
    """What waits for one who listens. Of a job only its newest state waits."""

    wanted: Wanted
    loop: asyncio.AbstractEventLoop
    events: deque[Event] = field(default_factory=deque)
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    there: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    def take(self) -> tuple[list[Event], list[JobRecord]]:
        self.there.clear()
        events, jobs = list(self.events), list(self.jobs.values())
        self.events.clear()
        self.jobs.clear()
        return events, jobs

    def put(self, events: list[Event], jobs: list[JobRecord]) -> None:
        self.events.extend(events)
        self.jobs.update((job.id, job) for job in jobs)
        self.over = self.over or len(self.events) > _BACKLOG
        self.there.set()

    def end(self) -> None:
        self.over = True
        self.there.set()


class Broadcaster:
    """Its thread runs while somebody listens."""

    def __init__(self, wiring: Wiring, *, pause: float = _PAUSE) -> None:
        self._wiring = wiring
        self._pause = pause
        self._lock = threading.Lock()
        self._listeners: set[Listener] = set()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False

    def listen(self, listener: Listener) -> None:
        """From now on it receives events. Raises RefusedError when too many listen, or nobody is to any more;
        TooManyError when too many do with its token; CatalogError."""
        # Not with the lock: the catalog may be slow.
        news = CatalogChanges(self._wiring) if self._thread is None else None
        with self._lock:
            if self._closed:
                raise RefusedError("the service stops", hint="reconnect in a moment")
            if len(self._listeners) >= MOST:
                raise RefusedError(f"{MOST} listen to events already", hint="close connections that nobody reads")
            token = listener.wanted.actor.token_id
            if sum(one.wanted.actor.token_id == token for one in self._listeners) >= MOST_OF_ONE:
                raise TooManyError(
                    f"{MOST_OF_ONE} listen to events with this token already",
                    BEAT,
                    hint="close connections or pages that nobody reads, or use another token",
                )
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(news or CatalogChanges(self._wiring),), name="events", daemon=True
                )
                self._thread.start()
            self._listeners.add(listener)

    def leave(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.discard(listener)

    def close(self) -> None:
        """Every stream ends, and none begins any more."""
        with self._lock:
            self._closed = True
            for listener in self._listeners:
                _hand_to(listener, listener.end)
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join(_PAUSE_IN_TROUBLE)  # it may wait for a catalog that does not answer; it dies with the process

    def _run(self, news: CatalogChanges) -> None:
        """Until nobody listens."""
        trouble = False
        while not self._wake.wait(_PAUSE_IN_TROUBLE if trouble else self._pause):
            try:
                change = news.look()
                trouble = False
            except CatalogError as error:
                if not trouble:
                    say("events-unread", error.message, level=logging.ERROR)
                trouble = True
                continue
            with self._lock:
                if not self._listeners or self._closed:
                    self._thread = None
                    return
                for listener in self._listeners:
                    _pass_on(listener, change)

    @property
    def listeners(self) -> int:
        with self._lock:
            return len(self._listeners)


def _pass_on(listener: Listener, change: Change) -> None:
    events = [event for event in change.events if listener.wanted.has_event(event)]
    jobs = [job for job in change.jobs if listener.wanted.has_job(job)]
    if events or jobs:
        _hand_to(listener, lambda: listener.put(events, jobs))


def _hand_to(listener: Listener, what: Callable[[], None]) -> None:
    try:
        listener.loop.call_soon_threadsafe(what)
    except RuntimeError:
        return  # its loop is closed: nobody listens any more


async def stream(
    broadcaster: Broadcaster,
    wiring: Wiring,
    wanted: Wanted,
    last: int | None,
    *,
    still: Callable[[], bool],
    beat: float = BEAT,
    again: float = ASKED_AGAIN,
) -> AsyncGenerator[bytes, None]:
    """The text of an event stream, for ``wanted``: what came after the event ``last``, then what comes. It ends when
    ``still`` says that whoever listens may not do so any more; nothing is sent where that was asked longer than
    ``again`` seconds ago. Raises what ``listen`` raises before the first piece."""
    listener = Listener(wanted, asyncio.get_running_loop())
    await run_in_threadpool(broadcaster.listen, listener)
    try:
        yield b"retry: 2000\n\n"
        sent: set[int] = set()
        permission = _Permission(still, again)
        while last is not None:
            page = await run_in_threadpool(wiring.catalog.events.since, last)
            if not await permission.lasts():
                return
            for event in page:
                sent.add(event.number)
                if wanted.has_event(event):
                    yield _event(event)
            last = page[-1].number if page else None
        if wanted.job is not None:
            yield _job(await run_in_threadpool(wiring.catalog.jobs.get, wanted.job))
        while not listener.over:
            silent = not await _has_event(listener, beat)
            if not await permission.lasts(anew=silent):
                return
            if silent:
                yield b": still here\n\n"
            events, jobs = listener.take()
            for event in events:
                if event.number not in sent:
                    yield _event(event)
            for job in jobs:
                yield _job(job)
    finally:
        broadcaster.leave(listener)


async def _has_event(listener: Listener, seconds: float) -> bool:
    """Within so long."""
    try:
        return await asyncio.wait_for(listener.there.wait(), seconds)
    except TimeoutError:
        return False


class _Permission:
    """To listen: what was asked counts for ``again`` seconds."""

    def __init__(self, still: Callable[[], bool], again: float) -> None:
        self._still, self._again, self._asked = still, again, time.monotonic()

    async def lasts(self, *, anew: bool = False) -> bool:
        """``anew``: ask in any case."""
        if not anew and time.monotonic() - self._asked < self._again:
            return True
        self._asked = time.monotonic()
        return await run_in_threadpool(_still, self._still)


def _still(still: Callable[[], bool]) -> bool:
    """A catalog that does not answer ends no stream: nothing is sent meanwhile."""
    try:
        return still()
    except CatalogError:
        return True
    except BackupdError:
        return False


def _event(event: Event) -> bytes:
    return _piece("event", event.as_json(), event.number)


def _job(job: JobRecord) -> bytes:
    return _piece("job", job.as_json())


def _piece(kind: str, document: dict[str, Any], number: int | None = None) -> bytes:
    """JSON has no line breaks of its own, so nothing in it can end the piece."""
    name = "" if number is None else f"id: {number}\n"
    return f"{name}event: {kind}\ndata: {json.dumps(document, ensure_ascii=True)}\n\n".encode()
