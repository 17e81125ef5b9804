"""Parts of binary logs that nobody needs: pieces that a larger segment replaced, and parts that dead uploads left.

The process that stored the larger segment removes its pieces. A sweep does not: without a private key nobody can tell
whether a piece holds the same bytes as the larger segment. So a piece stays until retention removes the logs where the
process that stores may not remove, and where a piece differs from its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from backupd.model.binlog import SegmentKey
from backupd.model.errors import LockedError
from backupd.transfer import log_segments as segments
from backupd.transfer.guards.pins_and_intents import pins
from backupd.transfer.leases import is_alive
from storage import layout
from storage.destination import Destination, ObjectInfo

SETTLED = timedelta(days=1)
"""Parts without a ``segment.json`` that are older than this are nobody's."""


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


@dataclass(frozen=True, slots=True)
class Strays:
    """What lies among the binary logs and belongs to no segment. ``parts``: of segments without ``segment.json``, or of
    none; ``strangers``: keys of files that are not ours."""

    parts: tuple[ObjectInfo, ...]
    strangers: tuple[str, ...]


def strays(destination: Destination, *, now: datetime) -> Strays:
    """Without parts that may be those of a living upload, and a new branch's description."""
    found: list[ObjectInfo] = []
    strangers: list[str] = []
    folder: list[ObjectInfo] = []
    place = ""
    for info in destination.list(layout.BINLOGS):
        owner = layout.segment_of(info.key)
        if owner is None:
            if layout.branch_of(info.key.removesuffix(layout.SIGNATURE)) is None:
                strangers.append(info.key)
            continue
        if owner[2].removesuffix(layout.SIGNATURE) != layout.SEGMENT and not layout.is_sealed_log(owner[2]):
            strangers.append(info.key)
            continue
        above = info.key.rpartition("/")[0]
        if above != place:
            found += _left(folder, now)
            folder, place = [], above
        folder.append(info)
    found += _left(folder, now)
    return Strays(tuple(found), tuple(strangers))


def _left(folder: list[ObjectInfo], now: datetime) -> list[ObjectInfo]:
    """The content of one segment's folder, if it is nobody's."""
    if not folder or any(info.key.endswith(f"/{layout.SEGMENT}") for info in folder):
        return []
    return folder if max(info.modified_at for info in folder) < now - SETTLED else []


def clear_strays(destination: Destination, *, now: datetime) -> list[str]:
    """Remove the parts that dead uploads left; their keys."""
    removed: list[str] = []
    for above in dict.fromkeys(info.key.rpartition("/")[0] + "/" for info in strays(destination, now=now).parts):
        for info in _left(list(destination.list(above)), now):  # once more: somebody may have gone on with it
            destination.delete(info.key)
            removed.append(info.key)
    return removed
