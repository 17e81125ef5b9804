"""Indexes by which backups are found by their destination and their time, and the last jobs

Revision: 0014, after 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_DELETED = sa.text("state = 'deleted'")


def upgrade() -> None:
    op.create_index("ix_backups_server_finished_at_id", "backups", ["server", "finished_at", "id"])
    op.drop_index("ix_backups_server_finished_at", "backups")
    op.create_index("ix_backups_finished_at_id", "backups", ["finished_at", "id"])
    op.create_index("ix_copies_destination_backup_id", "copies", ["destination", "backup_id"])
    op.create_index("ix_backups_deleted", "backups", ["id"], sqlite_where=_DELETED, postgresql_where=_DELETED)
    op.create_index(
        "ix_copies_deleted",
        "copies",
        ["destination", "backup_id"],
        sqlite_where=_DELETED,
        postgresql_where=_DELETED,
    )
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"])


def downgrade() -> None:
    for name, table in (
        ("ix_jobs_finished_at", "jobs"),
        ("ix_copies_deleted", "copies"),
        ("ix_backups_deleted", "backups"),
        ("ix_copies_destination_backup_id", "copies"),
        ("ix_backups_finished_at_id", "backups"),
    ):
        op.drop_index(name, table)
    op.create_index("ix_backups_server_finished_at", "backups", ["server", "finished_at"])
    op.drop_index("ix_backups_server_finished_at_id", "backups")
