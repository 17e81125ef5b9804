"""Tables as files from one server into another on this host: ``FLUSH TABLES ... FOR EXPORT`` and ``IMPORT TABLESPACE``.

Measured with MariaDB 10.11.19 and MySQL 9.7.4: plain tables, tables with columns that were added without a rebuild,
virtual columns and partitions arrive with equal checksums. A table with a full-text index is imported with a warning
and a corrupt index, so it is refused. MySQL imports all partitions at once; MariaDB cannot import a partition, there
each one is imported as a table of its own and exchanged. The binary log does not carry the rows: a server that writes
one is refused, because its replicas and its log archive would lack them.

A file that waits for its import has the number of another server's tablespace. MySQL does not start with two files of
one number, so files are beside under a name that no server looks at until the moment of the IMPORT.

A killed import leaves such files in the data directory (``remove_strays``). Measured with MySQL 9.7.4: dropping the
table, and even its schema, leaves them there. Then no schema of that name can be made (error 3678), no table of that
name either (1813), and the server does not start when another tablespace has the number of such a file. MariaDB
10.11.19 removes those that have the names of tables.

What a copy's server knows of its tables, also of those whose files are not there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Event
from typing import Self

from backupd.engine.physical.capture import extents
from backupd.engine.physical.tablefiles import decode_file_name, owner_of, stem_of, table_of
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Connection, Session, error_code
from backupd.engine.sql.dialect import Dialect
from backupd.engine.sql.tables import SYSTEM_SCHEMAS, TableIds, checksum_statement, list_tables, table_ids
from backupd.model.errors import CancelledError, ServerError
from backupd.model.job import Progress
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName, quote_name
from backupd.process.folders import as_its_owner, open_plain
from backupd.process.run_context import RunContext

WAITING = ".backupd"
"""Behind the names of files that are copied and not yet imported."""
_OF_TABLES = (".ibd", ".cfg")


def remove_strays(session: Session, schema: str) -> tuple[Path, ...]:
    """Remove what imports left in the folder of ``schema``: files of tables that the server does not have, and the
    folder, where it does not have the schema either. Those that this user may not remove are returned. The account must
    see all tables of the schema, and nobody may be creating any there meanwhile. Raises ServerError."""
    if not session.connection.socket:
        return ()
    datadir = Path(str(session.scalar("SELECT @@GLOBAL.datadir")))
    known = {
        TableName(schema, str(name))
        for (name,) in session.query("SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s", schema)
    }
    gone = not session.query("SELECT 1 FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = %s", schema)
    left = []
    with contextlib.suppress(OSError, ValueError), as_its_owner(datadir):  # who may not look there put nothing there
        for folder in [one for one in datadir.iterdir() if decode_file_name(one.name) == schema]:
            for file in _strays(folder, known):
                try:
                    file.unlink(missing_ok=True)
                except OSError:
                    left.append(file)
            if gone:
                with contextlib.suppress(OSError):  # whatever else is there is none of ours
                    folder.rmdir()
    return tuple(left)


def _strays(folder: Path, known: set[TableName]) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        if not stat.S_ISREG(file.lstat().st_mode):
            continue
        owner = owner_of(f"{folder.name}/{file.name}")
        if file.name.endswith(WAITING) or (file.suffix in _OF_TABLES and owner is not None and owner not in known):
            yield file


_DATA, _NOTES, _LINK = ".ibd", ".cfg", ".isl"
_CHUNK = 16 * 1024 * 1024
_PATIENCE = 7 * 86400
"""Seconds that the server waits for the next statement, while a large file is copied."""
SPARE = "backupd_partition"
"""Name of the table that a partition is imported as, beside the table it belongs to."""
_FULLTEXT = "SELECT DISTINCT TABLE_SCHEMA, TABLE_NAME FROM information_schema.STATISTICS WHERE INDEX_TYPE = 'FULLTEXT'"
_NUMBERED = (
    "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.COLUMNS WHERE GENERATION_EXPRESSION = 'ROW START'"
    " AND DATA_TYPE = 'bigint'"
)
"""Tables whose history counts in transactions of their server."""


@dataclass(frozen=True, slots=True)
class ExportedTable:
    """``files``: its tablespaces, one for each partition; what the server notes of each is beside it as ``.cfg``."""

    name: TableName
    files: tuple[Path, ...]
    rows: int
    checksum: str

    @property
    def size(self) -> int:
        """Bytes of all its tablespaces."""
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True, slots=True)
class Imported:
    """``rows`` of the tables that are there, ``failed``: the others, with why; they were dropped from the target."""

    rows: Mapping[TableName, int]
    bytes: int
    failed: Mapping[TableName, str]


def can_import(source: Session, target: Session, names: Collection[TableName]) -> dict[TableName, str]:
    """Those of ``names`` (in ``source``, a server on this host) that cannot go to ``target`` as files, with why.
    Raises ServerError."""
    why = next(_servers_differ(source, target), "")
    return dict.fromkeys(names, why) if why else _unfit(source, names)


def _servers_differ(source: Session, target: Session) -> Iterator[str]:
    ours, theirs = (_variables(session) for session in (source, target))
    datadir = Path(theirs["datadir"])
    if not target.connection.socket:
        yield "the server is reached over the network: its data directory may be on another host"
    if ours["series"] != theirs["series"]:
        yield f"the backup is of {ours['series']}, the server {theirs['series']}"
    if ours["page"] != theirs["page"]:
        yield f"pages have {ours['page']} bytes in the backup, {theirs['page']} in the server"
    if theirs["log_bin"] == "1":
        yield "the server writes a binary log, which would not hold the rows: its replicas would not get them"
    is_here = datadir.is_dir()
    if is_here and target.server_uid not in (0, datadir.stat().st_uid):
        yield f"the server's data directory {datadir} belongs to another user than the server"
    if theirs["cluster"] == "ON":
        yield "the server is a node of a cluster, whose other nodes would not get the rows"
    ours_to_write = is_here and os.access(datadir, os.W_OK | os.X_OK) and os.geteuid() in (0, datadir.stat().st_uid)
    if not ours_to_write:
        yield f"the server's data directory {datadir} is not on this host, or backupd may not write to it"


def _variables(session: Session) -> dict[str, str]:
    page, log_bin, datadir = session.query("SELECT @@GLOBAL.innodb_page_size, @@GLOBAL.log_bin, @@GLOBAL.datadir")[0]
    dialect = read_dialect(session)
    return {
        "series": f"{dialect.flavour} {dialect.version.series}",
        "page": str(page),
        "log_bin": str(log_bin),
        "datadir": str(datadir),
        "cluster": session.variables("wsrep_on").get("wsrep_on", "").upper(),
    }


def _unfit(source: Session, names: Collection[TableName]) -> dict[TableName, str]:
    tables = {table.name: table for table in list_tables(source)}
    datadir = Path(str(source.scalar("SELECT @@GLOBAL.datadir")))
    fulltext = set(_names(source, _FULLTEXT))
    mariadb = read_dialect(source).flavour is Flavour.MARIADB
    numbered = set(_names(source, _NUMBERED)) if mariadb else set()
    files = files_of(datadir, names)
    found: dict[TableName, str] = {}
    for name in names:
        table = tables.get(name)
        if table is None:
            found[name] = "there is no such table in the copy"
        elif table.is_sequence or table.engine != "InnoDB":
            found[name] = f"engine {table.engine or 'unknown'}" if not table.is_sequence else "it is a sequence"
        elif name in fulltext:
            found[name] = "it has a full-text index, which is kept in separate files"
        elif name in numbered:
            found[name] = "its row history is versioned by transaction ids of the source server"
        elif not files.get(name):
            found[name] = "it is not in a file-per-table tablespace"
        elif any(file.suffix == _LINK for file in files[name]):
            found[name] = "its file is outside of the data directory (DATA DIRECTORY)"
    return found


def files_of(datadir: Path, names: Collection[TableName]) -> dict[TableName, tuple[Path, ...]]:
    """Tablespaces (and links to such) of ``names`` below ``datadir``."""
    schemas = {name.schema for name in names}
    found: dict[TableName, list[Path]] = {name: [] for name in names}
    for folder in sorted(datadir.iterdir()):
        if not folder.is_dir() or decode_file_name(folder.name) not in schemas:
            continue
        for file in sorted(folder.iterdir()):
            owner = owner_of(f"{folder.name}/{file.name}")
            if file.suffix in (_DATA, _LINK) and owner is not None and owner in found:
                found[owner].append(file)
    return {name: tuple(files) for name, files in found.items()}


@contextlib.contextmanager
def export_tables(session: Session, names: Sequence[TableName]) -> Iterator[tuple[ExportedTable, ...]]:
    """Have the server of ``session`` write everything of ``names`` into their files and leave these alone until the
    block ends. Nobody may write to them before. Raises ServerError."""
    datadir = Path(str(session.scalar("SELECT @@GLOBAL.datadir")))
    counts = {name: int(session.scalar(f"SELECT COUNT(*) FROM {name}")) for name in names}  # noqa: S608 - quoted
    checksums = {name: _checksum(session, name) for name in names}
    session.execute(f"FLUSH TABLES {', '.join(map(str, names))} FOR EXPORT")
    try:
        files = files_of(datadir, names)
        yield tuple(ExportedTable(name, files[name], counts[name], checksums[name]) for name in names)
    finally:
        session.execute("UNLOCK TABLES")


def _checksum(session: Session, name: TableName) -> str:
    return str(session.query(checksum_statement(session, name))[0][-1])


def import_tables(
    target: Connection, goals: Sequence[tuple[ExportedTable, TableName]], context: RunContext
) -> Imported:
    """Give every staged table (made empty, with all keys of its source and without foreign keys) the rows of its
    source. What cannot be imported, or has other rows afterwards, is dropped and named: its rows have to be loaded.
    Raises ServerError when the server goes away, CancelledError; the table at hand is dropped then, too."""
    rows: dict[TableName, int] = {}
    failed: dict[TableName, str] = {}
    done, total = 0, sum(source.size for source, _staged in goals)
    with target.connect() as session:
        session.execute(f"SET SESSION foreign_key_checks = 0, wait_timeout = {_PATIENCE}")
        mariadb = read_dialect(session).flavour is Flavour.MARIADB
        datadir = Path(str(session.scalar("SELECT @@GLOBAL.datadir")))
        for number, (source, staged) in enumerate(goals):
            context.report(Progress("import", done, total, number, len(goals), note=staged.shown))
            try:
                with _Files(datadir, context.cancel) as files:
                    _import(session, source, staged, files, mariadb=mariadb)
                    _refuse_other_rows(session, source, staged)  # MySQL ignores a partition that it does not know
            except (ServerError, OSError, CancelledError) as error:
                _drop(session, staged)
                if isinstance(error, CancelledError):
                    raise
                session.ping()
                failed[staged] = error.detail if isinstance(error, ServerError) else str(error)
                continue
            rows[staged] = source.rows
            done += source.size
    return Imported(rows, done, failed)


def _import(session: Session, source: ExportedTable, staged: TableName, files: _Files, *, mariadb: bool) -> None:
    parts = [_part(file) for file in source.files]
    if parts == [""]:
        _take_over(session, source.files, parts, staged, files, "TABLESPACE")
    elif not mariadb:
        _take_over(session, source.files, parts, staged, files, "PARTITION ALL TABLESPACE")
    else:
        spare = TableName(staged.schema, SPARE)
        for file, part in zip(source.files, parts, strict=True):
            session.execute(f"DROP TABLE IF EXISTS {spare}")
            session.execute(f"CREATE TABLE {spare} LIKE {staged}")
            session.execute(f"ALTER TABLE {spare} REMOVE PARTITIONING")
            _take_over(session, (file,), [""], spare, files, "TABLESPACE")
            partition = quote_name(decode_file_name(part.rpartition("#")[2]))
            session.execute(f"ALTER TABLE {staged} EXCHANGE PARTITION {partition} WITH TABLE {spare}")
            session.execute(f"DROP TABLE {spare}")


def _take_over(
    session: Session, sources: Sequence[Path], parts: Sequence[str], staged: TableName, files: _Files, what: str
) -> None:
    stem = files.stem(staged)
    session.execute(f"ALTER TABLE {staged} DISCARD {what}")
    for source, part in zip(sources, parts, strict=True):
        files.put(source, stem.with_name(stem.name + part))
    files.show()
    session.execute(f"ALTER TABLE {staged} IMPORT {what}")


def _part(file: Path) -> str:
    """``#P#old`` of ``orders#P#old.ibd``, "" of a table in one piece."""
    return file.stem.removeprefix(stem_of(f"schema/{file.name}").partition("/")[2])


