"""Re-reads stored bytes, compares them with what manifests and segments recorded, and repairs damaged ones.

Needs no private key. Objects in an archive class cannot be read: for these the checksum counts that the destination
took when they were stored.

A repair takes the bytes from another destination's copy, compares them with what the manifest or the segment recorded,
stores them and reads them again there. The damaged object is moved away first: a destination that never overwrites
would keep it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from backupd.model.binlog import Segment, SegmentKey
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    DamagedError,
    DestinationError,
    ForbiddenError,
    LockedError,
    NewerFormatError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.job import Report
from backupd.model.manifest import Header, StoredObject
from backupd.model.text import Clock
from backupd.transfer import log_segments
from backupd.transfer.copies import copy_segment, copy_signature, good_copy
from backupd.transfer.dedup import Presence
from backupd.transfer.leases import Intent
from backupd.transfer.past_versions import earlier
from backupd.transfer.records.manifests import decode_of, get_bytes, load_header, put_bytes
from backupd.transfer.records.segment_documents import SegmentHeader
from backupd.transfer.relay import Check, Meter, Relay, checksum
from storage import layout, objects
from storage.destination import Destination, TreeDestination, as_versioned, exists, sha256_of
from storage.objects import not_kept

T = TypeVar("T")

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
            shown = ("server", "branch", "file", "start", "end")
            document["binlog"] = {name: getattr(self.segment, name) for name in shown}
        return document


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How much was read (objects, stored bytes) and what was found. ``cold``: keys in archive classes, of which only
    the destination's own checksum could be compared; ``unseen``: those of them that have none."""

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
    meter = Meter(report, "verify", sum(stored.size for stored in wanted.values()), len(wanted))
    cold: list[str] = []
    unseen: list[str] = []

    def check(item: tuple[str, StoredObject]) -> Damage | None:
        key, stored = item
        try:
            problem = objects.problem(destination, key, stored)
            meter.add(stored.size, 1)
        except ArchivedError:
            cold.append(key)
            known, problem = recorded(destination, key, stored)
            if not known:
                unseen.append(key)
            meter.add(0, 1)
        return damage(key, problem) if problem else None

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="scrub") as pool:
        damages = tuple(damage for damage in pool.map(check, wanted.items()) if damage is not None)
    return Scrubbed(meter.files, meter.bytes, damages, tuple(sorted(cold)), tuple(sorted(unseen)))


def recorded(destination: Destination, key: str, stored: StoredObject) -> tuple[bool, str]:
    """Of what cannot be read: whether the destination has a checksum of it, and what is wrong with it."""
    size = destination.stat(key).size
    if size != stored.size:
        return True, f"holds {size} bytes where {stored.size} were stored"
    digest = checksum(destination, key)
    if digest is None:
        return False, ""
    return True, "" if digest == stored.sha256 else "holds other bytes than were stored (by the destination's SHA-256)"


def put_right(target: Destination, key: str, item: StoredObject, sources: Sequence[Destination]) -> str:
    """Make ``key`` at ``target`` hold the bytes of ``item`` again, and end its quarantine; the name of the source.
    Where the target has them in an earlier version, that one comes back, and nothing has to be sent.

    Raises DamagedError naming every source when none has them, DestinationError when the target fails, or keeps other
    bytes than it is given.
    """
    if _from_earlier(target, key, item):
        _released(target, key, item)
        return f"an earlier version at {target.name}"
    message = f"no other destination has the original of {key}"
    source, content = _first(sources, lambda source: objects.fetch_side(source, key, item), message, key)
    with contextlib.suppress(LockedError):  # then it is in a bucket with versions: the newest one counts
        target.delete(key)
    put_bytes(target, key, content)
    if problem := _problem(target, key, item):
        raise not_kept(
            target, f"{target.name}:{key}: {problem}", "check the storage and its log: the disk may be failing"
        )
    _released(target, key, item)
    return source.name


def _first(
    sources: Sequence[Destination], read: Callable[[Destination], T], message: str, key: str
) -> tuple[Destination, T]:
    """The first of ``sources`` that gives the right bytes, and what ``read`` makes of them. Raises DamagedError with
    ``message``, naming what is wrong at each source, where none does."""
    failures: list[str] = []
    for source in sources:
        try:
            return source, read(source)
        except DamagedError as error:
            failures += error.damages
        except DestinationError as error:
            failures.append(error.message)
    raise DamagedError(message, failures or [f"{key}: no other destination has it"])


def _from_earlier(target: Destination, key: str, item: StoredObject) -> bool:
    """Whatever stands in the way of that (no right to it, no versions) leaves it to the other copies."""
    try:
        found = earlier(target, key, item)
        versioned = as_versioned(target)
        if found is None or versioned is None:
            return False
        versioned.bring_back(*found)
        return not _problem(target, key, item)
    except (DestinationError, ForbiddenError, RefusedError):
        return False


def _released(target: Destination, key: str, item: StoredObject) -> None:
    if key.startswith(layout.OBJECTS):
        objects.release(target, item.name)


