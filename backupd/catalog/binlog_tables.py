"""The tables of binary logs, and their rows as values of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ForeignKeyConstraint,
    Index,
    Integer,
    String,
    Table,
    text,
)
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.columns import FreeText, UtcTime, metadata
from backupd.model.binlog import Branch, BranchReason, CopyState, Ending, Gap, Run, Segment
from backupd.model.server_facts import Position

binlog_branches = Table(
    "binlog_branches",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("server", String(64), nullable=False),
    Column("id", String(64), nullable=False),
    Column("noticed_at", UtcTime, nullable=False),
    Column("reason", String(32), nullable=False),
    Column("server_uuid", FreeText, nullable=False),
    Column("flavour", String(32), nullable=False),
    Column("basename", FreeText, nullable=False),
    Column("first_number", BigInteger, nullable=False),
    Column("since", UtcTime),
    Column("parent", String(64)),
    Column("fork", JSON(none_as_null=True)),
    Column("names_go_on", Boolean, nullable=False),
    Column("note", FreeText, nullable=False),
    Column("baseline", FreeText, nullable=False),
    Index(None, "server", "id", unique=True),
)
"""``number`` stands for (server, id) in the tables below, which have very many rows."""


def _piece() -> tuple[Column[Any], ...]:
    return tuple(
        Column(name, BigInteger, primary_key=True, autoincrement=False)
        for name in ("branch", "number", "start_pos", "end_pos")
    )


LOOSE = text("(binlog_segments.ending = 'open' OR binlog_segments.start_pos > 0)")
"""Segments that are not a whole file. Written into queries as it stands here, since only then an index is used that
holds nothing but those."""


binlog_segments = Table(
    "binlog_segments",
    metadata,
    *_piece(),
    Column("file", FreeText, nullable=False),
    Column("ending", String(16), nullable=False),
    Column("gtids_before", FreeText, nullable=False),
    Column("gtids_after", FreeText, nullable=False),
    Column("transactions", BigInteger, nullable=False),
    Column("first_at", UtcTime),
    Column("last_at", UtcTime),
    Column("precise", Boolean, nullable=False),
    Column("server_ids", JSON, nullable=False),
    Column("flavour", String(32), nullable=False),
    Column("server_version", FreeText, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("remarks", JSON, nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
    Index(None, "branch", "number", "start_pos", "last_at"),
    Index(
        "ix_binlog_segments_loose",
        "branch",
        "number",
        "start_pos",
        # the same for PostgreSQL, as its migration says; said here, it would import that dialect for every command
        sqlite_where=text("ending = 'open' OR start_pos > 0"),
    ),
)


binlog_copies = Table(
    "binlog_copies",
    metadata,
    *_piece(),
    Column("destination", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("verified_at", UtcTime),
    ForeignKeyConstraint(
        ["branch", "number", "start_pos", "end_pos"],
        [f"binlog_segments.{name}" for name in ("branch", "number", "start_pos", "end_pos")],
        ondelete="CASCADE",
    ),
)


binlog_runs = Table(
    "binlog_runs",
    metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("destination", String(64), primary_key=True),
    Column("first_number", BigInteger, primary_key=True, autoincrement=False),
    Column("last_number", BigInteger, nullable=False),
    Column("last_pos", BigInteger, nullable=False),
    Column("gtids_before", FreeText, nullable=False),
    Column("gtids_after", FreeText, nullable=False),
    Column("first_at", UtcTime),
    Column("last_at", UtcTime),
    Column("size", BigInteger, nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("segments", BigInteger, nullable=False),
    Column("transactions", BigInteger, nullable=False),
    Column("remarks", JSON, nullable=False),
    Column("ending", String(16), nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
)
"""Whole files only: the few pieces of files that grow are folded in when somebody reads."""


binlog_confirmed = Table(
    "binlog_confirmed",
    metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("destination", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("pos", BigInteger, nullable=False),
    Column("at", UtcTime, nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
)


binlog_gaps = Table(
    "binlog_gaps",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("branch", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("after_file", FreeText, primary_key=True),
    Column("after_pos", BigInteger, primary_key=True, autoincrement=False),
    Column("after_gtid", FreeText, nullable=False),
    Column("before", JSON(none_as_null=True)),
    Column("from_at", UtcTime),
    Column("to_at", UtcTime),
    Column("reason", FreeText, nullable=False),
    Column("noticed_at", UtcTime, nullable=False),
)


binlog_streams = Table(
    "binlog_streams",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("status", JSON, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
)


def branch_columns(branch: Branch) -> dict[str, Any]:
    """The columns of ``binlog_branches`` but its number."""
    return {
        "server": branch.server,
        "id": branch.id,
        "noticed_at": branch.noticed_at,
        "reason": str(branch.reason),
        "server_uuid": branch.server_uuid,
        "flavour": branch.flavour,
        "basename": branch.basename,
        "first_number": branch.first_number,
        "since": branch.since,
        "parent": branch.parent,
        "fork": _position_json(branch.fork),
        "names_go_on": branch.names_go_on,
        "note": branch.note,
        "baseline": branch.baseline,
    }


def branch_of(row: RowMapping) -> Branch:
    """The branch in a row of ``binlog_branches``."""
    return Branch(
        server=row["server"],
        id=row["id"],
        noticed_at=row["noticed_at"],
        reason=BranchReason(row["reason"]),
        server_uuid=row["server_uuid"],
        flavour=row["flavour"],
        basename=row["basename"],
        first_number=row["first_number"],
        since=row["since"],
        parent=row["parent"],
        fork=_position(row["fork"]),
        names_go_on=row["names_go_on"],
        note=row["note"],
        baseline=row["baseline"],
    )


def segment_columns(branch: int, segment: Segment) -> dict[str, Any]:
    """The columns of ``binlog_segments``; ``branch`` is the branch's number."""
    return {
        "branch": branch,
        "number": segment.number,
        "start_pos": segment.start,
        "end_pos": segment.end,
        "file": segment.file,
        "ending": str(segment.ending),
        "gtids_before": segment.gtids_before,
        "gtids_after": segment.gtids_after,
        "transactions": segment.transactions,
        "first_at": segment.first_at,
        "last_at": segment.last_at,
        "precise": segment.precise,
        "server_ids": list(segment.server_ids),
        "flavour": segment.flavour,
        "server_version": segment.server_version,
        "sha256": segment.sha256,
        "remarks": list(segment.remarks),
    }


