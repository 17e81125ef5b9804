"""Pages of what there is: a backup, proofs, destinations, alerts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from api.auth import Acting, allowed
from api.web.drawing import backup_moment
from api.web.site import link, render
from api.web.words import Shown, problem_of
from backupd.app.service.facade import Service
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
    its time and is told as far as it answers."""
    record = service.listings.backup(backup_id)
    siblings = service.backups.list(record.server)
    detail, runbook, problem = _stored(service, backup_id) if read else (None, "", None)
    return render(
        request,
        "backup.html",
        record=record,
        detail=detail,
        runbook=runbook,
        problem=problem,
        was_read=bool(read),
        chain=_chain(record, siblings),
        children=[one for one in siblings if one.parent == backup_id],
        moment=backup_moment(record),
        proofs=service.listings.proofs(record.server, backup=backup_id, limit=20).items,
    )


def _stored(service: Service, backup_id: str) -> tuple[BackupDetail | None, str, Shown | None]:
    try:
        return service.backups.show(backup_id), service.backups.runbook(backup_id), None
    except BackupdError as error:
        return None, "", problem_of(error)


def _chain(record: BackupRecord, siblings: Sequence[BackupRecord]) -> tuple[BackupRecord, ...]:
    try:
        return chain_of(record.id, siblings)
    except BackupdError:
        return ()  # the page says what it builds on; a restore would tell that this is not there


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
        request, "destinations.html", places=sorted(found, key=lambda place: (-place.status.rank, place.name))
    )


@router.get("/alerts")
def alerts(request: Request, service: Acting, server: str = "", before: str = "") -> HTMLResponse:
    """What is wrong now, the worst first; what is over, page by page; and who was told, for those who see all."""
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
