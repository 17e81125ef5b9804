"""Segments of archived binary logs at a destination: storing, finding, reading, checking and removing them.

At a destination a segment's parts and index come first and its ``segment.json`` last; it goes first when the segment is
removed. So a folder without ``segment.json`` holds what a dead process left, or what a living one is just writing: such
parts are taken away once nothing was added to them for ``SETTLED``. An upload that goes on after a long
pause puts its parts again, so that they are young, before it commits.

The process that stored a larger segment removes the pieces that it replaced. A sweep does not: without a private key
nobody can tell whether a piece holds the same bytes as the larger segment. So a piece stays until retention removes the
logs where the process that stores may not remove, and where a piece differs from its file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from backupd.model.binlog import Branch, Ending, SegmentKey, Transaction
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    DamagedError,
    DestinationError,
    DestinationFullError,
    LockedError,
    NewerFormatError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
    TamperedError,
    UnreachableError,
)
from backupd.model.manifest import PLAIN_LIMIT, StoredObject
from backupd.transfer.leases import is_alive, pins
from backupd.transfer.records.encryption import Unsealer
from backupd.transfer.records.manifests import get_bytes, get_document, put_bytes
from backupd.transfer.records.segment_documents import (
    Sealed,
    SealedPart,
    SegmentHeader,
    decode_branch,
    decode_index,
    decode_places,
    decode_segment,
    encode_branch,
    encode_segment,
    index_head,
    recorded_digest,
    segment_digest,
)
from backupd.transfer.relay import found_wrong
from storage import layout, objects
from storage.destination import Destination, ObjectInfo, as_copying, size_of

_FRESH = timedelta(hours=1)
"""Parts of an interrupted upload that are younger than this need not be put again."""
_LOG = "a binary log"
SETTLED = timedelta(days=1)
"""Parts without a ``segment.json`` that are older than this are nobody's."""


class SegmentConflictError(RefusedError):
    """Two different binary logs claim the same position in a server's history: neither is overwritten."""


class PartsGoneError(BackupdError):
    """A destination lacks parts that ``key`` took over from pieces, and they are not here any more, or damaged here: it
    is to be sealed anew."""

    def __init__(self, key: SegmentKey) -> None:
        super().__init__(f"parts of binary log {key.number} are to be sealed anew")
        self.key = key


@dataclass(frozen=True, slots=True)
class DamagedSegment:
    """A ``segment.json`` that cannot be read."""

    server: str
    key: SegmentKey
    error: DamagedError


# Storing


def put(destination: Destination, sealed: Sealed, *, now: datetime) -> SegmentHeader:
    """Store a sealed segment and read it back. Safe to call again after any failure.

    One that is there already with the same plaintext stays, once it was found whole. Raises SegmentConflictError when
    there is another one under its key, DestinationError when the destination fails or gives back other bytes.
    """
    header = sealed.header
    present = kept_header(destination, header)
    bad = {} if present is None else problems(destination, present)
    if present is not None and present != header:
        # Sealed another time. Nothing of it is overwritten while it is good; only its end may have become known.
        if not bad:
            if present.segment.ending is Ending.OPEN and header.segment.is_final:
                present = replace(present, segment=replace(present.segment, ending=header.segment.ending))
                _commit(destination, present)
            return present
        remove(destination, header.segment.server, header.segment.key)
        present = None
    there = elsewhere(destination, header) if present is None or bad else {}
    # What is put is young, and shows a sweep that the folder is somebody's: parts that are only linked keep their age.
    for item in sorted(header.sealed, key=lambda one: one.sha256 in there):
        if present is None or header.folder + item.name in bad:
            _put_part(destination, sealed, item, there.get(item.sha256), now)
    if present is None:
        _commit(destination, header)
    gone = [item.name for item in header.sealed if size_of(destination, header.folder + item.name) != item.size]
    if gone:
        raise _lost(destination, header.folder + gone[0], "vanished while it was being stored")
    return header


