"""What lies among the binary logs of a destination and belongs to no segment; what dead uploads left is removed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from storage.contract import layout
from storage.contract.destination import Destination, ObjectInfo

SETTLED = timedelta(days=1)
"""Parts without a ``segment.json`` that are older than this are nobody's."""


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
