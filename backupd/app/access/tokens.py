"""Access by token: made once, shown once, known by its digest alone; and the web page's sessions, begun with one."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Collection
from datetime import datetime

from backupd.app.context.audit import audit
from backupd.app.context.audited_action import deed
from backupd.app.context.wiring import Wiring
from backupd.model.access import Actor, Role, Session, Token, Via
from backupd.model.errors import UnauthenticatedError, UsageError
from backupd.model.text import format_time, new_id

PREFIX = "backupd_"
"""What every secret begins with, so that scanners of repositories and logs know one."""
_BYTES = 32
_LONGEST_NAME = 100
_MAKE = "an administrator makes one with `backupd token create --role viewer|operator|admin`"


class UnknownSecretError(UnauthenticatedError):
    """It never was a token's: perhaps a guess."""


def create_token(
    wiring: Wiring,
    actor: Actor,
    name: str,
    role: Role,
    *,
    servers: Collection[str] | None = None,
    expires_at: datetime | None = None,
) -> tuple[Token, str]:
    """A new token, and its secret, which nobody can ask for again. ``servers``: the only ones that it sees. Raises
    UsageError, NotFoundError for a server that is not configured, RefusedError for the name of one that lets in."""
    now = wiring.clock()
    until = f", until {format_time(expires_at)}" if expires_at else ""
    scope = "all servers" if servers is None else ", ".join(sorted(servers))
    with deed(wiring, actor, "token-created", detail=f"{name[:_LONGEST_NAME]}: {role} of {scope}{until}") as told:
        _check(wiring, name, servers, expires_at, now)
        secret = PREFIX + secrets.token_urlsafe(_BYTES)
        token = Token(
            new_id(now),
            name.strip(),
            Role(role),
            digest_of(secret),
            now,
            actor.name,
            servers=None if servers is None else frozenset(servers),
            expires_at=expires_at,
        )
        wiring.catalog.tokens.add(token)
        told.subject = token.id
    return token, secret


def _check(
    wiring: Wiring, name: str, servers: Collection[str] | None, expires_at: datetime | None, now: datetime
) -> None:
    if not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise UsageError(
            f"a token's name has 1 to {_LONGEST_NAME} printable characters",
            hint="name who holds it, a person or a program",
        )
    if expires_at is not None and expires_at <= now:
        raise UsageError(
            f"the token would have expired at {format_time(expires_at)} already", hint="name a moment to come, or none"
        )
    if servers is not None and not servers:
        raise UsageError("a token that sees no server is good for nothing", hint="name servers, or leave them out")
    for server in sorted(servers or ()):
        wiring.settings.server(server)


def revoke_token(wiring: Wiring, actor: Actor, token_id: str) -> Token:
    """Raises NotFoundError."""
    with deed(wiring, actor, "token-revoked", subject=token_id) as told:
        token = wiring.catalog.tokens.revoke(token_id, wiring.clock(), actor.name)
        told.detail = token.name
    return token


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def actor_of(wiring: Wiring, secret: str, address: str, via: Via = Via.API) -> Actor:
    """Whose secret this is. Raises UnknownSecretError, UnauthenticatedError for one that counts no more."""
    token = wiring.catalog.tokens.find(digest_of(secret))
    if token is None:
        raise UnknownSecretError("this token is not known here", hint=_MAKE)
    return _valid(wiring, token, address, via)


def _valid(wiring: Wiring, token: Token, address: str, via: Via) -> Actor:
    if not token.is_valid(wiring.clock()):
        how = "was revoked" if token.revoked_at else f"expired at {format_time(token.expires_at or token.created_at)}"
        raise UnauthenticatedError(f"this token {how}", hint=_MAKE)
    return Actor(token.name, token.role, via, servers=token.servers, address=address, token_id=token.id)


def log_in(wiring: Wiring, secret: str, address: str) -> tuple[Session, str, Actor]:
    """A session of the web page, what its cookie is to hold, and whose it is. Raises as ``actor_of``."""
    actor = actor_of(wiring, secret, address, Via.PAGE)
    now = wiring.clock()
    cookie = secrets.token_urlsafe(_BYTES)
    token = wiring.catalog.tokens.get(actor.token_id)
    expires = now + wiring.settings.api.session
    session = Session(
        digest_of(cookie),
        actor.token_id,
        secrets.token_urlsafe(24),
        now,
        min(expires, token.expires_at or expires),
        address,
    )
    wiring.catalog.sessions.add(session)
    audit(wiring, actor, "logged-in", subject=actor.token_id)
    return session, cookie, actor


def session_of(wiring: Wiring, cookie: str, address: str) -> tuple[Session, Actor] | None:
    """Who holds this cookie; None where it counts no more."""
    session = wiring.catalog.sessions.find(digest_of(cookie), wiring.clock())
    if session is None:
        return None
    try:
        token = wiring.catalog.tokens.get(session.token_id)
        return session, _valid(wiring, token, address, Via.PAGE)
    except UnauthenticatedError:
        return None


def log_out(wiring: Wiring, session: Session, actor: Actor) -> None:
    wiring.catalog.sessions.remove(session.digest)
    audit(wiring, dataclasses.replace(actor, via=Via.PAGE), "logged-out", subject=session.token_id)
