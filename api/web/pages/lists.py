"""The first page (every server by recoverability, the worst first), and the pages of backups, proofs, destinations and
alerts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from api.auth import Acting, allowed
from api.web.drawing import backup_moment
from api.web.site import link, render
from api.web.words import Shown, problem_of
from backupd.app.service.facade import Service
from backupd.app.views.server_status import ServerOverview, Status
from backupd.model.access import Actor, Role
from backupd.model.backup_record import BackupDetail, BackupRecord
from backupd.model.errors import BackupdError
from backupd.model.event import Incident, MessageState, Severity
from backupd.recovery.chains import chain_of

PAGE = 60
_MESSAGES = 30
_OUTCOMES = ("proved", "restored", "failed", "undecided", "inexact", "withdrawn")

router = APIRouter(include_in_schema=False, dependencies=[Depends(allowed(Role.VIEWER))])


@router.get("/backups/{backup_id}")
def backup(request: Request, service: Acting, backup_id: str, read: str = "") -> HTMLResponse:
    """As the catalog has it; with ``read`` also what only a destination knows (manifest and runbook), which may take
    its time and is shown as far as it answers."""
    record = service.listings.backup(backup_id)
    family = service.listings.family(record)
    detail, runbook, problem = _stored(service, backup_id) if read else (None, "", None)
    return render(
        request,
        "backup.html",
        record=record,
        detail=detail,
        runbook=runbook,
        problem=problem,
        was_read=bool(read),
        chain=_chain(record, family),
        children=[one for one in family if one.parent == backup_id],
        moment=backup_moment(record),
        proofs=service.listings.proofs(record.server, backup=backup_id, limit=20).items,
    )


def _stored(service: Service, backup_id: str) -> tuple[BackupDetail | None, str, Shown | None]:
    try:
        return service.backups.show(backup_id), service.backups.runbook(backup_id), None
    except BackupdError as error:
        return None, "", problem_of(error)


def _chain(record: BackupRecord, family: Sequence[BackupRecord]) -> tuple[BackupRecord, ...]:
    try:
        return chain_of(record.id, family)
    except BackupdError:
        return ()  # the page says what it builds on; a restore would say that this is not there


@router.get("/proofs")
def proofs(
    request: Request, service: Acting, server: str = "", outcome: str = "", after: Annotated[str | None, Query()] = None
) -> HTMLResponse:
    wanted = outcome if outcome in _OUTCOMES else None
    found = service.listings.proofs(server or None, outcome=wanted, limit=PAGE, after=after or None)
    chosen = {"server": server, "outcome": outcome}
    untested = (
        [one for one in service.servers.overview() if one.last_proof is None and not one.tables_only]
        if not (server or after)
        else []
    )
    return render(
        request,
        "proofs.html",
        proofs=found.items,
        chosen=chosen,
        outcomes=_OUTCOMES,
        untested=untested,
        servers=service.listings.servers(),
        newer=link("proofs", **chosen) if after else "",
        older=link("proofs", **chosen, after=found.next) if found.next else "",
    )


@router.get("/proofs/{proof_id}")
def proof(request: Request, service: Acting, proof_id: str) -> HTMLResponse:
    return render(request, "proof.html", proof=service.listings.proof(proof_id))


@router.get("/destinations")
def destinations(request: Request, service: Acting) -> HTMLResponse:
    found = service.installation.destinations()
    return render(
        request,
        "destinations.html",
        places=sorted(found, key=lambda destination: (-destination.status.rank, destination.name)),
    )


@router.get("/alerts")
def alerts(request: Request, service: Acting, server: str = "", before: str = "") -> HTMLResponse:
    """What is wrong now, the worst first; what is over, page by page; and who was notified, for those who see all."""
    now = [] if before else sorted(service.alerts.list(server or None, limit=1000), key=_urgency)
    over = service.alerts.list(server or None, is_open=False, before=before or None, limit=PAGE)
    actor: Actor = request.state.actor
    sees_messages = actor.servers is None and not server and not before
    unsent = service.alerts.messages(state=MessageState.QUEUED, limit=1000) if sees_messages else ()
    return render(
        request,
        "alerts.html",
        server=server,
        is_first=not before,
        open=now,
        closed=over,
        unsent=sum(1 for message in unsent if message.attempts),
        messages=service.alerts.messages(limit=_MESSAGES) if sees_messages else None,
        newer=link("alerts", server=server) if before else "",
        older=link("alerts", server=server, before=over[-1].id) if len(over) == PAGE else "",
    )


def _urgency(incident: Incident) -> tuple[bool, int, float]:
    """Those that nobody has acknowledged first, then the worst, then the newest."""
    severity = list(Severity).index(incident.severity)
    return incident.acknowledged_at is not None, -severity, -incident.opened_at.timestamp()


SERVERS_OF_A_PAGE = 100
"""Servers on one page."""
_NAMES = {"bad": "below its recovery objectives", "warning": "needs attention", "good": "well"}
_OLDEST = datetime.min.replace(tzinfo=UTC)

overview_routes = APIRouter(include_in_schema=False, dependencies=[Depends(allowed(Role.VIEWER))])


@overview_routes.get("/")
def servers(
    request: Request, service: Acting, q: str = "", status: str = "", label: str = "", page: int = 1
) -> HTMLResponse:
    """``label``: KEY=VALUE, of those that have it."""
    everyone = service.servers.overview()
    counts = Counter(str(server.status) for server in everyone)
    labels = {server.name: {f"{key}={value}" for key, value in server.labels.items()} for server in everyone}
    wanted = [
        server
        for server in everyone
        if q.lower() in server.name.lower() and status in ("", server.status) and label in ("", *labels[server.name])
    ]
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
        wanted_label=label,
        labels=sorted(set().union(*labels.values())),
        page=page,
        pages=pages,
        nothing=sum(server.latest is None for server in everyone),
        oldest_proof=min(proofs, default=None),
        running=sum(len(server.running) for server in everyone),
        troubled=[
            destination for destination in service.installation.destinations() if destination.status is not Status.GOOD
        ],
    )


def worst_first(servers: Iterable[ServerOverview]) -> list[ServerOverview]:
    """By status, then those first of which the most would be lost."""
    return sorted(servers, key=lambda server: (-server.status.rank, server.latest or _OLDEST, server.name))
