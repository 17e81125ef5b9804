"""A look at a file of INSERT statements as mydumper writes them: is it whole, and how many rows are in it?

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
    counts = dict.fromkeys((_ROW, _NEXT_ROW, _INSERT), 0)
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
            text += block
            # What begins further back may go on in the next block. The last line end begins no line.
            limit = max(0, len(text) - _LONGEST) if block else len(text) - 1
            for pattern in counts:
                counts[pattern] += text.count(pattern, 0, limit + len(pattern) - 1)
            strange += sum(match.start() < limit for match in _STRANGE.finditer(text))
            if not block:
                break
            text = text[limit:]
    if not text.endswith(_END):
        return Inspected(0, "it does not end with a whole statement")
    if strange:
        return Inspected(0, f"{strange} of its lines are no part of an INSERT statement")
    if counts[_INSERT] and not charset:
        return Inspected(0, "it does not say which character set its texts are in")
    # 0.10.1 begins each row on a line of its own, later versions the first one of a statement behind VALUES.
    rows = counts[_ROW] + counts[_NEXT_ROW] + (0 if counts[_ROW] else counts[_INSERT])
    return Inspected(rows, head=head, charset=charset or "")
