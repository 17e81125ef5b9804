"""Who may come in, what they asked for, what they hold back, and what they did: tokens, sessions, challenges, requests,
holds and pauses, the audit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    delete,
    insert,
    select,
    update,
)

from backupd.catalog.database import Rows
from backupd.catalog.row_mapping import EVER, FreeText, Span, UtcTime, metadata, narrowed, records, row_of, written_out
from backupd.model.access import VALID_FOR, AuditEntry, Challenge, Session, Token
from backupd.model.backup_record import EVERY_SERVER, Hold, HoldKind
from backupd.model.errors import RefusedError, unknown

challenges = Table(
    "challenges",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("name", FreeText, nullable=False),
    Column("issued_at", UtcTime, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("answered_at", UtcTime),
    Column("answered_by", FreeText, nullable=False),
    Index(None, "fingerprint", "issued_at"),
)


tokens = Table(
    "tokens",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", FreeText, nullable=False),
    Column("role", String(16), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("servers", JSON(none_as_null=True)),
    Column("created_at", UtcTime, nullable=False),
    Column("created_by", FreeText, nullable=False),
    Column("expires_at", UtcTime),
    Column("revoked_at", UtcTime),
    Column("revoked_by", FreeText, nullable=False),
    Column("last_used_at", UtcTime),
    Index(None, "digest", unique=True),
)


sessions = Table(
    "sessions",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("token_id", String(64), nullable=False),
    Column("csrf", String(64), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Column("address", FreeText, nullable=False),
    Index(None, "token_id"),
)
"""Those of the web page. ``digest`` is SHA-256 of what its cookie holds."""


audit = Table(
    "audit",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("at", UtcTime, nullable=False),
    Column("actor", FreeText, nullable=False),
    Column("role", String(16), nullable=False),
    Column("via", String(16), nullable=False),
    Column("address", FreeText, nullable=False),
    Column("action", String(64), nullable=False),
    Column("server", String(64), nullable=False),
    Column("subject", FreeText, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("detail", FreeText, nullable=False),
    Column("digest", String(64), nullable=False),
    Index(None, "at"),
)
"""Only added to: triggers refuse to change or remove a row."""


requests = Table(
    "requests",
    metadata,
    Column("actor", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("status", Integer),
    Column("headers", JSON(none_as_null=True)),
    Column("body", LargeBinary),
)
"""Answers to requests with an Idempotency-Key; without a status it is still being worked on."""


USED_EVERY = timedelta(minutes=5)
"""How exactly the last use of a token is known: a write for each request would be too many."""


holds = Table(
    "holds",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("reason", FreeText, nullable=False),
    Column("set_by", FreeText, nullable=False),
    Column("since", UtcTime, nullable=False),
)


class Tokens(Rows):
    """Tokens: who may come in. A token's secret is nowhere; its digest is what finds it."""

    def add(self, token: Token) -> None:
        """Raises RefusedError where one of its name is still valid: the audit log identifies users by that name."""
        with self._database.write() as connection:
            if not self._database.sqlite:  # there BEGIN IMMEDIATE keeps others out
                connection.exec_driver_sql("LOCK TABLE tokens IN SHARE ROW EXCLUSIVE MODE")
            for other in records(connection, Token, select(tokens).where(tokens.c.revoked_at.is_(None))):
                if other.name.casefold() == token.name.casefold() and other.is_valid(token.created_at):
                    raise RefusedError(
                        f"there is a token {other.name!r} already: {other.id}",
                        hint="revoke that token first, or choose another name: the audit log identifies tokens by name",
                    )
            connection.execute(insert(tokens).values(row_of(tokens, token)))

    def get(self, token_id: str) -> Token:
        """Raises NotFoundError."""
        if (found := self._record(Token, select(tokens).where(tokens.c.id == token_id))) is None:
            raise unknown("token", token_id, lists="token list")
        return found

    def find(self, digest: str) -> Token | None:
        """The one whose secret has this digest, whether it still counts or not."""
        return self._record(Token, select(tokens).where(tokens.c.digest == digest))

    def list(self) -> tuple[Token, ...]:
        """Newest first."""
        return self._records(Token, select(tokens).order_by(tokens.c.created_at.desc(), tokens.c.id.desc()))

    def revoke(self, token_id: str, now: datetime, by: str) -> Token:
        """It counts no more, nor do sessions that were begun with it. Revoking twice changes nothing. Raises
        NotFoundError."""
        with self._database.write() as connection:
            connection.execute(
                update(tokens)
                .where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
                .values(revoked_at=now, revoked_by=by)
            )
            connection.execute(sessions.delete().where(sessions.c.token_id == token_id))
        return self.get(token_id)

    def used(self, token_id: str, now: datetime) -> None:
        """Somebody came in with it; written at most once in ``USED_EVERY``."""
        stale = tokens.c.last_used_at.is_(None) | (tokens.c.last_used_at < now - USED_EVERY)
        self._do(update(tokens).where(tokens.c.id == token_id, stale).values(last_used_at=now))


