"""mydumper: which versions are called, with which options, and which tables it would not bring back exactly.

Only rows are its business (``--no-schemas``): its scripts of routines and events cannot be loaded, and definitions are
written by us. Measured with 0.10.1 (which calls itself 0.10.0) against MariaDB 10.11.19 and MySQL 9.7.4:

* on MySQL 8 and later it leaves out **columns whose default is computed** (``DEFAULT CURRENT_TIMESTAMP``), because it
  takes ``DEFAULT_GENERATED`` for a generated column; nothing is said, and loading fills them with the time of loading;
* ``SELECT *`` loses invisible columns; FLOAT is printed with six digits, a negative zero of MySQL's DOUBLE as ``-0``,
  which is the integer 0; INET4, INET6 and UUID come as text in a file that declares itself binary, so that MariaDB
  refuses to load them; an ENUM or SET with the member '' and one without a value look the same;
* ``sql_select_limit`` of the server cuts tables short, sql_mode NO_BACKSLASH_ESCAPES breaks its quoting, and only its
  first connection gets a long ``net_write_timeout``: all of them get settings of ours by ``init-command``;
* ``--rows`` makes chunks until the memory is used up where all keys are negative, and trusts the limits that another
  session saw; so files are cut by size (``--chunk-filesize``), each table by one thread;
* ``--tables-list`` takes names as patterns (for ``a_b`` beside ``axb`` two threads write ``a_b`` into one file) and did
  not come to an end; ``--regex`` ignores case and is limited in size; ``--omit-from-file`` alone is exact. So it gets
  the list of all that is *not* wanted;
* it builds statements from names without quoting: an apostrophe or a dot in a name goes wrong, or ends it;
* a table whose comment is ``VIEW`` is left out, as are all of engine MRG_MyISAM.

Which tables a logical backup takes (those that a pattern wants and no rule leaves out, with the reason of each), and
which tool writes the rows of which table: the fastest that brings them back exactly.

Tables of a server on which nobody writes, into a folder in the layout of a logical backup.

For private copies: a table out of a physical backup, or one that was rolled forward. No lock is taken, the tools run
one after the other, and what a faster one could not do is done once more by our own reader.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.insert_files import (
    CHOICES,
    CONVERTED,
    DumpedFile,
    DumpRequest,
    DumpTable,
    DumpTool,
    has_empty_member,
)
from backupd.engine.dump.mydumper_run import MyDumperRun
from backupd.engine.server.definition_text import Column, Columns
from backupd.engine.server.definitions import TableDefinition, read_tables, write_definition, write_triggers
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Connection, Session, ssl_mode
from backupd.engine.sql.dialect import Dialect
from backupd.engine.sql.tables import Table, list_tables
from backupd.engine.toolset import NO_PATHS, find_tool
from backupd.model.errors import ToolError
from backupd.model.job import Progress, Report
from backupd.model.server_facts import Flavour, ServerInfo, Tool, Version
from backupd.model.table import DumpedTable, Outcome, TableName, TablePattern, data_path, definition_path, triggers_path
from backupd.model.text import few, format_size
from backupd.process.run_context import RunContext

NAME = "mydumper"
_HINT = "apt-get install mydumper, or name the program: `programs: {mydumper: /path/to/mydumper}`"
_STATEMENT_BYTES = 1_000_000
"""Less than the smallest default of max_allowed_packet, 1 MiB."""

_OLD_LOCKS = ("--no-locks", "--trx-consistency-only")
_NEW_LOCKS = ("--sync-thread-lock-mode=NO_LOCK", "--trx-tables")
"""Both mean: take no lock, the caller has it; all sessions begin a snapshot, and say so."""


@dataclass(frozen=True, slots=True)
class Line:
    """Versions from ``first`` up to and without ``end``. ``verbose``: the level that names each table; ``whole``:
    is each table read by one thread in one go?"""

    first: Version
    end: Version
    locks: tuple[str, ...]
    verbose: int
    whole: bool


LINES = (
    Line(Version(0, 10), Version(0, 11), _OLD_LOCKS, 3, whole=True),
    Line(Version(0, 16), Version(0, 18, 1), _OLD_LOCKS, 4, whole=False),
    Line(Version(0, 18, 1), Version(2, 0), _NEW_LOCKS, 4, whole=False),
)
_NAME = re.compile(r"[^\x00-\x1f\x7f./\\`'\"%]+")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+")
"""Later versions give other names a number in place of their name."""
_NAME_BYTES = 230
"""Of both names; a file name may have 255, and a number and ``.sql`` come behind."""
_COLUMN_NAME = re.compile(r"[^\x00-\x1f\x7f`]+")
_COMPUTED_DEFAULT = re.compile(r"\bDEFAULT\s+(?:CURRENT_TIMESTAMP|LOCALTIME|NOW|\()", re.IGNORECASE)
_LEFT_OUT = frozenset({"mrg_myisam"})
_LIMITS_STATEMENTS = Version(5, 7, 8)
"""MySQL has max_execution_time from here on."""
_LOADS_BINARY_JSON = Version(8, 0)


class MyDumper:
    """mydumper for servers of ``flavour`` and ``version`` (8.0: or later). Its own version must be one of ``LINES``:
    ``mydumper_tool`` sees to that."""

    def __init__(self, tool: Tool, flavour: Flavour, version: Version = _LOADS_BINARY_JSON) -> None:
        self.tool = tool
        self._flavour, self._version = flavour, version
        self._line = _line(tool)

    def refuses(self, table: DumpTable, columns: Columns) -> str:
        """The first of what the head of this module lists that concerns the table."""
        return next(self._objections(table, columns), "")

    def run(self, request: DumpRequest) -> MyDumperRun:
        """With the options of this version for these tables."""
        return MyDumperRun(
            self.tool,
            lambda connection: self.arguments(replace(request, connection=connection)),
            self.settings(),
            request,
            whole=self._line.whole,
        )

    def _objections(self, table: DumpTable, columns: Columns) -> Iterator[str]:
        halves = (table.name.schema, table.name.table)
        if not all(_NAME.fullmatch(half) for half in halves):
            yield "mydumper cannot handle its name"
        if not self._line.whole and not all(_PLAIN_NAME.fullmatch(half) for half in halves):
            yield "mydumper does not name its file after it"
        if len("".join(halves).encode()) > _NAME_BYTES:
            yield "its name is too long for mydumper's files"
        if not table.engine or table.engine.lower() in _LEFT_OUT:
            yield f"mydumper leaves out tables of engine {table.engine or 'unknown'}"
        if not columns.all:
            yield "it has no columns"
        if columns.versioned:
            yield "mydumper does not write the row history of system-versioned tables"
        for column in columns.all:
            yield from self._objections_to(column)

    def _objections_to(self, column: Column) -> Iterator[str]:
        if column.invisible:
            yield f"mydumper loses its invisible column {column.name}"
        if column.kind == "float":
            yield f"mydumper rounds its column {column.name} of type float"
        if column.kind == "double" and self._flavour is not Flavour.MARIADB:
            yield f"mydumper loses the sign of a negative zero in its column {column.name} of type double"
        if column.kind == "json" and self._flavour is not Flavour.MARIADB and self._version < _LOADS_BINARY_JSON:
            yield (
                f"the output of mydumper for its column {column.name} of type json cannot be loaded: it is declared as "
                f"binary, which {self._flavour} {self._version.series} does not accept for JSON"
            )
        if column.kind in CONVERTED:
            yield f"the output of mydumper for its column {column.name} of type {column.kind} cannot be loaded"
        if column.kind in CHOICES and has_empty_member(column.type):
            yield f"mydumper does not distinguish the member '' of its column {column.name} from no value"
        if not _COLUMN_NAME.fullmatch(column.name):
            yield "mydumper cannot handle the name of one of its columns"
        if self._line.whole and self._flavour is not Flavour.MARIADB and _COMPUTED_DEFAULT.search(column.rest):
            yield f"mydumper {self.tool.version.series} loses its column {column.name}, whose default is computed"

    def arguments(self, request: DumpRequest) -> tuple[str, ...]:
        """All but the option file, the folder and the list of what to leave out."""
        arguments = [
            "--no-schemas",
            "--no-views",
            *self._line.locks,
            f"--verbose={self._line.verbose}",
            f"--threads={max(request.threads, 2 if not self._line.whole else 1)}",
            f"--chunk-filesize={max(1, request.chunk_bytes // _STATEMENT_BYTES)}",
            f"--statement-size={_STATEMENT_BYTES}",
        ]
        schemas = {table.name.schema for table in request.tables}
        if len(schemas) == 1:
            arguments.append(f"--database={schemas.pop()}")
        return (*arguments, *self._tls(request.connection))

    def _tls(self, connection: Connection) -> tuple[str, ...]:
        mode = ssl_mode(connection)
        if connection.socket or not mode:
            return ()
        files = tuple(
            f"--{name}={connection.ssl[name]}"
            for name in ("ca", "cert", "key", "capath", "cipher")
            if connection.ssl.get(name)
        )
        if self._line.whole:
            return ("--ssl", *files) if mode != "DISABLED" else ()
        return (f"--ssl-mode={mode}", *files)

    def settings(self) -> Mapping[str, str]:
        """Of every session. A pause, or a slow destination, may last for hours."""
        settings = {
            "sql_mode": "''",
            "sql_select_limit": "18446744073709551615",
            "sql_big_selects": "1",
            "net_write_timeout": "2147483",
            "net_read_timeout": "2147483",
            "wait_timeout": "2147483",
            "lock_wait_timeout": "60",
        }
        if self._flavour is Flavour.MARIADB:
            return settings | {
                "max_statement_time": "0",
                "idle_transaction_timeout": "0",
                "idle_readonly_transaction_timeout": "0",
            }
        return settings | {"max_execution_time": "0"} if self._version >= _LIMITS_STATEMENTS else settings


def mydumper_tool(
    flavour: Flavour, version: Version = _LOADS_BINARY_JSON, *, paths: Mapping[str, str] = NO_PATHS
) -> MyDumper:
    """mydumper as it is installed, for servers of ``flavour`` and ``version``. ``paths``: as of toolset. Raises
    ToolMissingError, or ToolError for a mydumper that is not known here."""
    return MyDumper(find_tool((NAME,), paths=paths, hint=_HINT, asked=("--version",)), flavour, version)


def _line(tool: Tool) -> Line:
    for line in LINES:
        if line.first <= tool.version < line.end:
            return line
    known = ", ".join(f"{line.first} to before {line.end}" for line in LINES)
    raise ToolError(
        f"mydumper {tool.version} is not supported by this version",
        detail=f"{tool.path}: {tool.version_text}; supported: {known}",
        hint=_HINT,
    )


_LEFTOVER = "#mysql50##sql"
"""How a server lists a file that no statement named so."""
_BARE: Mapping[str, str] = {
    "BLACKHOLE": "keeps no rows",
    "PERFORMANCE_SCHEMA": "keeps no rows",
    "MRG_MYISAM": "shows the rows of other tables",
    "FEDERATED": "shows rows of another server",
    "SPIDER": "shows rows of other servers",
    "CONNECT": "shows rows of other sources",
    "SPHINX": "shows results of another server",
}
"""Engines, in upper case, without rows of their own."""


@dataclass(frozen=True, slots=True)
class Selection:
    """``taken``, by name; of those in ``bare`` the definition alone, for that reason. ``skipped``: wanted by a pattern,
    left out by a rule, with the reason. ``warnings``: for people: a pattern that fits nothing, a leftover."""

    taken: tuple[Table, ...]
    skipped: tuple[tuple[TableName, str], ...] = ()
    bare: Mapping[TableName, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes, as the engines estimate them."""
        return sum(table.size for table in self.taken)


