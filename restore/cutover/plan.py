"""What a cut-over will do, decided and written down before anything is changed: what is wanted, what is planned, and
what came of it. Asks no server.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from backupd.engine.schema.definitions import TableDefinition
from backupd.engine.schema.foreign_keys import ForeignKey
from backupd.model.table import TableName, quote_name
from restore.cutover.keys_and_triggers import Trigger, Wanted, parse_triggers, pointed

_NEXT_NUMBER = re.compile(r" AUTO_INCREMENT=\d+")


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
    """A cut-over that was interrupted. ``renamed``: the new ``tables`` are in their places, and the next call finishes
    it; else the next call takes it back."""

    tables: tuple[TableName, ...]
    renamed: bool


@dataclass(frozen=True, slots=True)
class CutOverResult:
    """``tables``: each target, and the name that the table which was there has now (None: there was none).
    ``orphans``: in words, of each foreign key with rows that have no parent; they are in ``warnings``, too."""

    tables: tuple[tuple[TableName, TableName | None], ...]
    warnings: tuple[str, ...] = ()
    saved: tuple[Saved, ...] = ()
    orphans: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As the journal keeps it, and ``from_json`` reads it."""
        return {
            "tables": [[str(table), str(aside) if aside else None] for table, aside in self.tables],
            "warnings": list(self.warnings),
            "orphans": list(self.orphans),
            "saved": [[str(one.table), str(one.aside), one.script] for one in self.saved],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CutOverResult:
        """Raises KeyError, ValueError for what ``as_json`` did not write."""
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


@dataclass(frozen=True, slots=True)
class Move:
    """One table. ``waiting``: its name until it takes its place (``staged``, or beside ``target`` where triggers must
    be made before); ``aside``: the later name of the table that is ``target`` now, None when there is none.
    ``keys`` and ``triggers`` are what it gets, ``old_keys`` and ``old_triggers`` (a script) what the present one has.
    ``readable``: can the definition of the present one be read? ``shape``: of that definition (see ``shape``), empty
    when there is none. ``columns``: of the restored one, by which it is known again.
    Where names of checks are the schema's: ``old_checks`` of the present one, which it gives up, and ``new_checks`` of
    the restored one, which get other names (name and clause each)."""

    staged: TableName
    waiting: TableName
    target: TableName
    aside: TableName | None
    keys: tuple[ForeignKey, ...] = ()
    triggers: tuple[Trigger, ...] = ()
    old_keys: tuple[ForeignKey, ...] = ()
    old_triggers: str = ""
    readable: bool = True
    shape: str = ""
    columns: str = ""
    old_checks: tuple[tuple[str, str], ...] = ()
    new_checks: tuple[tuple[str, str], ...] = ()

    @property
    def saved(self) -> str:
        """A script that gives the table which is renamed aside, back under its name, what it loses."""
        lines = [
            f"ALTER TABLE {quote_name(self.target.table)} ADD {text};"
            for text in (*(key.clause for key in self.old_keys), *(text for _, text in self.old_checks))
        ]
        return "\n".join([*lines, *([self.old_triggers] if self.old_triggers else [])])


@dataclass(frozen=True, slots=True)
class Plan:
    """``children``: foreign keys of other tables that reference one of the targets. Names are those of the end,
    whatever they are meanwhile. ``folded``: upper and lower case mean the same table on this server. ``touched``: live
    tables may have lost something already."""

    moves: tuple[Move, ...]
    children: tuple[ForeignKey, ...] = ()
    warnings: tuple[str, ...] = ()
    folded: bool = False
    touched: bool = False

    def same(self, one: TableName, other: TableName) -> bool:
        """Do both names mean one table on this server?"""
        return self.fold(one) == self.fold(other)

    def fold(self, name: TableName) -> TableName:
        """``name`` as this server compares it: in lower case where case does not differ."""
        return TableName(name.schema.lower(), name.table.lower()) if self.folded else name

    def now(self, *, swapped: bool) -> Callable[[TableName], TableName]:
        """Where the table that has a name in the end is now."""
        places = {self.fold(move.target): move.target if swapped else move.waiting for move in self.moves}
        return lambda name: places.get(self.fold(name), name)

    def outside(self, names: Iterable[TableName]) -> tuple[TableName, ...]:
        """Those that are not moved."""
        moved = {self.fold(move.target) for move in self.moves}
        return tuple(dict.fromkeys(name for name in names if self.fold(name) not in moved))

    @property
    def parents(self) -> tuple[TableName, ...]:
        """Other tables that keys of the old and the new tables reference."""
        return self.outside(key.parent for move in self.moves for key in (*move.keys, *move.old_keys))

    @property
    def referencing(self) -> tuple[TableName, ...]:
        """Other tables that reference one that is moved."""
        return tuple(dict.fromkeys(key.child for key in self.children))

    def forward(self, *, swapped: bool, triggers: bool) -> tuple[Wanted, ...]:
        """The new tables have everything, the old ones nothing. ``triggers``: can they be made where the tables are?"""
        now = self.now(swapped=swapped)
        old = [
            Wanted(move.aside if swapped else move.target, triggers=())
            for move in self.moves
            if move.aside and move.readable
        ]
        new = [
            Wanted(now(move.target), pointed(move.keys, now), triggers=move.triggers if triggers else None)
            for move in self.moves
        ]
        return (*old, *new, *self._others(now))

    def back(self) -> tuple[Wanted, ...]:
        """Everything as it was, before the tables changed places; what others gave the live tables since, stays."""
        new = [Wanted(move.waiting, triggers=()) for move in self.moves]
        old = [
            Wanted(
                move.target,
                move.old_keys,
                frozenset(key.name.lower() for key in move.old_keys),
                parse_triggers(move.old_triggers),
                exact=False,
            )
            for move in self.moves
            if move.aside and move.readable
        ]
        return (*new, *old, *self._others(lambda name: name))

    def _others(self, place: Callable[[TableName], TableName]) -> list[Wanted]:
        return [
            Wanted(child, pointed(keys, place), frozenset(key.name.lower() for key in keys))
            for child in self.referencing
            if (keys := [key for key in self.children if key.child == child])
        ]

    @property
    def rename(self) -> str:
        """The one statement by which all tables change places."""
        pairs = [f"{move.target} TO {move.aside}" for move in self.moves if move.aside]
        pairs += [f"{move.waiting} TO {move.target}" for move in self.moves]
        return f"RENAME TABLE {', '.join(pairs)}"

    def as_text(self) -> str:
        """JSON, as the journal keeps it and ``from_text`` reads it."""
        return json.dumps(
            {
                "moves": [
                    {
                        "staged": _name(move.staged),
                        "waiting": _name(move.waiting),
                        "target": _name(move.target),
                        "aside": _name(move.aside) if move.aside else None,
                        "keys": [_key(key) for key in move.keys],
                        "triggers": [[one.name, one.statement, one.setting] for one in move.triggers],
                        "old_keys": [_key(key) for key in move.old_keys],
                        "old_triggers": move.old_triggers,
                        "readable": move.readable,
                        "shape": move.shape,
                        "columns": move.columns,
                        "old_checks": [list(check) for check in move.old_checks],
                        "new_checks": [list(check) for check in move.new_checks],
                    }
                    for move in self.moves
                ],
                "children": [_key(key) for key in self.children],
                "warnings": list(self.warnings),
                "folded": self.folded,
                "touched": self.touched,
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises KeyError, ValueError for what ``as_text`` did not write."""
        data = json.loads(text)
        return cls(
            moves=tuple(
                Move(
                    staged=TableName(*one["staged"]),
                    waiting=TableName(*one["waiting"]),
                    target=TableName(*one["target"]),
                    aside=TableName(*one["aside"]) if one["aside"] else None,
                    keys=_keys(one["keys"]),
                    triggers=tuple(Trigger(*trigger) for trigger in one["triggers"]),
                    old_keys=_keys(one["old_keys"]),
                    old_triggers=one["old_triggers"],
                    readable=bool(one["readable"]),
                    shape=one["shape"],
                    columns=one["columns"],
                    old_checks=tuple((str(name), str(text)) for name, text in one["old_checks"]),
                    new_checks=tuple((str(name), str(text)) for name, text in one["new_checks"]),
                )
                for one in data["moves"]
            ),
            children=_keys(data["children"]),
            warnings=tuple(data["warnings"]),
            folded=bool(data["folded"]),
            touched=bool(data["touched"]),
        )


def shape(name: TableName, create: str) -> str:
    """Of the definition of ``name`` as printed, what only somebody's ALTER changes: without the name, foreign keys and
    the next number."""
    *lines, last = (line.rstrip(",") for line in create.replace(quote_name(name.table), "", 1).split("\n"))
    checks = sorted(line for line in lines if line.startswith("  CONSTRAINT ") and " FOREIGN KEY " not in line)
    others = [line for line in lines if not line.startswith("  CONSTRAINT ")]
    return "\n".join([*others, *checks, _NEXT_NUMBER.sub("", last)])


def digest(pairs: Iterable[tuple[TableName, TableName]]) -> str:
    """What cut-overs of the same tables (staged and target) have in common."""
    text = json.dumps(sorted([*_name(staged), *_name(target)] for staged, target in pairs))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def own_name(key: ForeignKey, table: TableName, taken: Callable[[str], bool]) -> str:
    """How ``key`` of a restored table is called when that is called ``table``: a name that the server made of the
    table's goes with it, and one that another table of the schema has gets a number."""
    name = key.name
    made = re.fullmatch(re.escape(key.child.table) + r"(_ibfk_\d+)", name)
    if made and len(table.table + made[1]) <= 64:
        name = table.table + made[1]
    number = 1
    found = name
    while taken(found):
        number += 1
        found = f"{name[:60]}_{number}"
    return found


def _name(name: TableName) -> list[str]:
    return [name.schema, name.table]


def _key(key: ForeignKey) -> Mapping[str, Any]:
    return {
        "name": key.name,
        "child": _name(key.child),
        "columns": list(key.columns),
        "parent": _name(key.parent),
        "parent_columns": list(key.parent_columns),
        "on_delete": key.on_delete,
        "on_update": key.on_update,
    }


def _keys(data: Sequence[Mapping[str, Any]]) -> tuple[ForeignKey, ...]:
    return tuple(
        ForeignKey(
            name=one["name"],
            child=TableName(*one["child"]),
            columns=tuple(one["columns"]),
            parent=TableName(*one["parent"]),
            parent_columns=tuple(one["parent_columns"]),
            on_delete=one["on_delete"],
            on_update=one["on_update"],
        )
        for one in data
    )
