"""A destination over a network that is not asked again and again while it does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import BinaryIO

from backupd.model.errors import UnreachableError
from storage.contract.destination import Coldness, Destination, ObjectInfo, Space, Tier
from storage.wrap.forwarding import ForwardingDestination

PAUSE = 30.0
"""Seconds for which a place that did not answer counts as silent: finding that out takes as long, each time."""


class BreakerDestination(ForwardingDestination):
    """Passes everything on. After an UnreachableError each call within the next ``PAUSE`` seconds raises the same one
    at once. ``clock``: monotonic seconds."""

    def __init__(self, inner: Destination, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._silent: tuple[float, UnreachableError] | None = None

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        with self._asking():
            return super().put(key, stream)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        with self._asking():
            return super().get(key, offset=offset, length=length)

    def stat(self, key: str) -> ObjectInfo:
        with self._asking():
            return super().stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._asking():
            yield from super().list(prefix)

    def delete(self, key: str) -> None:
        with self._asking():
            super().delete(key)

    def space(self) -> Space | None:
        with self._asking():
            return super().space()

    def is_initialised(self) -> bool:
        with self._asking():
            return super().is_initialised()

    def initialise(self, now: datetime) -> None:
        with self._asking():
            super().initialise(now)

    def leftovers(self) -> Iterator[str]:
        with self._asking():
            yield from super().leftovers()

    def clear_leftovers(self) -> int:
        with self._asking():
            return super().clear_leftovers()

    def coldness(self, key: str) -> Coldness:
        with self._asking():
            return super().coldness(key)

    def thaw(self, key: str, tier: Tier, days: int) -> Coldness:
        with self._asking():
            return super().thaw(key, tier, days)

    def checksum(self, key: str) -> str | None:
        with self._asking():
            return super().checksum(key)

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
