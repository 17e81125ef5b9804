"""Servers: how recoverable they are, retention, search in binary logs, holds and pauses; destinations and keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from fastapi.responses import JSONResponse

from api.auth import Acting, CurrentActor
from api.middleware import SEARCHES, SEARCHING
from api.routes.answers import ADMIN, OPERATOR, VIEWER, accepted, listed, one, page, part, router_of
from api.schemas.access import Key
from api.schemas.backups import ApplyRequest, Decisions, ServerConsistency
from api.schemas.base import Name, Rated, Whole
from api.schemas.jobs import Accepted
from api.schemas.servers import (
    Cluster,
    Destination,
    Found,
    Held,
    Hold,
    HoldRequest,
    Identity,
    Paused,
    PauseRequest,
    Released,
    ReleaseQuery,
    SearchQuery,
    Server,
    Timeline,
)
from backupd.catalog.row_mapping import Listed
from backupd.model.backup_record import HoldKind

router = router_of("servers")

ServerName = Annotated[Name, Path(description="Name of a server, as the configuration has it.")]


@router.get("/servers", dependencies=[VIEWER], response_model=list[Server])
def list_servers(request: Request, query: Annotated[Rated, Query()], service: Acting) -> JSONResponse:
    """Every server at a glance: is it recoverable, up to when, and what is wrong."""
    return listed(request, query, service.labelled(query.label).listings.overview)


@router.get("/servers/{server}", dependencies=[VIEWER], response_model=Server)
def show_server(server: ServerName, service: Acting) -> JSONResponse:
    """One server at a glance."""
    return one(service.servers.overview([server])[0])


@router.get("/servers/{server}/timeline", dependencies=[VIEWER], response_model=Timeline)
def show_timeline(server: ServerName, service: Acting) -> JSONResponse:
    """Which moments can be restored, what interrupts them, and whether the objectives are kept."""
    return one(service.servers.timeline(server))


@router.get("/clusters/{server}", dependencies=[VIEWER], response_model=Cluster)
def show_cluster(server: ServerName, service: Acting) -> JSONResponse:
    """The Galera cluster that a server is a node of: every configured node is asked now. For each backup: would a node
    that is restored from it come back by IST, from which donor and until when, or by SST."""
    return one(service.servers.cluster(server))


@router.get("/servers/{server}/consistency", dependencies=[VIEWER], response_model=ServerConsistency)
def show_consistency(server: ServerName, service: Acting) -> JSONResponse:
    """Whether a replica holds what its source does: what all checks together show, and the newest ones."""
    return one(service.servers.consistency(server))


@router.post("/servers/{server}/consistency", dependencies=[OPERATOR], response_model=Accepted, status_code=202)
def check_consistency(server: ServerName, service: Acting) -> JSONResponse:
    """Compare a replica with its source, table by table. Each of the two reads its tables once."""
    return accepted(service.requests.check_consistency(server))


@router.get("/servers/{server}/retention", dependencies=[VIEWER], response_model=list[Decisions])
def preview_retention(
    request: Request, server: ServerName, query: Annotated[Whole, Query()], service: Acting
) -> JSONResponse:
    """What the rules keep and what they let go at each destination, and why. Changes nothing."""
    return part(request, service.retention.preview(server), query, lambda one: str(one.destination))


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


hold_routes = router_of("holds")


@hold_routes.get("/holds", dependencies=[VIEWER], response_model=list[Hold])
def list_holds(request: Request, query: Annotated[Whole, Query()], service: Acting) -> JSONResponse:
    """Of which servers nothing is deleted."""
    return _of_kind(request, query, service, HoldKind.HOLD)


@hold_routes.post("/holds", dependencies=[ADMIN], response_model=Held, status_code=201)
def set_hold(asked: HoldRequest, service: Acting) -> JSONResponse:
    """Delete nothing of a server until that is released: neither by rule nor by hand."""
    return JSONResponse(service.retention.hold(asked.server, asked.reason).as_json(), 201)


@hold_routes.delete("/holds", dependencies=[ADMIN], response_model=Released)
def release_hold(query: Annotated[ReleaseQuery, Query()], service: Acting) -> JSONResponse:
    """Resume retention of the server."""
    return _released(service, query.server, HoldKind.HOLD)


@hold_routes.get("/pauses", dependencies=[VIEWER], response_model=list[Hold])
def list_pauses(request: Request, query: Annotated[Whole, Query()], service: Acting) -> JSONResponse:
    """List the servers whose scheduled jobs are suspended."""
    return _of_kind(request, query, service, HoldKind.PAUSE)


@hold_routes.post("/pauses", dependencies=[ADMIN], response_model=Paused, status_code=201)
def set_pause(asked: PauseRequest, service: Acting) -> JSONResponse:
    """Suspend a server's scheduled jobs and its binary log stream until the pause is released."""
    paused = service.retention.pause(asked.server, asked.reason, stop_running=asked.stop_running)
    return JSONResponse(paused.as_json(), 201)


@hold_routes.delete("/pauses", dependencies=[ADMIN], response_model=Released)
def release_pause(query: Annotated[ReleaseQuery, Query()], service: Acting) -> JSONResponse:
    """Resume its scheduled jobs."""
    return _released(service, query.server, HoldKind.PAUSE)


def _of_kind(request: Request, query: Whole, service: Acting, kind: HoldKind) -> JSONResponse:
    found = (one for one in service.retention.holds() if one.kind is kind)
    return part(request, found, query, lambda one: str(one.server))


def _released(service: Acting, server: str, kind: HoldKind) -> JSONResponse:
    problems = service.retention.release(server, kind)
    return JSONResponse({"server": server, "kind": str(kind), "released": True, "problems": list(problems)})


destination_routes = router_of("destinations")


@destination_routes.get("/destinations", dependencies=[VIEWER], response_model=list[Destination])
def list_destinations(
    request: Request, query: Annotated[Rated, Query()], actor: CurrentActor, service: Acting
) -> JSONResponse:
    """Every destination: does it answer, how full is it, what is still to be copied there. Empty for a token that sees
    some servers only."""
    destinations = service.installation.destinations() if actor.sees("") else ()
    found = (one for one in destinations if query.status in (None, one.status))
    return part(request, found, query, lambda one: str(one.name))


@destination_routes.get("/keys", dependencies=[VIEWER], response_model=list[Key])
def list_keys(request: Request, query: Annotated[Whole, Query()], actor: CurrentActor, service: Acting) -> JSONResponse:
    """The keys that open backups: when each was last proved, when it expires, how many backups depend on it. Empty for
    a token that sees some servers only."""
    return part(request, service.keys.list() if actor.sees("") else (), query, lambda one: str(one.name))
