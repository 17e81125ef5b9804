"""Hosts, and where each job runs

Revision: 0013, after 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "hosts",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("identity", sa.String(64), nullable=False),
        sa.Column("known_since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("served_at", sa.DateTime(timezone=True)),
    )
    op.add_column("jobs", sa.Column("runs_on", sa.String(80), nullable=False, server_default=sa.text("''")))
    op.drop_index("ix_jobs_state", "jobs")
    op.create_index("ix_jobs_state_runs_on_queued_at_id", "jobs", ["state", "runs_on", "queued_at", "id"])
    op.create_index("ix_jobs_queued_at_id", "jobs", ["queued_at", "id"])
    op.create_index("ix_jobs_previous", "jobs", ["previous"])


def downgrade() -> None:
    op.drop_index("ix_jobs_previous", "jobs")
    op.drop_index("ix_jobs_queued_at_id", "jobs")
    op.drop_index("ix_jobs_state_runs_on_queued_at_id", "jobs")
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.drop_column("jobs", "runs_on")
    op.drop_table("hosts")
