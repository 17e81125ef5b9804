"""The folder behind a filesystem destination: durable steps, temporary names, and errors in our words.

Temporary files lie in ``.tmp`` of the same file system, each locked by its writer. The kernel drops the lock when the
writer dies, however it dies, so "unlocked" means "abandoned", without clocks or process ids. Trees on their way out
are renamed into the same place, which takes them away in one step.

Somebody else may own what lies below the root, and this may run as root. So below it no link is followed, also not one
that is put there in that moment: each folder on the way is opened by itself (``inside``), and what is done is done in
that one, whatever becomes of its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from backupd.model.errors import DestinationError, DestinationFullError
from backupd.model.text import format_size
from storage import layout
from storage.destination import Space, new_marker, not_empty

FILE_MODE = 0o640
FOLDER_MODE = 0o750
CHUNK = 1 << 20
_TEMPORARY = ".tmp"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TRASH = ".tree"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
LINK_HINT = (
    "nothing below a destination's folder may be a link: move what it leads to back in its place, or mount it "
    "there; the folder itself may be a link"
)
_NO_FILE = {errno.ELOOP, errno.ENXIO}
"""What opening a link, or a socket, gives."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_ABANDONED_WITHOUT_LOCKS = 86400.0
"""Seconds after which a temporary file counts as abandoned where the file system knows no locks."""


