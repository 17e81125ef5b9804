"""How much memory a prepare gets.

Recovery keeps the redo records in a hash table and the pages they touch in a buffer pool. When the table does
not fit, the redo is read again in several passes, which is what makes a prepare slow; memory beyond that only
caches pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import ToolError
from backupd.model.text import format_size

MIB = 1024 * 1024
FLOOR = 96 * MIB
"""Below this the tools' own recovery is not able to run reliably; their default is 96 to 100 MiB."""
DEFAULT_CAP = 8 * 1024 * MIB


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
