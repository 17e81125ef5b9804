"""Taking apart the stream that ``--stream=xbstream`` writes, while it runs.

The format: a sequence of chunks, each ``XBSTCK01``, flags (1 byte), type (1 byte), length of the path (u32,
all numbers little endian), path; then, by type:

====  =====================================================================================================
``P``  payload: length (u64), offset in the file (u64), CRC-32 of the payload (u32), payload ``E``  end of
the file, nothing more; an empty file has only this ``S``  in MariaDB's dialect a *seek*: new offset (u64),
nothing more. In Percona's a *sparse* payload: number of entries in its map (u32), length (u64), offset
(u64), CRC-32 of map and payload (u32), map of (skip, length) pairs (u32 each), payload: the two dialects
give one letter two meanings ``D``  MariaDB: the path was removed: a file, a folder with all in it, or
``prefix*`` for partitions ``R``  MariaDB: the path was renamed: length (u32) and text of the new path ====
=====================================================================================================

Flag 1: may be ignored by who does not know the type (the body is that of ``P``). Flag 2 (MariaDB): the file
replaces one of the same name that had already ended. Sources: xbstream_write.cc of MariaDB (mariadb-backup
from 10.11.8 on writes ``D``, ``R`` and flag 2 when MyISAM, Aria, CSV, MERGE or ARCHIVE tables are altered
while it runs), Percona's page "xbstream file format", and trials with mbstream 10.11.19.

What the format does not protect, we check: offsets must continue where the file ends (mbstream does so
too), a path must not come back after its end, and whatever was opened must end. Only the path of an empty
file has no second witness in the stream.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from backupd.engine.physical.capture import Data, End, FileEvent, Hole, Remove, Rename
from backupd.model.errors import StreamError, TablesChangedError

BUFFER_SIZE = 1024 * 1024
"""Bytes of the one buffer that all payload passes through; the longest payload of a Data event."""

_MAGIC = b"XBSTCK01"
_HEADER = struct.Struct("<8sBBI")
_PAYLOAD = struct.Struct("<QQI")
_SPARSE = struct.Struct("<IQQI")
_PAIR = struct.Struct("<II")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_FLAG_IGNORABLE = 1
_FLAG_REWRITE = 2
_PATH_LIMIT = 4096
_MAP_LIMIT = BUFFER_SIZE // _PAIR.size
_MAY_BECOME_EMPTY = (".MYD", ".MYI", ".MAD", ".MAI", ".CSV", ".CSM", ".MRG", ".ARZ", ".ARM", ".frm", ".par", ".opt")
"""Files that MariaDB copies again after a DDL. A new copy that is empty has no payload that could carry
flag 2.
"""
_STAYING = (".frm", ".par", ".TRG", ".TRN", ".ibd", ".isl", ".new", ".del", ".ren", ".delta", ".meta")
"""Files that a removal may name and not mean. The tool removes what its list of statements says was dropped, and such a
list knows neither the tables that were made since under the same name nor those of InnoDB, of which ``.del`` and
``.ren`` say. Definitions are copied while nobody can change them any more."""
_OPTIONAL = (".ARM",)
"""Renamed with the table although normally not there."""
_AGAIN = "run the backup again; if the error repeats, backupd does not support the output of this version of the tool"


class Dialect(StrEnum):
    """Which tool wrote the stream: the letter ``S`` means different chunks."""

    MARIADB = "mariadb"
    PERCONA = "percona"


class Readable(Protocol):
    """0 from ``readinto`` must mean: all is well and there is nothing more."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill ``buffer`` from its beginning; how many bytes, 0 at the good end."""


