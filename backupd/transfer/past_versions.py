"""What a destination with versions still has of what was deleted or overwritten since a moment. Reads listings, and of
single keys what is asked for; changes nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from backupd.model.document import DOCUMENT_LIMIT
from backupd.model.errors import RefusedError
from backupd.model.manifest import StoredObject
from storage import layout
from storage.destination import Destination, Version, VersionedDestination, as_versioned, sha256_of

_PASSING = frozenset({layout.INTENTS, layout.PINS, layout.SWEEPS, layout.TOMBSTONES, layout.QUARANTINE, layout.MARKS})
"""What is here is of the moment in which it was written."""
_LEADING = frozenset({layout.MANIFEST, layout.SEGMENT, layout.BRANCH})


@dataclass(frozen=True, slots=True)
class Trail:
    """The states of one key, the newest first."""

    key: str
    states: tuple[Version, ...]

    @property
    def above(self) -> tuple[Version, ...]:
        """The deletions that hide it; none where it is seen."""
        kept = next((number for number, one in enumerate(self.states) if one.size is not None), len(self.states))
        return self.states[:kept]

    @property
    def kept(self) -> tuple[Version, ...]:
        """The states that have bytes."""
        return tuple(one for one in self.states if one.size is not None)

    @property
    def is_hidden(self) -> bool:
        """Is the newest state a deletion, so that a listing does not show the key?"""
        return bool(self.above)

    @property
    def changed_at(self) -> datetime:
        """Since when what is seen is what is seen. Some servers give a deletion the time of what it hides, and that the
        time of the deletion; no deletion is older than what it hides."""
        if not self.above:
            return self.states[0].modified_at
        return max(one.modified_at for one in (self.above[-1], *self.kept[:1]))

    def hiding(self, version: Version) -> tuple[Version, ...]:
        """The deletions that alone hide ``version``; none where something else is above it, too."""
        return self.above if self.above and self.kept[0] == version else ()


class Past:
    """Everything at ``destination``, from one listing. ``suspects``: what was hidden or overwritten from ``since`` on;
    ``before``: how many keys were hidden earlier; ``marks``: of all marks of deletions; ``leading``: the state of each
    manifest, segment and branch that is seen. Raises RefusedError where no versions are kept, ForbiddenError naming the
    right that is missing."""

    def __init__(self, destination: Destination, since: datetime) -> None:
        versioned = as_versioned(destination)
        if versioned is None:
            raise _none_kept(destination, "only buckets of S3 can keep what was deleted or overwritten")
        self.since = since.replace(microsecond=0)  # destinations give whole seconds
        self.suspects: dict[str, Trail] = {}
        self.marks: dict[str, Trail] = {}
        self.leading: dict[str, Version] = {}
        self.before = 0
        self._seen: set[int] = set()
        self._read: tuple[Version, bytes] | None = None
        self._versioned: VersionedDestination = versioned
        kept = anything = False
        for key, group in groupby(versioned.versions(""), key=lambda one: one.key):
            trail = Trail(key, tuple({one.id: one for one in group}.values()))
            anything = True
            kept = kept or any(one.id is not None for one in trail.states)
            self._take(trail)
        self._sorted = sorted(self.suspects)
        if not kept:
            why = "versioning was never enabled on it" if anything else "it is empty, and always was"
            raise _none_kept(destination, why)

    def _take(self, trail: Trail) -> None:
        key = trail.key
        if key.startswith(layout.MARKS):
            self.marks[key] = trail
        if key.partition("/")[0] + "/" in _PASSING or not trail.kept:
            return
        if not trail.is_hidden:
            self._seen.add(hash((key, trail.states[0].size)))
            if key.rpartition("/")[2] in _LEADING:
                self.leading[key] = trail.states[0]
        if trail.changed_at >= self.since and (trail.is_hidden or len(trail.kept) > 1):
            self.suspects[key] = trail
        elif trail.is_hidden:
            self.before += 1

    def is_seen(self, key: str, size: int) -> bool:
        """Is it there, in its size?"""
        return hash((key, size)) in self._seen

    def below(self, prefix: str) -> bool:
        """Is something suspect whose key starts with ``prefix``?"""
        index = bisect_left(self._sorted, prefix)
        return index < len(self._sorted) and self._sorted[index].startswith(prefix)

    def read(self, version: Version) -> bytes:
        """Of a small document."""
        if self._read is None or self._read[0] != version:
            with self._versioned.open_version(version) as stream:
                self._read = version, stream.read(DOCUMENT_LIMIT + 1)  # too long, it is nothing right
        return self._read[1]

    def holding(self, trail: Trail, item: StoredObject) -> Version | None:
        """The newest state of it with exactly the bytes of ``item``: by the digest that the destination computed, else
        by reading. Raises ArchivedError where it has none and cannot be read."""
        return next((one for one in trail.kept if one.size == item.size and self._digest(one) == item.sha256), None)

    def well_formed(self, trail: Trail, is_right: Callable[[bytes], bool], *, written_once: bool) -> Version | None:
        """The newest state whose bytes are right; of what is ``written_once`` rather one from before ``since``: what
        comes later is somebody else's."""
        states = sorted(trail.kept, key=lambda one: written_once and not self.is_of_then(trail, one))
        return next((one for one in states if is_right(self.read(one))), None)

    def is_of_then(self, trail: Trail, version: Version) -> bool:
        """Was ``version`` stored before ``since``? Of a deletion and what it hides the older time is that: see
        ``Trail.changed_at``."""
        return min(one.modified_at for one in (version, *trail.hiding(version)[-1:])) < self.since

    def state_then(self, trail: Trail) -> Version | None:
        """How it was at ``since``; None where it was not there, or deleted."""
        found = next((one for one in trail.states if one.modified_at < self.since), None)
        return found if found is not None and found.size is not None else None

    def _digest(self, version: Version) -> str:
        return self._versioned.version_checksum(version) or _digest(self._versioned, version)


def earlier(destination: Destination, key: str, item: StoredObject) -> tuple[Version, tuple[Version, ...]] | None:
    """A state of ``key`` at ``destination`` with the bytes of ``item`` that is not the one that is seen, and the
    deletions that alone hide it; None where there is none. Raises as the destination does."""
    versioned = as_versioned(destination)
    if versioned is None:
        return None
    trail = Trail(key, tuple(one for one in versioned.versions(key) if one.key == key))
    for one in trail.kept:
        if not one.newest and one.size == item.size and _digest(versioned, one) == item.sha256:
            return one, trail.hiding(one)
    return None


def _digest(versioned: VersionedDestination, version: Version) -> str:
    with versioned.open_version(version) as stream:
        return sha256_of(stream)


def _none_kept(destination: Destination, why: str) -> RefusedError:
    return RefusedError(
        f"destination {destination.name} keeps no versions of what was deleted or overwritten",
        detail=why,
        hint="copy the data from another destination with `backupd replicate` and `backupd verify`; to be able to "
        "restore versions later, enable versioning, and object lock if possible",
    )
