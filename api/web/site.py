"""Forms of the web page: what was sent, whether a page of ours sent it, and the notice on the page that follows.

The address of that page carries a word of ``NOTICES``, never a sentence, so that nobody can put sentences of their own
on our pages.

How every page is made: templates with their filters, the navigation, and the files that pages fetch.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from starlette.requests import HTTPConnection

from api.auth import anybody, current_session
from api.problems import status_of
from api.site import site_of
from api.web.words import MARKS, ago, kind_word, moment_text, problem_of, progress_words, span_text, state_word, tone_of
from backupd.model.access import Actor, Role, Session
from backupd.model.errors import BackupdError, ForbiddenError, NotFoundError, UsageError
from backupd.model.text import format_size, format_time, parse_time

_MOST = 100
"""Fields of a form; ours have far fewer."""
_OLD = timedelta(minutes=10)
"""What was found out longer ago is shown with when."""
_TYPE = "application/x-www-form-urlencoded"


@dataclass(frozen=True, slots=True)
class Form:
    """``fields``: what was sent, by name. Of a field that was not sent, "" or nothing is given."""

    fields: Mapping[str, list[str]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Without blanks around it: nobody means those in a field of one line."""
        return self.raw(name).strip()

    def raw(self, name: str) -> str:
        return self.fields.get(name, [""])[0]

    def lines(self, name: str) -> tuple[str, ...]:
        """Of a field of several lines, and of several fields of that name, those that are not empty."""
        return tuple(line.strip() for text in self.fields.get(name, ()) for line in text.splitlines() if line.strip())

    def has(self, name: str) -> bool:
        """Is the box ticked?"""
        return bool(self.raw(name))


async def form(request: Request) -> Form:
    """The form of a page that the session of this request was shown. Raises ForbiddenError for any other (another site
    may send forms in the name of whoever is logged in here), UsageError for what no form of ours sends."""
    found = await login_form(request)
    session = current_session(request)
    expected = session.csrf if session is not None else ""
    if not expected or not hmac.compare_digest(found.raw("csrf").encode(), expected.encode()):
        raise ForbiddenError(
            "the form has expired or belongs to another session",
            hint="reload the page, check its contents, and submit it again",
        )
    return found


async def login_form(request: Request) -> Form:
    """As ``form``, before there is a session: only what another site sends is refused."""
    refuse_other_sites(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _TYPE:
        raise UsageError("this is not a form of these pages", hint="programs use the REST API below /v1")
    try:
        fields = parse_qs(
            (await request.body()).decode(), keep_blank_values=True, max_num_fields=_MOST, errors="strict"
        )
    except ValueError as error:
        raise UsageError("this form cannot be read", detail=str(error)) from error
    return Form(fields)


Sent = Annotated[Form, Depends(form)]
OF_OURS = Depends(form)
"""That a page of ours sent it is all that has to be known."""


def refuse_other_sites(request: Request) -> None:
    """Raises ForbiddenError where the browser says that a page of another site sends this."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin", "")
    elsewhere = origin == "null" or (origin and urlsplit(origin).netloc != request.headers.get("host", ""))
    if site not in ("same-origin", "none") or elsewhere:
        raise ForbiddenError(
            "cross-site form submission rejected; no action was taken",
            detail=f"origin: {origin or site}",
            hint="open the page here and repeat it there",
        )


def moment_of(text: str) -> datetime:
    """``2026-11-21 09:41:03.25`` in UTC unless it says otherwise. Raises UsageError."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return parse_time(text.strip() if moment.tzinfo is not None else f"{moment.isoformat()}Z")
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not a time",
            hint="write a time such as 2026-11-21 09:41:03.25 (UTC) or 2026-11-21T10:41:03+01:00",
        ) from error


PARAMETER = "done"

