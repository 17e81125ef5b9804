"""What schemas hold besides tables, brought along by a restore of all their tables: views, routines, events, and the
schema itself where it is missing. Nothing that the server has is ever replaced.

They travel as the client scripts of a logical backup (``backupd.engine.server.definitions``) in the folder of the
rows. Each object is made by itself, in the surroundings of its own, so that one that the server refuses stops no other.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from backupd.engine.physical.tablespace_transport import drop_tables
from backupd.engine.server.definitions import read_schema, statements
from backupd.engine.sql.client import Connection, Session, error_code
from backupd.engine.sql.dialect import Token, tokens_of
from backupd.model.errors import BackupdError, DamagedError, ServerError
from backupd.model.table import TableName, quote_name, schema_folder

_PARTS = ("routines", "views", "events")
"""In the order in which they can be made: views call functions, events call and read anything."""
_KINDS = frozenset({"VIEW", "PROCEDURE", "FUNCTION", "PACKAGE", "EVENT"})
_EXISTS = frozenset({1050, 1304, 1537})
_NO_SUCH_USER = 1449
_HEAD = 64
"""Tokens within which a statement has said what it makes: definer, algorithm and security stand before that."""
_LOCK_SECONDS = 30
_ALTERED = re.compile(r"ALTER DATABASE CHARACTER SET \w+ COLLATE (\w+)")
_ALTER = "ALTER DATABASE COLLATE %s"
_SCHEMATA = "SELECT SCHEMA_NAME, DEFAULT_COLLATION_NAME FROM information_schema.SCHEMATA"
_TABLES = "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_TYPE NOT LIKE '%VIEW'"
_STATUS = "SELECT STATUS FROM information_schema.EVENTS WHERE EVENT_SCHEMA = %s AND EVENT_NAME = %s"


@dataclass(frozen=True, slots=True)
class SchemaObject:
    """``kind``: view, procedure, function, package, package body, event; or schema, without a ``name``, for all that is
    in it."""

    kind: str
    schema: str
    name: str = ""

    @property
    def shown(self) -> str:
        """Kind and quoted name, for messages."""
        return f"{self.kind} {self._full_name}"

    def as_json(self) -> dict[str, Any]:
        """Keys: kind, name (with its schema, quoted where necessary)."""
        return {"kind": self.kind, "name": self._full_name}

    @property
    def _full_name(self) -> str:
        return TableName(self.schema, self.name).shown if self.name else self.schema


@dataclass(frozen=True, slots=True)
class SchemaObjects:
    """``added``: what was missing and was made; ``enabled``: the events among these that the server runs from now on.
    ``left_alone``: what was there already, and whether it differs from what the backup has (None: unknown).
    ``failed``: what the server refused to make, in its words."""

    added: tuple[SchemaObject, ...] = ()
    enabled: tuple[SchemaObject, ...] = ()
    left_alone: Mapping[SchemaObject, bool | None] = field(default_factory=dict)
    failed: Mapping[SchemaObject, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Keys: added, left_alone, failed; each a list of objects with what became of them."""
        return {
            "added": [
                {**one.as_json(), "enabled": one in self.enabled if one.kind == "event" else None} for one in self.added
            ],
            "left_alone": [{**one.as_json(), "differs": differs} for one, differs in self.left_alone.items()],
            "failed": [{**one.as_json(), "why": why} for one, why in self.failed.items()],
        }


