"""Putting damaged bytes right from another destination's copy. Needs no private key: bytes are compared with what the
manifest or the segment recorded before they are put, and read again where they were put.

What was damaged gives way first: a place that never overwrites would keep it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from backupd.model.binlog import SegmentKey
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
from backupd.model.manifest import Header, StoredObject, decode_header
from backupd.model.text import Clock
from backupd.transfer import log_segments
from backupd.transfer.copies import copy_segment, copy_signature, good_copy
from backupd.transfer.guards.pins_and_intents import Intent
from backupd.transfer.past_versions import earlier
from backupd.transfer.records.manifests import get_bytes, load_header, put_bytes
from backupd.transfer.records.segment_documents import SegmentHeader
from backupd.transfer.relay import Check, Relay
from backupd.transfer.scrub import recorded
from storage.contract import layout, objects
from storage.contract.destination import Destination, TreeDestination, as_versioned, sha256_of
from storage.contract.objects import not_kept


def put_right(target: Destination, key: str, item: StoredObject, sources: Sequence[Destination]) -> str:
    """Make ``key`` at ``target`` hold the bytes of ``item`` again, and end its quarantine; the name of the source.
    Where the target has them in an earlier version, that one comes back, and nothing has to be sent.

    Raises DamagedError naming every source when none has them, DestinationError when the target fails, or keeps other
    bytes than it is given.
    """
    if _from_earlier(target, key, item):
        _released(target, key, item)
        return f"an earlier version at {target.name}"
    failures: list[str] = []
    for source in sources:
        try:
            content = objects.fetch_side(source, key, item)
        except DamagedError as error:
            failures += error.damages
            continue
        except DestinationError as error:
            failures.append(error.message)
            continue
        with contextlib.suppress(LockedError):  # then it lies in a bucket with versions: the newest one counts
            target.delete(key)
        put_bytes(target, key, content)
        if problem := _problem(target, key, item):
            raise not_kept(
                target, f"{target.name}:{key}: {problem}", "look at the medium and its log: it may be about to fail"
            )
        _released(target, key, item)
        return source.name
    raise _nowhere(f"no other destination has the true bytes of {key}", key, failures)


def _from_earlier(target: Destination, key: str, item: StoredObject) -> bool:
    """Whatever stands in the way of that (no right to it, no versions) leaves it to the other copies."""
    try:
        found = earlier(target, key, item)
        place = as_versioned(target)
        if found is None or place is None:
            return False
        place.bring_back(*found)
        return not _problem(target, key, item)
    except (DestinationError, ForbiddenError, RefusedError):
        return False


def _released(target: Destination, key: str, item: StoredObject) -> None:
    if key.startswith(layout.OBJECTS):
        objects.release(target, item.name)


def put_manifest_right(
    target: Destination, server: str, backup_id: str, sources: Sequence[Destination], *, clock: Clock
) -> str:
    """Replace a damaged manifest by that of another copy, byte for byte; the name of the source. Raises as
    ``put_right`` does."""
    key = layout.manifest_key(server, backup_id)
    _refuse_newer(lambda: load_header(target, server, backup_id))
    failures: list[str] = []
    for source in sources:
        where = f"{source.name}:{key}"
        try:
            raw = get_bytes(source, key)
            header = decode_header(raw, where=where)
            if (header.server, header.backup_id) != (server, backup_id):
                raise DamagedError(f"{where} is damaged", [f"{where}: it belongs to {header.backup_id}"])
        except DamagedError as error:
            failures += error.damages
            continue
        except DestinationError as error:
            failures.append(error.message)
            continue
        # Somebody may sweep between the two writes of a place that does not replace what is whole, though wrong.
        with Intent([target], server, backup_id, clock=clock):
            copy_signature(Relay([source], target, check=_go_on, moved=_unheard), key)
            try:
                put_bytes(target, key, raw)
            except DestinationError:
                target.delete(key)
                put_bytes(target, key, raw)
            if get_bytes(target, key) != raw:
                raise not_kept(target, f"{target.name}:{key} is not what was just written")
        return source.name
    raise _nowhere(f"no other destination has the manifest of {backup_id}", key, failures)


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
    ``put_right`` does, NotFoundError when it lies nowhere else."""
    place = layout.segment_key(server, key)
    wrong = set(damaged)
    if place not in wrong:
        header = log_segments.load_header(target, server, key)
        items = {header.folder + item.name: item for item in header.sealed}
        try:
            return ", ".join(dict.fromkeys(put_right(target, one, items[one], sources) for one in sorted(wrong)))
        except DamagedError:
            twin = _twin(header, sources)
            log_segments.remove(target, server, key)
            sources = [twin]
    copied_from = [source for source in sources if _has(source, place)] or list(sources)
    relay = Relay(copied_from, target, check=check, moved=_unheard)
    if place in wrong:
        _refuse_newer(lambda: log_segments.load_header(target, server, key))
        good_copy(relay, server, key)  # or else what lies there stays, damaged as it is
        with contextlib.suppress(LockedError):
            target.delete(place)
    header = copy_segment(relay, server, key, clock=clock)
    if problems := log_segments.problems(target, header):
        raise not_kept(target, "\n".join(f"{one}: {problem}" for one, problem in problems.items()))
    return copied_from[0].name


def show_again(tree: TreeDestination, header: Header, before: Mapping[tuple[int, int], str]) -> bool:
    """Let the tree of a backup show objects that were replaced; ``before``: the inodes that they had. False when it
    cannot be told which path is which object: then `fsck --repair`, which can open the body, shows it afresh."""
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
        found = names.get(inode) or digests.get(_digest(tree, name, path))
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


def _digest(tree: TreeDestination, name: str, path: str) -> str:
    with tree.open_tree_file(name, path) as stream:
        return sha256_of(stream)


def _problem(target: Destination, key: str, item: StoredObject) -> str:
    """What is wrong with what was just put; of what went into an archive class, by the place's own checksum."""
    try:
        return objects.problem(target, key, item)
    except ArchivedError:
        return recorded(target, key, item)[1]


def _nowhere(message: str, key: str, failures: Sequence[str]) -> DamagedError:
    return DamagedError(message, failures or [f"{key}: it lies nowhere else"])


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


def _go_on() -> None:
    """Nobody stops a repair of one small thing."""


def _unheard(_size: int) -> None:
    """Nobody is told."""