NOTICES: Mapping[str, str] = {
    "kept": "Kept: no rule deletes this backup until it is unkept.",
    "kept-not-everywhere": (
        'The backup is kept in the catalog, but a destination could not be updated. Click "Keep forever" again when '
        "the destination is reachable."
    ),
    "unkept": "The rules may delete this backup again.",
    "unkept-not-everywhere": "Unkept here, but a destination could not be updated: repeat it later.",
    "deleted": "Marked as deleted: until the grace period is over it can be undeleted.",
    "undeleted": "The backup is back.",
    "cancelled": "The job was asked to stop; it ends within seconds.",
    "held": "On hold: nothing of it is deleted until the hold is released.",
    "held-not-everywhere": (
        "The hold is set in the catalog, but not at every destination. Set it again when the destination is "
        "reachable; until then another installation may delete backups there."
    ),
    "paused": "Paused: scheduled jobs of this server are suspended.",
    "released": "The hold was released: the rules go on.",
    "released-not-everywhere": "Released here, but a destination still has the hold: release it again later.",
    "resumed": "Scheduled jobs start again.",
    "acknowledged": "Acknowledged: no more reminders of this incident.",
    "alerts-tested": "A test message is on its way to every channel.",
    "policies-reloaded": "Reload requested. If a file is invalid, the active settings are kept and an alert opens.",
    "token-revoked": "The token was revoked: whoever holds it is locked out as of now.",
    "logged-out": "You are logged out.",
}


def notice_of(request: HTTPConnection) -> str | None:
    """The sentence for what the address says was done; None of a word that is not ours."""
    return NOTICES.get(request.query_params.get(PARAMETER, ""))


def back_to(path: str, word: str = "") -> RedirectResponse:
    """To a page of ours by GET, which then shows ``word`` of ``NOTICES``."""
    return RedirectResponse(f"{path}?{urlencode({PARAMETER: word})}" if word else path, status_code=303)


def own_path(text: str) -> str:
    """``text`` where it is a path of this site, else the first page: a link must lead nobody away."""
    split = urlsplit(text.replace("\\", "/"))
    safe = text.startswith("/") and not text.startswith("//") and not split.scheme and not split.netloc
    return text if safe and text.isprintable() and "\\" not in text else "/"


_HERE = Path(__file__).parent
_STATIC = {
    "backupd.css": "text/css; charset=utf-8",
    "backupd.js": "text/javascript; charset=utf-8",
    "forms.css": "text/css; charset=utf-8",
    "favicon.svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """One entry of the navigation: shown to ``role`` and those above it."""

    title: str
    path: str
    role: Role = Role.VIEWER


NAVIGATION = (
    MenuEntry("Servers", "/"),
    MenuEntry("Restore", "/restore"),
    MenuEntry("Jobs", "/jobs"),
    MenuEntry("Proofs", "/proofs"),
    MenuEntry("Destinations", "/destinations"),
    MenuEntry("Alerts", "/alerts"),
    MenuEntry("Policies", "/policies"),
    MenuEntry("Audit", "/audit", Role.ADMIN),
    MenuEntry("Tokens", "/tokens", Role.ADMIN),
)

router = APIRouter(include_in_schema=False)


def render(
    request: HTTPConnection,
    template: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    refused: BackupdError | None = None,
    **values: Any,
) -> HTMLResponse:
    """A page. Every template knows ``actor`` (None before login), ``csrf`` (the token for its forms), ``now``,
    ``menu`` (the navigation for this actor), ``here`` (the path), ``problem`` (of what was ``refused``, which also
    gives the status) and what is in ``values``."""
    actor: Actor | None = request.state.actor
    session: Session | None = request.state.session
    context = {
        "actor": actor,
        "csrf": session.csrf if session is not None else "",
        "now": site_of(request).wiring.clock(),
        "here": request.url.path,
        "notice": notice_of(request),
        "problem": problem_of(refused) if refused is not None else None,
        "menu": [entry for entry in NAVIGATION if actor is not None and actor.has(entry.role)],
        **values,
    }
    text = _TEMPLATES.get_template(template).render(context)
    status = status if refused is None else status_of(refused)
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
def _is_old(context: Context, moment: datetime) -> bool:
    """Is a figure of then to say that it is of then?"""
    return bool(context["now"] - moment >= _OLD)


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
        "is_old": _is_old,
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
