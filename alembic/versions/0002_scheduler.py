"""The scheduler: queued jobs with leases, schedules, holds, key challenges, events; chains; copies that expire

Revision: 0002, after 0001
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def _text(name: str, default: str | None = None) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


def _name(name: str, length: int = 64, default: str | None = None) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False, server_default=default)


def _number(name: str, default: str | None = None) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=default)


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


_NEW_IN_JOBS = (
    _number("attempt", "1"),
    _name("previous", default=""),
    _name("leg", default=""),
    _text("requested_by", ""),
    sa.Column("arguments", sa.JSON, nullable=False, server_default="{}"),
    _number("token", "0"),
    _text("cancel_by", ""),
    _text("result", ""),
)
"""With a default for the rows that are there; every new row says all of them."""


def upgrade() -> None:
    # Added one by one: a batch would make SQLite rebuild the table, and dropping the old one takes every row of
    # `copies` with it (ON DELETE CASCADE). So these keep their defaults.
    for column in (_number("from_lsn", "0"), _number("to_lsn", "0"), _text("server_uuid", ""), _text("reason", "")):
        op.add_column("backups", column)
    with op.batch_alter_table("jobs") as batch:
        batch.alter_column("started_at", existing_type=sa.DateTime(timezone=True), nullable=True)
        for name in ("queued_at", "due_at", "not_before", "heartbeat_at"):
            batch.add_column(_time(name, nullable=True))
        batch.add_column(sa.Column("progress", sa.JSON))
        for column in _NEW_IN_JOBS:
            batch.add_column(column)
    op.execute("UPDATE jobs SET queued_at = started_at")
    with op.batch_alter_table("jobs") as batch:
        batch.alter_column("queued_at", existing_type=sa.DateTime(timezone=True), nullable=False)
        for column in _NEW_IN_JOBS:
            batch.alter_column(column.name, existing_type=column.type, server_default=None)
    op.create_index("ix_jobs_server_queued_at", "jobs", ["server", "queued_at"])
    op.create_table(
        "schedules",
        _name("server"),
        _name("leg"),
        _text("cadence"),
        _time("since"),
        _time("handled"),
        sa.PrimaryKeyConstraint("server", "leg", name="pk_schedules"),
    )
    op.create_table(
        "holds",
        _name("server"),
        _name("kind", 16),
        _text("reason"),
        _text("set_by"),
        _time("since"),
        sa.PrimaryKeyConstraint("server", "kind", name="pk_holds"),
    )
    op.create_table(
        "challenges",
        _name("id"),
        _name("fingerprint"),
        _text("name"),
        _time("issued_at"),
        _name("digest"),
        _time("answered_at", nullable=True),
        _text("answered_by"),
        sa.PrimaryKeyConstraint("id", name="pk_challenges"),
    )
    op.create_index("ix_challenges_fingerprint_issued_at", "challenges", ["fingerprint", "issued_at"])
    op.create_table(
        "events",
        sa.Column("number", sa.Integer, autoincrement=True, nullable=False),
        _time("at"),
        _name("kind"),
        _name("severity", 16),
        _name("server"),
        _text("subject"),
        _text("message"),
        _text("detail"),
        _text("hint"),
        _name("job_id"),
        sa.PrimaryKeyConstraint("number", name="pk_events"),
    )
    op.create_index("ix_events_server_at", "events", ["server", "at"])
    op.create_index("ix_events_kind_at", "events", ["kind", "at"])


def downgrade() -> None:
    for table in ("events", "challenges", "holds", "schedules"):
        op.drop_table(table)
    op.drop_index("ix_jobs_server_queued_at", "jobs")
    op.execute("DELETE FROM jobs WHERE started_at IS NULL")
    with op.batch_alter_table("jobs") as batch:
        for column in (
            "queued_at",
            "due_at",
            "not_before",
            "attempt",
            "previous",
            "leg",
            "requested_by",
            "arguments",
            "token",
            "heartbeat_at",
            "cancel_by",
            "progress",
            "result",
        ):
            batch.drop_column(column)
        batch.alter_column("started_at", existing_type=sa.DateTime(timezone=True), nullable=False)
    for column in ("from_lsn", "to_lsn", "server_uuid", "reason"):
        op.drop_column("backups", column)
