"""Objects to files: read, verified, unsealed, verified again, written; in parallel, from the best copy that
is good.

An earlier attempt needs no journal. What lies in the folder is hashed, slice by slice, and only what is not
already right is fetched: after a kill -9, after a prepare that was cut short, after anything.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    CancelledError,
    DamagedError,
    DestinationError,
    StreamError,
)
from backupd.model.job import Progress, Report
from backupd.model.manifest import PLAIN_LIMIT, Body, Header, StoredObject
from restore.fetch.assembly import Assembly, lay_out
from storage.contract import layout, objects
from storage.contract.destination import Destination

MOST_WORKERS = 4
"""Each holds one object, sealed and open, at most about 2.5 parts of 16 MiB; the daemon's memory is bounded
by it."""
_NAMED = 5
_TAR_PER_MEMBER = 8 * 1024
_TAR_END = 64 * 1024


class Opener(Protocol):
    """``transfer.unseal.Unsealer``: at most ``limit`` bytes, after gpg has agreed to all."""

    def unseal(self, stored: bytes, *, limit: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """``bytes`` of plaintext and ``files`` that are now there; ``reused`` bytes of them were there before.

    ``repaired``: damage that was met and got around with another copy; one line each, worth telling.
    """

    bytes: int
    files: int
    reused: int
    repaired: tuple[str, ...]


def default_workers() -> int:
    return max(2, min(MOST_WORKERS, len(os.sched_getaffinity(0)) + 1))


def fetch(
    header: Header,
    body: Body,
    destinations: Sequence[Destination],
    unsealer: Opener,
    folder: Path,
    *,
    workers: int,
    report: Report,
    cancelled: Callable[[], bool] = lambda: False,
    durable: bool = True,
    whole: Body | None = None,
) -> Fetched:
    """Make ``folder`` hold exactly the files of the backup, each proved by its SHA-256.

    ``destinations`` in the order to try them. ``folder`` belongs to us: what else lies in it is removed.
    ``durable``: everything is on disk before this returns. ``whole``: the body of the backup where ``body`` is a part
    of it; a bundle holds its members, whether they are wanted or not. The entries were judged by
    ``names.check_entries``.

    Raises DamagedError naming every object that no destination holds undamaged, and the files it is for;
    ArchivedError when they have to be thawed first; DestinationError when they could not be read for other reasons;
    KeyUnusableError, ToolError, CancelledError.
    """
    job = _Job(
        header,
        body,
        folder,
        destinations=destinations,
        unsealer=unsealer,
        report=report,
        cancelled=cancelled,
        whole=whole or body,
    )
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="fetch") as pool:
        for future in [pool.submit(job.work) for _ in range(workers)]:
            future.result()
    job.raise_damage()
    if durable:
        sync_filesystem(folder)
    return Fetched(job.total, len(body.entries), job.reused, tuple(job.repaired))


def sync_filesystem(path: Path) -> None:
    """Force everything written on ``path``'s file system to disk: one call instead of one per file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise BackupdError(
                f"cannot write {path} to disk: {os.strerror(ctypes.get_errno())}",
                hint="the disk is failing or full; look at the kernel's log",
            )
    finally:
        os.close(descriptor)


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
    def __init__(
        self,
        header: Header,
        body: Body,
        folder: Path,
        *,
        destinations: Sequence[Destination],
        unsealer: Opener,
        report: Report,
        cancelled: Callable[[], bool],
        whole: Body,
    ) -> None:
        self._destinations = destinations
        self._unsealer = unsealer
        self._report = report
        self._cancelled = cancelled
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._damages: list[tuple[str, bool]] = []
        self._archived: set[str] = set()
        self._failed: set[str] = set()
        self.repaired: list[str] = []
        self.reused = 0
        self.total = sum(entry.size for entry in body.entries)
        self._bytes = self._files = 0
        assemblies = lay_out(body.entries, folder)
        self._all_files = len(assemblies)
        for assembly in assemblies:
            if not assembly.entry.objects:
                assembly.write(0, b"")
                self._files += 1
        self._items = iter(_items(assemblies, {stored.name: stored for stored in header.objects}, _limits(whole)))

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
            if self._cancelled():
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
            for destination in self._destinations:
                problem = self._try(destination, item, missing)
                if problem is None:
                    break
                failures.append((f"{problem[0]}; it is for {_names(item)}", problem[1]))
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
            return _one_line(error), False
        try:
            plain = self._unsealer.unseal(sealed, limit=item.limit)
            del sealed
            slices = list(_unpacked(plain, missing) if item.bundle else ((a, i, plain) for a, i in missing))
            for assembly, index, content in slices:
                _verify(assembly, index, content)
        except (DamagedError, StreamError) as error:
            return f"{destination.name}: {layout.object_key(item.stored.name)}: {_one_line(error)}", True
        for assembly, index, content in slices:
            assembly.write(index, content)
        return None

    def _count(self, item: _Item, reused: int) -> None:
        judged = [(assembly, assembly.judge()) for assembly in {id(a): a for a, _ in item.uses}.values()]
        wrong = [
            f"{assembly.entry.path!r}: its parts are good, together they are not the file"
            for assembly, verdict in judged
            if verdict is False
        ]
        with self._lock:
            self._damages += [(line, True) for line in wrong]
            self._files += sum(verdict is True for _, verdict in judged)
            self.reused += reused
            self._bytes += item.size
            progress = Progress("fetch", self._bytes, self.total, self._files, self._all_files)
        self._report(progress)

    def raise_damage(self) -> None:
        lines = sorted({line for line, _ in self._damages})
        if not lines:
            return
        # What is damaged at one place and archived at another can still be had.
        if self._failed and self._failed <= self._archived:
            raise ArchivedError(
                f"{len(self._failed)} stored objects lie in an archive class, and no other copy of them can be read",
                detail="\n".join(lines[:50]),
                hint="thaw them first: `backupd thaw SERVER --to TARGET`, or repeat this with --thaw TIER; if a rule "
                "of the place has put them there, name the class as its storage_class, too, so that it is expected",
            )
        if any(damage for _, damage in self._damages):
            raise DamagedError(
                f"{len(lines)} stored things are damaged or missing, no other copy has them",
                lines,
                hint="restore another backup (`backupd backups`), or bring these objects back from elsewhere; "
                "`backupd verify` looks at all of them",
            )
        raise DestinationError(
            "the backup could not be read",
            detail="\n".join(lines[:50]),
            hint="see that the destination can be reached, then repeat the command: it continues",
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
        raise StreamError(f"{assembly.entry.path!r}: what was unsealed is not what was backed up")


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
    shown = ", ".join(repr(path) for path in paths[:_NAMED])
    return shown if len(paths) <= _NAMED else f"{shown} and {len(paths) - _NAMED} more files"


def _one_line(error: BackupdError) -> str:
    return error.line[:400]
