"""Who may come in, who did what, and which keys open the backups.

Policies: what they say, and what is wrong with them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from api.schemas.base import Asked, Dated, Line, Moment, Name, Page, Shape, Text, Time, example, of
from backupd.app.views import policies
from backupd.model import access, errors
from backupd.model.access import Role, Via


@of(access.Token)
class Token(Shape):
    """Who may come in."""


class TokenRequest(Asked):
    model_config = example({"name": "grafana", "role": "viewer", "expires_at": "2027-11-21T12:00:00Z"})

    name: Line = Field(max_length=100, description="Who or what uses it; the audit shows it.")
    role: Role = Field(strict=False)
    servers: list[Name] | None = Field(None, min_length=1, max_length=1000, description="Only these; null for all.")
    expires_at: Moment | None = Field(None, strict=False, description="Null: it does not expire.")


class NewToken(Token):
    """`token` is what lets in: it is shown this once and kept nowhere."""

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
    outcome: Literal["done", "refused", "failed"] | None = Field(None, description="Only entries with this outcome.")


@of(access.AuditEntry)
class AuditEntry(Shape):
    """Who did what, from where."""

    via: Via


@of(access.Actor)
class WhoAmI(Shape):
    """What this token may do."""


class Key(Shape):
    """A key that opens backups: when its holder last proved that, and how many backups depend on it."""

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


@of(errors.Problem)
class FileProblem(Shape):
    """One thing that is wrong in a file."""


@of(policies.PolicyView)
class Policy(Shape):
    """A policy file, and the servers that follow it."""


class ValidationRequest(Asked):
    """The text of a policy file, in use or not yet."""

    model_config = example({"name": "gold", "text": _TEXT})

    name: Name = "policy"
    text: Text = Field(max_length=1_000_000)


@of(policies.Validation)
class Validation(Shape):
    """Everything that is wrong with it, by line."""


class Reloaded(Shape):
    """The service was told; whether it took the files over is an event (`GET /v1/events`)."""

    asked: bool
