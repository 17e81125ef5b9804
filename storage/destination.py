"""The contract of a destination: where stored bytes are.

A destination stores whole byte strings under keys (relative paths with forward slashes, made only by
``storage.layout``). Everything that all destinations share is asked by one suite, ``tests/contract``;
``tests/support/stores/memory.py`` is the reference implementation.

A marker with an id says which repository a destination is, whatever a configuration calls it.
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Flag, StrEnum, auto
from typing import Any, BinaryIO, Protocol, runtime_checkable

from backupd.model.document import NOTE_LIMIT, parsed
from backupd.model.errors import DamagedError, ObjectMissingError, RefusedError
from backupd.model.text import format_size, format_time, parse_time
from storage import layout

FORMAT = "backupd-repository/1"
"""What the marker of a repository names as its format."""
_CHUNK = 1 << 20


class Capability(Flag):
    """What a destination can do beyond the contract. Callers read these, never the class."""

    NONE = 0
    TREE = auto()
    """Keys can be shown again under a browsable name without a second copy: ``link`` and ``publish`` work."""
    SPACE = auto()
    """``space`` knows how much room is left."""
    ARCHIVE = auto()
    """Objects may be in an archive class, where they can be read only after a thaw: see ``ArchiveDestination``."""
    RULES = auto()
    """The same, but by rules of the destination that the configuration does not know: nobody expects it."""
    CHECKSUMS = auto()
    """``checksum`` gives what the destination itself computed, or checked, when it took an object."""
    AUDITED = auto()
    """And the destination itself keeps comparing what it stores with that, so it shows what is there now."""
    VERSIONS = auto()
    """What was deleted or overwritten may still be there, and can be brought back: see ``VersionedDestination``."""
    LOCKS = auto()
    """What is stored may not be deleted for a time: see ``LockingDestination``."""
    COPIES = auto()
    """What is stored can be stored under another key, too, without its bytes being sent: see
    ``CopyingDestination``."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object: its key, size in bytes, and when it was stored (aware, UTC)."""

    key: str
    size: int
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class Space:
    """Room at a destination, in bytes, and free inodes (None where there is no such limit)."""

    total: int
    free: int
    free_inodes: int | None = None

    @property
    def words(self) -> str:
        """What is free, for an error about a full disk."""
        inodes = "" if self.free_inodes is None else f", {self.free_inodes} inodes free"
        return f"{self.free} bytes free ({format_size(self.free)}) of {self.total}{inodes}"


class Destination(Protocol):
    """All methods may be called from several threads at once.

    Every failure is a DestinationError (``retryable`` as the driver knows), a full disk DestinationFullError, an
    unknown key ObjectMissingError, reading what has to be thawed first ArchivedError, deleting what may not be deleted
    yet LockedError; ``message`` names the destination and the key. None of them hangs: a destination that does not
    answer is a DestinationError within a minute.
    """

    @property
    def name(self) -> str:
        """What the configuration calls it."""
        ...

    @property
    def capabilities(self) -> Capability:
        """What it can do; may ask the destination at the first time."""
        ...

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        """Store everything ``stream`` yields under ``key``, or nothing.

        The object becomes visible only after ``stream`` has reached its end and the bytes are durable. If reading
        raises, nothing remains, and that same error is raised. Replaces an existing object in one step. Safe to
        call again after any failure, with a fresh stream.
        """
        ...

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        """Open the bytes of ``key`` from ``offset``, at most ``length`` of them; the caller closes it.

        An offset at or past the end gives an empty stream.
        """
        ...

    def stat(self, key: str) -> ObjectInfo:
        """What is under ``key``. Raises ObjectMissingError."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in key order; unfinished puts and tree links never."""
        ...

    def delete(self, key: str) -> None:
        """Remove ``key``; an unknown key is not an error (deleting twice is the normal case after a crash)."""
        ...

    def space(self) -> Space | None:
        """How much room there is, or None where nobody knows (no SPACE capability)."""
        ...

    def is_initialised(self) -> bool:
        """Does the destination exist and carry our marker? False for a folder that vanished or whose disk is not
        mounted.

        A caller who remembers that it once did must refuse to go on, not initialise again. Raises DestinationError
        where nobody can tell: a destination over the network that does not answer or does not let us in.
        """
        ...

    def initialise(self, now: datetime) -> None:
        """Make an empty destination ready and put the marker; harmless when it is there already.

        Raises RefusedError when the destination holds something else. Until this was called, every other method but
        ``is_initialised`` raises DestinationError.
        """
        ...

    def leftovers(self) -> Iterator[str]:
        """Names of unfinished puts and half-removed trees whose process is gone."""
        ...

    def clear_leftovers(self) -> int:
        """Remove what ``leftovers`` names and nothing that a living process writes; how many went."""
        ...


