"""Proofs: what they looked at, and whether they still count; which tables a backup lacks

Revision: 0011, after 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("proofs", sa.Column("tables_present", sa.Integer, nullable=False, server_default="0"))
    op.add_column("proofs", sa.Column("not_looked_at", sa.Integer, nullable=False, server_default="0"))
    op.add_column("proofs", sa.Column("withdrawn", sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("backups", sa.Column("missing", sa.JSON(none_as_null=True)))
    op.add_column("backups", sa.Column("doubtful", sa.Text, nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    for column in ("doubtful", "missing"):
        op.drop_column("backups", column)
    for column in ("withdrawn", "not_looked_at", "tables_present"):
        op.drop_column("proofs", column)
