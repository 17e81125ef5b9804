"""How many rows a table has in the snapshot; as many must have been written.

The count is read in a snapshot of our own, opened in the same moment as those of the tools, while they write.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from backupd.engine.server.snapshot import Snapshot
from backupd.engine.sql.client import Connection
from backupd.model.errors import ServerError
from backupd.model.server_facts import Position
from backupd.model.table import TableName

_COUNT = "SELECT COUNT(*) FROM {table}{history}"


class RowCounter:
    """Counts tables one after the other, in a thread, from ``start`` to ``finish``. A context manager: leaving it ends
    a count that is under way.

    A table that cannot be counted has no number. ``trouble``: why counting ended early, or nothing.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._snapshot = Snapshot(connection)
        self._thread: threading.Thread | None = None
        self._going = threading.Event()
        self._going.set()
        self._stopped = False
        self._counts: dict[TableName, int] = {}
        self.trouble = ""

    def open(self, position: Position) -> None:
        """Take the snapshot; commits are blocked. Raises ServerError."""
        self._snapshot.open(position)

    def start(self, statements: Mapping[TableName, str]) -> None:
        """Begin to count; ``statements`` of ``counting_statement``."""
        self._thread = threading.Thread(
            target=self._count, args=[tuple(statements.items())], name="counter", daemon=True
        )
        self._thread.start()

    def pause(self) -> None:
        """Begin no other table."""
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the last table at most this long; True when it is over."""
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    @property
    def counts(self) -> Mapping[TableName, int]:
        return dict(self._counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        self._going.set()
        if self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(ServerError), self._connection.connect() as session:  # else the thread ends soon
                session.execute(f"KILL {self._snapshot.session.thread_id}")
            self._thread.join()
        self._snapshot.close()

    def _count(self, statements: Sequence[tuple[TableName, str]]) -> None:
        for table, statement in statements:
            self._going.wait()
            if self._stopped:
                return
            try:
                self._count_one(table, statement)
            except ServerError as error:
                self.trouble = error.detail or error.message
                return
            if self.trouble:
                return

    def _count_one(self, table: TableName, statement: str) -> None:
        rows: int | None = None
        try:
            rows = int(self._snapshot.session.scalar(statement))
        except ServerError:
            self._snapshot.session.ping()  # the table's own trouble, which the tool will tell, unless this raises
        # What was counted holds only if the snapshot was still there.
        if not self._snapshot.release():
            self.trouble = "the server gave up the snapshot"
        elif rows is not None:
            self._counts[table] = rows


def counting_statement(table: TableName, *, versioned: bool) -> str:
    """``versioned``: rows of its history count, too."""
    return _COUNT.format(table=table, history=" FOR SYSTEM_TIME ALL" if versioned else "")
