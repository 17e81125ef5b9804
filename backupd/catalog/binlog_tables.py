"""Values of binary logs as columns, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.engine import RowMapping

from backupd.model.binlog import Branch, BranchReason, CopyState, Ending, Gap, Run, Segment
from backupd.model.server_facts import Position


def branch_columns(branch: Branch) -> dict[str, Any]:
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
    return CopyState(row["state"], row["stored"], row["stored_at"], row["verified_at"])


def run_columns(branch: int, run: Run) -> dict[str, Any]:
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
