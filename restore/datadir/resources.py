"""Memory and room for a restore, chosen and checked before the first byte moves.

Memory of a prepare: recovery keeps the redo records in a hash table and the pages they touch in a buffer pool. When the
table does not fit, the redo is read again in several passes, which is what makes a prepare slow; memory beyond that
only caches pages.

Room: what a restore takes in bytes and inodes, and whether the file system has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import RefusedError, ToolError
from backupd.model.manifest import Entry, StoredObject
from backupd.model.text import format_size

MIB = 1024 * 1024
FLOOR = 96 * MIB
"""Below this the tools' own recovery is not able to run reliably; their default is 96 to 100 MiB."""
DEFAULT_CAP = 8 * 1024 * MIB

RESERVE = 64 * 1024 * 1024
"""Bytes for logs, temporary tablespace and the file system's own bookkeeping."""
_BLOCK = 4096
_DELTA = ".delta"
"""Pages of one increment; those of the next come on top."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``bytes`` to give to the tool, a whole number of MiB, and why that many."""

    bytes: int
    reason: str


def choose_memory(*, redo: int, available: int, cap: int = DEFAULT_CAP) -> Memory:
    """Memory for a prepare: grows with the redo to apply and with free memory, up to ``cap`` (all in bytes).

    Twice the redo for its hash table, plus an eighth of the free memory for pages; never more than half of
    the free memory, because page cache and the server next door need some too.
    """
    wanted = 2 * redo + available // 8
    limits = {"half of the free memory": available // 2, "the configured cap": cap}
    name, limit = min(limits.items(), key=lambda item: item[1])
    chosen = min(wanted, limit)
    reason = f"twice the redo ({format_size(redo)}) and an eighth of the free memory ({format_size(available)})"
    if chosen < wanted:
        reason = f"{name} ({format_size(limit)})"
    if chosen < FLOOR:
        chosen, reason = FLOOR, f"the least that recovery needs; {reason} would be less"
    return Memory(chosen // MIB * MIB, reason)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that the kernel would give without swapping (``MemAvailable``, proc(5)). Raises ToolError."""
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ToolError(
        f"{meminfo} does not say how much memory is available",
        hint="set restore.scratch.memory in the configuration",
    )


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
        """The most that the restore takes, with the reserve."""
        return self.files + self.growth + self.redo + RESERVE

    @property
    def least_bytes(self) -> int:
        """The least that it takes: when every hole of a sparse file stays one."""
        return self.least + self.growth + self.redo + RESERVE

    def describe(self) -> str:
        """Each purpose with its bytes and the sum, for the detail of a refusal."""
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
