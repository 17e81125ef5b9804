"""What looks after processes of the service: a thread that looks at them until it has ended them all."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from backupd.app.context.incidents import Incidents
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.catalog_writer import Scribe
from backupd.app.runtime.child_process import HeldSettings
from backupd.app.runtime.guarded_loop import Guard


class ProcessWatch(ABC):
    """At work from entering the block until leaving it, or ``stop``. ``name``: the thread's; trouble in looking is told
    in the log as ``NAME-trouble``. ``grace``: seconds that a process has to end before it is killed."""

    def __init__(self, name: str, wiring: Wiring, *, grace: float) -> None:
        self._wiring, self._grace = wiring, grace
        self._held = HeldSettings()
        self._scribe = Scribe(wiring.settings.catalog)
        self._incidents = Incidents(self._scribe.catalog)
        self._awake, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._guarded = Guard(f"{name}-trouble")

    def __enter__(self) -> Self:
        self._scribe.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def reload(self, wiring: Wiring) -> None:
        """Go by these settings; processes for which nothing has changed go on undisturbed."""
        self._wiring = wiring
        self._held.changed()
        self._awake.set()

    def stop(self) -> None:
        """End all processes; returns when none is left."""
        self._ending.set()
        self._awake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
            self._scribe.__exit__(None, None, None)

    @abstractmethod
    def step(self) -> None:
        """One look. Raises CatalogError where the catalog could not be asked or told."""

    @abstractmethod
    def _pause(self) -> float:
        """Seconds until the next look."""

    @abstractmethod
    def _wind_down(self) -> bool:
        """A look while the service ends, which guards itself: ends processes, and says whether some are left."""

    def _loop(self) -> None:
        while not self._ending.is_set():
            self._guarded(self.step)
            self._awake.wait(self._pause())
            self._awake.clear()
        while self._wind_down():
            time.sleep(0.05)
        self._held.changed()
        self._held.let_go(())