def kept_header(destination: Destination, header: SegmentHeader) -> SegmentHeader | None:
    """What is under the key of ``header``. One that cannot be read is damaged, and nothing that could be kept, unless
    it reads well and is not ours. Raises SegmentConflictError, NewerFormatError."""
    try:
        found = load_header(destination, header.segment.server, header.segment.key)
    except NewerFormatError:
        raise
    except TamperedError as error:
        raise SegmentConflictError(
            f"{header.key} at destination {destination.name} was not written by backupd",
            detail=error.detail,
            hint=error.hint,
        ) from error
    except (NotFoundError, DamagedError):
        return None
    if found.segment.sha256 != header.segment.sha256:
        raise SegmentConflictError(
            f"destination {destination.name} holds another binary log as {header.segment.file}, bytes "
            f"{header.segment.start} to {header.segment.end}",
            detail=f"{destination.name}:{header.key}: SHA-256 {found.segment.sha256} there, "
            f"{header.segment.sha256} here",
            hint="two installations, or a copy of one, write logs of the same server to this destination; nothing was "
            "overwritten. Give each its own destination",
        )
    return found


def elsewhere(destination: Destination, header: SegmentHeader) -> dict[str, str]:
    """Where sealed parts of other segments of the same file are, by their SHA-256, if the destination copies."""
    segment = header.segment
    if segment.start or as_copying(destination) is None:
        return {}
    found: dict[str, str] = {}
    for key in of_file(destination, segment.server, segment.branch, segment.number):
        if key != segment.key:
            with contextlib.suppress(NotFoundError, DamagedError, ArchivedError):
                other = load_header(destination, segment.server, key)
                found |= {part.stored.sha256: other.folder + part.stored.name for part in other.parts}
    return found


def _put_part(destination: Destination, sealed: Sealed, item: StoredObject, there: str | None, now: datetime) -> None:
    """``there``: where the destination has the same bytes."""
    key = sealed.header.folder + item.name
    try:
        info = destination.stat(key)
        fresh = info.size == item.size and abs(now - info.modified_at) < _FRESH
        if fresh and not _problem(destination, key, item):
            return
    except ObjectMissingError:
        pass
    if there is not None and is_copied(destination, there, key, item):
        return
    try:
        stream = sealed.open(item)
    except FileNotFoundError as error:
        raise PartsGoneError(sealed.header.segment.key) from error
    with stream:
        destination.put(key, stream)
    if problem := _problem(destination, key, item):
        if not sealed.holds(item):
            raise PartsGoneError(sealed.header.segment.key)
        raise _lost(destination, key, problem)


def is_copied(destination: Destination, source: str, key: str, item: StoredObject) -> bool:
    """Does ``key`` hold the bytes of ``source`` now, which should be those of ``item``? They are read, or confirmed by
    a destination that audits itself. False, too, where a copy is refused, by a rule of the destination or since
    ``source`` is in an archive class: what can be stored even so is sent. Raises DestinationError for one that does not
    answer or is full."""
    copying = as_copying(destination)
    try:
        return copying is not None and copying.duplicate(source, key) and not found_wrong(destination, key, item)
    except (UnreachableError, DestinationFullError):
        raise
    except DestinationError:
        return False


def _commit(destination: Destination, header: SegmentHeader) -> None:
    document = encode_segment(header)
    put_bytes(destination, header.key, document)
    if get_bytes(destination, header.key) != document:
        raise _lost(destination, header.key, "is not what was just written")


def _lost(destination: Destination, key: str, problem: str) -> DestinationError:
    return objects.not_kept(
        destination,
        f"{destination.name}:{key}: {problem}",
        "check the storage and its log; the data stays in the spool until it can be stored",
    )


# Finding


def keys(destination: Destination, server: str | None = None, *, prefix: str = "") -> Iterator[tuple[str, SegmentKey]]:
    """(server, key) of every committed segment, in log order within a branch. Reads none. ``prefix`` narrows it."""
    below = prefix or (layout.BINLOGS if server is None else layout.binlogs_folder(server))
    for info in destination.list(below):
        found = layout.segment_of(info.key)
        if found is not None and found[2] == layout.SEGMENT:
            yield found[0], found[1]


def of_file(destination: Destination, server: str, branch: str, number: int) -> list[SegmentKey]:
    """The committed segments of one binary log."""
    return [key for _server, key in keys(destination, prefix=layout.file_prefix(server, branch, number))]


def headers(destination: Destination, server: str | None = None) -> Iterator[SegmentHeader | DamagedSegment]:
    """Every committed segment (of ``server``)."""
    for owner, key in keys(destination, server):
        try:
            yield load_header(destination, owner, key)
        except NotFoundError:
            continue  # removed while we list
        except DamagedError as error:
            yield DamagedSegment(owner, key, error)


