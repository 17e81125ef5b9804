"""Backups: take, list, show, keep, delete; and proofs, the results of test restores."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from api.auth import Acting
from api.routes.answers import ADMIN, OPERATOR, VERSION, VIEWER, accepted, id_of, listed, one, router_of
from api.schemas.backups import (
    Backup,
    BackupDetail,
    BackupRequest,
    BackupsQuery,
    Deleted,
    DeleteQuery,
    Kept,
    Proof,
    ProofsQuery,
    Runbook,
    Undeleted,
)
from api.schemas.jobs import Accepted
from backupd.model.backup_record import BackupKind

router = router_of("backups")

BackupId = Annotated[str, id_of("a backup", "20261121T020000Z-7f3a9c01")]


@router.post("/backups", dependencies=[OPERATOR], response_model=Accepted, status_code=202)
def request_backup(asked: BackupRequest, service: Acting) -> JSONResponse:
    """Take a backup as soon as it can begin."""
    return accepted(
        service.requests.backup(asked.server, BackupKind.of(asked.kind), table_set=asked.set or "", tables=asked.tables)
    )


@router.get("/backups", dependencies=[VIEWER], response_model=list[Backup])
def list_backups(request: Request, query: Annotated[BackupsQuery, Query()], service: Acting) -> JSONResponse:
    """Backups, newest first; deleted ones, too, while they can be undeleted."""
    return listed(request, query, service.labelled(query.label, query.server).listings.backups)


@router.get("/backups/{id}", dependencies=[VIEWER], response_model=BackupDetail)
def show_backup(backup_id: BackupId, service: Acting) -> JSONResponse:
    """Everything about a backup; its manifest is read at a destination."""
    return one(service.backups.show(backup_id))


@router.delete("/backups/{id}", dependencies=[ADMIN], response_model=Deleted)
def delete_backup(backup_id: BackupId, query: Annotated[DeleteQuery, Query()], service: Acting) -> JSONResponse:
    """Mark a backup as deleted; it goes after the grace period, or with `now` as soon as a job gets to it (`job`, and
    its address in `Location`). Never the last one that can be restored."""
    job = None
    if query.now:
        done, job = service.requests.remove(backup_id, with_increments=query.with_increments)
    else:
        done = service.backups.delete(backup_id, with_increments=query.with_increments)
    return JSONResponse(
        {
            "id": backup_id,
            "removed": not done.marked,
            "held": list(done.held),
            "forgotten": list(done.forgotten),
            "job": job.as_json() if job is not None else None,
        },
        headers={"Location": f"{VERSION}/jobs/{job.id}"} if job is not None else None,
    )


@router.post("/backups/{id}/undelete", dependencies=[ADMIN], response_model=Undeleted)
def undelete_backup(backup_id: BackupId, service: Acting) -> JSONResponse:
    """Take a deletion back, with all that the backup builds on."""
    return JSONResponse({"undeleted": service.backups.undelete(backup_id)})


@router.post("/backups/{id}/keep", dependencies=[ADMIN], response_model=Kept)
def keep_backup(backup_id: BackupId, service: Acting) -> JSONResponse:
    """No rule deletes it from now on."""
    return _kept(backup_id, service, pinned=True)


@router.post("/backups/{id}/unkeep", dependencies=[ADMIN], response_model=Kept)
def unkeep_backup(backup_id: BackupId, service: Acting) -> JSONResponse:
    """Rules may delete it again."""
    return _kept(backup_id, service, pinned=False)


def _kept(backup_id: str, service: Acting, *, pinned: bool) -> JSONResponse:
    problems = service.backups.keep(backup_id, pinned=pinned)
    return JSONResponse({"id": backup_id, "pinned": pinned, "problems": list(problems)})


@router.get(
    "/backups/{id}/runbook",
    dependencies=[VIEWER],
    response_model=Runbook,
    responses={200: {"content": {"text/markdown": {"schema": {"type": "string"}}}}},
)
def show_runbook(backup_id: BackupId, request: Request, service: Acting) -> Response:
    """How to restore it by hand, with gpg, zstd and the database's own tools: JSON, or Markdown for who accepts
    that."""
    return runbook(request, backup_id, service.backups.runbook(backup_id))


def runbook(request: Request, subject: str, text: str) -> Response:
    """As JSON, or as Markdown for who asks for that."""
    if "text/markdown" in request.headers.get("accept", ""):
        return PlainTextResponse(text, media_type="text/markdown")
    return JSONResponse({"id": subject, "runbook": text})


proof_routes = router_of("proofs")


@proof_routes.get("/proofs", dependencies=[VIEWER], response_model=list[Proof])
def list_proofs(request: Request, query: Annotated[ProofsQuery, Query()], service: Acting) -> JSONResponse:
    """Test restores, newest first."""
    return listed(request, query, service.labelled(query.label, query.server).listings.proofs)


@proof_routes.get("/proofs/{id}", dependencies=[VIEWER], response_model=Proof)
def show_proof(
    proof_id: Annotated[str, id_of("a proof", "20261121T060000Z-0a1b2c3d")], service: Acting
) -> JSONResponse:
    """One test restore: how long each phase took, and what was asked of the data."""
    return one(service.listings.proof(proof_id))
