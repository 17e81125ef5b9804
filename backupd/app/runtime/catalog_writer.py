"""Writing into the catalog without ever waiting long for it.

A stream must not stand still because the catalog does. One thread asks the catalog; who wants something from it waits a
moment, and hears after that moment, or at once while the thread still hangs, that the catalog does not answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from backupd.app.context.logging_setup import say
from backupd.catalog.base.database import Database
from backupd.catalog.session import Catalog, upgrade
from backupd.model.errors import CatalogError

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds that somebody waits for the catalog."""
PAUSE = 5.0
"""Seconds for which nobody asks it again after it failed."""


class CatalogWriter:
    """A context manager; the catalog is opened when it is first asked. Threads may share it."""

    def __init__(self, url: str, *, make: bool = True) -> None:
        """``make``: the file, where there is none. Raises CatalogError for an address that is none, or a folder that
        cannot be made."""
        self.catalog = Catalog(Database(url, make=make))
        self._url = url
        self._ready = False
        self._requests: queue.SimpleQueue[tuple[Callable[[Catalog], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: Future[Any] | None = None
        self._failed_at: float | None = None
        self._trouble = ""
        self._thread = threading.Thread(target=self._serve, name="scribe", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.put(None)
        self._thread.join(PATIENCE)
        if not self._thread.is_alive():
            self.catalog.close()

    @property
    def trouble(self) -> str:
        """Why the catalog took nothing the last time; empty when it did."""
        return self._trouble

    def ask(self, work: Callable[[Catalog], T], *, patience: float | None = None) -> T:
        """What ``work`` gives. Raises what it raises, and CatalogError when there is no answer in time; then it may
        still be done later, so ``work`` must be such that doing it twice is right. ``patience``: seconds, of somebody
        who cannot go on without the answer."""
        seconds = PATIENCE if patience is None else patience
        with self._lock:
            if self._pending is not None and not self._pending.done():
                raise self._said(
                    CatalogError(
                        "the catalog does not answer",
                        hint="is somebody holding a long transaction on it, or is its server gone?",
                    )
                )
            if patience is None and self._failed_at is not None and time.monotonic() - self._failed_at < PAUSE:
                raise CatalogError(f"the catalog failed a moment ago: {self._trouble}")
            future: Future[Any] = Future()
            self._pending = future
            self._requests.put((work, future))
        try:
            answer: T = future.result(seconds)
        except TimeoutError:
            raise self._said(CatalogError(f"the catalog has not answered within {seconds:g} s")) from None
        except CatalogError as error:
            raise self._said(error) from error
        if self._trouble:
            say("catalog-back", "the catalog answers again")
        self._failed_at, self._trouble = None, ""
        return answer

    def _said(self, error: CatalogError) -> CatalogError:
        """Tell it once, until it is over."""
        self._failed_at = time.monotonic()
        if not self._trouble:
            say("catalog-trouble", str(error), level=logging.WARNING)
        self._trouble = error.message
        return error

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            work, future = request
            try:
                if not self._ready:
                    upgrade(self._url, make=False)
                    self._ready = True
                future.set_result(work(self.catalog))
            except BaseException as error:  # noqa: BLE001  not hidden: whoever waits for the answer raises it
                future.set_exception(error)
            del request, work, future
