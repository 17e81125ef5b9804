"""Which server a consistency check compared, and why one was not compared at all

Revision: 0020, after 0019
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_COLUMNS = (("replica_uuid", sa.String(64)), ("replica_made", sa.String(64)), ("trouble", sa.Text))


def upgrade() -> None:
    for name, kind in _COLUMNS:
        op.add_column("consistency_checks", sa.Column(name, kind, nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    for name, _kind in reversed(_COLUMNS):
        op.drop_column("consistency_checks", name)
