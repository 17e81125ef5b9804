"""The tables of jobs and of the schedules that queue them."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Index, String, Table, text

from backupd.catalog.row_mapping import FreeText, UtcTime, metadata

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
    Column("runs_on", String(80), nullable=False, server_default=text("''")),
    Index(None, "server", "started_at"),
    Index(None, "server", "queued_at"),
    Index(None, "state", "runs_on", "queued_at", "id"),
    Index(None, "queued_at", "id"),
    Index(None, "previous"),
    Index(None, "finished_at"),
    Index("ix_jobs_group", "server", "kind", "leg", "id"),
    Index("ix_jobs_group_ends", "server", "kind", "leg", "state", "finished_at"),
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
