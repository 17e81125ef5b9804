"""A destination that is written and read no faster than it may be. Everything else passes through unchanged."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import datetime
from typing import BinaryIO, cast

from backupd.process.throttle import Throttle, Unlimited
from storage.destination import Capability, Destination, ObjectInfo, Space, TreeDestination, as_tree

PIECE = 256 * 1024
"""Bytes that are asked for at a time: small enough that streams beside each other share a bandwidth evenly."""


def throttled(destination: Destination, *, put: Throttle | None = None, get: Throttle | None = None) -> Destination:
    """``destination`` with what is put into it and got from it passing ``put`` and ``get``; with its trees, if any."""
    tree = as_tree(destination)
    if tree is None:
        return ThrottledDestination(destination, put or Unlimited(), get or Unlimited())
    return ThrottledTree(tree, put or Unlimited(), get or Unlimited())


class ThrottledDestination:
    """See ``throttled``. Bytes pass the throttle before they reach the destination or the reader."""

    def __init__(self, inner: Destination, put: Throttle, get: Throttle) -> None:
        self._inner = inner
        self._put = put
        self._get = get

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def capabilities(self) -> Capability:
        return self._inner.capabilities

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        return self._inner.put(key, _buffered(_Slowed(stream, self._put)))

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        return self._slow(self._inner.get(key, offset=offset, length=length))

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

    def _slow(self, stream: BinaryIO) -> BinaryIO:
        return _buffered(_Slowed(stream, self._get, owned=True))


class ThrottledTree(ThrottledDestination):
    """The same for a destination with trees."""

    def __init__(self, inner: TreeDestination, put: Throttle, get: Throttle) -> None:
        super().__init__(inner, put, get)
        self._tree = inner

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
        return self._slow(self._tree.open_tree_file(tree, path))

    def identity(self, key: str) -> tuple[int, int]:
        return self._tree.identity(key)


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
