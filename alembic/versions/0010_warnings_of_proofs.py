"""Proofs: what a test restore warned of, and whether it was older than what was known to exist

Revision: 0010, after 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("proofs") as table:
        table.add_column(sa.Column("warnings", sa.JSON))
        table.add_column(sa.Column("older", sa.Boolean))


def downgrade() -> None:
    with op.batch_alter_table("proofs") as table:
        table.drop_column("older")
        table.drop_column("warnings")
