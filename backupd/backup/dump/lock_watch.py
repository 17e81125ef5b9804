"""Who waits, while tables are dumped, for a lock that the dump keeps.

A transaction keeps a lock on the definition of every table that it has read, until its end; mydumper has no means to
give one back before. An ALTER TABLE on such a table waits for as long as the dump runs, and every other statement on
that table waits behind it. Nothing of that shows at the dump, so that somebody has to look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from backupd.engine.lock_waits import Changing, waiting
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import ServerError
from backupd.model.table import TableName

_LOOK_SECONDS = 0.5
_TOLD = 20
_LEAVE_SECONDS = 5.0


class WaitWatch:
    """A context manager. ``bound``: seconds that a statement which changes one of ``tables`` may wait for before it is
    told: to ``tell`` while it waits ("" when nobody does any more), in ``log``, and in ``warnings`` afterwards."""

    def __init__(
        self,
        connection: Connection,
        tables: Collection[TableName],
        *,
        bound: float,
        tell: Callable[[str], None],
        log: Path | None = None,
    ) -> None:
        self._connection, self._tables, self._bound, self._tell = connection, frozenset(tables), bound, tell
        self._log, self._told = log, ""
        self._since: dict[tuple[int, str], float] = {}
        self._longest: dict[tuple[int, str], tuple[float, Changing]] = {}
        self._trouble = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waits", daemon=True)

    @property
    def warnings(self) -> tuple[str, ...]:
        told = [
            f"{self._words(one)} waited for {seconds:.0f} s for the metadata lock of a table of this dump, and "
            "others behind it"
            for seconds, one in self._longest.values()
        ]
        more = [f"and {len(told) - _TOLD} statements more waited"] if len(told) > _TOLD else []
        return (*told[:_TOLD], *more, *([self._trouble] if self._trouble else []))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        # A server that hangs may hold the thread; it is a daemon, so it cannot keep the process.
        self._thread.join(_LEAVE_SECONDS)

    def _run(self) -> None:
        try:
            with self._connection.connect() as session:
                while not self._end.wait(_LOOK_SECONDS):
                    self._look(session)
        except (ServerError, OSError) as error:
            why = error.detail if isinstance(error, ServerError) else f"its log cannot be written: {error.strerror}"
            self._trouble = f"who waited for locks of the dump was not watched to its end: {why}"

    def _look(self, session: Session) -> None:
        now = time.monotonic()
        there = {(one.by.id, one.by.statement): one for one in waiting(session) if self._tables & set(one.tables)}
        self._since = {key: self._since.get(key, now) for key in there}
        late = {key: one for key, one in there.items() if now - self._since[key] >= self._bound}
        for key, one in late.items():
            self._longest[key] = now - self._since[key], one
        if late or self._longest:
            first = next(iter(late.values()), None)
            self._say(f"{self._words(first)} waits for the metadata lock of a table of this dump" if first else "")

    def _say(self, words: str) -> None:
        if words and words != self._told and self._log is not None:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(f"backupd: {words}\n")
        self._told = words
        self._tell(words)

    def _words(self, one: Changing) -> str:
        by = one.by
        return f"{by.user}@{by.host} (connection {by.id}): {by.statement}"