@dataclass(frozen=True, slots=True)
class Doubts:
    """What a stream leaves to a caller that knows which tables there must be. ``lost``: names of files that were
    renamed but are not there. ``withdrawn``: files that ended and that the tool then removed although
    their table may live: the caller removes those of which it does not. ``renamed``: every name in a rename. The tool
    renames what its list of statements says, also where it copied the files when they had their new names already: two
    tables that took each other's names then have each other's rows (mariadb-backup 10.11.19). ``crossed``: such names
    that were used more than once."""

    lost: set[str] = field(default_factory=set)
    withdrawn: set[str] = field(default_factory=set)
    renamed: set[str] = field(default_factory=set)
    crossed: set[str] = field(default_factory=set)


def demultiplex(
    stream: Readable, dialect: Dialect = Dialect.MARIADB, doubts: Doubts | None = None
) -> Iterator[FileEvent]:
    """The files in ``stream``. Ends only at a complete end of everything. ``doubts`` is filled, where it is given.

    Raises StreamError for anything else: a cut, a wrong checksum, an unknown chunk, a path that leads
    outside, a file twice, a file without its end, and without ``doubts`` a file that was renamed but is not there. Data
    events before such an error were delivered; no ``End`` is delivered for a file with a wrong checksum.
    """
    return _Demultiplexer(stream, dialect, doubts).events()


def left_out(lost: Collection[str]) -> TablesChangedError:
    """mariadb-backup 10.11.19 lists Aria tables early and copies them later: one that is renamed in between is found
    under neither name, its .frm is streamed, its data is not, and the run is "completed OK!"."""
    return TablesChangedError(
        "tables were renamed while the tool ran, and it left out their data",
        detail="\n".join(sorted(lost)[:20]),
        hint="run the backup again while no Aria or MyISAM table is renamed",
    )


