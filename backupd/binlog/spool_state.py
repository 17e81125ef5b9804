"""What the spool writes down beside its files, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from backupd.binlog.evidence import Fingerprint, Seen
from backupd.model.binlog import Branch, BranchReason, Ending, Gap
from backupd.model.server_facts import Position
from backupd.model.text import format_time, parse_time

_FORMAT = "backupd-spool/1"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file. ``size`` counts once it has ended; ``removed``: the archive is through with it."""

    branch: str
    number: int
    name: str
    ended: Ending | None
    size: int
    removed: bool = False
    fingerprint: Fingerprint | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """What a branch was when another one began, so that it can be gone on with where its server answers again.
    ``place``: its end, ``fingerprint``: of its last file up to there, ``seen``: of its server."""

    place: Position
    fingerprint: Fingerprint
    seen: Seen


@dataclass(frozen=True, slots=True)
class State:
    """``files``: in log order. ``seen``: of the server of the newest branch. ``unlogged``: when that was first seen to
    write no binary log, since the branch began; what is there afterwards does not go on from what is here. ``left``: of
    each server that had the spool before, the last branch."""

    branches: tuple[Branch, ...] = ()
    gaps: tuple[Gap, ...] = ()
    files: tuple[Entry, ...] = ()
    seen: Seen | None = None
    unlogged: datetime | None = None
    left: tuple[Left, ...] = ()


def encode(state: State) -> dict[str, Any]:
    """``state.json`` as it is written; ``decode`` reads it."""
    return {
        "format": _FORMAT,
        "branches": [_branch(branch) for branch in state.branches],
        "gaps": [_gap(gap) for gap in state.gaps],
        "files": [_entry(entry) for entry in state.files],
        "seen": state.seen.as_json() if state.seen else None,
        "unlogged": format_time(state.unlogged) if state.unlogged else None,
        "left": [
            {"place": one.place.as_json(), "fingerprint": asdict(one.fingerprint), "seen": one.seen.as_json()}
            for one in state.left
        ],
    }


def decode(data: Mapping[str, Any]) -> State:
    """Raises ValueError, KeyError or TypeError for what is not of this writing."""
    if data["format"] != _FORMAT:
        raise ValueError(f"its format is {data['format']!r}, this version reads {_FORMAT}")
    return State(
        branches=tuple(_to_branch(branch) for branch in data["branches"]),
        gaps=tuple(_to_gap(gap) for gap in data["gaps"]),
        files=tuple(_to_entry(entry) for entry in data["files"]),
        seen=Seen.from_json(data["seen"]) if data["seen"] else None,
        unlogged=parse_time(data["unlogged"]) if data.get("unlogged") else None,
        left=tuple(
            Left(Position.from_json(one["place"]), Fingerprint(**one["fingerprint"]), Seen.from_json(one["seen"]))
            for one in data.get("left", ())
        ),
    )


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "branch": entry.branch,
        "number": entry.number,
        "name": entry.name,
        "ended": str(entry.ended) if entry.ended else None,
        "size": entry.size,
        "removed": entry.removed,
        "fingerprint": asdict(entry.fingerprint) if entry.fingerprint else None,
    }


def _to_entry(data: Mapping[str, Any]) -> Entry:
    return Entry(
        str(data["branch"]),
        int(data["number"]),
        str(data["name"]),
        Ending(data["ended"]) if data["ended"] else None,
        int(data["size"]),
        bool(data["removed"]),
        Fingerprint(**data["fingerprint"]) if data["fingerprint"] else None,
    )


def _branch(branch: Branch) -> dict[str, Any]:
    return {
        "server": branch.server,
        "id": branch.id,
        "noticed_at": format_time(branch.noticed_at),
        "reason": str(branch.reason),
        "server_uuid": branch.server_uuid,
        "flavour": branch.flavour,
        "basename": branch.basename,
        "first_number": branch.first_number,
        "since": format_time(branch.since) if branch.since else None,
        "parent": branch.parent,
        "fork": branch.fork.as_json() if branch.fork else None,
        "names_go_on": branch.names_go_on,
        "note": branch.note,
        "baseline": branch.baseline,
    }


def _to_branch(data: Mapping[str, Any]) -> Branch:
    return Branch(
        server=data["server"],
        id=data["id"],
        noticed_at=parse_time(data["noticed_at"]),
        reason=BranchReason(data["reason"]),
        server_uuid=data["server_uuid"],
        flavour=data["flavour"],
        basename=data["basename"],
        first_number=int(data["first_number"]),
        since=parse_time(data["since"]) if data["since"] else None,
        parent=data["parent"],
        fork=Position.from_json(data["fork"]) if data["fork"] else None,
        names_go_on=bool(data["names_go_on"]),
        note=data["note"],
        baseline=data.get("baseline", ""),
    )


def _gap(gap: Gap) -> dict[str, Any]:
    return {
        "server": gap.server,
        "branch": gap.branch,
        "destination": gap.destination,
        "after": gap.after.as_json(),
        "before": gap.before.as_json() if gap.before else None,
        "from_at": format_time(gap.from_at) if gap.from_at else None,
        "to_at": format_time(gap.to_at) if gap.to_at else None,
        "reason": gap.reason,
        "noticed_at": format_time(gap.noticed_at),
    }


def _to_gap(data: Mapping[str, Any]) -> Gap:
    return Gap(
        server=data["server"],
        branch=data["branch"],
        destination=data["destination"],
        after=Position.from_json(data["after"]),
        before=Position.from_json(data["before"]) if data["before"] else None,
        from_at=parse_time(data["from_at"]) if data["from_at"] else None,
        to_at=parse_time(data["to_at"]) if data["to_at"] else None,
        reason=data["reason"],
        noticed_at=parse_time(data["noticed_at"]),
    )
