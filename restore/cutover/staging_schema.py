"""Staging schemas: where tables are loaded before they take their place, one per schema of the source.

Named ``backupd_restore_<restore id>_<number>``; the first holds the journal of the load. Nothing but such a schema, or
one that was made for a load, is ever dropped or filled.

The journal, a table of the first one, records what a load has done so far: rows and their entry there are one
transaction.

One row per table and one per file of rows, found by the SHA-256 of their path in the folder. Whoever loads holds a
named lock of the server, and so does each of its sessions: when a process was killed, the server may go on with its
last statement for a while, and the next one waits for that.

The definition of a table for loading: without foreign keys, without paths of the source's disks, and, for large
tables, with secondary keys that are built once all rows are there. Pure.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from backupd.engine.physical.tablespace_transport import remove_strays
from backupd.engine.server.definition_text import parse_table, without_directories, without_foreign_keys
from backupd.engine.server.definitions import TableDefinition
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.dialect import Token, tokens_of
from backupd.model.errors import BusyError, RefusedError, ServerError
from backupd.model.table import quote_name

TABLE = "backupd_load"
_NO_SUCH_THREAD = 1094
DYING = 3
"""Seconds that the server may take to notice that a killed process is gone."""
_PATIENCE = 60.0
"""Seconds for the sessions of a killed process to end; they are asked to."""
_CREATE = """
CREATE TABLE IF NOT EXISTS {journal} (
  id BINARY(32) NOT NULL PRIMARY KEY, path TEXT NOT NULL, state VARCHAR(16) NOT NULL, size BIGINT NOT NULL,
  position BIGINT NOT NULL, row_count BIGINT NOT NULL, digest CHAR(64) NOT NULL, begun DATETIME NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin COMMENT = 'what backupd has loaded here so far'
"""

_LATER = (["KEY"], ["UNIQUE", "KEY"])
_ELSEWHERE = frozenset(
    {
        "FEDERATED",
        "FEDERATEDX",
        "SPIDER",
        "CONNECT",
        "MRG_MYISAM",
        "MERGE",
        "OQGRAPH",
        "SPHINX",
        "NDB",
        "NDBCLUSTER",
        "S3",
    }
)
"""Engines whose rows are stored somewhere else, mostly in a table that lives on; what is inserted would arrive
there."""
PREFIX = "backupd_restore_"
_NAME = re.compile(rf"{PREFIX}(?P<id>[0-9a-z-]+)_(?P<number>\d+)")


class State(StrEnum):
    """Of a table: about to be created; taking rows; complete but for its keys; complete. Files are ``FILE``."""

    MAKING = "making"
    LOADING = "loading"
    FILLED = "filled"
    DONE = "done"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Entry:
    """``position``: bytes of a file that are loaded, ``digest`` their SHA-256; of a table that of its definition.
    ``rows``: how many came out of it."""

    path: str
    state: State
    size: int
    position: int = 0
    rows: int = 0
    digest: str = ""


class Journal:
    """Of one load. ``schema``: the staging schema that holds it."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._table = quote_name(schema, TABLE)

    def create(self, session: Session) -> None:
        """Make its table, if it is not there. Raises ServerError."""
        session.execute(_CREATE.format(journal=self._table))

    def read(self, session: Session) -> Mapping[str, Entry]:
        """By path."""
        rows = session.query(f"SELECT path, state, size, position, row_count, digest FROM {self._table}")  # noqa: S608
        return {
            str(path): Entry(str(path), State(state), int(size), int(position), int(count), str(digest))
            for path, state, size, position, count, digest in rows
        }

    def write(self, session: Session, *entries: Entry) -> None:
        """Add or replace."""
        for entry in entries:
            session.execute(
                f"REPLACE INTO {self._table} VALUES (UNHEX(%s), %s, %s, %s, %s, %s, %s, UTC_TIMESTAMP())",  # noqa: S608
                _key(entry.path),
                entry.path,
                str(entry.state),
                entry.size,
                entry.position,
                entry.rows,
                entry.digest,
            )

    def position(self, session: Session, path: str) -> int | None:
        """How far a file is loaded; inside of a transaction nobody else can go on with it until that ends."""
        found = session.scalar(
            f"SELECT position FROM {self._table} WHERE id = UNHEX(%s) FOR UPDATE",  # noqa: S608
            _key(path),
        )
        return None if found is None else int(found)

    def advance(self, session: Session, path: str, position: int, rows: int, digest: str) -> None:
        """``rows`` more came out of the file, up to ``position``."""
        self._update(session, path, "position = %s, row_count = row_count + %s, digest = %s", position, rows, digest)

    def set_state(self, session: Session, path: str, state: State, rows: int = 0) -> None:
        """Note ``state`` of the entry ``path``, and ``rows`` as those of the whole entry."""
        self._update(session, path, "state = %s, row_count = %s", str(state), rows)

    def _update(self, session: Session, path: str, assignments: str, *values: object) -> None:
        statement = f"UPDATE {self._table} SET {assignments} WHERE id = UNHEX(%s)"  # noqa: S608
        session.execute(statement, *values, _key(path))

    def forget(self, session: Session, *paths: str) -> None:
        """Remove the entries of ``paths``: their tables are loaded from the beginning next time."""
        for path in paths:
            session.execute(f"DELETE FROM {self._table} WHERE id = UNHEX(%s)", _key(path))  # noqa: S608

    # -- who is at it

    def claim(self, session: Session, most_workers: int) -> None:
        """Be the only one; ends what a killed process left running. Held until ``session`` is closed.

        Raises BusyError, ServerError.
        """
        if not session.scalar("SELECT GET_LOCK(%s, %s)", self._lock(), DYING):
            raise self._busy(session)
        deadline = time.monotonic() + _PATIENCE
        for left in self._left(session, most_workers):
            if time.monotonic() > deadline:
                raise BusyError(
                    f"the server still runs an earlier load into {self.schema}",
                    detail=f"its connection {left} does not end",
                    hint="SHOW PROCESSLIST tells what it does; repeat the command when it has ended",
                )
            try:
                session.execute(f"KILL {left}")
            except ServerError as error:
                if error_code(error) != _NO_SUCH_THREAD:
                    raise
            time.sleep(0.05)

    def release(self, session: Session) -> None:
        """Others may claim it now, before the server has noticed that ``session`` is closed."""
        with contextlib.suppress(ServerError):  # a lost session holds nothing
            session.scalar("SELECT RELEASE_LOCK(%s)", self._lock())

    def claim_worker(self, session: Session, number: int) -> None:
        """Mark ``session`` as one that may be writing here. Raises BusyError."""
        if not session.scalar("SELECT GET_LOCK(%s, 10)", self._lock(number)):
            raise self._busy(session)

    def _busy(self, session: Session) -> BusyError:
        holder = session.scalar("SELECT IS_USED_LOCK(%s)", self._lock())
        return BusyError(
            f"another session is loading into {self.schema} right now",
            detail=f"connection {holder} of the server" if holder else "",
            hint="wait for that restore to end, or stop it; then repeat the command",
        )

    def _left(self, session: Session, most_workers: int) -> Iterator[int]:
        """Connections of workers as long as there are any."""
        for number in range(most_workers):
            while (found := session.scalar("SELECT IS_USED_LOCK(%s)", self._lock(number))) is not None:
                yield int(found)

    def _lock(self, worker: int | None = None) -> str:
        return lock_name(self.schema) + ("" if worker is None else f".{worker}")


def lock_name(schema: str) -> str:
    """The server's lock of whoever loads into ``schema``; such names are at most 64 characters long."""
    return "backupd." + hashlib.sha256(schema.encode("utf-8", "surrogateescape")).hexdigest()[:40]


def _key(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class StagedTable:
    """``create``: the statement, for a session in the staging schema. ``later``: names of keys and the ``ADD`` clauses
    that build them, in one ALTER TABLE once all rows are there. ``engine`` as printed, in upper case; ``sequence``: no
    table at all."""

    create: str
    later: tuple[tuple[str, str], ...] = ()
    engine: str = ""
    sequence: bool = False
    versioned: bool = False

    @property
    def rows_elsewhere(self) -> bool:
        """Would an INSERT write into something that is not this table?"""
        return self.engine in _ELSEWHERE


def staged_table(definition: TableDefinition, *, defer: bool = False) -> StagedTable:
    """``definition`` made fit. ``defer``: build secondary keys later, where that is possible. Raises ValueError when it
    would create something else than its table."""
    name, create = definition.name, definition.create
    words = list(itertools.islice(tokens_of(create), 4))
    if len(words) < 4 or words[2].plain != name.table or words[3].text == ".":
        raise ValueError(f"its definition is one of something else: {create[:80]!r}")
    engine = definition.engine.upper()
    if definition.is_sequence:
        return StagedTable(create, engine=engine, sequence=True)
    text = without_directories(without_foreign_keys(name, create))
    versioned = definition.columns.versioned
    if not defer or engine != "INNODB" or versioned or not definition.columns.primary_key:
        return StagedTable(text, engine=engine, versioned=versioned)
    head, items, tail = parts(text)
    counters = {column.name for column in parse_table(name, text).columns.all if column.auto_increment}
    later = [item for item in items if _may_wait(item, counters)]
    inline = [item for item in items if item not in later]
    return StagedTable(
        f"{head}(\n  " + ",\n  ".join(inline) + f"\n){tail}",
        tuple((_key_name(item), f"ADD {item}") for item in later),
        engine,
    )


def parts(create: str) -> tuple[str, Sequence[str], str]:
    """All before the first parenthesis of a CREATE TABLE, what is listed in it, all after it. Raises ValueError."""
    depth, head, begin, items = 0, "", 0, []
    for token in tokens_of(create):
        if token.kind != "mark":
            continue
        depth += (token.text == "(") - (token.text == ")")
        if token.text == "(" and depth == 1:
            head, begin = create[: token.start], token.end
        elif depth == 0 and token.text == ")":
            items.append(create[begin : token.start].strip())
            return head, items, create[token.end :]
        elif token.text == "," and depth == 1:
            items.append(create[begin : token.start].strip())
            begin = token.end
    raise ValueError(f"this definition has no end: {create[:80]!r}")


def _may_wait(item: str, counters: set[str]) -> bool:
    """A plain or unique key; but the server wants a key that begins with the counter from the start."""
    words = list(tokens_of(item))
    index = _index_of_name(words)
    plain = [token.word for token in words[:index]] in _LATER
    return plain and words[index + 2].plain not in counters and not {"HASH", "OVERLAPS"} & {one.word for one in words}


def _key_name(item: str) -> str:
    words = list(tokens_of(item))
    return words[_index_of_name(words)].plain


def _index_of_name(words: Sequence[Token]) -> int:
    return next((index for index, token in enumerate(words) if token.kind == "name"), 0)


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
    if not holds(session, first, TABLE):
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
    return Journal(schema).read(session) if holds(session, schema, TABLE) else {}


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
            hint=f"only schemas named {PREFIX}<restore>_<number> are dropped; none was dropped",
        )
    with connection.connect() as session:
        # Held until the end, so that nobody begins to load meanwhile.
        if busy := [name for name in wanted if not session.scalar("SELECT GET_LOCK(%s, %s)", lock_name(name), DYING)]:
            raise BusyError(
                f"a restore is loading into {', '.join(busy)} right now",
                hint="wait for it to end, or stop it; then repeat the command",
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
            f"files of dropped tables remain in the folder of the schema {name}",
            detail="\n".join(map(str, left)),
            hint="remove these files: MySQL creates no schema of that name while they exist, and may fail to start",
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
        if holds(session, name, TABLE):
            begun = session.scalar(f"SELECT MIN(begun) FROM {quote_name(name, TABLE)}")  # noqa: S608  a quoted name
    return Staging(
        restore_id,
        tuple(names),
        tables,
        size,
        begun.replace(tzinfo=UTC) if begun else None,
        any(session.scalar("SELECT IS_USED_LOCK(%s)", lock_name(name)) is not None for name in names),
    )


def holds(session: Session, schema: str, table: str) -> bool:
    """Is there such a table? Raises ServerError."""
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
            f"the schema {schema} is not empty, and no restore created it",
            detail=f"it holds {', '.join(tables)}",
            hint="backupd loads tables only into its own schemas; nothing was changed",
        )


def _mark(schema: str) -> str:
    return f"schema:{schema}"


def _number(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match["number"]) if match else 0
