"""The tables of the catalog. The only other place that knows columns is ``alembic/versions``.

Nothing points to ``backups`` with a foreign key but its own copies: a proof outlives the backup that it proved, and
a rebuild may meet an increment before its parent.

The tables of people: who may come in, who did what, what was asked for, who is told; see ``tables``.

The tables of binary logs; see ``tables``.

Timed phases in a JSON column.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
    text,
)

from backupd.model.proof import Phase


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


tokens = Table(
    "tokens",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", FreeText, nullable=False),
    Column("role", String(16), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("servers", JSON(none_as_null=True)),
    Column("created_at", UtcTime, nullable=False),
    Column("created_by", FreeText, nullable=False),
    Column("expires_at", UtcTime),
    Column("revoked_at", UtcTime),
    Column("revoked_by", FreeText, nullable=False),
    Column("last_used_at", UtcTime),
    Index(None, "digest", unique=True),
)

sessions = Table(
    "sessions",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("token_id", String(64), nullable=False),
    Column("csrf", String(64), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Column("address", FreeText, nullable=False),
    Index(None, "token_id"),
)
"""Those of the web page. ``digest`` is SHA-256 of what its cookie holds."""

audit = Table(
    "audit",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("at", UtcTime, nullable=False),
    Column("actor", FreeText, nullable=False),
    Column("role", String(16), nullable=False),
    Column("via", String(16), nullable=False),
    Column("address", FreeText, nullable=False),
    Column("action", String(64), nullable=False),
    Column("server", String(64), nullable=False),
    Column("subject", FreeText, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("detail", FreeText, nullable=False),
    Column("digest", String(64), nullable=False),
    Index(None, "at"),
)
"""Only added to: triggers refuse to change or remove a row."""

plans = Table(
    "plans",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("made_at", UtcTime, nullable=False),
    Column("made_by", FreeText, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Column("request", JSON, nullable=False),
    Column("document", JSON, nullable=False),
)
"""Plans that somebody was shown, and may start by their id until they expire."""

requests = Table(
    "requests",
    metadata,
    Column("actor", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("status", Integer),
    Column("headers", JSON(none_as_null=True)),
    Column("body", LargeBinary),
)
"""Answers to requests with an Idempotency-Key; without a status it is still being worked on."""

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

absences = Table(
    "absences",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("job_id", String(64), nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("after", FreeText, nullable=False),
)
"""Servers that a backup took out of rotation, and the program that brings each back; gone once that has run."""


every_table = metadata
"""All tables of the catalog: those of ``tables``, of ``peopletables`` and these."""

binlog_branches = Table(
    "binlog_branches",
    metadata,
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
    return tuple(
        Column(name, BigInteger, primary_key=True, autoincrement=False)
        for name in ("branch", "number", "start_pos", "end_pos")
    )


LOOSE = text("(binlog_segments.ending = 'open' OR binlog_segments.start_pos > 0)")
"""Segments that are not a whole file. Written into queries as it stands here, since only then an index is used that
holds nothing but those."""

binlog_segments = Table(
    "binlog_segments",
    metadata,
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
    Index(
        "ix_binlog_segments_loose",
        "branch",
        "number",
        "start_pos",
        sqlite_where=text("ending = 'open' OR start_pos > 0"),
        postgresql_where=text("ending = 'open' OR start_pos > 0"),
    ),
)

binlog_copies = Table(
    "binlog_copies",
    metadata,
    *_piece(),
    Column("destination", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("verified_at", UtcTime),
    ForeignKeyConstraint(
        ["branch", "number", "start_pos", "end_pos"],
        [f"binlog_segments.{name}" for name in ("branch", "number", "start_pos", "end_pos")],
        ondelete="CASCADE",
    ),
)

binlog_runs = Table(
    "binlog_runs",
    metadata,
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
    "binlog_confirmed",
    metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("destination", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("pos", BigInteger, nullable=False),
    Column("at", UtcTime, nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
)

binlog_gaps = Table(
    "binlog_gaps",
    metadata,
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
    "binlog_lags",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("hour", UtcTime, primary_key=True),
    Column("seconds", Float, nullable=False),
    Column("at", UtcTime, nullable=False),
)

binlog_streams = Table(
    "binlog_streams",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("status", JSON, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
)


def phases_json(phases: Iterable[Phase]) -> list[dict[str, Any]]:
    """Exact, unlike ``Phase.as_json``, which rounds for readers."""
    return [{"name": phase.name, "seconds": phase.seconds, "bytes": phase.bytes} for phase in phases]


def phases_from(column: Iterable[dict[str, Any]]) -> tuple[Phase, ...]:
    return tuple(Phase(item["name"], float(item["seconds"]), int(item["bytes"])) for item in column)