def select(
    tables: Iterable[Table],
    include: Sequence[TablePattern],
    exclude: Sequence[TablePattern] = (),
    max_size: int | None = None,
    *,
    always: Container[str] = (),
    unasked: bool = False,
) -> Selection:
    """``max_size``: a table of more bytes is left out, unless its engine is one of ``always``: those that no other
    backup covers. ``unasked``: tables of these engines are taken where no pattern wants them, too, unless one leaves
    them out. System schemas are never taken."""
    present = [table for table in tables if not table.is_system]
    used: set[TablePattern] = set()
    taken: list[Table] = []
    skipped: list[tuple[TableName, str]] = []
    leftovers: list[TableName] = []
    for table in sorted(present, key=lambda one: one.name):
        if table.name.table.startswith(_LEFTOVER) and not any(one.table == table.name for one in include):
            leftovers.append(table.name)
            continue
        wanted, unwanted = (
            [pattern for pattern in patterns if pattern.fits(table.name)] for patterns in (include, exclude)
        )
        used.update(wanted, unwanted)
        if unwanted or not (wanted or (unasked and table.engine in always)):
            continue
        if max_size is not None and table.size > max_size and table.engine not in always:
            reason = f"larger than max_size: about {format_size(table.size)}, {format_size(max_size)} allowed"
            skipped.append((table.name, reason))
        else:
            taken.append(table)
    return Selection(
        tuple(taken),
        tuple(skipped),
        {
            table.name: f"its engine, {table.engine}, {_BARE[table.engine.upper()]}"
            for table in taken
            if table.engine.upper() in _BARE
        },
        (*_unused(include, exclude, used), *_leftover_words(leftovers)),
    )


