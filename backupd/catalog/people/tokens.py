"""Rows of tokens: who may come in. A token's secret is nowhere; its digest is what finds it."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import insert, or_, select, update
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.people_tables import sessions, tokens
from backupd.model.access import Role, Token
from backupd.model.errors import RefusedError, unknown

USED_EVERY = timedelta(minutes=5)
"""How exactly the last use of a token is known: a write for each request would be too many."""


class Tokens:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, token: Token) -> None:
        """Raises RefusedError where one of its name still lets in: the audit tells who did what by that name."""
        with self._database.write() as connection:
            if not self._database.sqlite:  # there BEGIN IMMEDIATE keeps others out
                connection.exec_driver_sql("LOCK TABLE tokens IN SHARE ROW EXCLUSIVE MODE")
            for row in connection.execute(select(tokens).where(tokens.c.revoked_at.is_(None))).mappings():
                other = _token(row)
                if other.name.casefold() == token.name.casefold() and other.is_valid(token.created_at):
                    raise RefusedError(
                        f"there is a token {other.name!r} already: {other.id}",
                        hint="revoke that one first, or give the new one another name: the audit shows it",
                    )
            connection.execute(
                insert(tokens).values(
                    id=token.id,
                    name=token.name,
                    role=str(token.role),
                    digest=token.digest,
                    servers=None if token.servers is None else sorted(token.servers),
                    created_at=token.created_at,
                    created_by=token.created_by,
                    expires_at=token.expires_at,
                    revoked_at=token.revoked_at,
                    revoked_by=token.revoked_by,
                    last_used_at=token.last_used_at,
                )
            )

    def get(self, token_id: str) -> Token:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(select(tokens).where(tokens.c.id == token_id)).mappings().first()
        if row is None:
            raise unknown("token", token_id, lists="token list")
        return _token(row)

    def find(self, digest: str) -> Token | None:
        """The one whose secret has this digest, whether it still counts or not."""
        with self._database.read() as connection:
            row = connection.execute(select(tokens).where(tokens.c.digest == digest)).mappings().first()
        return None if row is None else _token(row)

    def list(self) -> tuple[Token, ...]:
        """Newest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(tokens).order_by(tokens.c.created_at.desc(), tokens.c.id.desc()))
            return tuple(_token(row) for row in rows.mappings())

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
        with self._database.write() as connection:
            connection.execute(
                update(tokens)
                .where(
                    tokens.c.id == token_id,
                    or_(tokens.c.last_used_at.is_(None), tokens.c.last_used_at < now - USED_EVERY),
                )
                .values(last_used_at=now)
            )


def _token(row: RowMapping) -> Token:
    servers = row["servers"]
    return Token(**{**row, "role": Role(row["role"]), "servers": None if servers is None else frozenset(servers)})
