"""Files of rows as they lie in a logical backup, cut into statements without a parser for values.

Every tool writes a newline in a value as ``\\n``, so outside of names ``;`` and a newline end a statement; names stand
in the statement's head, which is understood. Each statement must be one that puts rows into this one table, or a
setting of the session: whatever else a file holds does not reach the server.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import BinaryIO

from backupd.model.errors import StreamError
from backupd.model.table import quote_name

_PIECE = 1024 * 1024
_LONGEST_HEAD = 8 * 1024 * 1024
_SKIPPED = re.compile(rb"(?:\s+|--[^\n]*(?:\n|\Z)|/\*(?:[^!M]|M!999999)[^*]*\*/\s*;?)+")
_NAME = rb"`(?:[^`]|``)*+`"
_HEAD = re.compile(rb"INSERT (?:IGNORE )?INTO (?P<table>%b)\s*(?:\((?:\s*%b\s*,?)*+\)\s*)?VALUES?\b" % (_NAME, _NAME))
_SETTING = re.compile(rb"(?:/\*M?!\d*\s*)?SET\s(?!.*\b(?:GLOBAL|PERSIST|PASSWORD)\b)", re.IGNORECASE | re.DOTALL)
_SEQUENCE = re.compile(rb"(?:SELECT|DO) SETVAL\((?P<table>%b)" % _NAME, re.IGNORECASE)


class Kind(Enum):
    ROWS = auto()
    SETTING = auto()


@dataclass(frozen=True, slots=True)
class Statement:
    """``text`` is valid until the next one is asked for. ``end``: bytes of the file up to and with this one;
    ``digest``: SHA-256 of all of them."""

    kind: Kind
    text: memoryview
    end: int
    digest: str


def statements(file: BinaryIO, table: str) -> Iterator[Statement]:
    """All statements of a file of ``table``, one in memory at a time. Raises StreamError for anything unexpected."""
    reader = _Reader(file, quote_name(table).encode("utf-8", "surrogateescape"))
    while reader.begin():
        yield from reader.statement()


class _Reader:
    def __init__(self, file: BinaryIO, quoted: bytes) -> None:
        self._file, self._quoted = file, quoted
        self._buffer = bytearray()
        self._offset = 0
        self._hash = hashlib.sha256()
        self._ended = False

    def begin(self) -> bool:
        """Pass over what is between statements; False at the end of the file."""
        while True:
            while len(self._buffer) < _PIECE and not self._ended:
                self._fill()
            skipped = _SKIPPED.match(self._buffer)
            if skipped is None:
                return bool(self._buffer)
            self._consume(skipped.end())

    def statement(self) -> Iterator[Statement]:
        kind, searched = self._judge()
        while (found := self._buffer.find(b";\n", max(0, searched))) < 0:
            if self._ended:
                if not self._buffer.endswith(b";"):
                    raise self._wrong("ends within a statement")
                found = len(self._buffer) - 1
                break
            searched = max(searched, len(self._buffer) - 1)
            self._fill()
        with memoryview(self._buffer) as whole, whole[: found + 1] as taken, whole[:found] as text:
            self._hash.update(taken)
            yield Statement(kind, text, self._offset + found + 1, self._hash.hexdigest())
        self._offset += found + 1
        del self._buffer[: found + 1]

    def _judge(self) -> tuple[Kind, int]:
        """What the statement does, and where its names are over."""
        while True:
            match = _HEAD.match(self._buffer) or _SEQUENCE.match(self._buffer)
            if match is not None:
                if match["table"] != self._quoted:
                    raise self._wrong("holds rows of another table")
                return Kind.ROWS, match.end()
            end = -1 if self._buffer.startswith(b"INSERT") else self._buffer.find(b";\n")
            if end >= 0 or self._ended or len(self._buffer) > _LONGEST_HEAD:
                if _SETTING.match(self._buffer, 0, end if end >= 0 else len(self._buffer)):
                    return Kind.SETTING, 0
                raise self._wrong("holds a statement that is no INSERT into its table")
            self._fill()

    def _fill(self) -> None:
        piece = self._file.read(_PIECE)
        self._ended = not piece
        self._buffer += piece

    def _consume(self, size: int) -> None:
        self._hash.update(memoryview(self._buffer)[:size])
        self._offset += size
        del self._buffer[:size]

    def _wrong(self, what: str) -> StreamError:
        return StreamError(
            f"a file of rows {what}, at byte {self._offset}",
            hint="restore from another copy or another backup; `backupd verify` looks at all of them",
        )
