"""What somebody filled in and sent, and whether it was a page of ours that sent it."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import parse_qs, urlsplit

from fastapi import Request

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
            "this form is not one that you were shown in this session",
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
            "another site sent this in your name",
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
