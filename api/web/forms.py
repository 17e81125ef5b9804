"""Forms of the web page: what was sent, whether a page of ours sent it, and the notice on the page that follows.

The address of that page carries a word of ``NOTICES``, never a sentence, so that nobody can put sentences of their own
on our pages.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import parse_qs, urlencode, urlsplit

from fastapi import Request
from fastapi.responses import RedirectResponse
from starlette.requests import HTTPConnection

from api.auth import current_session
from backupd.model.errors import ForbiddenError, UsageError
from backupd.model.text import parse_time

_MOST = 100
"""Fields of a form; ours have far fewer."""
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
            hint="load the page again, look at what it says, and send it from there",
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


def refuse_other_sites(request: Request) -> None:
    """Raises ForbiddenError where the browser says that a page of another site sends this."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin", "")
    elsewhere = origin == "null" or (origin and urlsplit(origin).netloc != request.headers.get("host", ""))
    if site not in ("same-origin", "none") or elsewhere:
        raise ForbiddenError(
            "cross-site form submission rejected; no action was taken",
            detail=f"origin: {origin or site}",
            hint="open the page here and do it from there",
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
    "unkept-not-everywhere": "Unkept here, but a destination could not be told: say it again later.",
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
    "resumed": "Jobs start by themselves again.",
    "acknowledged": "Acknowledged: no more reminders of this incident.",
    "alerts-tested": "A test message is on its way to every channel.",
    "policies-reloaded": "The service was asked to read its files again. Events tell what came of it.",
    "token-revoked": "The token was revoked: whoever holds it is locked out as of now.",
    "logged-out": "You are logged out.",
}


def notice_of(request: HTTPConnection) -> str | None:
    """The sentence for what the address says was done; None of a word that is not ours."""
    return NOTICES.get(request.query_params.get(PARAMETER, ""))


def back_to(path: str, word: str = "") -> RedirectResponse:
    """To a page of ours by GET, which then tells ``word`` of ``NOTICES``."""
    return RedirectResponse(f"{path}?{urlencode({PARAMETER: word})}" if word else path, status_code=303)


def own_path(text: str) -> str:
    """``text`` where it is a path of this site, else the first page: a link must lead nobody away."""
    split = urlsplit(text.replace("\\", "/"))
    safe = text.startswith("/") and not text.startswith("//") and not split.scheme and not split.netloc
    return text if safe and text.isprintable() and "\\" not in text else "/"
