"""The audit: who did what, from the command line, REST, the page or the service itself, and how it ended.

``audit`` records one entry; ``audited`` is the block around an action that records how it ends.

Who may do what: tokens and sessions, the servers that an actor sees, and the base of what an actor may ask for.

A token is made once, shown once, and known by its digest alone; a session of the web page begins with one. For an actor
whose token names servers, other servers do not exist.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring, user
from backupd.catalog.row_mapping import Listed, number_of, page_by_page
from backupd.model.access import Actor, AuditEntry, Role, Session, Token, Via
from backupd.model.backup_record import EVERY_SERVER, BackupRecord
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    CatalogError,
    ConfigurationError,
    ForbiddenError,
    LockedError,
    NotFoundError,
    RefusedError,
    UnauthenticatedError,
    UnknownNameError,
    UsageError,
)
from backupd.model.job import JobRecord
from backupd.model.text import format_time, is_name, new_id, parse_duration, parse_time
from policies.document import suggestion

if TYPE_CHECKING:
    from backupd.catalog.people import Verified

_LONGEST = 2000
"""Characters of a detail: a request's text is not kept whole."""


def command_line() -> Actor:
    """Whoever calls the program: who may do that is a matter of the operating system."""
    return Actor(user(), Role.ADMIN, Via.CLI)


def service_actor() -> Actor:
    """The rules and the service, when nobody asks for what they do."""
    return Actor("backupd", Role.ADMIN, Via.SERVICE)


def audit(
    wiring: Wiring,
    actor: Actor,
    action: str,
    *,
    server: str = "",
    subject: str = "",
    outcome: str = "done",
    detail: str = "",
) -> None:
    """Record that ``actor`` did ``action`` (or was refused it, or it failed: ``outcome``). It has happened,
    so a catalog that cannot be written does not raise here: then the service's log alone has the entry."""
    entry = AuditEntry(
        wiring.clock(),
        actor.name,
        str(actor.role),
        str(actor.via),
        action,
        server=server,
        subject=subject,
        outcome=outcome,
        detail=detail[:_LONGEST],
        address=actor.address,
    )
    try:
        entry = wiring.catalog.audit.add(entry)
    except CatalogError as error:
        say("audit-unwritten", f"the audit could not be written: {error.message}", level=logging.ERROR, server=server)
    say("audit", _line(entry), server=server)


def _line(entry: AuditEntry) -> str:
    """One line whatever somebody wrote into it. With number and digest: what is cut off the audit's end shows here."""
    words = {
        "actor": entry.actor,
        "role": entry.role,
        "via": entry.via,
        "address": entry.address,
        "subject": entry.subject,
        "outcome": entry.outcome,
        "detail": entry.detail,
    }
    facts = ", ".join(f"{name} {value!r}" for name, value in words.items() if value)
    return f"{entry.action}: {facts}; entry {entry.number} {entry.digest}"


REFUSALS = (UsageError, ConfigurationError, RefusedError, NotFoundError, ForbiddenError, ArchivedError, LockedError)
"""Errors after which nothing was done."""


class AuditedAction:
    """One. ``subject`` and ``detail`` may be filled in while it is done."""

    def __init__(self, wiring: Wiring, actor: Actor, action: str, server: str) -> None:
        self.subject = ""
        self.detail = ""
        self._wiring, self._actor, self._action = wiring, actor, action
        self._recorded = False
        self._server = ""
        self.concerns(server)

    def concerns(self, server: str, detail: str = "") -> None:
        """Which server it was done to, where that was not known before."""
        self._server = server if is_name(server) or server == EVERY_SERVER else ""
        self.detail = detail or self.detail

    def begun(self, subject: str) -> None:
        """It is under way, and what becomes of it is recorded elsewhere under the id ``subject``."""
        self.subject = subject
        self.ended("done")

    def ended(self, outcome: str, why: str = "") -> None:
        """Once: what is recorded first remains."""

        if not self._recorded:
            self._recorded = True
            audit(
                self._wiring,
                self._actor,
                self._action,
                server=self._server,
                subject=self.subject,
                outcome=outcome,
                detail=": ".join(filter(None, (self.detail, why))),
            )


