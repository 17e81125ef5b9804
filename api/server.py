"""The REST interface and the web page as one application.

The HTTP server: on a socket that somebody else holds, with patience for nobody who sends too slowly.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import FastAPI
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api import docs, problems, routes
from api.auth import Doorkeeper, require_stated_roles
from api.caching import ETags, SharedAnswers
from api.events import Broadcaster
from api.middleware import Hosts, Idempotency, Limits, SecurityHeaders
from api.openapi import describe
from api.routes import health
from api.site import Site, Throttle, network
from api.web import pages, site
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import Settings, held_settings, load_settings
from backupd.app.context.settings_problems import refuse_newly_broken
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Service
from backupd.catalog.database import Changes
from backupd.catalog.session import open_catalog
from backupd.model.errors import BackupdError, ConfigurationError, Problem, RefusedError, UsageError
from policies.configuration import Tls, is_loopback

ROUTERS = (docs.router, health.router, *routes.ROUTERS, site.router, *pages.ROUTERS)
"""Of all that is offered."""
THREADS = 24
"""Requests that are worked on at the same time; the others wait for their turn."""


def create_app(service: Service, wiring: Wiring, *, reload: Callable[[], None]) -> FastAPI:
    """``service`` is built on ``wiring``. ``reload``: asks the service that follows the policies to read its
    configuration anew. Raises TypeError for a route without a stated role."""
    ours = Site(wiring, service, Throttle(), reload, _error_page)
    changes = wiring.catalog.changes()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        try:
            yield
        finally:
            app.state.broadcaster.close()
            changes.close()
            ours.aside.shutdown()

    app = FastAPI(
        title="backupd",
        version=version("backupd"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        description="Backups of MySQL and MariaDB that are proved to restore.",
    )
    app.state.site = ours
    problems.install(app)
    app.state.service, app.state.broadcaster = service, Broadcaster(wiring)
    app.state.routers = ROUTERS
    for router in app.state.routers:
        require_stated_roles(router.routes)
        app.include_router(router)
    describe(app)
    _surround(app, ours, changes)
    return app


def _error_page(request: HTTPConnection, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    error = BackupdError(body["message"], detail=body["detail"], hint=body["hint"])
    return site.render_error(Request(request.scope), error, status, headers=headers)


def _surround(app: FastAPI, ours: Site, changes: Changes) -> None:
    """The layers that every request passes, the outermost last."""
    app.add_middleware(SharedAnswers, version=changes.version)
    app.add_middleware(Idempotency)
    app.add_middleware(Doorkeeper)
    app.add_middleware(ETags)
    app.add_middleware(Limits)
    app.add_middleware(Hosts, settings=ours.wiring.settings.api)
    app.add_middleware(problems.Unforeseen)
    app.add_middleware(SecurityHeaders, secure=ours.secure)


HEAD_SECONDS = 10.0
"""For the head of a request to come, from the connection on."""
HEAD_BYTES = 32 * 1024
IDLE_SECONDS = 75
"""For which a connection is kept for the next request."""
CONNECTIONS = 1000
CONNECTIONS_OF_ONE = 300
"""From one address (of IPv6: one net) that wait for what is sent next. Those that are being answered are not counted:
behind a proxy everybody has its address."""
CONNECTIONS_OF_STRANGERS = 600
"""From all addresses together that no right token came from lately, and that wait likewise: what is left to
``CONNECTIONS`` is for those that are known, and for this host."""
LATE_SECONDS = 1.0
"""For who connected just before the end to ask: nobody else hears what is said on that connection."""
END_SECONDS = 8
"""For what is being answered when the server is to end."""


class Http(HttpToolsProtocol):
    """As the library speaks it, but heads of requests are neither long nor slow."""

    head_seconds = HEAD_SECONDS
    most_of_one = CONNECTIONS_OF_ONE
    most_of_strangers = CONNECTIONS_OF_STRANGERS
    knows: Callable[[str], bool] = staticmethod(lambda _address: False)
    """Is an address one that a right token came from?"""
    origin = ""
    is_of_here = False
    _head = 0
    _complete = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the library's
        super().connection_made(transport)
        if self.client:
            self.origin = network(self.client[0])
            self.is_of_here = is_loopback(self.client[0]) or is_loopback(self.origin)
        self._expect_head()
        waiting = [one for one in self.connections if isinstance(one, Http) and one.is_waiting]
        if sum(one.origin == self.origin for one in waiting) > self.most_of_one or (
            self.is_stranger
            and len(waiting) > self.most_of_strangers
            and sum(one.is_stranger for one in waiting) > self.most_of_strangers
        ):
            self._refuse(b"503 Service Unavailable")

    @property
    def is_stranger(self) -> bool:
        return not self.is_of_here and not self.knows(self.origin)

    @property
    def is_waiting(self) -> bool:
        """Is it the other side's turn?"""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._complete:
            self._head += len(data)
        super().data_received(data)
        if not self._complete and self._head > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:  # the next request of a kept connection
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._complete = True
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._complete, self._head = False, 0

    def _expect_head(self) -> None:
        self._head, self._complete = 0, False
        self._timer = self.loop.call_later(self.head_seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        self._stop_timer()
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


class ApiServer(Server):
    """One run of it. ``ready`` is called when it answers; answers that last are ended when it is to end."""

    def __init__(self, config: Config, app: FastAPI, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._app, self._ready = app, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        close_events(self._app)
        await self._hear_the_last()
        await super().shutdown(sockets)

    async def _hear_the_last(self) -> None:
        """Take no more connections, and answer on those that were taken and on which nothing was asked yet."""
        loop = asyncio.get_running_loop()
        for server in self.servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        deadline = loop.time() + LATE_SECONDS
        await asyncio.sleep(0.05)  # what was taken in this very moment becomes a connection first
        while loop.time() < deadline and any(
            one.cycle is None for one in self.server_state.connections if isinstance(one, Http)
        ):
            await asyncio.sleep(0.02)


def close_events(app: FastAPI) -> None:
    """End every stream of events: those who listen connect again."""
    app.state.broadcaster.close()


def server_of(app: FastAPI, tls: Tls | None = None, ready: Callable[[], None] = lambda: None) -> ApiServer:
    """Raises ConfigurationError for a certificate that cannot be used."""
    context = None if tls is None else tls_context(tls)
    factory: Any = {} if context is None else {"ssl_context_factory": lambda _config, _default: context}
    http = type("Http", (Http,), {"knows": staticmethod(app.state.site.throttle.knows)})
    return ApiServer(
        Config(
            app,
            http=http,
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=END_SECONDS,
            **factory,
        ),
        app,
        ready,
    )


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Raises ConfigurationError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An encrypted key would have OpenSSL ask on the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            [Problem(str(tls.certificate), None, "api.tls", f"certificate or key cannot be used: {error}")],
            hint="both are PEM files that this user can read, the key has no passphrase and belongs to the certificate",
        ) from error
    return context


def run(config: Path, descriptor: int, *, held: Path | None = None, ready: int | None = None) -> None:
    """Answer on the socket ``descriptor`` until a signal ends it. ``held``: settings of the service that started this
    process; ``ready``: a descriptor that is written to once it answers. Raises ConfigurationError, CatalogError,
    UsageError for a descriptor that is no listening socket."""
    settings = load_settings(config, strict=False) if held is None else held_settings(held)
    with (
        _listener(descriptor) as listener,
        open_catalog(settings.catalog, make=held is None) as catalog,
        _library_log(),
    ):
        wiring = Wiring(settings, catalog)
        app = create_app(Service(wiring, ""), wiring, reload=_reloader(settings, os.getppid() if held else None))

        def report_ready() -> None:
            say("api-started", f"process {os.getpid()} answers at {settings.api.listen}")
            if ready is not None:
                os.write(ready, b"!")
                os.close(ready)

        server_of(app, settings.api.tls, report_ready).run(sockets=[listener])


@contextmanager
def _listener(descriptor: int) -> Iterator[socket.socket]:
    try:
        found = socket.socket(fileno=descriptor)
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError("nobody listens on it")
    except OSError as error:
        raise UsageError(
            f"descriptor {descriptor} is no listening socket: {error}",
            hint="`backupd serve` starts this with the right one",
        ) from error
    with found:
        yield found


def _reloader(settings: Settings, service: int | None) -> Callable[[], None]:
    """What asks the process ``service`` to read its configuration anew."""

    def reload() -> None:
        if service is None or os.getppid() != service:
            raise RefusedError(
                "no service is at work that could read its configuration anew", hint="start `backupd serve`"
            )
        # Else it would be refused there, and nobody who asked would hear why.
        refuse_newly_broken(settings, load_settings(settings.file, strict=False))
        os.kill(service, signal.SIGHUP)

    return reload


class _Forwarding(logging.Handler):
    """What the library complains of goes where ours goes."""

    def emit(self, record: logging.LogRecord) -> None:
        say("api-server", self.format(record), level=record.levelno)


@contextmanager
def _library_log() -> Iterator[None]:
    logger, handler = logging.getLogger("uvicorn.error"), _Forwarding(logging.ERROR)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
