"""What machines ask: does the process live, is it ready, is a server in rotation, and what is measured.

Load balancers and monitors ask the first three by HEAD and by OPTIONS, too: the status is what they look at.
"""

from __future__ import annotations

import weakref
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import JSONResponse, Response

from api.auth import OnSite, anybody, current_actor
from api.schemas.base import Alive, Presence, Problem, Ready
from api.site import site_of
from backupd.catalog.session import Catalog
from backupd.metrics import CONTENT_TYPE, exposition
from backupd.model.access import Actor
from backupd.model.errors import CatalogError, NotFoundError

router = APIRouter(tags=["health"])

_NOT_READY = 503
_PRESENCES: weakref.WeakKeyDictionary[Catalog, dict[str, tuple[bool, str]]] = weakref.WeakKeyDictionary()
"""What was reported of each server last, of each open catalog."""
_NO_STORE = {"Cache-Control": "no-store"}
_PROBED: dict[str, Any] = {"include_in_schema": False, "dependencies": [Depends(anybody)]}
"""The same answer by another method."""
ServerName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", examples=["shop-db1"])]


async def may_measure(request: Request) -> Actor | None:
    """Who asks for the metrics; None where nobody has to say so. Raises UnauthenticatedError."""
    actor: Actor | None = request.state.actor
    if actor is None and not site_of(request).metrics_are_open:
        return current_actor(request)
    return actor


@router.head("/healthz", **_PROBED)
@router.options("/healthz", **_PROBED)
@router.get("/healthz", summary="Does the process live?", response_model=Alive, dependencies=[Depends(anybody)])
async def healthz() -> Response:
    """Asks nobody else: it answers as long as the process does."""
    return JSONResponse({"status": "ok"}, headers=_NO_STORE)


@router.head("/readyz", **_PROBED)
@router.options("/readyz", **_PROBED)
@router.get(
    "/readyz",
    summary="Is it ready?",
    response_model=Ready,
    dependencies=[Depends(anybody)],
    responses={_NOT_READY: {"model": Ready, "description": "Not ready; `reasons` say why."}},
)
def readyz(site: OnSite) -> Response:
    """Ready is: the catalog answers and can be written, and a service runs the schedules."""
    reasons = []
    try:
        if site.wiring.catalog.watch.is_held() is False:
            reasons.append("no backupd service is running: scheduled jobs do not start (check `backupd serve`)")
        site.wiring.catalog.holds.all()
        if not site.trial.works(site.wiring.catalog):
            reasons.append("the catalog cannot be written (is its disk full? the service's log says why)")
    except CatalogError:  # its message may reveal where the catalog is, and anybody may ask
        reasons.append("the catalog does not answer (the service's log says why)")
    return JSONResponse({"ready": not reasons, "reasons": reasons}, _NOT_READY if reasons else 200, headers=_NO_STORE)


@router.head("/healthz/servers/{server}", **_PROBED)
@router.options("/healthz/servers/{server}", **_PROBED)
@router.get(
    "/healthz/servers/{server}",
    summary="Is a database server in rotation?",
    response_model=Presence,
    dependencies=[Depends(anybody)],
    responses={
        404: {"model": Problem, "description": "There is no such server."},
        _NOT_READY: {"model": Presence, "description": "A backup has taken it out of rotation."},
    },
)
def presence(server: ServerName, site: OnSite) -> Response:
    """For the health checks of load balancers: 503 while a backup wants the server, or this member of a group, to be
    left alone. While the catalog
    does not answer it is what it was last: an outage of the catalog takes no server out of rotation."""
    settings = site.wiring.settings
    if server not in settings.servers and server not in settings.groups:
        raise NotFoundError(
            "there is no such server", hint="name one of the configuration"
        )  # and reveal no other's name
    known = _PRESENCES.setdefault(site.wiring.catalog, {})
    try:
        known[server] = site.service.listings.server_is_present(server)
        present, reason = known[server]
    except CatalogError:
        present, reason = known.get(server, (True, ""))
    return JSONResponse(
        {"server": server, "present": present, "reason": reason}, 200 if present else _NOT_READY, headers=_NO_STORE
    )


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    dependencies=[Depends(anybody)],
    responses={
        200: {
            "description": "The text format of Prometheus.",
            "content": {
                "text/plain": {
                    "schema": {"type": "string"},
                    "example": 'backupd_server_rpo_seconds{server="shop-db1"} 12.5\n',
                }
            },
        },
        401: {"model": Problem, "description": "A token is needed; see `api.metrics`."},
    },
)
def metrics(actor: Annotated[Actor | None, Depends(may_measure)], site: OnSite) -> Response:
    """With a token for some servers, of those alone. `docs/metrics.md` tells what each metric means."""
    service = site.service if actor is None else site.service.acting(actor)
    return Response(exposition(service.installation.measure()), headers={"Content-Type": CONTENT_TYPE, **_NO_STORE})
