"""Off-site destinations: copies that have to be caught up, thaws of archived objects, turns of scrubbing, manifests
by digest

Revision: 0005, after 0004
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def _name(name: str, length: int = 64) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _moment(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "replications",
        _name("backup_id"),
        _name("destination"),
        _name("state", 16),
        sa.Column("attempts", sa.Integer, nullable=False),
        _moment("not_before", nullable=True),
        _moment("since"),
        _moment("updated_at"),
        _number("bytes_total"),
        _number("bytes_done"),
        sa.Column("message", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("backup_id", "destination", name="pk_replications"),
    )
    op.create_table(
        "thaws",
        _name("thaw_id"),
        _name("destination"),
        _name("key", 512),
        _name("part"),
        _number("size"),
        _name("storage_class", 32),
        _name("tier", 16),
        _name("state", 16),
        _moment("requested_at", nullable=True),
        _moment("expected_at", nullable=True),
        _moment("ready_until", nullable=True),
        sa.Column("message", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("thaw_id", "destination", "key", name="pk_thaws"),
    )
    op.create_index("ix_thaws_thaw_id_state", "thaws", ["thaw_id", "state"])
    op.create_table(
        "scrubs",
        _name("server"),
        _name("destination"),
        sa.Column("share", sa.Integer, nullable=False),
        _moment("done_at"),
        sa.PrimaryKeyConstraint("server", "destination", "share", name="pk_scrubs"),
    )

    # With a default, and without a batch: SQLite would rebuild the table, and every row of `copies` would go with it.
    op.add_column("backups", sa.Column("manifest", sa.String(64), nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    op.drop_column("backups", "manifest")
    for table in ("replications", "thaws", "scrubs"):
        op.drop_table(table)
