"""Definitions of tables, views, triggers, routines, events and schemas, and the files that a logical backup keeps them
in.

Definitions are read in a session of their own: zone UTC, since TIMESTAMP defaults are printed in the session's zone; no
SQL mode, since modes change what is printed; short waits for metadata locks, since a table that somebody rebuilds must
not hold up the others.

Views, triggers, routines and events are kept as scripts, each statement in the surroundings that it was made in. A
script can be given to a client. The end of a statement is a delimiter that occurs nowhere inside of it, alone on its
line, so ``statements`` finds it whatever quotes, comments and modes a body uses. Scripts are UTF-8. A client sends the
character set with which the object was made only where that cannot matter to the bytes; otherwise the object comes back
with the same text and ``character_set_client`` utf8mb4. A client without ``--comments`` leaves out comments.

Names in scripts are printed without the schema wherever the server can, so that they can be loaded into another one.
Views are in an order in which each finds the views that it reads; a view that does not work on the source any more
comes last, as a comment.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from backupd.engine.server.accounts import hidden, read_grants
from backupd.engine.server.definition_text import Columns, parse_table
from backupd.engine.sql.client import Session
from backupd.engine.sql.dialect import Token, tokens_of
from backupd.engine.sql.tables import ForeignKey
from backupd.model.errors import NotFoundError, ServerError
from backupd.model.table import TableName, quote_name, schema_folder

_UNICODE = frozenset({"utf8mb4", "utf8mb3", "utf8"})
_SET_DELIMITER = "DELIMITER "
_WORD = re.compile(r"\w+")
_MODES = re.compile(r"[\w,]*")
_ZONE = re.compile(r"[\w+:/-]+")


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored object. ``sql_mode`` empty for views, ``time_zone`` for all but events. ``database_collation``: the
    schema's when it was made; parameters and variables without a character set have its."""

    statement: str
    sql_mode: str = ""
    charset: str = "utf8mb4"
    collation: str = ""
    database_collation: str = ""
    time_zone: str = ""

    @classmethod
    def from_record(cls, record: Mapping[str, Any], statement: str) -> Stored:
        """From a row of SHOW CREATE ...."""
        return cls(
            statement=statement,
            sql_mode=str(record.get("sql_mode") or ""),
            charset=str(record.get("character_set_client") or "utf8mb4"),
            collation=str(record.get("collation_connection") or ""),
            database_collation=str(record.get("Database Collation") or ""),
            time_zone=str(record.get("time_zone") or ""),
        )


def script(objects: Iterable[Stored], *, collation: str) -> str:
    """Of objects of one schema, whose own collation is ``collation``; empty without any."""
    lines: list[str] = []
    for one in objects:
        charset = one.charset if one.charset in _UNICODE or one.statement.isascii() else "utf8mb4"
        settings = [f"sql_mode = '{_safe(_MODES, one.sql_mode)}'", f"character_set_client = {_safe(_WORD, charset)}"]
        if one.collation:
            settings.append(f"collation_connection = {_safe(_WORD, one.collation)}")
        if one.time_zone:
            settings.append(f"time_zone = '{_safe(_ZONE, one.time_zone)}'")
        delimiter = _delimiter(one.statement)
        made_in = one.database_collation or collation
        lines.append(f"SET SESSION {', SESSION '.join(settings)};")
        if made_in != collation:
            lines.append(_collate(made_in))
        lines += [_SET_DELIMITER + delimiter, one.statement, delimiter, _SET_DELIMITER + ";"]
        if made_in != collation:
            lines.append(_collate(collation))
    return "\n".join(["SET NAMES utf8mb4;", *lines, ""]) if lines else ""


def statements(text: str) -> Iterator[str]:
    """The statements of a script that ``script`` wrote, one after the other, for the same session with the schema as
    its default."""
    lines = iter(text.split("\n"))
    for line in lines:
        delimiter = line.removeprefix(_SET_DELIMITER)
        if not line.startswith(_SET_DELIMITER):
            statement = line  # a name may hold line ends
            while statement.count("`") % 2 and not line.startswith("-- ") and (more := next(lines, None)) is not None:
                statement += f"\n{more}"
            if statement:
                yield statement.removesuffix(";")
        elif delimiter != ";":
            body: list[str] = []
            for inner in lines:
                if inner == delimiter:
                    break
                body.append(inner)
            yield "\n".join(body)


