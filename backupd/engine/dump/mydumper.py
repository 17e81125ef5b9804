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
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from backupd.engine.dump.contract import DumpRequest, DumpTable
from backupd.engine.dump.insert_files import has_empty_member
from backupd.engine.dump.mydumper_run import Manner, MyDumperRun
from backupd.engine.schema.definition_text import Column, Columns
from backupd.engine.sql.client import Connection, ssl_mode
from backupd.engine.toolset import NO_PATHS, find_tool
from backupd.model.errors import ToolError
from backupd.model.server_facts import Flavour, Tool, Version

NAME = "mydumper"
_HINT = "apt-get install mydumper, or name the program: `programs: {mydumper: /path/to/mydumper}`"
_STATEMENT_BYTES = 1_000_000
"""Less than the smallest default of max_allowed_packet, 1 MiB."""

_OLD_LOCKS = ("--no-locks", "--trx-consistency-only")
_NEW_LOCKS = ("--sync-thread-lock-mode=NO_LOCK", "--trx-tables")
"""Both mean: take no lock, the caller has it; all sessions begin a snapshot, and say so."""


@dataclass(frozen=True, slots=True)
class Line:
    """Versions from ``first`` up to and without ``end``. ``verbose``: the level that names each table."""

    first: Version
    end: Version
    locks: tuple[str, ...]
    verbose: int
    manner: Manner


LINES = (
    Line(Version(0, 10), Version(0, 11), _OLD_LOCKS, 3, Manner(whole=True)),
    Line(Version(0, 16), Version(0, 18, 1), _OLD_LOCKS, 4, Manner(whole=False)),
    Line(Version(0, 18, 1), Version(2, 0), _NEW_LOCKS, 4, Manner(whole=False)),
)
_NAME = re.compile(r"[^\x00-\x1f\x7f./\\`'\"%]+")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+")
"""Later versions give other names a number in place of their name."""
_NAME_BYTES = 230
"""Of both names; a file name may have 255, and a number and ``.sql`` come behind."""
_COLUMN_NAME = re.compile(r"[^\x00-\x1f\x7f`]+")
_COMPUTED_DEFAULT = re.compile(r"\bDEFAULT\s+(?:CURRENT_TIMESTAMP|LOCALTIME|NOW|\()", re.IGNORECASE)
_AS_TEXT = frozenset({"inet4", "inet6", "uuid"})
_CHOICES = frozenset({"enum", "set"})
_LEFT_OUT = frozenset({"mrg_myisam"})
_LIMITS_STATEMENTS = Version(5, 7, 8)
"""MySQL has max_execution_time from here on."""
_LOADS_BINARY_JSON = Version(8, 0)


class MyDumper:
    """mydumper for servers of ``flavour`` and ``version`` (8.0: or later). Its own version must be one of ``LINES``:
    ``mydumper_tool`` sees to that."""

    def __init__(self, tool: Tool, flavour: Flavour, version: Version = _LOADS_BINARY_JSON) -> None:
        self._tool = tool
        self._flavour, self._version = flavour, version
        self._line = _line(tool)

    @property
    def tool(self) -> Tool:
        """mydumper, as it is installed."""
        return self._tool

    @property
    def manner(self) -> Manner:
        """How this version works."""
        return self._line.manner

    def refuses(self, table: DumpTable, columns: Columns) -> str:
        """The first of what the head of this module lists that concerns the table."""
        return next(self._objections(table, columns), "")

    def run(self, request: DumpRequest) -> MyDumperRun:
        """With the options of this version for these tables."""
        return MyDumperRun(
            self._tool,
            lambda connection: self.arguments(replace(request, connection=connection)),
            self.settings(),
            self._line.manner,
            request,
        )

    def _objections(self, table: DumpTable, columns: Columns) -> Iterator[str]:
        halves = (table.name.schema, table.name.table)
        if not all(_NAME.fullmatch(half) for half in halves):
            yield "mydumper cannot handle its name"
        if not self._line.manner.whole and not all(_PLAIN_NAME.fullmatch(half) for half in halves):
            yield "mydumper does not name its file after it"
        if len("".join(halves).encode()) > _NAME_BYTES:
            yield "its name is too long for mydumper's files"
        if not table.engine or table.engine.lower() in _LEFT_OUT:
            yield f"mydumper leaves out tables of engine {table.engine or 'unknown'}"
        if not columns.all:
            yield "it is not a table of columns"
        if columns.versioned:
            yield "mydumper writes no history of rows"
        for column in columns.all:
            yield from self._objections_to(column)

    def _objections_to(self, column: Column) -> Iterator[str]:
        if column.invisible:
            yield f"mydumper loses its invisible column {column.name}"
        if column.kind == "float":
            yield f"mydumper rounds its column {column.name} of type float"
        if column.kind == "double" and self._flavour is not Flavour.MARIADB:
            yield f"what mydumper writes of its column {column.name} of type double loses the sign of a negative zero"
        if column.kind == "json" and self._flavour is not Flavour.MARIADB and self._version < _LOADS_BINARY_JSON:
            yield (
                f"what mydumper writes of its column {column.name} of type json cannot be loaded: its files are "
                f"declared as binary, which {self._flavour} {self._version.series} does not take for JSON"
            )
        if column.kind in _AS_TEXT:
            yield f"what mydumper writes of its column {column.name} of type {column.kind} cannot be loaded"
        if column.kind in _CHOICES and has_empty_member(column.type):
            yield f"what mydumper writes of its column {column.name} does not distinguish the member '' from no value"
        if not _COLUMN_NAME.fullmatch(column.name):
            yield "mydumper cannot handle the name of one of its columns"
        if self._line.manner.whole and self._flavour is not Flavour.MARIADB and _COMPUTED_DEFAULT.search(column.rest):
            yield f"mydumper {self._tool.version.series} loses its column {column.name}, whose default is computed"

    def arguments(self, request: DumpRequest) -> tuple[str, ...]:
        """All but the option file, the folder and the list of what to leave out."""
        arguments = [
            "--no-schemas",
            "--no-views",
            *self._line.locks,
            f"--verbose={self._line.verbose}",
            f"--threads={max(request.threads, 2 if not self._line.manner.whole else 1)}",
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
        if self._line.manner.whole:
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