def keep_scripts(
    connection: Connection,
    folder: Path,
    schemas: Iterable[str],
    whole: Collection[str],
    *,
    absent: Collection[TableName],
    working: bool,
) -> tuple[str, ...]:
    """Write the scripts of ``schemas`` on a copy that holds some of their tables into ``folder``; for those that are
    not ``whole`` just the one of the schema itself. ``absent``: tables that are not in the copy; it forgets them for
    good. ``working``: views on these become comments. Gives what could not be read, in words."""
    said: list[str] = []
    with connection.connect() as session:
        if whole:  # of a view on a table without files MySQL shows nothing, of one on no table at all its text
            known = {TableName(str(schema), str(table)) for schema, table in session.query(_TABLES)}
            said += drop_tables(session, known & set(absent))
        for schema in sorted(set(schemas)):
            try:
                scripts = read_schema(session, schema, objects=schema in whole, partial=not working)
            except BackupdError as error:
                session.ping()
                said.append(
                    f"schema {schema}: its views, routines and events cannot be read: {error.detail or error.message}"
                )
                continue
            said += [f"schema {schema}: {why}" for why in scripts.unread]
            for path, content in scripts.files().items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
    return tuple(said)


def copy_scripts(source: Path, folder: Path, schemas: Iterable[str]) -> None:
    """Copy the scripts of ``schemas`` from a folder in the layout of a logical backup to another one."""
    for schema in sorted(set(schemas)):
        if (source / schema_folder(schema)).is_dir():
            shutil.copytree(source / schema_folder(schema), folder / schema_folder(schema), dirs_exist_ok=True)


def remarks(folder: Path, schemas: Sequence[str], backup_id: str, *, replayed: bool, chosen: bool) -> tuple[str, ...]:
    """What to know of the scripts of ``schemas`` in ``folder``, out of a backup onto which logs were ``replayed``; a
    narrowed replay leaves these objects alone. ``chosen``: the backup may have been asked to leave them out."""
    said = []
    none = [schema for schema in schemas if not any(_path(folder, schema, part).is_file() for part in _PARTS)]
    if none and (chosen or replayed):
        why = (
            "there were none, or the backup was limited to some tables of that schema"
            if chosen
            else "those created between it and the target are not restored"
        )
        said.append(f"backup {backup_id} has no views, routines or events of {', '.join(none)}: {why}")
    if replayed and (some := [schema for schema in schemas if schema not in none]):
        said.append(
            f"views, routines and events of {', '.join(some)} are those of backup {backup_id}: changes to them between "
            "it and the target are not replayed"
        )
    return tuple(said)


def create_missing(connection: Connection, folder: Path, schemas: Iterable[str]) -> frozenset[str]:
    """Make those of ``schemas`` that the server does not have, as their scripts say; gives these. A schema without a
    script is left to whoever needs it. Raises ServerError."""
    made: set[str] = set()
    with connection.connect() as session:
        present = _Present.look(session)
        for schema in sorted(set(schemas)):
            path = _path(folder, schema, "create")
            if present.has(schema) or not path.is_file():
                continue
            for statement in statements(script_text(path)):
                session.execute(statement)
            made.add(schema)
    return frozenset(made)


def add_missing(
    connection: Connection, folder: Path, schemas: Iterable[str], fresh: Collection[str] = ()
) -> SchemaObjects:
    """Make what ``schemas`` hold by their scripts in ``folder`` and lack on the server; their tables are there.

    ``fresh``: schemas that were made for this restore. Only in these is the default collation changed for the moment in
    which a routine is made that was made under another one. Raises DamagedError for scripts that are not as a backup
    has them; ServerError only before anything is made.
    """
    with connection.connect() as session:
        session.execute(f"SET SESSION lock_wait_timeout = {_LOCK_SECONDS}")
        adding = _Adding(session, _Present.look(session), fresh)
        wanted = {
            schema: {part: _read(_path(folder, schema, part), schema) for part in _PARTS}
            for schema in sorted(set(schemas))
        }
        for schema, parts in wanted.items():
            adding.compare(schema, [one for part in parts.values() for one in part])
        for part in _PARTS:
            adding.make([one for parts in wanted.values() for one in parts[part]])
        return adding.done()


