"""From goals to the plan of a cut-over: everything is looked at, and refused, before anything is changed.

Here are also the names beside a table's own (``beside``), for the table that it replaces or for itself on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from backupd.engine.schema import definitions as ddl
from backupd.engine.schema.definition_text import check_clauses, schema_checks
from backupd.engine.schema.foreign_keys import ForeignKey, ForeignKeys, graph
from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import SYSTEM_SCHEMAS
from backupd.model.errors import NotFoundError, RefusedError, UsageError
from backupd.model.table import TableName, quote_name
from restore.cutover.keys_and_triggers import TableInventory, Trigger, column_text, parse_triggers
from restore.cutover.plan import Goal, Move, Plan, Triggers, own_name, shape

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
    number = 1
    while True:
        tail = suffix if number == 1 else f"{suffix}_{number}"
        found = TableName(name.schema, _shortened(name.table, tail) + tail)
        if not taken(found):
            return found
        number += 1


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
    keys = graph(session)
    planning = _Planning(session, goals, inventory, keys, triggers)
    moves = tuple(planning.move(goal, aside, within=within) for goal in goals)
    plan = Plan(moves, warnings=tuple(planning.warnings), folded=inventory.folded)
    return replace(plan, children=planning.children(plan))


class _Planning:
    def __init__(
        self, session: Session, goals: Sequence[Goal], inventory: TableInventory, keys: ForeignKeys, triggers: Triggers
    ) -> None:
        self._session = session
        self._shelf = inventory
        self._keys = keys
        self._triggers = triggers
        self._targets = {inventory.fold(goal.definition.name): goal.target for goal in goals}
        self._goals = {inventory.fold(goal.target) for goal in goals}
        self._names: set[TableName] = set()
        self._key_names: set[tuple[str, str]] = {
            (key.child.schema, key.name.lower()) for key in keys if not self._is_goal(key.child)
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
            number = 2
            while f"{name[:60]}_{number}".lower() in taken:
                number += 1
            renamed.append((name, text.replace(quote_name(name), quote_name(f"{name[:60]}_{number}"), 1)))
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


def _refuse(goals: Sequence[Goal], inventory: TableInventory, *, replace_live: bool) -> None:
    if gone := [goal.staged.shown for goal in goals if not inventory.has(goal.staged)]:
        raise NotFoundError(
            f"{len(gone)} restored tables are not on the server any more",
            detail=", ".join(gone),
            hint="load them again",
        )
    wanted = Counter(inventory.fold(goal.target) for goal in goals)
    if twice := [name.shown for name, times in wanted.items() if times > 1]:
        raise RefusedError(f"several tables would become {', '.join(twice)}", hint="give each a name of its own")
    if system := [goal.target.shown for goal in goals if goal.target.schema.lower() in SYSTEM_SCHEMAS]:
        raise RefusedError(
            f"tables of the server itself are not replaced: {', '.join(system)}",
            hint="restore the whole server, or these tables under other names",
        )
    if views := [goal.target.shown for goal in goals if "VIEW" in inventory.kind(goal.target).upper()]:
        raise RefusedError(
            f"there are views of these names: {', '.join(views)}",
            hint="drop or rename them, or choose other names for the tables",
        )
    present = [goal.target.shown for goal in goals if inventory.has(goal.target)]
    if present and not replace_live:
        raise RefusedError(
            f"{len(present)} of the tables exist: nothing was changed",
            detail=", ".join(present),
            hint="choose other names or another schema, or confirm that they are to be replaced; they "
            "would be renamed, not dropped",
        )
