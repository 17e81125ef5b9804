"""Rows of events: what happened, in the order it was written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.engine import RowMapping

from backupd.catalog.database import Database
from backupd.catalog.tables import events
from backupd.model.event import Event, Severity


class Events:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, event: Event) -> None:
        with self._database.write() as connection:
            insert_events(connection, [event])

    def list(self, *, server: str | None = None, kind: str | None = None, after: int = 0,
             limit: int | None = None) -> tuple[Event, ...]:
        """Newest first; ``after``: only those with a higher number."""
        query = select(events).where(events.c.number > after).order_by(events.c.number.desc()).limit(limit)
        for column, wanted in ((events.c.server, server), (events.c.kind, kind)):
            if wanted is not None:
                query = query.where(column == wanted)
        with self._database.read() as connection:
            return tuple(_event(row) for row in connection.execute(query).mappings())

    def last(self, server: str, kinds: Collection[str], subject: str) -> Event | None:
        """The newest one of these kinds about this."""
        query = (select(events).where(events.c.server == server, events.c.kind.in_(kinds), events.c.subject == subject)
                 .order_by(events.c.number.desc()).limit(1))
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return _event(row) if row is not None else None

    def forget(self, before: datetime) -> None:
        """Remove events older than ``before``."""
        with self._database.write() as connection:
            connection.execute(delete(events).where(events.c.at < before))


def insert_events(connection: Connection, found: Sequence[Event]) -> None:
    """Record events within a transaction of the caller."""
    if found:
        connection.execute(insert(events), [
            {"at": event.at, "kind": event.kind, "severity": str(event.severity), "server": event.server,
             "subject": event.subject, "message": event.message, "detail": event.detail, "hint": event.hint,
             "job_id": event.job_id} for event in found])


def _event(row: RowMapping) -> Event:
    return Event(**{**row, "severity": Severity(row["severity"])})
