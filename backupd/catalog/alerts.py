"""What happened, what is wrong because of it, and who is notified: events, incidents, messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Index,
    Integer,
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
    insert_all,
    metadata,
    narrowed,
    number_of,
    row_of,
    write_row,
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

    def add(self, *found: Event) -> None:
        """Append events, all or none; their numbers are the next ones."""
        if found:
            with self._database.write() as connection:
                insert_all(connection, events, found)

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
        query = narrowed(
            span.of(select(events), events.c.at).order_by(events.c.number.desc()).limit(limit + 1),
            (events.c.server, servers),
            (events.c.job_id, job_id),
            (events.c.kind, kind),
            (events.c.severity, severity),
        )
        if after is not None:
            query = query.where(events.c.number < number_of(after))
        return Listed.of(self._records(Event, query), limit, lambda event: str(event.number))

    def since(self, number: int, *, limit: int = 1000) -> tuple[Event, ...]:
        """Those with a higher number, oldest first."""
        query = select(events).where(events.c.number > number).order_by(events.c.number).limit(limit)
        return self._records(Event, query)

    def newest(self) -> int:
        """The highest number that was given, 0 for none."""
        return int(self._scalar(select(func.max(events.c.number))) or 0)

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


class Messages(Rows):
    """Messages: what is to be sent, what was, and what could not be."""

    def add(self, message: Message) -> None:
        """Record a message that is to be sent."""
        self._do(insert(messages).values(row_of(messages, message)))

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
        """The incident that the first mail about this one is named by; that mail may be about several. "" where
        there is none."""
        named = select(messages.c.incident_id).where(messages.c.content.like(f"%<{incident_id}@%"))
        return str(self._scalar(named.order_by(messages.c.created_at, messages.c.id).limit(1)) or "")

    def due(self, channel: str, now: datetime, horizon: datetime, limit: int) -> tuple[Message, ...]:
        """Those of ``channel`` to be sent now, the oldest first; also those whose next try is after ``horizon``, as a
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
        return {str(channel): int(count) for channel, count in self._rows(query)}

    def made_since(self, moment: datetime, kinds: Collection[MessageKind]) -> int:
        """How many of these kinds were made since then; one that goes to several channels counts once."""
        query = select(func.count(messages.c.created_at.distinct())).where(
            messages.c.created_at > moment, messages.c.kind.in_([str(kind) for kind in kinds])
        )
        return int(self._scalar(query))

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


class Cursors(Rows):
    """Cursors: how far somebody has read the events, and other numbers that outlive a process."""

    def all(self) -> Mapping[str, int]:
        """Each number by the name of its cursor."""
        return {str(row.name): int(row.number) for row in self._rows(select(cursors))}

    def move(self, numbers: Mapping[str, int]) -> None:
        """Set these cursors, all or none; one that is new begins."""
        with self._database.write() as connection:
            for name, number in numbers.items():
                write_row(connection, cursors, {"name": name, "number": number})


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
        """Those that are not over, those whose end nobody was notified of yet, and those that ended after
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

    def record(self, changed: Sequence[Incident], notifications: Sequence[Message], read: Mapping[str, int]) -> None:
        """Write incidents, new or not, what is to be sent because of them, and how far was read: all or nothing."""
        with self._database.write() as connection:
            for incident in changed:
                write_row(
                    connection, incidents, row_of(incidents, incident), once=("acknowledged_by", "acknowledged_at")
                )
            insert_all(connection, messages, notifications)
            for name, number in read.items():
                write_row(connection, cursors, {"name": name, "number": number})

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
