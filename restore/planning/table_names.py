"""Where restored tables go: what ``--as`` means for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from backupd.model.errors import RefusedError, UsageError
from backupd.model.table import TableName

_HOW = (
    "write TABLE, SCHEMA.TABLE, or with one `*` for the old name: `*_restored`, `SCHEMA.*`; quote names that hold "
    "dots: `my.shop`.`or der`"
)


@dataclass(frozen=True, slots=True)
class TableGoal:
    """``source``: its name at the target of the restore; ``target``: the one it gets on the server."""

    source: TableName
    target: TableName

    def as_json(self) -> dict[str, str]:
        return {"source": self.source.shown, "target": self.target.shown}


@dataclass(frozen=True, slots=True)
class Renaming:
    """``schema`` "": the old one. ``table``: with ``*`` where the old name goes."""

    schema: str
    table: str

    @classmethod
    def parse(cls, text: str) -> Renaming:
        """Raises UsageError, saying how to write it."""
        if text.startswith("`"):
            try:
                name = TableName.parse(text)
            except ValueError as error:
                raise UsageError(str(error), hint=_HOW) from error
            return cls(name.schema, name.table)
        schema, dot, table = text.rpartition(".")
        if not table or (dot and not schema) or "." in schema or "*" in schema or table.count("*") > 1:
            raise UsageError(f"--as {text!r} names no table", hint=_HOW)
        return cls(schema, table)

    def of(self, name: TableName) -> TableName:
        return TableName(self.schema or name.schema, self.table.replace("*", name.table))


def goals(tables: Sequence[TableName], renaming: Renaming | None) -> tuple[TableGoal, ...]:
    """A goal for each of ``tables``; without ``renaming`` each gets its own name.

    Raises RefusedError when two would get the same name, or one a name that no server takes.
    """
    found = tuple(TableGoal(name, renaming.of(name) if renaming else name) for name in tables)
    wanted = Counter(goal.target for goal in found)
    if twice := [goal for goal in found if wanted[goal.target] > 1]:
        raise RefusedError(
            f"{len(twice)} tables would all become {twice[0].target.shown}",
            detail=", ".join(goal.source.shown for goal in twice[:20]),
            hint="with more than one table --as needs a `*`, where the old name goes: --as '*_restored'",
        )
    for goal in found:
        for half in (goal.target.schema, goal.target.table):
            if not 0 < len(half) <= _LONGEST or half.endswith(" ") or "\0" in half:
                raise RefusedError(
                    f"{goal.target.shown} is no name: a table has 1 to {_LONGEST} characters, the last no space",
                    hint="choose another one with --as",
                )
    return found


_LONGEST = 64
"""Characters of an identifier, on every flavour."""