@runtime_checkable
class TreeDestination(Destination, Protocol):
    """A destination with the TREE capability: the file system's link count is the reference count."""

    def link(self, key: str, tree: str, path: str) -> None:
        """Show object ``key`` as ``path`` inside the unfinished tree ``tree``; repeating it is harmless.

        When the file system allows no more links to the object, the pool gets a fresh copy that new links use;
        earlier links keep the old one. Raises ObjectMissingError when ``key`` is not there.
        """
        ...

    def publish(self, tree: str) -> None:
        """Make the unfinished tree ``tree`` visible under its final name, in one step, durable. Idempotent.

        An older finished tree of that name gives way. Raises ObjectMissingError when nothing was ever linked.
        """
        ...

    def remove_tree(self, tree: str) -> None:
        """Remove ``tree``, finished or not. Unknown trees are not an error."""
        ...

    def trees(self) -> Iterator[tuple[str, bool]]:
        """Every tree and whether it is published."""
        ...

    def tree_files(self, tree: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """Each path inside the published ``tree`` with the (device, inode) it points to; nothing when there is none."""
        ...

    def open_tree_file(self, tree: str, path: str) -> BinaryIO:
        """The bytes shown as ``path`` in the published ``tree``; the caller closes it."""
        ...

    def identity(self, key: str) -> tuple[int, int]:
        """(device, inode) of the pool object ``key``."""
        ...


class Tier(StrEnum):
    """How fast, and at what price, an archived object is made readable."""

    BULK = "bulk"
    STANDARD = "standard"
    EXPEDITED = "expedited"


class ColdState(StrEnum):
    """``warm``: it can be read as it is, and will always be. ``archived``: nobody has asked for it. ``thawing``:
    somebody has. ``thawed``: it can be read until the time given with it."""

    WARM = "warm"
    ARCHIVED = "archived"
    THAWING = "thawing"
    THAWED = "thawed"


@dataclass(frozen=True, slots=True)
class Coldness:
    """``storage_class`` as the destination calls it; ``until``: when a thawed copy goes away again (aware, UTC).
    ``refused``, of what was just asked for while it was being thawed: the destination goes on as it was asked
    before."""

    key: str
    size: int
    storage_class: str
    state: ColdState
    until: datetime | None = None
    refused: bool = False


@runtime_checkable
class ArchiveDestination(Destination, Protocol):
    """A destination with the ARCHIVE capability."""

    def coldness(self, key: str) -> Coldness:
        """Raises ObjectMissingError."""
        ...

    def thaw(self, key: str, tier: Tier, days: int) -> Coldness:
        """Ask for ``key`` to be readable for ``days`` days; its state afterwards.

        Repeating is harmless: what is being thawed goes on, faster where ``tier`` is a faster one and the destination
        can do that (else the answer is ``refused``); a thawed copy stays for ``days`` days from now. Raises
        RefusedError for a tier that its storage class does not have, ObjectMissingError.
        """
        ...


@runtime_checkable
class ChecksumDestination(Destination, Protocol):
    """A destination with the CHECKSUMS capability."""

    def checksum(self, key: str) -> str | None:
        """The SHA-256 (64 hex) of the stored bytes of ``key`` as the destination recorded it, without reading them;
        None where it has none for this object. Raises ObjectMissingError."""
        ...


@dataclass(frozen=True, slots=True)
class Version:
    """One of the states that ``key`` was in. ``id``: as the destination calls it, None where it keeps no versions;
    ``modified_at``: since when (aware, UTC); ``newest``: it is what is seen now; ``size``: None where ``key`` was
    deleted then."""

    key: str
    id: str | None
    modified_at: datetime
    newest: bool
    size: int | None


@runtime_checkable
class VersionedDestination(Destination, Protocol):
    """A destination with the VERSIONS capability. None of this asks for the marker, which may be what is hidden."""

    def versions(self, prefix: str) -> Iterator[Version]:
        """Every state of every key that starts with ``prefix``, in the order of keys, the newest of each key first.
        Where no versions are kept, what is there is reported as the only one."""
        ...

    def open_version(self, version: Version) -> BinaryIO:
        """Its bytes; the caller closes it. Raises ObjectMissingError, ArchivedError."""
        ...

    def version_checksum(self, version: Version) -> str | None:
        """As ``checksum``."""
        ...

    def bring_back(self, version: Version, above: Sequence[Version]) -> None:
        """Let ``version`` be what is seen under its key again. ``above``: the deletions that hide it, where nothing
        else does; without any it is stored once more, as it is there. No version is ever removed."""
        ...


def as_versioned(destination: Destination) -> VersionedDestination | None:
    """``destination`` as one that may keep versions, or None where the VERSIONS capability is missing."""
    able = Capability.VERSIONS in destination.capabilities
    return destination if able and isinstance(destination, VersionedDestination) else None


@runtime_checkable
class LockingDestination(Destination, Protocol):
    """A destination with the LOCKS capability."""

    def extend(self, key: str, since: datetime) -> bool:
        """Keep ``key`` locked for at least as long as if it had been stored at ``since`` (aware, UTC); True when that
        had to be asked for. Never shortens. Raises ObjectMissingError."""
        ...


@runtime_checkable
class CopyingDestination(Destination, Protocol):
    """A destination with the COPIES capability."""

    def duplicate(self, source: str, target: str) -> bool:
        """Let ``target`` hold the bytes of ``source``, too, whatever it held before: in one step, durable. They live
        apart from then on, though they may share the same bytes and the time when these were stored. False where this
        destination cannot do it: ``target`` has to be put. Raises ObjectMissingError where there is no ``source``."""
        ...


def as_copying(destination: Destination) -> CopyingDestination | None:
    """``destination`` as one that copies what it holds, or None where the COPIES capability is missing."""
    able = Capability.COPIES in destination.capabilities
    return destination if able and isinstance(destination, CopyingDestination) else None


def as_locking(destination: Destination) -> LockingDestination | None:
    """``destination`` as one that locks what is stored, or None where the LOCKS capability is missing."""
    able = Capability.LOCKS in destination.capabilities
    return destination if able and isinstance(destination, LockingDestination) else None


def as_archive(destination: Destination) -> ArchiveDestination | None:
    """``destination`` as one whose objects may be cold, or None where the ARCHIVE capability is missing."""
    able = Capability.ARCHIVE in destination.capabilities
    return destination if able and isinstance(destination, ArchiveDestination) else None


def thawable(destination: Destination) -> ArchiveDestination | None:
    """``destination`` as one that can be asked whether an object is cold, also where that is not expected; None where
    nothing ever is."""
    able = destination.capabilities & (Capability.ARCHIVE | Capability.RULES)
    return destination if able and isinstance(destination, ArchiveDestination) else None


def is_listed(destination: Destination, key: str) -> bool:
    """Asked about what was just listed and could not be read: is it gone now, or does the destination say both of
    it?"""
    return any(info.key == key for info in destination.list(key))


def exists(destination: Destination, key: str) -> bool:
    """Is anything stored under ``key``? One request. Raises DestinationError."""
    return size_of(destination, key) is not None


def size_of(destination: Destination, key: str) -> int | None:
    """Bytes of what is stored under ``key``, None where nothing is. One request. Raises DestinationError."""
    try:
        return destination.stat(key).size
    except ObjectMissingError:
        return None


def read_whole(destination: Destination, key: str, *, limit: int) -> bytes:
    """Everything under ``key``. Raises DamagedError where that is more than ``limit`` bytes, without reading more."""
    with destination.get(key) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        where = f"{destination.name}: {key}"
        raise DamagedError(
            f"{where} is damaged",
            [f"{where}: it has more than {limit} bytes"],
            hint="no valid document is that large; use another destination's copy",
        )
    return content


def read_note(destination: Destination, key: str) -> Any:
    """The content of the note under ``key``. Raises ValueError for what is no JSON or no note by its length."""
    with destination.get(key) as stream:
        return parsed(stream.read(NOTE_LIMIT + 1), limit=NOTE_LIMIT)


def write_note(destination: Destination, key: str, note: object) -> None:
    """Put a note as JSON, in place of what is under ``key``."""
    destination.put(key, io.BytesIO(json.dumps(note, sort_keys=True).encode("ascii")))


def sha256_of(stream: BinaryIO) -> str:
    """The digest (64 hex) of everything that ``stream`` still yields, read a MiB at a time."""
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def as_tree(destination: Destination) -> TreeDestination | None:
    """``destination`` as one that shows trees, or None where the TREE capability is missing."""
    able = Capability.TREE in destination.capabilities
    return destination if able and isinstance(destination, TreeDestination) else None


def new_marker(now: datetime, *, links: bool) -> bytes:
    """The marker of a repository that is made at ``now``, with a new id. ``links``: the file system knows hard
    links."""
    document = {"format": FORMAT, "id": secrets.token_hex(16), "created_at": format_time(now), "links": links}
    return _marker_bytes(document)


def not_empty(where: str, strangers: Sequence[str], hint: str) -> RefusedError:
    """Why the folder or bucket ``where``, which holds ``strangers``, cannot become a repository."""
    return RefusedError(
        f"{where} is not empty and is not a backupd destination",
        detail=f"it holds {', '.join(strangers[:5])}{' ...' if len(strangers) > 5 else ''}",
        hint=hint,
    )


def _marker_bytes(document: object) -> bytes:
    return (json.dumps(document, sort_keys=True, indent=2) + "\n").encode()


def repository_id(destination: Destination) -> str | None:
    """The same under every name and by every way that leads there. None where the marker has none: one that nobody
    can read, or a destination that needs no marker. Raises DestinationError where the destination does not answer."""
    try:
        document = read_note(destination, layout.REPOSITORY)
    except (ObjectMissingError, ValueError):
        return None
    found_id = document.get("id") if isinstance(document, dict) else None
    return found_id if isinstance(found_id, str) and found_id else None


def marker_problem(found: bytes, noted: bytes | None) -> str:
    """Why the marker ``found`` at a destination is not as it was written; "" where it is. ``noted``: what was seen
    there earlier, None for nothing. One with another id that was made later is of a destination that was made anew."""
    if found == noted:
        return ""
    try:
        document = json.loads(found)
        same = _marker_bytes(document) == found
        made = parse_time(document["created_at"])
        known = isinstance(document["id"], str) and isinstance(document["format"], int | str)
        before = json.loads(noted) if noted is not None else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return "it is no marker of a repository: its bytes differ from what was written"
    if not same or not known:
        return "its bytes differ from what was written"
    if before is None or (document["id"] != before["id"] and made > parse_time(before["created_at"])):
        return ""
    return f"it differs from what was seen there before (its id was {before['id']})"
