"""Which foreign keys and triggers tables are to have, and making it so: what is already right is left alone, so that
the same arrangement can be made again after any interruption.

``TableInventory``: which tables a server has in the schemas that matter, whether or not upper and lower case differ
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from backupd.engine.server.definition_text import parse_table
from backupd.engine.server.definitions import made_trigger, statements
from backupd.engine.sql.client import Session, error_code
from backupd.engine.sql.dialect import tokens_of
from backupd.engine.sql.tables import NO_ACTION, ForeignKey
from backupd.model.errors import ServerError
from backupd.model.table import TableName, quote_name

_PRESENT = "SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s"
_COLUMNS = """
SELECT COLUMN_NAME, COLUMN_TYPE FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
ORDER BY ORDINAL_POSITION
"""

_AGAIN = frozenset({1205, 1213, 1317})
"""Lock wait timeout, deadlock, interrupted: these say nothing about the statement."""
_TRIGGERS = """
SELECT TRIGGER_NAME FROM information_schema.TRIGGERS WHERE EVENT_OBJECT_SCHEMA = %s AND EVENT_OBJECT_TABLE = %s
"""


def column_text(session: Session, name: TableName) -> str:
    """The columns of a table and their types; empty without such a table. Raises ServerError."""
    return ", ".join(f"{column} {kind}" for column, kind in session.query(_COLUMNS, name.schema, name.table))


@dataclass(frozen=True, slots=True)
class TableInventory:
    """``kinds``: the server's word for each (BASE TABLE, VIEW, SEQUENCE ...). ``folded``: case does not differ."""

    kinds: dict[TableName, str]
    folded: bool

    @classmethod
    def look(cls, session: Session, schemas: Iterable[str]) -> Self:
        """Raises ServerError."""
        inventory = cls({}, int(session.scalar("SELECT @@GLOBAL.lower_case_table_names")) != 0)
        for schema in sorted(set(schemas)):
            for of_schema, table, kind in session.query(_PRESENT, schema):
                inventory.kinds[inventory.fold(TableName(of_schema, table))] = str(kind)
        return inventory

    def fold(self, name: TableName) -> TableName:
        """``name`` as this server compares it: in lower case where case does not differ."""
        return TableName(name.schema.lower(), name.table.lower()) if self.folded else name

    def kind(self, name: TableName) -> str:
        """Empty when there is none."""
        return self.kinds.get(self.fold(name), "")

    def has(self, name: TableName) -> bool:
        """Is there anything of that name: table, view or sequence?"""
        return bool(self.kind(name))


