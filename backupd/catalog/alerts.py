"""What happened, what is wrong because of it, and who is told: events, incidents, messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Index,
    Integer,
    Select,
    String,
    Table,
    and_,
    delete,
    func,
    insert,
    select,
    update,
)

from backupd.catalog.database import Rows
from backupd.catalog.row_mapping import (
    EVER,
    FreeText,
    Listed,
    Span,
    UtcTime,
    first_record,
    metadata,
    narrowed,
    number_of,
    row_of,
)
from backupd.model.errors import NotFoundError, RefusedError, unknown
from backupd.model.event import Event, Incident, Message, MessageKind, MessageState, Severity

events = Table(
    "events",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("at", UtcTime, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("severity", String(16), nullable=False),
    Column("server", String(64), nullable=False),
    Column("subject", FreeText, nullable=False),
    Column("message", FreeText, nullable=False),
    Column("detail", FreeText, nullable=False),
    Column("hint", FreeText, nullable=False),
    Column("job_id", String(64), nullable=False),
    Index(None, "server", "at"),
    Index(None, "kind", "at"),
)


incidents = Table(
    "incidents",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("server", String(64), nullable=False),
    Column("subject", FreeText, nullable=False),
    Column("severity", String(16), nullable=False),
    Column("message", FreeText, nullable=False),
    Column("detail", FreeText, nullable=False),
    Column("hint", FreeText, nullable=False),
    Column("opened_at", UtcTime, nullable=False),
    Column("last_at", UtcTime, nullable=False),
    Column("count", Integer, nullable=False),
    Column("closed_at", UtcTime),
    Column("job_id", String(64), nullable=False),
    Column("reminders", Integer, nullable=False),
    Column("next_reminder", UtcTime),
    Column("acknowledged_by", FreeText, nullable=False),
    Column("acknowledged_at", UtcTime),
    Index(None, "closed_at"),
    Index(None, "server", "opened_at"),
)


messages = Table(
    "messages",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("channel", FreeText, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("incident_id", String(64), nullable=False),
    Column("subject", FreeText, nullable=False),
    Column("recipients", JSON, nullable=False),
    Column("content", FreeText, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("next_try", UtcTime),
    Column("sent_at", UtcTime),
    Column("error", FreeText, nullable=False),
    Index(None, "state", "next_try"),
    Index(None, "incident_id"),
)


cursors = Table(
    "cursors",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("number", Integer, nullable=False),
)
"""How far somebody has read the events."""


class Events(Rows):
    """Events: what happened, in the order in which it was written."""

    def add(self, event: Event) -> None:
        """Append one event; its number is the next one."""
        with self._database.write() as connection:
            insert_events(connection, [event])

    def list(
        self, *, server: str | None = None, kind: str | None = None, after: int = 0, limit: int | None = None
    ) -> tuple[Event, ...]:
        """Newest first; ``after``: only those with a higher number."""
        query = select(events).where(events.c.number > after).order_by(events.c.number.desc()).limit(limit)
        query = narrowed(query, (events.c.server, server), (events.c.kind, kind))
        return self._records(Event, query)

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
        query = span.of(_of(servers, job_id), events.c.at).order_by(events.c.number.desc()).limit(limit + 1)
        query = narrowed(query, (events.c.kind, kind), (events.c.severity, severity))
        if after is not None:
            query = query.where(events.c.number < number_of(after))
        return Listed.of(self._records(Event, query), limit, lambda event: str(event.number))

    def since(
        self, number: int, servers: Collection[str] | None = None, *, job_id: str | None = None, limit: int = 1000
    ) -> tuple[Event, ...]:
        """Those with a higher number, oldest first."""
        query = _of(servers, job_id).where(events.c.number > number).order_by(events.c.number).limit(limit)
        return self._records(Event, query)

    def newest(self) -> int:
        """The highest number that was given, 0 for none."""
        with self._database.read() as connection:
            return int(connection.scalar(select(func.max(events.c.number))) or 0)

    def last(
        self, server: str, kinds: Collection[str], subject: str, *, severities: Collection[Severity] = tuple(Severity)
    ) -> Event | None:
        """The newest one of these kinds, and this grave, about this."""
        query = narrowed(
            select(events).order_by(events.c.number.desc()).limit(1),
            (events.c.server, server),
            (events.c.kind, kinds),
            (events.c.subject, subject),
            (events.c.severity, severities),
        )
        return self._record(Event, query)

    def forget(self, before: datetime) -> None:
        """Remove events older than ``before``."""
        self._do(delete(events).where(events.c.at < before))


def _of(servers: Collection[str] | None, job_id: str | None) -> Select[Any]:
    return narrowed(select(events), (events.c.server, servers), (events.c.job_id, job_id))


def insert_events(connection: Connection, found: Sequence[Event]) -> None:
    """Record events within a transaction of the caller."""
    if found:
        connection.execute(insert(events), [row_of(events, event) for event in found])


class Messages(Rows):
    """Messages: what is to be sent, what was, and what could not be."""

    def add(self, message: Message) -> None:
        """Record a message that is to be sent."""
        with self._database.write() as connection:
            insert_messages(connection, [message])

    def get(self, message_id: str) -> Message:
        """Raises NotFoundError."""
        if (found := self._record(Message, select(messages).where(messages.c.id == message_id))) is None:
            raise NotFoundError(f"there is no message {message_id}", hint="`backupd alerts messages` lists them")
        return found

    def list(
        self,
        *,
        state: MessageState | None = None,
        incident: str | None = None,
        span: Span = EVER,
        before: str | None = None,
        limit: int | None = None,
    ) -> tuple[Message, ...]:
        """Newest first; ``span``: when they were made; ``before``: only those older than the one with this id."""
        query = span.of(select(messages), messages.c.created_at).order_by(messages.c.id.desc()).limit(limit)
        query = narrowed(query, (messages.c.state, state), (messages.c.incident_id, incident))
        return self._records(Message, query if before is None else query.where(messages.c.id < before))

    def first_about(self, incident_id: str) -> str:
        """The incident that the first mail about this one is named by, which may have told of several; "" where there
        is none."""
        named = select(messages.c.incident_id).where(messages.c.content.like(f"%<{incident_id}@%"))
        with self._database.read() as connection:
            return str(connection.scalar(named.order_by(messages.c.created_at, messages.c.id).limit(1)) or "")

    def due(self, channel: str, now: datetime, horizon: datetime, limit: int) -> tuple[Message, ...]:
        """Those of ``channel`` to be sent now, the oldest first; also those whose next try lies after ``horizon``, as a
        clock that was ahead has set it."""
        return self._records(
            Message,
            select(messages)
            .where(
                messages.c.state == str(MessageState.QUEUED),
                messages.c.channel == channel,
                (messages.c.next_try <= now) | (messages.c.next_try > horizon),
            )
            .order_by(messages.c.created_at, messages.c.id)
            .limit(limit),
        )

    def waiting(self) -> dict[str, int]:
        """How many are queued, by channel."""
        query = (
            select(messages.c.channel, func.count())
            .where(messages.c.state == str(MessageState.QUEUED))
            .group_by(messages.c.channel)
        )
        with self._database.read() as connection:
            return {str(channel): int(count) for channel, count in connection.execute(query)}

    def made_since(self, moment: datetime, kinds: Collection[MessageKind]) -> int:
        """How many of these kinds were made since then; one that goes to several channels counts once."""
        query = select(func.count(messages.c.created_at.distinct())).where(
            messages.c.created_at > moment, messages.c.kind.in_([str(kind) for kind in kinds])
        )
        with self._database.read() as connection:
            return int(connection.execute(query).scalar_one())

    def update(self, message: Message) -> None:
        """Write how it fared."""
        row = row_of(messages, message)
        fared = {name: row[name] for name in ("state", "recipients", "attempts", "next_try", "sent_at", "error")}
        self._do(update(messages).where(messages.c.id == message.id).values(fared))

    def hurry(self, now: datetime, channel: str) -> None:
        """What was tried in vain by ``channel`` is tried at once: it works again. What was never tried is due anyway,
        or is just being sent by a command."""
        queued = (messages.c.state == str(MessageState.QUEUED)) & (messages.c.channel == channel)
        self._do(update(messages).where(queued, messages.c.attempts > 0).values(next_try=now))

    def forget(self, before: datetime) -> None:
        """Remove those that are over and older than ``before``."""
        self._do(delete(messages).where(messages.c.created_at < before, messages.c.state != str(MessageState.QUEUED)))


def insert_messages(connection: Connection, found: Sequence[Message]) -> None:
    """Record messages within a transaction of the caller."""
    if found:
        connection.execute(insert(messages), [row_of(messages, message) for message in found])


class Cursors(Rows):
    """Cursors: how far somebody has read the events, and other numbers that outlive a process."""

    def all(self) -> Mapping[str, int]:
        """Each number by the name of its cursor."""
        with self._database.read() as connection:
            return {str(row.name): int(row.number) for row in connection.execute(select(cursors))}

    def move(self, numbers: Mapping[str, int]) -> None:
        """Set these cursors, all or none; one that is new begins."""
        with self._database.write() as connection:
            move_cursors(connection, numbers)


def move_cursors(connection: Connection, numbers: Mapping[str, int]) -> None:
    """Within a transaction of the caller."""
    for name, number in numbers.items():
        if not connection.execute(update(cursors).where(cursors.c.name == name).values(number=number)).rowcount:
            connection.execute(insert(cursors).values(name=name, number=number))


_NOT_WRITTEN_AGAIN = frozenset({"id", "acknowledged_by", "acknowledged_at"})
"""Somebody else writes the last two, at any time."""


class IncidentRows(Rows):
    """Incidents: what is not as it should be, and what was."""

    def get(self, incident_id: str) -> Incident:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            return _one(connection, incident_id)

    def open(self) -> tuple[Incident, ...]:
        """Those that are not over, the oldest first."""
        query = select(incidents).where(incidents.c.closed_at.is_(None))
        return self._records(Incident, query.order_by(incidents.c.id))

    def recent(self, moment: datetime) -> tuple[Incident, ...]:
        """Those that are not over, those of which nobody was told yet that they are, and those that ended after
        ``moment``; the oldest first."""
        query = select(incidents).where(
            incidents.c.closed_at.is_(None) | incidents.c.next_reminder.is_not(None) | (incidents.c.closed_at > moment)
        )
        return self._records(Incident, query.order_by(incidents.c.id))

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
        query = narrowed(query, (incidents.c.severity, severity), (incidents.c.server, servers))
        if is_open is not None:
            query = query.where(incidents.c.closed_at.is_(None) if is_open else incidents.c.closed_at.is_not(None))
        if before is not None:
            query = query.where(incidents.c.id < before)
        return self._records(Incident, query)

    def changed_since(self, moment: datetime) -> tuple[Incident, ...]:
        """Those that were opened, closed or heard of after ``moment``, the oldest first."""
        query = select(incidents).where((incidents.c.last_at > moment) | (incidents.c.closed_at > moment))
        return self._records(Incident, query.order_by(incidents.c.id))

    def record(self, changed: Sequence[Incident], messages: Sequence[Message], cursors: Mapping[str, int]) -> None:
        """Write incidents, new or not, what is to be sent because of them, and how far was read: all or nothing."""
        with self._database.write() as connection:
            for incident in changed:
                values = row_of(incidents, incident)
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
        found = self._record(Incident, select(incidents).where(one))
        if found is not None and any(getattr(found, name) != text for name, text in now.items()):
            self._do(update(incidents).where(one).values(now))

    def acknowledge(self, incident_id: str, by: str, now: datetime) -> Incident:
        """No reminder of it is sent any more. Raises NotFoundError, RefusedError when it is closed or somebody has done
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
                why = "it is closed" if found.closed_at else f"{found.acknowledged_by} has acknowledged it already"
                raise RefusedError(
                    f"incident {incident_id} needs no acknowledgement: {why}",
                    hint="to list open incidents: backupd alerts",
                )
            return found

    def forget(self, before: datetime) -> None:
        """Remove those that were over before ``before``."""
        self._do(delete(incidents).where(incidents.c.closed_at < before))


def _one(connection: Connection, incident_id: str) -> Incident:
    if (found := first_record(connection, Incident, select(incidents).where(incidents.c.id == incident_id))) is None:
        raise unknown("incident", incident_id, lists="alerts --all")
    return found
