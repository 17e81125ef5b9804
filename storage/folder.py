"""A folder of a mounted file system as a destination, but for its browsable trees (``storage.filesystem``).

Every put is: temporary file, fsync, rename, fsync of the folder. What a kill or a power cut leaves is a temporary file
that no listing shows and ``clear_leftovers`` removes.

Temporary files are in ``.tmp`` of the same file system, each locked by its writer. The kernel drops the lock when the
writer dies, however it dies, so "unlocked" means "abandoned", without clocks or process ids. Trees on their way out
are renamed into the same folder, which takes them away in one step.

Somebody else may own what is below the root, and this may run as root. So below it no link is followed, also not one
that is put there in that moment: each folder on the way is opened by itself (``_inside``), and what is done is done in
that one, whatever becomes of its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO

from backupd.model.errors import DestinationError, DestinationFullError, ObjectMissingError
from backupd.process.folders import sync_folder
from storage import layout
from storage.destination import Capability, ObjectInfo, Space, new_marker, not_empty

FILE_MODE = 0o640
FOLDER_MODE = 0o750
_CHUNK = 1 << 20
_TEMPORARY = ".tmp"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TRASH = ".tree"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
LINK_HINT = (
    "only a destination's folder itself may be a link, nothing below it: move the link's target there, or mount it "
    "there"
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
        return stream.read(_CHUNK)
    except Exception as error:
        raise SourceFailedError(error) from error


@dataclass(slots=True)
class _Temporary:
    """An open temporary file. Set ``kept`` once it was renamed to its final name."""

    descriptor: int
    path: Path
    kept: bool = False

    def write(self, raw: bytes) -> None:
        """Durably, in place of what is in it."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, raw, 0)
        os.fsync(self.descriptor)


