"""One client that writes a row after the other into one table until it is told to stop."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from tests.support.servers.server import Server, query


class Ticker:
    """Writes to ``table`` (an AUTO_INCREMENT id, a text ``t``) while the block lasts; it has begun when that does."""

    def __init__(self, server: Server, table: str) -> None:
        self._server, self._table = server, table
        self._stop, self._began = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self.count = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._began.wait(120)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._server.connect() as connection:
                while not self._stop.wait(0.005):
                    query(connection, f"INSERT INTO {self._table} (t) VALUES (MD5(RAND()))")
                    self.count += 1
                    if self.count % 5 == 0:
                        query(connection, f"UPDATE {self._table} SET t = REPEAT('x', 150) WHERE id = %s", (self.count,))
                    self._began.set()
        except BaseException as error:  # noqa: BLE001  carried to the test's own thread
            self._error = error
            self._began.set()
