"""Objects to files: read, verified, unsealed, verified again, written; in parallel, from the best copy that
is good.

An earlier attempt needs no journal. What is in the folder is hashed, slice by slice, and only what is not
already right is fetched: after a kill -9, after a prepare that was cut short, after anything.

``Assembly`` is a file being put together from slices that arrive in any order, possibly on top of an earlier attempt.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import stat
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    CancelledError,
    DamagedError,
    DestinationError,
    StreamError,
)
from backupd.model.job import Progress
from backupd.model.manifest import PLAIN_LIMIT, Body, Entry, Part, StoredObject
from backupd.model.text import few
from backupd.process.folders import opened
from backupd.process.run_context import RunContext
from restore.datadir.staging import sync_filesystem
from restore.fetch.sources import Loaded, Sources, folders_above
from storage import layout, objects
from storage.destination import Destination

_BLOCK = 4096
_ZEROS = bytes(_BLOCK)
_CHUNK = 1024 * 1024

MOST_WORKERS = 4
"""Each holds one object, sealed and open, at most about 2.5 parts of 16 MiB; the daemon's memory is bounded
by it."""
_NAMED = 5
_LINE = 400
_READ = os.O_RDONLY | os.O_NOFOLLOW
_TAR_PER_MEMBER = 8 * 1024
_TAR_END = 64 * 1024


@dataclass(slots=True, eq=False)
class Assembly:
    """One entry at ``path``. Slices are its parts, or the whole file where it comes out of a bundle.

    ``fresh``: nothing was there before, so that what is never written reads as zeros. Thread-safe per slice:
    each slice is written by one thread. The file's own digest is computed on the way, from memory as long as
    slices arrive in order.
    """

    entry: Entry
    path: Path
    fresh: bool
    _slices: Sequence[Entry | Part] = field(init=False)
    _offsets: list[int] = field(init=False)
    _hasher: hashlib._Hash | None = field(init=False)
    _written: set[int] = field(default_factory=set)
    _next: int = 0
    _judged: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._slices = [self.entry] if self.entry.bundle or not self.entry.parts else self.entry.parts
        self._offsets = [0, *accumulate(one.size for one in self._slices)]
        self._hasher = hashlib.sha256() if len(self._slices) > 1 else None

    def size_of(self, index: int) -> int:
        """Bytes of the slice of that number (from 0)."""
        return self._slices[index].size

    def digest_of(self, index: int) -> str:
        """SHA-256 (hex) of the slice of that number (from 0)."""
        return self._slices[index].sha256

    def intact(self, index: int) -> bool:
        """Does the disk hold this slice already, by its hash? Then it is taken as written."""
        if self.fresh or not self._holds(self._offsets[index], self._slices[index]):
            return False
        self._note(index, None)
        return True

    def _holds(self, offset: int, wanted: Entry | Part) -> bool:
        try:
            with opened(self.path, _READ) as descriptor:
                if os.fstat(descriptor).st_size != self.entry.size:
                    return False
                if wanted.size and not self.entry.sparse and _is_hole(descriptor, offset, wanted.size):
                    return False
                hasher = hashlib.sha256()
                _hash_range(hasher, descriptor, offset, wanted.size)
                return hasher.hexdigest() == wanted.sha256
        except FileNotFoundError:
            return False

    def write(self, index: int, payload: bytes | memoryview) -> None:
        """Put a verified slice in its place. Raises BackupdError when the file system will not take it."""
        try:
            with opened(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as descriptor:
                if os.fstat(descriptor).st_size != self.entry.size:
                    os.ftruncate(descriptor, self.entry.size)
                write = _write_sparse if self.entry.sparse and self.fresh else _write
                write(descriptor, self._offsets[index], memoryview(payload))
        except OSError as error:
            raise BackupdError(
                f"cannot write {self.path}: {os.strerror(error.errno or 0)}",
                hint="free some space there and repeat the command; the fetched files are kept"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else "correct the cause, then repeat the command",
            ) from error
        self._note(index, payload)

    def _note(self, index: int, payload: bytes | memoryview | None) -> None:
        """Advance the file's digest over every slice that is there in order."""
        with self._lock:
            self._written.add(index)
            if self._hasher is None:
                return
            if payload is not None and index == self._next:
                self._hasher.update(payload)
                self._next += 1
            if self._next not in self._written:
                return
            with opened(self.path, _READ) as descriptor:
                while self._next in self._written:
                    _hash_range(self._hasher, descriptor, self._offsets[self._next], self.size_of(self._next))
                    self._next += 1

    def judge(self) -> bool | None:
        """Once, when every slice is there: is it, as a whole, the file that was backed up? None before and
        after."""
        with self._lock:
            if self._judged or len(self._written) < len(self._slices):
                return None
            self._judged = True
            return self._hasher is None or self._hasher.hexdigest() == self.entry.sha256


