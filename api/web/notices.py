"""What was just done, told on the page that one comes back to. The address carries a word, never a sentence, so that
nobody can put sentences of their own on our pages."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

from fastapi.responses import RedirectResponse
from starlette.requests import HTTPConnection

PARAMETER = "done"

NOTICES: Mapping[str, str] = {
    "kept": "Kept: no rule deletes this backup until it is unkept.",
    "kept-not-everywhere": "Kept here, but a destination could not be told: keep it again later.",
    "unkept": "The rules may delete this backup again.",
    "unkept-not-everywhere": "Unkept here, but a destination could not be told: say it again later.",
    "deleted": "Marked as deleted: until the grace period is over it can be undeleted.",
    "undeleted": "The backup is back.",
    "cancelled": "The job was asked to stop; it ends within seconds.",
    "held": "On hold: nothing of it is deleted until the hold is released.",
    "held-not-everywhere": "On hold here, but a destination could not be told: set it again later, or another "
    "installation may delete there.",
    "paused": "Paused: no job of it starts by itself.",
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
