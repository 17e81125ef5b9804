"""Where a restore is built before it is put in place, what is remembered there, and who may work there.

Beside the data directory, as ``<datadir>.restoring``, so that one rename puts everything in place. Where that
cannot be (the data directory is a mount point, its parent is not ours to write or another file system) inside
it, as ``.backupd-restoring``, and the files are moved one by one.

What is remembered for the next attempt is a small document (``State``) that is the old one or the new one; the same
document marks a restored data directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import fnmatch
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from backupd.model.document import HIDDEN, Document, json_key
from backupd.model.errors import BackupdError, RefusedError
from backupd.model.proof import Phase
from backupd.model.server_facts import Position
from backupd.process.folders import PASSABLE, PRIVATE, opened, read_plain, sync_folder, write_anew

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
"""Stages in which everything is in the staging folder."""

BESIDE = ".restoring"
INSIDE = ".backupd-restoring"
_STATE = "restore.json"
_RESERVED = (f"*{BESIDE}", INSIDE, "*.external", "*.external.new", ".*.partial")
"""Names that restores take beside and in their goals (the last one: of SQL files), and remove what bears them."""
_BUILT = ("data", "external", "logs", "binlogs", "replay", "increment-*")
"""Folders that are made in a staging folder."""
_PATIENCE = 2.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class State(Document):
    """What an attempt remembers for the next one.

    ``stage``: ``fetching``, ``prepared``, ``replaying``, ``replayed``, ``placing`` (in the staging folder), ``placed``,
    ``finished`` (in the marker). ``goal``: where binary logs are replayed to and what is left out, "" without a replay;
    until ``replayed`` another attempt may have another one. ``replay``: what the replay did, once it is over.
    ``position``: the binary log position of the prepared files by their own record. ``node``: of a node of a cluster,
    what its restore has to know: see ``restore.galera.rejoin``. ``moves``: names to move while
    placing inside, in order. ``phases``: what is over, with time spent by all attempts. ``mode``: the data directory's,
    to be given back. ``options``: what a server needs to read these files. ``replica``: what is known of the replica
    that the copy became.
    """

    restore_id: str = field(metadata=json_key("restore"))
    server: str
    target: str
    chain: tuple[str, ...]
    stage: str = "fetching"
    moves: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = field(default=(), metadata=HIDDEN)
    mode: int = DATADIR_MODE
    options: Mapping[str, str | None] = field(default_factory=dict)
    # Documents of restores that were begun before there were replays lack these.
    goal: str = field(default="", metadata=json_key(later=True))
    replay: Mapping[str, Any] = field(default_factory=dict, metadata=json_key(later=True))
    position: Position | None = field(default=None, metadata=json_key("place", later=True))
    node: Mapping[str, Any] = field(default_factory=dict, metadata=json_key(later=True))
    replica: Mapping[str, Any] = field(default_factory=dict, metadata=json_key(later=True))

    def with_phase(self, phase: Phase) -> Self:
        """``phase`` added, or its time added to what earlier attempts spent on it."""
        earlier = next((p for p in self.phases if p.name == phase.name), None)
        if earlier is None:
            return replace(self, phases=(*self.phases, phase))
        total = Phase(phase.name, earlier.seconds + phase.seconds, phase.bytes)
        return replace(self, phases=tuple(total if p is earlier else p for p in self.phases))

    def same_work(self, asked: State) -> bool:
        """Is this, found on the disk, what ``asked`` wants done? The same backup, and once binary logs were replayed
        onto it the same position, or at least the same words for it: what was the latest moment when the restore began
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
        """The JSON document that ``decode`` reads; its keys are kept for restores under way."""
        document = {**self.as_json(), "phases": [[p.name, p.seconds, p.bytes] for p in self.phases]}
        return (json.dumps(document, sort_keys=True, indent=1) + "\n").encode("ascii")

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Raises KeyError, TypeError, ValueError for a document that ``encode`` did not write."""
        data: dict[str, Any] = json.loads(raw)
        phases = tuple(Phase(str(name), float(seconds), int(size)) for name, seconds, size in data["phases"])
        return replace(cls.from_json(data), phases=phases)


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
            f"{path} was not written by backupd",
            detail=str(error),
            hint="remove it and the files beside it if no restore needs them any more",
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
    """Put ``state`` into ``folder`` as its marker, durably."""
    write_durably(folder / MARKER, state.encode())


def write_durably(path: Path, content: bytes) -> None:
    """The file is the old one or the new one, whatever happens; mode and owner of an old one are kept. The folder may
    be the server's by now: nothing that is there under either name is followed."""
    fresh = path.with_name(f"{path.name}.new")
    owner, mode = None, PRIVATE
    with contextlib.suppress(FileNotFoundError):
        old = path.lstat()
        owner, mode = (old.st_uid, old.st_gid), stat.S_IMODE(old.st_mode) & 0o777
    write_anew(fresh, content, owner=owner, mode=mode)
    fresh.replace(path)
    sync_folder(path.parent)


