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
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
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


metadata = MetaData(naming_convention={
    "pk": "pk_%(table_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
})


def _position() -> tuple[Column[Any], ...]:
    return (Column("position_file", FreeText, nullable=False), Column("position_pos", BigInteger, nullable=False),
            Column("position_gtid", FreeText, nullable=False))


backups = Table(
    "backups", metadata,
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
    Index(None, "server", "finished_at"),
)

copies = Table(
    "copies", metadata,
    Column("backup_id", String(64), ForeignKey("backups.id", ondelete="CASCADE"), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("state", String(32), nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("verified_at", UtcTime),
)

jobs = Table(
    "jobs", metadata,
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
    "schedules", metadata,
    Column("server", String(64), primary_key=True),
    Column("leg", String(64), primary_key=True),
    Column("cadence", FreeText, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("handled", UtcTime, nullable=False),
)

holds = Table(
    "holds", metadata,
    Column("server", String(64), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("reason", FreeText, nullable=False),
    Column("set_by", FreeText, nullable=False),
    Column("since", UtcTime, nullable=False),
)

challenges = Table(
    "challenges", metadata,
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
    "events", metadata,
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
    "restores", metadata,
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
    Index(None, "server", "started_at"),
    Index(None, "state"),
)

proofs = Table(
    "proofs", metadata,
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
    Index(None, "server", "finished_at"),
    Index(None, "backup_id"),
)

witnesses = Table(
    "witnesses", metadata,
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

binlog_branches = Table(
    "binlog_branches", metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("server", String(64), nullable=False),
    Column("id", String(64), nullable=False),
    Column("noticed_at", UtcTime, nullable=False),
    Column("reason", String(32), nullable=False),
    Column("server_uuid", FreeText, nullable=False),
    Column("flavour", String(32), nullable=False),
    Column("basename", FreeText, nullable=False),
    Column("first_number", BigInteger, nullable=False),
    Column("since", UtcTime),
    Column("parent", String(64)),
    Column("fork", JSON(none_as_null=True)),
    Column("names_go_on", Boolean, nullable=False),
    Column("note", FreeText, nullable=False),
    Column("baseline", FreeText, nullable=False),
    Index(None, "server", "id", unique=True),
)
"""``number`` stands for (server, id) in the tables below, which have very many rows."""


def _piece() -> tuple[Column[Any], ...]:
    return tuple(Column(name, BigInteger, primary_key=True, autoincrement=False)
                 for name in ("branch", "number", "start_pos", "end_pos"))


LOOSE = text("(binlog_segments.ending = 'open' OR binlog_segments.start_pos > 0)")
"""Segments that are not a whole file. Written into queries as it stands here, since only then an index is used that
holds nothing but those."""

binlog_segments = Table(
    "binlog_segments", metadata,
    *_piece(),
    Column("file", FreeText, nullable=False),
    Column("ending", String(16), nullable=False),
    Column("gtids_before", FreeText, nullable=False),
    Column("gtids_after", FreeText, nullable=False),
    Column("transactions", BigInteger, nullable=False),
    Column("first_at", UtcTime),
    Column("last_at", UtcTime),
    Column("precise", Boolean, nullable=False),
    Column("server_ids", JSON, nullable=False),
    Column("flavour", String(32), nullable=False),
    Column("server_version", FreeText, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("remarks", JSON, nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
    Index(None, "branch", "number", "start_pos", "last_at"),
    Index("ix_binlog_segments_loose", "branch", "number", "start_pos",
          sqlite_where=text("ending = 'open' OR start_pos > 0"),
          postgresql_where=text("ending = 'open' OR start_pos > 0")),
)

binlog_copies = Table(
    "binlog_copies", metadata,
    *_piece(),
    Column("destination", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("verified_at", UtcTime),
    ForeignKeyConstraint(
        ["branch", "number", "start_pos", "end_pos"],
        [f"binlog_segments.{name}" for name in ("branch", "number", "start_pos", "end_pos")], ondelete="CASCADE"),
)

binlog_runs = Table(
    "binlog_runs", metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("destination", String(64), primary_key=True),
    Column("first_number", BigInteger, primary_key=True, autoincrement=False),
    Column("last_number", BigInteger, nullable=False),
    Column("last_pos", BigInteger, nullable=False),
    Column("gtids_before", FreeText, nullable=False),
    Column("gtids_after", FreeText, nullable=False),
    Column("first_at", UtcTime),
    Column("last_at", UtcTime),
    Column("size", BigInteger, nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("segments", BigInteger, nullable=False),
    Column("transactions", BigInteger, nullable=False),
    Column("remarks", JSON, nullable=False),
    Column("ending", String(16), nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
)
"""Whole files only: the few pieces of files that grow are folded in when somebody reads."""

binlog_confirmed = Table(
    "binlog_confirmed", metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("destination", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("pos", BigInteger, nullable=False),
    Column("at", UtcTime, nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
)

binlog_gaps = Table(
    "binlog_gaps", metadata,
    Column("server", String(64), primary_key=True),
    Column("branch", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("after_file", FreeText, primary_key=True),
    Column("after_pos", BigInteger, primary_key=True, autoincrement=False),
    Column("after_gtid", FreeText, nullable=False),
    Column("before", JSON(none_as_null=True)),
    Column("from_at", UtcTime),
    Column("to_at", UtcTime),
    Column("reason", FreeText, nullable=False),
    Column("noticed_at", UtcTime, nullable=False),
)

binlog_lags = Table(
    "binlog_lags", metadata,
    Column("server", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("hour", UtcTime, primary_key=True),
    Column("seconds", Float, nullable=False),
    Column("at", UtcTime, nullable=False),
)

binlog_streams = Table(
    "binlog_streams", metadata,
    Column("server", String(64), primary_key=True),
    Column("status", JSON, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
)
