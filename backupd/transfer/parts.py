"""Turns the files of a capture into entries: parts of 16 MiB, bundles for tiny files, everything hashed first.

The capture thread calls ``data``, ``hole`` and ``end``; parts are hashed, sealed and stored by worker threads. What
is submitted and not yet stored is bounded in bytes, so a slow destination slows the capture instead of filling memory.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from backupd.model.errors import StreamError, TablesChangedError
from backupd.model.manifest import BUNDLE_LIMIT, PART_SIZE, Entry, Part
from backupd.transfer.dedup import Fanout, Placed
from storage import layout

IN_FLIGHT = 2 * PART_SIZE
"""Bytes of plaintext that may wait for the workers or be read by them, beside one part of each file being read."""
BUNDLE_SIZE = 1024 * 1024
"""A bundle is closed when it holds this many bytes."""
PENDING_SIZE = 8 * 1024 * 1024
"""Bytes of tiny files kept in memory before they are bundled."""
_CUT = 64
"""A bundle also ends after a path whose hash is divisible by this: one new file then changes one bundle, not all."""
_ZEROS = bytes(1024 * 1024)
_SMALL = 1024 * 1024
"""Files up to this many bytes do not get a buffer of a whole part."""
_SPARE = 2
"""Buffers kept for the next part."""


@dataclass(frozen=True, slots=True)
class _Stored:
    part: Part
    new: bool


class _Buffers:
    """Part-sized buffers that are used again: fresh memory costs more than the copying into it."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._lock = threading.Lock()

    def take(self) -> bytearray:
        with self._lock:
            return self._free.pop() if self._free else bytearray(PART_SIZE)

    def give(self, buffer: bytearray) -> None:
        with self._lock:
            if len(self._free) < _SPARE:
                self._free.append(buffer)


