"""The tables of the catalog. The only other place that knows columns is ``alembic/versions``.

Nothing points to ``backups`` with a foreign key but its own copies: a proof outlives the backup that it proved, and
a rebuild may meet an increment before its parent.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
    text,
)


class UtcTime(TypeDecorator[datetime]):
    """Aware datetimes in, aware datetimes in UTC out, microseconds kept.

    SQLite has no zones: there the column holds the UTC clock as text, which sorts by time. PostgreSQL returns
    ``timestamptz`` in the zone of the session, so it is brought back to UTC.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a moment needs a time zone")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


class FreeText(TypeDecorator[str]):
    """Text of programs and file names, which may hold what a database refuses.

    PostgreSQL stores no NUL, and neither database stores the lone surrogates by which Python carries bytes that are
    not UTF-8: both are written out (``\\x00``, ``\\udcff``) instead of failing the record of a failure.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002  the signature is SQLAlchemy's
        if value is None:
            return None
        return value.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    }
)


def _position() -> tuple[Column[Any], ...]:
    return (
        Column("position_file", FreeText, nullable=False),
        Column("position_pos", BigInteger, nullable=False),
        Column("position_gtid", FreeText, nullable=False),
    )


backups = Table(
    "backups",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("state", String(32), nullable=False),
    Column("parent", String(64)),
    Column("started_at", UtcTime, nullable=False),
    Column("finished_at", UtcTime, nullable=False),
    Column("bytes_source", BigInteger, nullable=False),
    Column("bytes_stored", BigInteger, nullable=False),
    Column("bytes_new", BigInteger, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("files_linked", BigInteger, nullable=False),
    *_position(),
    Column("flavour", String(32), nullable=False),
    Column("server_version", FreeText, nullable=False),
    Column("tool_version", FreeText, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("warnings", JSON, nullable=False),
    Column("from_lsn", BigInteger, nullable=False, server_default="0"),
    Column("to_lsn", BigInteger, nullable=False, server_default="0"),
    Column("server_uuid", FreeText, nullable=False, server_default=text("''")),
    Column("reason", FreeText, nullable=False, server_default=text("''")),
    Column("table_set", String(64), nullable=False, server_default=text("''")),
    Column("tables_missing", BigInteger, nullable=False, server_default="0"),
    Column("manifest", String(64), nullable=False, server_default=text("''")),
    Column("missing", JSON(none_as_null=True)),
    Column("doubtful", FreeText, nullable=False, server_default=text("''")),
    Column("found", String(64), nullable=False, server_default=text("''")),
    Column("foreign", Boolean, nullable=False, server_default=false()),
    Index(None, "server", "finished_at"),
)

commits = Table(
    "commits",
    metadata,
    Column("backup_id", String(64), primary_key=True),
    Column("manifest", String(64), nullable=False),
)
"""Every backup that is ours, by its manifest: written right before it is committed, or when it is adopted. It outlives
the row in ``backups``, which a run that died never wrote, or which goes with a destination that is not configured."""

identities = Table(
    "identities",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("uuid", String(64), primary_key=True),
    Column("verdict", String(16), nullable=False),
    Column("server_id", BigInteger, nullable=False),
    Column("evidence", FreeText, nullable=False),
    Column("address", FreeText, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("seen_at", UtcTime, nullable=False),
    Column("accepted_by", FreeText, nullable=False),
)
"""Who answered under a server's name; see ``recovery.lineage``."""

