"""What a copy's server knows of its tables, also of those whose files are not there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from backupd.engine.physical.tablefiles import table_of
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Session, error_code
from backupd.engine.sql.dialect import Dialect
from backupd.engine.sql.tables import SYSTEM_SCHEMAS, TableIds, table_ids
from backupd.model.errors import ServerError
from backupd.model.table import TableName

_LOST = frozenset({2002, 2003, 2006, 2013})
"""The connection is gone, and with it the server: no table's fault."""
_AT_ONCE = 100
"""Tables that are dropped in one statement."""


@dataclass(frozen=True, slots=True)
class Known:
    """``tables`` and sequences, on MySQL also those whose files are not there; ``views`` and
    their texts; ``triggers``: tables that have some, and their texts, "" where those are not known."""

    tables: tuple[TableName, ...]
    views: Mapping[TableName, str]
    triggers: Mapping[TableName, str]
    _parents: Mapping[TableName, frozenset[TableName]]
    _ids: TableIds

    def parents(self, name: TableName) -> frozenset[TableName]:
        """Tables that foreign keys of ``name`` refer to, itself perhaps among them."""
        return self._parents.get(name, frozenset())

    def ancestors(self, names: Iterable[TableName]) -> frozenset[TableName]:
        """``names``, their parents, the parents of these, and so on."""
        found: set[TableName] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.parents(name)
        return frozenset(found)

    def numbers(self, names: Iterable[TableName]) -> frozenset[int]:
        """InnoDB's numbers of ``names``; empty on MySQL, which would open every table to tell them."""
        return frozenset(number for name in names for number in self._ids.of(name))

    def children(self, is_there: Callable[[TableName], bool]) -> tuple[TableName, ...]:
        """Tables that are not there, but reference one that is."""
        return tuple(
            sorted(
                child
                for child, parents in self._parents.items()
                if not is_there(child) and any(is_there(parent) for parent in parents)
            )
        )


_TABLES = "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_TYPE NOT LIKE '%VIEW'"
_FULLTEXT = "SELECT DISTINCT TABLE_SCHEMA, TABLE_NAME FROM information_schema.STATISTICS WHERE INDEX_TYPE = 'FULLTEXT'"
_TRIGGERS = "SELECT EVENT_OBJECT_SCHEMA, EVENT_OBJECT_TABLE, ACTION_STATEMENT FROM information_schema.TRIGGERS"
_VIEWS = (
    "SELECT TABLE_SCHEMA, TABLE_NAME, VIEW_DEFINITION FROM information_schema.VIEWS"
    " WHERE TABLE_SCHEMA NOT IN ('sys', 'mysql')"
)
"""None of these makes MySQL open a table; its list of InnoDB's tables, and sizes, would."""


def read_dictionary(
    session: Session, *, absent: Collection[TableName], with_triggers: Collection[TableName]
) -> tuple[Known, tuple[str, ...]]:
    """``absent``: tables whose files are not there. MySQL forgets those of them that have a full-text index: opened
    once, they end the server when it stops (measured with 9.7.4). ``with_triggers``: tables that have some by the files
    of the backup; MariaDB sees only those of tables that are there. Gives what is known, and what the server said
    where it would not forget. Raises ServerError."""
    dialect = read_dialect(session)
    ids = TableIds(())
    said: tuple[str, ...] = ()
    if _has_dictionary(dialect):
        said = drop_tables(session, set(_names(session, _FULLTEXT)) & set(absent))
    else:
        ids = table_ids(session, dialect.innodb_tables)
    texts: dict[TableName, list[str]] = {name: [] for name in with_triggers}
    for schema, table, text in session.query(_TRIGGERS):
        texts.setdefault(TableName(str(schema), str(table)), []).append(str(text))
    return Known(
        tuple(sorted(name for name in _names(session, _TABLES) if name.schema not in SYSTEM_SCHEMAS)),
        {TableName(str(schema), str(name)): str(text or "") for schema, name, text in session.query(_VIEWS)},
        {name: "; ".join(lines) for name, lines in texts.items()},
        _parents(session, dialect),
        ids,
    ), said


def _names(session: Session, sql: str) -> list[TableName]:
    return [TableName(str(schema), str(table)) for schema, table in session.query(sql)]


def _has_dictionary(dialect: Dialect) -> bool:
    """Does the server know its tables otherwise than by a file for each? MySQL does since it renamed these views."""
    return not dialect.innodb_tables.startswith("INNODB_SYS_")


def _parents(session: Session, dialect: Dialect) -> dict[TableName, frozenset[TableName]]:
    """By child, of all tables, whether their files are there or not."""
    found: dict[TableName, set[TableName]] = defaultdict(set)
    if _has_dictionary(dialect):
        rows = session.query(
            "SELECT CONSTRAINT_SCHEMA, TABLE_NAME, UNIQUE_CONSTRAINT_SCHEMA, REFERENCED_TABLE_NAME"
            " FROM information_schema.REFERENTIAL_CONSTRAINTS"
        )
        for schema, table, other, parent in rows:
            found[TableName(str(schema), str(table))].add(TableName(str(other), str(parent)))
    else:
        view = dialect.innodb_tables.replace("TABLES", "FOREIGN")
        for child, parent in session.query(f"SELECT FOR_NAME, REF_NAME FROM information_schema.{view}"):  # noqa: S608 - ours
            found[table_of(str(child))].add(table_of(str(parent)))
    return {child: frozenset(parents) for child, parents in found.items()}


def drop_tables(session: Session, names: Collection[TableName]) -> tuple[str, ...]:
    """Make the server forget tables whose files are not there; gives what it said where it would not."""
    said: list[str] = []
    session.execute("SET SESSION foreign_key_checks = 0")
    try:
        for batch in _batches(sorted(names)):
            said += _drop(session, batch)
    finally:
        session.execute("SET SESSION foreign_key_checks = 1")
    return tuple(said)


def _batches(names: Sequence[TableName]) -> Iterator[Sequence[TableName]]:
    for begin in range(0, len(names), _AT_ONCE):
        yield names[begin : begin + _AT_ONCE]


def _drop(session: Session, names: Sequence[TableName]) -> list[str]:
    """Together, which is quicker; one by one where that fails."""
    try:
        session.execute(f"DROP TABLE {', '.join(map(str, names))}")
    except ServerError as error:
        if error_code(error) in _LOST:
            raise
        if len(names) == 1:
            return [f"{names[0].shown} is not in the copy, and the server could not forget it: {error.detail}"]
        return [line for name in names for line in _drop(session, (name,))]
    return []


def unreadable(session: Session, names: Iterable[TableName]) -> dict[TableName, str]:
    """Those of which not even one row can be read, with the server's words. Raises ServerError when it goes away."""
    found = {}
    for name in names:
        try:
            session.query(f"SELECT 1 FROM {name} LIMIT 1")  # noqa: S608 - quoted
        except ServerError as error:
            if error_code(error) in _LOST:
                raise
            found[name] = error.detail
    return found
