"""Rows of one table, written as INSERT statements into files of bounded size, each row on a line of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from backupd.engine.dump.contract import DumpedFile
from backupd.model.table import TableName

LONG = 1_000_000
"""Bytes after which a statement ends; a longer row has one of its own. Less than any server's max_allowed_packet."""


class RowFiles:
    """``head``: the beginning of each file; ``insert``: of each statement, up to VALUES; ``path``: the folder and the
    beginning of the files' names. A context manager: left with an error, it removes the file that is not complete.
    Raises OSError where a file cannot be written.

    What takes rows returns the file that is complete with them, if one is.
    """

    def __init__(self, table: TableName, path: str, chunk_bytes: int, *, head: bytes, insert: bytes) -> None:
        self._table, self._path, self._chunk = table, path, chunk_bytes
        self._head, self._insert = head, insert + b"\n("
        self._rows: list[bytes] = []
        self._size = 0
        self._file: BinaryIO | None = None
        self._number = self._count = 0

    def add(self, row: bytes) -> DumpedFile | None:
        """A row's literals, without parentheses."""
        self._rows.append(row)
        self._size += len(row)
        return self._filled() if self._size >= LONG else None

    def add_long(self, pieces: Iterable[bytes]) -> DumpedFile | None:
        """The same, in pieces."""
        self._flush()
        file = self._opened()
        file.write(self._insert)
        for piece in pieces:
            file.write(piece)
        file.write(b");\n")
        self._count += 1
        return self._filled()

    def finish(self) -> DumpedFile | None:
        """Complete the file; None when there is nothing in it."""
        self._flush()
        file, self._file = self._file, None
        if file is None:
            return None
        size = file.tell()
        file.close()
        rows, self._count = self._count, 0
        self._number += 1
        return DumpedFile(self._table, Path(file.name), size, rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def drop(self) -> None:
        """Remove the file that is not complete."""
        file, self._file = self._file, None
        if file is not None:
            path = Path(file.name)
            try:
                file.close()
            finally:
                path.unlink(missing_ok=True)

    def _filled(self) -> DumpedFile | None:
        self._flush()
        return self.finish() if self._opened().tell() >= self._chunk else None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = Path(f"{self._path}-{self._number:05d}.sql").open("xb")  # noqa: SIM115  closed by finish
            self._file.write(self._head)
        return self._file

    def _flush(self) -> None:
        if self._rows:
            file = self._opened()
            file.write(self._insert)
            file.write(b"),\n(".join(self._rows))
            file.write(b");\n")
            self._count += len(self._rows)
            self._rows.clear()
            self._size = 0