def sync_filesystem(path: Path) -> None:
    """Force everything written on ``path``'s file system to disk: one call instead of one per file."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise BackupdError(
                f"cannot write {path} to disk: {os.strerror(ctypes.get_errno())}",
                hint="the disk is failing or full; check the kernel log",
            )


@dataclass(frozen=True, slots=True)
class Site:
    """``datadir`` (real path) is the goal, ``folder`` the staging folder, ``inside``: it is in the goal
    itself."""

    datadir: Path
    folder: Path
    inside: bool

    @property
    def data(self) -> Path:
        """What becomes the content of the data directory."""
        return self.folder / "data"

    @property
    def store(self) -> Path:
        """Tablespaces that lay outside the source's data directory, while they are staged."""
        return self.folder / "external"

    @property
    def final_store(self) -> Path:
        """Where those are in the end: beside the data directory, because a server allows none inside."""
        return self.datadir.with_name(self.datadir.name + ".external")

    @property
    def ours(self) -> tuple[str, ...]:
        """Names inside the data directory that are no reason to refuse it."""
        return (INSIDE,) if self.inside else ()

    def built(self) -> Iterator[Path]:
        """What a restore made in the staging folder; what it remembers comes last."""
        found = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        yield from (path for path in found if fits(path.name, _BUILT))
        yield from (path for path in found if path.name in (_STATE, f"{_STATE}.new"))

    def refuse_moved(self) -> None:
        """Raises RefusedError where a symbolic link came to be on the way to the data directory."""
        if (leads := os.path.realpath(self.datadir)) != str(self.datadir):
            raise RefusedError(
                f"the path {self.datadir} now resolves to a different directory",
                detail=f"it leads to {leads}",
                hint="somebody put a symbolic link on the way there: find out who, and restore the folder",
            )


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Is a file of this ``name`` one of those that the ``patterns`` mean?"""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def reserved(folder: Path) -> str:
    """Why backupd itself may remove what is in ``folder``, or take it for a part of another restore; "" where it may
    not."""
    if fits(folder.name, _RESERVED):
        return f"the name {folder.name} is reserved for restores"
    try:
        return f"{folder / _STATE} is there" if read_document(folder / _STATE) is not None else ""
    except RefusedError:
        return ""  # somebody else's file of that name


def choose_site(datadir: Path) -> Site:
    """Where a restore into ``datadir`` is built. An earlier attempt's folder decides. Raises RefusedError."""
    try:
        return _choose(Path(os.path.realpath(datadir)))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unusable(datadir, error) from error


def unusable(folder: Path, error: OSError | ValueError) -> RefusedError:
    """``folder`` cannot be worked in, for the reason that the system gave."""
    named = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else ""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return RefusedError(
        f"cannot restore into {str(folder)!r}: {reason}",
        detail=f"at {named}" if named and named != str(folder) else "",
        hint="choose another data directory, or correct the cause: this user must be able to create folders there",
    )


@contextlib.contextmanager
def workable(folder: Path) -> Iterator[None]:
    """The system's refusals in this block become a RefusedError that names ``folder`` and the reason."""
    try:
        yield
    except OSError as error:
        raise unusable(folder, error) from error


