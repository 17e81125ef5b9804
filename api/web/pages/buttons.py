"""What the buttons on other pages do. Each leads back to a page that shows what was done, or to the job it queued."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fastapi import APIRouter, Depends, Response
from fastapi.responses import RedirectResponse

from api.auth import Acting, CurrentActor, OnSite, allowed
from api.web.site import OF_OURS, Form, Sent, back_to, link
from backupd.app.context.access import audit, require_all
from backupd.app.service.facade import Service
from backupd.model.access import Role
from backupd.model.backup_record import BackupKind, HoldKind
from backupd.model.errors import UsageError
from backupd.model.job import JobKind, JobRecord

router = APIRouter(include_in_schema=False)

_OPERATOR = [Depends(allowed(Role.OPERATOR)), OF_OURS]
_ADMIN = [Depends(allowed(Role.ADMIN)), OF_OURS]


def _backup(kind: BackupKind) -> Callable[[Service, str], JobRecord]:
    return lambda service, server: service.requests.backup(server, kind)


_JOBS: Mapping[str, Callable[[Service, str], JobRecord]] = {
    **{str(kind): _backup(kind) for kind in BackupKind},
    str(JobKind.TEST_RESTORE): lambda service, server: service.requests.test_restore(server),
    str(JobKind.VERIFY): lambda service, server: service.requests.verify(server),
}


@router.post("/servers/{server}/jobs", dependencies=_OPERATOR)
def request_job(server: str, service: Acting, sent: Sent) -> Response:
    """A backup, a test restore or a verification, now."""
    kind = sent.text("kind")
    if kind not in _JOBS:
        raise UsageError(f"{kind!r} is not an action", hint=f"one of {', '.join(_JOBS)}")
    return RedirectResponse(link("jobs", _JOBS[kind](service, server).id), status_code=303)


@router.post("/servers/{server}/holds", dependencies=_ADMIN)
def set_hold(server: str, service: Acting, sent: Sent) -> Response:
    """A hold or a pause."""
    problems: Sequence[str] = ()
    if _kind(sent) is HoldKind.HOLD:
        problems = service.retention.hold(server, sent.text("reason")).problems
        return back_to(link("servers", server), _everywhere("held", problems))
    service.retention.pause(server, sent.text("reason"))
    return back_to(link("servers", server), "paused")


@router.post("/servers/{server}/holds/release", dependencies=_ADMIN)
def release(server: str, service: Acting, sent: Sent) -> Response:
    kind = _kind(sent)
    problems = service.retention.release(server, kind)
    return back_to(link("servers", server), _everywhere("released", problems) if kind is HoldKind.HOLD else "resumed")


@router.post("/backups/{backup_id}/keep", dependencies=_ADMIN)
def keep(backup_id: str, service: Acting) -> Response:
    return back_to(link("backups", backup_id), _everywhere("kept", service.backups.keep(backup_id, pinned=True)))


@router.post("/backups/{backup_id}/unkeep", dependencies=_ADMIN)
def unkeep(backup_id: str, service: Acting) -> Response:
    return back_to(link("backups", backup_id), _everywhere("unkept", service.backups.keep(backup_id, pinned=False)))


@router.post("/backups/{backup_id}/delete", dependencies=_ADMIN)
def delete(backup_id: str, service: Acting, sent: Sent) -> Response:
    """Only marks it: what goes at once and for ever is asked for on the command line."""
    service.backups.delete(backup_id, with_increments=sent.has("with_increments"))
    return back_to(link("backups", backup_id), "deleted")


@router.post("/backups/{backup_id}/undelete", dependencies=_ADMIN)
def undelete(backup_id: str, service: Acting) -> Response:
    service.backups.undelete(backup_id)
    return back_to(link("backups", backup_id), "undeleted")


@router.post("/jobs/{job_id}/cancel", dependencies=_OPERATOR)
def cancel(job_id: str, service: Acting) -> Response:
    service.jobs.cancel(job_id)
    return back_to(link("jobs", job_id), "cancelled")


@router.post("/alerts/{incident_id}/acknowledge", dependencies=_OPERATOR)
def acknowledge(incident_id: str, service: Acting) -> Response:
    service.alerts.acknowledge(incident_id)
    return back_to("/alerts", "acknowledged")


@router.post("/alerts/test", dependencies=_ADMIN)
def test_alerts(service: Acting) -> Response:
    service.alerts.test(wait=False)
    return back_to("/alerts", "alerts-tested")


@router.post("/policies/reload", dependencies=_ADMIN)
def reload(site: OnSite, actor: CurrentActor) -> Response:
    require_all(actor)
    site.reload()
    audit(site.wiring, actor, "policies-reloaded")
    return back_to("/policies", "policies-reloaded")


def _kind(sent: Form) -> HoldKind:
    try:
        return HoldKind(sent.text("kind"))
    except ValueError as error:
        raise UsageError("this is neither a hold nor a pause") from error


def _everywhere(word: str, problems: Sequence[str]) -> str:
    return f"{word}-not-everywhere" if problems else word
