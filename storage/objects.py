"""The content-addressed pool: sealed objects under names that say what is inside.

OpenPGP output differs each time, so an object is found again by the *identity* of its plaintext: a keyed hash, which
shows nothing about the content to somebody without the key.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from backupd.model.errors import ArchivedError, DamagedError, DestinationError, LockedError, ObjectMissingError
from backupd.model.manifest import StoredObject
from backupd.model.text import format_time
from storage import layout
from storage.destination import Destination, read_note, size_of, write_note

POOL_LIMIT = 80 * 1024 * 1024
"""Most bytes of an object in the pool, or of a part of a binary log, which hold 16 MiB; a file with holes costs its
writer nothing."""
SIDE_LIMIT = 1024**3
"""Most bytes of a side file: of a body with more than ten million entries."""
_CHUNK = 1024 * 1024
_RELEASED = "released"
_READERS = 8
"""Notes of quarantine that are read at once."""


def identity(key: bytes, plain_sha256: bytes, size: int, codec: str, recipients: Sequence[str]) -> str:
    """64 hex: HMAC-SHA-256 under the repository's ``key`` over what makes two objects interchangeable.

    ``plain_sha256`` is the 32 byte digest and ``size`` the length (bytes) of the plaintext; ``recipients`` are full
    fingerprints in any order, since a hit on an object that another key opens would be unreadable.
    """
    if not key:
        raise ValueError("an empty key would make identities guessable")
    fields = {"codec": codec, "plain_sha256": plain_sha256.hex(), "recipients": sorted(set(recipients)), "size": size}
    return hmac.new(key, json.dumps(fields, sort_keys=True).encode("ascii"), hashlib.sha256).hexdigest()


def named(object_identity: str, sealed: bytes) -> StoredObject:
    """What ``sealed`` is called in every pool."""
    digest = hashlib.sha256(sealed).hexdigest()
    return StoredObject(layout.object_name(object_identity, digest), len(sealed), digest)


def store(destination: Destination, item: StoredObject, sealed: bytes) -> None:
    """Put ``sealed``, which ``named`` called ``item``, into the pool; where it is already it stays as it is."""
    key = layout.object_key(item.name)
    if size_of(destination, key) != item.size:
        destination.put(key, io.BytesIO(sealed))


def fetch(destination: Destination, item: StoredObject) -> bytes:
    """The stored bytes of ``item``. Raises DamagedError naming destination and key unless they are exactly those."""
    return _verified(destination, layout.object_key(item.name), item, POOL_LIMIT)


def fetch_side(destination: Destination, key: str, item: StoredObject) -> bytes:
    """Like ``fetch`` for a body, unpack script or runbook, which are under their own ``key``."""
    return _verified(destination, key, item, SIDE_LIMIT)


def _verified(destination: Destination, key: str, item: StoredObject, limit: int) -> bytes:
    if item.size > limit:
        raise damaged(destination, key, f"it is said to hold {item.size} bytes, where none of ours has over {limit}")
    try:
        # One byte more than promised, so that bytes appended to an object are noticed and never all read.
        with destination.get(key, length=item.size + 1) as stream:
            data = stream.read()
    except ObjectMissingError as error:
        raise damaged(destination, key, "it is missing") from error
    if len(data) != item.size:
        more = "more than " if len(data) > item.size else ""
        size_seen = item.size if more else len(data)
        raise damaged(destination, key, f"it holds {more}{size_seen} bytes where {item.size} were stored")
    if hashlib.sha256(data).hexdigest() != item.sha256:
        raise damaged(destination, key, f"its {item.size} bytes are not those that were stored (SHA-256 differs)")
    return data


def problem(destination: Destination, key: str, item: StoredObject) -> str:
    """What is wrong with the bytes under ``key``, which should be those of ``item``; "" when nothing is. Reads them
    all, a piece at a time."""
    digest = hashlib.sha256()
    size = 0
    try:
        with destination.get(key) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except ObjectMissingError:
        return "is missing"
    except OSError as error:  # the medium itself: a bad sector is damage, not a reason to stop looking
        return f"cannot be read: {error.strerror or error}"
    if size != item.size:
        return f"holds {size} bytes where {item.size} were stored"
    return "" if digest.hexdigest() == item.sha256 else "holds other bytes than were stored (SHA-256 differs)"


def damaged(destination: Destination, key: str, what: str, *, kind: str = "an object") -> DamagedError:
    """The error for stored bytes of ``kind`` under ``key`` that cannot be used. ``what``: what is wrong with them."""
    return DamagedError(
        f"{kind} at destination {destination.name} is damaged",
        [f"{destination.name}: {key}: {what}"],
        hint="restore from another destination's copy; then run backupd verify to find other damage",
    )


def not_kept(destination: Destination, detail: str, hint: str = "") -> DestinationError:
    """The error for a destination that gives back other bytes than it was given. ``detail``: which, a line for each."""
    return DestinationError(
        f"destination {destination.name} does not return the bytes that were written to it", detail=detail, hint=hint
    )


def quarantine(destination: Destination, name: str, reason: str, now: datetime) -> None:
    """Remember that object ``name`` is damaged: later backups store its content afresh instead of naming it again."""
    note = {"object": name, "reason": reason, "at": format_time(now)}
    write_note(destination, layout.quarantine_key(name), note)


def release(destination: Destination, name: str) -> None:
    """Take ``name`` out of quarantine, after its bytes were put back. Where nothing may be deleted the note says from
    then on that it is over."""
    key = layout.quarantine_key(name)
    try:
        destination.delete(key)
    except LockedError:
        note = {"object": name, _RELEASED: True}
        write_note(destination, key, note)


def quarantined(destination: Destination) -> frozenset[str]:
    """Names of all objects in quarantine."""
    notes = [info.key for info in destination.list(layout.QUARANTINE)]
    if not notes:
        return frozenset()
    with ThreadPoolExecutor(max_workers=min(_READERS, len(notes)), thread_name_prefix="quarantine") as pool:
        released = pool.map(lambda key: _is_released(destination, key), notes)
        return frozenset(layout.name_in(key) for key, over in zip(notes, released, strict=True) if not over)


def _is_released(destination: Destination, key: str) -> bool:
    """A note that cannot be read counts."""
    try:
        note = read_note(destination, key)
    except ObjectMissingError:
        return True
    except (ArchivedError, ValueError):
        return False
    return isinstance(note, dict) and note.get(_RELEASED) is True
