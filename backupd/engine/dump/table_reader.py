"""Tables of a server on which nobody writes, into a folder in the layout of a logical backup.

For private copies: a table out of a physical backup, or one that was rolled forward. No lock is taken, the tools run
one after the other, and what a faster one could not do is done once more by our own reader.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from backupd.engine.dump.contract import DumpedFile, DumpRequest, DumpTable, DumpTool
from backupd.engine.dump.selection import dump_tools, route
from backupd.engine.schema.definitions import TableDefinition, read_tables, write_definition, write_triggers
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.tables import Table, list_tables
from backupd.engine.toolset import NO_PATHS
from backupd.model.errors import ToolError
from backupd.model.job import Progress, Report, silent
from backupd.model.table import DumpedTable, Outcome, TableName, data_path, definition_path, triggers_path

_OPEN_SECONDS = 60.0
_LITTLE = 16 * 1024 * 1024
"""Bytes of tables for which no program is started: our own reader is done before one has begun."""
_GONE = "there is no such table"


def dump_quiet(
    connection: Connection,
    tables: Sequence[TableName],
    folder: Path,
    *,
    threads: int = 2,
    programs: Mapping[str, str] = NO_PATHS,
    report: Report = silent,
    cancel: Event | None = None,
) -> tuple[DumpedTable, ...]:
    """Definitions, triggers and rows of ``tables`` into ``folder``, and what became of each, in their order. One that
    cannot be read stops nothing and leaves no rows. ``rows``: what the server counts, the past of versioned tables
    included. ``programs``: paths, as of toolset. Raises ServerError when the server went away, CancelledError,
    OSError."""
    with connection.connect() as session:
        reading = _Reading(session, tables, folder, report)
        tools, _ = dump_tools(read_dialect(session), paths=programs)
        if reading.size < _LITTLE:
            tools = tools[-1:]
        reading.define()
        for choice in dict.fromkeys((tools, tools[-1:])):
            for tool, group in reading.shares(choice):
                with tempfile.TemporaryDirectory(prefix=".rows-", dir=folder) as private:
                    request = DumpRequest(connection, group, Path(private), threads, cancel=cancel)
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
        place = self._folder / data_path(file.table, taken.files)
        if file.head:
            with place.open("xb") as target:
                target.writelines(file.blocks())
            file.path.unlink()
        else:
            file.path.rename(place)
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
