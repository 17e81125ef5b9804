"""Users and access: tokens, sessions, the audit, plans and requests by id, incidents and messages, restores as jobs

Revision: 0007, after 0006
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def _name(name: str, length: int = 64) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=False)


def _moment(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    _access()
    _asked_for()
    _told()
    op.create_table(
        "absences",
        _name("server"),
        _name("job_id"),
        _moment("since"),
        _text("after"),
        sa.PrimaryKeyConstraint("server", name="pk_absences"),
    )
    # Without a batch, in which SQLite would rebuild the table.
    op.add_column("restores", sa.Column("job_id", sa.String(64), nullable=False, server_default=sa.text("''")))
    op.add_column("restores", sa.Column("request", sa.JSON))


def _access() -> None:
    op.create_table(
        "tokens",
        _name("id"),
        _text("name"),
        _name("role", 16),
        _name("digest"),
        sa.Column("servers", sa.JSON),
        _moment("created_at"),
        _text("created_by"),
        _moment("expires_at", nullable=True),
        _moment("revoked_at", nullable=True),
        _text("revoked_by"),
        _moment("last_used_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
    )
    op.create_index("ix_tokens_digest", "tokens", ["digest"], unique=True)
    op.create_table(
        "sessions",
        _name("digest"),
        _name("token_id"),
        _name("csrf"),
        _moment("created_at"),
        _moment("expires_at"),
        _text("address"),
        sa.PrimaryKeyConstraint("digest", name="pk_sessions"),
    )
    op.create_index("ix_sessions_token_id", "sessions", ["token_id"])
    op.create_table(
        "audit",
        sa.Column("number", sa.Integer, autoincrement=True, nullable=False),
        _moment("at"),
        _text("actor"),
        _name("role", 16),
        _name("via", 16),
        _text("address"),
        _name("action"),
        _name("server"),
        _text("subject"),
        _name("outcome", 16),
        _text("detail"),
        _name("digest"),
        sa.PrimaryKeyConstraint("number", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    for statement in _ADD_ONLY[op.get_bind().dialect.name]:
        op.execute(statement)


_ADD_ONLY = {
    "sqlite": [
        f"""
        CREATE TRIGGER audit_no_{word.lower()} BEFORE {word} ON audit
        BEGIN SELECT RAISE(ABORT, 'the audit is only added to'); END"""
        for word in ("UPDATE", "DELETE")
    ],
    "postgresql": [
        """
        CREATE FUNCTION audit_is_only_added_to() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'the audit is only added to'; END $$""",
        """
        CREATE TRIGGER audit_add_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
        FOR EACH STATEMENT EXECUTE FUNCTION audit_is_only_added_to()""",
    ],
}


def _asked_for() -> None:
    op.create_table(
        "plans",
        _name("id"),
        _name("server"),
        _moment("made_at"),
        _text("made_by"),
        _moment("expires_at"),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_plans"),
    )
    op.create_table(
        "requests",
        _name("actor"),
        _name("key", 255),
        _name("digest"),
        _moment("at"),
        sa.Column("status", sa.Integer),
        sa.Column("headers", sa.JSON),
        sa.Column("body", sa.LargeBinary),
        sa.PrimaryKeyConstraint("actor", "key", name="pk_requests"),
    )


def _told() -> None:
    op.create_table(
        "incidents",
        _name("id"),
        _name("kind"),
        _name("server"),
        _text("subject"),
        _name("severity", 16),
        _text("message"),
        _text("detail"),
        _text("hint"),
        _moment("opened_at"),
        _moment("last_at"),
        _count("count"),
        _moment("closed_at", nullable=True),
        _name("job_id"),
        _count("reminders"),
        _moment("next_reminder", nullable=True),
        _text("acknowledged_by"),
        _moment("acknowledged_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_incidents"),
    )
    op.create_index("ix_incidents_closed_at", "incidents", ["closed_at"])
    op.create_index("ix_incidents_server_opened_at", "incidents", ["server", "opened_at"])
    op.create_table(
        "messages",
        _name("id"),
        _text("channel"),
        _name("kind", 16),
        _name("state", 16),
        _name("incident_id"),
        _text("subject"),
        sa.Column("recipients", sa.JSON, nullable=False),
        _text("content"),
        _moment("created_at"),
        _count("attempts"),
        _moment("next_try", nullable=True),
        _moment("sent_at", nullable=True),
        _text("error"),
        sa.PrimaryKeyConstraint("id", name="pk_messages"),
    )
    op.create_index("ix_messages_state_next_try", "messages", ["state", "next_try"])
    op.create_index("ix_messages_incident_id", "messages", ["incident_id"])
    op.create_table("cursors", _name("name"), _count("number"), sa.PrimaryKeyConstraint("name", name="pk_cursors"))


def downgrade() -> None:
    op.drop_column("restores", "request")
    op.drop_column("restores", "job_id")
    for table in ("absences", "cursors", "messages", "incidents", "requests", "plans", "audit", "sessions", "tokens"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_is_only_added_to()")