def _collate(collation: str) -> str:
    charset = collation.partition("_")[0]
    return f"ALTER DATABASE CHARACTER SET {_safe(_WORD, charset)} COLLATE {_safe(_WORD, collation)};"


def _safe(pattern: re.Pattern[str], value: str) -> str:
    if pattern.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not a valid value of the server")
    return value


def _delimiter(statement: str) -> str:
    number, delimiter = 0, "//"
    while delimiter in statement:
        number += 1
        delimiter = f"//{number}//"
    return delimiter


def made_trigger(statement: str, *, table: str = "") -> str:
    """A CREATE TRIGGER without schemas; with ``table`` given, on this one.

    MariaDB keeps the words with which a trigger was made, ``ON shop.orders`` among them, and would so make it in the
    old schema again. Raises ValueError for a statement that is not understood.
    """
    found = list(tokens_of(statement))
    words = [token.word for token in found]
    try:
        made = words.index("TRIGGER")
        on = words.index("ON", made)
        body = next(at for at in range(on, len(found)) if words[at : at + 3] == ["FOR", "EACH", "ROW"]) + 3
    except (ValueError, StopIteration):
        raise ValueError(f"this is not a trigger: {statement[:200]!r}") from None
    start = made + 4 if words[made + 1 : made + 4] == ["IF", "NOT", "EXISTS"] else made + 1
    name, timed = _name(found, start)
    old_table, _ = _name(found, on + 1)
    if words[body : body + 1] in (["FOLLOWS"], ["PRECEDES"]):
        body = _name(found, body + 1)[1]
    definer = statement[found[1].start : found[made].start].strip() if made > 1 else ""
    if words[1:3] == ["OR", "REPLACE"]:
        definer = statement[found[3].start : found[made].start].strip() if made > 3 else ""
    timing = " ".join(token.text for token in found[timed:on])
    if body >= len(found):
        raise ValueError(f"this trigger has no body: {statement[:200]!r}")
    return (
        f"CREATE {definer + ' ' if definer else ''}TRIGGER {quote_name(name)} {timing} "
        f"ON {quote_name(table or old_table)} FOR EACH ROW {statement[found[body].start :]}"
    )


def _name(found: list[Token], at: int) -> tuple[str, int]:
    """The last part of the name at ``at``, with a schema or without one, and the index behind."""
    while at + 2 < len(found) and found[at + 1].text == ".":
        at += 2
    if at >= len(found):
        raise ValueError(f"a name is missing at the end: {' '.join(token.text for token in found)[:200]!r}")
    return found[at].plain, at + 1


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
        """Is it a sequence of MariaDB?"""
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
        hint="check that it exists (upper and lower case differ), that the account may read it, and that CHECK TABLE "
        "reports no damage",
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


_VIEWS = "SELECT TABLE_NAME, VIEW_DEFINITION FROM information_schema.VIEWS WHERE TABLE_SCHEMA = %s ORDER BY TABLE_NAME"
_ROUTINES = """
SELECT ROUTINE_TYPE, ROUTINE_NAME FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA = %s
ORDER BY FIELD(ROUTINE_TYPE, 'PACKAGE', 'PACKAGE BODY', 'FUNCTION', 'PROCEDURE'), ROUTINE_NAME
"""
_EVENTS = "SELECT EVENT_NAME FROM information_schema.EVENTS WHERE EVENT_SCHEMA = %s ORDER BY EVENT_NAME"
_COLLATION = "SELECT DEFAULT_COLLATION_NAME FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = %s"
_INVALID_VIEW = 1356


@dataclass(frozen=True, slots=True)
class SchemaScripts:
    """Each a client script, or empty. ``unread``: what could not be read, and why, a sentence each."""

    schema: str
    create: str
    views: str = ""
    routines: str = ""
    events: str = ""
    unread: tuple[str, ...] = ()

    def files(self) -> dict[str, bytes]:
        """By their paths in a logical backup; only those with something in them."""
        texts = {"create": self.create, "views": self.views, "routines": self.routines, "events": self.events}
        return {
            f"{schema_folder(self.schema)}{name}.sql": text.encode("utf-8", "surrogateescape")
            for name, text in texts.items()
            if text
        }


