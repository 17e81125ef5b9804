"""Where a restore is built before it is put in place, what is remembered there, and who may work there.

Beside the data directory, as ``<datadir>.restoring``, so that one rename puts everything in place. Where that
cannot be (the data directory is a mount point, its parent is not ours to write or another file system) inside
it, as ``.backupd-restoring``, and the files are moved one by one.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import RefusedError
from backupd.process.folders import PASSABLE
from restore.datadir.state import State, read_document, read_marker, write_durably

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
    def store(self) -> Path:
        """Tablespaces that lay outside the source's data directory, while they are staged."""
        return self.folder / "external"

    @property
    def final_store(self) -> Path:
        """Where those lie in the end: beside the data directory, because a server allows none inside."""
        return self.datadir.with_name(self.datadir.name + ".external")

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def ours(self) -> tuple[str, ...]:
        """Names inside the data directory that are no reason to refuse it."""
        return (INSIDE,) if self.inside else ()

    def increment(self, number: int) -> Path:
        return self.folder / f"increment-{number}"

    def built(self) -> Iterator[Path]:
        """What a restore made in the staging folder; what it remembers comes last."""
        found = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        yield from (path for path in found if any(fnmatch.fnmatchcase(path.name, name) for name in _BUILT))
        yield from (path for path in found if path.name in (_STATE, f"{_STATE}.new"))

    def refuse_moved(self) -> None:
        """Raises RefusedError where a symbolic link came to be on the way to the data directory."""
        if (leads := os.path.realpath(self.datadir)) != str(self.datadir):
            raise RefusedError(
                f"{self.datadir} is another place by now",
                detail=f"it leads to {leads}",
                hint="somebody put a symbolic link on the way there: see who, and put the folder back",
            )


def reserved(folder: Path) -> str:
    """Why backupd itself may remove what lies in ``folder``, or take it for a part of another restore; "" where it may
    not."""
    if any(fnmatch.fnmatchcase(folder.name, name) for name in _RESERVED):
        return f"the name {folder.name} is one of those that restores use for themselves"
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
        hint="give another data directory, or mend that: it must be on a file system where this user may make folders",
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
            f"{real} cannot be a data directory: it is the root of everything",
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
            f"{real} cannot be made: {parent} is not a directory", hint="give the data directory to restore into"
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
            f"{real} cannot be made: {parent} is read-only here",
            hint="the service writes only where its unit says: add ReadWritePaths= in a drop-in (systemctl edit "
            "backupd), restart it, and try again; or run `backupd restore` from a shell",
        )
    raise RefusedError(
        f"{real} cannot be made: {parent} is not writable",
        hint="run the restore as root, or make the empty data directory first",
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
        f"{site.folder} is needed to build the restore in, and is not one of backupd's",
        detail="\n".join(foreign[:20]),
        hint="move it away, or give another data directory",
    )


def write_state(site: Site, state: State) -> None:
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
            if folder.is_dir():
                held.enter_context(_locked(folder))
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with workable(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor, folder)
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise RefusedError(f"another restore has just finished in {folder}", hint="look at the result first")
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > give_up:
                raise RefusedError(
                    f"another restore is at work in {folder}",
                    hint="wait for it, or end that process; the same command then continues",
                ) from error
            time.sleep(0.05)
        except OSError as error:
            raise unusable(folder, error) from error
        else:
            return
