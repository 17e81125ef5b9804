"""A destination that passes everything on to another one: what a destination that adds something of its own builds on.

It has the methods of every capability; which of them mean something, ``capabilities`` says, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import BinaryIO

from backupd.model.errors import DestinationError
from storage.contract.destination import (
    ArchiveDestination,
    Capability,
    ChecksumDestination,
    Coldness,
    Destination,
    LockingDestination,
    ObjectInfo,
    Space,
    Tier,
    TreeDestination,
    Version,
    VersionedDestination,
)


class ForwardingDestination:
    """See the module. Subclasses override what they add."""

    def __init__(self, inner: Destination) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def capabilities(self) -> Capability:
        return self._inner.capabilities

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        return self._inner.put(key, stream)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        return self._inner.get(key, offset=offset, length=length)

    def stat(self, key: str) -> ObjectInfo:
        return self._inner.stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def space(self) -> Space | None:
        return self._inner.space()

    def is_initialised(self) -> bool:
        return self._inner.is_initialised()

    def initialise(self, now: datetime) -> None:
        self._inner.initialise(now)

    def leftovers(self) -> Iterator[str]:
        return self._inner.leftovers()

    def clear_leftovers(self) -> int:
        return self._inner.clear_leftovers()

    # -- TREE

    def link(self, key: str, tree: str, path: str) -> None:
        self._tree.link(key, tree, path)

    def publish(self, tree: str) -> None:
        self._tree.publish(tree)

    def remove_tree(self, tree: str) -> None:
        self._tree.remove_tree(tree)

    def trees(self) -> Iterator[tuple[str, bool]]:
        return self._tree.trees()

    def tree_files(self, tree: str) -> Iterator[tuple[str, tuple[int, int]]]:
        return self._tree.tree_files(tree)

    def open_tree_file(self, tree: str, path: str) -> BinaryIO:
        return self._tree.open_tree_file(tree, path)

    def identity(self, key: str) -> tuple[int, int]:
        return self._tree.identity(key)

    # -- ARCHIVE, CHECKSUMS, LOCKS and VERSIONS

    def coldness(self, key: str) -> Coldness:
        return self._archive.coldness(key)

    def thaw(self, key: str, tier: Tier, days: int) -> Coldness:
        return self._archive.thaw(key, tier, days)

    def checksum(self, key: str) -> str | None:
        if not isinstance(self._inner, ChecksumDestination):
            raise self._incapable("checksums")
        return self._inner.checksum(key)

    def extend(self, key: str, since: datetime) -> bool:
        if not isinstance(self._inner, LockingDestination):
            raise self._incapable("object lock")
        return self._inner.extend(key, since)

    def versions(self, prefix: str) -> Iterator[Version]:
        return self._versioned.versions(prefix)

    def open_version(self, version: Version) -> BinaryIO:
        return self._versioned.open_version(version)

    def version_checksum(self, version: Version) -> str | None:
        return self._versioned.version_checksum(version)

    def bring_back(self, version: Version, above: Sequence[Version]) -> None:
        self._versioned.bring_back(version, above)

    @property
    def _tree(self) -> TreeDestination:
        if not isinstance(self._inner, TreeDestination):
            raise self._incapable("trees")
        return self._inner

    @property
    def _archive(self) -> ArchiveDestination:
        if not isinstance(self._inner, ArchiveDestination):
            raise self._incapable("archive classes")
        return self._inner

    @property
    def _versioned(self) -> VersionedDestination:
        if not isinstance(self._inner, VersionedDestination):
            raise self._incapable("versions")
        return self._inner

    def _incapable(self, what: str) -> DestinationError:
        return DestinationError(f"destination {self.name} has no {what}")
