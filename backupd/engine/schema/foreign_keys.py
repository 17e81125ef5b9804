"""Foreign keys: which tables hold others to them, by which rules, and rows that have lost their parents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backupd.engine.sql.client import Session
from backupd.model.table import TableName, quote_name

NO_ACTION = frozenset({"RESTRICT", "NO ACTION"})
"""Rules that change nothing in the child."""

_KEYS = """
SELECT CONSTRAINT_SCHEMA, CONSTRAINT_NAME, TABLE_NAME, UPDATE_RULE, DELETE_RULE
FROM information_schema.REFERENTIAL_CONSTRAINTS
"""
_COLUMNS = """
SELECT TABLE_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, COLUMN_NAME, REFERENCED_TABLE_SCHEMA, REFERENCED_TABLE_NAME,
       REFERENCED_COLUMN_NAME
FROM information_schema.KEY_COLUMN_USAGE WHERE REFERENCED_TABLE_NAME IS NOT NULL
ORDER BY TABLE_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, ORDINAL_POSITION
"""
_NO_PARENT = " AND NOT EXISTS (SELECT 1 FROM {parent} p WHERE {same})"
_COUNT = "SELECT COUNT(*) FROM {child} c WHERE {where}"
_SAMPLE = "SELECT DISTINCT {columns} FROM {child} c WHERE {where} LIMIT {limit}"


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """One constraint of ``child``. The rules in the server's words: ``RESTRICT`` and ``NO ACTION``, which are the same
    to InnoDB, ``CASCADE``, ``SET NULL``, ``SET DEFAULT``."""

    name: str
    child: TableName
    columns: tuple[str, ...]
    parent: TableName
    parent_columns: tuple[str, ...]
    on_delete: str = "NO ACTION"
    on_update: str = "NO ACTION"

    @property
    def clause(self) -> str:
        """As it may stand behind ``ALTER TABLE ... ADD``; the parent with its schema."""
        return self.clause_to(self.parent)

    def clause_to(self, parent: TableName, *, name: str = "") -> str:
        """The same constraint, with another parent or name."""
        columns, others = (", ".join(map(quote_name, names)) for names in (self.columns, self.parent_columns))
        rules = "".join(
            f" ON {change} {rule}"
            for change, rule in (("DELETE", self.on_delete), ("UPDATE", self.on_update))
            if rule != "NO ACTION"
        )
        return (
            f"CONSTRAINT {quote_name(name or self.name)} FOREIGN KEY ({columns}) REFERENCES {parent} ({others}){rules}"
        )

    @property
    def acts(self) -> bool:
        """Does a change of the parent change rows of the child? InnoDB logs no row events for those."""
        return self.on_delete not in NO_ACTION or self.on_update not in NO_ACTION


class ForeignKeys:
    """All of a server, both ways."""

    def __init__(self, keys: Iterable[ForeignKey]) -> None:
        self.all: tuple[ForeignKey, ...] = tuple(keys)
        self._of_child: dict[TableName, list[ForeignKey]] = defaultdict(list)
        self._of_parent: dict[TableName, list[ForeignKey]] = defaultdict(list)
        for key in self.all:
            self._of_child[key.child].append(key)
            self._of_parent[key.parent].append(key)

    def __iter__(self) -> Iterator[ForeignKey]:
        return iter(self.all)

    def parents(self, name: TableName) -> tuple[ForeignKey, ...]:
        """The constraints of ``name``, to its parents."""
        return tuple(self._of_child.get(name, ()))

    def children(self, name: TableName) -> tuple[ForeignKey, ...]:
        """The constraints of other tables (or its own) that reference ``name``."""
        return tuple(self._of_parent.get(name, ()))

    def ancestors(self, names: Iterable[TableName]) -> frozenset[TableName]:
        """Parents, their parents, and so on, without ``names`` themselves."""
        wanted = frozenset(names)
        return self._closure(wanted, {name: [key.parent for key in keys] for name, keys in self._of_child.items()})

    @staticmethod
    def _closure(names: frozenset[TableName], steps: Mapping[TableName, list[TableName]]) -> frozenset[TableName]:
        found: set[TableName] = set(names)
        waiting = list(names)
        while waiting:
            for step in steps.get(waiting.pop(), ()):
                if step not in found:
                    found.add(step)
                    waiting.append(step)
        return frozenset(found - names)


def graph(session: Session) -> ForeignKeys:
    """Every foreign key that the account may see. Raises ServerError."""
    rules = {
        (str(schema), str(table), str(name)): (str(on_delete), str(on_update))
        for schema, name, table, on_update, on_delete in session.query(_KEYS)
    }
    columns: dict[tuple[str, str, str], list[tuple[str, TableName, str]]] = defaultdict(list)
    for schema, table, name, column, parent_schema, parent, parent_column in session.query(_COLUMNS):
        columns[schema, table, name].append((column, TableName(parent_schema, parent), parent_column))
    return ForeignKeys(
        _key(place, pairs, *rules.get(place, ("NO ACTION", "NO ACTION"))) for place, pairs in sorted(columns.items())
    )


def _key(
    place: tuple[str, str, str], pairs: list[tuple[str, TableName, str]], on_delete: str, on_update: str
) -> ForeignKey:
    schema, table, name = place
    return ForeignKey(
        name=name,
        child=TableName(schema, table),
        columns=tuple(column for column, _, _ in pairs),
        parent=pairs[0][1],
        parent_columns=tuple(column for _, _, column in pairs),
        on_delete=on_delete,
        on_update=on_update,
    )


@dataclass(frozen=True, slots=True)
class Orphans:
    """Rows of a child whose key is in no row of the parent. ``sample``: a few of those keys, by ``columns`` of the
    constraint. ``missing``: the parent table itself is not there, so every row with a key is one."""

    key: ForeignKey
    rows: int
    sample: tuple[tuple[Any, ...], ...] = ()
    missing: bool = False


def orphans(session: Session, key: ForeignKey, *, sample: int = 5) -> Orphans:
    """Count them. A key with a NULL in it references nothing, so it is none. Raises ServerError."""
    present = session.scalar(
        "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        key.parent.schema,
        key.parent.table,
    )
    child = [f"c.{quote_name(name)}" for name in key.columns]
    where = " AND ".join(f"{column} IS NOT NULL" for column in child)
    if present:
        same = " AND ".join(
            f"p.{quote_name(parent)} = {column}" for parent, column in zip(key.parent_columns, child, strict=True)
        )
        where += _NO_PARENT.format(parent=key.parent, same=same)
    rows = int(session.scalar(_COUNT.format(child=key.child, where=where)))
    keys: list[tuple[Any, ...]] = []
    if rows and sample:
        keys = session.query(_SAMPLE.format(columns=", ".join(child), child=key.child, where=where, limit=sample))
    return Orphans(key, rows, tuple(keys), missing=not present)
