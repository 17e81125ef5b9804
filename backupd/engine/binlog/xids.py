"""Xid events of a node's binary log: their number is the seqno of the transaction, the same one on every node.

Of rows only: a DDL statement has a seqno, too, but no Xid event, and the ``xid=`` that programs print of its event is a
number of its own server. Whole events are read and their checksums compared, so a number is one that was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.binlog import events
from backupd.engine.binlog.events import Frames, damaged, read_format
from backupd.engine.binlog.scan import scan
from backupd.model.binlog import Change, Transaction

_SIZE = 8


@dataclass(frozen=True, slots=True)
class Xid:
    """``end``: the byte behind its event, where its transaction ends."""

    number: int
    end: int


def xids(path: Path, *, since: int = 0) -> Iterator[Xid]:
    """Those of a binary log's events from byte ``since`` on, in their order. Raises DamagedError and StreamError as
    ``scan`` does."""
    with path.open("rb") as stream:
        first = read_format(stream)
        frames = Frames(stream, first.end, checksums=first.checksums)
        for kind, _when, _server, start, end, data, body, stop in frames.events():
            if kind != events.XID or start < since:
                continue
            if stop - body != _SIZE:
                raise damaged(start, f"an Xid event has {stop - body} bytes")
            yield Xid(int.from_bytes(data[body:stop], "little"), end)


@dataclass(frozen=True, slots=True)
class SharedXid:
    """The last transaction of rows of one node's log, which the log of another node has, too: ``number``. It is in
    ``ours`` and in ``theirs``, a copy of the other's file ``name``, and ends in them at the bytes ``ends``. ``agrees``:
    is it the same one there, and are those before it the same, as far as both files go?"""

    number: int
    ours: Path
    name: str
    theirs: Path
    ends: tuple[int, int]
    agrees: bool


def shared_xid(files: Iterable[Path], logs: Iterable[str], fetch: Callable[[str], Path]) -> SharedXid | None:
    """``files``: of the one, and ``logs``: names of those of the other, newest first. None where the last transaction
    of rows is in none of these. ``fetch``: copies one. Raises OSError, DamagedError, StreamError, and what ``fetch``
    raises."""
    ours, here = next(((path, found) for path in files if (found := list(xids(path)))), (None, []))
    if ours is None:
        return None
    last = here[-1]
    for name in logs:
        theirs = fetch(name)
        there = list(xids(theirs))
        if entry := next((one for one in there if one.number == last.number), None):
            agrees = _numbers(here, there, last) == _numbers(there, here, entry) and _content(
                ours, last.end
            ) == _content(theirs, entry.end)
            return SharedXid(last.number, ours, name, theirs, (last.end, entry.end), agrees)
        if there and there[0].number < last.number:
            break  # it would be in this one
    return None


def _numbers(ours: Sequence[Xid], others: Sequence[Xid], until: Xid) -> list[int]:
    """Up to the byte at which ``until`` ends, from where both begin. A number of a session with wsrep_on=OFF is one of
    its own server, and may be the same as another node's by chance."""
    first = max(ours[0].number, others[0].number)
    return [one.number for one in ours if one.end <= until.end and one.number >= first]


def _content(path: Path, end: int) -> tuple[int, tuple[Change, ...]]:
    """Of which server the transaction is that ends at byte ``end``, and what it changes."""
    last: Transaction | None = None

    def take(one: Transaction) -> None:
        nonlocal last
        last = one

    with path.open("rb") as stream:
        scan(stream, stop=end, on_transaction=take)
    return (last.server_id, last.changes) if last is not None else (0, ())
