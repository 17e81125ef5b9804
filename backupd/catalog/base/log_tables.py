"""The tables of binary logs; see ``tables``."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    String,
    Table,
    text,
)

from backupd.catalog.base import people_tables as peopletables  # noqa: F401  its tables belong to the whole
from backupd.catalog.base.tables import FreeText, UtcTime, metadata

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
