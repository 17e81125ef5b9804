"""A rate that several processes keep to together: each job, copy and stream of the service is a process of its own."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from backupd.model.errors import RefusedError
from backupd.process.runtime import shared_directory
from backupd.process.throttle import TokenBucket

_STATE = struct.Struct("<dd")
"""The level of the bucket, and the moment at which it had that: monotonic, so the same for all processes since boot."""


class SharedBucket(TokenBucket):
    """A ``TokenBucket`` for all processes of this user that use the same ``name`` on this host. Its state is a file in
    ``folder``, by default in the runtime directory; nothing is touched before something is taken. ``take`` raises
    RefusedError, too, where that file cannot be used."""

    def __init__(
        self,
        rate: float,
        name: str,
        *,
        folder: Path | None = None,
        cancel: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__(rate, cancel=cancel, clock=clock, wait=wait)
        self._name, self._folder = name, folder
        self._turn = threading.Lock()

    def _reserve(self, size: int) -> float:
        with self._turn, self._opened() as file:
            found = os.pread(file, _STATE.size, 0)
            level, seen = _STATE.unpack(found) if len(found) == _STATE.size else (self._burst, self._clock())
            if seen <= self._clock():  # else it is of the time before the machine was started
                self._level, self._seen = min(level, self._burst), seen
            delay = super()._reserve(size)
            os.pwrite(file, _STATE.pack(self._level, self._seen), 0)
            return delay

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, locked."""
        path = (self._folder or shared_directory("rates")) / self._name
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
            finally:
                os.close(file)
        except OSError as error:
            raise RefusedError(
                f"the file {path} that processes share a rate by cannot be used: {error.strerror}",
                hint="is there room, and may this user write there?",
            ) from error
