"""Servers: how recoverable they are, what the rules make of their backups, what their binary logs hold."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from fastapi.responses import JSONResponse

from api.auth import Acting
from api.limits import SEARCHES, SEARCHING
from api.routes.answers import ADMIN, VIEWER, accepted, one, page, part, router_of, several
from api.schemas.base import Whole
from api.schemas.jobs import Accepted
from api.schemas.retention import ApplyRequest, Decisions
from api.schemas.search import Found, SearchQuery
from api.schemas.servers import Identity, Server
from api.schemas.timeline import Timeline
from backupd.catalog.base.pages import Listed

router = router_of("servers")

ServerName = Annotated[
    str,
    Path(
        description="Name of a server, as the configuration has it.",
        examples=["shop-db1"],
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
    ),
]


@router.get("/servers", dependencies=[VIEWER], response_model=list[Server])
def list_servers(request: Request, query: Annotated[Whole, Query()], service: Acting) -> JSONResponse:
    """Every server at a glance: is it recoverable, up to when, and what is wrong."""
    return part(request, service.servers.overview(), query)


@router.get("/servers/{server}", dependencies=[VIEWER], response_model=Server)
def show_server(server: ServerName, service: Acting) -> JSONResponse:
    """One server at a glance."""
    return one(service.servers.overview([server])[0])


@router.get("/servers/{server}/timeline", dependencies=[VIEWER], response_model=Timeline)
def show_timeline(server: ServerName, service: Acting) -> JSONResponse:
    """Which moments can be restored, what interrupts them, and whether the objectives are kept."""
    return one(service.servers.timeline(server))


@router.get("/servers/{server}/retention", dependencies=[VIEWER], response_model=list[Decisions])
def preview_retention(server: ServerName, service: Acting) -> JSONResponse:
    """What the rules keep and what they let go at each destination, and why. Changes nothing."""
    return several(service.retention.preview(server))


@router.post("/servers/{server}/retention", dependencies=[ADMIN], response_model=Accepted, status_code=202)
def apply_retention(server: ServerName, service: Acting, asked: ApplyRequest | None = None) -> JSONResponse:
    """Mark what expired; it goes after the grace period."""
    return accepted(service.requests.retention(server, really=asked is not None and asked.really))


@router.post("/servers/{server}/accept", dependencies=[ADMIN], response_model=Identity)
def accept_server(server: ServerName, service: Acting) -> JSONResponse:
    """Say that the other database server that answers under this name (an alert `server-changed` is open) is the right
    one from now on: its backups and binary logs, kept apart until then, count as those of the server."""
    return one(service.servers.accept(server))


@router.get("/servers/{server}/binlog/search", dependencies=[VIEWER], response_model=list[Found])
def search_binlogs(
    request: Request, server: ServerName, query: Annotated[SearchQuery, Query()], service: Acting
) -> JSONResponse:
    """Find transactions in the archived binary logs, oldest first: who deleted these rows, and what is the moment right
    before that? One that takes longer than 20 seconds is refused, and says how far it came: narrow it in time."""
    with SEARCHES.one("binary logs are searched"):
        found = list(
            service.binlogs.search(
                server,
                tables=query.table,
                kinds=query.kind,
                since=query.since,
                until=query.until,
                gtid=query.gtid,
                limit=query.limit + 1,
                branch=query.branch,
                after=query.after,
                seconds=SEARCHING,
            )
        )
    return page(request, Listed.of(found, query.limit, lambda one: one.cursor))
