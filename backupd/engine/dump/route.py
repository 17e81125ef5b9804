"""Which tool writes the rows of which table: the fastest that brings them back exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backupd.engine.dump.contract import DumpRequest, DumpTable, DumpTool
from backupd.engine.dump.dump_client import client_dump_tool
from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.tool import mydumper_tool
from backupd.engine.schema.definition_text import Columns
from backupd.engine.sql.client import Connection
from backupd.engine.sql.dialect import Dialect
from backupd.engine.sql.tables import list_tables
from backupd.engine.toolset import NO_PATHS
from backupd.model.errors import ToolError
from backupd.model.server_facts import ServerInfo
from backupd.model.table import TableName

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
    """The tools for tables of ``server``, fastest first, and why faster ones are not among them: mydumper, the
    server's own client where that is missing, and always our own reader. ``paths``: as of toolset."""
    missing: list[str] = []
    tools: list[DumpTool] = []
    for find in (partial(mydumper_tool, version=server.version), client_dump_tool):
        try:
            tools.append(find(server.flavour, paths=paths))
        except ToolError as error:
            missing.append(": ".join(filter(None, (error.message, error.detail))))
        else:
            break
    return (*tools, ExactDump()), tuple(missing)


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