@dataclass(frozen=True, slots=True)
class Trigger:
    """``setting``: the statement that prepares the session that makes it; ``statement``: as in the backup."""

    name: str
    statement: str
    setting: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of ``table``. ``keys``: with the parents that they are to have now. ``managed``: lower-case names of keys that
    are dropped unless they are among ``keys``; None: all. ``triggers``: None leaves them as they are. ``exact``: others
    are dropped."""

    table: TableName
    keys: tuple[ForeignKey, ...] = ()
    managed: frozenset[str] | None = None
    triggers: tuple[Trigger, ...] | None = None
    exact: bool = True


def parse_triggers(script: str) -> tuple[Trigger, ...]:
    """Those of a script of ``backupd.engine.server.definitions``. Raises ValueError."""
    found: list[Trigger] = []
    setting = ""
    for statement in statements(script):
        if statement.startswith("CREATE "):
            found.append(Trigger(_trigger_name(statement), statement, setting))
        elif statement.startswith("SET SESSION "):
            setting = statement  # the schema's default collation is not changed under everybody's eyes
    return tuple(found)


def arrange(
    session: Session,
    wanted: Iterable[Wanted],
    same: Callable[[TableName, TableName], bool],
    step: Callable[[str], None],
) -> tuple[str, ...]:
    """Drop first, then add. ``same``: do two names mean one table on this server. ``step``: called before each change.

    Returns, in words, what the server refused to add; what it refuses to drop, and a lost connection, raise
    ServerError.
    """
    targets = tuple(wanted)
    actual = {one.table: read_keys(session, one.table) for one in targets}
    present = {one.table: _trigger_names(session, one.table) for one in targets if one.triggers is not None}
    for one in targets:
        names = {trigger.name for trigger in one.triggers or ()}
        for name in present.get(one.table, ()):
            if one.exact and name not in names:
                step(f"drop trigger {name} of {one.table.shown}")
                session.execute(f"DROP TRIGGER IF EXISTS {quote_name(one.table.schema, name)}")
    for one in targets:
        wrong = [key for key in actual[one.table] if _is_managed(one, key) and not _listed(key, one.keys, same)]
        if wrong:
            step(f"drop foreign keys of {one.table.shown}")
            session.execute(
                f"ALTER TABLE {one.table} " + ", ".join(f"DROP FOREIGN KEY {quote_name(key.name)}" for key in wrong)
            )
    problems: list[str] = []
    for one in targets:
        for key in one.keys:
            if not _listed(key, actual[one.table], same):
                step(f"add foreign key {key.name} of {one.table.shown}")
                _add(
                    session,
                    f"ALTER TABLE {one.table} ADD {key.clause}",
                    f"the foreign key {key.name} of {one.table.shown} is missing",
                    problems,
                )
    for one in targets:
        for trigger in one.triggers or ():
            if trigger.name not in present[one.table]:
                step(f"create trigger {trigger.name} of {one.table.shown}")
                _create(session, one.table, trigger, problems)
    return tuple(problems)


def is_arranged(session: Session, wanted: Iterable[Wanted], same: Callable[[TableName, TableName], bool]) -> bool:
    """Would ``arrange`` change nothing? Raises ServerError."""
    for one in wanted:
        actual = read_keys(session, one.table)
        if not all(_listed(key, actual, same) for key in one.keys):
            return False
        if any(_is_managed(one, key) and not _listed(key, one.keys, same) for key in actual):
            return False
        if one.triggers is not None:
            names, present = {trigger.name for trigger in one.triggers}, set(_trigger_names(session, one.table))
            if not names <= present or (one.exact and names != present):
                return False
    return True


def read_keys(session: Session, table: TableName) -> tuple[ForeignKey, ...]:
    """As ``session``, which may hold the table's lock, sees them. Raises ServerError."""
    row = session.query(f"SHOW CREATE TABLE {table}")[0]
    try:
        return parse_table(table, str(row[1])).foreign_keys
    except ValueError as error:
        raise ServerError(f"the definition of {table.shown} is not understood", detail=str(error)) from error


def pointed(keys: Iterable[ForeignKey], renamed: Callable[[TableName], TableName]) -> tuple[ForeignKey, ...]:
    """The same keys, children and parents where ``renamed`` says that they are now."""
    return tuple(replace(key, child=renamed(key.child), parent=renamed(key.parent)) for key in keys)


def _is_managed(one: Wanted, key: ForeignKey) -> bool:
    return one.managed is None or key.name.lower() in one.managed


def _listed(key: ForeignKey, others: Sequence[ForeignKey], same: Callable[[TableName, TableName], bool]) -> bool:
    return any(_shape(key) == _shape(other) and same(key.parent, other.parent) for other in others)


def _shape(key: ForeignKey) -> tuple[object, ...]:
    return (
        key.name.lower(),
        tuple(map(str.lower, key.columns)),
        tuple(map(str.lower, key.parent_columns)),
        *("" if rule in NO_ACTION else rule for rule in (key.on_delete, key.on_update)),
    )


def _trigger_names(session: Session, table: TableName) -> list[str]:
    return [str(row[0]) for row in session.query(_TRIGGERS, table.schema, table.table)]


def _trigger_name(statement: str) -> str:
    found = iter(tokens_of(statement))
    name = next(found, None) if any(token.word == "TRIGGER" for token in found) else None
    if name is None:
        raise ValueError(f"this is not a trigger: {statement[:200]!r}")
    return name.plain


def _create(session: Session, table: TableName, trigger: Trigger, problems: list[str]) -> None:
    modes = session.query("SELECT @@SESSION.sql_mode, @@SESSION.collation_connection")[0]
    session.execute(f"USE {quote_name(table.schema)}")
    try:
        if trigger.setting:
            session.execute(trigger.setting)
        _add(
            session,
            made_trigger(trigger.statement, table=table.table),
            f"the trigger {trigger.name} of {table.shown} is missing",
            problems,
        )
    finally:
        session.execute("SET NAMES utf8mb4")
        session.execute("SET SESSION sql_mode = %s, SESSION collation_connection = %s", *modes)


def _add(session: Session, statement: str, missing: str, problems: list[str]) -> None:
    try:
        session.execute(statement)
    except ServerError as error:
        if error_code(error) in _AGAIN:
            raise
        session.ping()
        problems.append(
            f"{missing}: the server says: {error.detail.partition(' at: ')[0]}; the statement was: {statement}"
        )
