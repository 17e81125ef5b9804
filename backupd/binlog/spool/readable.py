"""How far a binary log that lies here can be read, and what a fresh copy of one is worth.

A file in the spool that is damaged is still good up to its last whole transaction before that. A copy that has just
come and is damaged shows nothing, neither of the server nor of the spool: it may have been altered on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from backupd.binlog.history.evidence import head_of
from backupd.engine.binlog.scan import Scan, scan
from backupd.model.binlog import Transaction
from backupd.model.errors import DamagedError, StreamError, ToolError


class DamagedCopyError(ToolError):
    """What came of a file is damaged; two such copies with the same bytes show that the server's file is."""

    def __init__(self, name: str, address: str, why: str) -> None:
        super().__init__(
            f"what came of {name} from {address} is damaged",
            detail=why,
            hint="it is fetched again; if that repeats itself, look at the network between both hosts",
        )


@dataclass(frozen=True, slots=True)
class Readable:
    """``end``: behind the last whole transaction (0: not even its head can be read); GTIDs and ``last_at`` are of what
    lies before it. ``size``: what was read, ``damage``: why nothing behind ``end`` can be, "" without any."""

    end: int
    size: int
    gtids_before: str
    gtids_after: str
    last_at: datetime | None
    damage: str = ""


def read(path: Path, on_transaction: Callable[[Transaction], None] | None = None) -> Readable:
    """Read a file to its end, or to where it is damaged. Raises OSError."""
    good = 0

    def take(transaction: Transaction) -> None:
        nonlocal good
        good = transaction.end
        if on_transaction is not None:
            on_transaction(transaction)

    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            return _readable(scan(file, stop=size, on_transaction=take), size)
    except StreamError as error:
        return Readable(0, size, "", "", None, error.message)
    except DamagedError as error:
        damage = "; ".join(error.damages)
    head = head_of(path)
    if not good and head is None:
        return Readable(0, size, "", "", None, damage)
    try:
        return _readable(scan_to(path, good or (head.size if head else 0)), size, damage)
    except (DamagedError, StreamError):
        return Readable(0, size, "", "", None, damage)


def read_fresh(path: Path, address: str) -> Scan:
    """Read a copy that has just come from ``address``. Raises DamagedCopyError, OSError."""
    try:
        with path.open("rb") as file:
            return scan(file)
    except (DamagedError, StreamError) as error:
        raise DamagedCopyError(path.name, address, str(error)) from error


def scan_to(path: Path, stop: int) -> Scan:
    """Raises DamagedError, StreamError, OSError."""
    with path.open("rb") as file:
        return scan(file, stop=stop)


def _readable(found: Scan, size: int, damage: str = "") -> Readable:
    return Readable(found.end, size, found.gtids_before, found.gtids_after, found.last_at, damage)
