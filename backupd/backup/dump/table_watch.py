"""Which tables changed their definition, or their name another table, while their rows were being written.

InnoDB refuses to read a rebuilt table in an older snapshot, but it reads an instantly altered one through its new
columns (which look like the old ones where one was dropped and added again), and a table that took another one's name
(as tools for online changes of a schema do) with whatever it held when the snapshot was taken. Neither looks like an
error to a tool.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection

from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Connection, is_denied
from backupd.engine.sql.tables import (
    LockedTableError,
    Mark,
    TableIds,
    definitions,
    hurry,
    settled_definitions,
    table_ids,
    table_names,
)
from backupd.model.errors import ServerError
from backupd.model.table import TableName

_FEW = 20
"""As many definitions are asked for one by one; more of them, all at once."""
_REST = 20.0
"""Between two looks at least as many times the time that the last one took."""
_SHORTEST_REST = 2.0

DROPPED = "it was dropped or renamed while the backup ran"
RENAMED = "it was renamed to {} while the backup ran, and is in it under that name"
ALTERED = "its definition was changed while the backup ran"
SWAPPED = "another table took its name, or it was emptied or rebuilt, while the backup ran"


class TableWatch:
    """Remembers the tables as they are now: make it before their definitions are read and the snapshots are opened. A
    change before the snapshot then looks like one after it, which costs a repetition and nothing else. Keeps a session;
    close it. Every method may raise ServerError; making
    one LockedTableError, while a table cannot be described."""

    def __init__(self, connection: Connection) -> None:
        self._session = connection.connect()
        try:
            self._session.execute("SET SESSION time_zone = '+00:00'")
            self._dialect = read_dialect(self._session)
            hurry(self._session)
            self._ids = self._ids_now()
            self._definitions = settled_definitions(self._session, strict=True)
        except BaseException:
            self._session.close()
            raise
        self._unjudged: set[TableName] = set()
        self._sound: set[TableName] = set()
        self._found: dict[TableName, str] = {}
        self._next = 0.0

    def written(self, table: TableName) -> None:
        """Rows of ``table`` were written just now; a look is taken when one is due."""
        self._unjudged.add(table)
        if time.monotonic() >= self._next:
            self.look()

    def look(self, others: Collection[TableName] = ()) -> None:
        """Judge the tables with rows that were written since the last look, and those of ``others`` that never were."""
        began = time.monotonic()
        asked = self._unjudged | (set(others) - self._sound - self._found.keys())
        ids = self._ids_now()
        now = self._definitions_of(asked)
        for table in asked:
            self._found.pop(table, None)
            self._sound.discard(table)
            if table not in now:
                self._found[table] = DROPPED
            elif now[table] != self._definitions.get(table):
                self._found[table] = ALTERED
            elif self._ids is not None and ids is not None and self._ids.of(table) != ids.of(table):
                self._found[table] = SWAPPED
            else:
                self._sound.add(table)
        self._unjudged.clear()
        self._next = time.monotonic() + max(_SHORTEST_REST, _REST * (time.monotonic() - began))

    def judged(self, names: Collection[TableName]) -> dict[TableName, str]:
        """Those of ``names`` that were not the same any more at a look after their last rows, and why. Looks once
        more; what cannot be known is no good either."""
        try:
            self.look(names)
        except ServerError as error:
            unknown = f"whether it was changed meanwhile is not known: {error.detail or error.message}"
            return {
                name: self._found.get(name, unknown)
                for name in names
                if name not in self._sound or name in self._unjudged
            }
        return {name: self._found[name] for name in names if name in self._found}

    def renamed(self, names: Collection[TableName]) -> dict[TableName, TableName]:
        """Those of ``names`` that are InnoDB's and have another name now: this one. Empty when that cannot be known."""
        before = self._ids
        now = self._ids_now() if names and before is not None else None
        if before is None or now is None:
            return {}
        found = {name: now.bearer(before.of(name)) for name in names}
        return {name: other for name, other in found.items() if other is not None and other != name}

    def present(self) -> frozenset[TableName]:
        """Every table that there is now, and every view."""
        return table_names(self._session)

    def close(self) -> None:
        """End its session."""
        self._session.close()

    def _definitions_of(self, asked: Collection[TableName]) -> dict[TableName, Mark]:
        if len(asked) > _FEW:
            with contextlib.suppress(LockedTableError):  # as a rule it is none of these
                return definitions(self._session, strict=True)
        return {
            name: number for table in asked for name, number in definitions(self._session, table, strict=True).items()
        }

    def _ids_now(self) -> TableIds | None:
        try:
            return table_ids(self._session, self._dialect.innodb_tables)
        except ServerError as error:
            if not is_denied(error):
                raise
            return None
