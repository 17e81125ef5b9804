"""The list of tables at the very position that a physical backup records, and the files of those made meanwhile.

mariadb-backup streams a table that was dropped and made again while it ran, and then, replaying the server's log of
such statements, the removal of the table of before, which has the same name: the new one is gone from the stream, exit
code 0 and "completed OK!" (10.11.19). So the server is asked for its tables while the tool keeps commits and changes of
definitions blocked, and for each of them every file has to be there at the end (``tablefiles.absent``).

What is not there is taken from the server where that is sound: tables of engines without transactions whose definition
is younger than the beginning of the backup are opened under the same lock, and their files are read afterwards. An open
file outlives the DROP of its table, and one that was written to since shows it by its size or time.

From the log of changed definitions that MariaDB keeps while a backup runs (``ddl.log``) mariadb-backup learns which
tables of MyISAM, Aria and the like it has to copy again, rename or remove.

Measured with 10.11.19: the tool stops reading at the first EXCHANGE PARTITION, exit code 0 and "completed OK!". A table
that it had copied before, and that is dropped and made again, renamed or altered behind that, is in the backup as it
was. A line is: time, what, engine, partitioned, schema, table, id, and the same from the engine on for the other table.

TRUNCATE of an Aria table is not in that list, nor is a load that fills an empty one. Where the tool had copied the
table before, its prepare replays the Aria log onto that copy, and what comes out are rows of both (measured with
10.11.19: 30 rows, TRUNCATE, INSERT of one: that one and 29 of the old ones). Both write a new ``create_rename_lsn``
into the head of the table's ``.MAI`` file, as CREATE and RENAME do: a copy with an older one is not the table. Format
(maria_def.h, ma_open.c, ``_ma_state_info_write_sub``): fe fe 09, and at 28 the number of the log (3 bytes) and the
offset in it (4 bytes), little-endian.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from backupd.engine.physical.capture import Data, End, FileEvent, Remove
from backupd.engine.physical.imported_tables import ImportWatch
from backupd.engine.physical.tablefiles import OF_ENGINE, decode_file_name, part_name, stem_of, table_of
from backupd.engine.server.probe import read_dialect
from backupd.engine.server.snapshot import position_now
from backupd.engine.server.wsrep import probe_wsrep
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.dialect import Dialect
from backupd.engine.sql.tables import SYSTEM_SCHEMAS, table_names
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, Position, Version, WsrepState
from backupd.model.table import BaseTable, TableName
from backupd.process.folders import open_plain, read_plain

_NAME = "ddl.log"
_MOST = 256 * 1024 * 1024
_UNREAD = "EXCHANGE_PARTITION"
_WHAT, _FIRST, _OTHER, _SIZE = 1, 2, 7, 5
_ARIA_MAGIC, _ARIA_HEAD, _ARIA_BEGUN = b"\xfe\xfe\x09", 35, 28

AriaPosition = tuple[int, int]
"""A position in the Aria log: number of the file, and byte in it."""


def aria_begun(head: bytes | memoryview) -> AriaPosition | None:
    """Where in the log the content of an Aria table begins, from the first 35 bytes of its ``.MAI`` file; None for
    what is none."""
    if len(head) < _ARIA_HEAD or bytes(head[: len(_ARIA_MAGIC)]) != _ARIA_MAGIC:
        return None
    number = int.from_bytes(head[_ARIA_BEGUN : _ARIA_BEGUN + 3], "little")
    return number, int.from_bytes(head[_ARIA_BEGUN + 3 : _ARIA_HEAD], "little")


def unread_changes(datadir: Path) -> tuple[TableName, ...]:
    """Tables of engines other than InnoDB that the log names where mariadb-backup reads no more. Raises OSError."""
    try:
        text = read_plain(datadir / _NAME, _MOST).decode("utf-8", "replace")
    except FileNotFoundError:
        return ()  # a server that keeps none
    lines = [line.split("\t") for line in text.split("\n")]
    first = next((at for at, fields in enumerate(lines) if fields[_WHAT:_FIRST] == [_UNREAD]), len(lines))
    found = (fields[at : at + _SIZE] for fields in lines[first:] for at in (_FIRST, _OTHER))
    named = [one[2:4] for one in found if len(one) > 3 and one[0].lower() in OF_ENGINE]
    return tuple(dict.fromkeys(TableName(*map(decode_file_name, names)) for names in named))


_TABLES = """
SELECT TABLE_SCHEMA, TABLE_NAME, ENGINE FROM information_schema.TABLES
WHERE TABLE_TYPE <> 'VIEW' AND TABLE_TYPE <> 'SYSTEM VIEW' AND TABLE_TYPE NOT LIKE '%%TEMPORARY%%'
AND TABLE_SCHEMA NOT IN ({marks})
"""
_LIST = "SELECT NAME, SPACE FROM information_schema.{list} WHERE NAME LIKE '%/%'"
_TYPED_LIST = "SELECT NAME, SPACE, SPACE_TYPE FROM information_schema.{list} WHERE NAME LIKE '%/%'"
_TYPED = Version(5, 7, 6)
"""Of MySQL: the first with tablespaces of several tables besides the system's own, and the column that shows them."""
_SETTINGS = (
    "SET SESSION wait_timeout = 2147483",
    # The server's own stages keep changes of definitions away; whoever holds a table nevertheless is not waited for.
    "SET SESSION lock_wait_timeout = 1",
)
_CHANGES = re.compile(r"\s*(?:CREATE|DROP|ALTER|RENAME|TRUNCATE)\b", re.IGNORECASE)
_USE = re.compile(r"\s*use `(?:[^`]|``)*`; ", re.IGNORECASE)
_PING_EVERY = 30.0
_PATIENCE = 60.0
_MOST_OPEN = 500
"""Files that are kept open for the end of a backup."""
_EARLIER = 2.0
"""Seconds by which a definition may look older than it is."""
_BLOCK = 1024 * 1024
_INNODB, _SYSTEM, _OWN = "InnoDB", 0, "Single"