def read_schema(session: Session, schema: str, *, objects: bool = True, partial: bool = False) -> SchemaScripts:
    """``objects``: also what is in it. ``partial``: views that do not work are kept like the others, since what they
    read may be there where the scripts are loaded. Raises ServerError; NotFoundError when there is no such schema."""
    with plain_session(session) as own:
        collation = own.scalar(_COLLATION, schema)
        if collation is None:
            raise NotFoundError(
                f"there is no schema {schema!r} on the server at {session.connection.address}",
                hint="upper and lower case may differ; SHOW DATABASES lists what the account may see",
            )
        create = str(own.query(f"SHOW CREATE DATABASE IF NOT EXISTS {quote_name(schema)}")[0][1])
        made = f"SET NAMES utf8mb4;\n{create};\n"
        if not objects:
            return SchemaScripts(schema, made)
        own.execute(f"USE {quote_name(schema)}")  # names inside of it are then printed without it
        reader = _Reader(own, schema, str(collation), partial=partial)
        return SchemaScripts(
            schema,
            made,
            views=reader.views(),
            routines=reader.routines(),
            events=reader.events(),
            unread=(*_hidden(own, schema), *reader.unread),
        )


def _hidden(session: Session, schema: str) -> list[str]:
    """What the account would not even see listed."""
    grants = read_grants(session)
    return [
        f"{grants.account} has {lack}: {what} hidden from it are missing here"
        for what, lack in hidden(grants, schema).items()
    ]


class _Reader:
    def __init__(self, session: Session, schema: str, collation: str, *, partial: bool) -> None:
        self._session, self._schema, self._collation, self._partial = session, schema, collation, partial
        self.unread: list[str] = []

    def routines(self) -> str:
        return self._script((kind, name) for kind, name in self._session.query(_ROUTINES, self._schema))

    def events(self) -> str:
        return self._script(("EVENT", name) for (name,) in self._session.query(_EVENTS, self._schema))

    def views(self) -> str:
        listed = {str(name): str(text or "") for name, text in self._session.query(_VIEWS, self._schema)}
        made: list[Stored] = []
        broken: list[str] = []
        for name in _ordered(listed, self._schema):
            one = self._made("VIEW", name)
            if one is None:
                continue
            works = all(int(row[1]) != _INVALID_VIEW for row in self._session.query("SHOW WARNINGS"))
            if not works and not self._partial:
                self.unread.append(
                    f"view {quote_name(name)} does not work: it names tables, columns or functions that do not exist, "
                    "or its definer may not read them; it is kept as a comment"
                )
                broken += ["-- " + line for line in one.statement.splitlines()]
            else:
                made.append(one)
        text = script(made, collation=self._collation)
        return text + "\n".join(["-- Views that did not work when they were read:", *broken, ""]) if broken else text

    def _script(self, objects: Iterable[tuple[str, str]]) -> str:
        made = [self._made(str(kind), str(name)) for kind, name in objects]
        return script([one for one in made if one is not None], collation=self._collation)

    def _made(self, kind: str, name: str) -> Stored | None:
        try:
            record = self._session.records(f"SHOW CREATE {kind} {quote_name(name)}")[0]
        except ServerError as error:
            self._session.ping()
            self.unread.append(f"{kind.lower()} {quote_name(name)} cannot be read: {error.detail}")
            return None
        statement = record.get(f"Create {kind.title()}")
        if statement is None:
            self.unread.append(f"{kind.lower()} {quote_name(name)} cannot be read: the account may not see its body")
            return None
        return Stored.from_record(record, str(statement))


def _ordered(definitions: Mapping[str, str], schema: str) -> list[str]:
    """Names of views so that each stands behind those that it reads. Views of other schemas are not looked at."""
    reads = {name: _named(text, schema, definitions.__contains__) - {name} for name, text in definitions.items()}
    ordered: dict[str, None] = {}
    while len(ordered) < len(reads):
        ready = [name for name, of in reads.items() if name not in ordered and of <= ordered.keys()]
        # A column of a table that is named like the schema may look like a view, and close a circle.
        ordered |= dict.fromkeys(ready or [next(name for name in reads if name not in ordered)])
    return list(ordered)


def _named(text: str, schema: str, known: Callable[[str], bool]) -> set[str]:
    words = list(tokens_of(text))
    found = set()
    for at, token in enumerate(words):
        if token.kind != "name" or not known(token.plain):
            continue
        qualified = at > 1 and words[at - 1].text == "." and words[at - 2].kind == "name"
        if not qualified or words[at - 2].plain == schema:
            found.add(token.plain)
    return found
