"""A tiny encoder of xbstream, and what a consumer of its events does."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from backupd.engine.physical.capture import Data, End, FileEvent, Hole, Remove, Rename
from backupd.engine.physical.xbstream import Dialect, demultiplex


def header(kind: str, path: str | bytes, flags: int = 0) -> bytes:
    raw = path.encode() if isinstance(path, str) else path
    return b"XBSTCK01" + bytes([flags, ord(kind)]) + struct.pack("<I", len(raw)) + raw


def payload(path: str | bytes, data: bytes, offset: int = 0, flags: int = 0) -> bytes:
    return header("P", path, flags) + struct.pack("<QQI", len(data), offset, zlib.crc32(data)) + data


def end(path: str | bytes) -> bytes:
    return header("E", path)


def whole(path: str, data: bytes) -> bytes:
    return payload(path, data) + end(path)


def seek(path: str, offset: int) -> bytes:
    return header("S", path) + struct.pack("<Q", offset)


def remove(path: str) -> bytes:
    return header("D", path)


def rename(path: str, to: str) -> bytes:
    return header("R", path) + struct.pack("<I", len(to)) + to.encode()


def sparse(path: str, pieces: Iterable[tuple[int, bytes]], offset: int = 0) -> bytes:
    """Percona's ``S``: pairs of (bytes to skip, bytes to write)."""
    pieces = list(pieces)
    data = b"".join(data for _, data in pieces)
    holes = b"".join(struct.pack("<II", skip, len(data)) for skip, data in pieces)
    checksum = zlib.crc32(data, zlib.crc32(holes))
    return header("S", path) + struct.pack("<IQQI", len(pieces), len(data), offset, checksum) + holes + data


class Dribble(io.RawIOBase):
    """A stream that gives at most ``size`` bytes at a time, as pipes do."""

    def __init__(self, data: bytes, size: int) -> None:
        self._inner = io.BytesIO(data)
        self._size = size

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # narrower than the typeshed's buffer
        return self._inner.readinto(buffer[: self._size])


class _Content:
    """What a file holds so far; holes stay numbers until they are asked for."""

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[bytes | int] = []

    def add(self, offset: int, piece: bytes | int) -> None:
        assert offset == self.size
        self._pieces.append(piece)
        self.size += piece if isinstance(piece, int) else len(piece)

    def join(self) -> bytes:
        return b"".join(bytes(piece) for piece in self._pieces)


class Folder:
    """Files in memory, put together from events as a consumer does; every rule of the protocol is asserted."""

    def __init__(self) -> None:
        self._open: dict[str, _Content] = {}
        self.files: dict[str, bytes] = {}
        self.holes: dict[str, list[tuple[int, int]]] = {}

    def take(self, event: FileEvent) -> None:
        match event:
            case Data(path, offset, data):
                assert path not in self.files
                self._open.setdefault(path, _Content()).add(offset, bytes(data))
            case Hole(path, offset, length):
                assert path not in self.files
                self._open.setdefault(path, _Content()).add(offset, length)
                self.holes.setdefault(path, []).append((offset, length))
            case End(path):
                assert path not in self.files
                self.files[path] = self._open.pop(path, _Content()).join()
            case Remove(path):
                del self.files[path]
            case Rename(path, to):
                assert to not in self.files
                self.files[to] = self.files.pop(path)

    @classmethod
    def of(cls, data: bytes, dialect: Dialect = Dialect.MARIADB, *, size: int = 1 << 30) -> Folder:
        folder = cls()
        for event in demultiplex(Dribble(data, size), dialect):
            folder.take(event)
        assert not folder._open
        return folder


def write_files(base: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


class Extraction:
    """Writes events into ``base`` as mbstream would."""

    def __init__(self, base: Path) -> None:
        self.base = base
        base.mkdir(parents=True, exist_ok=True)
        self.sizes: dict[str, int] = {}

    def take(self, event: FileEvent) -> None:
        match event:
            case Data(path, offset, data):
                with self._path(path).open("r+b" if offset else "wb") as file:
                    file.seek(offset)
                    file.write(data)
            case Hole(path, offset, length):
                with self._path(path).open("r+b" if offset else "wb") as file:
                    file.truncate(offset + length)
            case End(path):
                self._path(path).touch()
                self.sizes[path] = self._path(path).stat().st_size
            case Remove(path):
                self._path(path).unlink()
                del self.sizes[path]
            case Rename(path, to):
                self._path(path).rename(self._path(to))
                self.sizes[to] = self.sizes.pop(path)

    def _path(self, name: str) -> Path:
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