def base_tables(session: Session, dialect: Dialect, datadir: Path) -> tuple[BaseTable, ...]:
    """Every table and sequence outside the system schemas, by name. Nothing is opened or waited for but definitions.

    Where the account may not see InnoDB's own list (PROCESS) no ``space`` is known, nor where a table has no file in
    ``datadir`` (DISCARD TABLESPACE). Raises ServerError.
    """
    spaces = _spaces(session, dialect)
    rows = _listed(session)
    found: list[BaseTable] = []
    for schema, table, engine in rows:
        name = TableName(str(schema), str(table))
        parts = spaces.get(name, {}) if (engine or _INNODB) == _INNODB else {}
        space = next(iter(parts.values()), None)
        lying = all(part.shared or _has_file(datadir, part.path) for part in parts.values())
        number = space.number if space and lying else None
        known = str(engine or (_INNODB if parts else ""))
        shared = space is not None and space.shared
        found.append(BaseTable(name, known, number, shared, tuple(sorted(filter(None, parts)))))
    return tuple(sorted(found, key=lambda one: one.name))


def engines_of(session: Session) -> dict[TableName, str]:
    """Of every table and sequence outside the system schemas whose engine the server can name. Raises ServerError."""
    return {TableName(str(schema), str(table)): str(engine) for schema, table, engine in _listed(session) if engine}


def _listed(session: Session) -> list[tuple[object, ...]]:
    return session.query(_TABLES.format(marks=", ".join(["%s"] * len(SYSTEM_SCHEMAS))), *SYSTEM_SCHEMAS)


@dataclass(frozen=True, slots=True)
class _Space:
    """``path``: in the data directory, without suffix."""

    path: str
    number: int
    shared: bool


def _spaces(session: Session, dialect: Dialect) -> dict[TableName, dict[str, _Space]]:
    """By table and partition ("" for a table that has none)."""
    typed = dialect.flavour is not Flavour.MARIADB and dialect.version >= _TYPED
    rows = session.permitted((_TYPED_LIST if typed else _LIST).format(list=dialect.innodb_tables))
    found: dict[TableName, dict[str, _Space]] = defaultdict(dict)
    for name, number, *kind in rows or ():
        path = str(name)
        stem = stem_of(path)
        if stem and "/#" not in stem and number is not None:
            shared = int(number) == _SYSTEM or (bool(kind) and str(kind[0]) != _OWN)
            found[table_of(stem)][part_name(path.removeprefix(stem))] = _Space(path, int(number), shared)
    return found


def _has_file(datadir: Path, path: str) -> bool:
    return any((datadir / f"{path}{suffix}").exists() for suffix in (".ibd", ".isl"))


