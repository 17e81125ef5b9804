"""Server identity: who answers under each server's name, and whether that is the server whose backups the name means

Revision: 0009, after 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=False)


def upgrade() -> None:
    op.create_table(
        "identities",
        sa.Column("server", sa.String(64), nullable=False),
        sa.Column("uuid", sa.String(64), nullable=False),
        sa.Column("verdict", sa.String(16), nullable=False),
        sa.Column("server_id", sa.BigInteger, nullable=False),
        _text("evidence"),
        _text("address"),
        _time("since"),
        _time("seen_at"),
        _text("accepted_by"),
        sa.PrimaryKeyConstraint("server", "uuid", name="pk_identities"),
    )


def downgrade() -> None:
    op.drop_table("identities")