def load_header(destination: Destination, server: str, key: SegmentKey) -> SegmentHeader:
    """Raises NotFoundError when there is no such segment here, DamagedError naming the key."""
    path = layout.segment_key(server, key)
    where = f"{destination.name}:{path}"
    try:
        raw = get_document(destination, path)
    except ObjectMissingError as error:
        raise NotFoundError(
            f"destination {destination.name} holds no binary log {key.number} of {server}, bytes "
            f"{key.start} to {key.end}, in branch {key.branch}",
            detail=f"{where} is missing",
            hint="`backupd timeline` lists the archived logs and their destinations",
        ) from error
    return decode_of(raw, where, server, key)


def decode_of(raw: bytes, where: str, server: str, key: SegmentKey) -> SegmentHeader:
    """A description, which has to be that of this segment. Raises DamagedError naming ``where``."""
    header = decode_segment(raw, where=where)
    if (header.segment.server, header.segment.key) != (server, key):
        hint = "another destination may hold a good copy of this binary log"
        raise DamagedError(f"{where} is damaged", [f"{where}: it belongs to {header.key}"], hint=hint)
    return header


def put_branch(destination: Destination, branch: Branch) -> None:
    """Describe ``branch`` at ``destination``; again when more is known of it. Raises NewerFormatError where a later
    version of this program did."""
    document = encode_branch(branch)
    key = layout.branch_key(branch.server, branch.id)
    try:
        found = get_document(destination, key)
        if found == document:
            return
        decode_branch(found, where=f"{destination.name}:{key}")
    except NewerFormatError:
        raise
    except (ObjectMissingError, DamagedError):
        pass
    put_bytes(destination, key, document)


def branches(destination: Destination, server: str | None = None) -> Iterator[Branch | DamagedError]:
    """Every branch that is described here (of ``server``), in the order in which they were noticed."""
    for info in destination.list(layout.BINLOGS if server is None else layout.binlogs_folder(server)):
        owner = layout.branch_of(info.key)
        if owner is None:
            continue
        where = f"{destination.name}:{info.key}"
        try:
            branch = decode_branch(get_document(destination, info.key), where=where)
        except ObjectMissingError:
            continue
        except DamagedError as error:
            yield error
            continue
        if (branch.server, branch.id) == owner:
            yield branch
        else:
            yield DamagedError(f"{where} is damaged", [f"{where}: it describes {branch.id} of {branch.server}"])


# Reading

Instead = Callable[[int, BackupdError], bytes]
"""Gives the plain bytes of a part that could not be read, by its number and why; raises where nobody has them."""


def _nowhere(_number: int, error: BackupdError) -> bytes:
    raise error


def fetch(
    destination: Destination,
    header: SegmentHeader,
    unsealer: Unsealer,
    target: Path,
    *,
    append: bool = False,
    instead: Instead = _nowhere,
) -> None:
    """Write the plain bytes of a segment to ``target``, a new file (0600), or the end of one whose size is its start.

    Every digest is compared; never more than a part is in memory. ``instead`` is asked for a part that is damaged,
    missing or frozen here. On failure ``target`` is as it was before. Raises DamagedError, KeyUnusableError,
    DestinationError, RefusedError when ``target`` is not where the segment goes on.
    """
    before = target.stat().st_size if append else 0
    if append and before != header.segment.start:
        raise RefusedError(
            f"{target} has {before} bytes where the next piece begins at {header.segment.start}",
            hint="pieces of a binary log are joined in order and without gaps",
        )
    flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_APPEND if append else os.O_CREAT | os.O_EXCL)
    with os.fdopen(os.open(target, flags, 0o600), "wb", buffering=0) as file:
        try:
            digest = hashlib.sha256()
            for number, part in enumerate(header.parts):
                try:
                    plain = _unsealed(destination, header, part, unsealer)
                except (DamagedError, ObjectMissingError, ArchivedError) as error:
                    plain = instead(number, error)
                digest.update(plain)
                view = memoryview(plain)
                while view:
                    view = view[file.write(view) :]
            if digest.hexdigest() != header.segment.sha256:
                what = "its parts together are not the binary log that was archived"
                raise objects.damaged(destination, header.key, what, kind=_LOG)
        except BaseException:
            os.ftruncate(file.fileno(), before)
            if not append:
                target.unlink()
            raise


