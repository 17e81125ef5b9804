"""How many rows somebody fetches from a catalog, of SQLite or PostgreSQL alike: what the driver's cursors hand out,
counted where SQLAlchemy takes it. What a database looks at to find them is not counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExecutionContext


@dataclass
class Fetched:
    """``by``: rows by the statement that they came from."""

    by: Counter[str] = field(default_factory=Counter)

    @property
    def rows(self) -> int:
        return self.by.total()

    def worst(self, count: int = 3) -> str:
        """The statements that gave most, for a message."""
        return "\n".join(f"{rows} rows: {' '.join(text.split())[:300]}" for text, rows in self.by.most_common(count))


class _Counting:
    """A cursor of a driver whose rows are counted."""

    def __init__(self, cursor: Any, statement: str, fetched: Fetched) -> None:
        self._cursor, self._statement, self._fetched = cursor, statement, fetched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def fetchone(self) -> Any:
        row = self._cursor.fetchone()
        self._fetched.by[self._statement] += row is not None
        return row

    def fetchmany(self, *size: Any, **named: Any) -> Any:
        rows = self._cursor.fetchmany(*size, **named)
        self._fetched.by[self._statement] += len(rows)
        return rows

    def fetchall(self) -> Any:
        rows = self._cursor.fetchall()
        self._fetched.by[self._statement] += len(rows)
        return rows


@contextmanager
def counted() -> Iterator[Fetched]:
    """All rows that this process, whatever its thread, fetches within the block."""
    fetched = Fetched()

    def after(
        _connection: Connection,
        cursor: Any,
        statement: str,
        _parameters: Any,
        context: ExecutionContext | None,
        executemany: bool,
    ) -> None:
        if context is not None and not executemany:
            context.cursor = _Counting(cursor, statement, fetched)

    event.listen(Engine, "after_cursor_execute", after)
    try:
        yield fetched
    finally:
        event.remove(Engine, "after_cursor_execute", after)
