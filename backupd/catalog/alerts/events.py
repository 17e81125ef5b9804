"""Rows of events: what happened, in the order it was written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, delete, func, insert, select
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.pages import EVER, Listed, Span, number_of
from backupd.catalog.base.tables import events
from backupd.model.event import Event, Severity


class Events:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, event: Event) -> None:
        with self._database.write() as connection:
            insert_events(connection, [event])

    def list(
        self, *, server: str | None = None, kind: str | None = None, after: int = 0, limit: int | None = None
    ) -> tuple[Event, ...]:
        """Newest first; ``after``: only those with a higher number."""
        query = select(events).where(events.c.number > after).order_by(events.c.number.desc()).limit(limit)
        for column, wanted in ((events.c.server, server), (events.c.kind, kind)):
            if wanted is not None:
                query = query.where(column == wanted)
        with self._database.read() as connection:
            return tuple(_event(row) for row in connection.execute(query).mappings())

    def page(
        self,
        servers: Collection[str] | None = None,
        *,
        kind: str | None = None,
        job_id: str | None = None,
        severity: Severity | None = None,
        span: Span = EVER,
        limit: int = 100,
        after: str | None = None,
    ) -> Listed[Event]:
        """One page of the list; ``servers`` None: of all, and of none. Raises UsageError for what is no cursor."""
        query = span.of(_of(servers, kind, job_id), events.c.at).order_by(events.c.number.desc()).limit(limit + 1)
        if severity is not None:
            query = query.where(events.c.severity == str(severity))
        if after is not None:
            query = query.where(events.c.number < number_of(after))
        with self._database.read() as connection:
            found = [_event(row) for row in connection.execute(query).mappings()]
        return Listed.of(found, limit, lambda event: str(event.number))

    def since(
        self, number: int, servers: Collection[str] | None = None, *, job_id: str | None = None, limit: int = 1000
    ) -> tuple[Event, ...]:
        """Those with a higher number, oldest first."""
        query = _of(servers, None, job_id).where(events.c.number > number).order_by(events.c.number).limit(limit)
        with self._database.read() as connection:
            return tuple(_event(row) for row in connection.execute(query).mappings())

    def newest(self) -> int:
        """The highest number that was given, 0 for none."""
        with self._database.read() as connection:
            return int(connection.scalar(select(func.max(events.c.number))) or 0)

    def last(
        self, server: str, kinds: Collection[str], subject: str, *, severities: Collection[Severity] = tuple(Severity)
    ) -> Event | None:
        """The newest one of these kinds, and this grave, about this."""
        query = (
            select(events)
            .where(
                events.c.server == server,
                events.c.kind.in_(kinds),
                events.c.subject == subject,
                events.c.severity.in_([str(one) for one in severities]),
            )
            .order_by(events.c.number.desc())
            .limit(1)
        )
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return _event(row) if row is not None else None

    def forget(self, before: datetime) -> None:
        """Remove events older than ``before``."""
        with self._database.write() as connection:
            connection.execute(delete(events).where(events.c.at < before))


def _of(servers: Collection[str] | None, kind: str | None, job_id: str | None) -> Select[Any]:
    query = select(events)
    if servers is not None:
        query = query.where(events.c.server.in_(servers))
    for column, wanted in ((events.c.kind, kind), (events.c.job_id, job_id)):
        if wanted is not None:
            query = query.where(column == wanted)
    return query


def insert_events(connection: Connection, found: Sequence[Event]) -> None:
    """Record events within a transaction of the caller."""
    if found:
        connection.execute(
            insert(events),
            [
                {
                    "at": event.at,
                    "kind": event.kind,
                    "severity": str(event.severity),
                    "server": event.server,
                    "subject": event.subject,
                    "message": event.message,
                    "detail": event.detail,
                    "hint": event.hint,
                    "job_id": event.job_id,
                }
                for event in found
            ],
        )


def _event(row: RowMapping) -> Event:
    return Event(**{**row, "severity": Severity(row["severity"])})
