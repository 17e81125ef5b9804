"""What is wanted of a hand-over, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from backupd.engine.schema.definitions import TableDefinition
from backupd.model.table import TableName


class Triggers(StrEnum):
    """Which triggers a restored table gets: those it had in the backup, those of the table that it replaces, none."""

    BACKUP = "backup"
    LIVE = "live"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Goal:
    """``staged``: the loaded table, without triggers and foreign keys. ``target``: the name that it is to get.
    ``definition``: from the backup; its triggers and foreign keys are put on. ``live``: how the table was made that had
    the target's name when the two were compared; empty: nobody has compared them."""

    staged: TableName
    target: TableName
    definition: TableDefinition
    live: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """What the table that was renamed aside no longer has: foreign keys, triggers, on MySQL named checks. ``script``:
    for a client with the schema as its default; it gives them back to the table under its old name."""

    table: TableName
    aside: TableName
    script: str


@dataclass(frozen=True, slots=True)
class Patience:
    """``seconds`` of one wait for locks, while which writers queue up, ``attempts``, and the first ``pause`` in
    seconds; each next one is twice as long, up to ``longest``."""

    seconds: int = 2
    attempts: int = 11
    pause: float = 2.0
    longest: float = 30.0

    @property
    def pauses(self) -> Iterator[float]:
        """Before each attempt."""
        return (min(self.pause * 2 ** (number - 1), self.longest) if number else 0.0 for number in range(self.attempts))


@dataclass(frozen=True, slots=True)
class Pending:
    """A hand-over that was interrupted. ``renamed``: the new ``tables`` are in their places, and the next call finishes
    it; else the next call takes it back."""

    tables: tuple[TableName, ...]
    renamed: bool


@dataclass(frozen=True, slots=True)
class HandedOver:
    """``tables``: each target, and the name that the table which was there has now (None: there was none).
    ``orphans``: in words, of each foreign key with rows that have no parent; they are in ``warnings``, too."""

    tables: tuple[tuple[TableName, TableName | None], ...]
    warnings: tuple[str, ...] = ()
    saved: tuple[Saved, ...] = ()
    orphans: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "tables": [[str(table), str(aside) if aside else None] for table, aside in self.tables],
            "warnings": list(self.warnings),
            "orphans": list(self.orphans),
            "saved": [[str(one.table), str(one.aside), one.script] for one in self.saved],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HandedOver:
        return cls(
            tables=tuple(
                (TableName.parse(table), TableName.parse(aside) if aside else None) for table, aside in data["tables"]
            ),
            warnings=tuple(data["warnings"]),
            orphans=tuple(data["orphans"]),
            saved=tuple(
                Saved(TableName.parse(table), TableName.parse(aside), script) for table, aside, script in data["saved"]
            ),
        )
