"""Which tables a server has in the schemas that matter, whether or not upper and lower case differ there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from backupd.engine.sql.client import Session
from backupd.model.table import TableName

_PRESENT = "SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s"
_COLUMNS = """
SELECT COLUMN_NAME, COLUMN_TYPE FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
ORDER BY ORDINAL_POSITION
"""


def column_text(session: Session, name: TableName) -> str:
    """The columns of a table and their types; empty without such a table. Raises ServerError."""
    return ", ".join(f"{column} {kind}" for column, kind in session.query(_COLUMNS, name.schema, name.table))


@dataclass(frozen=True, slots=True)
class Shelf:
    """``kinds``: the server's word for each (BASE TABLE, VIEW, SEQUENCE ...). ``folded``: case does not differ."""

    kinds: dict[TableName, str]
    folded: bool

    @classmethod
    def look(cls, session: Session, schemas: Iterable[str]) -> Self:
        """Raises ServerError."""
        shelf = cls({}, int(session.scalar("SELECT @@GLOBAL.lower_case_table_names")) != 0)
        for schema in sorted(set(schemas)):
            for of_schema, table, kind in session.query(_PRESENT, schema):
                shelf.kinds[shelf.fold(TableName(of_schema, table))] = str(kind)
        return shelf

    def fold(self, name: TableName) -> TableName:
        return TableName(name.schema.lower(), name.table.lower()) if self.folded else name

    def kind(self, name: TableName) -> str:
        """Empty when there is none."""
        return self.kinds.get(self.fold(name), "")

    def has(self, name: TableName) -> bool:
        return bool(self.kind(name))
