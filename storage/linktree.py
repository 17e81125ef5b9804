"""Browsable trees of hard links into the pool, so that the file system counts the references."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from backupd.model.errors import ObjectMissingError
from storage import layout
from storage.folder import FOLDER_MODE, Folder


class LinkTree:
    """All trees of one destination. Methods raise OSError and ObjectMissingError."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def _partial(self, tree: str) -> Path:
        return self._folder.root / (tree + layout.PARTIAL)

    def _final(self, tree: str) -> Path:
        return self._folder.root / tree / layout.FILES

    def link(self, source: Path, tree: str, path: str) -> bool:
        """Show ``source`` in the unfinished ``tree``. False when the file system allows no more links to it."""
        target = self._partial(tree) / path
        while True:
            try:
                os.link(source, target)
            except FileExistsError:
                if source.samefile(target):
                    return True
                target.unlink(missing_ok=True)
            except FileNotFoundError:
                if not source.exists():
                    self._folder.require("linking")
                    raise ObjectMissingError(
                        f"destination {self._folder.name} has no {source.relative_to(self._folder.root)}") from None
                self._folder.make(self._partial(tree).parent)
                # Durable, and of the right mode, at publish; until then the tree is garbage anyway.
                target.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                return False
            else:
                return True

    def publish(self, tree: str) -> None:
        partial, final = self._partial(tree), self._final(tree)
        if not partial.is_dir():
            if final.is_dir():
                return
            raise ObjectMissingError(f"destination {self._folder.name} has no tree {tree}")
        for folder, _folders, _files in os.walk(partial, topdown=False):
            Path(folder).chmod(FOLDER_MODE)
            self._folder.sync(Path(folder))
        self._folder.make(final.parent)
        self._folder.discard(final)
        partial.rename(final)
        self._folder.sync(final.parent)
        self._folder.sync(partial.parent)

    def remove(self, tree: str) -> None:
        for folder in (self._partial(tree), self._final(tree)):
            if self._folder.discard(folder):
                self._folder.prune(folder.parent)

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
                elif self._final(tree).is_dir():
                    found.add((tree, True))
        yield from sorted(found)

    def files(self, tree: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """Sorted by path. The inode comes with the folder's own listing, so 100,000 links need no 100,000 stats."""
        top = self._final(tree)
        with contextlib.suppress(FileNotFoundError):
            yield from self._walk(top, "", top.stat().st_dev)

    def _walk(self, folder: Path, prefix: str, device: int) -> Iterator[tuple[str, tuple[int, int]]]:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(Path(entry.path), f"{prefix}{entry.name}/", device)
            else:
                yield prefix + entry.name, (device, entry.inode())

    def file(self, tree: str, path: str) -> Path:
        return self._final(tree) / path


def _folders(parent: Path) -> list[str]:
    try:
        with os.scandir(parent) as found:
            return sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
