"""How every page is made: templates with their filters, the navigation, and the files that pages fetch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from starlette.requests import HTTPConnection

from api.auth import anybody
from api.site import site_of
from api.web.forms import notice_of
from api.web.words import MARKS, ago, kind_word, moment_text, problem_of, progress_words, span_text, state_word, tone_of
from backupd.model.access import Actor, Role, Session
from backupd.model.errors import BackupdError, NotFoundError
from backupd.model.text import format_size, format_time

_HERE = Path(__file__).parent
_STATIC = {
    "backupd.css": "text/css; charset=utf-8",
    "backupd.js": "text/javascript; charset=utf-8",
    "forms.css": "text/css; charset=utf-8",
    "favicon.svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Place:
    """One entry of the navigation: shown to ``role`` and those above it."""

    title: str
    path: str
    role: Role = Role.VIEWER


NAVIGATION = (
    Place("Servers", "/"),
    Place("Restore", "/restore"),
    Place("Jobs", "/jobs"),
    Place("Proofs", "/proofs"),
    Place("Destinations", "/destinations"),
    Place("Alerts", "/alerts"),
    Place("Policies", "/policies"),
    Place("Audit", "/audit", Role.ADMIN),
    Place("Tokens", "/tokens", Role.ADMIN),
)

router = APIRouter(include_in_schema=False)


def render(
    request: HTTPConnection,
    template: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    **values: Any,
) -> HTMLResponse:
    """A page. Every template knows ``actor`` (None before login), ``csrf`` (the token for its forms), ``now``,
    ``menu`` (the navigation for this actor), ``here`` (the path) and what is in ``values``."""
    actor: Actor | None = request.state.actor
    session: Session | None = request.state.session
    context = {
        "actor": actor,
        "csrf": session.csrf if session is not None else "",
        "now": site_of(request).wiring.clock(),
        "here": request.url.path,
        "notice": notice_of(request),
        "menu": [place for place in NAVIGATION if actor is not None and actor.has(place.role)],
        **values,
    }
    text = _TEMPLATES.get_template(template).render(context)
    return HTMLResponse(text, status_code=status, headers={"Cache-Control": "no-store", **(headers or {})})


def render_error(
    request: HTTPConnection, error: BackupdError, status: int, *, headers: Mapping[str, str] | None = None
) -> HTMLResponse:
    """The page of an error: what happened, the evidence, the next step."""
    return render(request, "error.html", status=status, headers=headers, status_code=status, error=problem_of(error))


@router.get("/static/{name}", dependencies=[Depends(anybody)])
def static(name: str, request: Request) -> Response:
    """A file of the pages. Raises NotFoundError."""
    if name not in _STATIC:
        raise NotFoundError(f"no file {name!r} belongs to the pages")
    content, tag = _FILES[name]
    headers = {"ETag": tag, "Cache-Control": "max-age=31536000, immutable" if request.query_params else "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_STATIC[name], headers=headers)


def _files() -> dict[str, tuple[bytes, str]]:
    contents = {name: (_HERE / "static" / name).read_bytes() for name in _STATIC}
    return {name: (content, f'"{sha256(content).hexdigest()[:32]}"') for name, content in contents.items()}


_FILES = _files()


def _asset(name: str) -> str:
    """The address of a file, another one whenever it changes."""
    return f"/static/{name}?v={_FILES[name][1][1:13]}"


def link(*parts: str, **query: str | None) -> str:
    """``link("servers", name, to="latest")``: an address with every part quoted; what is None or "" is left out."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(given)}" if given else path


@pass_context
def _ago(context: Context, moment: datetime | None) -> str:
    return ago(moment, context["now"]) if moment is not None else ""


@pass_context
def _allowed(context: Context, role: str) -> bool:
    actor: Actor | None = context["actor"]
    return actor is not None and actor.has(Role(role))


def _seconds(value: float | timedelta | None) -> str:
    """Of seconds or a span of time; "" of None."""
    if value is None:
        return ""
    return span_text(value.total_seconds() if isinstance(value, timedelta) else value)


def _size(value: float | None) -> str:
    return "" if value is None else format_size(round(value))


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters: dict[str, Callable[..., Any]] = {
        "size": _size,
        "span": _seconds,
        "moment": moment_text,
        "iso": format_time,
        "ago": _ago,
        "kind_word": kind_word,
        "state_word": state_word,
        "progress": progress_words,
        "tone": tone_of,
        "mark": lambda tone: MARKS[tone],
    }
    made.filters.update(filters)
    made.globals.update(link=link, asset=_asset, may=_allowed)
    return made


_TEMPLATES = _environment()