@dataclass(slots=True)
class _Open:
    """``small`` holds the beginning of a file until it is known to be large; then ``buffer`` is its current part."""

    path: str
    small: bytearray = field(default_factory=bytearray)
    buffer: bytearray | None = None
    filled: int = 0
    size: int = 0
    sparse: bool = False
    whole: hashlib._Hash | None = None
    parts: list[Future[_Stored]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Ended:
    size: int
    sparse: bool
    whole: str
    parts: tuple[Future[_Stored], ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """The result: entries in path order, and of how many every object was stored before (``linked``)."""

    entries: tuple[Entry, ...]
    linked: int
    size: int


class Packer:
    """One per capture; a context manager that ends its threads. The first failure of a worker is raised by the
    next call, whatever it is. ``moved``: files were removed or renamed after their end, so their links are stale.
    ``together``: the folder whose tiny files share objects with those of a path; its own, by default."""

    def __init__(
        self, fanout: Fanout, *, workers: int, together: Callable[[str], str] = lambda path: path.rpartition("/")[0]
    ) -> None:
        self._fanout = fanout
        self._together = together
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, _Ended] = {}
        self._tiny: dict[str, bytes] = {}
        self._tiny_bytes = 0
        self._bundled: list[tuple[tuple[str, ...], Future[_Stored]]] = []
        self._seen: set[str] = set()
        self._budget = IN_FLIGHT
        self._room = threading.Condition()
        self._buffers = _Buffers()
        self._failure: BaseException | None = None
        self.moved = False
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="seal")

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- what the capture thread calls

    def data(self, path: str, offset: int, payload: memoryview) -> None:
        """Bytes of ``path`` at ``offset``; offsets grow, what they skip is a hole."""
        file = self._file(path)
        if offset < file.size:
            raise StreamError(
                f"{path}: the stream went back from byte {file.size} to {offset}",
                hint="run the backup again; if it repeats, the tool's version is not supported",
            )
        if offset > file.size:
            self.hole(path, file.size, offset - file.size)
        self._append(file, payload)

    def hole(self, path: str, offset: int, length: int) -> None:
        """``length`` bytes of ``path`` were never written at the source; they read as zeros."""
        file = self._file(path)
        if offset != file.size:
            raise StreamError(f"{path}: a hole at byte {offset} where {file.size} was expected")
        file.sparse = True
        while length:
            step = min(length, len(_ZEROS))
            self._append(file, memoryview(_ZEROS)[:step])
            length -= step

    def end(self, path: str) -> None:
        """``path`` is complete. Raises StreamError when it was so before."""
        file = self._file(path)
        del self._open[path]
        if file.size < BUNDLE_LIMIT:
            self._tiny[path] = bytes(file.small)
            self._tiny_bytes += file.size
            self._ended[path] = _Ended(file.size, file.sparse, hashlib.sha256(file.small).hexdigest(), ())
            if self._tiny_bytes >= PENDING_SIZE:
                self._bundle()
            return
        if file.whole is None:
            file.parts.append(self._submit(file, _shown_as(layout.tree_path(path))))
            digest = ""  # one part: the part's digest is the file's
        else:
            self._cut(file)
            digest = file.whole.hexdigest()
        self._ended[path] = _Ended(file.size, file.sparse, digest, tuple(file.parts))

    def remove(self, path: str) -> None:
        """``path``, which had ended, is not part of the backup after all; its name is free again."""
        self._take_back(path)
        self._seen.discard(path)

    def rename(self, path: str, to: str) -> None:
        """``path``, which had ended, is called ``to``. Raises StreamError when there is a ``to`` already."""
        if to in self._seen:
            raise StreamError(f"{path}: renamed to {to}, which the stream holds already")
        ended, content = self._take_back(path)
        self._seen.discard(path)
        self._seen.add(to)
        self._ended[to] = ended
        if content is not None:
            self._tiny[to] = content
            self._tiny_bytes += len(content)

    def _take_back(self, path: str) -> tuple[_Ended, bytes | None]:
        self.moved = True
        ended = self._ended.pop(path, None)
        if ended is None:
            raise StreamError(f"{path}: the stream speaks of this file before it was complete")
        content = self._tiny.pop(path, None)
        if content is not None:
            self._tiny_bytes -= len(content)
        elif not ended.parts:
            # Its bundle is on its way and holds it under the old name.
            raise TablesChangedError(
                f"{path}: its table was renamed or dropped while the backup ran",
                hint="run the backup again, at a time without DDL",
            )
        return ended, content

    def finish(self) -> Packed:
        """Wait for everything to be stored. Raises the first failure, StreamError when a file never ended."""
        if self._open:
            raise StreamError(f"the stream ended inside {', '.join(sorted(self._open)[:5])}")
        self._bundle()
        linked = size = 0
        entries: dict[str, Entry] = {}
        for members, future in self._bundled:
            result = self._result(future)
            for path in members:
                ended = self._ended[path]
                entries[path] = Entry(path, ended.size, ended.whole, bundle=result.part.object, sparse=ended.sparse)
                linked += not result.new
        for path, ended in self._ended.items():
            size += ended.size
            if path in entries:
                continue
            results = [self._result(future) for future in ended.parts]
            parts = tuple(result.part for result in results)
            whole = ended.whole or parts[0].sha256
            entries[path] = Entry(path, ended.size, whole, parts=parts, sparse=ended.sparse)
            linked += not any(result.new for result in results)
        return Packed(tuple(entries[path] for path in sorted(entries)), linked, size)

    # -- inside

    def _file(self, path: str) -> _Open:
        file = self._open.get(path)
        if file is None:
            if path in self._seen:
                raise StreamError(f"{path}: the stream holds this file twice")
            self._seen.add(path)
            file = self._open[path] = _Open(path)
        return file

    def _append(self, file: _Open, payload: memoryview) -> None:
        if file.buffer is None and file.size + len(payload) > _SMALL:
            file.buffer = self._buffers.take()
            file.buffer[: file.size] = file.small
            file.filled = file.size
            file.small = bytearray()
        file.size += len(payload)
        if file.buffer is None:
            file.small += payload
            return
        while payload:
            # A full buffer is cut only when more follows: a file of exactly one part stays a file of one part.
            if file.filled == PART_SIZE:
                self._cut(file)
                file.buffer = self._buffers.take()
                file.filled = 0
            taken = payload[: PART_SIZE - file.filled]
            file.buffer[file.filled : file.filled + len(taken)] = taken
            if file.whole is not None:
                # Little by little: while a whole part is hashed at once, the tool waits at a full pipe.
                file.whole.update(taken)
            file.filled += len(taken)
            payload = payload[len(taken) :]

    def _cut(self, file: _Open) -> None:
        """Hand over the current part of a file of several parts."""
        if file.whole is None and file.buffer is not None:
            file.whole = hashlib.sha256(memoryview(file.buffer)[: file.filled])
        file.parts.append(self._submit(file, _shown_as(layout.tree_path(file.path, len(file.parts)))))

    def _submit(self, file: _Open, path: Callable[[str], str]) -> Future[_Stored]:
        buffer = file.buffer
        if buffer is None:
            return self._enqueue(file.small, len(file.small), path)
        file.buffer = None
        return self._enqueue(buffer, file.filled, path, give_back=True)

    def _enqueue(
        self, plain: bytearray | bytes, size: int, path: Callable[[str], str], *, give_back: bool = False
    ) -> Future[_Stored]:
        with self._room:
            self._room.wait_for(lambda: self._failure is not None or self._budget > 0)
            self._raise_failure()
            self._budget -= size
        return self._pool.submit(self._store, plain, size, path, give_back)

    def _store(self, plain: bytearray | bytes, size: int, path: Callable[[str], str], give_back: bool) -> _Stored:
        view = memoryview(plain)[:size]

        def read() -> None:
            view.release()
            if give_back and isinstance(plain, bytearray):
                self._buffers.give(plain)
            with self._room:
                self._budget += size
                self._room.notify_all()

        try:
            digest = hashlib.sha256(view)
            placed: Placed = self._fanout.place(view, digest.digest(), path, read=read)
        except BaseException as error:
            with self._room:
                self._failure = self._failure or error
                self._room.notify_all()
            raise
        return _Stored(Part(placed.object.name, size, digest.hexdigest()), placed.new)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _result(self, future: Future[_Stored]) -> _Stored:
        with self._room:
            self._raise_failure()
        return future.result()

    def _bundle(self) -> None:
        """Cut the waiting tiny files, folder by folder, into tar objects whose bytes depend on their content only."""
        folders: dict[str, list[str]] = {}
        for path in sorted(self._tiny):
            folders.setdefault(self._together(path), []).append(path)
        for paths in folders.values():
            members: dict[str, bytes] = {}
            filled = 0
            for path in paths:
                members[path] = self._tiny[path]
                filled += len(self._tiny[path])
                if filled >= BUNDLE_SIZE or _path_hash(path) % _CUT == 0:
                    self._bundle_of(members)
                    members, filled = {}, 0
            if members:
                self._bundle_of(members)
        self._tiny = {}
        self._tiny_bytes = 0

    def _bundle_of(self, members: dict[str, bytes]) -> None:
        folder = layout.common_folder(members)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, content in members.items():
                info = tarfile.TarInfo(path)
                info.size, info.mode = len(content), 0o640
                tar.addfile(info, io.BytesIO(content))
        content = packed.getvalue()
        future = self._enqueue(content, len(content), lambda name: layout.bundle_path(folder, name))
        self._bundled.append((tuple(members), future))


def _shown_as(path: str) -> Callable[[str], str]:
    """A tree path that does not depend on the object's name."""
    return lambda _name: path


def _path_hash(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:4], "big")