def _unused(include: Sequence[TablePattern], exclude: Sequence[TablePattern], used: set[TablePattern]) -> list[str]:
    known = {*used, TablePattern("*.*")}
    return [
        *(f"no table matches {pattern} of the tables to include" for pattern in include if pattern not in known),
        *(f"no table matches {pattern} of the tables to exclude" for pattern in exclude if pattern not in used),
    ]


def _leftover_words(names: Sequence[TableName]) -> list[str]:
    if not names:
        return []
    return [f"left out as temporary tables of a running or interrupted ALTER TABLE: {few(names, 10)}"]


_NO_TABLE = "backupd check: no table has this name"
_TRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Route:
    """``tool``: None when nothing can bring the table back exactly. ``reason``: why not a faster one, or why none."""

    table: DumpTable
    tool: DumpTool | None
    reason: str = ""


def dump_tools(
    server: ServerInfo | Dialect, *, paths: Mapping[str, str] = NO_PATHS
) -> tuple[tuple[DumpTool, ...], tuple[str, ...]]:
    """The tools for tables of ``server``, fastest first: mydumper where it can be used, and always our own reader; and
    why mydumper is not among them. The servers' own clients are not used: the reader is as fast, and exact (measured:
    docs/decisions/house.md). ``paths``: as of toolset."""
    try:
        return (mydumper_tool(server.flavour, server.version, paths=paths), ExactDump()), ()
    except ToolError as error:
        return (ExactDump(),), (": ".join(filter(None, (error.message, error.detail))),)