def fetch_range(
    destination: Destination,
    header: SegmentHeader,
    unsealer: Unsealer,
    target: Path,
    begin: int,
    end: int,
    *,
    instead: Instead = _nowhere,
) -> None:
    """Write the plain bytes of a segment that are in ``[begin, end)`` of its file to their positions in ``target``,
    which is there. Parts that hold none of them are not read, nor those whose bytes are there already.

    Raises as ``fetch`` does. Each part is checked by its own digest; that of the segment shows nothing here.
    """
    with target.open("r+b") as file:
        for number, at, part in header.parts_between(begin, end):
            first, last = max(at, begin), min(at + part.size, end)
            if last - first == part.size:
                file.seek(at)
                if hashlib.sha256(file.read(part.size)).hexdigest() == part.sha256:
                    continue
            try:
                plain = _unsealed(destination, header, part, unsealer)
            except (DamagedError, ObjectMissingError, ArchivedError) as error:
                plain = instead(number, error)
            file.seek(first)
            file.write(memoryview(plain)[first - at : last - at])


def read_part(destination: Destination, header: SegmentHeader, number: int, unsealer: Unsealer) -> bytes:
    """The plain bytes of one part, as ``header`` of this or another destination describes it. Where the segment was
    sealed another time here, the header that is here shows what belongs to the same plain bytes. Raises as ``fetch``,
    and NotFoundError."""
    part = header.parts[number]
    try:
        return _unsealed(destination, header, part, unsealer)
    except (DamagedError, ObjectMissingError):
        here = load_header(destination, header.segment.server, header.segment.key)
        same = here.parts[number] if number < len(here.parts) else part
        if same.stored == part.stored or (same.size, same.sha256) != (part.size, part.sha256):
            raise
        return _unsealed(destination, here, same, unsealer)


def read_index(destination: Destination, header: SegmentHeader, unsealer: Unsealer) -> Iterator[Transaction]:
    """The transactions of a segment, in log order. Raises as ``fetch`` does, and TamperedError as ``require_bound``."""
    for part in _index(destination, header, unsealer):
        yield from decode_index(part.splitlines(keepends=True))


def read_places(destination: Destination, header: SegmentHeader, unsealer: Unsealer) -> Iterator[tuple[str, int, int]]:
    """GTID, start and end of each transaction, as ``read_index`` gives them, in a fraction of the time."""
    for part in _index(destination, header, unsealer):
        yield from decode_places(part)


def _index(destination: Destination, header: SegmentHeader, unsealer: Unsealer) -> Iterator[bytes]:
    """The parts of an index, one after the other; the last one is read first."""
    last = require_bound(destination, header, unsealer)
    for part in header.index[:-1]:
        yield _unsealed(destination, header, part, unsealer)
    yield last


def require_bound(destination: Destination, header: SegmentHeader, unsealer: Unsealer) -> bytes:
    """Compare what a description states in the clear with what was sealed; gives the last part of the index. Raises
    TamperedError, and as ``fetch`` does."""
    last = _unsealed(destination, header, header.index[-1], unsealer) if header.index else index_head()
    recorded = recorded_digest(last)
    if recorded != (segment_digest(header) if header.is_bound else ""):
        problem = (
            f"what is sealed is of a later version of the format than {header.version}, which it says"
            if recorded and not header.is_bound
            else "it is not the one that was sealed with it: somebody changed its server, position, times or parts"
        )
        raise TamperedError(
            f"{header.key} at destination {destination.name} does not belong to what is sealed there",
            [f"{destination.name}: {header.key}: {problem}"],
            hint="another destination may hold a good copy of this binary log",
        )
    return last


def _unsealed(destination: Destination, header: SegmentHeader, part: SealedPart, unsealer: Unsealer) -> bytes:
    key = header.folder + part.stored.name
    plain = unsealer.unseal(objects.fetch_side(destination, key, part.stored), limit=min(part.size, PLAIN_LIMIT))
    if len(plain) != part.size or hashlib.sha256(plain).hexdigest() != part.sha256:
        raise objects.damaged(destination, key, "its sealed content is not the archived one", kind=_LOG)
    return plain


# Checking and removing


def problems(destination: Destination, header: SegmentHeader) -> dict[str, str]:
    """Re-reads everything of a segment but its header: what is wrong, by key. Needs no private key."""
    found = {
        header.folder + item.name: _problem(destination, header.folder + item.name, item) for item in header.sealed
    }
    return {key: problem for key, problem in found.items() if problem}


def _problem(destination: Destination, key: str, item: StoredObject) -> str:
    """What is wrong with the bytes under ``key``, by reading them; where they are in an archive class, by the checksum
    that the destination recorded. Raises ArchivedError where it has none."""
    try:
        return objects.problem(destination, key, item)
    except ArchivedError:
        return found_wrong(destination, key, item)


