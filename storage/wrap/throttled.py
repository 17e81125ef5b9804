"""A destination that is written and read no faster than it may be. Everything else passes through unchanged."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

from backupd.process.throttle import Throttle, Unlimited
from storage.contract.destination import Destination, ObjectInfo
from storage.wrap.forwarding import ForwardingDestination

PIECE = 256 * 1024
"""Bytes that are asked for at a time: small enough that streams beside each other share a bandwidth evenly."""


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
