"""Rows of key challenges: what was asked of whom, and when it was answered."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import insert, select, update
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import challenges
from backupd.model.challenge import VALID_FOR, Challenge
from backupd.model.errors import RefusedError, unknown


class Challenges:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, challenge: Challenge) -> None:
        with self._database.write() as connection:
            connection.execute(
                insert(challenges).values(
                    id=challenge.id,
                    fingerprint=challenge.fingerprint,
                    name=challenge.name,
                    issued_at=challenge.issued_at,
                    digest=challenge.digest,
                    answered_at=challenge.answered_at,
                    answered_by=challenge.answered_by,
                )
            )

    def get(self, challenge_id: str) -> Challenge:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(select(challenges).where(challenges.c.id == challenge_id)).mappings().first()
        if row is None:
            raise unknown("challenge", challenge_id, lists="keys", what="the open ones")
        return _challenge(row)

    def list(self, fingerprint: str | None = None) -> tuple[Challenge, ...]:
        """Newest first."""
        query = select(challenges).order_by(challenges.c.issued_at.desc(), challenges.c.id.desc())
        if fingerprint is not None:
            query = query.where(challenges.c.fingerprint == fingerprint)
        with self._database.read() as connection:
            return tuple(_challenge(row) for row in connection.execute(query).mappings())

    def answer(self, challenge_id: str, now: datetime, by: str) -> None:
        """Raises RefusedError when it is answered already (of two answers the first one counts), or has lapsed."""
        with self._database.write() as connection:
            done = connection.execute(
                update(challenges)
                .where(
                    challenges.c.id == challenge_id,
                    challenges.c.answered_at.is_(None),
                    challenges.c.issued_at >= now - VALID_FOR,
                )
                .values(answered_at=now, answered_by=by)
            )
            if not done.rowcount:
                raise RefusedError(
                    f"the challenge {challenge_id} is answered already, or older than {VALID_FOR.days} days",
                    hint="`backupd keys` lists the open ones",
                )


def _challenge(row: RowMapping) -> Challenge:
    return Challenge(**row)
