"""Staging schemas: where tables are loaded before they take their place, one per schema of the source.

Named ``backupd_restore_<restore id>_<number>``; the first holds the journal of the load. Nothing but such a schema, or
one that was made for a load, is ever dropped or filled.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from backupd.engine.physical.tablespace_transport import remove_strays
from backupd.engine.sql.client import Connection, Session, is_denied
from backupd.model.errors import BusyError, RefusedError, ServerError
from backupd.model.table import quote_name
from restore.load.journal import DYING, TABLE, Entry, Journal, State, lock_name

PREFIX = "backupd_restore_"
_NAME = re.compile(rf"{PREFIX}(?P<id>[0-9a-z-]+)_(?P<number>\d+)")


@dataclass(frozen=True, slots=True)
class Staging:
    """What one restore left: its id, its schemas, tables and bytes in them, when it began (None: unknown), and whether
    somebody is at it now."""

    restore_id: str
    schemas: tuple[str, ...]
    tables: int
    bytes: int
    begun: datetime | None
    active: bool


def staging_names(restore_id: str, schemas: Iterable[str]) -> Mapping[str, str]:
    """The staging schema of each schema of the source, as ``load`` takes them."""
    name = f"{PREFIX}{restore_id.lower()}"
    return {schema: f"{name}_{number}" for number, schema in enumerate(sorted(set(schemas)), start=1)}


def own_schemas(session: Session, journal: Journal, schemas: Sequence[str]) -> Mapping[str, Entry]:
    """Make the schemas of a load, unless an earlier attempt did, and read its journal. The caller has claimed it.

    Raises RefusedError for a schema with tables that no load has made, ServerError.
    """
    first = journal.schema
    if not _holds(session, first, TABLE):
        _make(session, first)
        journal.create(session)
    known = journal.read(session)
    for schema in dict.fromkeys((first, *schemas)):
        if _mark(schema) not in known:
            _make(session, schema, but=TABLE if schema == first else "")
            journal.write(session, Entry(_mark(schema), State.DONE, 0))
        else:
            session.execute(f"CREATE DATABASE IF NOT EXISTS {quote_name(schema)} CHARACTER SET utf8mb4")
    return known


def journal_of(session: Session, schema: str) -> Mapping[str, Entry]:
    """What a load into ``schema`` and its fellows, of which it is the first, has done so far. Raises ServerError."""
    return Journal(schema).read(session) if _holds(session, schema, TABLE) else {}


def stagings(connection: Connection) -> tuple[Staging, ...]:
    """Every staging schema on the server, by restore, the oldest first. Raises ServerError."""
    with connection.connect() as session:
        found: dict[str, list[str]] = defaultdict(list)
        for (name,) in session.query("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA"):
            if match := _NAME.fullmatch(str(name)):
                found[match["id"]].append(str(name))
        listed = [_look(session, restore_id, sorted(names, key=_number)) for restore_id, names in found.items()]
    return tuple(sorted(listed, key=lambda one: (one.begun or datetime.min.replace(tzinfo=UTC), one.restore_id)))


def drop_staging(connection: Connection, names: Iterable[str]) -> None:
    """Drop staging schemas with everything in them; what is not there is no error.

    Raises RefusedError for any other name, BusyError while somebody loads into one of them, ServerError.
    """
    wanted = sorted(set(names), key=_number)  # the first, with the journal, goes last
    if wrong := [name for name in wanted if not _NAME.fullmatch(name)]:
        raise RefusedError(
            f"{', '.join(wrong)} is not a staging schema of backupd",
            hint=f"only schemas named {PREFIX}<restore>_<number> are dropped; nothing was",
        )
    with connection.connect() as session:
        # Held until the end, so that nobody begins to load meanwhile.
        if busy := [name for name in wanted if not session.scalar("SELECT GET_LOCK(%s, %s)", lock_name(name), DYING)]:
            raise BusyError(
                f"a restore is loading into {', '.join(busy)} right now",
                hint="wait for it to end, or end it; then repeat the command",
            )
        for name in reversed(wanted):
            _drop(session, name)


def _drop(session: Session, name: str) -> None:
    """With the files that an import which was killed has left."""
    statement = f"DROP DATABASE IF EXISTS {quote_name(name)}"
    refused: ServerError | None = None
    try:
        session.execute(statement)
    except ServerError as error:  # the folder is not empty: its tables are gone then
        if is_denied(error):
            raise
        session.ping()
        refused = error
    left = remove_strays(session, name)
    if left:
        raise ServerError(
            f"files of tables that are not there any more are left of the schema {name}",
            detail="\n".join(map(str, left)),
            hint="remove these files: MySQL makes no schema of that name while they are there, and may not start again",
        )
    if refused is not None:
        session.execute(statement)


def _look(session: Session, restore_id: str, names: Sequence[str]) -> Staging:
    tables = size = 0
    begun: datetime | None = None
    for name in names:
        held, taken = session.query(
            "SELECT COUNT(*), COALESCE(SUM(COALESCE(DATA_LENGTH, 0) + COALESCE(INDEX_LENGTH, 0)), 0) "
            "FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME <> %s",
            name,
            TABLE,
        )[0]
        tables, size = tables + int(held), size + int(taken)
        if _holds(session, name, TABLE):
            begun = session.scalar(f"SELECT MIN(begun) FROM {quote_name(name, TABLE)}")  # noqa: S608  a quoted name
    return Staging(
        restore_id,
        tuple(names),
        tables,
        size,
        begun.replace(tzinfo=UTC) if begun else None,
        any(_is_active(session, name) for name in names),
    )


def _is_active(session: Session, schema: str) -> bool:
    return session.scalar("SELECT IS_USED_LOCK(%s)", lock_name(schema)) is not None


def _holds(session: Session, schema: str, table: str) -> bool:
    return bool(
        session.scalar(
            "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s", schema, table
        )
    )


def _make(session: Session, schema: str, *, but: str = "") -> None:
    """``but``: a table that may be in it, which an attempt that was killed has just made."""
    session.execute(f"CREATE DATABASE IF NOT EXISTS {quote_name(schema)} CHARACTER SET utf8mb4")
    tables = [
        str(name)
        for (name,) in session.query(
            "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME <> %s "
            "ORDER BY TABLE_NAME LIMIT 5",
            schema,
            but,
        )
    ]
    if tables:
        raise RefusedError(
            f"the schema {schema} is not empty, and no restore has made it",
            detail=f"it holds {', '.join(tables)}",
            hint="tables are loaded only into schemas of backupd's own; nothing was changed",
        )


def _mark(schema: str) -> str:
    return f"schema:{schema}"


def _number(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match["number"]) if match else 0
