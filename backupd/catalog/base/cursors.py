"""Rows of cursors: how far somebody has read the events, and other numbers that outlive a process."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, insert, select, update

from backupd.catalog.base.database import Database
from backupd.catalog.base.people_tables import cursors


class Cursors:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> Mapping[str, int]:
        with self._database.read() as connection:
            return {str(row.name): int(row.number) for row in connection.execute(select(cursors))}

    def move(self, numbers: Mapping[str, int]) -> None:
        with self._database.write() as connection:
            move_cursors(connection, numbers)


def move_cursors(connection: Connection, numbers: Mapping[str, int]) -> None:
    """Within a transaction of the caller."""
    for name, number in numbers.items():
        if not connection.execute(update(cursors).where(cursors.c.name == name).values(number=number)).rowcount:
            connection.execute(insert(cursors).values(name=name, number=number))
