"""The tables of people: who may come in, who did what, what was asked for, who is told; see ``tables``."""

from __future__ import annotations

from sqlalchemy import JSON, Column, Index, Integer, LargeBinary, String, Table

from backupd.catalog.base.tables import FreeText, UtcTime, metadata

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
