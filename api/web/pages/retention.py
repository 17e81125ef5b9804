"""What the rules keep of a server and what they let go, with the reasons; and for administrators the button that lets
them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from api.auth import Acting, allowed
from api.problems import status_of
from api.web.forms import Form, form
from api.web.site import link, render
from api.web.words import problem_of
from backupd.app.service.facade import Service
from backupd.model.access import Role
from backupd.model.errors import BackupdError
from backupd.retention.decisions import BYTES_NOTE

retention_routes = APIRouter(include_in_schema=False)


@retention_routes.get("/servers/{server}/retention", dependencies=[Depends(allowed(Role.VIEWER))])
def preview(request: Request, server: str, service: Acting) -> Response:
    """Changes nothing."""
    return _shown(request, service, server)


@retention_routes.post("/servers/{server}/retention", dependencies=[Depends(allowed(Role.ADMIN))])
def apply(request: Request, server: str, service: Acting, sent: Annotated[Form, Depends(form)]) -> Response:
    """Apply them as a job. The rules are asked again then, so what is marked may differ from what was shown."""
    try:
        job = service.requests.retention(server, really=sent.has("really"))
    except BackupdError as error:
        return _shown(request, service, server, error)
    return RedirectResponse(link("jobs", job.id), status_code=303)


def _shown(request: Request, service: Service, server: str, error: BackupdError | None = None) -> Response:
    found = service.retention.preview(server)
    return render(
        request,
        "retention.html",
        status=200 if error is None else status_of(error),
        server=server,
        decisions=found,
        expired=sum(len(one.expired) for one in found),
        note=BYTES_NOTE,
        holds=service.retention.holds(),
        problem=problem_of(error) if error is not None else None,
    )
