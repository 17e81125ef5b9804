"""Which member of a group a backup was taken from

Revision: 0018, after 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("backups", sa.Column("member", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    op.drop_column("backups", "member")
