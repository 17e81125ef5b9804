"""The tables that a server had at the position of a backup, as the backup's manifest lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from backupd.model.backup.table import TableName


@dataclass(frozen=True, slots=True)
class BaseTable:
    """A base table or sequence outside the system schemas. ``engine`` as the server names it, "" where it could not
    tell. ``space``: number of its InnoDB tablespace (of the first partition's), None where that is not known.
    ``shared``: its rows are in a tablespace that is not its own (the system's, a general one). ``parts``: names of its
    partitions, ``p0`` or ``p0/p0sp1``; empty where it has none or they are not known."""

    name: TableName
    engine: str
    space: int | None = None
    shared: bool = False
    parts: tuple[str, ...] = ()

    def as_json(self) -> list[Any]:
        return [self.name.schema, self.name.table, self.engine, self.space, self.shared, list(self.parts)]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Self:
        """Raises ValueError, TypeError."""
        schema, table, engine, space, shared, parts = data
        return cls(
            TableName(str(schema), str(table)),
            str(engine),
            None if space is None else int(space),
            bool(shared),
            tuple(str(part) for part in parts),
        )