def lay_out(entries: Sequence[Entry], folder: Path) -> list[Assembly]:
    """Make the folders, remove what does not belong, and see which files are there already."""
    wanted = {entry.path for entry in entries}
    folders = {parent for path in wanted for parent in folders_above(path)}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    present = set(_tidy(folder, wanted, folders))
    for path in sorted(folders):
        (folder / path).mkdir(mode=0o700, exist_ok=True)
    return [Assembly(entry, folder / entry.path, fresh=entry.path not in present) for entry in entries]


def _tidy(folder: Path, wanted: set[str], folders: set[str], prefix: str = "") -> Iterator[str]:
    """Remove everything but wanted regular files; yields those that are there."""
    with os.scandir(folder) as found:
        for entry in list(found):
            path = prefix + entry.name
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                if path in folders:
                    yield from _tidy(Path(entry.path), wanted, folders, f"{path}/")
                else:
                    shutil.rmtree(entry.path)
            elif stat.S_ISREG(mode) and path in wanted:
                yield path
            else:
                Path(entry.path).unlink()


def _is_hole(descriptor: int, offset: int, size: int) -> bool:
    """Was nothing ever written here? True only where the file system can tell."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) >= offset + size
    except OSError as error:
        return error.errno == errno.ENXIO


def _hash_range(hasher: hashlib._Hash, descriptor: int, offset: int, size: int) -> None:
    while size:
        chunk = os.pread(descriptor, min(size, _CHUNK), offset)
        if not chunk:
            return
        hasher.update(chunk)
        offset += len(chunk)
        size -= len(chunk)


def _write(descriptor: int, offset: int, payload: memoryview) -> None:
    while payload:
        done = os.pwrite(descriptor, payload, offset)
        offset += done
        payload = payload[done:]


def _write_sparse(descriptor: int, offset: int, payload: memoryview) -> None:
    """Write runs of blocks that hold something; blocks of zeros stay holes."""
    start = None
    for at in range(0, len(payload), _BLOCK):
        block = payload[at : at + _BLOCK]
        empty = block == _ZEROS if len(block) == _BLOCK else not any(block)
        if empty and start is not None:
            _write(descriptor, offset + start, payload[start:at])
            start = None
        elif not empty and start is None:
            start = at
    if start is not None:
        _write(descriptor, offset + start, payload[start:])


@dataclass(frozen=True, slots=True)
class Fetched:
    """``bytes`` of plaintext and ``files`` that are now there; ``reused`` bytes of them were there before.

    ``repaired``: damage that was met and got around with another copy; one line each, worth reporting.
    """

    bytes: int
    files: int
    reused: int
    repaired: tuple[str, ...]


def default_workers() -> int:
    """One more than the processors that this process may use; 2 at least."""
    return max(2, min(MOST_WORKERS, len(os.sched_getaffinity(0)) + 1))


def fetch(loaded: Loaded, sources: Sources, folder: Path, context: RunContext, *, durable: bool = True) -> Fetched:
    """Make ``folder`` hold exactly the files of the backup, each proved by its SHA-256.

    ``folder`` belongs to us: what else is in it is removed. ``durable``: everything is on disk before this returns.
    Of a part of a backup, a bundle holds its members, whether they are wanted or not. The entries were judged by
    ``check_entries``.

    Raises DamagedError naming every object that no destination holds undamaged, and the files it is for;
    ArchivedError when they have to be thawed first; DestinationError when they could not be read for other reasons;
    KeyUnusableError, ToolError, CancelledError.
    """
    job = _Job(loaded, sources, folder, context)
    workers = context.workers or default_workers()
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="fetch") as pool:
        for future in [pool.submit(job.work) for _ in range(workers)]:
            future.result()
    job.raise_damage()
    if durable:
        sync_filesystem(folder)
    return Fetched(job.total, len(loaded.body.entries), job.reused, tuple(job.repaired))


@dataclass(slots=True)
class _Item:
    """One object and the slices it is good for (more than one where files have equal content). ``limit``: bytes that it
    may open to, at most."""

    stored: StoredObject
    limit: int
    bundle: bool
    uses: list[tuple[Assembly, int]]

    @property
    def size(self) -> int:
        return sum(assembly.size_of(index) for assembly, index in self.uses)


class _Job:
    def __init__(self, loaded: Loaded, sources: Sources, folder: Path, context: RunContext) -> None:
        self._sources, self._context = sources, context
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._damages: list[tuple[str, bool]] = []
        self._archived: set[str] = set()
        self._failed: set[str] = set()
        self.repaired: list[str] = []
        self.reused = 0
        self.total = sum(entry.size for entry in loaded.body.entries)
        self._bytes = self._files = 0
        assemblies = lay_out(loaded.body.entries, folder)
        self._all_files = len(assemblies)
        for assembly in assemblies:
            if not assembly.entry.objects:
                assembly.write(0, b"")
                self._files += 1
        stored = {item.name: item for item in loaded.header.objects}
        self._items = iter(_items(assemblies, stored, _limits(loaded.whole or loaded.body)))

    def work(self) -> None:
        """One thread's share. Any error that is not damage ends all of them."""
        try:
            while (item := self._take()) is not None:
                self._assemble(item)
        except BaseException:
            self._stop.set()
            raise

    def _take(self) -> _Item | None:
        with self._lock:
            if self._stop.is_set():
                return None
            if self._context.is_cancelled():
                raise CancelledError(
                    "the restore was cancelled while fetching",
                    hint="the same command continues where it stopped",
                )
            return next(self._items, None)

    def _assemble(self, item: _Item) -> None:
        missing = [(assembly, index) for assembly, index in item.uses if not assembly.intact(index)]
        reused = item.size - sum(assembly.size_of(index) for assembly, index in missing)
        if missing:
            failures: list[tuple[str, bool]] = []
            for destination in self._sources.destinations:
                problem = self._try(destination, item, missing)
                if problem is None:
                    break
                failures.append((f"{problem[0]}; needed by {_names(item)}", problem[1]))
            else:
                with self._lock:
                    self._damages += failures
                    self._failed.add(item.stored.name)
                return
            with self._lock:
                self.repaired += [line for line, _ in failures]
        self._count(item, reused)

    def _try(
        self, destination: Destination, item: _Item, missing: Sequence[tuple[Assembly, int]]
    ) -> tuple[str, bool] | None:
        """What is wrong with this copy, and whether that is damage (True) or trouble; None when all is
        written."""
        try:
            sealed = objects.fetch(destination, item.stored)
        except DamagedError as error:
            return " ".join(error.damages), True
        except DestinationError as error:
            if isinstance(error, ArchivedError):
                with self._lock:
                    self._archived.add(item.stored.name)
            return error.line[:_LINE], False
        try:
            plain = self._sources.unsealer.unseal(sealed, limit=item.limit)
            del sealed
            slices = list(_unpacked(plain, missing) if item.bundle else ((a, i, plain) for a, i in missing))
            for assembly, index, content in slices:
                _verify(assembly, index, content)
        except (DamagedError, StreamError) as error:
            return f"{destination.name}: {layout.object_key(item.stored.name)}: {error.line[:_LINE]}", True
        for assembly, index, content in slices:
            assembly.write(index, content)
        return None

    def _count(self, item: _Item, reused: int) -> None:
        judged = [(assembly, assembly.judge()) for assembly in {id(a): a for a, _ in item.uses}.values()]
        wrong = [
            f"{assembly.entry.path!r}: its parts are intact, but do not form the original file"
            for assembly, verdict in judged
            if verdict is False
        ]
        with self._lock:
            self._damages += [(line, True) for line in wrong]
            self._files += sum(verdict is True for _, verdict in judged)
            self.reused += reused
            self._bytes += item.size
            progress = Progress("fetch", self._bytes, self.total, self._files, self._all_files)
        self._context.report(progress)

    def raise_damage(self) -> None:
        lines = sorted({line for line, _ in self._damages})
        if not lines:
            return
        # What is damaged at one destination and archived at another can still be had.
        if self._failed and self._failed <= self._archived:
            raise ArchivedError(
                f"{len(self._failed)} stored objects are in an archive class, and no other copy of them can be read",
                detail="\n".join(lines[:50]),
                hint="thaw them first: `backupd thaw SERVER --to TARGET`, or repeat this with --thaw TIER; if a rule "
                "of the bucket moved them there, set that class as storage_class of the destination",
            )
        if any(damage for _, damage in self._damages):
            raise DamagedError(
                f"{len(lines)} stored objects are damaged or missing, and no other copy has them",
                lines,
                hint="restore another backup (`backupd backups`), or restore these objects from another source; "
                "`backupd verify` checks all of them",
            )
        raise DestinationError(
            "the backup could not be read",
            detail="\n".join(lines[:50]),
            hint="check that the destination can be reached, then repeat the command: it continues",
        )


