"""Xid events of a node's binary log: their number is the seqno of the transaction, the same one on every node.

Of rows only: a DDL statement has a seqno, too, but no Xid event, and the ``xid=`` that programs print of its event is a
number of its own server. Whole events are read and their checksums compared, so a number is one that was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.binlog import events
from backupd.engine.binlog.events import Frames, damaged, read_format

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
