"""Browsable trees of hard links into the pool, so that the file system counts the references."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from backupd.model.errors import ObjectMissingError
from storage.contract import layout
from storage.local.folder import FOLDER_MODE, Folder


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
