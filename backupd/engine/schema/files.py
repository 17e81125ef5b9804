"""Definitions of tables, as the server prints them, and the files that a logical backup keeps them in.

Read in a session of their own: zone UTC, since TIMESTAMP defaults are printed in the session's zone; no SQL mode, since
modes change what is printed; short waits for metadata locks, since a table that somebody rebuilds must not hold up the
others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from backupd.engine.schema.definition_text import Columns, parse_table
from backupd.engine.schema.scripts import Stored, made_trigger, script, statements
from backupd.engine.sql.client import Session
from backupd.engine.sql.foreign_keys import ForeignKey
from backupd.model.errors import NotFoundError, ServerError
from backupd.model.table import TableName, quote_name

LOCK_SECONDS = 5
"""How long the definition of one table may wait for whoever changes it."""

_HEADER = (
    "SET NAMES utf8mb4;\n"
    "SET SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION,ALLOW_INVALID_DATES', "
    "SESSION time_zone = '+00:00', SESSION foreign_key_checks = 0, SESSION unique_checks = 0;\n"
)
_TRIGGERS = """
SELECT EVENT_OBJECT_SCHEMA, EVENT_OBJECT_TABLE, TRIGGER_SCHEMA, TRIGGER_NAME FROM information_schema.TRIGGERS
WHERE TRIGGER_SCHEMA = %s
ORDER BY EVENT_OBJECT_SCHEMA, EVENT_OBJECT_TABLE, EVENT_MANIPULATION, ACTION_TIMING, ACTION_ORDER, TRIGGER_NAME
"""
_SEQUENCES = "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_TYPE = 'SEQUENCE'"
_NEXT_NUMBER = re.compile(r" AUTO_INCREMENT=\d+")
_COLLATIONS = "SELECT SCHEMA_NAME, DEFAULT_COLLATION_NAME FROM information_schema.SCHEMATA"


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """``create``: CREATE TABLE (or SEQUENCE) as printed, without the schema, without a delimiter. ``triggers``: a
    client script, empty without any. ``engine`` as printed; of a partitioned table that of its parts."""

    name: TableName
    create: str
    triggers: str = ""
    foreign_keys: tuple[ForeignKey, ...] = ()
    columns: Columns = field(default_factory=Columns)
    engine: str = ""
    partitioned: bool = False

    @property
    def is_sequence(self) -> bool:
        return self.create.upper().startswith("CREATE SEQUENCE")

    def is_like(self, other: TableDefinition) -> bool:
        """Is it the same, but for the next AUTO_INCREMENT, which moves with the rows?"""
        return self.triggers == other.triggers and _NEXT_NUMBER.sub("", self.create) == _NEXT_NUMBER.sub(
            "", other.create
        )


@dataclass(frozen=True, slots=True)
class Definitions:
    """``failed``: why a table's definition could not be read, in the server's words."""

    tables: Mapping[TableName, TableDefinition] = field(default_factory=dict)
    failed: Mapping[TableName, str] = field(default_factory=dict)


def understand(name: TableName, create: str, triggers: str = "") -> TableDefinition:
    """The definition that a text is. Raises ValueError for one that no server prints."""
    text = parse_table(name, create)
    return TableDefinition(name, create, triggers, text.foreign_keys, text.columns, text.engine, text.partitioned)


def read_table(session: Session, name: TableName) -> TableDefinition:
    """Raises ServerError; NotFoundError when there is no such table."""
    found = read_tables(session, [name])
    if name in found.tables:
        return found.tables[name]
    raise NotFoundError(
        f"the definition of {name.shown} cannot be read",
        detail=found.failed[name],
        hint="is it there (upper and lower case differ), may the account read it, and is it whole? CHECK TABLE tells",
    )


def read_tables(session: Session, names: Iterable[TableName]) -> Definitions:
    """With their triggers. One that cannot be read does not keep the others from being read. Raises ServerError when
    the server went away."""
    wanted = sorted(set(names))
    tables: dict[TableName, TableDefinition] = {}
    failed: dict[TableName, str] = {}
    with plain_session(session) as own:
        sequences = {TableName(*row) for row in own.query(_SEQUENCES)}
        listed = _trigger_names(own, wanted)
        collations = {str(schema): str(collation) for schema, collation in own.query(_COLLATIONS)}
        for name in wanted:
            try:
                create = own.query(f"SHOW CREATE {'SEQUENCE' if name in sequences else 'TABLE'} {name}")[0][1]
                made = [_trigger(own, *trigger) for trigger in listed.get(name, ())]
                tables[name] = understand(name, str(create), script(made, collation=collations.get(name.schema, "")))
            except (ServerError, ValueError) as error:
                own.ping()
                failed[name] = error.detail if isinstance(error, ServerError) else str(error)
    return Definitions(tables, failed)


def write_definition(definition: TableDefinition) -> bytes:
    """``definition.sql``."""
    return f"{_HEADER}{definition.create};\n".encode("utf-8", "surrogateescape")


def write_triggers(definition: TableDefinition) -> bytes:
    """``triggers.sql``; empty without any."""
    return definition.triggers.encode("utf-8", "surrogateescape")


def read_definition(name: TableName, definition: bytes, triggers: bytes = b"") -> TableDefinition:
    """Out of what the two above wrote. Raises ValueError."""
    text = definition.decode("utf-8", "surrogateescape")
    if not (text.startswith(_HEADER) and text.endswith(";\n")):
        raise ValueError(f"this is not the definition of a table: {text[:200]!r}")
    made = triggers.decode("utf-8", "surrogateescape")
    for statement in statements(made):
        if statement.startswith("CREATE "):
            made_trigger(statement)
    return understand(name, text[len(_HEADER) : -2], made)


@contextmanager
def plain_session(session: Session) -> Iterator[Session]:
    """Another session to the same server, in which definitions are printed always in the same way."""
    with session.connection.connect() as own:
        own.execute("SET NAMES utf8mb4")
        own.execute(
            f"SET SESSION sql_mode = '', SESSION time_zone = '+00:00', SESSION sql_quote_show_create = 1, "
            f"SESSION lock_wait_timeout = {LOCK_SECONDS}"
        )
        yield own


def _trigger_names(session: Session, names: list[TableName]) -> dict[TableName, list[tuple[str, str]]]:
    schemas = sorted({name.schema for name in names})
    found: dict[TableName, list[tuple[str, str]]] = defaultdict(list)
    for schema in schemas:
        for of_schema, table, *trigger in session.query(_TRIGGERS, schema):
            found[TableName(of_schema, table)].append((trigger[0], trigger[1]))
    return found


def _trigger(session: Session, schema: str, name: str) -> Stored:
    record = session.records(f"SHOW CREATE TRIGGER {quote_name(schema, name)}")[0]
    return Stored.from_record(record, made_trigger(str(record["SQL Original Statement"])))
