"""Logical backups: the set of tables that was dumped, and how many tables of it are missing

Revision: 0004, after 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # With defaults, and without a batch: SQLite would rebuild the table, and every row of `copies` would go with it.
    op.add_column("backups", sa.Column("table_set", sa.String(64), nullable=False, server_default=sa.text("''")))
    op.add_column("backups", sa.Column("tables_missing", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    for column in ("table_set", "tables_missing"):
        op.drop_column("backups", column)
