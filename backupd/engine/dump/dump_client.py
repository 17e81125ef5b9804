"""The output of mysqldump or mariadb-dump, taken apart into the rows of each table while it comes.

mariadb-dump and mysqldump: the servers' own clients, where mydumper is missing.

One process, one session, one snapshot for all tables; what it prints is taken apart into files per table while it runs.
Measured with mariadb-dump 10.11.19 and mysqldump 9.7.4:

* only ``--databases`` with ``--ignore-table`` gives tables of several schemas from one snapshot. ``--ignore-table``
  splits its value at dots and knows no upper and lower case (MariaDB), so tables with a dot in their name are refused,
  and what differs from a wanted table in case alone is dumped and thrown away;
* one INSERT per row (``--skip-extended-insert``), because mysqldump prints all rows of a statement into one line; they
  are put together again here. Line ends in values are always escaped, so a line is a row;
* with ``--force`` a table that cannot be read does not end the dump: what went wrong stands on stderr, below the line
  that names the table (not the schema: a table of the same name in another schema shares the blame);
* ``sql_mode`` of its own header turns invalid dates into zeros on loading: the files get a header of ours;
* FLOAT is printed with six digits, and MySQL's double ``-0`` as an integer; the past of versioned tables and the state
  of sequences are left out; ENUM's value for errors looks like the member ``''``;
* ``sql_select_limit`` of the server would cut every table short: then nothing is dumped;
* mysqldump raises ``net_write_timeout`` itself, mariadb-dump cannot be told to. So a pause, or a slow destination,
  still takes a little now and then, before the server believes that nobody listens.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from backupd.engine.dump.contract import DumpedFile, DumpRequest, DumpTable
from backupd.engine.dump.insert_files import LONG, RowFiles, has_empty_member, settings
from backupd.engine.instance.client_files import handed_over
from backupd.engine.instance.sandbox import worker
from backupd.engine.schema.definition_text import Columns
from backupd.engine.sql.client import client_options, has_modes
from backupd.engine.sql.tables import list_tables
from backupd.engine.toolset import NO_PATHS, find_tool
from backupd.model.errors import BackupdError, CancelledError, ToolError
from backupd.model.server_facts import Flavour, Tool, Version
from backupd.model.table import TableName
from backupd.process.command import Command
from backupd.process.pipeline import Pipeline

_SCHEMA = re.compile(rb"-- Current Database: `((?:[^`]|``)+)`")
_TABLE = re.compile(rb"-- Dumping data for table `((?:[^`]|``)+)`")
_INSERT = re.compile(rb"(INSERT INTO `(?:[^`]|``)+` \((?:`(?:[^`]|``)+`(?:, )?)*\) VALUES) \(")
_END = b"-- Dump completed"
_ROW_END = b");"
_PIECE = 1024 * 1024


class Splitter:
    """``tables``: those that are wanted; rows of others are dropped. ``complete``: those all of whose rows were seen,
    as far as the output tells: something else came after them. ``trouble``: why the rows of a table could not be
    written. A context manager."""

    def __init__(self, tables: Iterable[TableName], folder: Path, chunk_bytes: int) -> None:
        self._wanted = {name: number for number, name in enumerate(tables)}
        self._folder, self._chunk = folder, chunk_bytes
        self._left: list[bytes] = []
        self._schema = ""
        self._table: TableName | None = None
        self._prefix = b""
        self._files: RowFiles | None = None
        self.complete: set[TableName] = set()
        self.trouble: dict[TableName, str] = {}

    def feed(self, block: bytes) -> Iterator[DumpedFile]:
        """Files that are complete with what this block of the output brings."""
        lines = block.split(b"\n")
        if len(lines) == 1:
            self._left.append(block)
            return
        lines[0] = b"".join((*self._left, lines[0]))
        self._left = [lines.pop()]
        for line in lines:
            yield from self._line(line)

    def finish(self) -> Iterator[DumpedFile]:
        """The output has ended well."""
        yield from self._line(b"".join(self._left))
        yield from self._end_table()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop_file()

    def _line(self, line: bytes) -> Iterator[DumpedFile]:
        if self._prefix and line.startswith(self._prefix):
            yield from self._row(line)
        elif line.startswith(b"-- "):
            yield from self._mark(line)
        elif self._table is not None and (match := _INSERT.match(line)):
            self._prefix = match[0]
            self._begin(match[1])
            yield from self._row(line)

    def _mark(self, line: bytes) -> Iterator[DumpedFile]:
        if match := _SCHEMA.fullmatch(line):
            yield from self._end_table()
            self._schema = _plain(match[1])
        elif match := _TABLE.fullmatch(line):
            yield from self._end_table()
            self._table = TableName(self._schema, _plain(match[1]))
        elif line.startswith(_END):
            yield from self._end_table()

    def _begin(self, insert: bytes) -> None:
        number = self._wanted.get(self._table) if self._table is not None else None
        if self._table is not None and number is not None:
            self._files = RowFiles(
                self._table, f"{self._folder}/{number:06d}", self._chunk, head=settings("utf8mb4"), insert=insert
            )

    def _row(self, line: bytes) -> Iterator[DumpedFile]:
        if self._files is None or self._table is None:
            return
        if not line.endswith(_ROW_END):
            self.trouble.setdefault(self._table, "its last row is not complete")
            return
        start, end = len(self._prefix), len(line) - len(_ROW_END)
        try:
            done = (
                self._files.add(line[start:end])
                if end < LONG
                else self._files.add_long(line[at : min(at + _PIECE, end)] for at in range(start, end, _PIECE))
            )
        except OSError as error:
            self._give_up(self._table, error)
        else:
            if done is not None:
                yield done

    def _end_table(self) -> Iterator[DumpedFile]:
        table, self._table, self._prefix = self._table, None, b""
        if table is None or table not in self._wanted:
            return
        if self._files is not None:
            try:
                done = self._files.finish()
            except OSError as error:
                self._give_up(table, error)
            else:
                self._files = None
                if done is not None:
                    yield done
        self.complete.add(table)

    def _give_up(self, table: TableName, error: OSError) -> None:
        """Its other rows are dropped."""
        self.trouble[table] = f"its file cannot be written: {error}"
        self._drop_file()

    def _drop_file(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            with contextlib.suppress(OSError):  # the disk is full: that was said when writing to it
                files.drop()


def _plain(quoted: bytes) -> str:
    return quoted.decode("utf-8", "surrogateescape").replace("``", "`")


PROGRAMS: Mapping[Flavour, tuple[str, ...]] = {
    Flavour.MARIADB: ("mariadb-dump", "mysqldump"),
    Flavour.MYSQL: ("mysqldump",),
    Flavour.PERCONA: ("mysqldump",),
}
_OPTIONS = (
    "--single-transaction",
    "--no-create-info",
    "--no-create-db",
    "--skip-triggers",
    "--skip-opt",
    "--quick",
    "--skip-extended-insert",
    "--complete-insert",
    "--hex-blob",
    "--tz-utc",
    "--force",
    "--comments",
    "--verbose",
    "--no-tablespaces",
    "--default-character-set=utf8mb4",
    "--max-allowed-packet=1G",
)
_HINTS = {
    flavour: f"install the client programs of {flavour}, or name the program: `programs: "
    f"{{{names[0]}: /path/to/{names[0]}}}`"
    for flavour, names in PROGRAMS.items()
}

_NAME = re.compile(r"[^\x00-\x1f\x7f.]+")
_COLUMN_NAME = re.compile(r"[^\x00-\x1f\x7f]+")
_MADE_KEY = "my_row_id"
"""What MySQL calls a primary key that it makes by itself; clients before 9 cannot be told to ask for it."""
_NO_LIMIT = 2**64 - 1
_BLOCK = 1024 * 1024
_TICK = 0.05
_SIP_SECONDS = 10.0
"""How long the tool waits for us at most: less than any sane net_write_timeout (by default 60 s)."""
_AHEAD = 4
"""Complete files that may wait for whoever takes them."""

_BEGUN = re.compile(r"-- (?:Setting savepoint|Retrieving table structure for table )")
_BEGINS_TABLE = re.compile(r"-- Retrieving table structure for table (?P<name>.*)\.\.\.")
_BLAMED = re.compile(r"when dumping table [`'](?P<name>.+)[`']")
_WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)


class ClientDump:
    """The dump program of ``flavour``."""

    def __init__(self, tool: Tool, flavour: Flavour) -> None:
        self._tool = tool
        self._flavour = flavour

    @property
    def tool(self) -> Tool:
        """The client program, as it is installed."""
        return self._tool

    def refuses(self, table: DumpTable, columns: Columns) -> str:
        """See DumpTool."""
        return next(self._objections(table, columns), "")

    def run(self, request: DumpRequest) -> ClientDumpRun:
        """See DumpTool."""
        return ClientDumpRun(self._tool, request)

    def _objections(self, table: DumpTable, columns: Columns) -> Iterator[str]:
        name = self._tool.name
        if not (_NAME.fullmatch(table.name.schema) and _NAME.fullmatch(table.name.table)):
            yield f"{name} cannot be told its name"
        if not columns.all:
            yield "it is not a table of columns"
        if columns.versioned:
            yield f"{name} writes no history of rows"
        for column in columns.all:
            if column.kind == "float":
                yield f"{name} rounds its column {column.name} of type float"
            if column.kind == "double" and self._flavour is not Flavour.MARIADB:
                yield f"{name} loses the sign of a negative zero in its column {column.name} of type double"
            if column.kind == "enum" and has_empty_member(column.type):
                yield f"{name} takes a failed value of its column {column.name} for the member ''"
            if column.invisible and column.name == _MADE_KEY:
                yield f"{name} loses its column {column.name} where the server hides the keys that it made"
            if not _COLUMN_NAME.fullmatch(column.name):
                yield f"{name} prints the name of one of its columns over several lines"


def client_dump_tool(flavour: Flavour, *, paths: Mapping[str, str] = NO_PATHS) -> ClientDump:
    """The client of ``flavour`` that dumps, as it is installed. ``paths``: as of toolset. Raises ToolMissingError, or
    ToolError when the program of that name is another flavour's."""
    tool = find_tool(PROGRAMS[flavour], paths=paths, hint=_HINTS[flavour])
    if ("mariadb" in tool.version_text.lower()) != (flavour is Flavour.MARIADB):
        raise ToolError(
            f"{tool.path} cannot dump tables of a {flavour} server", detail=tool.version_text, hint=_HINTS[flavour]
        )
    return ClientDump(tool, flavour)