class Sessions(Rows):
    """Sessions: who is logged in to the web page."""

    def add(self, session: Session) -> None:
        """Those that have expired go."""
        with self._database.write() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= session.created_at))
            connection.execute(insert(sessions).values(row_of(sessions, session)))

    def find(self, digest: str, now: datetime) -> Session | None:
        """None when it has expired."""
        return self._record(Session, select(sessions).where(sessions.c.digest == digest, sessions.c.expires_at > now))

    def remove(self, digest: str) -> None:
        """Log out. Quiet when there is no such session."""
        self._do(delete(sessions).where(sessions.c.digest == digest))


class Challenges(Rows):
    """Key challenges: what was asked of whom, and when it was answered."""

    def add(self, challenge: Challenge) -> None:
        """Record a challenge that was just issued."""
        self._do(insert(challenges).values(row_of(challenges, challenge)))

    def get(self, challenge_id: str) -> Challenge:
        """Raises NotFoundError."""
        if (found := self._record(Challenge, select(challenges).where(challenges.c.id == challenge_id))) is None:
            raise unknown("challenge", challenge_id, lists="keys", what="the open ones")
        return found

    def list(self, fingerprint: str | None = None) -> tuple[Challenge, ...]:
        """Newest first."""
        query = select(challenges).order_by(challenges.c.issued_at.desc(), challenges.c.id.desc())
        return self._records(Challenge, narrowed(query, (challenges.c.fingerprint, fingerprint)))

    def answer(self, challenge_id: str, now: datetime, by: str) -> None:
        """Raises RefusedError when it is answered already (of two answers the first one counts), or has lapsed."""
        waits = challenges.c.answered_at.is_(None) & (challenges.c.issued_at >= now - VALID_FOR)
        answered = update(challenges).where(challenges.c.id == challenge_id, waits)
        if not self._do(answered.values(answered_at=now, answered_by=by)):
            raise RefusedError(
                f"the challenge {challenge_id} was already answered, or is older than {VALID_FOR.days} days",
                hint="`backupd keys` lists the open ones",
            )


REMEMBERED = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Asked:
    """An earlier request. ``digest``: of all that it asked; ``status`` None: it is still being worked on."""

    digest: str
    at: datetime
    status: int | None
    headers: Mapping[str, str]
    body: bytes


