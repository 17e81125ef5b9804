"""Being the one service of a spool and of a catalog, by a lock on each."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from backupd.app.context.wiring import Wiring
from backupd.model.errors import RefusedError
from backupd.model.text import format_time


class LeadershipLostError(Exception):
    """Another service has taken over."""


class Leader:
    """Holds the locks of the spool and of the catalog; leaving the block lets them go."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._name = f"process {os.getpid()} on {socket.gethostname()}, since {format_time(wiring.clock())}"
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._wiring.catalog.watch.leave()
        self._held.close()

    def begin(self) -> None:
        """Raises RefusedError naming the service that is at work already."""
        with ExitStack() as attempt:
            _lock_spool(self._wiring.settings.spool, self._name, attempt)
            self._take_catalog()
            self._held = attempt.pop_all()

    def stay(self) -> None:
        """Still the one service? After the connection to the catalog was cut its lock is taken again. Raises
        LeadershipLostError when another service holds it now, CatalogError when the catalog cannot be reached."""
        if self._wiring.catalog.watch.held():
            return
        try:
            self._take_catalog()
        except RefusedError as error:
            raise LeadershipLostError(
                f"the connection to the catalog was cut, and {error.message} ({error.detail})"
            ) from error

    def _take_catalog(self) -> None:
        watch = self._wiring.catalog.watch
        if not watch.take(self._name):
            raise _taken(f"the catalog {self._wiring.catalog.name}", watch.holder())


def _lock_spool(spool: Path, name: str, held: ExitStack) -> None:
    path = spool / "locks" / "service"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = held.enter_context(path.open("a+"))
    except OSError as error:
        raise RefusedError(
            f"the spool {spool} cannot be used: {error.strerror or error}",
            hint="make it a writable folder of this user, with room; see spool: in the configuration",
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise _taken(f"the spool {spool}", file.read().strip()) from None
    file.truncate(0)
    file.write(name + "\n")
    file.flush()


def _taken(what: str, holder: str) -> RefusedError:
    return RefusedError(
        f"another backupd service is running on {what}",
        detail=holder,
        hint="there is one service for each catalog; `--standby` waits until the other one is gone and takes over",
    )