@dataclass(frozen=True, slots=True)
class _Scripted:
    """An object of a script. ``setting``: prepares the session that makes it; ``collation``: of the schema when it was
    made, "" for the schema's own; ``definer``: as an account is written, "" for none."""

    object: SchemaObject
    statement: str
    setting: str
    collation: str
    definer: str


@dataclass(frozen=True, slots=True)
class _Present:
    """The schemas of the server, with their collations. ``folded``: it takes names in upper and lower case for one."""

    collations: Mapping[str, str]
    folded: bool

    @classmethod
    def look(cls, session: Session) -> _Present:
        folded = int(session.scalar("SELECT @@GLOBAL.lower_case_table_names")) != 0
        return cls(
            {
                str(name).lower() if folded else str(name): str(collation)
                for name, collation in session.query(_SCHEMATA)
            },
            folded,
        )

    def has(self, schema: str) -> bool:
        return self.fold(schema) in self.collations

    def fold(self, name: str) -> str:
        return name.lower() if self.folded else name

    def key(self, one: SchemaObject) -> tuple[str, str]:
        """Equal for what the server takes for one object of a schema; case never matters in routines and events."""
        return one.kind, self.fold(one.name) if one.kind == "view" else one.name.lower()


class _Adding:
    def __init__(self, session: Session, present: _Present, fresh: Collection[str]) -> None:
        self._session, self._present, self._fresh = session, present, fresh
        self._added: list[SchemaObject] = []
        self._enabled: list[SchemaObject] = []
        self._left_alone: dict[SchemaObject, bool | None] = {}
        self._failed: dict[SchemaObject, str] = {}
        self._strangers: dict[str, list[SchemaObject]] = {}
        self._warnings: list[str] = []

    def compare(self, schema: str, objects: Iterable[_Scripted]) -> None:
        """Find out which of ``objects`` are there."""
        scripts = read_schema(self._session, schema, partial=True)
        theirs = {
            self._present.key(one.object): one
            for text in (scripts.routines, scripts.views, scripts.events)
            for one in _objects(text, schema)
        }
        for one in objects:
            there = theirs.get(self._present.key(one.object))
            if there is not None:
                self._left_alone[one.object] = (there.statement, there.setting) != (one.statement, one.setting)

    def make(self, objects: Sequence[_Scripted]) -> None:
        """Again those that failed, as long as that helps: a view may read one of another schema."""
        waiting = [one for one in objects if one.object not in self._left_alone]
        while waiting:
            refused = {one.object: why for one in waiting if (why := self._make(one))}
            if len(refused) == len(waiting):
                self._failed |= refused
                break
            waiting = [one for one in waiting if one.object in refused]

    def done(self) -> SchemaObjects:
        warnings = list(self._warnings)
        for definer, objects in sorted(self._strangers.items()):
            warnings.append(
                f"there is no account {definer} here, the definer of {_listed(objects)}: these do not work until it is "
                "created or they get another definer"
            )
        if self._enabled:
            running = str(self._session.scalar("SELECT @@GLOBAL.event_scheduler")) in ("ON", "1")
            warnings.append(
                f"enabled, as their definitions say: {_listed(self._enabled)}; they run by their schedules"
                f"{'' if running else ' once event_scheduler is ON'}"
            )
        return SchemaObjects(tuple(self._added), tuple(self._enabled), self._left_alone, self._failed, tuple(warnings))

    def _make(self, one: _Scripted) -> str:
        """Empty when that is settled, else why not."""
        made = one.object
        try:
            self._session.execute("SET NAMES utf8mb4")  # the setting of the one before may be another
            self._session.execute(f"USE {quote_name(made.schema)}")
            with _collated(self._session, *self._collations(one)):
                self._session.execute(one.setting)
                _rows, warned = self._session.send(one.statement.encode("utf-8", "surrogateescape"))
                # Without one of its own MariaDB shows those of an earlier statement.
                codes = {int(row[1]) for row in self._session.query("SHOW WARNINGS")} if warned else set()
            self._session.execute("SET NAMES utf8mb4")
            status = self._session.scalar(_STATUS, made.schema, made.name) if made.kind == "event" else ""
        except ServerError as error:
            if error_code(error) not in _EXISTS:
                return error.detail
            self._left_alone[made] = None  # made meanwhile, or a table has its name, or its text may not be read
            return ""
        if status is None:
            self._warnings.append(f"{made.shown} was dropped by the server: its schedule has ended")
            return ""
        self._added.append(made)
        if status == "ENABLED":
            self._enabled.append(made)
        if _NO_SUCH_USER in codes:
            self._strangers.setdefault(one.definer, []).append(made)
        return ""

    def _collations(self, one: _Scripted) -> tuple[str, str]:
        """The default collation to make it under, and the schema's own; both empty where nothing is changed."""
        own = self._present.collations.get(self._present.fold(one.object.schema), "")
        if not one.collation or one.collation == own:
            return "", ""
        if one.object.schema in self._fresh:
            return one.collation, own
        self._warnings.append(
            f"{one.object.shown} was made when the collation of its schema was {one.collation}; here "
            f"that is {own}, and so it is for its parameters and variables that do not name one"
        )
        return "", ""


