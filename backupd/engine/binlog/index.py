"""The index of a segment: which transactions are in it, and where.

It is one line of JSON that names the format, then one line for each transaction. It is stored in parts, each of which
begins with such a line. That of the last part also has the digest of the clear description that belongs to it, since
version 2 of that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from backupd.model.binlog import INDEX_FORMAT, Transaction
from backupd.model.errors import DamagedError

STATEMENT_SIZE = 1024
"""Characters that an index keeps of statements; of those that define tables ``changes.DEFINITION_SIZE``."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def index_head(segment: str = "") -> bytes:
    """``segment``: the digest of the segment's description."""
    return (_encode({"format": INDEX_FORMAT, **({"segment": segment} if segment else {})}) + "\n").encode()


def segment_told(index: bytes) -> str:
    """What the first line of a part tells of the segment's description; "" where it tells nothing. Raises
    DamagedError."""
    try:
        return str(json.loads(index[: index.find(b"\n") + 1]).get("segment", ""))
    except (ValueError, AttributeError) as error:
        raise _broken(1, str(error)) from None


def index_line(transaction: Transaction) -> bytes:
    """One line of JSON that ends with a line end."""
    return (_encode(transaction.as_json()) + "\n").encode("utf-8", "surrogatepass")


def decode_index(lines: Iterable[bytes]) -> Iterator[Transaction]:
    """Raises DamagedError for another format and for lines that are not what they should be."""
    for number, line in enumerate(lines, 1):
        try:
            document = json.loads(line)
            if number == 1:
                if document["format"] != INDEX_FORMAT:
                    raise _broken(number, f"format {document['format']!r}, not {INDEX_FORMAT!r}")
                continue
            transaction = Transaction.from_json(document)
        except (ValueError, KeyError, TypeError) as error:
            raise _broken(number, f"{type(error).__name__}: {error}") from None
        yield transaction


def _broken(number: int, why: str) -> DamagedError:
    return DamagedError(
        "the index of a binary log cannot be read",
        [f"line {number}: {why}"],
        hint="the binary logs may be intact and can be replayed without the index: check them with `backupd fsck`",
    )
