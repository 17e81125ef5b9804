"""The output of mysqldump or mariadb-dump, taken apart into the rows of each table while it comes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from backupd.engine.dump.contract import DumpedFile
from backupd.engine.dump.insert_files import LONG, RowFiles, settings
from backupd.model.table import TableName

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
