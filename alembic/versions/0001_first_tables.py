"""backups, copies, jobs, restores, proofs, witnesses

Revision: 0001, the first
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _name(name: str, length: int = 64) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _json(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.JSON, nullable=False)


def upgrade() -> None:
    op.create_table(
        "backups",
        _name("id"),
        _name("server"),
        _name("kind", 32),
        _name("state", 32),
        sa.Column("parent", sa.String(64)),
        _time("started_at"),
        _time("finished_at"),
        _number("bytes_source"),
        _number("bytes_stored"),
        _number("bytes_new"),
        _number("files"),
        _number("files_linked"),
        _text("position_file"),
        _number("position_pos"),
        _text("position_gtid"),
        _name("flavour", 32),
        _text("server_version"),
        _text("tool_version"),
        sa.Column("pinned", sa.Boolean, nullable=False),
        _json("warnings"),
        sa.PrimaryKeyConstraint("id", name="pk_backups"),
    )
    op.create_index("ix_backups_server_finished_at", "backups", ["server", "finished_at"])
    op.create_table(
        "copies",
        _name("backup_id"),
        _name("destination"),
        _name("state", 32),
        _time("stored_at"),
        _time("verified_at", nullable=True),
        sa.PrimaryKeyConstraint("backup_id", "destination", name="pk_copies"),
        sa.ForeignKeyConstraint(["backup_id"], ["backups.id"], ondelete="CASCADE", name="fk_copies_backup_id_backups"),
    )
    op.create_table(
        "jobs",
        _name("id"),
        _name("kind"),
        _name("server"),
        _name("state", 32),
        _time("started_at"),
        _time("finished_at", nullable=True),
        _text("message"),
        _text("detail"),
        _text("hint"),
        _number("bytes"),
        _json("phases"),
        _text("owner"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_server_started_at", "jobs", ["server", "started_at"])
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_table(
        "restores",
        _name("id"),
        _name("server"),
        _name("backup_id"),
        _text("target"),
        _text("datadir"),
        _name("state", 32),
        _time("started_at"),
        _time("finished_at", nullable=True),
        _json("phases"),
        _text("error"),
        _text("owner"),
        sa.PrimaryKeyConstraint("id", name="pk_restores"),
    )
    op.create_index("ix_restores_server_started_at", "restores", ["server", "started_at"])
    op.create_index("ix_restores_state", "restores", ["state"])
    op.create_table(
        "proofs",
        _name("id"),
        _name("server"),
        _name("backup_id"),
        _text("target"),
        _name("outcome", 32),
        _time("started_at"),
        _time("finished_at"),
        _json("phases"),
        _json("checks"),
        sa.Column("tables_compared", sa.Integer, nullable=False),
        _text("error"),
        sa.PrimaryKeyConstraint("id", name="pk_proofs"),
    )
    op.create_index("ix_proofs_server_finished_at", "proofs", ["server", "finished_at"])
    op.create_index("ix_proofs_backup_id", "proofs", ["backup_id"])
    op.create_table(
        "witnesses",
        _name("id"),
        _name("server"),
        sa.Column("backup_id", sa.String(64)),
        _time("taken_at"),
        _text("position_file"),
        _number("position_pos"),
        _text("position_gtid"),
        sa.Column("seconds", sa.Float, nullable=False),
        _json("payload"),
        sa.PrimaryKeyConstraint("id", name="pk_witnesses"),
    )
    op.create_index("ix_witnesses_server_taken_at", "witnesses", ["server", "taken_at"])
    op.create_index("ix_witnesses_backup_id", "witnesses", ["backup_id"])


def downgrade() -> None:
    for table in ("witnesses", "proofs", "restores", "jobs", "copies", "backups"):
        op.drop_table(table)
