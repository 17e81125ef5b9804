"""Rows of identities: which database servers answered under each server's name."""

from __future__ import annotations

from dataclasses import asdict, replace

from sqlalchemy import delete, insert, select
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import identities
from backupd.model.server.identity import Identity, Verdict


class Identities:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, server: str) -> tuple[Identity, ...]:
        """In the order in which they were first met."""
        return tuple(one for one in self.all() if one.server == server)

    def all(self) -> tuple[Identity, ...]:
        with self._database.read() as connection:
            rows = (
                connection.execute(
                    select(identities).order_by(identities.c.server, identities.c.since, identities.c.uuid)
                )
                .mappings()
                .all()
            )
        return tuple(_identity(row) for row in rows)

    def put(self, identity: Identity) -> None:
        """One that was known is replaced."""
        with self._database.write() as connection:
            connection.execute(
                delete(identities).where(
                    (identities.c.server == identity.server) & (identities.c.uuid == identity.uuid)
                )
            )
            connection.execute(insert(identities).values(**{**asdict(identity), "verdict": str(identity.verdict)}))

    def accept(self, identity: Identity, by: str) -> Identity:
        """From now on it is the server of that name."""
        accepted = replace(identity, verdict=Verdict.OWN, accepted_by=by)
        self.put(accepted)
        return accepted


def _identity(row: RowMapping) -> Identity:
    return Identity(**{**row, "verdict": Verdict(row["verdict"])})