@dataclass(slots=True)
class _Held:
    """An open file of a table, and what it was under the lock. ``path``: in the data directory."""

    path: str
    descriptor: int
    size: int
    changed: int

    def as_it_was(self) -> bool:
        status = os.fstat(self.descriptor)
        return (status.st_size, status.st_mtime_ns) == (self.size, self.changed)


def _names(statement: str, table: TableName) -> bool:
    """May ``statement`` be about ``table`` or its schema?"""
    text = statement.lower()
    return table.table.lower() in text or (table.schema.lower() in text and ("database" in text or "schema" in text))


def _names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


class Stocktaking:
    """Makes the list of one backup. A context manager around the tool's run.

    ``moment``: the line of the tool's stderr after which it keeps changes of definitions and commits blocked; None for
    a tool that keeps changes of definitions away for its whole run: then the first ``pause`` is the moment. Hand each
    line to ``heard``; call ``pause`` whenever the tool's output is read, so that the tool cannot end before the list
    is made. ``twice``: the tool leaves it to the redo log to make and rename tables of InnoDB while it runs, so that
    of these only such as were there before it began, too, must have their files (``due``), and ``imports`` looks for
    those that the redo log knows nothing of.

    Nothing here raises: without a list (``tables`` is None), or without one of all tables (``is_whole``), ``problem``
    says why.
    """

    def __init__(self, connection: Connection, moment: re.Pattern[str] | None, *, twice: bool = False) -> None:
        self.problem = ""
        self.tables: tuple[BaseTable, ...] | None = None
        self.is_whole = True
        self.fetched: list[TableName] = []
        self.imports: ImportWatch | None = None
        self.node: WsrepState | None = None
        """A Galera node at the moment: then its provider is paused, and what it committed last is the backup's seqno.
        None once it is known that it was asked at another moment."""
        self.unread: tuple[TableName, ...] = ()
        """Of which the tool does not know that they were changed (``unread_changes``)."""
        self.copied: dict[str, AriaPosition] = {}
        """Where the content of an Aria table begins (``aria_begun``), by the path of its ``.MAI`` file: of those in the
        stream. Whoever reads that keeps it."""
        self._begun: dict[str, AriaPosition] = {}
        """The same at the moment, of those that were written to while the tool ran."""
        self._twice = twice
        self._earlier: frozenset[BaseTable] = frozenset()
        self._names: frozenset[TableName] = frozenset()
        self._schemas: frozenset[str] = frozenset()
        self._connection, self._moment = connection, moment
        self._session: Session | None = None
        self._dialect: Dialect | None = None
        self._datadir = Path()
        self._began, self._began_steady = time.time(), time.monotonic()
        self._unseen = ""
        """Why files of tables could not be looked at."""
        self._positions: tuple[Position, ...] = ()
        """Of the server: before anything was looked at, when the files were open, and after the list was read."""
        self._held: dict[TableName, list[_Held]] = {}
        self._go, self._leave, self._done = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._wait, name="inventory", daemon=True)

    def heard(self, line: str) -> None:
        """Look at one line of the tool's log. Cheap; never raises; any thread."""
        if self._moment is not None and not self._go.is_set() and self._moment.search(line):
            self._go.set()

    def pause(self) -> None:
        """Wait for the list when its moment has come."""
        if self._moment is None:
            self._go.set()
        if self._go.is_set() and not self._done.is_set() and self._thread.is_alive():
            self._done.wait(_PATIENCE)

    def settle(self, position: Position) -> None:
        """The tool has ended and recorded ``position``: is the list of that moment?"""
        if self._go.is_set():
            self.pause()
        if self.node is not None and (self.node.is_synced or not self._was_at(position)):
            self.node = None
        if self.tables is None:
            self.problem = self.problem or "the tool did not report that it blocked changes of definitions"
            return
        if self._moment is None:
            return
        same = [(one.file, one.pos) == (position.file, position.pos) for one in self._positions]
        if all(same) or not position.file:
            return
        if not all(same[:-1]):
            self._let_go()  # somebody may have written to them before they were looked at
        try:
            changes = self._changes_between(*self._positions, position)
        except ServerError as error:
            self.tables, self.problem = None, f"{error.message}: {error.detail}"
            return
        if changes:
            self.tables = tuple(table for table in self.tables if not any(_names(text, table.name) for text in changes))
            self.is_whole = False
            self.problem = f"tables were changed while they were listed: {changes[0][:200]}"

    def _was_at(self, position: Position) -> bool:
        """Was the server still at ``position`` of its binary log, where it writes one, after the node was asked?"""
        return bool(self._positions) and (
            not position.file or (self._positions[0].file, self._positions[0].pos) == (position.file, position.pos)
        )

    @property
    def due(self) -> tuple[BaseTable, ...]:
        """Those of ``tables`` whose files must be in the stream."""
        return tuple(
            table for table in self.tables or () if not self._twice or table.engine != _INNODB or table in self._earlier
        )

    @property
    def inventory(self) -> tuple[BaseTable, ...] | None:
        """``tables`` for the manifest: those of which no file is ``due`` have no ``space``. None where that is not all
        of them."""
        if self.tables is None or not self.is_whole:
            return None
        due = frozenset(self.due)
        return tuple(table if table in due else replace(table, space=None) for table in self.tables)

    @property
    def begun_again(self) -> frozenset[str]:
        """``.MAI`` files of Aria tables that the stream has as they were before their content began anew."""
        return frozenset(path for path, now in self._begun.items() if self.copied.get(path, now) != now)

    def has_owner(self, path: str) -> bool:
        """Is ``path``, which the tool removed, a file of what there was at the moment: the definition of a table or
        view, or any file of InnoDB's in a schema? False without a list."""
        schema = decode_file_name(path.partition("/")[0])
        if self.tables is None or schema not in self._schemas:
            return False
        stem = stem_of(path)
        return not path.endswith((".frm", ".par", ".TRG")) or (bool(stem) and table_of(stem) in self._names)

    def fetch(self, table: BaseTable, paths: Iterable[str]) -> Iterator[FileEvent]:
        """The files of ``table`` as they were at the moment, in place of those of ``paths``; then it is one of
        ``fetched``. Nothing where that is not sound any more."""
        held = self._held.get(table.name, []) if table.engine.lower() in OF_ENGINE else []
        if not held or not all(file.as_it_was() for file in held):
            return
        for path in paths:
            if stem_of(path) in {stem_of(file.path) for file in held}:
                yield Remove(path)
        for file in held:
            offset = 0
            while offset < file.size:
                block = os.pread(file.descriptor, min(_BLOCK, file.size - offset), offset)
                if not block:
                    break
                yield Data(file.path, offset, memoryview(block))
                offset += len(block)
            yield End(file.path)
        if all(file.as_it_was() for file in held):
            self.fetched.append(table.name)
            return
        for file in held:
            yield Remove(file.path)

    def __enter__(self) -> Self:
        try:
            session = self._session = self._connection.connect()
            self._dialect = read_dialect(session)
            for statement in _SETTINGS:
                session.execute(statement)
            self._datadir = Path(str(session.scalar("SELECT @@GLOBAL.datadir")))
            if self._twice:
                self._earlier = frozenset(base_tables(session, self._dialect, self._datadir))
                self.imports = ImportWatch(session)
        except ServerError as error:
            self.problem = f"{error.message}: {error.detail}"
        else:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._leave.set()
        self._go.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)
        self._let_go()
        if self._session is not None:
            self._session.close()

    # -- inside

    def _wait(self) -> None:
        session, dialect = self._session, self._dialect
        if session is None or dialect is None:
            return
        try:
            while not self._go.wait(_PING_EVERY):
                session.ping()
            if self._leave.is_set():
                return
            self.node = probe_wsrep(session) if self._moment is not None else None
            before = position_now(session, dialect)
            self._hold()
            held = position_now(session, dialect)
            tables = base_tables(session, dialect, self._datadir)
            if self.imports is not None:
                self.imports.look(session)
            self.unread = unread_changes(self._datadir) if dialect.flavour is Flavour.MARIADB else ()
            self._names = table_names(session)
            self._schemas = frozenset(
                str(row[0]) for row in session.query("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA")
            )
            hidden = self._hidden()
            self._positions = before, held, position_now(session, dialect)
            if hidden:
                self.is_whole = False
                self.problem = f"the account does not see the tables of {', '.join(hidden[:5])}: grant it SELECT on *.*"
            if self._unseen and any(table.engine.lower() == "aria" for table in tables):
                self.is_whole = False
                self.problem = f"whether Aria tables were emptied meanwhile cannot be seen: {self._unseen}"
            self.tables = tables
        except ServerError as error:
            self.problem = f"{error.message}: {error.detail}"
        except OSError as error:
            self.problem = f"the server's list of changed definitions cannot be read: {error.strerror}"
        finally:
            self._done.set()

    def _hold(self) -> None:
        """Open the files of tables without transactions that were made or renamed while the tool ran: their definition
        is younger than the beginning of the backup. And those of Aria tables whose content began anew."""
        try:
            for folder in filter(Path.is_dir, self._datadir.iterdir()):
                for path in self._young([f"{folder.name}/{name}" for name in _names_in(folder)]):
                    if sum(map(len, self._held.values())) >= _MOST_OPEN:
                        break  # what is not held cannot be fetched; it is missed all the same
                    with contextlib.suppress(FileNotFoundError):  # a temporary one
                        self._open(path)
        except OSError as error:
            self._unseen = f"{error.filename}: {error.strerror}"

    def _young(self, paths: list[str]) -> list[str]:
        """Those of the files to hold. Raises OSError."""
        of_innodb = {stem_of(path) for path in paths if path.endswith((".ibd", ".isl"))}
        young = {
            path.removesuffix(".frm")
            for path in paths
            if path.endswith(".frm") and stem_of(path) and stem_of(path) not in of_innodb and self._is_young(path)
        }
        young |= {stem_of(path) for path in paths if path.endswith(".MAI") and self._is_begun_again(path)} - {""}
        return sorted(path for path in paths if stem_of(path) in young) if young else []

    def _is_young(self, path: str) -> bool:
        """Was it made or changed since the backup began? A clock that was set back meanwhile makes it seem older."""
        began = min(self._began, time.time() - (time.monotonic() - self._began_steady))
        try:
            return (self._datadir / path).stat().st_ctime >= began - _EARLIER
        except FileNotFoundError:  # a temporary one
            return False

    def _is_begun_again(self, path: str) -> bool:
        """May the copy of this Aria table be older than its present content? Keeps where that begins. Raises
        OSError."""
        if not self._is_young(path):
            return False
        descriptor = open_plain(self._datadir / path, follow=True)
        try:
            begun = aria_begun(os.pread(descriptor, _ARIA_HEAD, 0))
        finally:
            os.close(descriptor)
        if begun is None:
            return False
        self._begun[path] = begun
        return self.copied.get(path) != begun

    def _let_go(self) -> None:
        for held in self._held.values():
            for file in held:
                os.close(file.descriptor)
        self._held.clear()

    def _hidden(self) -> list[str]:
        """Schemas with tables on disk that the account does not see."""
        found: set[str] = set()
        seen = {name.schema for name in self._names}
        with contextlib.suppress(OSError):  # another host's; then nothing can be said
            for folder in filter(Path.is_dir, self._datadir.iterdir()):
                stems = [(stem_of(f"{folder.name}/{name}"), name.endswith(".frm")) for name in _names_in(folder)]
                known = [stem for stem, _defined in stems if stem and "/#" not in stem]
                defined = [stem for stem, is_definition in stems if stem and "/#" not in stem and is_definition]
                if any(table_of(stem) not in self._names for stem in defined) or (
                    known and decode_file_name(folder.name) not in seen
                ):
                    found.add(decode_file_name(folder.name))
        return sorted(found)

    def _open(self, path: str) -> None:
        descriptor = open_plain(self._datadir / path, follow=True)
        status = os.fstat(descriptor)
        if status.st_uid != self._datadir.stat().st_uid:
            os.close(descriptor)  # a link of the database's user to somebody else's file
            return
        self._held.setdefault(table_of(stem_of(path)), []).append(
            _Held(path, descriptor, status.st_size, status.st_mtime_ns)
        )

    def _changes_between(self, *positions: Position) -> list[str]:
        """Statements that change definitions between the first and the last of ``positions``, from the server's binary
        log. Raises ServerError."""
        start, *_, end = sorted(positions, key=lambda position: (position.file, position.pos))
        with self._connection.connect() as session:
            logs = [str(row[0]) for row in session.query("SHOW BINARY LOGS") if start.file <= str(row[0]) <= end.file]
            events = [
                (log, pos, str(info))
                for log in logs
                for _log, pos, kind, _server, _end, info in session.query(
                    f"SHOW BINLOG EVENTS IN '{log}' FROM {start.pos if log == start.file else 4}"
                )
                if kind == "Query"
            ]
        return [
            info
            for log, pos, info in events
            if (log, int(pos)) < (end.file, end.pos) and _CHANGES.match(_USE.sub("", info))
        ]
