"""The REST interface and the web page as one application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import anyio.to_thread
from fastapi import FastAPI
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from api import docs, problems, routes
from api.auth import Doorkeeper, require_stated_roles
from api.caching import ETags, SharedAnswers
from api.events import Broadcaster
from api.headers import Hosts, SecurityHeaders
from api.idempotency import Idempotency
from api.limits import Limits
from api.openapi import describe
from api.routes import health
from api.site import Site
from api.throttle import Throttle
from api.web import pages, site
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Service
from backupd.catalog.base.database import Changes
from backupd.model.errors import BackupdError

ROUTERS = (docs.router, health.router, *routes.ROUTERS, site.router, *pages.ROUTERS)
"""Of all that is offered."""
THREADS = 24
"""Requests that are worked on at the same time; the others wait for their turn."""


def create_app(service: Service, wiring: Wiring, *, reload: Callable[[], None]) -> FastAPI:
    """``service`` stands on ``wiring``. ``reload``: asks the service that follows the policies to read its
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


def _error_page(request: HTTPConnection, status: int, told: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    error = BackupdError(told["message"], detail=told["detail"], hint=told["hint"])
    return site.render_error(Request(request.scope), error, status, headers=headers)


def _surround(app: FastAPI, ours: Site, changes: Changes) -> None:
    """The layers that every request passes, the outermost last."""

    def within(layer: Callable[..., ASGIApp], **options: object) -> None:
        app.add_middleware(layer, **options)

    within(SharedAnswers, version=changes.version)
    within(Idempotency)
    within(Doorkeeper)
    within(ETags)
    within(Limits)
    within(Hosts, settings=ours.wiring.settings.api)
    within(problems.Unforeseen)
    within(SecurityHeaders, secure=ours.secure)
