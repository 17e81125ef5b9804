"""What a cut-over will do, decided and written down before anything is changed: what is wanted, what is planned, and
what came of it. Asks no server.

From goals to the plan of a cut-over: everything is looked at, and refused, before anything is changed.

Here are also the names beside a table's own (``beside``), for the table that it replaces or for itself on its way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain, count, repeat
from types import UnionType
from typing import Any, Self, cast, get_args, get_origin, get_type_hints

from backupd.engine.server import definitions as ddl
from backupd.engine.server.definition_text import check_clauses, schema_checks
from backupd.engine.server.definitions import TableDefinition
from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import SYSTEM_SCHEMAS, ForeignKey, graph
from backupd.model.errors import NotFoundError, RefusedError, UsageError
from backupd.model.table import TableName, quote_name
from restore.cutover.keys_and_triggers import TableInventory, Trigger, Wanted, column_text, parse_triggers, pointed
from restore.planning.table_plan import Triggers

_NEXT_NUMBER = re.compile(r" AUTO_INCREMENT=\d+")


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
        renamed = {self.fold(move.target): move.target if swapped else move.waiting for move in self.moves}
        return lambda name: renamed.get(self.fold(name), name)

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

    def _others(self, renamed: Callable[[TableName], TableName]) -> list[Wanted]:
        return [
            Wanted(child, pointed(keys, renamed), frozenset(key.name.lower() for key in keys))
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
        return json.dumps(self, default=_plain)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises KeyError, ValueError for what ``as_text`` did not write."""
        return cast("Self", _read(cls, json.loads(text)))


def shape(name: TableName, create: str) -> str:
    """Of the definition of ``name`` as printed, what only somebody's ALTER changes: without the name, foreign keys and
    the next number."""
    *lines, last = (line.rstrip(",") for line in create.replace(quote_name(name.table), "", 1).split("\n"))
    checks = sorted(line for line in lines if line.startswith("  CONSTRAINT ") and " FOREIGN KEY " not in line)
    others = [line for line in lines if not line.startswith("  CONSTRAINT ")]
    return "\n".join([*others, *checks, _NEXT_NUMBER.sub("", last)])


def digest(pairs: Iterable[tuple[TableName, TableName]]) -> str:
    """What cut-overs of the same tables (staged and target) have in common."""
    text = json.dumps(sorted([staged.schema, staged.table, target.schema, target.table] for staged, target in pairs))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def own_name(key: ForeignKey, table: TableName, taken: Callable[[str], bool]) -> str:
    """How ``key`` of a restored table is called when that is called ``table``: a name that the server made of the
    table's goes with it, and one that another table of the schema has gets a number."""
    name = key.name
    made = re.fullmatch(re.escape(key.child.table) + r"(_ibfk_\d+)", name)
    if made and len(table.table + made[1]) <= 64:
        name = table.table + made[1]
    return next(found for found in chain([name], _numbered(name[:60])) if not taken(found))


def _numbered(name: str) -> Iterator[str]:
    """Other names where that is taken."""
    return (f"{name}_{number}" for number in count(2))


def _plain(value: Any) -> list[Any] | dict[str, Any]:
    """A record for JSON: names and triggers as lists, the others by the names of their fields."""
    if isinstance(value, TableName | Trigger):
        return [getattr(value, one.name) for one in fields(value)]
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _read(kind: Any, value: Any) -> Any:
    """What ``_plain`` wrote of a value of this type."""
    parts = get_args(kind)
    if get_origin(kind) is UnionType:
        return _read(parts[0], value) if value is not None else None
    if get_origin(kind) is tuple:
        return tuple(map(_read, repeat(parts[0]) if parts[-1] is Ellipsis else parts, value))
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    if not hints:
        return kind(value)
    return kind(*map(_read, hints.values(), value if isinstance(value, list) else [value[name] for name in hints]))


_LONGEST = 64
"""Characters of an identifier."""
_RESERVED = len("_chk_123")
"""MySQL names checks without a name after their table, and refuses a rename after which such a name is too long."""
_LONGEST_FILE = 230
"""Bytes of a file name without what the server appends to it (``#P#`` and partitions not counted)."""
_ENCODED = 5
"""Bytes that a letter of no plain kind takes in a file name."""

Checks = tuple[tuple[str, str], ...]


