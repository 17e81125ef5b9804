"""Rows of incidents: what is not as it should be, and what was."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from sqlalchemy import Connection, and_, delete, insert, select, update
from sqlalchemy.engine import RowMapping

from backupd.catalog.alerts.messages import insert_messages
from backupd.catalog.base.cursors import move_cursors
from backupd.catalog.base.database import Database
from backupd.catalog.base.pages import EVER, Span
from backupd.catalog.base.people_tables import incidents
from backupd.model.errors import RefusedError, unknown
from backupd.model.event import Event, Severity
from backupd.model.incident import Incident, Message

_NOT_WRITTEN_AGAIN = frozenset({"id", "acknowledged_by", "acknowledged_at"})
"""Somebody else writes the last two, at any time."""


class IncidentRows:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, incident_id: str) -> Incident:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            return _one(connection, incident_id)

    def open(self) -> tuple[Incident, ...]:
        """Those that are not over, the oldest first."""
        with self._database.read() as connection:
            return tuple(
                _incident(row)
                for row in connection.execute(
                    select(incidents).where(incidents.c.closed_at.is_(None)).order_by(incidents.c.id)
                ).mappings()
            )

    def recent(self, moment: datetime) -> tuple[Incident, ...]:
        """Those that are not over, those of which nobody was told yet that they are, and those that ended after
        ``moment``; the oldest first."""
        query = select(incidents).where(
            incidents.c.closed_at.is_(None) | incidents.c.next_reminder.is_not(None) | (incidents.c.closed_at > moment)
        )
        with self._database.read() as connection:
            return tuple(_incident(row) for row in connection.execute(query.order_by(incidents.c.id)).mappings())

    def list(
        self,
        servers: Collection[str] | None = None,
        *,
        is_open: bool | None = None,
        severity: Severity | None = None,
        span: Span = EVER,
        before: str | None = None,
        limit: int | None = None,
    ) -> tuple[Incident, ...]:
        """Newest first; ``servers`` None: of all, and of none; ``is_open`` None: open or over; ``span``: when they were
        opened; ``before``: only those older than the one with this id."""
        query = span.of(select(incidents), incidents.c.opened_at).order_by(incidents.c.id.desc()).limit(limit)
        if severity is not None:
            query = query.where(incidents.c.severity == str(severity))
        if servers is not None:
            query = query.where(incidents.c.server.in_(servers))
        if is_open is not None:
            query = query.where(incidents.c.closed_at.is_(None) if is_open else incidents.c.closed_at.is_not(None))
        if before is not None:
            query = query.where(incidents.c.id < before)
        with self._database.read() as connection:
            return tuple(_incident(row) for row in connection.execute(query).mappings())

    def changed_since(self, moment: datetime) -> tuple[Incident, ...]:
        """Those that were opened, closed or heard of after ``moment``, the oldest first."""
        query = select(incidents).where((incidents.c.last_at > moment) | (incidents.c.closed_at > moment))
        with self._database.read() as connection:
            return tuple(_incident(row) for row in connection.execute(query.order_by(incidents.c.id)).mappings())

    def record(self, changed: Sequence[Incident], messages: Sequence[Message], cursors: Mapping[str, int]) -> None:
        """Write incidents, new or not, what is to be sent because of them, and how far was read: all or nothing."""
        with self._database.write() as connection:
            for incident in changed:
                values = {column.name: getattr(incident, column.name) for column in incidents.columns}
                values["severity"] = str(incident.severity)
                again = {name: value for name, value in values.items() if name not in _NOT_WRITTEN_AGAIN}
                if not connection.execute(
                    update(incidents).where(incidents.c.id == incident.id).values(again)
                ).rowcount:
                    connection.execute(insert(incidents).values(values))
            insert_messages(connection, messages)
            move_cursors(connection, cursors)

    def restate(self, event: Event) -> None:
        """The open incident of the kind, server and subject of ``event`` has its words now. Nothing without one."""
        now = {"message": event.message, "detail": event.detail, "hint": event.hint}
        one = and_(
            incidents.c.closed_at.is_(None),
            incidents.c.kind == event.kind,
            incidents.c.server == event.server,
            incidents.c.subject == event.subject,
        )
        with self._database.read() as connection:
            found = connection.execute(select(incidents).where(one)).mappings().first()
        if found is not None and any(found[name] != text for name, text in now.items()):
            with self._database.write() as connection:
                connection.execute(update(incidents).where(one).values(now))

    def acknowledge(self, incident_id: str, by: str, now: datetime) -> Incident:
        """No reminder of it is sent any more. Raises NotFoundError, RefusedError when it is over or somebody has done
        so before."""
        with self._database.write() as connection:
            done = connection.execute(
                update(incidents)
                .where(
                    incidents.c.id == incident_id,
                    incidents.c.closed_at.is_(None),
                    incidents.c.acknowledged_at.is_(None),
                )
                .values(acknowledged_by=by, acknowledged_at=now, next_reminder=None)
            ).rowcount
            found = _one(connection, incident_id)
            if not done:
                why = "it is over" if found.closed_at else f"{found.acknowledged_by} has acknowledged it already"
                raise RefusedError(
                    f"incident {incident_id} needs no acknowledgement: {why}",
                    hint="`backupd alerts` lists what is open",
                )
            return found

    def forget(self, before: datetime) -> None:
        """Remove those that were over before ``before``."""
        with self._database.write() as connection:
            connection.execute(delete(incidents).where(incidents.c.closed_at < before))


def _one(connection: Connection, incident_id: str) -> Incident:
    row = connection.execute(select(incidents).where(incidents.c.id == incident_id)).mappings().first()
    if row is None:
        raise unknown("incident", incident_id, lists="alerts --all")
    return _incident(row)


def _incident(row: RowMapping) -> Incident:
    return Incident(**{**row, "severity": Severity(row["severity"])})
