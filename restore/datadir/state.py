"""What a restore remembers for its next attempt, in a small document that is the old one or the new one."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from backupd.model.errors import RefusedError
from backupd.model.proof import Phase
from backupd.model.server_facts import Position
from backupd.process.folders import PRIVATE, read_plain, sync_folder, write_anew

DATADIR_MODE = 0o750
"""Of a data directory that did not exist; an existing one keeps its own."""
MARKER = ".backupd-restore.json"
"""Lies in the restored data directory: by it the directory is known to be complete."""
UNKNOWN = "unknown"
"""Instead of the id of a restore, which is never this."""
WITHOUT = " without "
"""In a goal: between its place and what is left out."""
_LARGEST = 256 * 1024**2
_UNDECIDED = ("fetching", "prepared", "replaying")
"""Stages in which nothing that is kept depends on where a replay goes."""
STAGED = (*_UNDECIDED, "replayed")
"""Stages in which everything lies in the staging folder."""


@dataclass(frozen=True, slots=True)
class State:
    """What an attempt remembers for the next one.

    ``stage``: ``fetching``, ``prepared``, ``replaying``, ``replayed``, ``placing`` (in the staging folder), ``placed``,
    ``finished`` (in the marker). ``goal``: where binary logs are replayed to and what is left out, "" without a replay;
    until ``replayed`` another attempt may have another one. ``replay``: what the replay did, once it is over.
    ``place``: where the prepared files stand in the binary log by their own record. ``moves``: names to move while
    placing inside, in order. ``phases``: what is over, with time spent by all attempts. ``mode``: the data directory's,
    to be given back. ``options``: what a server needs to read these files.
    """

    restore_id: str
    server: str
    target: str
    chain: tuple[str, ...]
    stage: str = "fetching"
    moves: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = field(default=())
    mode: int = DATADIR_MODE
    options: Mapping[str, str | None] = field(default_factory=dict)
    goal: str = ""
    replay: Mapping[str, Any] = field(default_factory=dict)
    place: Position | None = None

    def with_phase(self, phase: Phase) -> Self:
        """``phase`` added, or its time added to what earlier attempts spent on it."""
        earlier = next((p for p in self.phases if p.name == phase.name), None)
        if earlier is None:
            return replace(self, phases=(*self.phases, phase))
        total = Phase(phase.name, earlier.seconds + phase.seconds, phase.bytes)
        return replace(self, phases=tuple(total if p is earlier else p for p in self.phases))

    def same_work(self, asked: State) -> bool:
        """Is this, found on the disk, what ``asked`` wants done? The same backup, and once binary logs were replayed
        onto it the same place, or at least the same words for it: what was the latest moment when the restore began
        goes on being its goal until it is finished."""
        if (self.server, self.chain) != (asked.server, asked.chain):
            return False
        if self.stage in _UNDECIDED or self.goal == asked.goal:
            return True
        same_words = self.target == asked.target and _left_out(self.goal) == _left_out(asked.goal)
        return self.stage != "finished" and bool(self.goal and asked.goal) and same_words

    @property
    def words(self) -> str:
        """The target that means this very restore later, too, when the latest moment has moved on."""
        if self.target.partition("@")[0] not in ("latest", "random"):
            return self.target
        if not self.goal:
            return f"backup:{self.chain[-1]}"
        branch, place = self.goal.partition(WITHOUT)[0].split()
        return f"{place}@{branch}"

    def encode(self) -> bytes:
        document = {
            "restore": self.restore_id,
            "server": self.server,
            "target": self.target,
            "chain": list(self.chain),
            "stage": self.stage,
            "moves": list(self.moves),
            "phases": [[p.name, p.seconds, p.bytes] for p in self.phases],
            "mode": self.mode,
            "options": dict(self.options),
            "goal": self.goal,
            "replay": dict(self.replay),
            "place": self.place.as_json() if self.place else None,
        }
        return (json.dumps(document, sort_keys=True, indent=1) + "\n").encode("ascii")

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        data: dict[str, Any] = json.loads(raw)
        return cls(
            restore_id=str(data["restore"]),
            server=str(data["server"]),
            target=str(data["target"]),
            chain=tuple(data["chain"]),
            stage=str(data["stage"]),
            moves=tuple(data["moves"]),
            phases=tuple(Phase(str(name), float(seconds), int(size)) for name, seconds, size in data["phases"]),
            mode=int(data["mode"]),
            options={str(name): value for name, value in data["options"].items()},
            goal=str(data.get("goal", "")),  # documents of restores that were begun before there were replays
            replay=dict(data.get("replay", {})),
            place=Position.from_json(data["place"]) if data.get("place") else None,
        )


def _left_out(goal: str) -> str:
    return goal.partition(WITHOUT)[2]


def read_document(path: Path) -> State | None:
    """None when there is none; raises RefusedError for something else under that name."""
    try:
        return State.decode(read_plain(path, _LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RefusedError(
            f"cannot read {path}: {error.strerror}", hint="run the restore as root, or give another data directory"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"{path} is not what backupd writes",
            detail=str(error),
            hint="remove it, and what lies beside it, if no restore needs it any more",
        ) from error


def read_marker(datadir: Path) -> State | None:
    """What the marker of a restored data directory says, None without one."""
    return read_document(datadir / MARKER)


def marker_time(datadir: Path) -> datetime:
    """When the marker was last written: for a finished restore, when it ended."""
    return datetime.fromtimestamp((datadir / MARKER).stat().st_mtime, UTC)


def restored_by(datadir: Path) -> str:
    """Id of the restore that made ``datadir``; "" where backupd never restored it, UNKNOWN where the marker cannot be
    read."""
    try:
        marker = read_marker(datadir)
    except RefusedError:
        return UNKNOWN
    return marker.restore_id if marker else ""


def write_marker(folder: Path, state: State) -> None:
    write_durably(folder / MARKER, state.encode())


def write_durably(path: Path, content: bytes) -> None:
    """The file is the old one or the new one, whatever happens; mode and owner of an old one are kept. The folder may
    be the server's by now: nothing that lies there under either name is followed."""
    fresh = path.with_name(f"{path.name}.new")
    owner, mode = None, PRIVATE
    with contextlib.suppress(FileNotFoundError):
        old = path.lstat()
        owner, mode = (old.st_uid, old.st_gid), stat.S_IMODE(old.st_mode) & 0o777
    write_anew(fresh, content, owner=owner, mode=mode)
    fresh.replace(path)
    sync_folder(path.parent)
