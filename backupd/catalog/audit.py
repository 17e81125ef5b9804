"""Rows of the audit: who did what. Rows are only added, which triggers see to, and each one's digest covers the one
before it, so that whoever gets past the triggers shows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass, fields, replace
from datetime import datetime

from sqlalchemy import Connection, insert, select
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.pages import EVER, Span
from backupd.catalog.base.tables import audit
from backupd.model.access import AuditEntry
from backupd.model.text import format_time

_BATCH = 500


@dataclass(frozen=True, slots=True)
class Verified:
    """``entries``: how many there are; ``digest``: of the newest one, which may be noted elsewhere; ``problems``: where
    the chain is broken, one line each."""

    entries: int
    digest: str
    problems: tuple[str, ...]


class Audit:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, entry: AuditEntry) -> AuditEntry:
        """Gives it as it was written: with its number and digest."""
        with self._database.write() as connection:
            if not self._database.sqlite:  # there BEGIN IMMEDIATE keeps others out
                connection.exec_driver_sql("LOCK TABLE audit IN EXCLUSIVE MODE")
            last = connection.execute(
                select(audit.c.number, audit.c.digest).order_by(audit.c.number.desc()).limit(1)
            ).first()
            number, before = (last.number, last.digest) if last is not None else (0, "")
            numbered = replace(_storable(entry), number=number + 1)
            written = replace(numbered, digest=chained(before, numbered))
            connection.execute(
                insert(audit).values({field.name: getattr(written, field.name) for field in fields(written)})
            )
        return written

    def list(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        server: str | None = None,
        subject: str | None = None,
        outcome: str | None = None,
        span: Span = EVER,
        before: int | None = None,
        limit: int | None = None,
    ) -> tuple[AuditEntry, ...]:
        """Newest first; ``before``: only those with a lower number."""
        query = span.of(select(audit), audit.c.at).order_by(audit.c.number.desc()).limit(limit)
        for column, wanted in (
            (audit.c.actor, actor),
            (audit.c.action, action),
            (audit.c.server, server),
            (audit.c.subject, subject),
            (audit.c.outcome, outcome),
        ):
            if wanted is not None:
                query = query.where(column == wanted)
        if before is not None:
            query = query.where(audit.c.number < before)
        with self._database.read() as connection:
            return tuple(_entry(row) for row in connection.execute(query).mappings())

    def verify(self) -> Verified:
        """Follow the chain from its first entry. What was cut off at its end does not show here: compare ``digest``
        with one that was noted before."""
        problems: list[str] = []
        number, digest = 0, ""
        with self._database.read() as connection:
            while rows := self._after(connection, number):
                for entry in rows:
                    if entry.number != number + 1:
                        problems.append(f"entries {number + 1} to {entry.number - 1} are missing")
                    elif entry.digest != chained(digest, replace(entry, digest="")):
                        problems.append(f"entry {entry.number} was altered, or stands in another's place")
                    number, digest = entry.number, entry.digest
        return Verified(number, digest, tuple(problems))

    @staticmethod
    def _after(connection: Connection, number: int) -> tuple[AuditEntry, ...]:
        query = select(audit).where(audit.c.number > number).order_by(audit.c.number).limit(_BATCH)
        return tuple(_entry(row) for row in connection.execute(query).mappings())


def chained(before: str, entry: AuditEntry) -> str:
    """The digest of ``entry``, which has none yet, after an entry with the digest ``before``."""
    values = [format_time(value) if isinstance(value, datetime) else value for value in astuple(entry)]
    return hashlib.sha256(json.dumps([before, *values]).encode()).hexdigest()


def _storable(entry: AuditEntry) -> AuditEntry:
    """As the database gives it back: what it cannot hold is written out, as in ``FreeText``, and long names are cut."""

    def text(value: str, limit: int | None = None) -> str:
        return value.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")[:limit]

    return replace(
        entry,
        actor=text(entry.actor),
        role=text(entry.role, 16),
        via=text(entry.via, 16),
        action=text(entry.action, 64),
        server=text(entry.server, 64),
        subject=text(entry.subject),
        outcome=text(entry.outcome, 16),
        detail=text(entry.detail),
        address=text(entry.address),
        digest="",
    )


def _entry(row: RowMapping) -> AuditEntry:
    return AuditEntry(**row)
