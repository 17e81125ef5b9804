"""A file being put together from slices that arrive in any order, possibly on top of an earlier attempt."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from backupd.model.errors import BackupdError
from backupd.model.manifest import Entry

_BLOCK = 4096
_ZEROS = bytes(_BLOCK)
_CHUNK = 1024 * 1024


class Assembly:
    """One entry at ``path``. Slices are its parts, or the whole file where it comes out of a bundle.

    ``fresh``: nothing was there before, so that what is never written reads as zeros. Thread-safe per slice:
    each slice is written by one thread. The file's own digest is computed on the way, from memory as long as
    slices arrive in order.
    """

    __slots__ = (
        "_fresh",
        "_hasher",
        "_judged",
        "_lock",
        "_next",
        "_offsets",
        "_slices",
        "_written",
        "entry",
        "path",
    )

    def __init__(self, entry: Entry, path: Path, *, fresh: bool) -> None:
        self.entry = entry
        self.path = path
        self._fresh = fresh
        # (size, SHA-256) of each slice
        self._slices = (
            [(entry.size, entry.sha256)]
            if entry.bundle or not entry.parts
            else [(part.size, part.sha256) for part in entry.parts]
        )
        self._offsets = [0, *accumulate(size for size, _ in self._slices)]
        self._written: set[int] = set()
        self._next = 0
        self._hasher = hashlib.sha256() if len(self._slices) > 1 else None
        self._judged = False
        self._lock = threading.Lock()

    def size_of(self, index: int) -> int:
        return self._slices[index][0]

    def digest_of(self, index: int) -> str:
        return self._slices[index][1]

    def intact(self, index: int) -> bool:
        """Does the disk hold this slice already, by its hash? Then it is taken as written."""
        if self._fresh:
            return False
        size, digest = self._slices[index]
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(descriptor).st_size != self.entry.size:
                return False
            if size and not self.entry.sparse and _is_hole(descriptor, self._offsets[index], size):
                return False
            if _digest(descriptor, self._offsets[index], size) != digest:
                return False
        finally:
            os.close(descriptor)
        self._note(index, None)
        return True

    def write(self, index: int, payload: bytes | memoryview) -> None:
        """Put a verified slice in its place. Raises BackupdError when the file system will not take it."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size != self.entry.size:
                    os.ftruncate(descriptor, self.entry.size)
                if self.entry.sparse and self._fresh:
                    _write_sparse(descriptor, self._offsets[index], memoryview(payload))
                else:
                    _write(descriptor, self._offsets[index], memoryview(payload))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise BackupdError(
                f"cannot write {self.path}: {os.strerror(error.errno or 0)}",
                hint="free some space there and repeat the command; what was fetched is kept"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else "repeat the command when that is mended",
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
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                while self._next in self._written:
                    _hash_range(self._hasher, descriptor, self._offsets[self._next], self.size_of(self._next))
                    self._next += 1
            finally:
                os.close(descriptor)

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
    folders = {parent for path in wanted for parent in _parents(path)}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    present = set(_tidy(folder, wanted, folders))
    for path in sorted(folders):
        (folder / path).mkdir(mode=0o700, exist_ok=True)
    return [Assembly(entry, folder / entry.path, fresh=entry.path not in present) for entry in entries]


def _parents(path: str) -> Iterator[str]:
    parent = path.rpartition("/")[0]
    while parent:
        yield parent
        parent = parent.rpartition("/")[0]


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


def _digest(descriptor: int, offset: int, size: int) -> str:
    hasher = hashlib.sha256()
    _hash_range(hasher, descriptor, offset, size)
    return hasher.hexdigest()


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
    for place in range(0, len(payload), _BLOCK):
        block = payload[place : place + _BLOCK]
        empty = block == _ZEROS if len(block) == _BLOCK else not any(block)
        if empty and start is not None:
            _write(descriptor, offset + start, payload[start:place])
            start = None
        elif not empty and start is None:
            start = place
    if start is not None:
        _write(descriptor, offset + start, payload[start:])
