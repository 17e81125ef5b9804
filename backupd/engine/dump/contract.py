"""What every program that writes rows of tables into files has in common: what it is asked, what it answers.

One run writes the rows of many tables, as INSERT statements without the schema, into a folder. Entering it prepares
what needs no lock. ``open`` is called while the caller blocks commits: when it returns, every session of the tool has
its snapshot, and all of them are the same one. Then ``files`` gives each file away as soon as it is complete, so that
no more than the files under way lie on the disk. ``verdicts`` says of each table whether all of its rows were written.
Definitions, triggers, views and routines are no business of these tools.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from backupd.engine.schema.definition_text import Columns
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Tool
from backupd.model.table import TableName

_BLOCK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DumpTable:
    """A table to dump. ``size``: bytes, as the server estimates them."""

    name: TableName
    engine: str
    size: int


@dataclass(frozen=True, slots=True)
class DumpRequest:
    """``folder``: empty, private to this run, on the spool's disk. ``threads``: sessions that read at the same time;
    ``chunk_bytes``: the rows of larger tables go into several files of about this size. ``log``: a file for what the
    tool prints; ``on_stderr`` is called with each line, from a thread. ``cancel``: when set, the run raises
    CancelledError."""

    connection: Connection
    tables: tuple[DumpTable, ...]
    folder: Path
    threads: int = 4
    chunk_bytes: int = 64 * 1024 * 1024
    log: Path | None = None
    cancel: threading.Event | None = None
    on_stderr: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class DumpedFile:
    """One complete file: nobody writes it any more. Whoever gets it removes it. ``rows``: in this file, None where they
    were not counted. ``head``: what stands in the place of the first ``skip`` bytes of it; ``size`` is that of
    ``blocks``."""

    table: TableName
    path: Path
    size: int
    rows: int | None = None
    head: bytes = b""
    skip: int = 0

    def blocks(self) -> Iterator[bytes]:
        """Its content. Raises OSError."""
        with self.path.open("rb") as source:
            source.seek(self.skip)
            if self.head:
                yield self.head
            while content := source.read(_BLOCK):
                yield content


class DumpRun(Protocol):
    """One run. A context manager: leaving it, at any moment, leaves no process and no connection."""

    def open(self, seconds: float) -> None:
        """Start; returns when every session has its snapshot. The caller keeps commits blocked meanwhile. Raises
        ToolError when that takes longer than ``seconds`` or the tool fails, ServerError, CancelledError."""

    def files(self) -> Iterator[DumpedFile]:
        """Every file as it becomes complete, in any order; ends when the tool has ended. Raises ToolError only where
        nothing can be said any more of single tables; ServerError, CancelledError."""

    def verdicts(self) -> Mapping[TableName, str | None]:
        """After ``files``: of every table of the request, None when all of its rows were written, else why not."""

    def pause(self) -> None:
        """Stop reading until ``resume``; from any thread. Connections and snapshots stay."""

    def resume(self) -> None:
        """Read on after ``pause``; from any thread."""

    def __enter__(self) -> Self:
        """Prepare; nothing runs yet. Raises ServerError, ToolError."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class DumpTool(Protocol):
    """A program (or our own reader) that can dump tables."""

    @property
    def tool(self) -> Tool:
        """The program and its version, as backups name it."""

    def refuses(self, table: DumpTable, columns: Columns) -> str:
        """Why this tool would not bring the table back exactly; empty when it does."""

    def run(self, request: DumpRequest) -> DumpRun:
        """Nothing is started yet."""