def segment_of(row: RowMapping, server: str, branch: str) -> Segment:
    """The segment in a row of ``binlog_segments`` joined with its branch."""
    return Segment(
        server=server,
        branch=branch,
        file=row["file"],
        number=row["number"],
        start=row["start_pos"],
        end=row["end_pos"],
        ending=Ending(row["ending"]),
        gtids_before=row["gtids_before"],
        gtids_after=row["gtids_after"],
        transactions=row["transactions"],
        first_at=row["first_at"],
        last_at=row["last_at"],
        precise=row["precise"],
        server_ids=tuple(row["server_ids"]),
        flavour=row["flavour"],
        server_version=row["server_version"],
        sha256=row["sha256"],
        remarks=tuple(row["remarks"]),
    )


def copy_of(row: RowMapping) -> CopyState:
    """The state of a copy, in a row of ``binlog_copies``."""
    return CopyState(row["state"], row["stored"], row["stored_at"], row["verified_at"])


def run_columns(branch: int, run: Run) -> dict[str, Any]:
    """The columns of ``binlog_runs``; ``branch`` is the branch's number."""
    return {
        "branch": branch,
        "destination": run.destination,
        "first_number": run.first_number,
        "last_number": run.last_number,
        "last_pos": run.last_pos,
        "gtids_before": run.gtids_before,
        "gtids_after": run.gtids_after,
        "first_at": run.first_at,
        "last_at": run.last_at,
        "size": run.size,
        "stored": run.stored,
        "segments": run.segments,
        "transactions": run.transactions,
        "remarks": list(run.remarks),
        "ending": str(run.ending),
    }


def run_from(row: RowMapping, server: str, branch: str) -> Run:
    """The run in a row of ``binlog_runs``."""
    return Run(
        server=server,
        branch=branch,
        destination=row["destination"],
        first_number=row["first_number"],
        first_pos=0,
        last_number=row["last_number"],
        last_pos=row["last_pos"],
        gtids_before=row["gtids_before"],
        gtids_after=row["gtids_after"],
        first_at=row["first_at"],
        last_at=row["last_at"],
        confirmed_at=None,
        size=row["size"],
        stored=row["stored"],
        segments=row["segments"],
        transactions=row["transactions"],
        remarks=tuple(row["remarks"]),
        ending=Ending(row["ending"]),
    )


def gap_columns(gap: Gap) -> dict[str, Any]:
    """The columns of ``binlog_gaps``."""
    return {
        "server": gap.server,
        "branch": gap.branch,
        "destination": gap.destination,
        "after_file": gap.after.file,
        "after_pos": gap.after.pos,
        "after_gtid": gap.after.gtid,
        "before": _position_json(gap.before),
        "from_at": gap.from_at,
        "to_at": gap.to_at,
        "reason": gap.reason,
        "noticed_at": gap.noticed_at,
    }


def gap_of(row: RowMapping) -> Gap:
    """The gap in a row of ``binlog_gaps``."""
    return Gap(
        server=row["server"],
        branch=row["branch"],
        destination=row["destination"],
        after=Position(row["after_file"], row["after_pos"], row["after_gtid"]),
        before=_position(row["before"]),
        from_at=row["from_at"],
        to_at=row["to_at"],
        reason=row["reason"],
        noticed_at=row["noticed_at"],
    )


def _position_json(position: Position | None) -> dict[str, Any] | None:
    return position.as_json() if position is not None else None


def _position(data: Mapping[str, Any] | None) -> Position | None:
    return Position.from_json(data) if data is not None else None
