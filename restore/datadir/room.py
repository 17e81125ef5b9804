"""Is there room for a restore? Asked before the first byte moves, answered in bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import RefusedError
from backupd.model.manifest import Entry, StoredObject
from backupd.model.text import format_size

RESERVE = 64 * 1024 * 1024
"""Bytes for logs, temporary tablespace and the file system's own bookkeeping."""
_BLOCK = 4096
_DELTA = ".delta"
"""Pages of one increment; those of the next come on top."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by purpose. ``least`` counts sparse files by what is stored of them, not by their length."""

    files: int
    growth: int
    redo: int
    least: int
    inodes: int

    @property
    def bytes(self) -> int:
        return self.files + self.growth + self.redo + RESERVE

    @property
    def least_bytes(self) -> int:
        return self.least + self.growth + self.redo + RESERVE

    def describe(self) -> str:
        return (
            f"{self.files:,} bytes of files (staged, then renamed: stored once), "
            f"{self.growth:,} bytes of growth while redo and increments are applied, "
            f"{self.redo:,} bytes for the server's own redo log, {RESERVE:,} bytes reserve: "
            f"{self.bytes:,} bytes ({format_size(self.bytes)})"
        )


def measure(
    chains: Iterable[tuple[Iterable[Entry], Mapping[str, StoredObject]]], *, redo_applied: int, redo_log: int
) -> Need:
    """What a restore takes: every backup of the chain is fetched whole, then redo is applied, and each increment is
    copied over the full backup: pages into their tables, other files in the place of the earlier ones.

    ``redo_applied``: bytes of the redo copies, the most by which applying them can make files grow;
    ``redo_log``: bytes of the redo log that the restored server will make for itself.
    """
    files = least = inodes = 0
    copied = 0
    held: dict[str, int] = {}
    for number, (entries, objects) in enumerate(chains):
        for entry in entries:
            if number:
                copied += max(0, entry.size - held.get(entry.path, 0))
            held[entry.path] = 0 if entry.path.endswith(_DELTA) else entry.size
            size = -(-entry.size // _BLOCK) * _BLOCK
            files += size
            # Stored bytes of a sparse file are compressed; a hole costs next to nothing, so this is a lower
            # bound.
            least += min(size, sum(objects[part.object].size for part in entry.parts)) if entry.sparse else size
            inodes += 1
    return Need(files=files, growth=redo_applied + copied, redo=redo_log, least=least, inodes=inodes)


def refuse_too_small(need: Need, folder: Path, *, there: tuple[int, int] = (0, 0)) -> tuple[str, ...]:
    """Raises RefusedError when ``folder``'s file system has too little room; gives warnings when it may be
    tight."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize + there[0]
    if free < need.least_bytes:
        raise RefusedError(
            f"too little room at {folder}: {format_size(need.bytes)} needed, {format_size(free)} free",
            detail=f"{need.describe()}; free: {free:,} bytes; missing: {need.bytes - free:,} bytes",
            hint="free some space there, or restore onto a larger file system",
        )
    if room.f_files and room.f_favail + there[1] < need.inodes:
        raise RefusedError(
            f"too few inodes at {folder}: {need.inodes:,} files, {room.f_favail:,} inodes free",
            hint="restore onto a file system with more inodes",
        )
    if free < need.bytes:
        tight = f"{format_size(need.bytes)} needed at most, {format_size(free)} free"
        return (f"room at {folder} is enough only if sparse files stay sparse: {tight}",)
    return ()