class Requests(Rows):
    """Requests with an Idempotency-Key: what was answered, so that asking again does nothing twice."""

    def begin(self, actor: str, key: str, digest: str, now: datetime) -> Asked | None:
        """Note that this is being worked on; or give the request that had the same key within the last day."""
        same = (requests.c.actor == actor) & (requests.c.key == key)
        with self._database.write() as connection:
            if not self._database.sqlite:  # there BEGIN IMMEDIATE keeps others out
                connection.exec_driver_sql("LOCK TABLE requests IN EXCLUSIVE MODE")
            connection.execute(delete(requests).where(requests.c.at < now - REMEMBERED))
            row = connection.execute(select(requests).where(same)).mappings().first()
            if row is not None:
                return Asked(row["digest"], row["at"], row["status"], row["headers"] or {}, row["body"] or b"")
            connection.execute(insert(requests).values(actor=actor, key=key, digest=digest, at=now))
        return None

    def finish(self, actor: str, key: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Keep the answer, so that the same request gets it again."""
        asked = update(requests).where(requests.c.actor == actor, requests.c.key == key)
        self._do(asked.values(status=status, headers=dict(headers), body=body))

    def forget(self, actor: str, key: str) -> None:
        """It came to nothing: the same key may be tried again."""
        self._do(delete(requests).where(requests.c.actor == actor, requests.c.key == key))


_BATCH = 500


@dataclass(frozen=True, slots=True)
class Verified:
    """``entries``: how many there are; ``digest``: of the newest one, which may be noted elsewhere; ``problems``: where
    the chain is broken, one line each."""

    entries: int
    digest: str
    problems: tuple[str, ...]


class Audit(Rows):
    """The audit: who did what. Rows are only added, which triggers see to, and each one's digest covers the one
    before it, so that whoever gets past the triggers shows."""

    def add(self, entry: AuditEntry) -> AuditEntry:
        """Gives it as it was written: with its number and digest."""
        with self._database.write() as connection:
            if not self._database.sqlite:  # there BEGIN IMMEDIATE keeps others out
                connection.exec_driver_sql("LOCK TABLE audit IN EXCLUSIVE MODE")
            last = connection.execute(
                select(audit.c.number, audit.c.digest).order_by(audit.c.number.desc()).limit(1)
            ).first()
            number, before = (last.number, last.digest) if last is not None else (0, "")
            numbered = replace(_storable(entry), number=number + 1)
            written = replace(numbered, digest=chained(before, numbered))
            connection.execute(insert(audit).values(row_of(audit, written, number=written.number)))
        return written

    def list(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        server: str | None = None,
        subject: str | None = None,
        outcome: str | None = None,
        span: Span = EVER,
        before: int | None = None,
        limit: int | None = None,
    ) -> tuple[AuditEntry, ...]:
        """Newest first; ``before``: only those with a lower number."""
        query = span.of(select(audit), audit.c.at).order_by(audit.c.number.desc()).limit(limit)
        query = narrowed(
            query,
            (audit.c.actor, actor),
            (audit.c.action, action),
            (audit.c.server, server),
            (audit.c.subject, subject),
            (audit.c.outcome, outcome),
        )
        if before is not None:
            query = query.where(audit.c.number < before)
        return self._records(AuditEntry, query)

    def verify(self) -> Verified:
        """Follow the chain from its first entry. What was cut off at its end does not show here: compare ``digest``
        with one that was noted before."""
        problems: list[str] = []
        number, digest = 0, ""
        with self._database.read() as connection:
            following = select(audit).order_by(audit.c.number).limit(_BATCH)
            while rows := records(connection, AuditEntry, following.where(audit.c.number > number)):
                for entry in rows:
                    if entry.number != number + 1:
                        problems.append(f"entries {number + 1} to {entry.number - 1} are missing")
                    elif entry.digest != chained(digest, replace(entry, digest="")):
                        problems.append(f"entry {entry.number} was altered or moved")
                    number, digest = entry.number, entry.digest
        return Verified(number, digest, tuple(problems))


_COVERED = (
    *("at", "actor", "role", "via", "action", "server", "subject"),
    *("outcome", "detail", "address", "number", "digest"),
)
"""Fields of an entry in the order in which digests cover them."""


def chained(before: str, entry: AuditEntry) -> str:
    """The digest of ``entry``, which has none yet, after an entry with the digest ``before``."""
    document = entry.as_json()
    return hashlib.sha256(json.dumps([before, *(document[name] for name in _COVERED)]).encode()).hexdigest()


def _storable(entry: AuditEntry) -> AuditEntry:
    """As the database gives it back: what it cannot hold is written out, as in ``FreeText``, and long names are cut."""

    texts: dict[str, Any] = {
        column.name: written_out(text)[: getattr(column.type, "length", None)]
        for column in audit.columns
        if isinstance(text := getattr(entry, column.name), str)
    }
    return replace(entry, **{**texts, "digest": ""})


class Holds(Rows):
    """Holds and pauses: at most one of each kind for each server; ``*`` is every server."""

    def set(self, server: str, kind: HoldKind, reason: str, by: str, now: datetime) -> Hold:
        """A new reason replaces an older one of the same kind."""
        hold = Hold(server, HoldKind(kind), reason, by, now)
        self._put(holds, row_of(holds, hold))
        return hold

    def release(self, server: str, kind: HoldKind) -> bool:
        """Was there one? That of every server is only released under the name ``*``."""
        return bool(self._do(delete(holds).where((holds.c.server == server) & (holds.c.kind == str(kind)))))

    def of(self, server: str, kind: HoldKind | None = None) -> tuple[Hold, ...]:
        """Everything that concerns ``server``, its own before that of every server."""
        wanted = None if kind is None else HoldKind(kind)
        query = narrowed(select(holds), (holds.c.server, (server, EVERY_SERVER)), (holds.c.kind, wanted))
        found = self._records(Hold, query)
        return tuple(sorted(found, key=lambda hold: (hold.server != server, hold.kind)))

    def all(self, servers: Collection[str] | None = None) -> tuple[Hold, ...]:
        """Every hold and pause, or those that concern ``servers``, by server and kind."""
        concerned = None if servers is None else (*servers, EVERY_SERVER)
        query = narrowed(select(holds), (holds.c.server, concerned))
        return self._records(Hold, query.order_by(holds.c.server, holds.c.kind))
