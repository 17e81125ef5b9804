"""Re-reads stored bytes and compares them with what manifests and segments recorded. Needs no private key."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from backupd.model.binlog import Segment
from backupd.model.manifest import Header, StoredObject
from backupd.model.progress import Progress, Report
from backupd.transfer.segmentdoc import SegmentHeader
from storage import layout, objects
from storage.destination import Destination


@dataclass(frozen=True, slots=True)
class Damage:
    """One stored thing that is not what was written, and the backups that need it, or the segment that it is of."""

    destination: str
    key: str
    problem: str
    backups: tuple[str, ...] = ()
    segment: Segment | None = None

    def __str__(self) -> str:
        owner = f"binary log: {self.segment.file}" if self.segment else f"backups: {', '.join(self.backups)}"
        return f"{self.destination}:{self.key}: {self.problem} ({owner})"

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"destination": self.destination, "key": self.key, "problem": self.problem,
                                    "backups": list(self.backups)}
        if self.segment is not None:
            document["binlog"] = {"server": self.segment.server, "branch": self.segment.branch,
                                  "file": self.segment.file, "start": self.segment.start, "end": self.segment.end}
        return document


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How much was read (objects, stored bytes) and what was found."""

    objects: int
    bytes: int
    damages: tuple[Damage, ...]


def turn_of(name: str, turns: int) -> int:
    """Which of ``turns`` runs re-reads the object ``name``: even shares, the same on every run."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % turns


def scrub(
    destination: Destination,
    headers: Iterable[Header],
    *,
    report: Report,
    workers: int = 4,
    turns: int = 1,
    turn: int = 0,
) -> Scrubbed:
    """Read every object and side file that ``headers`` name, once each, and compare size and SHA-256.

    ``turns`` > 1 reads only the share of objects whose turn it is; side files are small and read every time.
    Damage is collected, not raised; a destination that cannot be read at all raises DestinationError.
    """
    wanted, owners = _wanted(headers, turns, turn)

    def damage(key: str, problem: str) -> Damage:
        return Damage(destination.name, key, problem, tuple(sorted(owners[key])))

    return _read(destination, wanted, damage, report=report, workers=workers)


def scrub_segments(destination: Destination, headers: Iterable[SegmentHeader], *, report: Report, workers: int = 4,
                   turns: int = 1, turn: int = 0) -> Scrubbed:
    """The same for archived binary logs. ``turns`` > 1 reads the share of segments whose turn it is, whole."""
    wanted: dict[str, StoredObject] = {}
    owners: dict[str, Segment] = {}
    for header in headers:
        if turns > 1 and turn_of(header.folder, turns) != turn:
            continue
        for stored in header.sealed:
            wanted[header.folder + stored.name] = stored
            owners[header.folder + stored.name] = header.segment

    def damage(key: str, problem: str) -> Damage:
        return Damage(destination.name, key, problem, segment=owners[key])

    return _read(destination, wanted, damage, report=report, workers=workers)


def _read(destination: Destination, wanted: Mapping[str, StoredObject], damage: Callable[[str, str], Damage], *,
          report: Report, workers: int) -> Scrubbed:
    counter = _Counter(report, sum(stored.size for stored in wanted.values()), len(wanted))

    def check(item: tuple[str, StoredObject]) -> Damage | None:
        key, stored = item
        problem = objects.problem(destination, key, stored)
        counter.add(stored.size)
        return damage(key, problem) if problem else None

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="scrub") as pool:
        damages = tuple(damage for damage in pool.map(check, wanted.items()) if damage is not None)
    return Scrubbed(counter.files, counter.bytes, damages)


def _wanted(
    headers: Iterable[Header], turns: int, turn: int
) -> tuple[Mapping[str, StoredObject], Mapping[str, Sequence[str]]]:
    wanted: dict[str, StoredObject] = {}
    owners: dict[str, list[str]] = {}
    for header in headers:
        for stored in header.side_files:
            key = layout.backup_folder(header.server, header.backup_id) + stored.name
            wanted[key] = stored
            owners.setdefault(key, []).append(header.backup_id)
        for stored in header.objects:
            if turns > 1 and turn_of(stored.name, turns) != turn:
                continue
            key = layout.object_key(stored.name)
            wanted[key] = stored
            owners.setdefault(key, []).append(header.backup_id)
    return wanted, owners


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
