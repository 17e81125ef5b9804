"""Where a restore is built before it is put in place, what is remembered there, and who may work there.

Beside the data directory, as ``<datadir>.restoring``, so that one rename puts everything in place. Where that
cannot be (the data directory is a mount point, its parent is not ours to write or another file system) inside
it, as ``.backupd-restoring``, and the files are moved one by one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from backupd.model.errors import RefusedError
from backupd.model.proof import Phase

BESIDE = ".restoring"
INSIDE = ".backupd-restoring"
MARKER = ".backupd-restore.json"
"""Lies in the restored data directory: by it the directory is known to be complete."""
DATADIR_MODE = 0o750
"""Of a data directory that did not exist; an existing one keeps its own."""
_STATE = "restore.json"


@dataclass(frozen=True, slots=True)
class Site:
    """``datadir`` (real path) is the goal, ``folder`` the staging folder, ``inside``: it lies in the goal
    itself."""

    datadir: Path
    folder: Path
    inside: bool

    @property
    def data(self) -> Path:
        """What becomes the content of the data directory."""
        return self.folder / "data"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def ours(self) -> tuple[str, ...]:
        """Names inside the data directory that are no reason to refuse it."""
        return (INSIDE,) if self.inside else ()

    def increment(self, number: int) -> Path:
        return self.folder / f"increment-{number}"


def choose_site(datadir: Path) -> Site:
    """Where a restore into ``datadir`` is built. An earlier attempt's folder decides. Raises RefusedError."""
    real = Path(os.path.realpath(datadir))
    beside = Site(real, real.with_name(real.name + BESIDE), inside=False)
    inside = Site(real, real / INSIDE, inside=True)
    if inside.folder.is_dir():
        return inside
    if beside.folder.is_dir():
        return beside
    if real.is_dir() and (
        real in _mount_points()
        or (real / "lost+found").is_dir()
        or real.parent.stat().st_dev != real.stat().st_dev
    ):
        return inside
    parent = next(folder for folder in real.parents if folder.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        return beside
    if real.is_dir() and os.access(real, os.W_OK | os.X_OK):
        return inside
    raise RefusedError(
        f"{real} cannot be made: {parent} is not writable",
        hint="run the restore as root, or make the empty data directory first",
    )


def _mount_points(table: Path = Path("/proc/self/mountinfo")) -> set[Path]:
    """Field 5 of mountinfo (proc(5)), octal escapes decoded. It knows bind mounts, too."""
    fields = (line.split()[4] for line in table.read_text().splitlines())
    return {Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)) for text in fields}


@dataclass(frozen=True, slots=True)
class State:
    """What an attempt remembers for the next one.

    ``stage``: ``fetching``, ``prepared``, ``placing`` (in the staging folder), ``placed``, ``finished`` (in
    the marker). ``moves``: names to move while placing inside, in order. ``phases``: what is over, with time
    spent by all attempts.
    """

    restore_id: str
    server: str
    target: str
    chain: tuple[str, ...]
    stage: str = "fetching"
    moves: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = field(default=())
    mode: int = DATADIR_MODE

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
            phases=tuple(
                Phase(str(name), float(seconds), int(size)) for name, seconds, size in data["phases"]
            ),
        )


def read_state(site: Site) -> State | None:
    """What the staging folder remembers, None when it is new."""
    return _read(site.folder / _STATE)


def read_marker(datadir: Path) -> State | None:
    """What the marker of a restored data directory says, None without one."""
    return _read(datadir / MARKER)


def _read(path: Path) -> State | None:
    try:
        return State.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"{path} is not what backupd writes",
            detail=str(error),
            hint="remove it, and what lies beside it, if no restore needs it any more",
        ) from error


def write_state(site: Site, state: State) -> None:
    write_durably(site.folder / _STATE, state.encode())


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


def unfinished(datadir: Path) -> State | None:
    """An interrupted restore into ``datadir``, if any: the same target then means the same backup."""
    try:
        site = choose_site(datadir)
    except RefusedError:
        return None
    marker = read_marker(site.datadir)
    if marker is not None:
        return marker if marker.stage == "placed" else None
    return read_state(site)


@contextlib.contextmanager
def exclusive(*folders: Path) -> Iterator[None]:
    """Hold the existing ones of ``folders`` for this process alone. Raises RefusedError when another restore
    does.

    The lock is the kernel's, on the folder itself: it follows a rename, and a killed process leaves none.
    """
    with contextlib.ExitStack() as held:
        for folder in folders:
            if folder.is_dir():
                held.enter_context(_locked(folder))
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RefusedError(
                f"another restore is at work in {folder}",
                hint="wait for it, or end that process; the same command then continues",
            ) from error
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise RefusedError(
                f"another restore has just finished in {folder}", hint="look at the result first"
            )
        yield
    finally:
        os.close(descriptor)
