"""How routes answer: documents as the values of the application give them, pages of lists, and long work.

The shapes of ``api.schemas`` describe them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from api.auth import allowed
from api.schemas.base import CURSOR, Dated, Page, Whole
from backupd.catalog.row_mapping import Listed, Span
from backupd.model.access import Actor, Role
from backupd.model.job import JobRecord

VERSION = "/v1"


def _asking(role: Role) -> Any:
    async def asked(request: Request, _actor: Actor = Depends(allowed(role))) -> None:  # noqa: B008  FastAPI's way
        """Only what the route has a name for: a filter that is not known is reported, and not ignored."""
        route: APIRoute = request.scope["route"]
        if not route.dependant.query_params and (strange := tuple(request.query_params)):
            raise RequestValidationError([{"loc": ("query", name), "msg": "is not known here"} for name in strange])

    return Depends(asked)


VIEWER: Any = _asking(Role.VIEWER)
OPERATOR: Any = _asking(Role.OPERATOR)
ADMIN: Any = _asking(Role.ADMIN)
"""Who may use a route, for its ``dependencies``. A route without parameters behind the ``?`` takes none."""


def id_of(what: str, example: str) -> Any:
    """The part of a path that is the id of ``what``."""
    return Path(alias="id", pattern=r"^[A-Za-z0-9-]{1,64}$", description=f"Id of {what}.", examples=[example])


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


def part(request: Request, values: Iterable[Any], asked: Whole, name: Callable[[Any], str]) -> JSONResponse:
    """Of a list that is whole unless a part of it is asked for. ``values``: all of it, in its order; ``name``: what
    each, and no other, is known by. Raises UsageError for what is no cursor of theirs."""
    return page(request, Listed.part(tuple(values), asked.limit, asked.after, lambda value: _cursor(name(value))))


def _cursor(name: str) -> str:
    """Of what has this ``name``: itself, where it can be one. Keys and files are called as somebody liked."""
    if CURSOR.fullmatch(name):
        return name
    return "~" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def page(request: Request, listed: Listed[Any]) -> JSONResponse:
    """One page of a list of values, with the address of the next one."""
    headers = {}
    if listed.next is not None:
        query = [(name, value) for name, value in request.query_params.multi_items() if name != "after"]
        address = f"{request.url.path}?{urlencode([*query, ('after', listed.next)])}"
        headers["Link"] = f'<{address}>; rel="next"'
    return JSONResponse([value.as_json() for value in listed.items], headers=headers)


def listed(request: Request, query: Page | Whole, found: Callable[..., Listed[Any]]) -> JSONResponse:
    """The page that ``query`` asks for of the list that ``found`` gives: by name it takes what ``query`` chooses, and
    the moments as ``span``. Labels have chosen who gives the list (``Service.labelled``)."""
    chosen = dict(query)
    chosen.pop("label", None)
    if isinstance(query, Dated):
        chosen["span"] = Span(chosen.pop("since"), chosen.pop("until"))
    return page(request, found(**chosen))


def cut(values: Iterable[Any], limit: int) -> Listed[Any]:
    """``values``: one more than ``limit`` where there is another page; they are distinguished by their ``id``."""
    return Listed.of(tuple(values), limit, lambda value: str(value.id))


def accepted(job: JobRecord, document: Mapping[str, Any] | None = None) -> JSONResponse:
    """Long work has begun as ``job``."""
    return JSONResponse({"job": job.as_json(), **(document or {})}, 202, {"Location": f"{VERSION}/jobs/{job.id}"})
