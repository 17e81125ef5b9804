"""Provenance of backups: what this installation committed, and what it only found

Revision: 0012, after 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("backups", sa.Column("found", sa.String(64), nullable=False, server_default=sa.text("''")))
    op.add_column("backups", sa.Column("foreign", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "commits",
        sa.Column("backup_id", sa.String(64), primary_key=True),
        sa.Column("manifest", sa.String(64), nullable=False),
    )
    op.execute("INSERT INTO commits SELECT id, manifest FROM backups WHERE manifest <> ''")


def downgrade() -> None:
    op.drop_table("commits")
    for column in ("foreign", "found"):
        op.drop_column("backups", column)
