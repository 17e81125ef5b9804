"""How routes answer: documents as the values of the application give them, pages of lists, and long work.

The shapes of ``api.schemas`` describe the answers and are not applied to them: what the values say is what is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from api.auth import allowed
from backupd.catalog.listed import Listed
from backupd.model.access import Role
from backupd.model.job import JobRecord

VERSION = "/v1"

VIEWER: Any = Depends(allowed(Role.VIEWER))
OPERATOR: Any = Depends(allowed(Role.OPERATOR))
ADMIN: Any = Depends(allowed(Role.ADMIN))
"""Who may use a route, for its ``dependencies``."""


class Told(Protocol):
    """A value that has a JSON document."""

    def as_json(self) -> dict[str, Any]: ...


def router_of(tag: str) -> APIRouter:
    """Of one chapter of the reference; the names of its functions are the ids of its operations."""
    return APIRouter(prefix=VERSION, tags=[tag], generate_unique_id_function=_name)


def _name(route: APIRoute) -> str:
    return route.name


def one(value: Told) -> JSONResponse:
    return JSONResponse(value.as_json())


def several(values: Iterable[Told]) -> JSONResponse:
    """A list that is never long."""
    return JSONResponse([value.as_json() for value in values])


def page(request: Request, listed: Listed[Any]) -> JSONResponse:
    """One page of a list of values, with the address of the next one."""
    headers = {}
    if listed.next is not None:
        query = [(name, value) for name, value in request.query_params.multi_items() if name != "after"]
        address = f"{request.url.path}?{urlencode([*query, ('after', listed.next)])}"
        headers["Link"] = f'<{address}>; rel="next"'
    return JSONResponse([value.as_json() for value in listed.items], headers=headers)


def cut(values: Iterable[Any], limit: int) -> Listed[Any]:
    """``values``: one more than ``limit`` where there is another page; they are told apart by their ``id``."""
    return Listed.of(tuple(values), limit, lambda value: str(value.id))


def accepted(job: JobRecord, document: Mapping[str, Any] | None = None) -> JSONResponse:
    """Long work has begun as ``job``."""
    return JSONResponse({"job": job.as_json(), **(document or {})}, 202, {"Location": f"{VERSION}/jobs/{job.id}"})