def beside(name: TableName, suffix: str, taken: Callable[[TableName], bool]) -> TableName:
    """``orders`` and ``__before_7`` make ``orders__before_7``; shortened where that is too long, numbered where it is
    ``taken``. Raises UsageError for a suffix that leaves no room or may not stand in a name."""
    if not suffix or len(suffix) > 40 or not suffix.isascii() or not suffix.replace("_", "").isalnum():
        raise UsageError(
            f"{suffix!r} cannot be appended to names of tables", hint="up to 40 ASCII letters, digits and _ can"
        )
    tails = chain([suffix], _numbered(suffix))
    names = (TableName(name.schema, _shortened(name.table, tail) + tail) for tail in tails)
    return next(found for found in names if not taken(found))


def _shortened(stem: str, tail: str) -> str:
    stem = stem[: _LONGEST - _RESERVED - len(tail)]
    while len(stem) > 1 and _file_length(stem) + len(tail) > _LONGEST_FILE:
        stem = stem[:-1]
    return stem


def _file_length(text: str) -> int:
    return sum(1 if letter.isascii() and (letter.isalnum() or letter == "_") else _ENCODED for letter in text)


def make_plan(
    session: Session, goals: Sequence[Goal], *, replace_live: bool, aside: str, triggers: Triggers, within: bool
) -> Plan:
    """``within``: tables may change places while they are locked. Raises RefusedError, NotFoundError, ServerError."""
    inventory = TableInventory.look(session, (name.schema for goal in goals for name in (goal.staged, goal.target)))
    _refuse(goals, inventory, replace_live=replace_live)
    goals = [replace(goal, staged=inventory.fold(goal.staged), target=inventory.fold(goal.target)) for goal in goals]
    planning = _Planning(session, goals, inventory, triggers)
    moves = tuple(planning.move(goal, aside, within=within) for goal in goals)
    plan = Plan(moves, warnings=tuple(planning.warnings), folded=inventory.folded)
    return replace(plan, children=planning.children(plan))


