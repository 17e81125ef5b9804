"""Rows of scrubs: when each share of what is stored was last read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from sqlalchemy import delete, insert, select

from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import scrubs

_CHUNK = 500
"""Shares in one statement: SQLite allows 32,766 values, older builds 999."""


class Scrubs:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def done(self, server: str, destination: str) -> Mapping[int, datetime]:
        """When each share was last read; those that never were are missing."""
        query = select(scrubs.c.share, scrubs.c.done_at).where(
            scrubs.c.server == server, scrubs.c.destination == destination
        )
        with self._database.read() as connection:
            return {row.share: row.done_at for row in connection.execute(query)}

    def record(self, server: str, destination: str, shares: Iterable[int], now: datetime) -> None:
        """These shares have just been read."""
        found = sorted(set(shares))
        if not found:
            return
        with self._database.write() as connection:
            for start in range(0, len(found), _CHUNK):
                connection.execute(
                    delete(scrubs).where(
                        scrubs.c.server == server,
                        scrubs.c.destination == destination,
                        scrubs.c.share.in_(found[start : start + _CHUNK]),
                    )
                )
            connection.execute(
                insert(scrubs),
                [{"server": server, "destination": destination, "share": share, "done_at": now} for share in found],
            )