class SourceFailedError(Exception):
    """Carries an error of the stream being read past the translation of our own errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def read_source(stream: BinaryIO) -> bytes:
    """The next MiB of what is being stored. Raises SourceFailedError, whatever reading it raises."""
    try:
        return stream.read(CHUNK)
    except Exception as error:
        raise SourceFailedError(error) from error


@dataclass(slots=True)
class Temporary:
    """An open temporary file. Set ``kept`` once it was renamed to its final name."""

    descriptor: int
    path: Path
    kept: bool = False


class Folder:
    """``root`` of the destination called ``name``. Methods raise OSError; wrap calls in ``guard``."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.marker = root / layout.REPOSITORY
        self._making = threading.Lock()

    @contextlib.contextmanager
    def inside(self, folder: str) -> Iterator[Path]:
        """The folder ``a/b`` below the root ("" for that itself), as a path that leads there whatever becomes of its
        name. Raises DestinationError where a link is on the way, FileNotFoundError, NotADirectoryError."""
        descriptor = os.open(self.root, _OPEN_FOLDER)
        try:
            for way in folders_of(folder):
                try:
                    below = os.open(way.rpartition("/")[2], _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                except NotADirectoryError:  # what a link is, too
                    if (self.root / way).is_symlink():
                        raise self.linked(way, f"going to {folder}") from None
                    raise
                os.close(descriptor)
                descriptor = below
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    # Errors

    @contextlib.contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Turn an OSError of the block into a DestinationError that says what ``doing`` failed."""
        try:
            yield
        except OSError as error:
            raise self.failure(error, doing) from error
        except RecursionError as error:
            deep = OSError(errno.ENAMETOOLONG, "folders lie in folders in folders there, more than any of ours")
            raise self.failure(deep, doing) from error

    def failure(self, error: OSError, doing: str) -> DestinationError:
        """The DestinationError for ``error``, met while ``doing`` something: DestinationFullError for a full disk or
        quota; the hint tells a missing marker from missing rights."""
        what = f"destination {self.name} ({self.root}): {doing} failed"
        detail = error.strerror or str(error)
        if error.errno in _FULL:
            return DestinationFullError(
                f"destination {self.name} ({self.root}) is full: {doing} failed",
                detail=f"{detail}; {self._room()}",
                hint="free some space or let retention run; nothing of this file was kept",
                destination=self.name,
            )
        if not self.is_initialised():
            return DestinationError(
                what, detail=f"{detail}; {layout.REPOSITORY} is not there", hint=self._missing_hint()
            )
        if error.errno in _FORBIDDEN:
            return DestinationError(
                what,
                detail=detail,
                hint=f"make {self.root} writable for the user that runs backupd (uid "
                f"{os.geteuid()}), and look whether the file system is mounted read-only",
            )
        return DestinationError(what, detail=detail, hint="look at the disk and the kernel log (dmesg)")

    def linked(self, key: str, doing: str) -> DestinationError:
        """What to say of a symbolic link below the root. A listing that passed it over would show that nothing is
        there, and what is not there gets collected; one that followed it could leave the disk, or never end."""
        return DestinationError(
            f"destination {self.name} ({self.root}): {doing} failed",
            detail=f"{self.root / key.rstrip('/')} is a symbolic link",
            hint=LINK_HINT,
        )

    def require(self, doing: str) -> None:
        """Raises DestinationError unless the marker is there.

        An unmounted disk leaves an empty folder in its place. Reading it would show no backups at all, writing would
        fill the disk below it.
        """
        if not self.is_initialised():
            raise DestinationError(
                f"destination {self.name} ({self.root}): {doing} failed",
                detail=f"{layout.REPOSITORY} is not there",
                hint=self._missing_hint(),
            )

    def _missing_hint(self) -> str:
        return f"is the disk of {self.root} mounted? A destination that was used before is never made anew by itself"

    def _room(self) -> str:
        try:
            room = self.space()
        except OSError as error:
            return f"free space unknown ({error.strerror})"
        inodes = "" if room.free_inodes is None else f", {room.free_inodes} inodes free"
        return f"{room.free} bytes free ({format_size(room.free)}) of {room.total}{inodes}"

    # The marker

    def is_initialised(self) -> bool:
        """Is the marker in the folder?"""
        return self.marker.is_file()

    def initialise(self, now: datetime) -> None:
        """Make an empty or absent folder (not its parent) a destination. Raises RefusedError, OSError."""
        if self.is_initialised():
            return
        if not self.root.exists():
            self.root.mkdir(FOLDER_MODE)
            self.root.chmod(FOLDER_MODE)  # mkdir's mode is cut by the umask
            self.sync(self.root.parent)
        strangers = sorted({path.name for path in self.root.iterdir()} - {"lost+found", _TEMPORARY, layout.REPOSITORY})
        if strangers:
            raise not_empty(str(self.root), strangers, f"give destination {self.name} a folder of its own")
        with self.temporary() as temporary:
            self._write(temporary, new_marker(now, links=True))
            try:
                # A link fails where a rename would overwrite, so of two first users one wins.
                os.link(temporary.path, self.marker)
            except FileExistsError:
                return
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._write(temporary, new_marker(now, links=False))
                temporary.path.rename(self.marker)
                temporary.kept = True
        self.sync(self.root)

    def knows_links(self) -> bool:
        """Could this file system make hard links when the destination was made? True while nobody knows."""
        try:
            return bool(json.loads(self.marker.read_bytes())["links"])
        except (OSError, ValueError, KeyError, TypeError):
            return True

    @staticmethod
    def _write(temporary: Temporary, raw: bytes) -> None:
        os.ftruncate(temporary.descriptor, 0)
        os.pwrite(temporary.descriptor, raw, 0)
        os.fsync(temporary.descriptor)

    # Durable steps

    def make(self, folder: str, *, durable: bool = True) -> None:
        """Make ``folder`` and what is missing between it and the root, each durable in its parent. Raises
        DestinationError where a link is on the way, FileExistsError where a file is."""
        try:
            with self.inside(folder):
                return
        except FileNotFoundError:
            pass
        for way in folders_of(folder):
            above, _, name = way.rpartition("/")
            with self.inside(above) as there, self._making:
                try:
                    (there / name).mkdir(FOLDER_MODE)
                except FileExistsError:
                    continue
            with self.inside(way) as made:
                made.chmod(FOLDER_MODE)  # mkdir's mode is cut by the umask
            if durable:
                with self.inside(above) as there:
                    self.sync(there)

    def sync_removal(self, folder: str) -> None:
        """Make a removal in ``folder`` durable, also when somebody removed the emptied folder meanwhile."""
        while True:
            try:
                with self.inside(folder) as there:
                    return self.sync(there)
            except FileNotFoundError:
                if not folder:
                    raise
                folder = folder.rpartition("/")[0]

    @staticmethod
    def sync(folder: Path) -> None:
        """Make renames, new names and removals in ``folder`` durable."""
        descriptor = os.open(folder, _OPEN_FOLDER)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def move(self, temporary: Temporary, target: str) -> None:
        """Give a complete temporary file its final name, durably, in place of what had it."""
        above, _, name = target.rpartition("/")
        while True:
            try:
                self.make(above)
                with self.inside(above) as there:
                    temporary.path.replace(there / name)
                    temporary.kept = True
                    self.sync(there)
            except FileNotFoundError:
                # Somebody removed a folder because it was empty, just before. A gone root ends the loop.
                if temporary.kept or not temporary.path.exists() or not self.is_initialised():
                    raise
                continue
            return

    def prune(self, folder: str) -> None:
        """Remove ``folder`` and its parents up to two levels below the root, as far as they are empty."""
        while folder.count("/") >= 1:
            above, _, name = folder.rpartition("/")
            try:
                with self.inside(above) as there:
                    (there / name).rmdir()
            except (OSError, DestinationError):
                return  # not empty, or somebody else was faster
            folder = above

    def space(self) -> Space:
        """What the file system tells (statvfs): bytes and inodes that this user may use."""
        found = os.statvfs(self.root)
        return Space(
            total=found.f_blocks * found.f_frsize,
            free=found.f_bavail * found.f_frsize,
            free_inodes=found.f_favail if found.f_files else None,
        )

    # Temporary names

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Temporary]:
        """A new locked temporary file; it is removed at the end unless it was ``kept``."""
        self.make(_TEMPORARY)
        with self.inside(_TEMPORARY) as folder:
            temporary = self._new_temporary(folder)
            try:
                yield temporary
            finally:
                if not temporary.kept:
                    temporary.path.unlink(missing_ok=True)
                os.close(temporary.descriptor)

    def _new_temporary(self, folder: Path) -> Temporary:
        while True:
            path = folder / secrets.token_hex(12)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            try:
                os.fchmod(descriptor, FILE_MODE)
                self._lock(descriptor)
                if os.fstat(descriptor).st_nlink:
                    return Temporary(descriptor, path)
            except BaseException:
                os.close(descriptor)
                path.unlink(missing_ok=True)
                raise
            os.close(descriptor)  # taken for abandoned between open and lock

    @staticmethod
    def _lock(descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def discard(self, folder: str) -> bool:
        """Take a whole folder away in one step, then remove its content. False when it was not there."""
        self.make(_TEMPORARY)
        above, _, name = folder.rpartition("/")
        with self.inside(_TEMPORARY) as temporary:
            trash = temporary / (secrets.token_hex(12) + _TRASH)
            try:
                with self.inside(above) as there:
                    (there / name).rename(trash)
                    self.sync(there)
            except FileNotFoundError:
                return False
            _remove_all(trash)
        return True

    def leftovers(self) -> Iterator[str]:
        """Names of abandoned temporary files and of trees whose removal did not end."""
        for name in self._abandoned(remove=False):
            yield f"{_TEMPORARY}/{name}"

    def clear_leftovers(self) -> int:
        """Remove what ``leftovers`` names; how many went."""
        return sum(1 for _name in self._abandoned(remove=True))

    def _abandoned(self, *, remove: bool) -> Iterator[str]:
        try:
            with self.inside(_TEMPORARY) as folder:
                for path in sorted(folder.iterdir()):
                    if _take(path, remove=remove):
                        yield path.name
        except FileNotFoundError:
            return  # nothing was ever written


def _take(path: Path, *, remove: bool) -> bool:
    """Is it abandoned? With ``remove`` it goes then."""
    if path.suffix == _TRASH:
        if remove:
            _remove_all(path)
        return True
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        if remove:  # none of ours
            path.unlink(missing_ok=True)
        return True
    try:
        if not _is_free(descriptor):
            return False
        if remove:
            # Under the lock: a writer that just made this file sees that it is gone and takes another.
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
    return True


def folders_of(above: str) -> list[str]:
    """``a/b/c`` and what it lies in, the outermost first; nothing for the root."""
    parts = above.split("/") if above else []
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_WITHOUT_LOCKS
    return os.fstat(descriptor).st_nlink > 0  # renamed or removed meanwhile: nothing to clear


def _remove_all(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return

    def ignore_gone(_function: object, _path: str, problem: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(problem[1], FileNotFoundError):
            raise problem[1]

    shutil.rmtree(folder, onerror=ignore_gone)
