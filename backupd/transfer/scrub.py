"""Re-reads stored bytes and compares them with what manifests and segments recorded. Needs no private key.

What lies in an archive class cannot be read: there the place's own checksum, from when it was stored, has to do.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from backupd.model.binlog import Segment
from backupd.model.errors import ArchivedError
from backupd.model.job import Progress, Report
from backupd.model.manifest import Header, StoredObject
from backupd.transfer.dedup import Presence
from backupd.transfer.records.segment_documents import SegmentHeader
from backupd.transfer.relay import checksum
from storage.contract import layout, objects
from storage.contract.destination import Destination

SHARES = 1000
"""Everything stored belongs to one of so many even shares, by its name."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One stored thing that is not what was written, and the backups that need it, or the segment that it is of.
    ``stored``: what should be there, where a manifest or segment says so; ``repaired_from``: the destination whose copy
    has taken its place; ``trouble``: why none could; ``aged``: nobody changed it, but it has to say something else, or
    to be signed, by now."""

    destination: str
    key: str
    problem: str
    backups: tuple[str, ...] = ()
    segment: Segment | None = None
    stored: StoredObject | None = None
    repaired_from: str = ""
    trouble: str = ""
    aged: bool = False

    def __str__(self) -> str:
        owner = f"binary log: {self.segment.file}" if self.segment else f"backups: {', '.join(self.backups)}"
        return f"{self.destination}:{self.key}: {self.problem} ({owner})"

    def as_json(self) -> dict[str, Any]:
        """One entry of ``damages`` in reports; ``binlog`` only for archived binary logs."""
        document: dict[str, Any] = {
            "destination": self.destination,
            "key": self.key,
            "problem": self.problem,
            "backups": list(self.backups),
            "repaired_from": self.repaired_from or None,
            "trouble": self.trouble,
            **({"aged": True} if self.aged else {}),
        }
        if self.segment is not None:
            document["binlog"] = {
                "server": self.segment.server,
                "branch": self.segment.branch,
                "file": self.segment.file,
                "start": self.segment.start,
                "end": self.segment.end,
            }
        return document


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How much was read (objects, stored bytes) and what was found. ``cold``: keys in archive classes, of which only
    the place's own checksum could be compared; ``unseen``: those of them that have none."""

    objects: int
    bytes: int
    damages: tuple[Damage, ...]
    cold: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


Due = Callable[[str], bool]
"""Is it the turn of what has this name (of an object, or a segment's folder)?"""


def share_of(name: str) -> int:
    """Even shares, the same on every run."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % SHARES


def always(_name: str) -> bool:
    """A ``Due`` for a scrub that reads everything."""
    return True


def scrub(
    destination: Destination, headers: Iterable[Header], *, report: Report, workers: int = 4, due: Due = always
) -> Scrubbed:
    """Read the objects that ``headers`` name and whose turn it is, once each, and compare size and SHA-256.

    All others are looked up in a listing; those that are missing, of another size or in quarantine are read whatever
    turn it is. Side files are small and read every time. Damage is collected, not raised; a destination that cannot be
    read at all raises DestinationError.
    """
    wanted: dict[str, StoredObject] = {}
    owners: dict[str, list[str]] = {}
    found = list(headers)
    presence = None if due is always else Presence(destination)
    for header in found:
        folder = layout.backup_folder(header.server, header.backup_id)
        items = [(folder + stored.name, stored) for stored in header.side_files]
        items += [
            (layout.object_key(stored.name), stored)
            for stored in header.objects
            if presence is None or due(stored.name) or not presence.holds(stored)
        ]
        for key, stored in items:
            wanted[key] = stored
            owners.setdefault(key, []).append(header.backup_id)

    def damage(key: str, problem: str) -> Damage:
        return Damage(destination.name, key, problem, tuple(sorted(owners[key])), stored=wanted[key])

    return _read(destination, wanted, damage, report=report, workers=workers)


def scrub_segments(
    destination: Destination, headers: Sequence[SegmentHeader], *, report: Report, workers: int = 4
) -> Scrubbed:
    """The same for archived binary logs, each of them whole."""
    wanted: dict[str, StoredObject] = {}
    owners: dict[str, Segment] = {}
    for header in headers:
        for stored in header.sealed:
            wanted[header.folder + stored.name] = stored
            owners[header.folder + stored.name] = header.segment

    def damage(key: str, problem: str) -> Damage:
        return Damage(destination.name, key, problem, segment=owners[key], stored=wanted[key])

    return _read(destination, wanted, damage, report=report, workers=workers)


def _read(
    destination: Destination,
    wanted: Mapping[str, StoredObject],
    damage: Callable[[str, str], Damage],
    *,
    report: Report,
    workers: int,
) -> Scrubbed:
    counter = _Counter(report, sum(stored.size for stored in wanted.values()), len(wanted))
    cold: list[str] = []
    unseen: list[str] = []

    def check(item: tuple[str, StoredObject]) -> Damage | None:
        key, stored = item
        try:
            problem = objects.problem(destination, key, stored)
            counter.add(stored.size)
        except ArchivedError:
            cold.append(key)
            known, problem = recorded(destination, key, stored)
            if not known:
                unseen.append(key)
            counter.add(0)
        return damage(key, problem) if problem else None

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="scrub") as pool:
        damages = tuple(damage for damage in pool.map(check, wanted.items()) if damage is not None)
    return Scrubbed(counter.files, counter.bytes, damages, tuple(sorted(cold)), tuple(sorted(unseen)))


def recorded(destination: Destination, key: str, stored: StoredObject) -> tuple[bool, str]:
    """Of what cannot be read: whether the place has a checksum of it, and what is wrong with it."""
    size = destination.stat(key).size
    if size != stored.size:
        return True, f"holds {size} bytes where {stored.size} were stored"
    digest = checksum(destination, key)
    if digest is None:
        return False, ""
    return True, "" if digest == stored.sha256 else "holds other bytes than were stored (by the place's own SHA-256)"


class _Counter:
    def __init__(self, report: Report, total: int, files: int) -> None:
        self._report, self._total, self._total_files = report, total, files
        self._lock = threading.Lock()
        self.bytes = self.files = 0

    def add(self, size: int) -> None:
        with self._lock:
            self.bytes += size
            self.files += 1
            progress = Progress("verify", self.bytes, self._total, self.files, self._total_files)
        self._report(progress)
