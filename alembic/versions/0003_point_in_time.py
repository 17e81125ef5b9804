"""Binary logs: branches, segments and their copies, runs, confirmed places, gaps, lags, the state of streams

Revision: 0003, after 0002
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_PLACE = ("branch", "number", "start_pos", "end_pos")
_LOOSE = sa.text("ending = 'open' OR start_pos > 0")


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _name(name: str, length: int = 64) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _of_branch(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["branch"], ["binlog_branches.number"], name=f"fk_{table}_branch_binlog_branches")


def upgrade() -> None:
    op.create_table(
        "binlog_branches",
        sa.Column("number", sa.Integer, autoincrement=True, nullable=False),
        _name("server"),
        _name("id"),
        _time("noticed_at"),
        _name("reason", 32),
        _text("server_uuid"),
        _name("flavour", 32),
        _text("basename"),
        _number("first_number"),
        _time("since", nullable=True),
        sa.Column("parent", sa.String(64)),
        sa.Column("fork", sa.JSON),
        sa.Column("names_go_on", sa.Boolean, nullable=False),
        _text("note"),
        _text("baseline"),
        sa.PrimaryKeyConstraint("number", name="pk_binlog_branches"),
    )
    op.create_index("ix_binlog_branches_server_id", "binlog_branches", ["server", "id"], unique=True)
    op.create_table(
        "binlog_segments",
        *(_number(name) for name in _PLACE),
        _text("file"),
        _name("ending", 16),
        _text("gtids_before"),
        _text("gtids_after"),
        _number("transactions"),
        _time("first_at", nullable=True),
        _time("last_at", nullable=True),
        sa.Column("precise", sa.Boolean, nullable=False),
        sa.Column("server_ids", sa.JSON, nullable=False),
        _name("flavour", 32),
        _text("server_version"),
        _name("sha256"),
        sa.Column("remarks", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint(*_PLACE, name="pk_binlog_segments"),
        _of_branch("binlog_segments"),
    )
    op.create_index(
        "ix_binlog_segments_branch_number_start_pos_last_at",
        "binlog_segments",
        ["branch", "number", "start_pos", "last_at"],
    )
    op.create_index(
        "ix_binlog_segments_loose",
        "binlog_segments",
        ["branch", "number", "start_pos"],
        sqlite_where=_LOOSE,
        postgresql_where=_LOOSE,
    )
    op.create_table(
        "binlog_copies",
        *(_number(name) for name in _PLACE),
        _name("destination"),
        _name("state", 16),
        _number("stored"),
        _time("stored_at"),
        _time("verified_at", nullable=True),
        sa.PrimaryKeyConstraint(*_PLACE, "destination", name="pk_binlog_copies"),
        sa.ForeignKeyConstraint(
            list(_PLACE),
            [f"binlog_segments.{name}" for name in _PLACE],
            ondelete="CASCADE",
            name="fk_binlog_copies_branch_binlog_segments",
        ),
    )
    op.create_table(
        "binlog_runs",
        _number("branch"),
        _name("destination"),
        _number("first_number"),
        _number("last_number"),
        _number("last_pos"),
        _text("gtids_before"),
        _text("gtids_after"),
        _time("first_at", nullable=True),
        _time("last_at", nullable=True),
        _number("size"),
        _number("stored"),
        _number("segments"),
        _number("transactions"),
        sa.Column("remarks", sa.JSON, nullable=False),
        _name("ending", 16),
        sa.PrimaryKeyConstraint("branch", "destination", "first_number", name="pk_binlog_runs"),
        _of_branch("binlog_runs"),
    )
    op.create_table(
        "binlog_confirmed",
        _number("branch"),
        _name("destination"),
        _number("number"),
        _number("pos"),
        _time("at"),
        sa.PrimaryKeyConstraint("branch", "destination", "number", name="pk_binlog_confirmed"),
        _of_branch("binlog_confirmed"),
    )
    op.create_table(
        "binlog_gaps",
        _name("server"),
        _name("branch"),
        _name("destination"),
        _text("after_file"),
        _number("after_pos"),
        _text("after_gtid"),
        sa.Column("before", sa.JSON),
        _time("from_at", nullable=True),
        _time("to_at", nullable=True),
        _text("reason"),
        _time("noticed_at"),
        sa.PrimaryKeyConstraint("server", "branch", "destination", "after_file", "after_pos", name="pk_binlog_gaps"),
    )
    op.create_table(
        "binlog_lags",
        _name("server"),
        _name("destination"),
        _time("hour"),
        sa.Column("seconds", sa.Float, nullable=False),
        _time("at"),
        sa.PrimaryKeyConstraint("server", "destination", "hour", name="pk_binlog_lags"),
    )
    op.create_table(
        "binlog_streams",
        _name("server"),
        sa.Column("status", sa.JSON, nullable=False),
        _time("updated_at"),
        sa.PrimaryKeyConstraint("server", name="pk_binlog_streams"),
    )


def downgrade() -> None:
    for table in ("streams", "lags", "gaps", "confirmed", "runs", "copies", "segments", "branches"):
        op.drop_table(f"binlog_{table}")
