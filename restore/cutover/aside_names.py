"""Names beside a table's own, for the table that it replaces or for itself on its way."""

from __future__ import annotations

from collections.abc import Callable

from backupd.model.errors import UsageError
from backupd.model.table import TableName

_LONGEST = 64
"""Characters of an identifier."""
_RESERVED = len("_chk_123")
"""MySQL names checks without a name after their table, and refuses a rename after which such a name is too long."""
_LONGEST_FILE = 230
"""Bytes of a file name without what the server appends to it (``#P#`` and partitions not counted)."""
_ENCODED = 5
"""Bytes that a letter of no plain kind takes in a file name."""


def beside(name: TableName, suffix: str, taken: Callable[[TableName], bool]) -> TableName:
    """``orders`` and ``__before_7`` make ``orders__before_7``; shortened where that is too long, numbered where it is
    ``taken``. Raises UsageError for a suffix that leaves no room or may not stand in a name."""
    if not suffix or len(suffix) > 40 or not suffix.isascii() or not suffix.replace("_", "").isalnum():
        raise UsageError(
            f"{suffix!r} cannot be appended to names of tables", hint="up to 40 ASCII letters, digits and _ can"
        )
    number = 1
    while True:
        tail = suffix if number == 1 else f"{suffix}_{number}"
        found = TableName(name.schema, _shortened(name.table, tail) + tail)
        if not taken(found):
            return found
        number += 1


def _shortened(stem: str, tail: str) -> str:
    stem = stem[: _LONGEST - _RESERVED - len(tail)]
    while len(stem) > 1 and _file_length(stem) + len(tail) > _LONGEST_FILE:
        stem = stem[:-1]
    return stem


def _file_length(text: str) -> int:
    return sum(1 if letter.isascii() and (letter.isalnum() or letter == "_") else _ENCODED for letter in text)
