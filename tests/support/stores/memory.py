"""A destination in this process's memory: the reference that runs. Everything is gone with the process."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import BinaryIO

from backupd.model.errors import DestinationError, ObjectMissingError
from backupd.model.text import Clock
from storage import layout
from storage.destination import Capability, ObjectInfo, Space

_DEVICE = 0


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class _Blob:
    data: bytes
    modified_at: datetime
    inode: int


class MemoryDestination:
    """Ready for use unless ``initialised=False``; ``tree=False`` takes the TREE capability away."""

    def __init__(self, name: str, *, tree: bool = True, initialised: bool = True, clock: Clock = _now) -> None:
        self._name = name
        self._tree = tree
        self._clock = clock
        self._lock = threading.Lock()
        self._inodes = itertools.count(1)
        self._blobs: dict[str, _Blob] = {}
        self._partial: dict[str, dict[str, _Blob]] = {}
        self._published: dict[str, dict[str, _Blob]] = {}
        self._initialised = initialised

    @property
    def name(self) -> str:
        """See ``Destination``."""
        return self._name

    @property
    def capabilities(self) -> Capability:
        """TREE and COPIES, or nothing."""
        return Capability.TREE | Capability.COPIES if self._tree else Capability.NONE

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        """See ``Destination.put``."""
        layout.check_key(key)
        self._require()
        pieces: list[bytes] = []
        while piece := stream.read(1 << 20):
            pieces.append(piece)
        blob = _Blob(b"".join(pieces), self._clock(), next(self._inodes))
        with self._lock:
            self._blobs[key] = blob
        return ObjectInfo(key, len(blob.data), blob.modified_at)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        """See ``Destination.get``."""
        data = self._find(key).data
        return io.BytesIO(data[offset:] if length is None else data[offset : offset + length])

    def stat(self, key: str) -> ObjectInfo:
        """See ``Destination.stat``."""
        blob = self._find(key)
        return ObjectInfo(key, len(blob.data), blob.modified_at)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ``Destination.list``: as it was when the listing began."""
        self._require()
        with self._lock:
            found = [(key, blob) for key, blob in self._blobs.items() if key.startswith(prefix)]
        for key, blob in sorted(found, key=lambda item: item[0]):
            yield ObjectInfo(key, len(blob.data), blob.modified_at)

    def delete(self, key: str) -> None:
        """See ``Destination.delete``."""
        layout.check_key(key)
        self._require()
        with self._lock:
            self._blobs.pop(key, None)

    def space(self) -> Space | None:
        """Nobody knows."""
        return None

    def is_initialised(self) -> bool:
        """As it was made, or since ``initialise``."""
        return self._initialised

    def initialise(self, now: datetime) -> None:
        """Writes no marker."""
        self._initialised = True

    def leftovers(self) -> Iterator[str]:
        """There are none: a put is one step."""
        self._require()
        return iter(())

    def clear_leftovers(self) -> int:
        """Removes nothing."""
        self._require()
        return 0

    def link(self, key: str, tree: str, path: str) -> None:
        """See ``TreeDestination.link``."""
        layout.check_tree(tree)
        layout.check_tree_path(path)
        blob = self._find(key)
        with self._lock:
            self._partial.setdefault(tree, {})[path] = blob

    def duplicate(self, source: str, target: str) -> bool:
        """See ``CopyingDestination.duplicate``: as a hard link, of the same age."""
        layout.check_key(target)
        blob = self._find(source)
        with self._lock:
            self._blobs[target] = blob
        return True

    def publish(self, tree: str) -> None:
        """See ``TreeDestination.publish``."""
        layout.check_tree(tree)
        self._require()
        with self._lock:
            if tree in self._partial:
                self._published[tree] = self._partial.pop(tree)
            elif tree not in self._published:
                raise ObjectMissingError(f"destination {self._name} has no tree {tree}")

    def remove_tree(self, tree: str) -> None:
        """See ``TreeDestination.remove_tree``."""
        layout.check_tree(tree)
        self._require()
        with self._lock:
            self._partial.pop(tree, None)
            self._published.pop(tree, None)

    def trees(self) -> Iterator[tuple[str, bool]]:
        """See ``TreeDestination.trees``."""
        self._require()
        with self._lock:
            found = [(tree, False) for tree in self._partial] + [(tree, True) for tree in self._published]
        return iter(sorted(found))

    def tree_files(self, tree: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """See ``TreeDestination.tree_files``."""
        layout.check_tree(tree)
        self._require()
        with self._lock:
            files = sorted(self._published.get(tree, {}).items())
        for path, blob in files:
            yield path, (_DEVICE, blob.inode)

    def open_tree_file(self, tree: str, path: str) -> BinaryIO:
        """See ``TreeDestination.open_tree_file``."""
        layout.check_tree(tree)
        self._require()
        with self._lock:
            blob = self._published.get(tree, {}).get(path)
        if blob is None:
            raise ObjectMissingError(f"destination {self._name} shows no {path} in {tree}")
        return io.BytesIO(blob.data)

    def identity(self, key: str) -> tuple[int, int]:
        """The device is always 0; every put makes a new inode."""
        return (_DEVICE, self._find(key).inode)

    def _require(self) -> None:
        if not self._initialised:
            raise DestinationError(f"destination {self._name} is not initialised")

    def _find(self, key: str) -> _Blob:
        layout.check_key(key)
        self._require()
        with self._lock:
            blob = self._blobs.get(key)
        if blob is None:
            raise ObjectMissingError(f"destination {self._name} has no {key}")
        return blob
