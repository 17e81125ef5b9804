"""Work of the service that is repeated and survives trouble: one guarded round, and a check of several things from time
to time in its thread.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring
from backupd.model.errors import BackupdError


class GuardedLoop:
    """A watch that outlives every trouble of one look: the next one may go well. The same trouble is logged once,
    until it is another one or over; ``kind`` is what such a log line is called. ``well_at``: the monotonic time at
    which a look last ended well."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._trouble = ""
        self.well_at = time.monotonic()

    def __call__(self, work: Callable[[], object]) -> None:
        trouble = ""
        try:
            work()
        except BackupdError as error:
            trouble = str(error)
        except Exception as error:  # noqa: BLE001  a watch that died would be missed by nobody; all is logged
            trouble = "".join(traceback.format_exception(error))
        if trouble and trouble != self._trouble:
            say(self._kind, trouble, level=logging.ERROR)
        if not trouble:
            self.well_at = time.monotonic()
        self._trouble = trouble


class PeriodicCheck(ABC):
    """Looks in its own thread, so that the service goes on meanwhile. ``name``: the thread's, and what its trouble is
    called in the log; ``every``: the time from one look to the next."""

    def __init__(self, name: str, every: timedelta) -> None:
        self._name, self._every = name, every
        self._due: datetime | None = None
        self._thread: threading.Thread | None = None
        self._trouble = ""

    def look(self, wiring: Wiring, now: datetime) -> None:
        """Begin, if it is time for it and the last time is over."""
        soon = self._due is not None and timedelta(0) < self._due - now <= self._every
        if soon or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = now + self._every
        # A daemon thread: the service may end in the middle, and the next one looks again.
        self._thread = threading.Thread(target=self.step, args=(wiring, now), name=self._name, daemon=True)
        self._thread.start()

    def step(self, wiring: Wiring, now: datetime) -> None:
        """One look at each. What fails is logged, once, and tried again."""
        troubles, names = [], []
        try:
            names = list(self._names(wiring))
        except BackupdError as error:
            troubles.append(str(error))
        for name in names:
            try:
                self._look(wiring, name, now)
            except BackupdError as error:
                troubles.append(f"{name}: {error}")
            except Exception as error:  # noqa: BLE001  what is wrong with one must not be the others' trouble; all is logged
                troubles.append(f"{name}: {''.join(traceback.format_exception(error))}")
        trouble = "\n".join(troubles)
        if trouble and trouble != self._trouble:
            say(f"{self._name}-trouble", trouble, level=logging.WARNING)
        self._trouble = trouble

    @abstractmethod
    def _names(self, wiring: Wiring) -> Iterable[str]:
        """What is looked at. Raises BackupdError."""

    @abstractmethod
    def _look(self, wiring: Wiring, name: str, now: datetime) -> None:
        """Raises BackupdError."""