copies = Table(
    "copies",
    metadata,
    Column("backup_id", String(64), ForeignKey("backups.id", ondelete="CASCADE"), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("state", String(32), nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("verified_at", UtcTime),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("server", String(64), nullable=False),
    Column("state", String(32), nullable=False),
    Column("started_at", UtcTime),
    Column("finished_at", UtcTime),
    Column("message", FreeText, nullable=False),
    Column("detail", FreeText, nullable=False),
    Column("hint", FreeText, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("phases", JSON, nullable=False),
    Column("owner", FreeText, nullable=False),
    Column("queued_at", UtcTime, nullable=False),
    Column("due_at", UtcTime),
    Column("not_before", UtcTime),
    Column("attempt", BigInteger, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("leg", String(64), nullable=False),
    Column("requested_by", FreeText, nullable=False),
    Column("arguments", JSON, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("heartbeat_at", UtcTime),
    Column("cancel_by", FreeText, nullable=False),
    Column("progress", JSON(none_as_null=True)),
    Column("result", FreeText, nullable=False),
    Index(None, "server", "started_at"),
    Index(None, "server", "queued_at"),
    Index(None, "state"),
)

schedules = Table(
    "schedules",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("leg", String(64), primary_key=True),
    Column("cadence", FreeText, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("handled", UtcTime, nullable=False),
)

holds = Table(
    "holds",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("reason", FreeText, nullable=False),
    Column("set_by", FreeText, nullable=False),
    Column("since", UtcTime, nullable=False),
)

challenges = Table(
    "challenges",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("name", FreeText, nullable=False),
    Column("issued_at", UtcTime, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("answered_at", UtcTime),
    Column("answered_by", FreeText, nullable=False),
    Index(None, "fingerprint", "issued_at"),
)

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

restores = Table(
    "restores",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("backup_id", String(64), nullable=False),
    Column("target", FreeText, nullable=False),
    Column("datadir", FreeText, nullable=False),
    Column("state", String(32), nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("finished_at", UtcTime),
    Column("phases", JSON, nullable=False),
    Column("error", FreeText, nullable=False),
    Column("owner", FreeText, nullable=False),
    Column("job_id", String(64), nullable=False, server_default=text("''")),
    Column("request", JSON(none_as_null=True)),
    Index(None, "server", "started_at"),
    Index(None, "state"),
)

proofs = Table(
    "proofs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("backup_id", String(64), nullable=False),
    Column("target", FreeText, nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("finished_at", UtcTime, nullable=False),
    Column("phases", JSON, nullable=False),
    Column("checks", JSON, nullable=False),
    Column("tables_compared", Integer, nullable=False),
    Column("error", FreeText, nullable=False),
    Column("warnings", JSON),
    Column("older", Boolean),
    Column("tables_present", Integer, nullable=False, server_default="0"),
    Column("not_looked_at", Integer, nullable=False, server_default="0"),
    Column("withdrawn", FreeText, nullable=False, server_default=text("''")),
    Index(None, "server", "finished_at"),
    Index(None, "backup_id"),
)

witnesses = Table(
    "witnesses",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("backup_id", String(64)),
    Column("taken_at", UtcTime, nullable=False),
    *_position(),
    Column("seconds", Float, nullable=False),
    Column("payload", JSON, nullable=False),
    Index(None, "server", "taken_at"),
    Index(None, "backup_id"),
)

replications = Table(
    "replications",
    metadata,
    Column("backup_id", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("not_before", UtcTime),
    Column("since", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    Column("bytes_total", BigInteger, nullable=False),
    Column("bytes_done", BigInteger, nullable=False),
    Column("message", FreeText, nullable=False),
)
"""Backups that are not at a destination yet where they belong. Rows of those that have arrived are gone."""

thaws = Table(
    "thaws",
    metadata,
    Column("thaw_id", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("key", String(512), primary_key=True),
    Column("part", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("storage_class", String(32), nullable=False),
    Column("tier", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("requested_at", UtcTime),
    Column("expected_at", UtcTime),
    Column("ready_until", UtcTime),
    Column("message", FreeText, nullable=False),
    Index(None, "thaw_id", "state"),
)
"""Objects that a job, ``thaw_id``, asks for out of an archive class. The same object may be in several."""

scrubs = Table(
    "scrubs",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("share", Integer, primary_key=True, autoincrement=False),
    Column("done_at", UtcTime, nullable=False),
)
"""When each share of what is stored of a server was last read again at a destination. Shares below 0 are samples out of
archive classes."""

marks = Table(
    "marks",
    metadata,
    Column("destination", String(64), primary_key=True),
    Column("server", String(64), primary_key=True),
    Column("backup_id", String(64), primary_key=True),
    Column("since", UtcTime, nullable=False),
    Column("stored_at", UtcTime),
    Column("ours", Boolean, nullable=False),
    Column("confirmed", Boolean, nullable=False),
)
"""Marks of deletion at destinations, as this installation knows them by itself. ``since`` by its clock; ``stored_at``
as the place says, None until it was asked."""

deposits = Table(
    "deposits",
    metadata,
    Column("destination", String(64), primary_key=True),
    Column("key", String(512), primary_key=True),
    Column("sha256", String(64), nullable=False),
)
"""What this installation put of proofs and witnesses at destinations."""

identity = Table(
    "identity",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("id", String(12), nullable=False),
)
"""One row: which catalog this is, among all that its installation ever had."""
