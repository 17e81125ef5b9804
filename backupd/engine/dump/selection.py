"""Which tables a logical backup takes (those that a pattern wants and no rule leaves out, with the reason of each), and
which tool writes the rows of which table: the fastest that brings them back exactly.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backupd.engine.dump.contract import DumpRequest, DumpTable, DumpTool
from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.mydumper import mydumper_tool
from backupd.engine.schema.definition_text import Columns
from backupd.engine.sql.client import Connection
from backupd.engine.sql.dialect import Dialect
from backupd.engine.sql.tables import Table, list_tables
from backupd.engine.toolset import NO_PATHS
from backupd.model.errors import ToolError
from backupd.model.server_facts import ServerInfo
from backupd.model.table import TableName, TablePattern
from backupd.model.text import format_size

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

    @property
    def schemas(self) -> tuple[str, ...]:
        """Of the tables that are taken, each once, sorted."""
        return tuple(sorted({table.name.schema for table in self.taken}))


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
    everything = TablePattern("*.*")
    return [
        *(
            f"no table fits {pattern}, which is to be included"
            for pattern in include
            if pattern not in used and pattern != everything
        ),
        *(f"no table fits {pattern}, which is to be excluded" for pattern in exclude if pattern not in used),
    ]


def _leftover_words(names: Sequence[TableName]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(map(str, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return [f"left out, since they are what an interrupted or a running ALTER TABLE leaves: {shown}"]


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
    return tuple(_route(table, columns, tools) for table, columns in tables)


def try_out(tool: DumpTool, connection: Connection, folder: Path) -> None:
    """Let ``tool`` connect with all that it asks of its sessions and begin its snapshots, as a dump does, and write
    nothing: no table of the schema is asked for. ``folder``: empty. Raises ServerError, ToolError."""
    with connection.connect() as session:
        schemas = sorted(table.name.schema for table in list_tables(session) if not table.is_system)
    nothing = DumpTable(TableName(min(schemas, key=schemas.count, default="mysql"), _NO_TABLE), "InnoDB", 0)
    with tool.run(DumpRequest(connection, (nothing,), folder, threads=1)) as run:
        run.open(_TRY_SECONDS)


def _route(table: DumpTable, columns: Columns, tools: Sequence[DumpTool]) -> Route:
    reasons: list[str] = []
    for tool in tools:
        reason = tool.refuses(table, columns)
        if not reason:
            return Route(table, tool, "; ".join(reasons))
        reasons.append(reason)
    return Route(table, None, "; ".join(dict.fromkeys(reasons)))
