"""Files of INSERT statements, as every dump tool writes them: how many rows are in one, and is one of mydumper's whole?

mydumper's loop over ``write()`` begins a repeated write at the right place but with the length of the whole statement
(0.10.1 and 1.0 alike): after a write that was cut short by a full disk, when room is there again, it writes on with
what lies behind its buffer, and notices nothing. So each file is looked at: every line must be one that belongs there.
Strings hold no line end (it is written as ``\\n``), so lines can be counted without understanding them.

What stands before the first INSERT depends on its version and lacks settings without which some rows come back as
others (an id 0, dates that are none): it is for our own head to stand there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1024 * 1024
_ROW, _NEXT_ROW, _INSERT = b"\n(", b"\n,(", b"\nINSERT INTO `"
_STRANGE = re.compile(rb"\n(?!\(|,\(|INSERT INTO `|/\*|;|SET )")
_LONGEST = len(_INSERT)
_END = b";\n"
_CHARSET = re.compile(rb"\bSET NAMES '?(?P<charset>[0-9a-z]+)", re.IGNORECASE)


class RowMeter:
    """Counts the rows of one file as its bytes come by, in pieces of any size. 0.10.1 and our own files begin each row
    on a line of its own; later versions of mydumper begin the first row of a statement behind VALUES, each other one
    with a comma."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys((_ROW, _NEXT_ROW, _INSERT), 0)
        self._last = b"\n"  # so that the first line begins like the others

    def add(self, content: bytes) -> None:
        text = self._last + content
        for pattern in self._counts:  # what ends within ``content``; the rest was counted before
            self._counts[pattern] += text.count(pattern, max(0, len(self._last) - len(pattern) + 1))
        self._last = text[1 - _LONGEST :]

    @property
    def statements(self) -> int:
        return self._counts[_INSERT]

    @property
    def rows(self) -> int:
        first = self._counts[_ROW]
        return first + self._counts[_NEXT_ROW] + (0 if first else self._counts[_INSERT])


@dataclass(frozen=True, slots=True)
class Inspected:
    """``fault``: why it is not what mydumper writes, or empty. ``head``: bytes before the first INSERT; ``charset``: of
    the texts, as they say. Without any INSERT both are empty."""

    rows: int
    fault: str = ""
    head: int = 0
    charset: str = ""


def inspect(path: Path) -> Inspected:
    """Read the file once. Raises OSError."""
    meter = RowMeter()
    text = b"\n"  # so that the first line begins like the others
    strange = head = 0
    charset: str | None = None
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            if charset is None:
                head = max(0, block.find(_INSERT[1:]))
                match = _CHARSET.search(block, 0, head)
                charset = match["charset"].decode() if match else ""
            meter.add(block)
            text += block
            # What begins further back may go on in the next block. The last line end begins no line.
            limit = max(0, len(text) - _LONGEST) if block else len(text) - 1
            strange += sum(match.start() < limit for match in _STRANGE.finditer(text))
            if not block:
                break
            text = text[limit:]
    if not text.endswith(_END):
        return Inspected(0, "it does not end with a whole statement")
    if strange:
        return Inspected(0, f"{strange} of its lines are no part of an INSERT statement")
    if meter.statements and not charset:
        return Inspected(0, "it does not say which character set its texts are in")
    return Inspected(meter.rows, head=head, charset=charset or "")
