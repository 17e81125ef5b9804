"""Destinations that pass every call on to another one: the base class, a bandwidth limit, and a circuit breaker.

``ForwardingDestination`` has the methods of every capability; ``capabilities`` says which of them mean something, as
everywhere.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, BinaryIO, cast

from backupd.model.errors import DestinationError, UnreachableError
from backupd.process.throttle import Throttle, Unlimited
from storage.destination import (
    ArchiveDestination,
    Capability,
    ChecksumDestination,
    Coldness,
    CopyingDestination,
    Destination,
    LockingDestination,
    ObjectInfo,
    Space,
    Tier,
    TreeDestination,
    Version,
    VersionedDestination,
)

PIECE = 256 * 1024
"""Bytes that are asked for at a time: small enough that streams beside each other share a bandwidth evenly."""
PAUSE = 30.0
"""Seconds for which a destination that did not answer counts as silent: finding that out takes as long, each time."""


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

    # -- COPIES, ARCHIVE, CHECKSUMS, LOCKS and VERSIONS

    def duplicate(self, source: str, target: str) -> bool:
        if not isinstance(self._inner, CopyingDestination):
            raise self._incapable("copies")
        return self._inner.duplicate(source, target)

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


def throttled(destination: Destination, *, put: Throttle | None = None, get: Throttle | None = None) -> Destination:
    """``destination`` with what is put into it and got from it passing ``put`` and ``get``; with all it can do. Streams
    that pass nothing stay what they are: a driver may be able to share the memory of one, and to go back in it."""
    putting, getting = (None if isinstance(one, Unlimited) else one for one in (put, get))
    return ThrottledDestination(destination, putting, getting) if putting or getting else destination


class ThrottledDestination(ForwardingDestination):
    """See ``throttled``. Bytes pass the throttle before they reach the destination or the reader."""

    def __init__(self, inner: Destination, put: Throttle | None, get: Throttle | None) -> None:
        super().__init__(inner)
        self._put = put
        self._get = get

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        return super().put(key, _buffered(_Slowed(stream, self._put)) if self._put else stream)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        return self._slow(super().get(key, offset=offset, length=length))

    def open_tree_file(self, tree: str, path: str) -> BinaryIO:
        return self._slow(super().open_tree_file(tree, path))

    def _slow(self, stream: BinaryIO) -> BinaryIO:
        return _buffered(_Slowed(stream, self._get, owned=True)) if self._get else stream


class _Slowed(io.RawIOBase):
    """Reads ``stream`` through a throttle. Closes it only when it is ``owned``."""

    def __init__(self, stream: BinaryIO, throttle: Throttle, *, owned: bool = False) -> None:
        super().__init__()
        self._stream = stream
        self._throttle = throttle
        self._owned = owned

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # BufferedReader gives a memoryview
        piece = self._stream.read(min(len(buffer), PIECE))
        if piece:
            self._throttle.take(len(piece))
            buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        if self._owned and not self.closed:
            self._stream.close()
        super().close()


def _buffered(raw: _Slowed) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(raw, PIECE))


class BreakerDestination(ForwardingDestination):
    """Passes everything on. After an UnreachableError each call within the next ``PAUSE`` seconds raises the same one
    at once. ``clock``: monotonic seconds."""

    def __init__(self, inner: Destination, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._silent: tuple[float, UnreachableError] | None = None

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._lock:
            silent = self._silent
        if silent is not None and self._clock() - silent[0] < PAUSE:
            before = silent[1]
            raise UnreachableError(before.message, detail=before.detail, hint=before.hint) from before
        try:
            yield
        except UnreachableError as error:
            with self._lock:
                self._silent = (self._clock(), error)
            raise
        if silent is not None:
            with self._lock:
                self._silent = None


def _asking(name: str) -> Callable[..., Any]:
    """The method ``name`` of BreakerDestination, which asks the destination; what it lists, for as long as it lists."""
    method = getattr(ForwardingDestination, name)

    def asked(self: BreakerDestination, *arguments: Any, **named: Any) -> Any:
        with self._asking():
            return method(self, *arguments, **named)

    def listed(self: BreakerDestination, *arguments: Any, **named: Any) -> Iterator[Any]:
        with self._asking():
            yield from method(self, *arguments, **named)

    return listed if name in ("list", "leftovers") else asked


_ASKING = ("put", "get", "stat", "list", "delete", "space", "is_initialised", "initialise", "leftovers")
for _name in (*_ASKING, "clear_leftovers", "coldness", "thaw", "checksum", "duplicate"):
    setattr(BreakerDestination, _name, _asking(_name))
