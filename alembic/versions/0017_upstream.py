"""Of a backup of a replica: the position of the source that it followed

Revision: 0017, after 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("backups", sa.Column("upstream", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    op.drop_column("backups", "upstream")
