"""The contract of a place for stored bytes.

A destination stores whole byte strings under keys (relative paths with forward slashes, made only by
``storage.layout``). Everything that all destinations share is asked by one suite, ``tests/contract``;
``storage.memory`` is the reference that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Flag, auto
from typing import BinaryIO, Protocol, runtime_checkable


class Capability(Flag):
    """What a destination can do beyond the contract. Callers read these, never the class."""

    NONE = 0
    TREE = auto()
    """Keys can be shown again under a browsable name without a second copy: ``link`` and ``publish`` work."""
    SPACE = auto()
    """``space`` knows how much room is left."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object: its key, size in bytes, and when it was stored (aware, UTC)."""

    key: str
    size: int
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class Space:
    """Room at a destination, in bytes, and free inodes (None where there is no such limit)."""

    total: int
    free: int
    free_inodes: int | None = None


class Destination(Protocol):
    """All methods may be called from several threads at once.

    Every failure is a DestinationError (``retryable`` as the driver knows), a full disk DestinationFullError, an
    unknown key ObjectMissingError; ``message`` names the destination and the key.
    """

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capability: ...

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        """Store everything ``stream`` yields under ``key``, or nothing.

        The object becomes visible only after ``stream`` has reached its end and the bytes are durable. If reading
        raises, nothing remains, and that same error is raised. Replaces an existing object in one step. Safe to
        call again after any failure, with a fresh stream.
        """
        ...

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        """Open the bytes of ``key`` from ``offset``, at most ``length`` of them; the caller closes it.

        An offset at or past the end gives an empty stream.
        """
        ...

    def stat(self, key: str) -> ObjectInfo: ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in key order; unfinished puts and tree links never."""
        ...

    def delete(self, key: str) -> None:
        """Remove ``key``; an unknown key is not an error (deleting twice is the normal case after a crash)."""
        ...

    def space(self) -> Space | None:
        """How much room there is, or None where nobody knows (no SPACE capability)."""
        ...

    def is_initialised(self) -> bool:
        """Does the place exist and carry our marker? False for a folder that vanished or whose disk is not mounted.

        A caller who remembers that it once did must refuse to go on, not initialise again.
        """
        ...

    def initialise(self, now: datetime) -> None:
        """Make an empty place ready and put the marker; harmless when it is there already.

        Raises RefusedError when the place holds something else. Until this was called, every other method but
        ``is_initialised`` raises DestinationError.
        """
        ...

    def leftovers(self) -> Iterator[str]:
        """Names of unfinished puts and half-removed trees whose process is gone."""
        ...

    def clear_leftovers(self) -> int:
        """Remove what ``leftovers`` names and nothing that a living process writes; how many went."""
        ...


@runtime_checkable
class TreeDestination(Destination, Protocol):
    """A destination with the TREE capability: the file system's link count is the reference count."""

    def link(self, key: str, tree: str, path: str) -> None:
        """Show object ``key`` as ``path`` inside the unfinished tree ``tree``; repeating it is harmless.

        When the file system allows no more links to the object, the pool gets a fresh copy that new links use;
        earlier links keep the old one. Raises ObjectMissingError when ``key`` is not there.
        """
        ...

    def publish(self, tree: str) -> None:
        """Make the unfinished tree ``tree`` visible under its final name, in one step, durable. Idempotent.

        An older finished tree of that name gives way. Raises ObjectMissingError when nothing was ever linked.
        """
        ...

    def remove_tree(self, tree: str) -> None:
        """Remove ``tree``, finished or not. Unknown trees are not an error."""
        ...

    def trees(self) -> Iterator[tuple[str, bool]]:
        """Every tree and whether it is published."""
        ...

    def tree_files(self, tree: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """Each path inside the published ``tree`` with the (device, inode) it points to; nothing when there is none."""
        ...

    def open_tree_file(self, tree: str, path: str) -> BinaryIO:
        """The bytes shown as ``path`` in the published ``tree``; the caller closes it."""
        ...

    def identity(self, key: str) -> tuple[int, int]:
        """(device, inode) of the pool object ``key``."""
        ...


def as_tree(destination: Destination) -> TreeDestination | None:
    """``destination`` as one that shows trees, or None where the TREE capability is missing."""
    if Capability.TREE in destination.capabilities and isinstance(destination, TreeDestination):
        return destination
    return None
