"""Pieces of binary logs that a larger segment has made superfluous, and taking them away.

Whoever stored the larger one does that. A sweep does not: whether a piece is what the larger one says of the same bytes
cannot be told from what is stored without a private key. So where whoever stores may not remove, and where a piece is
not what its file says, it stays until retention lets the logs go.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from backupd.model.binlog import SegmentKey
from backupd.model.errors import LockedError
from backupd.transfer.guards.lease import is_alive
from backupd.transfer.guards.pin import pins
from backupd.transfer.logs import segments
from storage.contract.destination import Destination


def replaced_pieces(target: Destination, server: str, key: SegmentKey) -> tuple[SegmentKey, ...]:
    """The pieces at ``target`` that segment ``key``, which is there, holds."""
    return tuple(other for other in segments.of_file(target, server, key.branch, key.number) if _holds(key, other))


def holding(target: Destination, server: str, key: SegmentKey) -> tuple[SegmentKey, ...]:
    """The larger segments at ``target`` that hold what ``key`` did, smallest first: a plan that was made before its
    pieces were replaced finds the same bytes there. Whoever stored them has compared both."""
    found = (other for other in segments.of_file(target, server, key.branch, key.number) if _holds(other, key))
    return tuple(sorted(found, key=lambda other: (other.end - other.start, other)))


def drop_pieces(
    target: Destination, server: str, keys: Sequence[SegmentKey], *, now: datetime
) -> tuple[SegmentKey, ...]:
    """Remove pieces; those that are gone. None while a restore reads logs of the server there, and not those that the
    destination lets nobody remove yet: nothing else waits for these."""
    if any(
        is_alive(pin, now) and (pin.owner is None or any(owner == server for owner, _id in pin.backups))
        for pin in pins(target)
    ):
        return ()
    gone: list[SegmentKey] = []
    # A piece that begins with its file may be locked, the others never are: see ``layout.comes_and_goes``.
    for key in sorted(keys, key=lambda one: one.start == 0):
        try:
            segments.remove(target, server, key)
        except LockedError:
            break
        gone.append(key)
    return tuple(gone)


def _holds(key: SegmentKey, other: SegmentKey) -> bool:
    return other != key and key.start <= other.start and other.end <= key.end
