"""Rows of marks of deletion: what this installation itself knows of what lies at a destination.

Whoever may put files there can put a mark with any time in it, and say that a person wanted it. A row begins when the
mark was put from here, or was first seen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import marks
from backupd.model.sighting import Sighting

Backup = tuple[str, str]
"""(server, backup id)"""


class Marks:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def look(self, destination: str, there: Mapping[Backup, datetime], now: datetime) -> dict[Backup, Sighting]:
        """What is known of each mark that is ``there`` now, with the times at which the place says that they were
        stored. What was not known is seen for the first time; so is one that was stored at another time than the one
        that was known. What is not there any more is forgotten."""
        with self._database.read() as connection:
            rows = _rows(connection, destination)
        if all(owner in rows and rows[owner]["stored_at"] == stored for owner, stored in there.items()) and (
            len(rows) == len(there)
        ):
            return {owner: _sighting(row) for owner, row in rows.items()}
        with self._database.write() as connection:
            rows = _rows(connection, destination)
            for owner in rows.keys() - there.keys():
                connection.execute(delete(marks).where(_is(destination, owner)))
            for owner, stored in there.items():
                row = rows.get(owner)
                if row is not None and row["stored_at"] is None:
                    connection.execute(update(marks).where(_is(destination, owner)).values(stored_at=stored))
                elif row is None or row["stored_at"] != stored:
                    _put(connection, destination, owner, Sighting(now), stored)
            return {owner: _sighting(row) for owner, row in _rows(connection, destination).items()}

    def take(self, destination: str, owner: Backup, now: datetime, *, stored: datetime | None, confirmed: bool) -> None:
        """The rules, or with ``confirmed`` a person, want the backup gone. ``stored``: when the mark that is there was
        stored, as the place says; None where there is none yet. The time of a known one stays."""
        with self._database.write() as connection:
            row = _rows(connection, destination).get(owner)
            before = None if row is None or stored is None or row["stored_at"] not in (None, stored) else _sighting(row)
            since, already = (now, False) if before is None else (before.since, before.confirmed)
            _put(connection, destination, owner, Sighting(since, ours=True, confirmed=confirmed or already), stored)

    def forget(self, destination: str, owner: Backup) -> None:
        """It is wanted again."""
        with self._database.write() as connection:
            connection.execute(delete(marks).where(_is(destination, owner)))


def _is(destination: str, owner: Backup) -> ColumnElement[bool]:
    return (marks.c.destination == destination) & (marks.c.server == owner[0]) & (marks.c.backup_id == owner[1])


def _rows(connection: Connection, destination: str) -> dict[Backup, Mapping[str, Any]]:
    found = connection.execute(select(marks).where(marks.c.destination == destination)).mappings()
    return {(row["server"], row["backup_id"]): dict(row) for row in found}


def _put(connection: Connection, destination: str, owner: Backup, known: Sighting, stored: datetime | None) -> None:
    connection.execute(delete(marks).where(_is(destination, owner)))
    connection.execute(
        insert(marks).values(
            destination=destination,
            server=owner[0],
            backup_id=owner[1],
            since=known.since,
            stored_at=stored,
            ours=known.ours,
            confirmed=known.confirmed,
        )
    )


def _sighting(row: Mapping[str, Any]) -> Sighting:
    return Sighting(row["since"], ours=bool(row["ours"]), confirmed=bool(row["confirmed"]))