def put_manifest_right(
    target: Destination, server: str, backup_id: str, sources: Sequence[Destination], *, clock: Clock
) -> str:
    """Replace a damaged manifest by that of another copy, byte for byte; the name of the source. What the backup builds
    on is held meanwhile, where it is there. Raises as ``put_right`` does."""
    key = layout.manifest_key(server, backup_id)
    _refuse_newer(lambda: load_header(target, server, backup_id))

    def read(source: Destination) -> tuple[bytes, str | None]:
        raw = get_bytes(source, key)
        return raw, decode_of(raw, f"{source.name}:{key}", server, backup_id).parent

    source, (raw, parent) = _first(sources, read, f"no other destination has the manifest of {backup_id}", key)
    # Nobody can tell of a damaged manifest what it builds on. And somebody may sweep between the two writes of a
    # destination that does not replace what is whole, though wrong.
    held = [parent] if parent is not None and exists(target, layout.manifest_key(server, parent)) else []
    with Intent([target], server, backup_id, parents=held, clock=clock):
        copy_signature(Relay([source], target), key)
        try:
            put_bytes(target, key, raw)
        except DestinationError:
            target.delete(key)
            put_bytes(target, key, raw)
        if get_bytes(target, key) != raw:
            raise not_kept(target, f"{target.name}:{key} is not what was just written")
    return source.name


def put_segment_right(
    target: Destination,
    server: str,
    key: SegmentKey,
    damaged: Iterable[str],
    sources: Sequence[Destination],
    *,
    clock: Clock,
    check: Check,
) -> str:
    """Put a segment right of which the keys ``damaged`` are wrong, its ``segment.json`` or all of it among them; the
    name of the source. Where the other copy was sealed another time it takes the place of this one. Raises as
    ``put_right`` does, NotFoundError when no other destination has it."""
    header_key = layout.segment_key(server, key)
    wrong = set(damaged)
    if header_key not in wrong:
        header = log_segments.load_header(target, server, key)
        items = {header.folder + item.name: item for item in header.sealed}
        try:
            return ", ".join(dict.fromkeys(put_right(target, one, items[one], sources) for one in sorted(wrong)))
        except DamagedError:
            twin = _twin(header, sources)
            log_segments.remove(target, server, key)
            sources = [twin]
    copied_from = [source for source in sources if _has(source, header_key)] or list(sources)
    relay = Relay(copied_from, target, check=check)
    if header_key in wrong:
        _refuse_newer(lambda: log_segments.load_header(target, server, key))
        good_copy(relay, server, key)  # or else what is there stays, damaged as it is
        with contextlib.suppress(LockedError):
            target.delete(header_key)
    header = copy_segment(relay, server, key, clock=clock)
    if problems := log_segments.problems(target, header):
        raise not_kept(target, "\n".join(f"{one}: {problem}" for one, problem in problems.items()))
    return copied_from[0].name


def show_again(tree: TreeDestination, header: Header, before: Mapping[tuple[int, int], str]) -> bool:
    """Let the tree of a backup show objects that were replaced; ``before``: the inodes that they had. False when it
    cannot be determined which path is which object: then `fsck --repair`, which can open the body, shows it afresh."""
    name = layout.tree_name(header.server, header.backup_id)
    shown = dict(tree.tree_files(name))
    if not shown:
        return True
    names = dict(before)
    for item in header.objects:
        with contextlib.suppress(ObjectMissingError):
            names[tree.identity(layout.object_key(item.name))] = item.name
    digests = {item.sha256: item.name for item in header.objects}
    links: dict[str, str] = {}
    for path, inode in shown.items():
        found = names.get(inode) or digests.get(tree_digest(tree, name, path))
        if found is None:
            return False
        links[path] = found
    for path, object_name in links.items():
        tree.link(layout.object_key(object_name), name, path)
    tree.publish(name)
    return True


def inode_of(tree: TreeDestination, key: str) -> tuple[int, int] | None:
    """(device, inode) of the object under ``key``; None where it is missing."""
    try:
        return tree.identity(key)
    except ObjectMissingError:
        return None


def tree_digest(tree: TreeDestination, name: str, path: str) -> str:
    with tree.open_tree_file(name, path) as stream:
        return sha256_of(stream)


def _problem(target: Destination, key: str, item: StoredObject) -> str:
    """What is wrong with what was just put; of what went into an archive class, by the destination's own checksum."""
    try:
        return objects.problem(target, key, item)
    except ArchivedError:
        return recorded(target, key, item)[1]


def _twin(header: SegmentHeader, sources: Sequence[Destination]) -> Destination:
    """A source whose copy of the same bytes is whole."""
    for source in sources:
        with contextlib.suppress(BackupdError):
            found = log_segments.load_header(source, header.segment.server, header.segment.key)
            if found.segment.sha256 == header.segment.sha256 and not log_segments.problems(source, found):
                return source
    raise DamagedError(f"no other destination has {header.segment.file} as it was archived", [header.key])


def _refuse_newer(look: Callable[[], object]) -> None:
    """What a later version of this program wrote is not damaged for that. Raises NewerFormatError."""
    try:
        look()
    except NewerFormatError:
        raise
    except (DamagedError, NotFoundError, DestinationError):
        pass


def _has(source: Destination, key: str) -> bool:
    try:
        source.stat(key)
    except DestinationError:
        return False
    return True
