"""What one collection, or one sweep, did and did not do."""

from __future__ import annotations

from dataclasses import dataclass, field

from backupd.transfer.guards.holds import Backup


@dataclass(slots=True)
class Collected:
    """What one collection did; sizes in bytes. ``held`` says what was left alone, and why."""

    backups: list[str] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    trees: list[str] = field(default_factory=list)
    side_files: list[str] = field(default_factory=list)
    """Keys of side files, marks and keeps of backups that are no more."""
    leftovers: int = 0
    tombstoned: int = 0
    rescued: int = 0
    objects: int = 0
    bytes_freed: int = 0
    log_parts: list[str] = field(default_factory=list)
    """Keys of parts of binary logs whose upload died."""
    held: list[str] = field(default_factory=list)
    locked: int = 0
    """Files that may not be removed yet: an object lock, or missing rights. The next collection tries again."""
    lock: str = ""
    """What to say of them."""
    skipped: bool = False
    """Nothing was done: somebody else removes here, or nothing may be removed."""
    braked: list[str] = field(default_factory=list)
    """What the brake on mass deletes held back; each is among ``held``, too."""
    missing: list[Backup] = field(default_factory=list)
    """What was expected here and is not, so that no object was collected; ``held`` says it."""
