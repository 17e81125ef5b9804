"""Which catalog this is: one that was made anew, after a loss, is another."""

from __future__ import annotations

import secrets

from sqlalchemy import insert, select

from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import identity


def identity_of(database: Database) -> str:
    """12 hex digits, drawn when they are first asked for. Raises CatalogError."""
    with database.write() as connection:
        found = connection.execute(select(identity.c.id)).scalar()
        if found is None:
            found = secrets.token_hex(6)
            connection.execute(insert(identity).values(number=1, id=found))
        return str(found)
