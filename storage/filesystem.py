"""A folder of a mounted file system with browsable trees: hard links into the pool, whose references the file system
counts."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from backupd.model.errors import ObjectMissingError
from storage import layout
from storage.destination import Capability
from storage.folder import FOLDER_MODE, Folder


class FilesystemDestination(Folder):
    """``root`` must be on one file system. Nothing is touched before the first call."""

    def __init__(self, name: str, root: Path) -> None:
        super().__init__(name, root)
        self._capabilities: Capability | None = None

    @property
    def capabilities(self) -> Capability:
        """SPACE, and TREE and COPIES where the file system knew hard links when the destination was made."""
        if self._capabilities is None:
            linked = Capability.TREE | Capability.COPIES
            found = Capability.SPACE | (linked if self._knows_links() else Capability.NONE)
            if not self.is_initialised():
                return found
            self._capabilities = found
        return self._capabilities

    def link(self, key: str, tree: str, path: str) -> None:
        """See ``TreeDestination.link``: a hard link."""
        layout.check_tree(tree)
        layout.check_tree_path(path)
        layout.check_key(key)
        with self._guard(f"linking {key}"):
            if not self._shown(key, tree, path):
                with self.get(key) as stream:
                    self.put(key, stream)
                self._shown(key, tree, path)

    def _shown(self, key: str, tree: str, path: str) -> bool:
        """Show ``key`` in the unfinished ``tree``. False when the file system allows no more links to it."""
        target = f"{_partial(tree)}/{path}"
        while True:
            try:
                return self._link(key, target)
            except FileNotFoundError:
                # Durable at publish; until then the tree is garbage anyway.
                self._make(_partial(tree).rpartition("/")[0])
                self._make(target.rpartition("/")[0], durable=False)

    def _link(self, source: str, target: str) -> bool:
        above, _, name = source.rpartition("/")
        below, _, shown = target.rpartition("/")
        try:
            with self._inside(above) as there:
                status = (there / name).lstat()
                with self._inside(below) as folder:
                    try:
                        os.link(there / name, folder / shown)
                    except FileExistsError:
                        found = (folder / shown).lstat()
                        if (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino):
                            return True
                        (folder / shown).unlink(missing_ok=True)
                        os.link(there / name, folder / shown)
        except FileNotFoundError:
            if not (self.root / source).exists():
                self._require("linking")
                raise ObjectMissingError(f"destination {self.name} has no {source}") from None
            raise
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            return False
        return True

    def duplicate(self, source: str, target: str) -> bool:
        """See ``CopyingDestination.duplicate``: a hard link, so both are one file until either is replaced, and what
        ``target`` held before is unlinked first. False where ``source`` has as many links as it may have; a file system
        that knows no links raises DestinationError, as any other trouble does."""
        layout.check_key(source)
        layout.check_key(target)
        above = target.rpartition("/")[0]
        with self._guard(f"linking {target}"):
            while True:
                try:
                    self._make(above)
                    if not self._link(source, target):
                        return False
                    with self._inside(above) as folder:
                        self.sync(folder)
                except FileNotFoundError:  # somebody removed a folder because it was empty, just before
                    self._require(f"linking {target}")
                    continue
                return True

    def publish(self, tree: str) -> None:
        """See ``TreeDestination.publish``: fsync of all folders, then a rename; an older tree is removed first."""
        layout.check_tree(tree)
        partial, final = _partial(tree), _final(tree)
        with self._doing(f"publishing {tree}"):
            if not self._is_folder(partial):
                if self._is_folder(final):
                    return
                raise ObjectMissingError(f"destination {self.name} has no tree {tree}")
            with self._inside(partial) as top:
                for _folder, _folders, _files, descriptor in os.fwalk(f"{top}/.", topdown=False):
                    os.fchmod(descriptor, FOLDER_MODE)
                    os.fsync(descriptor)
            above, _, name = final.rpartition("/")
            self._make(above)
            self._discard(final)
            before, _, called = partial.rpartition("/")
            with self._inside(before) as there, self._inside(above) as folder:
                (there / called).rename(folder / name)
                self.sync(folder)
                self.sync(there)

    def remove_tree(self, tree: str) -> None:
        """See ``TreeDestination.remove_tree``: in each of its states, renamed out of sight, then removed; and folders
        that are empty then."""
        layout.check_tree(tree)
        with self._doing(f"removing {tree}"):
            for folder in (_partial(tree), _final(tree)):
                if self._discard(folder):
                    self._prune(folder.rpartition("/")[0])

    def trees(self) -> Iterator[tuple[str, bool]]:
        """See ``TreeDestination.trees``: sorted."""
        found: set[tuple[str, bool]] = set()
        servers = self.root / layout.SERVERS
        with self._doing("listing trees"):
            for server in _folders(servers):
                for name in _folders(servers / server):
                    whole = layout.SERVERS + server + "/" + name
                    tree = whole.removesuffix(layout.PARTIAL)
                    if layout.backup_of(tree) is not None and (tree != whole or self._is_folder(_final(tree))):
                        found.add((tree, tree == whole))
            yield from sorted(found)

    def tree_files(self, tree: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """See ``TreeDestination.tree_files``: sorted by path; nothing where there is no such tree. The inode comes with
        the folder's own listing, so 100,000 links need no 100,000 stats."""
        layout.check_tree(tree)
        with self._doing(f"listing {tree}"), contextlib.suppress(FileNotFoundError), self._inside(_final(tree)) as top:
            yield from _files(top, "", top.stat().st_dev)

    def open_tree_file(self, tree: str, path: str) -> BinaryIO:
        """See ``TreeDestination.open_tree_file``."""
        layout.check_tree(tree)
        layout.check_tree_path(path)
        return self._open(f"{_final(tree)}/{path}", f"reading {path} of {tree}", 0, None)

    def identity(self, key: str) -> tuple[int, int]:
        """See ``TreeDestination.identity``."""
        status = self._status(key)
        return status.st_dev, status.st_ino

    def _is_folder(self, folder: str) -> bool:
        try:
            with self._inside(folder):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False


def _files(folder: Path, prefix: str, device: int) -> Iterator[tuple[str, tuple[int, int]]]:
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), f"{prefix}{entry.name}/", device)
        else:
            yield prefix + entry.name, (device, entry.inode())


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