def _refuse_other_rows(session: Session, source: ExportedTable, staged: TableName) -> None:
    """Raises OSError where what was imported is not what was exported: the file is to blame, whatever it was."""
    found = int(session.scalar(f"SELECT COUNT(*) FROM {staged}")), _checksum(session, staged)  # noqa: S608 - quoted
    if found != (source.rows, source.checksum):
        raise OSError(
            f"{found[0]} rows with checksum {found[1]} were imported, exported were {source.rows} rows with "
            f"checksum {source.checksum}"
        )


def _drop(session: Session, staged: TableName) -> None:
    """Raises ServerError."""
    session.execute(f"DROP TABLE IF EXISTS {TableName(staged.schema, SPARE)}")
    session.execute(f"DROP TABLE IF EXISTS {staged}")


class _Files:
    """Files put into the data directory of a running server; what the server has not made its own is removed."""

    def __init__(self, datadir: Path, cancel: Event) -> None:
        self._datadir, self._cancel = datadir, cancel
        self._put: list[Path] = []
        """By the names that they are imported under."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        with as_its_owner(self._datadir):
            for path in self._put:
                _waiting(path).unlink(missing_ok=True)
                if kind is not None or path.suffix == _NOTES:
                    path.unlink(missing_ok=True)

    def stem(self, table: TableName) -> Path:
        """Where the files of ``table`` lie, without suffix and partition. Raises FileNotFoundError."""
        for file in files_of(self._datadir, (table,))[table]:
            return file.with_name(stem_of(f"schema/{file.name}").partition("/")[2])
        raise FileNotFoundError(f"{table.shown} has no file in {self._datadir}: is it the server's data directory?")

    def put(self, source: Path, target: Path) -> None:
        """Copy a tablespace and its notes to where they wait to be ``target`` (without suffix). Raises OSError,
        CancelledError."""
        for suffix in (_NOTES, _DATA):
            file = source.with_suffix(suffix)
            goal = target.with_name(target.name + suffix)
            with FileIO(open_plain(file), "rb") as reader:
                with as_its_owner(self._datadir):  # whose folder it is may have it lead elsewhere
                    descriptor = os.open(
                        _waiting(goal), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660
                    )
                self._put.append(goal)
                with FileIO(descriptor, "wb") as copy:
                    os.fchmod(descriptor, 0o660)
                    self._copy(reader, copy)

    def show(self) -> None:
        """Give them the names that the server looks for, none of which may be there. Raises OSError."""
        with as_its_owner(self._datadir):
            for goal in self._put:
                if _waiting(goal).exists():
                    os.link(_waiting(goal), goal, follow_symlinks=False)
                    _waiting(goal).unlink()

    def _copy(self, reader: FileIO, writer: FileIO) -> None:
        """Holes stay holes."""
        size = os.fstat(reader.fileno()).st_size
        os.ftruncate(writer.fileno(), size)
        for begin, end in extents(reader.fileno(), os.fstat(reader.fileno())):
            position = writer.seek(begin)
            while position < end:
                if self._cancel.is_set():
                    raise CancelledError("the restore was cancelled while tables were imported")
                position += os.sendfile(writer.fileno(), reader.fileno(), position, min(_CHUNK, end - position))


def _waiting(goal: Path) -> Path:
    return goal.with_name(goal.name + WAITING)


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
        """InnoDB's numbers of ``names``; empty on MySQL, which would open every table to show them."""
        return frozenset(number for name in names for number in self._ids.of(name))

    def children(self, is_there: Callable[[TableName], bool]) -> tuple[TableName, ...]:
        """Tables that are not there, but reference one that is."""
        held = (child for child, parents in self._parents.items() if any(map(is_there, parents)))
        return tuple(sorted(child for child in held if not is_there(child)))


_TABLES = "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_TYPE NOT LIKE '%VIEW'"
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
        waiting = iter(sorted(names))
        while batch := list(itertools.islice(waiting, _AT_ONCE)):
            said += _dictionary_drop(session, batch)
    finally:
        session.execute("SET SESSION foreign_key_checks = 1")
    return tuple(said)


def _dictionary_drop(session: Session, names: Sequence[TableName]) -> list[str]:
    """Together, which is quicker; one by one where that fails."""
    try:
        session.execute(f"DROP TABLE {', '.join(map(str, names))}")
    except ServerError as error:
        if error_code(error) in _LOST:
            raise
        if len(names) == 1:
            return [f"{names[0].shown} is not in the copy, and the server could not drop it: {error.detail}"]
        return [line for name in names for line in _dictionary_drop(session, (name,))]
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