class _Source:
    """Buffered reading with one reused buffer."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._view = memoryview(bytearray(BUFFER_SIZE))
        self._start = self._end = 0
        self._read = 0

    @property
    def position(self) -> int:
        """Bytes consumed so far."""
        return self._read - (self._end - self._start)

    def at_end(self) -> bool:
        return self._start == self._end and not self._fill()

    def take(self, size: int) -> memoryview:
        """Exactly ``size`` bytes (at most the buffer); valid until the next call."""
        while self._end - self._start < size:
            if not self._fill():
                raise self._cut()
        self._start += size
        return self._view[self._start - size : self._start]

    def some(self, limit: int) -> memoryview:
        """Between 1 and ``limit`` bytes; valid until the next call."""
        if self._start == self._end and not self._fill():
            raise self._cut()
        size = min(limit, self._end - self._start)
        self._start += size
        return self._view[self._start - size : self._start]

    def _fill(self) -> bool:
        """Read more; what is unread moves to the front first."""
        left = self._end - self._start
        if self._start:
            self._view[:left] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, left
        count = self._stream.readinto(self._view[left:]) or 0
        self._end += count
        self._read += count
        return count > 0

    def _cut(self) -> StreamError:
        return StreamError(f"the stream ended in the middle of a chunk, after {self._read} bytes", hint=_AGAIN)


class _Demultiplexer:
    def __init__(self, stream: Readable, dialect: Dialect, doubts: Doubts | None) -> None:
        self._source = _Source(stream)
        self._doubts = doubts
        self._withdrawn: set[str] = doubts.withdrawn if doubts else set()
        self._dialect = dialect
        self._flags = _FLAG_IGNORABLE | (_FLAG_REWRITE if dialect is Dialect.MARIADB else 0)
        self._open: dict[str, tuple[int, int]] = {}
        """Where each open file ends so far, and where it must go on."""
        self._ended: set[str] = set()
        self._folders: dict[str, int] = {}
        self._lost: set[str] = set()
        """New names of files that were renamed, but are in the stream under neither name."""
        self._chunk = 0

    def events(self) -> Iterator[FileEvent]:
        while not self._source.at_end():
            self._chunk = self._source.position
            magic, flags, kind, length = _HEADER.unpack(self._source.take(_HEADER.size))
            if magic != _MAGIC:
                raise self._broken("no chunk begins here")
            if flags & ~self._flags:
                raise self._broken(f"unknown flags 0x{flags:02x}")
            path = self._path(length)
            letter = chr(kind)
            if letter == "P":
                yield from self._payload(path, rewrite=bool(flags & _FLAG_REWRITE))
            elif letter == "E":
                yield from self._end(path)
            elif letter == "S" and self._dialect is Dialect.PERCONA:
                yield from self._sparse(path)
            elif letter == "S":
                self._seek(path)
            elif letter == "D" and self._dialect is Dialect.MARIADB:
                yield from self._remove(path)
            elif letter == "R" and self._dialect is Dialect.MARIADB:
                yield from self._rename(path)
            elif flags & _FLAG_IGNORABLE:
                size, _, checksum = _PAYLOAD.unpack(self._source.take(_PAYLOAD.size))
                for _ in self._filled(path, 0, ((0, size),), checksum):
                    pass
            else:
                raise self._broken(f"unknown chunk type 0x{kind:02x}")
        self._finish()

    # -- the types

    def _payload(self, path: str, *, rewrite: bool) -> Iterator[FileEvent]:
        size, offset, checksum = _PAYLOAD.unpack(self._source.take(_PAYLOAD.size))
        yield from self._begin(path, offset, rewrite=rewrite)
        yield from self._filled(path, offset, ((0, size),), checksum)
        self._open[path] = (offset + size, offset + size)

    def _sparse(self, path: str) -> Iterator[FileEvent]:
        entries, size, offset, checksum = _SPARSE.unpack(self._source.take(_SPARSE.size))
        if entries > _MAP_LIMIT:
            raise self._broken(f"a map of {entries} holes")
        raw = bytes(self._source.take(entries * _PAIR.size))
        pieces = list(_PAIR.iter_unpack(raw))
        if sum(length for _, length in pieces) != size:
            raise self._broken("the map of holes does not fit the payload")
        yield from self._begin(path, offset, rewrite=False)
        yield from self._filled(path, offset, pieces, checksum, zlib.crc32(raw))
        offset += sum(map(sum, pieces))
        self._open[path] = (offset, offset)

    def _seek(self, path: str) -> None:
        (offset,) = _U64.unpack(self._source.take(_U64.size))
        if path not in self._open:
            raise self._broken(f"a seek in {path}, which is not open")
        end, _ = self._open[path]
        if offset < end:
            raise self._broken(f"{path} goes back from byte {end} to {offset}")
        # The bytes in between are missing only if something follows: mbstream does not extend a file by seeking.
        self._open[path] = (end, offset)

    def _end(self, path: str) -> Iterator[FileEvent]:
        if path in self._open:
            del self._open[path]
        elif path in self._ended:
            if path not in self._withdrawn and (
                self._dialect is not Dialect.MARIADB or not path.endswith(_MAY_BECOME_EMPTY)
            ):
                raise self._broken(f"{path} comes a second time")
            yield self._forget(path)
            self._remember(path)
        else:
            self._remember(path)
        self._ended.add(path)
        self._lost.discard(path)
        yield End(path)

    def _remove(self, path: str) -> Iterator[FileEvent]:
        if path.endswith("*") and "*" not in path[:-1]:
            prefix = path[:-1]
        elif "*" in path:
            raise self._broken(f"removal of {path}, a pattern that is not known")
        else:
            prefix = path + "/"
        names = {path}
        names |= {name for name in (*self._ended, *self._lost, *self._open) if name.startswith(prefix)}
        for name in sorted(names):
            if name in self._open:
                raise self._broken(f"removal of {name}, which is still being written")
            self._lost.discard(name)
            if name in self._ended and self._doubts is not None and name.endswith(_STAYING):
                self._withdrawn.add(name)
            elif name in self._ended:
                yield self._forget(name)

    def _rename(self, path: str) -> Iterator[FileEvent]:
        (length,) = _U32.unpack(self._source.take(_U32.size))
        to = self._path(length)
        if path == to or path in self._open or to in self._open:
            raise self._broken(f"{path} cannot be renamed to {to}")
        if self._doubts is not None:
            self._doubts.crossed.update({path, to} & self._doubts.renamed, {to} & self._ended)
            self._doubts.renamed.update((path, to))
        if path in self._withdrawn:
            yield self._forget(path)
        if path in self._ended:
            if to in self._ended:
                yield self._forget(to)
            self._forget(path)
            self._remember(to)
            self._ended.add(to)
            self._lost.discard(to)
            yield Rename(path, to)
        else:
            self._lost.discard(path)
            if to not in self._ended and not to.endswith(_OPTIONAL):
                self._lost.add(to)

    def _finish(self) -> None:
        if self._open:
            names = sorted(self._open)
            raise StreamError(f"the stream ended inside {len(names)} files: {', '.join(names[:5])}", hint=_AGAIN)
        if self._doubts is not None:
            self._doubts.lost.update(self._lost)
        elif self._lost:
            raise left_out(self._lost)

    # -- parts of a chunk

    def _begin(self, path: str, offset: int, *, rewrite: bool) -> Iterator[FileEvent]:
        """Before a payload: is it where the file ends?"""
        if path in self._open:
            end, expected = self._open[path]
            if offset != expected:
                raise self._broken(f"{path} goes on at byte {offset} instead of {expected}")
            if expected > end:
                yield Hole(path, end, expected - end)
            return
        if path in self._ended:
            if not rewrite and path not in self._withdrawn:
                raise self._broken(f"{path} comes a second time")
            yield self._forget(path)
        if offset:
            raise self._broken(f"{path} begins at byte {offset}")
        self._remember(path)
        self._lost.discard(path)
        self._open[path] = (0, 0)

    def _filled(
        self, path: str, offset: int, pieces: Iterable[tuple[int, int]], checksum: int, actual: int = 0
    ) -> Iterator[FileEvent]:
        """The payload of ``path`` from ``offset`` on; ``pieces``: bytes of a hole, and of what follows it."""
        for skip, length in pieces:
            if skip:
                yield Hole(path, offset, skip)
                offset += skip
            for payload in self._pieces(length):
                actual = zlib.crc32(payload, actual)
                yield Data(path, offset, payload)
                offset += len(payload)
        if actual != checksum:
            raise self._broken(f"wrong checksum in {path}")

    def _pieces(self, size: int) -> Iterator[memoryview]:
        while size:
            piece = self._source.some(size)
            size -= len(piece)
            yield piece

    def _path(self, length: int) -> str:
        if not 0 < length <= _PATH_LIMIT:
            raise self._broken(f"a path of {length} bytes")
        raw = bytes(self._source.take(length)).removeprefix(b"./")
        if b"\0" in raw or any(part in (b"", b".", b"..") for part in raw.split(b"/")):
            raise self._broken(f"a path that leads outside: {raw[:200]!r}")
        return os.fsdecode(raw)

    # -- which names are taken

    def _remember(self, path: str) -> None:
        """A new file: no other may be its folder, and it must not be one."""
        if path in self._folders:
            raise self._broken(f"{path} is a file and a folder")
        for folder in _folders_of(path):
            if folder in self._ended or folder in self._open:
                raise self._broken(f"{folder} is a file and a folder")
            self._folders[folder] = self._folders.get(folder, 0) + 1

    def _forget(self, path: str) -> Remove:
        self._ended.discard(path)
        self._withdrawn.discard(path)
        for folder in _folders_of(path):
            self._folders[folder] -= 1
            if not self._folders[folder]:
                del self._folders[folder]
        return Remove(path)

    def _broken(self, what: str) -> StreamError:
        return StreamError(f"the stream is damaged at byte {self._chunk}: {what}", hint=_AGAIN)


def _folders_of(path: str) -> Iterator[str]:
    end = path.find("/")
    while end >= 0:
        yield path[:end]
        end = path.find("/", end + 1)
