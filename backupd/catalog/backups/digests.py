"""Rows of deposits: the digests of the stored bytes of proofs and witnesses that this installation put at
destinations."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import delete, insert, select

from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import deposits

_MANY = 500


class Deposits:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def at(self, destination: str) -> dict[str, str]:
        """SHA-256 (64 hex) by key."""
        with self._database.read() as connection:
            found = connection.execute(
                select(deposits.c.key, deposits.c.sha256).where(deposits.c.destination == destination)
            )
            return {row.key: row.sha256 for row in found}

    def put(self, destination: str, key: str, sha256: str) -> None:
        with self._database.write() as connection:
            connection.execute(
                delete(deposits).where((deposits.c.destination == destination) & (deposits.c.key == key))
            )
            connection.execute(insert(deposits).values(destination=destination, key=key, sha256=sha256))

    def forget(self, destination: str, keys: Collection[str]) -> None:
        todo = sorted(keys)
        with self._database.write() as connection:
            for start in range(0, len(todo), _MANY):
                connection.execute(
                    delete(deposits).where(
                        (deposits.c.destination == destination) & deposits.c.key.in_(todo[start : start + _MANY])
                    )
                )