@contextmanager
def audited(
    wiring: Wiring, actor: Actor, action: str, *, server: str = "", subject: str = "", detail: str = ""
) -> Iterator[AuditedAction]:
    """Around what ``actor`` does: recorded as done when the block ends, as refused or failed when it raises."""
    record = AuditedAction(wiring, actor, action, server)
    record.subject, record.detail = subject, detail
    try:
        yield record
    except BaseException as error:
        why = error.message if isinstance(error, BackupdError) else type(error).__name__
        record.ended("refused" if isinstance(error, REFUSALS) else "failed", why)
        raise
    record.ended("done")


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
    with audited(wiring, actor, "token-created", detail=f"{name[:_LONGEST_NAME]}: {role} of {scope}{until}") as record:
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
        record.subject = token.id
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
            f"the expiry time {format_time(expires_at)} is in the past", hint="give a time in the future, or none"
        )
    if servers is not None and not servers:
        raise UsageError("a token needs at least one server", hint="name servers, or leave them out")
    for server in sorted(servers or ()):
        wiring.settings.server(server)


def revoke_token(wiring: Wiring, actor: Actor, token_id: str) -> Token:
    """Raises NotFoundError."""
    with audited(wiring, actor, "token-revoked", subject=token_id) as record:
        token = wiring.catalog.tokens.revoke(token_id, wiring.clock(), actor.name)
        record.detail = token.name
    return token


