"""Whether replicas hold what their sources do: the checks, and the flags of backups and proofs

Revision: 0019, after 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "consistency_checks",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("server", sa.String(64), nullable=False),
        sa.Column("replica", sa.String(64), nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("tool", sa.String(32), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("equal", sa.JSON, nullable=False),
        sa.Column("different", sa.JSON, nullable=False),
        sa.Column("unchecked", sa.JSON, nullable=False),
        sa.Column("errant", sa.JSON, nullable=False),
        sa.Column("errant_unchecked", sa.Text, nullable=False),
    )
    op.create_index("ix_consistency_checks_server_finished_at", "consistency_checks", ["server", "finished_at"])
    for table in ("backups", "proofs"):
        op.add_column(table, sa.Column("flags", sa.JSON, nullable=False, server_default=sa.text("'[]'")))


def downgrade() -> None:
    for table in ("proofs", "backups"):
        op.drop_column(table, "flags")
    op.drop_table("consistency_checks")
