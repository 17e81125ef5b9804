"""Rows of sessions: who is logged in to the web page."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, insert, select

from backupd.catalog.base.database import Database
from backupd.catalog.base.people_tables import sessions
from backupd.model.access import Session


class Sessions:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, session: Session) -> None:
        """Those that have expired go."""
        with self._database.write() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= session.created_at))
            connection.execute(
                insert(sessions).values(
                    digest=session.digest,
                    token_id=session.token_id,
                    csrf=session.csrf,
                    created_at=session.created_at,
                    expires_at=session.expires_at,
                    address=session.address,
                )
            )

    def find(self, digest: str, now: datetime) -> Session | None:
        """None when it has expired."""
        with self._database.read() as connection:
            row = connection.execute(select(sessions).where(sessions.c.digest == digest, sessions.c.expires_at > now))
            found = row.mappings().first()
        return None if found is None else Session(**found)

    def remove(self, digest: str) -> None:
        with self._database.write() as connection:
            connection.execute(delete(sessions).where(sessions.c.digest == digest))