def remove(destination: Destination, server: str, key: SegmentKey) -> None:
    """Take a segment away; nothing happens where there is none."""
    destination.delete(layout.segment_key(server, key))
    for info in list(destination.list(layout.segment_folder(server, key))):
        destination.delete(info.key)


def absent(destination: Destination, header: SegmentHeader) -> list[tuple[str, str]]:
    """What of a segment is missing or not in its size: (key, problem). Reads no byte."""
    present = {info.key: info.size for info in destination.list(header.folder)}
    if header.key not in present:
        return []  # removed in this moment
    return [
        (key, "is missing" if key not in present else f"holds {present[key]} bytes where {item.size} were stored")
        for item in header.sealed
        if present.get(key := header.folder + item.name) != item.size
    ]


def replaced_pieces(target: Destination, server: str, key: SegmentKey) -> tuple[SegmentKey, ...]:
    """The pieces at ``target`` that segment ``key``, which is there, holds."""
    return tuple(other for other in of_file(target, server, key.branch, key.number) if covers(key, other))


def holding(target: Destination, server: str, key: SegmentKey) -> tuple[SegmentKey, ...]:
    """The larger segments at ``target`` that hold what ``key`` did, smallest first: a plan that was made before its
    pieces were replaced finds the same bytes there. Whoever stored them has compared both."""
    found = (other for other in of_file(target, server, key.branch, key.number) if covers(other, key))
    return tuple(sorted(found, key=lambda other: (other.end - other.start, other)))


def drop_pieces(
    target: Destination, server: str, keys: Sequence[SegmentKey], *, now: datetime
) -> tuple[SegmentKey, ...]:
    """Remove pieces; those that are gone. None while a restore reads logs of the server there, and not those that the
    destination lets nobody remove yet: nothing else waits for these."""
    if any(
        is_alive(pin, now) and (pin.owner is None or any(owner == server for owner, _id in pin.backups))
        for pin in pins(target)
    ):
        return ()
    gone: list[SegmentKey] = []
    # A piece that begins with its file may be locked, the others never are: see ``layout.comes_and_goes``.
    for key in sorted(keys, key=lambda one: one.start == 0):
        try:
            remove(target, server, key)
        except LockedError:
            break
        gone.append(key)
    return tuple(gone)


def covers(key: SegmentKey, other: SegmentKey) -> bool:
    return other != key and key.start <= other.start and other.end <= key.end


@dataclass(frozen=True, slots=True)
class Strays:
    """What is among the binary logs and belongs to no segment. ``parts``: of segments without ``segment.json``, or of
    none; ``strangers``: keys of files that are not ours."""

    parts: tuple[ObjectInfo, ...]
    strangers: tuple[str, ...]


def strays(destination: Destination, *, now: datetime) -> Strays:
    """Without parts that may be those of a living upload, and a new branch's description."""
    found: list[ObjectInfo] = []
    strangers: list[str] = []
    folder: list[ObjectInfo] = []
    path = ""
    for info in destination.list(layout.BINLOGS):
        owner = layout.segment_of(info.key)
        if owner is None:
            if layout.branch_of(info.key.removesuffix(layout.SIGNATURE)) is None:
                strangers.append(info.key)
            continue
        if owner[2].removesuffix(layout.SIGNATURE) != layout.SEGMENT and not layout.is_sealed_log(owner[2]):
            strangers.append(info.key)
            continue
        above = info.key.rpartition("/")[0]
        if above != path:
            found += _left(folder, now)
            folder, path = [], above
        folder.append(info)
    found += _left(folder, now)
    return Strays(tuple(found), tuple(strangers))


def _left(folder: list[ObjectInfo], now: datetime) -> list[ObjectInfo]:
    """The content of one segment's folder, if it is nobody's."""
    if not folder or any(info.key.endswith(f"/{layout.SEGMENT}") for info in folder):
        return []
    return folder if max(info.modified_at for info in folder) < now - SETTLED else []


def clear_strays(destination: Destination, *, now: datetime) -> list[str]:
    """Remove the parts that dead uploads left; their keys."""
    removed: list[str] = []
    for above in dict.fromkeys(info.key.rpartition("/")[0] + "/" for info in strays(destination, now=now).parts):
        for info in _left(list(destination.list(above)), now):  # once more: somebody may have gone on with it
            destination.delete(info.key)
            removed.append(info.key)
    return removed