def _choose(real: Path) -> Site:
    if real == real.parent:
        raise RefusedError(
            f"{real} cannot be a data directory: it is the root directory",
            hint="give an empty directory, or one that does not exist yet",
        )
    beside = Site(real, real.with_name(real.name + BESIDE), inside=False)
    inside = Site(real, real / INSIDE, inside=True)
    if inside.folder.is_dir():
        return inside
    if beside.folder.is_dir():
        return beside
    if real.is_dir() and (
        real in _mount_points() or (real / "lost+found").is_dir() or real.parent.stat().st_dev != real.stat().st_dev
    ):
        return inside
    parent = next(folder for folder in real.parents if folder.exists())
    if not parent.is_dir():
        raise RefusedError(
            f"{real} cannot be created: {parent} is not a directory", hint="name the data directory to restore into"
        )
    if len(os.fsencode(beside.folder.name)) > os.pathconf(parent, "PC_NAME_MAX"):
        raise RefusedError(
            f"the name of the data directory is too long: {beside.folder.name} must fit beside it",
            hint="give a shorter name",
        )
    if os.access(parent, os.W_OK | os.X_OK):
        return beside
    if real.is_dir() and os.access(real, os.W_OK | os.X_OK):
        return inside
    if os.statvfs(parent).f_flag & os.ST_RDONLY:
        raise RefusedError(
            f"{real} cannot be created: {parent} is read-only here",
            hint="the service writes only where its unit allows: add ReadWritePaths= in a drop-in (systemctl edit "
            "backupd), restart it, and try again; or run `backupd restore` from a shell",
        )
    raise RefusedError(
        f"{real} cannot be created: {parent} is not writable",
        hint="run the restore as root, or create the empty data directory first",
    )


def _mount_points(table: Path = Path("/proc/self/mountinfo")) -> set[Path]:
    """Field 5 of mountinfo (proc(5)), octal escapes decoded. It knows bind mounts, too."""
    fields = (line.split()[4] for line in table.read_text().splitlines())
    return {Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)) for text in fields}


def read_state(site: Site) -> State | None:
    """What the staging folder remembers, None when it is new."""
    return read_document(site.folder / _STATE)


def refuse_foreign_staging(site: Site) -> None:
    """Raises RefusedError when what bears the staging folder's name is somebody else's: in the end it is removed. Who
    owns it could have everything in it lead elsewhere at any moment."""
    with workable(site.folder):
        if not os.path.lexists(site.folder):
            return
        foreign = ["a symbolic link"] if site.folder.is_symlink() else ["no directory"]
        if not site.folder.is_symlink() and site.folder.is_dir():
            foreign = sorted(path.name for path in site.folder.iterdir() if path.name != f"{_STATE}.new")
            if (owner := site.folder.lstat().st_uid) != os.geteuid():
                foreign = [f"it belongs to uid {owner}, and this process is uid {os.geteuid()}"]
            elif not foreign or read_state(site) is not None:
                return
    raise RefusedError(
        f"{site.folder} is needed to build the restore in, but was not created by backupd",
        detail="\n".join(foreign[:20]),
        hint="move it away, or give another data directory",
    )


def write_state(site: Site, state: State) -> None:
    """Remember ``state`` in the staging folder, durably."""
    write_durably(site.folder / _STATE, state.encode())


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
def passable(site: Site) -> Iterator[None]:
    """Whoever works on the staged copy may pass through the folders above it, and list nothing."""
    folders = [site.folder, *([site.datadir] if site.inside else [])]
    before = [(folder, folder.stat().st_mode & 0o7777) for folder in folders]
    try:
        for folder in folders if os.geteuid() == 0 else ():
            folder.chmod(PASSABLE)
        yield
    finally:
        for folder, mode in before if os.geteuid() == 0 else ():
            folder.chmod(mode)


@contextlib.contextmanager
def exclusive(*folders: Path) -> Iterator[None]:
    """Hold the existing ones of ``folders`` for this process alone. Raises RefusedError when another restore
    does.

    The lock is the kernel's, on the folder itself: it follows a rename, and a killed process leaves none. What that
    process was just starting may hold it for a moment longer, so there are some seconds of patience.
    """
    with contextlib.ExitStack() as held:
        for folder in folders:
            if not folder.is_dir():
                continue
            with workable(folder):
                descriptor = held.enter_context(opened(folder, os.O_RDONLY | os.O_DIRECTORY))
            _lock(descriptor, folder)
            if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
                raise RefusedError(f"another restore has just finished in {folder}", hint="check its result first")
        yield


def _lock(descriptor: int, folder: Path) -> None:
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > give_up:
                raise RefusedError(
                    f"another restore is running in {folder}",
                    hint="wait for it, or stop that process; then repeat the command",
                ) from error
            time.sleep(0.05)
        except OSError as error:
            raise unusable(folder, error) from error
        else:
            return