class Folder:
    """``root`` must be on one file system. Nothing is touched before the first call."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self._marker = root / layout.REPOSITORY
        self._making = threading.Lock()

    @property
    def capabilities(self) -> Capability:
        """SPACE."""
        return Capability.SPACE

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        """See ``Destination.put``: a temporary file, fsync, rename, fsync of the folder."""
        layout.check_key(key)
        try:
            with self._doing(f"writing {key}"), self._temporary() as temporary:
                while chunk := read_source(stream):
                    view = memoryview(chunk)
                    while view:
                        view = view[os.write(temporary.descriptor, view) :]
                os.fsync(temporary.descriptor)
                status = os.fstat(temporary.descriptor)
                self._move(temporary, key)
        except SourceFailedError as failed:
            raise failed.error from None
        return _info(key, status)

    def _move(self, temporary: _Temporary, target: str) -> None:
        """Give a complete temporary file its final name, durably, in place of what had it."""
        above, _, name = target.rpartition("/")
        while True:
            try:
                self._make(above)
                with self._inside(above) as there:
                    temporary.path.replace(there / name)
                    temporary.kept = True
                    self.sync(there)
            except FileNotFoundError:
                # Somebody removed a folder because it was empty, just before. A gone root ends the loop.
                if temporary.kept or not temporary.path.exists() or not self.is_initialised():
                    raise
                continue
            return

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        """See ``Destination.get``. A symbolic link, or what is no file, is refused."""
        layout.check_key(key)
        return self._open(key, f"reading {key}", offset, length)

    def _open(self, key: str, doing: str, offset: int, length: int | None) -> BinaryIO:
        failure = partial(self._failure, doing=doing)
        with self._above(key, doing) as path:
            try:
                return io.BufferedReader(_Slice(path, offset, length, failure), _CHUNK)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise self._linked(key, doing) from error
                raise

    def stat(self, key: str) -> ObjectInfo:
        """See ``Destination.stat``."""
        return _info(key, self._status(key))

    def _status(self, key: str) -> os.stat_result:
        layout.check_key(key)
        doing = f"looking at {key}"
        with self._above(key, doing) as path:
            found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise self._linked(key, doing)
        return found

    @contextlib.contextmanager
    def _above(self, key: str, doing: str) -> Iterator[Path]:
        """Where the file ``key`` is. Raises ObjectMissingError for the block where it is not; the destination's own
        absence is another thing and comes first."""
        above, _, name = key.rpartition("/")
        with self._guard(doing):
            try:
                with self._inside(above) as there:
                    yield there / name
            except (FileNotFoundError, NotADirectoryError):
                self._require(f"looking for {key}")
                raise ObjectMissingError(f"destination {self.name} ({self.root}) has no {key}") from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ``Destination.list``. Raises DestinationError where a symbolic link is on the way."""
        doing = f"listing {prefix}"
        self._require(doing)
        layout.check_prefix(prefix)
        above = prefix.rpartition("/")[0]
        with self._guard(doing):
            for folder in folders_of(above):
                if (self.root / folder).is_symlink():
                    raise self._linked(folder, doing)
            yield from self._walk(f"{above}/" if above else "", prefix)

    def _walk(self, above: str, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(self.root / above) as found:
                entries = [(entry, entry.is_dir(follow_symlinks=False)) for entry in found]
        except (FileNotFoundError, NotADirectoryError):
            return
        # Keys sort as if a folder's name ended with its slash: "a.b" comes before "a/c".
        entries.sort(key=lambda pair: pair[0].name + "/" if pair[1] else pair[0].name)
        for entry, is_folder in entries:
            key = above + entry.name
            if entry.name[0] == "." or layout.in_tree(key):
                continue
            inside = (key + "/").startswith(prefix) or prefix.startswith(key + "/")
            if inside and entry.is_symlink():
                raise self._linked(key, f"listing {prefix}")
            if is_folder:
                if inside and key.count("/") + 1 < layout.DEEPEST:
                    yield from self._walk(key + "/", prefix)
            elif key.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):  # deleted while we list
                    yield _info(key, entry.stat(follow_symlinks=False))

    def delete(self, key: str) -> None:
        """See ``Destination.delete``. On the disk afterwards, but for objects, which may come back after a power
        cut."""
        layout.check_key(key)
        above, _, name = key.rpartition("/")
        doing = f"deleting {key}"
        with self._guard(doing):
            try:
                with self._inside(above) as there:
                    (there / name).unlink()
            except (FileNotFoundError, NotADirectoryError):
                self._require(doing)
                return
            # The order of deletions is what keeps a power cut harmless (manifest before objects), and an object that
            # comes back is only garbage again: so objects alone go without waiting for the disk.
            if not key.startswith(layout.OBJECTS):
                self._sync_removal(above)
                self._prune(above)

    def space(self) -> Space | None:
        """What the file system reports (statvfs): bytes and inodes that this user may use."""
        with self._guard("asking for free space"):
            return self._space()

    def _space(self) -> Space:
        found = os.statvfs(self.root)
        return Space(
            total=found.f_blocks * found.f_frsize,
            free=found.f_bavail * found.f_frsize,
            free_inodes=found.f_favail if found.f_files else None,
        )

    # The marker

    def is_initialised(self) -> bool:
        """Is the marker in the folder?"""
        return self._marker.is_file()

    def initialise(self, now: datetime) -> None:
        """See ``Destination.initialise``. Makes the folder, not its parent."""
        try:
            if not self.is_initialised():
                self._put_marker(now)
        except OSError as error:
            hint = f"make {self.root.parent} first" if not self.root.parent.is_dir() else ""
            failure = self._failure(error, "initialising")
            failure.hint = hint or f"make {self.root} a folder that uid {os.geteuid()} may write to"
            raise failure from error

    def _put_marker(self, now: datetime) -> None:
        if not self.root.exists():
            self.root.mkdir(FOLDER_MODE)
            self.root.chmod(FOLDER_MODE)  # mkdir's mode is cut by the umask
            self.sync(self.root.parent)
        strangers = sorted({path.name for path in self.root.iterdir()} - {"lost+found", _TEMPORARY, layout.REPOSITORY})
        if strangers:
            raise not_empty(str(self.root), strangers, f"give destination {self.name} its own folder")
        with self._temporary() as temporary:
            temporary.write(new_marker(now, links=True))
            try:
                # A link fails where a rename would overwrite, so of two first users one wins.
                os.link(temporary.path, self._marker)
            except FileExistsError:
                return
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                temporary.write(new_marker(now, links=False))
                temporary.path.rename(self._marker)
                temporary.kept = True
        self.sync(self.root)

    def _knows_links(self) -> bool:
        """Could this file system make hard links when the destination was made? True while nobody knows."""
        try:
            return bool(json.loads(self._marker.read_bytes())["links"])
        except (OSError, ValueError, KeyError, TypeError):
            return True

    # Below the root

    @contextlib.contextmanager
    def _inside(self, folder: str) -> Iterator[Path]:
        """The folder ``a/b`` below the root ("" for that itself), as a path that leads there whatever becomes of its
        name. Raises DestinationError where a link is on the way, FileNotFoundError, NotADirectoryError."""
        descriptor = os.open(self.root, _OPEN_FOLDER)
        try:
            for way in folders_of(folder):
                try:
                    below = os.open(way.rpartition("/")[2], _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                except NotADirectoryError:  # what a link is, too
                    if (self.root / way).is_symlink():
                        raise self._linked(way, f"going to {folder}") from None
                    raise
                os.close(descriptor)
                descriptor = below
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def _make(self, folder: str, *, durable: bool = True) -> None:
        """Make ``folder`` and what is missing between it and the root, each durable in its parent. Raises
        DestinationError where a link is on the way, FileExistsError where a file is."""
        with contextlib.suppress(FileNotFoundError), self._inside(folder):
            return
        for way in folders_of(folder):
            above, _, name = way.rpartition("/")
            with self._inside(above) as there, self._making:
                try:
                    (there / name).mkdir(FOLDER_MODE)
                except FileExistsError:
                    continue
            with self._inside(way) as made:
                made.chmod(FOLDER_MODE)  # mkdir's mode is cut by the umask
            if durable:
                with self._inside(above) as there:
                    self.sync(there)

    @staticmethod
    def sync(folder: Path) -> None:
        """Make renames, new names and removals in ``folder`` durable."""
        sync_folder(folder)

    def _sync_removal(self, folder: str) -> None:
        """Make a removal in ``folder`` durable, also when somebody removed the emptied folder meanwhile."""
        while True:
            try:
                with self._inside(folder) as there:
                    return self.sync(there)
            except FileNotFoundError:
                if not folder:
                    raise
                folder = folder.rpartition("/")[0]

    def _prune(self, folder: str) -> None:
        """Remove ``folder`` and its parents up to two levels below the root, as far as they are empty."""
        while folder.count("/") >= 1:
            above, _, name = folder.rpartition("/")
            try:
                with self._inside(above) as there:
                    (there / name).rmdir()
            except (OSError, DestinationError):
                return  # not empty, or somebody else was faster
            folder = above

    # Temporary names

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[_Temporary]:
        """A new locked temporary file; it is removed at the end unless it was ``kept``."""
        self._make(_TEMPORARY)
        with self._inside(_TEMPORARY) as folder:
            temporary = _new_temporary(folder)
            try:
                yield temporary
            finally:
                if not temporary.kept:
                    temporary.path.unlink(missing_ok=True)
                os.close(temporary.descriptor)

    def _discard(self, folder: str) -> bool:
        """Take a whole folder away in one step, then remove its content. False when it was not there."""
        self._make(_TEMPORARY)
        above, _, name = folder.rpartition("/")
        with self._inside(_TEMPORARY) as temporary:
            trash = temporary / (secrets.token_hex(12) + _TRASH)
            try:
                with self._inside(above) as there:
                    (there / name).rename(trash)
                    self.sync(there)
            except FileNotFoundError:
                return False
            _remove_all(trash)
        return True

    def leftovers(self) -> Iterator[str]:
        """Temporary files that no process has locked, and trees whose removal did not end."""
        with self._doing("looking for leftovers"):
            for name in self._abandoned(remove=False):
                yield f"{_TEMPORARY}/{name}"

    def clear_leftovers(self) -> int:
        """See ``Destination.clear_leftovers``."""
        with self._doing("clearing leftovers"):
            return sum(1 for _name in self._abandoned(remove=True))

    def _abandoned(self, *, remove: bool) -> Iterator[str]:
        try:
            with self._inside(_TEMPORARY) as folder:
                for path in sorted(folder.iterdir()):
                    if _take(path, remove=remove):
                        yield path.name
        except FileNotFoundError:
            return  # nothing was ever written

    # Errors

    @contextlib.contextmanager
    def _doing(self, doing: str) -> Iterator[None]:
        """``_require`` and ``_guard``."""
        self._require(doing)
        with self._guard(doing):
            yield

    @contextlib.contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        """Turn an OSError of the block into a DestinationError that says what ``doing`` failed."""
        try:
            yield
        except OSError as error:
            raise self._failure(error, doing) from error
        except RecursionError as error:
            deep = OSError(errno.ENAMETOOLONG, "the folders there are nested deeper than backupd creates them")
            raise self._failure(deep, doing) from error

    def _failure(self, error: OSError, doing: str) -> DestinationError:
        """The DestinationError for ``error``, met while ``doing`` something: DestinationFullError for a full disk or
        quota; the hint distinguishes a missing marker from missing rights."""
        detail = error.strerror or str(error)
        if error.errno in _FULL:
            return DestinationFullError(
                f"destination {self.name} ({self.root}) is full: {doing} failed",
                detail=f"{detail}; {self._room()}",
                hint="free space or run retention; nothing of this file was stored",
                destination=self.name,
            )
        if not self.is_initialised():
            return self._without_marker(doing, f"{detail}; ")
        if error.errno in _FORBIDDEN:
            hint = (
                f"make {self.root} writable for the user that runs backupd (uid {os.geteuid()}), and check that the "
                "file system is not mounted read-only"
            )
            return self._failed(doing, detail, hint)
        return self._failed(doing, detail, "check the disk and the kernel log (dmesg)")

    def _linked(self, key: str, doing: str) -> DestinationError:
        """What to say of a symbolic link below the root. A listing that passed it over would show that nothing is
        there, and what is not there gets collected; one that followed it could leave the disk, or never end."""
        return self._failed(doing, f"{self.root / key.rstrip('/')} is a symbolic link", LINK_HINT)

    def _require(self, doing: str) -> None:
        """Raises DestinationError unless the marker is there.

        An unmounted disk leaves an empty folder in its place. Reading it would show no backups at all, writing would
        fill the disk below it.
        """
        if not self.is_initialised():
            raise self._without_marker(doing)

    def _without_marker(self, doing: str, before: str = "") -> DestinationError:
        hint = (
            f"check that the file system of {self.root} is mounted; backupd never re-initializes a "
            "destination that was in use"
        )
        return self._failed(doing, f"{before}{layout.REPOSITORY} is not there", hint)

    def _failed(self, doing: str, detail: str, hint: str) -> DestinationError:
        return DestinationError(f"destination {self.name} ({self.root}): {doing} failed", detail=detail, hint=hint)

    def _room(self) -> str:
        try:
            return self._space().words
        except OSError as error:
            return f"free space unknown ({error.strerror})"


class _Slice(io.RawIOBase):
    """``length`` bytes of a file from ``offset`` (to its end when None); disk errors come as DestinationError."""

    def __init__(self, path: Path, offset: int, length: int | None, failure: Callable[[OSError], Exception]) -> None:
        super().__init__()
        # A pipe would be waited for; nothing but a file is read.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            self._file.close()
            raise OSError(errno.EINVAL, "it is not a file")
        self._left = length
        self._failure = failure
        self._file.seek(offset)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # Buffer is not in 3.11
        view = memoryview(buffer)[: self._left]
        try:
            count = self._file.readinto(view) or 0
        except OSError as error:
            raise self._failure(error) from error
        if self._left is not None:
            self._left -= count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _new_temporary(folder: Path) -> _Temporary:
    while True:
        path = folder / secrets.token_hex(12)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            os.fchmod(descriptor, FILE_MODE)
            _lock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return _Temporary(descriptor, path)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)  # taken for abandoned between open and lock


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
    """``a/b/c`` and its parents, the outermost first; nothing for the root."""
    parts = above.split("/") if above else []
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _is_free(descriptor: int) -> bool:
    try:
        locked = _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    found = os.fstat(descriptor)
    # Without a name it was renamed or removed meanwhile: nothing to clear.
    return found.st_nlink > 0 if locked else time.time() - found.st_mtime > _ABANDONED_WITHOUT_LOCKS


def _lock(descriptor: int, how: int) -> bool:
    """False where the file system knows no locks."""
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _remove_all(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return

    def ignore_gone(_function: object, _path: str, problem: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(problem[1], FileNotFoundError):
            raise problem[1]

    shutil.rmtree(folder, onerror=ignore_gone)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))