def route(tables: Iterable[tuple[DumpTable, Columns]], tools: Sequence[DumpTool]) -> tuple[Route, ...]:
    """A tool for each table, in their order; of the ``tools`` the first that does not refuse it."""
    routes = []
    for table, columns in tables:
        reasons = list(takewhile(bool, (tool.refuses(table, columns) for tool in tools)))
        tool = tools[len(reasons)] if len(reasons) < len(tools) else None
        routes.append(Route(table, tool, "; ".join(dict.fromkeys(reasons))))
    return tuple(routes)


def try_out(tool: DumpTool, connection: Connection, folder: Path) -> None:
    """Let ``tool`` connect with all that it asks of its sessions and begin its snapshots, as a dump does, and write
    nothing: no table of the schema is asked for. ``folder``: empty. Raises ServerError, ToolError."""
    with connection.connect() as session:
        schemas = sorted(table.name.schema for table in list_tables(session) if not table.is_system)
    nothing = DumpTable(TableName(min(schemas, key=schemas.count, default="mysql"), _NO_TABLE), "InnoDB", 0)
    with tool.run(DumpRequest(connection, (nothing,), folder, threads=1)) as run:
        run.open(_TRY_SECONDS)


_OPEN_SECONDS = 60.0
_LITTLE = 16 * 1024 * 1024
"""Bytes of tables for which no program is started: our own reader is done before one has begun."""
_GONE = "there is no such table"


def dump_quiet(
    connection: Connection,
    tables: Sequence[TableName],
    folder: Path,
    context: RunContext,
) -> tuple[DumpedTable, ...]:
    """Definitions, triggers and rows of ``tables`` into ``folder``, and what became of each, in their order. One that
    cannot be read stops nothing and leaves no rows. ``rows``: what the server counts, the past of versioned tables
    included. Raises ServerError when the server went away, CancelledError,
    OSError."""
    with connection.connect() as session:
        reading = _Reading(session, tables, folder, context.report)
        tools, _ = dump_tools(read_dialect(session), paths=context.programs)
        if reading.size < _LITTLE:
            tools = tools[-1:]
        reading.define()
        for choice in dict.fromkeys((tools, tools[-1:])):
            for tool, group in reading.shares(choice):
                with tempfile.TemporaryDirectory(prefix=".rows-", dir=folder) as private:
                    request = DumpRequest(connection, group, Path(private), context.workers or 2, cancel=context.cancel)
                    reading.read(tool, request)
        return tuple(reading.outcome(name) for name in tables)


