"""What a restore remembers for its next attempt, in a small document that is the old one or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from backupd.model.errors import RefusedError
from backupd.model.proof import Phase

DATADIR_MODE = 0o750
"""Of a data directory that did not exist; an existing one keeps its own."""
MARKER = ".backupd-restore.json"
"""Lies in the restored data directory: by it the directory is known to be complete."""
UNKNOWN = "unknown"
"""Instead of the id of a restore, which is never this."""


@dataclass(frozen=True, slots=True)
class State:
    """What an attempt remembers for the next one.

    ``stage``: ``fetching``, ``prepared``, ``placing`` (in the staging folder), ``placed``, ``finished`` (in
    the marker). ``moves``: names to move while placing inside, in order. ``phases``: what is over, with time
    spent by all attempts. ``mode``: the data directory's, to be given back.
    ``options``: what a server needs to read these files.
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

    def with_phase(self, phase: Phase) -> Self:
        """``phase`` added, or its time added to what earlier attempts spent on it."""
        earlier = next((p for p in self.phases if p.name == phase.name), None)
        if earlier is None:
            return replace(self, phases=(*self.phases, phase))
        total = Phase(phase.name, earlier.seconds + phase.seconds, phase.bytes)
        return replace(self, phases=tuple(total if p is earlier else p for p in self.phases))

    def same_work(self, other: State) -> bool:
        return (self.server, self.chain) == (other.server, other.chain)

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
        )


def read_document(path: Path) -> State | None:
    """None when there is none; raises RefusedError for something else under that name."""
    try:
        return State.decode(path.read_bytes())
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
    """The file is the old one or the new one, whatever happens; mode and owner of an old one are kept."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        if path.exists():
            old = path.stat()
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
            os.fchmod(file.fileno(), old.st_mode & 0o777)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were added, moved or removed in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
