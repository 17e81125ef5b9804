"""Proofs: what test restores showed."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from fastapi.responses import JSONResponse

from api.auth import Acting
from api.routes.answers import VIEWER, one, page, router_of
from api.schemas.proofs import Proof, ProofsQuery

proof_routes = router_of("proofs")


@proof_routes.get("/proofs", dependencies=[VIEWER], response_model=list[Proof])
def list_proofs(request: Request, query: Annotated[ProofsQuery, Query()], service: Acting) -> JSONResponse:
    """Test restores, newest first."""
    return page(
        request,
        service.listings.proofs(
            query.server,
            backup=query.backup,
            outcome=query.outcome,
            span=query.span,
            limit=query.limit,
            after=query.after,
        ),
    )


@proof_routes.get("/proofs/{id}", dependencies=[VIEWER], response_model=Proof)
def show_proof(
    proof_id: Annotated[
        str,
        Path(
            alias="id",
            pattern=r"^[A-Za-z0-9-]{1,64}$",
            description="Id of a proof.",
            examples=["20261121T060000Z-0a1b2c3d"],
        ),
    ],
    service: Acting,
) -> JSONResponse:
    """One test restore: how long each phase took, and what was asked of the data."""
    return one(service.listings.proof(proof_id))