def digest_of(secret: str) -> str:
    """SHA-256 of a secret, hexadecimal: all that the catalog keeps of it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def actor_of(wiring: Wiring, secret: str, address: str, via: Via = Via.API) -> Actor:
    """Whose secret this is. Raises UnknownSecretError, UnauthenticatedError for one that counts no more."""
    token = wiring.catalog.tokens.find(digest_of(secret))
    if token is None:
        raise UnknownSecretError("this token is unknown", hint=_MAKE)
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
    """End the session of the web page; its cookie counts no more."""
    wiring.catalog.sessions.remove(session.digest)
    audit(wiring, dataclasses.replace(actor, via=Via.PAGE), "logged-out", subject=session.token_id)


def scoped(wiring: Wiring, actor: Actor) -> Wiring:
    """With the settings of those servers only that ``actor`` sees."""
    return wiring if actor.servers is None else wiring.of(actor.servers)


def see(actor: Actor, server: str, what: str) -> None:
    """Raises NotFoundError where ``what``, which belongs to ``server``, is not there for ``actor``."""
    if not actor.sees(server):
        raise NotFoundError(f"there is no {what}")


def require_all(actor: Actor) -> None:
    """Raises ForbiddenError for whom there are only some servers."""
    if actor.servers is not None:
        raise ForbiddenError("this needs access to every server", hint="choose one that your token may access")


def require_known(wiring: Wiring, server: str) -> None:
    """Raises UnknownNameError for a server that is neither configured nor in the catalog with backups, binary logs or
    jobs: it was typed wrong. Those that were configured once are known."""
    if server in wiring.settings.servers:
        return
    catalog = wiring.catalog
    if not (
        catalog.backups.list(server, limit=1) or catalog.binlogs.branches(server) or catalog.jobs.list(server, limit=1)
    ):
        wiring.settings.server(server)


def require_target(wiring: Wiring, server: str, text: str) -> None:
    """Raises UnknownNameError where a target names a backup or a branch that the catalog does not have of ``server``,
    UsageError for what is no target."""
    from restore.planning.starting_backup import unknown_backup
    from restore.planning.target import AtBackup, parse_target

    target = parse_target(text)
    branches = [branch.id for branch in wiring.catalog.binlogs.branches(server)] if target.branch else []
    if target.branch and target.branch not in branches:
        raise UnknownNameError(
            f"server {server} has no branch {target.branch!r}{suggestion(target.branch, branches)}",
            hint=f"`backupd timeline {server}` lists them",
        )
    if isinstance(target.goal, AtBackup):
        backup = target.goal.backup_id
        if not any(record.id == backup for record in wiring.catalog.backups.list(server, foreign=True)):
            raise unknown_backup(server, backup)


def seen(actor: Actor, server: str | None) -> tuple[str, ...] | None:
    """The servers whose rows a list may have: ``server``, or every one (None). Raises NotFoundError."""
    if server is None:
        return None if actor.servers is None else tuple(sorted(actor.servers))
    see(actor, server, f"server {server!r}")
    return (server,)


class Facade:
    """One part of the application, for one actor. Every method raises errors of backupd.model.errors; what changes
    something is in the audit, refused or not."""

    def __init__(self, wiring: Wiring, actor: Actor) -> None:
        self._wiring, self._actor = wiring, actor

    def _audited(
        self, action: str, *, server: str = "", subject: str = "", detail: str = ""
    ) -> AbstractContextManager[AuditedAction]:
        """Around what the actor does; see ``audit.deed``."""
        return audited(self._wiring, self._actor, action, server=server, subject=subject, detail=detail)

    def _see_server(self, server: str) -> None:
        """Raises ForbiddenError for every server, NotFoundError for one, where the actor may not see it."""
        if server == EVERY_SERVER:
            require_all(self._actor)
        else:
            see(self._actor, server, f"server {server!r}")

    def _backup(self, backup_id: str) -> BackupRecord:
        """Raises NotFoundError, also where the actor may not see it."""
        found = self._wiring.catalog.backups.get(backup_id)
        see(self._actor, found.server, f"backup {backup_id}")
        return found

    def _job(self, job_id: str) -> JobRecord:
        """Raises NotFoundError, also where the actor may not see it."""
        found = self._wiring.catalog.jobs.get(job_id)
        see(self._actor, found.server, f"job {job_id}")
        return found


class Access(Facade):
    """Tokens and the audit: for administrators."""

    def tokens(self) -> tuple[Token, ...]:
        """Newest first, those that count no more, too."""
        return self._wiring.catalog.tokens.list()

    def create(
        self, name: str, role: str, *, servers: Collection[str] | None = None, expires: str | None = None
    ) -> tuple[Token, str]:
        """``expires``: a span of time or a moment. Gives the token and its secret, which is nowhere else."""
        try:
            wanted = Role(role)
        except ValueError:
            raise UsageError(f"there is no role {role!r}", hint=f"roles are {', '.join(Role)}") from None
        until = None if expires is None else _moment(expires, self._wiring.clock())
        return create_token(self._wiring, self._actor, name, wanted, servers=servers, expires_at=until)

    def revoke(self, token_id: str) -> Token:
        """It lets nobody in from now on. Raises NotFoundError."""
        return revoke_token(self._wiring, self._actor, token_id)

    def audit(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        server: str | None = None,
        limit: int | None = None,
    ) -> Iterator[AuditEntry]:
        """Newest first, while they are read from the catalog. Raises UnknownNameError for a server that is neither
        known nor in the audit."""
        entries = partial(self._wiring.catalog.audit.list, actor=actor, action=action, server=server)
        if server is not None and not entries(limit=1):
            require_known(self._wiring, server)

        def page(most: int, after: str | None) -> Listed[AuditEntry]:
            found = entries(before=None if after is None else number_of(after), limit=most + 1)
            return Listed.of(found, most, lambda entry: str(entry.number))

        return page_by_page(page, limit)

    def verify_audit(self) -> Verified:
        """Are all entries there, in order, as they were written?"""
        return self._wiring.catalog.audit.verify()


def _moment(text: str, now: datetime) -> datetime:
    try:
        return now + parse_duration(text)
    except (ValueError, OverflowError):
        pass
    try:
        return parse_time(text)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is neither a duration nor a time: {error}", hint="write 90d, 12h, or 2027-01-01T00:00:00Z"
        ) from None
