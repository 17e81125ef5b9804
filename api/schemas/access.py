"""Who may come in, who did what, and which keys open the backups.

Policies: what they say, and what is wrong with them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.base import Asked, Dated, Line, Moment, Name, Page, Shape, Text, Time, example, of
from backupd.app.views import policies
from backupd.model import access, errors
from backupd.model.access import Role, Via

_TOKEN: dict[str, Any] = {
    "id": "20261121T120000Z-0badcafe",
    "name": "grafana",
    "role": "viewer",
    "servers": None,
    "created_at": "2026-11-21T12:00:00Z",
    "created_by": "anna",
    "expires_at": "2027-11-21T12:00:00Z",
    "revoked_at": None,
    "revoked_by": None,
    "last_used_at": "2026-11-21T12:00:30Z",
}


@of(access.Token)
class Token(Shape):
    """Who may come in."""

    model_config = example(_TOKEN)


class TokenRequest(Asked):
    model_config = example({"name": "grafana", "role": "viewer", "expires_at": "2027-11-21T12:00:00Z"})

    name: Line = Field(max_length=100, description="Who or what uses it; the audit shows it.")
    role: Role = Field(strict=False)
    servers: list[Name] | None = Field(None, min_length=1, max_length=1000, description="Only these; null for all.")
    expires_at: Moment | None = Field(None, strict=False, description="Null: it does not expire.")


class NewToken(Token):
    """`token` is what lets in: it is shown this once and kept nowhere."""

    model_config = example({**_TOKEN, "last_used_at": None, "token": "bkd_..."})

    token: str


class TokensQuery(Page):
    pass


class AuditQuery(Dated):
    actor: Text | None = Field(None, max_length=200, description="Only what this person or token did.")
    action: Text | None = Field(None, max_length=64, description="Only this.", examples=["backup-deleted"])
    server: Name | None = Field(None, description="Only what was done to this server.")
    subject: Text | None = Field(
        None,
        max_length=200,
        description="Only what was done to what has this id.",
        examples=["20261121T020000Z-7f3a9c01"],
    )
    outcome: Literal["done", "refused", "failed"] | None = Field(None, description="Only what ended so.")


@of(access.AuditEntry)
class AuditEntry(Shape):
    """Who did what, from where."""

    model_config = example(
        {
            "number": 12,
            "at": "2026-11-21T12:00:00Z",
            "actor": "anna",
            "role": "admin",
            "via": "api",
            "address": "192.0.2.7",
            "action": "backup-deleted",
            "server": "shop-db1",
            "subject": "20261121T020000Z-7f3a9c01",
            "outcome": "done",
            "detail": "",
            "digest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        }
    )

    via: Via


@of(access.Actor)
class WhoAmI(Shape):
    """What this token may do."""

    model_config = example(
        {
            "name": "grafana",
            "role": "viewer",
            "via": "api",
            "servers": None,
            "token": "20261121T120000Z-0badcafe",
            "address": "192.0.2.7",
        }
    )


class Key(Shape):
    """A key that opens backups: when its holder last proved that, and how many backups depend on it."""

    model_config = example(
        {
            "name": "ops@example.com",
            "fingerprint": "6D2A9C1E4B7F00112233445566778899AABBCCDD",
            "configured": True,
            "user_ids": ["Operations <ops@example.com>"],
            "expires_at": None,
            "problem": None,
            "warning": None,
            "proved_at": "2026-10-01T08:00:00Z",
            "proved_by": "anna",
            "due_at": "2026-12-30T08:00:00Z",
            "overdue": False,
            "open_challenge": None,
            "secret_here": False,
            "backups": 42,
            "only_this_key": 42,
        }
    )

    name: str
    fingerprint: str
    configured: bool
    user_ids: list[str]
    expires_at: Time | None
    problem: str | None
    warning: str | None
    proved_at: Time | None
    proved_by: str | None
    due_at: Time | None
    overdue: bool
    open_challenge: str | None
    secret_here: bool
    backups: int
    only_this_key: int


_TEXT = 'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n'
_PROBLEM: dict[str, Any] = {"file": "gold.yaml", "line": 2, "field": "physical.ful", "message": "is not known here"}


@of(errors.Problem)
class FileProblem(Shape):
    """One thing that is wrong in a file."""


@of(policies.PolicyView)
class Policy(Shape):
    """A policy file, and the servers that follow it."""

    model_config = example(
        {
            "name": "gold",
            "file": "/etc/backupd/policies/gold.yaml",
            "servers": ["shop-db1"],
            "problems": [],
            "advice": [],
            "text": _TEXT,
            "in_force": True,
        }
    )


class ValidationRequest(Asked):
    """The text of a policy file, in use or not yet."""

    model_config = example({"name": "gold", "text": _TEXT})

    name: Name = "policy"
    text: Text = Field(max_length=1_000_000)


@of(policies.Validation)
class Validation(Shape):
    """Everything that is wrong with it, by line."""

    model_config = example({"valid": False, "problems": [_PROBLEM], "advice": []})


class Reloaded(Shape):
    """The service was told; whether it took the files over is an event (`GET /v1/events`)."""

    model_config = example({"asked": True})

    asked: bool
