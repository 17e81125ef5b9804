"""A destination in a folder of a mounted file system.

Every put is: temporary file, fsync, rename, fsync of the folder. What a kill or a power cut leaves is a temporary file
that no listing shows and ``clear_leftovers`` removes.

Its browsable trees are hard links into the pool, so that the file system counts the references.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from backupd.model.errors import DestinationError, ObjectMissingError
from storage import layout
from storage.destination import Capability, ObjectInfo, Space
from storage.folder import CHUNK, FOLDER_MODE, Folder, SourceFailedError, folders_of, read_source


class LinkTree:
    """All trees of one destination. Methods raise OSError and ObjectMissingError."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def link(self, source: str, tree: str, path: str) -> bool:
        """Show ``source`` in the unfinished ``tree``. False when the file system allows no more links to it."""
        target = f"{_partial(tree)}/{path}"
        while True:
            try:
                return self._link(source, target)
            except FileNotFoundError:
                # Durable at publish; until then the tree is garbage anyway.
                self._folder.make(_partial(tree).rpartition("/")[0])
                self._folder.make(target.rpartition("/")[0], durable=False)

    def _link(self, source: str, target: str) -> bool:
        above, _, name = source.rpartition("/")
        try:
            with self._folder.inside(above) as there:
                status = (there / name).lstat()
                below, _, shown = target.rpartition("/")
                with self._folder.inside(below) as folder:
                    try:
                        os.link(there / name, folder / shown)
                    except FileExistsError:
                        found = (folder / shown).lstat()
                        if (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino):
                            return True
                        (folder / shown).unlink(missing_ok=True)
                        os.link(there / name, folder / shown)
        except FileNotFoundError:
            if not (self._folder.root / source).exists():
                self._folder.require("linking")
                raise ObjectMissingError(f"destination {self._folder.name} has no {source}") from None
            raise
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            return False
        return True

    def publish(self, tree: str) -> None:
        """Give the unfinished tree its final name, on the disk; an older one is removed first."""
        partial, final = _partial(tree), _final(tree)
        if not self._is_folder(partial):
            if self._is_folder(final):
                return
            raise ObjectMissingError(f"destination {self._folder.name} has no tree {tree}")
        with self._folder.inside(partial) as top:
            for _folder, _folders, _files, descriptor in os.fwalk(f"{top}/.", topdown=False):
                os.fchmod(descriptor, FOLDER_MODE)
                os.fsync(descriptor)
        above, _, name = final.rpartition("/")
        self._folder.make(above)
        self._folder.discard(final)
        before, _, called = partial.rpartition("/")
        with self._folder.inside(before) as there, self._folder.inside(above) as folder:
            (there / called).rename(folder / name)
            self._folder.sync(folder)
            self._folder.sync(there)

    def remove(self, tree: str) -> None:
        """Remove the tree in each of its states, and folders that are empty then."""
        for folder in (_partial(tree), _final(tree)):
            if self._folder.discard(folder):
                self._folder.prune(folder.rpartition("/")[0])

    def _is_folder(self, folder: str) -> bool:
        try:
            with self._folder.inside(folder):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False

    def all(self) -> Iterator[tuple[str, bool]]:
        """(tree, is it published?) of every tree, sorted."""
        found: set[tuple[str, bool]] = set()
        servers = self._folder.root / layout.SERVERS
        for server in _folders(servers):
            for name in _folders(servers / server):
                whole = layout.SERVERS + server + "/" + name
                tree = whole.removesuffix(layout.PARTIAL)
                if layout.backup_of(tree) is None:
                    continue
                if tree != whole:
                    found.add((tree, False))
                elif self._is_folder(_final(tree)):
                    found.add((tree, True))
        yield from sorted(found)

    def files(self, tree: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """Sorted by path. The inode comes with the folder's own listing, so 100,000 links need no 100,000 stats."""
        with contextlib.suppress(FileNotFoundError), self._folder.inside(_final(tree)) as top:
            yield from self._walk(top, "", top.stat().st_dev)

    def _walk(self, folder: Path, prefix: str, device: int) -> Iterator[tuple[str, tuple[int, int]]]:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(Path(entry.path), f"{prefix}{entry.name}/", device)
            else:
                yield prefix + entry.name, (device, entry.inode())


def file_in(tree: str, path: str) -> str:
    """Where the file ``path`` of a finished tree lies."""
    return f"{_final(tree)}/{path}"


def _partial(tree: str) -> str:
    return tree + layout.PARTIAL


def _final(tree: str) -> str:
    return f"{tree}/{layout.FILES}"


def _folders(parent: Path) -> list[str]:
    try:
        with os.scandir(parent) as found:
            return sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


class _Slice(io.RawIOBase):
    """``length`` bytes of a file from ``offset`` (to its end when None); disk errors come as DestinationError."""

    def __init__(self, path: Path, offset: int, length: int | None, failure: Callable[[OSError], Exception]) -> None:
        super().__init__()
        # A pipe would be waited for; nothing but a file is read.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            self._file.close()
            raise OSError(errno.EINVAL, "it is no file")
        self._left = length
        self._failure = failure
        self._file.seek(offset)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # Buffer is not in 3.11
        view = memoryview(buffer)
        if self._left is not None:
            view = view[: self._left]
        try:
            count = self._file.readinto(view)
        except OSError as error:
            raise self._failure(error) from error
        if self._left is not None:
            self._left -= count or 0
        return count or 0

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class FilesystemDestination:
    """``root`` must be on one file system. Nothing is touched before the first call."""

    def __init__(self, name: str, root: Path) -> None:
        self._folder = Folder(name, root)
        self._trees = LinkTree(self._folder)
        self._capabilities: Capability | None = None

    @property
    def name(self) -> str:
        """See ``Destination``."""
        return self._folder.name

    @property
    def root(self) -> Path:
        """The folder."""
        return self._folder.root

    @property
    def capabilities(self) -> Capability:
        """SPACE, and TREE where the file system knew hard links when the destination was made."""
        if self._capabilities is None:
            found = Capability.SPACE | (Capability.TREE if self._folder.knows_links() else Capability.NONE)
            if not self.is_initialised():
                return found
            self._capabilities = found
        return self._capabilities

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        """See ``Destination.put``: a temporary file, fsync, rename, fsync of the folder."""
        layout.check_key(key)
        doing = f"writing {key}"
        self._folder.require(doing)
        try:
            with self._folder.guard(doing), self._folder.temporary() as temporary:
                while chunk := read_source(stream):
                    view = memoryview(chunk)
                    while view:
                        view = view[os.write(temporary.descriptor, view) :]
                os.fsync(temporary.descriptor)
                status = os.fstat(temporary.descriptor)
                self._folder.move(temporary, key)
        except SourceFailedError as failed:
            raise failed.error from None
        return _info(key, status)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        """See ``Destination.get``. A symbolic link, or what is no file, is refused."""
        doing = f"reading {key}"
        layout.check_key(key)
        return self._open(key, doing, offset, length)

    def stat(self, key: str) -> ObjectInfo:
        """See ``Destination.stat``."""
        return _info(key, self._status(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ``Destination.list``. Raises DestinationError where a symbolic link is on the way."""
        self._folder.require(f"listing {prefix}")
        layout.check_prefix(prefix)
        above = prefix.rpartition("/")[0]
        with self._folder.guard(f"listing {prefix}"):
            for folder in folders_of(above):
                if (self.root / folder).is_symlink():
                    raise self._folder.linked(folder, f"listing {prefix}")
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
                raise self._folder.linked(key, f"listing {prefix}")
            if is_folder:
                if inside and key.count("/") + 1 < layout.DEEPEST:
                    yield from self._walk(key + "/", prefix)
            elif key.startswith(prefix):
                try:
                    yield _info(key, entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue  # deleted while we list

    def delete(self, key: str) -> None:
        """See ``Destination.delete``. On the disk afterwards, but for objects, which may come back after a power
        cut."""
        layout.check_key(key)
        above, _, name = key.rpartition("/")
        doing = f"deleting {key}"
        with self._folder.guard(doing):
            try:
                with self._folder.inside(above) as there:
                    (there / name).unlink()
            except (FileNotFoundError, NotADirectoryError):
                self._folder.require(doing)
                return
            # The order of deletions is what keeps a power cut harmless (manifest before objects), and an object that
            # comes back is only garbage again: so objects alone go without waiting for the disk.
            if not key.startswith(layout.OBJECTS):
                self._folder.sync_removal(above)
                self._folder.prune(above)

    def space(self) -> Space | None:
        """What the file system tells (statvfs): bytes and inodes that this user may use."""
        with self._folder.guard("asking for free space"):
            return self._folder.space()

    def is_initialised(self) -> bool:
        """Is the marker in the folder?"""
        return self._folder.is_initialised()

    def initialise(self, now: datetime) -> None:
        """See ``Destination.initialise``. Makes the folder, not its parent."""
        try:
            self._folder.initialise(now)
        except OSError as error:
            hint = f"make {self.root.parent} first" if not self.root.parent.is_dir() else ""
            failure = self._folder.failure(error, "initialising")
            failure.hint = hint or f"make {self.root} a folder that uid {os.geteuid()} may write to"
            raise failure from error

    def leftovers(self) -> Iterator[str]:
        """Temporary files that no process has locked, and trees whose removal did not end."""
        self._folder.require("looking for leftovers")
        with self._folder.guard("looking for leftovers"):
            yield from self._folder.leftovers()

    def clear_leftovers(self) -> int:
        """See ``Destination.clear_leftovers``."""
        self._folder.require("clearing leftovers")
        with self._folder.guard("clearing leftovers"):
            return self._folder.clear_leftovers()

    # Trees

    def link(self, key: str, tree: str, path: str) -> None:
        """See ``TreeDestination.link``: a hard link."""
        layout.check_tree(tree)
        layout.check_tree_path(path)
        layout.check_key(key)
        with self._folder.guard(f"linking {key}"):
            if not self._trees.link(key, tree, path):
                with self.get(key) as stream:
                    self.put(key, stream)
                self._trees.link(key, tree, path)

    def publish(self, tree: str) -> None:
        """See ``TreeDestination.publish``: fsync of all folders, then a rename."""
        layout.check_tree(tree)
        self._folder.require(f"publishing {tree}")
        with self._folder.guard(f"publishing {tree}"):
            self._trees.publish(tree)

    def remove_tree(self, tree: str) -> None:
        """See ``TreeDestination.remove_tree``: renamed out of sight, then removed."""
        layout.check_tree(tree)
        self._folder.require(f"removing {tree}")
        with self._folder.guard(f"removing {tree}"):
            self._trees.remove(tree)

    def trees(self) -> Iterator[tuple[str, bool]]:
        """See ``TreeDestination.trees``."""
        self._folder.require("listing trees")
        with self._folder.guard("listing trees"):
            yield from self._trees.all()

    def tree_files(self, tree: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """See ``TreeDestination.tree_files``. Nothing where there is no such tree."""
        layout.check_tree(tree)
        self._folder.require(f"listing {tree}")
        with self._folder.guard(f"listing {tree}"):
            yield from self._trees.files(tree)

    def open_tree_file(self, tree: str, path: str) -> BinaryIO:
        """See ``TreeDestination.open_tree_file``."""
        layout.check_tree(tree)
        layout.check_tree_path(path)
        return self._open(file_in(tree, path), f"reading {path} of {tree}", 0, None)

    def identity(self, key: str) -> tuple[int, int]:
        """See ``TreeDestination.identity``."""
        status = self._status(key)
        return status.st_dev, status.st_ino

    def _status(self, key: str) -> os.stat_result:
        layout.check_key(key)
        above, _, name = key.rpartition("/")
        with self._folder.guard(f"looking at {key}"):
            try:
                with self._folder.inside(above) as there:
                    found = (there / name).lstat()
            except (FileNotFoundError, NotADirectoryError):
                raise self._missing(key) from None
        if stat.S_ISLNK(found.st_mode):
            raise self._folder.linked(key, f"looking at {key}")
        return found

    def _open(self, key: str, doing: str, offset: int, length: int | None) -> BinaryIO:
        def failure(error: OSError) -> Exception:
            return self._folder.failure(error, doing)

        above, _, name = key.rpartition("/")
        with self._folder.guard(doing):
            try:
                with self._folder.inside(above) as there:
                    return io.BufferedReader(_Slice(there / name, offset, length, failure), CHUNK)
            except (FileNotFoundError, NotADirectoryError):
                raise self._missing(key) from None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise self._folder.linked(key, doing) from error
                raise

    def _missing(self, key: str) -> DestinationError:
        """The error for a key that is not there: the destination's own absence is another thing and comes first."""
        self._folder.require(f"looking for {key}")
        return ObjectMissingError(f"destination {self.name} ({self.root}) has no {key}")


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))
