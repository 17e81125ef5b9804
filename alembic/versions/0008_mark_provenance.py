"""Provenance: marks of deletion and digests of proofs, as this installation knows them

Revision: 0008, after 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def _name(name: str, length: int = 64) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def upgrade() -> None:
    marks = op.create_table(
        "marks",
        _name("destination"),
        _name("server"),
        _name("backup_id"),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stored_at", sa.DateTime(timezone=True)),
        sa.Column("ours", sa.Boolean, nullable=False),
        sa.Column("confirmed", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("destination", "server", "backup_id", name="pk_marks"),
    )
    # What the catalog calls deleted goes on as it began, by the time in its mark.
    backups, copies = (
        sa.table("backups", sa.column("id"), sa.column("server")),
        sa.table("copies", *map(sa.column, ("backup_id", "destination", "state", "stored_at"))),
    )
    known = sa.select(
        copies.c.destination, backups.c.server, copies.c.backup_id, copies.c.stored_at, sa.true(), sa.false()
    ).where((backups.c.id == copies.c.backup_id) & (copies.c.state == "deleted"))
    op.execute(marks.insert().from_select(["destination", "server", "backup_id", "since", "ours", "confirmed"], known))
    op.create_table(
        "deposits",
        _name("destination"),
        _name("key", 512),
        _name("sha256"),
        sa.PrimaryKeyConstraint("destination", "key", name="pk_deposits"),
    )


def downgrade() -> None:
    op.drop_table("deposits")
    op.drop_table("marks")
