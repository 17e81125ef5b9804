"""Pieces of binary logs that a larger segment has made superfluous, and taking them away."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import groupby

from backupd.model.binlog import SegmentKey
from backupd.model.errors import ArchivedError, DamagedError, LockedError, NotFoundError, ObjectMissingError
from backupd.transfer import segments
from backupd.transfer.lease import is_alive
from backupd.transfer.pin import pins
from storage import layout
from storage.destination import Destination

FORGOTTEN = timedelta(days=7)
"""Who streams takes its pieces away by itself. Where it may not, or has found them to be somebody else's, they are
still there so long after the whole file was stored."""


def replaced_pieces(target: Destination, server: str, key: SegmentKey) -> tuple[SegmentKey, ...]:
    """The pieces at ``target`` that segment ``key``, which is there, holds."""
    return tuple(other for other in segments.of_file(target, server, key.branch, key.number) if _holds(key, other))


def drop_pieces(target: Destination, server: str, keys: Sequence[SegmentKey], *, now: datetime
                ) -> tuple[SegmentKey, ...]:
    """Remove pieces; those that are gone. None while a restore reads logs of the server there, and not those that the
    destination lets nobody remove yet: nothing else waits for these."""
    if any(is_alive(pin, now) and (pin.owner is None or any(owner == server for owner, _id in pin.backups))
           for pin in pins(target)):
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


def clear_forgotten(target: Destination, *, now: datetime) -> list[SegmentKey]:
    """Remove the pieces that were left beside their whole file for ``FORGOTTEN``; gives them."""
    found: list[tuple[str, SegmentKey, list[SegmentKey]]] = []
    for (server, _branch, _number), listed in groupby(
            segments.keys(target), key=lambda one: (one[0], one[1].branch, one[1].number)):
        of_file = [key for _server, key in listed]
        whole = max(of_file, key=lambda one: (one.start == 0, one.end))
        if left := [key for key in of_file if _holds(whole, key)]:
            found.append((server, whole, left))
    return [key for server, whole, left in found if _stands(target, server, whole, now - FORGOTTEN)
            for key in drop_pieces(target, server, left, now=now)]


def _holds(key: SegmentKey, other: SegmentKey) -> bool:
    return other != key and key.start <= other.start and other.end <= key.end


def _stands(target: Destination, server: str, key: SegmentKey, since: datetime) -> bool:
    """Is this the whole of a file, with everything that belongs to it, and was since then?"""
    try:
        header = segments.load_header(target, server, key)
        return (header.segment.is_final and key.start == 0 and not segments.absent(target, header)
                and target.stat(layout.segment_key(server, key)).modified_at <= since)
    except (ArchivedError, DamagedError, NotFoundError, ObjectMissingError):
        return False