class _Planning:
    def __init__(self, session: Session, goals: Sequence[Goal], inventory: TableInventory, triggers: Triggers) -> None:
        self._session = session
        self._shelf = inventory
        self._keys = graph(session)
        self._triggers = triggers
        self._targets = {inventory.fold(goal.definition.name): goal.target for goal in goals}
        self._goals = {inventory.fold(goal.target) for goal in goals}
        self._names: set[TableName] = set()
        self._key_names: set[tuple[str, str]] = {
            (key.child.schema, key.name.lower()) for key in self._keys if not self._is_goal(key.child)
        }
        self.warnings: list[str] = []

    def move(self, goal: Goal, suffix: str, *, within: bool) -> Move:
        live = self._live(goal.target)
        keys = self._keys_of(goal)
        dropped, renamed = self._checks(goal, live) if within else ((), ())
        present = self._shelf.has(goal.target)
        return Move(
            readable=live is not None or not present,
            staged=goal.staged,
            target=goal.target,
            aside=self._free(goal.target, suffix) if present else None,
            waiting=goal.staged if within else self._free(goal.target, f"__new{suffix[-20:]}"),
            keys=keys,
            triggers=self._triggers_of(goal, live),
            old_keys=live.foreign_keys if live else (),
            old_triggers=live.triggers if live else "",
            old_checks=dropped,
            new_checks=renamed,
            shape=shape(goal.target, live.create) if live else "",
            columns=column_text(self._session, goal.staged),
        )

    def children(self, plan: Plan) -> tuple[ForeignKey, ...]:
        """Keys of tables that stay, as they are printed."""
        found = [key for key in self._keys if self._is_goal(key.parent) and not self._is_goal(key.child)]
        printed = ddl.read_tables(self._session, plan.outside(key.child for key in found))
        for name, reason in printed.failed.items():
            self.warnings.append(
                f"the definition of {name.shown} cannot be read ({reason}): its foreign keys keep "
                f"referencing the table that is renamed aside"
            )
        return tuple(
            key
            for definition in printed.tables.values()
            for key in definition.foreign_keys
            if self._is_goal(key.parent)
        )

    def _is_goal(self, name: TableName) -> bool:
        return self._shelf.fold(name) in self._goals

    def _free(self, name: TableName, suffix: str) -> TableName:
        found = beside(name, suffix, lambda other: self._shelf.has(other) or other in self._names)
        self._names.add(found)
        return found

    def _live(self, target: TableName) -> ddl.TableDefinition | None:
        if not self._shelf.has(target):
            return None
        try:
            return ddl.read_table(self._session, target)
        except NotFoundError as error:
            self.warnings.append(
                f"the present definition of {target.shown} cannot be read ({error.detail}): its triggers are lost"
            )
            return None

    def _keys_of(self, goal: Goal) -> tuple[ForeignKey, ...]:
        """Those to restored tables; those to others only under the table's own name: a copy beside it must not keep the
        rows of its parents from being deleted, nor lose its own when they are."""
        found = []
        own = goal.target == self._shelf.fold(goal.definition.name)
        for key in goal.definition.foreign_keys:
            parent = self._targets.get(self._shelf.fold(key.parent))
            if parent is None and not own:
                self.warnings.append(
                    f"{goal.target.shown} has no foreign key {key.name}, so that it does not hold "
                    f"rows of {key.parent.shown}; to have it: ALTER TABLE {goal.target} ADD "
                    f"{key.clause}"
                )
                continue
            name = own_name(key, goal.target, lambda name: (goal.target.schema, name.lower()) in self._key_names)
            self._key_names.add((goal.target.schema, name.lower()))
            found.append(replace(key, name=name, child=goal.target, parent=parent or self._shelf.fold(key.parent)))
        return tuple(found)

    def _checks(self, goal: Goal, live: ddl.TableDefinition | None) -> tuple[Checks, Checks]:
        """Where names of checks are the schema's: those that the present table gives up, and those of the restored one
        that get other names, because some other table has theirs. Names that the server made go with their table."""
        taken = schema_checks(self._session, goal.target.schema)
        dropped: list[tuple[str, str]] = []
        renamed: list[tuple[str, str]] = []
        for name, text in check_clauses(goal.definition.create):
            holder = taken.get(name.lower())
            if holder is None or name.startswith(f"{goal.staged.table}_chk_"):
                continue
            if live is not None and self._is_goal(TableName(goal.target.schema, holder)):
                dropped += [pair for pair in check_clauses(live.create) if pair[0].lower() == name.lower()]
                continue
            fresh = next(one for one in _numbered(name[:60]) if one.lower() not in taken)
            renamed.append((name, text.replace(quote_name(name), quote_name(fresh), 1)))
        return tuple(dropped), tuple(renamed)

    def _triggers_of(self, goal: Goal, live: ddl.TableDefinition | None) -> tuple[Trigger, ...]:
        if self._triggers is Triggers.NONE:
            return ()
        if self._triggers is Triggers.LIVE and self._shelf.has(goal.target):
            return parse_triggers(live.triggers if live else "")
        found = parse_triggers(goal.definition.triggers)
        own, target = self._shelf.fold(goal.definition.name), goal.target
        if found and target.schema == own.schema and target.table != own.table:
            self.warnings.append(
                f"{target.shown} has none of the triggers of {own.shown}: their names are that "
                f"table's ({', '.join(trigger.name for trigger in found)})"
            )
            return ()
        return found


def refuse_unfit(inventory: TableInventory, targets: Sequence[TableName]) -> None:
    """Raises RefusedError for names that no table can get: of the server's own schemas, and of views."""
    if system := [name.shown for name in targets if name.schema.lower() in SYSTEM_SCHEMAS]:
        raise RefusedError(
            f"tables of the server itself are not replaced: {', '.join(system)}",
            hint="restore the whole server, or these tables under other names (--as)",
        )
    if views := [name.shown for name in targets if "VIEW" in inventory.kind(name).upper()]:
        raise RefusedError(
            f"there are views of these names: {', '.join(views)}",
            hint="drop or rename them, or choose other names for the tables (--as)",
        )


def _refuse(goals: Sequence[Goal], inventory: TableInventory, *, replace_live: bool) -> None:
    if gone := [goal.staged.shown for goal in goals if not inventory.has(goal.staged)]:
        raise NotFoundError(
            f"{len(gone)} restored tables are no longer on the server",
            detail=", ".join(gone),
            hint="load them again",
        )
    wanted = Counter(inventory.fold(goal.target) for goal in goals)
    if twice := [name.shown for name, times in wanted.items() if times > 1]:
        raise RefusedError(f"several tables would become {', '.join(twice)}", hint="give each its own name")
    refuse_unfit(inventory, [goal.target for goal in goals])
    present = [goal.target.shown for goal in goals if inventory.has(goal.target)]
    if present and not replace_live:
        raise RefusedError(
            f"{len(present)} of the tables exist: nothing was changed",
            detail=", ".join(present),
            hint="choose other names or another schema, or confirm the replacement; the existing tables are renamed, "
            "not dropped",
        )
