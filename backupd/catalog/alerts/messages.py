"""Rows of messages: what is to be sent, what was, and what could not be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.pages import EVER, Span
from backupd.catalog.base.people_tables import messages
from backupd.model.errors import NotFoundError
from backupd.model.incident import Message, MessageKind, MessageState


class Messages:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, message: Message) -> None:
        with self._database.write() as connection:
            insert_messages(connection, [message])

    def get(self, message_id: str) -> Message:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(select(messages).where(messages.c.id == message_id)).mappings().first()
        if row is None:
            raise NotFoundError(f"there is no message {message_id}", hint="`backupd alerts messages` lists them")
        return _message(row)

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
        if state is not None:
            query = query.where(messages.c.state == str(state))
        if incident is not None:
            query = query.where(messages.c.incident_id == incident)
        if before is not None:
            query = query.where(messages.c.id < before)
        return self._messages(query)

    def first_about(self, incident_id: str) -> str:
        """The incident that the first mail about this one is named by, which may have told of several; "" where there
        is none."""
        named = select(messages.c.incident_id).where(messages.c.content.like(f"%<{incident_id}@%"))
        with self._database.read() as connection:
            return str(connection.scalar(named.order_by(messages.c.created_at, messages.c.id).limit(1)) or "")

    def due(self, channel: str, now: datetime, horizon: datetime, limit: int) -> tuple[Message, ...]:
        """Those of ``channel`` to be sent now, the oldest first; also those whose next try lies after ``horizon``, as a
        clock that was ahead has set it."""
        return self._messages(
            select(messages)
            .where(
                messages.c.state == str(MessageState.QUEUED),
                messages.c.channel == channel,
                (messages.c.next_try <= now) | (messages.c.next_try > horizon),
            )
            .order_by(messages.c.created_at, messages.c.id)
            .limit(limit)
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
        with self._database.write() as connection:
            connection.execute(
                update(messages)
                .where(messages.c.id == message.id)
                .values(
                    state=str(message.state),
                    recipients=list(message.recipients),
                    attempts=message.attempts,
                    next_try=message.next_try,
                    sent_at=message.sent_at,
                    error=message.error,
                )
            )

    def hurry(self, now: datetime, channel: str) -> None:
        """What was tried in vain by ``channel`` is tried at once: it works again. What was never tried is due anyway,
        or is just being sent by a command."""
        with self._database.write() as connection:
            connection.execute(
                update(messages)
                .where(
                    messages.c.state == str(MessageState.QUEUED), messages.c.channel == channel, messages.c.attempts > 0
                )
                .values(next_try=now)
            )

    def forget(self, before: datetime) -> None:
        """Remove those that are over and older than ``before``."""
        with self._database.write() as connection:
            connection.execute(
                delete(messages).where(messages.c.created_at < before, messages.c.state != str(MessageState.QUEUED))
            )

    def _messages(self, query: Any) -> tuple[Message, ...]:
        with self._database.read() as connection:
            return tuple(_message(row) for row in connection.execute(query).mappings())


def insert_messages(connection: Connection, found: Sequence[Message]) -> None:
    """Record messages within a transaction of the caller."""
    if found:
        connection.execute(
            insert(messages),
            [
                {
                    **{column.name: getattr(message, column.name) for column in messages.columns},
                    "kind": str(message.kind),
                    "state": str(message.state),
                    "recipients": list(message.recipients),
                }
                for message in found
            ],
        )


def _message(row: RowMapping) -> Message:
    return Message(
        **{
            **row,
            "kind": MessageKind(row["kind"]),
            "state": MessageState(row["state"]),
            "recipients": tuple(row["recipients"]),
        }
    )
