"""Rows of absences: servers that a backup took out of rotation, until the program that brings them back has run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, insert, select
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.people_tables import absences


@dataclass(frozen=True, slots=True)
class Absence:
    """``job_id``: the backup for which ``server`` is away; ``after``: the program that brings it back, "" for none."""

    server: str
    job_id: str
    since: datetime
    after: str = ""


class Absences:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, absence: Absence) -> None:
        """A server is away once: an absence that was not ended goes on under the name of the new one."""
        with self._database.write() as connection:
            connection.execute(delete(absences).where(absences.c.server == absence.server))
            connection.execute(
                insert(absences).values(
                    server=absence.server, job_id=absence.job_id, since=absence.since, after=absence.after
                )
            )

    def end(self, server: str, job_id: str) -> bool:
        """Was it still there under the name of this job?"""
        with self._database.write() as connection:
            return bool(
                connection.execute(
                    delete(absences).where(absences.c.server == server, absences.c.job_id == job_id)
                ).rowcount
            )

    def of(self, server: str) -> Absence | None:
        with self._database.read() as connection:
            row = connection.execute(select(absences).where(absences.c.server == server)).mappings().first()
        return _absence(row) if row is not None else None

    def all(self) -> tuple[Absence, ...]:
        with self._database.read() as connection:
            rows = connection.execute(select(absences).order_by(absences.c.server)).mappings()
            return tuple(_absence(row) for row in rows)


def _absence(row: RowMapping) -> Absence:
    return Absence(row["server"], row["job_id"], row["since"], row["after"])
