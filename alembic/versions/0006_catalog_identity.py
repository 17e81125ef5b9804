"""The identity of a catalog: an id by which its copies are told from those of a catalog that it replaced

Revision: 0006, after 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "identity",
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("id", sa.String(12), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_identity"),
    )


def downgrade() -> None:
    op.drop_table("identity")