def write_files(folder: Path, definition: TableDefinition) -> None:
    """The files of a table but its rows. Raises OSError."""
    path = folder / definition_path(definition.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write_definition(definition))
    if triggers := write_triggers(definition):
        (folder / triggers_path(definition.name)).write_bytes(triggers)


@dataclass(slots=True)
class _Taken:
    """What became of one table so far. ``reason``: why its rows are not there, or empty."""

    table: Table
    definition: TableDefinition | None = None
    tool: str = ""
    reason: str = "it was not read"
    files: int = 0
    bytes: int = 0
    rows: int | None = 0


class _Reading:
    def __init__(self, session: Session, names: Sequence[TableName], folder: Path, report: Report) -> None:
        self._session, self._folder, self._report = session, folder, report
        wanted = set(names)
        self._taken = {table.name: _Taken(table) for table in list_tables(session) if table.name in wanted}
        self._done = 0

    @property
    def size(self) -> int:
        return sum(taken.table.size for taken in self._taken.values())

    def define(self) -> None:
        """Write what the tables are."""
        found = read_tables(self._session, self._taken)
        for name, taken in self._taken.items():
            taken.definition = found.tables.get(name)
            if taken.definition is None:
                taken.reason = found.failed[name]
                continue
            write_files(self._folder, taken.definition)

    def shares(self, tools: Sequence[DumpTool]) -> Sequence[tuple[DumpTool, tuple[DumpTable, ...]]]:
        """The tables that are still to be read, by the tool that is to read them."""
        left = [
            (DumpTable(taken.table.name, taken.table.engine, taken.table.size), taken.definition.columns)
            for taken in self._taken.values()
            if taken.reason and taken.definition is not None
        ]
        routes = route(left, tools)
        for way in routes:
            if way.tool is None:
                self._taken[way.table.name].reason = way.reason
        shares = ((tool, tuple(way.table for way in routes if way.tool is tool)) for tool in tools)
        return [(tool, tables) for tool, tables in shares if tables]

    def read(self, tool: DumpTool, request: DumpRequest) -> None:
        verdicts: Mapping[TableName, str | None] = {}
        trouble = f"{tool.tool.name} said nothing of it"
        try:
            with tool.run(request) as run:
                run.open(_OPEN_SECONDS)
                for file in run.files():
                    self._keep(file)
                verdicts = run.verdicts()
        except ToolError as error:
            trouble = ": ".join(filter(None, (error.message, error.detail)))
        for table in request.tables:
            taken = self._taken[table.name]
            taken.tool = tool.tool.name
            taken.reason = verdicts.get(table.name, trouble) or ""
            if taken.reason:
                self._drop(taken)

    def outcome(self, name: TableName) -> DumpedTable:
        taken = self._taken.get(name)
        if taken is None:
            return DumpedTable(name, Outcome.FAILED, reason=_GONE)
        counted = self._counted(taken) if not taken.reason else None
        if not taken.reason and taken.rows not in (None, counted):
            taken.reason = f"the server counts {counted} rows, {taken.tool} wrote {taken.rows}"
            self._drop(taken)
        return DumpedTable(
            name,
            Outcome.FAILED if taken.reason else Outcome.DUMPED,
            taken.table.engine,
            None if taken.reason else counted,
            taken.bytes,
            taken.files,
            taken.tool,
            taken.reason,
        )

    def _counted(self, taken: _Taken) -> int:
        versioned = taken.definition is not None and taken.definition.columns.versioned
        source = f"{taken.table.name}{' FOR SYSTEM_TIME ALL' if versioned else ''}"
        return int(self._session.scalar(f"SELECT COUNT(*) FROM {source}"))  # noqa: S608  a quoted name

    def _keep(self, file: DumpedFile) -> None:
        taken = self._taken[file.table]
        path = self._folder / data_path(file.table, taken.files)
        if file.head:
            with path.open("xb") as target:
                target.writelines(file.blocks())
            file.path.unlink()
        else:
            file.path.rename(path)
        taken.files += 1
        taken.bytes += file.size
        taken.rows = None if taken.rows is None or file.rows is None else taken.rows + file.rows
        self._done += file.size
        self._report(Progress("read", bytes_done=self._done, note=file.table.shown))

    def _drop(self, taken: _Taken) -> None:
        """Rows that are not all of them are worse than none."""
        for number in range(taken.files):
            (self._folder / data_path(taken.table.name, number)).unlink()
        self._done -= taken.bytes
        taken.files = taken.bytes = taken.rows = 0
