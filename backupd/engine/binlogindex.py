"""The index of a segment: one line of JSON that names the format, then one line for each transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from backupd.model.binlog import INDEX_FORMAT, Transaction
from backupd.model.errors import DamagedError

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def index_head() -> bytes:
    return (_encode({"format": INDEX_FORMAT}) + "\n").encode()


def index_line(transaction: Transaction) -> bytes:
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
    return DamagedError("the index of a binary log cannot be read", [f"line {number}: {why}"],
                        hint="the logs themselves may be whole: backupd fsck tells; they can be replayed without it")