def _limits(body: Body) -> Mapping[str, int]:
    """The most bytes that each object may open to."""
    limits: dict[str, int] = {}
    for entry in body.entries:
        if entry.bundle:
            limits[entry.bundle] = limits.get(entry.bundle, _TAR_END) + entry.size + _TAR_PER_MEMBER
        for part in entry.parts:
            limits[part.object] = max(limits.get(part.object, 0), part.size)
    return {name: min(limit, PLAIN_LIMIT) for name, limit in limits.items()}


def _items(
    assemblies: Sequence[Assembly], stored: Mapping[str, StoredObject], limits: Mapping[str, int]
) -> list[_Item]:
    """Work in the order of the files, so that parts of one file follow each other."""
    items: dict[str, _Item] = {}
    for assembly in assemblies:
        for index, name in enumerate(assembly.entry.objects):
            item = items.setdefault(name, _Item(stored[name], limits[name], bool(assembly.entry.bundle), []))
            item.uses.append((assembly, index))
    return list(items.values())


def _verify(assembly: Assembly, index: int, content: bytes) -> None:
    if len(content) != assembly.size_of(index) or hashlib.sha256(content).hexdigest() != assembly.digest_of(index):
        raise StreamError(f"{assembly.entry.path!r}: the decrypted file differs from the one backed up")


def _unpacked(plain: bytes, wanted: Sequence[tuple[Assembly, int]]) -> Iterator[tuple[Assembly, int, bytes]]:
    """The members that are wanted. Nothing is extracted by name of the archive: what else is in it is not
    touched."""
    try:
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            members = {member.name: member for member in tar.getmembers() if member.isreg()}
            for assembly, index in wanted:
                member = members.get(assembly.entry.path)
                reader = tar.extractfile(member) if member else None
                if reader is None:
                    raise StreamError(f"{assembly.entry.path!r} is not in its bundle")
                yield assembly, index, reader.read()
    except tarfile.TarError as error:
        raise StreamError(f"a bundle is not a tar archive: {error}") from error


def _names(item: _Item) -> str:
    paths = sorted({assembly.entry.path for assembly, _ in item.uses})
    return few(map(repr, paths), _NAMED, "more files")
