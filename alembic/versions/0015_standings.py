"""What is kept of each server: its changes, how it stands, its stock at each destination

Revision: 0015, after 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "server_changes",
        sa.Column("server", sa.String(64), primary_key=True),
        sa.Column("changes", sa.BigInteger(), nullable=False),
        sa.Column("losses", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "server_standings",
        sa.Column("server", sa.String(64), primary_key=True),
        sa.Column("changes", sa.BigInteger(), nullable=False),
        sa.Column("losses", sa.BigInteger(), nullable=False),
        sa.Column("basis", sa.String(64), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
    )
    op.create_table(
        "server_stock",
        sa.Column("destination", sa.String(64), primary_key=True),
        sa.Column("server", sa.String(64), primary_key=True),
        sa.Column("backups", sa.BigInteger(), nullable=False),
        sa.Column("bytes_new", sa.BigInteger(), nullable=False),
        sa.Column("bytes_stored", sa.BigInteger(), nullable=False),
    )
    op.execute(
        "INSERT INTO server_stock (destination, server, backups, bytes_new, bytes_stored)"
        " SELECT copies.destination, backups.server, count(*), sum(backups.bytes_new), max(backups.bytes_stored)"
        " FROM copies JOIN backups ON backups.id = copies.backup_id WHERE copies.state = 'complete'"
        " GROUP BY copies.destination, backups.server"
    )
    # Standings are made of more than a statement can ask: the service makes them, one server after the other.
    op.execute(
        "INSERT INTO server_changes (server, changes, losses) SELECT server, 1, 0 FROM (SELECT server FROM backups"
        " UNION SELECT server FROM binlog_branches UNION SELECT server FROM identities) AS known"
    )
    op.create_index("ix_jobs_group", "jobs", ["server", "kind", "leg", "id"])
    op.create_index("ix_jobs_group_ends", "jobs", ["server", "kind", "leg", "state", "finished_at"])


def downgrade() -> None:
    op.drop_index("ix_jobs_group_ends", "jobs")
    op.drop_index("ix_jobs_group", "jobs")
    for name in ("server_stock", "server_standings", "server_changes"):
        op.drop_table(name)