class ClientDumpRun:
    """See DumpRun."""

    def __init__(self, tool: Tool, request: DumpRequest) -> None:
        self._tool, self._request = tool, request
        self._resources = contextlib.ExitStack()
        self._splitter = Splitter([table.name for table in request.tables], request.folder, request.chunk_bytes)
        self._pipeline: Pipeline | None = None
        self._reader: threading.Thread | None = None
        self._done: queue.SimpleQueue[DumpedFile | None] = queue.SimpleQueue()
        self._begun = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._stopped = threading.Event()
        self._current: str | None = None
        self._blamed: dict[str, str] = {}
        self._failure: BaseException | None = None

    def open(self, seconds: float) -> None:
        """Wait until the program says that its snapshot has begun."""
        pipeline = self._pipeline
        if pipeline is None:
            raise ValueError("the run was not entered")
        self._resources.enter_context(pipeline)
        self._reader = threading.Thread(target=self._read, args=(pipeline,), name="dump", daemon=True)
        self._reader.start()
        deadline = time.monotonic() + seconds
        while not self._begun.wait(_TICK / 5):
            self._check_cancelled()
            if not self._reader.is_alive() and not self._begun.is_set():  # it sets that before it ends
                raise self._failure or ToolError(
                    f"{self._tool.name} ended before it began", detail=pipeline.stderr_tail(self._program)
                )
            if time.monotonic() > deadline:
                raise ToolError(
                    f"{self._tool.name} had no snapshot after {seconds:g} s",
                    detail=pipeline.stderr_tail(self._program),
                    hint="the server is busy, or something holds a lock: SHOW PROCESSLIST tells",
                )

    def files(self) -> Iterator[DumpedFile]:
        """What the splitter has completed."""
        while True:
            self._check_cancelled()
            try:
                file = self._done.get(timeout=_TICK)
            except queue.Empty:
                continue
            if file is None:
                break
            yield file
        if self._failure is not None and not isinstance(self._failure, ToolError | OSError):
            raise self._failure

    def verdicts(self) -> Mapping[TableName, str | None]:
        """By the program's own messages, and by what its output held."""
        return {table.name: self._verdict(table.name) for table in self._request.tables}

    def pause(self) -> None:
        """Take no more of its output, but a little every ten seconds."""
        self._going.clear()

    def resume(self) -> None:
        """Take its output again."""
        self._going.set()

    def __enter__(self) -> Self:
        try:
            # Relative to nothing: the tool reads only this file, and gets the password in no other way.
            handed = self._resources.enter_context(
                handed_over(self._request.connection, worker(), partial(client_options, modes=has_modes(self._tool)))
            )
            command = handed.confined(
                Command((self._tool.path, f"--defaults-file={handed.options}", *self._arguments()), user=worker())
            )
            self._pipeline = Pipeline([command], log=self._request.log, on_stderr=self._hear)
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        try:
            if self._reader is not None and self._pipeline is not None:
                self._pipeline.kill()
                self._reader.join()
        finally:
            self._resources.close()

    @property
    def _program(self) -> str:
        return Command((self._tool.path,)).program

    def _arguments(self) -> Iterable[str]:
        wanted = {table.name for table in self._request.tables}
        folded = {_folded(name) for name in wanted}
        schemas = sorted({name.schema for name in wanted})
        with self._request.connection.connect() as session:
            limit = int(session.scalar("SELECT @@GLOBAL.sql_select_limit"))
            there = [table.name for table in list_tables(session) if table.name.schema in schemas]
        if limit != _NO_LIMIT:
            raise ToolError(
                f"{self._tool.name} would write no more than {limit} rows of each table",
                detail=f"sql_select_limit of the server is {limit}",
                hint="SET GLOBAL sql_select_limit = DEFAULT there, or install mydumper here",
            )
        yield from _OPTIONS
        if "mariadb" not in self._tool.version_text.lower():
            yield "--set-gtid-purged=OFF"
            if self._tool.version >= Version(8, 0):
                yield "--column-statistics=0"
        for name in there:
            if name not in wanted and _folded(name) not in folded:
                yield f"--ignore-table={name.schema}.{name.table}"
        yield "--databases"
        yield "--"
        yield from schemas

    def _verdict(self, name: TableName) -> str | None:
        if reason := self._blamed.get(name.table):
            return reason
        if (trouble := self._splitter.trouble.get(name)) is not None:
            return trouble
        if name in self._splitter.complete:
            return None
        why = ""
        if self._failure is not None:
            told = self._failure
            why = f": {told.line}" if isinstance(told, BackupdError) else f": {told}"
        return f"{self._tool.name} did not write all of it{why}"

    def _check_cancelled(self) -> None:
        if self._request.cancel is not None and self._request.cancel.is_set():
            raise CancelledError(f"{self._tool.name} was stopped on request")

    # -- in the threads

    def _hear(self, line: str) -> None:
        if _BEGUN.match(line):
            self._begun.set()
        if match := _BEGINS_TABLE.fullmatch(line):
            self._current = match["name"]
        elif not line.startswith("-- ") and line.strip() and not _WARNING.search(line):
            match = _BLAMED.search(line)
            name = match["name"] if match else self._current
            if name is not None:
                self._blamed.setdefault(name, line.strip())
        if self._request.on_stderr is not None:
            self._request.on_stderr(line)

    def _read(self, pipeline: Pipeline) -> None:
        try:
            with self._splitter as splitter:
                for block in pipeline.chunks(_BLOCK):
                    for file in splitter.feed(bytes(block)):
                        self._done.put(file)
                    self._sip()
                for file in splitter.finish():
                    self._done.put(file)
        except BaseException as error:  # noqa: BLE001  not hidden: files() raises it, or the verdicts tell it
            self._failure = error
        finally:
            self._done.put(None)

    def _sip(self) -> None:
        """Wait while there is a pause, or while enough files wait; not so long that the server gives up."""
        until = time.monotonic() + _SIP_SECONDS
        while (
            not self._stopped.is_set()
            and time.monotonic() < until
            and (not self._going.is_set() or self._done.qsize() > _AHEAD)
        ):
            time.sleep(_TICK)


def _folded(name: TableName) -> tuple[str, str]:
    return name.schema.casefold(), name.table.casefold()