@contextmanager
def _collated(session: Session, collation: str, own: str) -> Iterator[None]:
    """While the session's schema has this ``collation``; "": as it is."""
    if not collation:
        yield
        return
    session.execute(_ALTER % collation)
    try:
        yield
    finally:
        session.execute(_ALTER % own)


def _path(folder: Path, schema: str, part: str) -> Path:
    return folder / f"{schema_folder(schema)}{part}.sql"


def script_text(path: Path) -> str:
    """With whatever bytes it holds, and its line ends."""
    return path.read_bytes().decode("utf-8", "surrogateescape")


def _read(path: Path, schema: str) -> tuple[_Scripted, ...]:
    try:
        return tuple(_objects(script_text(path), schema)) if path.is_file() else ()
    except ValueError as error:
        raise DamagedError(
            f"{path.name} of schema {schema} is not as a backup has it",
            [str(error)],
            hint="restore from another backup",
        ) from error


def _objects(text: str, schema: str) -> Iterator[_Scripted]:
    """Of a script. Raises ValueError."""
    setting = collation = ""
    for statement in statements(text):
        if statement.startswith("SET SESSION "):
            setting, collation = statement, ""
        elif (altered := _ALTERED.fullmatch(statement)) is not None:
            collation = altered[1]
        elif statement.startswith("CREATE "):
            yield _scripted(statement, setting, collation, schema)


def _scripted(statement: str, setting: str, collation: str, schema: str) -> _Scripted:
    found = list(islice(tokens_of(statement), _HEAD))
    words = [token.word for token in found]
    at = next((at for at, word in enumerate(words) if word in _KINDS), 0)
    kind = words[at].lower()
    if words[at : at + 2] == ["PACKAGE", "BODY"]:
        kind, at = "package body", at + 1
    if at == 0 or words[1] == "OR" or at + 1 >= len(found):
        raise ValueError(f"no view, routine or event is made by this: {statement[:200]!r}")
    at += 1
    while at + 2 < len(found) and found[at + 1].text == ".":
        at += 2
    return _Scripted(SchemaObject(kind, schema, found[at].plain), statement, setting, collation, _definer(found))


def _definer(found: Sequence[Token]) -> str:
    """The account (or role) behind DEFINER =; empty without one."""
    at = next((at for at, token in enumerate(found) if token.word == "DEFINER"), len(found)) + 2
    parts = [token.plain for token in found[at : at + 3]]
    if parts[1:2] == ["@"]:
        return "@".join(map(quote_name, parts[::2]))
    return quote_name(*parts[:1]) if parts else ""


def _listed(objects: Iterable[SchemaObject]) -> str:
    return ", ".join(one.shown for one in objects)
