"""What a backup of a Galera node records of its cluster; what nodes were seen to be, and forecasts of how they rejoin

Revision: 0016, after 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("backups", sa.Column("node", sa.JSON()))
    op.create_table(
        "node_samples",
        sa.Column("server", sa.String(64), primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True), primary_key=True),
        sa.Column("uuid", sa.String(64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("state", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("downto", sa.BigInteger()),
        sa.Column("written_bytes", sa.BigInteger(), nullable=False),
        sa.Column("gcache_bytes", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "rejoins",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("server", sa.String(64), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("uuid", sa.String(64), nullable=False),
        sa.Column("seqno", sa.BigInteger(), nullable=False),
        sa.Column("forecast", sa.String(32), nullable=False),
        sa.Column("donor", sa.String(64), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True)),
        sa.Column("predicted_seconds", sa.Float()),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("came", sa.String(32), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
    )
    op.create_index("ix_rejoins_uuid_began_at", "rejoins", ["uuid", "began_at"])


def downgrade() -> None:
    op.drop_index("ix_rejoins_uuid_began_at", "rejoins")
    op.drop_table("rejoins")
    op.drop_table("node_samples")
    op.drop_column("backups", "node")
