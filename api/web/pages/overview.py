"""The first page: every server by recoverability, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from api.auth import Acting, allowed
from api.web.site import render
from backupd.app.views.server import ServerOverview, Status
from backupd.model.access import Role

SERVERS_OF_A_PAGE = 200
"""Servers on one page."""
_NAMES = {"bad": "not recoverable as promised", "warning": "look at it", "good": "well"}
_OLDEST = datetime.min.replace(tzinfo=UTC)

overview_routes = APIRouter(include_in_schema=False, dependencies=[Depends(allowed(Role.VIEWER))])


@overview_routes.get("/")
def servers(request: Request, service: Acting, q: str = "", status: str = "", page: int = 1) -> HTMLResponse:
    everyone = service.servers.overview()
    counts = Counter(str(server.status) for server in everyone)
    wanted = [server for server in everyone if q.lower() in server.name.lower() and status in ("", server.status)]
    pages = max(-(-len(wanted) // SERVERS_OF_A_PAGE), 1)
    page = min(max(page, 1), pages)
    proofs = [server.last_proof.finished_at for server in everyone if server.last_proof is not None]
    return render(
        request,
        "overview.html",
        servers=worst_first(wanted)[(page - 1) * SERVERS_OF_A_PAGE : page * SERVERS_OF_A_PAGE],
        total=len(everyone),
        counts={str(one): counts[str(one)] for one in Status},
        names=_NAMES,
        q=q,
        wanted_status=status,
        page=page,
        pages=pages,
        nothing=sum(server.latest is None for server in everyone),
        oldest_proof=min(proofs, default=None),
        running=sum(len(server.running) for server in everyone),
        troubled=[place for place in service.installation.destinations() if place.status is not Status.GOOD],
    )


def worst_first(servers: Iterable[ServerOverview]) -> list[ServerOverview]:
    """By status, then those first of which the most would be lost."""
    return sorted(servers, key=lambda server: (-server.status.rank, server.latest or _OLDEST, server.name))
