"""Who did what."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from api.auth import Acting, Wired, allowed
from api.web.site import link, render
from backupd.app.context.access import require_all
from backupd.catalog.base.pages import number_of
from backupd.model.access import Role

audit_routes = APIRouter(include_in_schema=False)

PAGE = 100


@audit_routes.get("/audit", dependencies=[Depends(allowed(Role.ADMIN))])
def list_audit(request: Request, service: Acting, wiring: Wired) -> Response:
    """Newest first; ``?verify=1``: whether it is as it was written, which reads all of it."""
    require_all(service.actor)
    asked = {name: request.query_params.get(name, "").strip() or None for name in ("actor", "action", "server")}
    before = request.query_params.get("before")
    rows = wiring.catalog.audit.list(
        actor=asked["actor"],
        action=asked["action"],
        server=asked["server"],
        before=number_of(before) if before else None,
        limit=PAGE + 1,
    )
    return render(
        request,
        "audit.html",
        entries=rows[:PAGE],
        asked=asked,
        filtered=any(asked.values()),
        newest=link("audit", **asked) if before else "",
        older=link("audit", before=str(rows[PAGE - 1].number), **asked) if len(rows) > PAGE else "",
        verified=service.access.verify_audit() if "verify" in request.query_params else None,
    )
