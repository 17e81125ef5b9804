"""SFTP version 3 as OpenSSH speaks it: requests and answers over one channel, many of them under way at once.

Only the requests that a destination needs. One ``Wire`` is used by one thread at a time. What can go wrong:
``StatusError``, the server's answer is no; ``LostError``, there is nobody to answer any more.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Protocol

from storage.destination import Space

BLOCK = 32 * 1024
"""Bytes in one read or write: what every server takes."""
WINDOW = 64
"""Reads or writes that are under way at once; times BLOCK, this bounds the memory of a stream (2 MiB)."""

POSIX_RENAME = "posix-rename@openssh.com"
FSYNC = "fsync@openssh.com"
STATVFS = "statvfs@openssh.com"
HARDLINK = "hardlink@openssh.com"

END, MISSING, DENIED, FAILURE = 1, 2, 3, 4
_READ, _WRITE, _CREATE = 0x01, 0x02, 0x08
_SIZE, _OWNER, _MODE, _TIMES, _EXTENDED = 0x01, 0x02, 0x04, 0x08, 0x80000000
_INIT, _VERSION, _OPEN, _CLOSE, _GET, _PUT, _LSTAT, _FSTAT = 1, 2, 3, 4, 5, 6, 7, 8
_OPENDIR, _READDIR, _REMOVE, _MKDIR, _RMDIR, _REALPATH, _STAT, _RENAME, _EXTEND = 11, 12, 13, 14, 15, 16, 17, 18, 200
_STATUS, _HANDLE, _DATA, _NAME, _ATTRIBUTES, _EXTEND_REPLY = 101, 102, 103, 104, 105, 201
_MOST_NAMES = 2_000_000
"""In one folder: no destination has as many."""
_LARGEST = 4 << 20
"""No server sends a longer answer; a longer one is no SFTP."""


class StatusError(Exception):
    """The server says no; ``code`` as the protocol counts. Version 3 knows few: a full disk is FAILURE like others."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text or f"status {code}")
        self.code = code


class LostError(Exception):
    """The connection is gone, or what comes is no SFTP; ``hangs``: it is there, and nothing came for too long."""

    def __init__(self, text: str, *, hangs: bool = False) -> None:
        super().__init__(text)
        self.hangs = hangs


class Channel(Protocol):
    """What a wire needs of an SSH channel."""

    def settimeout(self, timeout: float | None) -> None:
        """Seconds after which sending or receiving raises TimeoutError."""
        ...

    def sendall(self, s: bytes) -> None:
        """Send all of ``s``."""
        ...

    def recv(self, nbytes: int) -> bytes:
        """At most ``nbytes`` of what came; empty at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Attributes:
    """``modified``: seconds since 1970 by the server's clock."""

    size: int
    mode: int
    modified: int

    @property
    def is_folder(self) -> bool:
        """By ``mode``."""
        return S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """A plain file, by ``mode``."""
        return S_ISREG(self.mode)

    @property
    def is_link(self) -> bool:
        """A symbolic link, by ``mode``; only answers that do not follow links have one."""
        return S_ISLNK(self.mode)


class Wire:
    """``seconds``: how long an answer may take. The connection belongs to whoever made ``channel``."""

    def __init__(self, channel: Channel, seconds: float) -> None:
        self._channel = channel
        self._seconds = seconds
        self.wait_for(seconds)
        self._buffer = bytearray()
        self._number = 0
        self._pending: set[int] = set()
        self._early: dict[int, tuple[int, _Fields]] = {}
        self.extensions: Mapping[str, str] = {}
        """What the server offers beyond version 3, by name; known after ``begin``."""

    def wait_for(self, seconds: float) -> None:
        """How long an answer may take from now on."""
        self._seconds = seconds
        self._channel.settimeout(seconds)

    def begin(self) -> None:
        """Agree on the version. Comes first."""
        self._send(struct.pack(">BI", _INIT, 3))
        kind, fields = self._packet()
        if kind != _VERSION or fields.u32() != 3:
            raise LostError("the server does not speak SFTP version 3")
        found = {}
        while fields.more():
            name = fields.text()
            found[name] = fields.text()
        self.extensions = found

    def settle(self) -> None:
        """Hear out what nobody waits for any more, so that the wire can be used by somebody else."""
        self._early.clear()
        while self._pending:
            self._next()
            self._early.clear()

    # Files

    def stat(self, path: str) -> Attributes:
        """What ``path`` is, links followed."""
        return self._ask(_ATTRIBUTES, _STAT, _string(path)).attributes()

    def looks(self, paths: Sequence[str]) -> list[Attributes | None]:
        """What each of ``paths`` is, links not followed, in their order; None for one that does not exist. All are
        asked for at once."""
        found: list[Attributes | None] = []
        for number in [self._request(_LSTAT, _string(path)) for path in paths]:
            found.append(None)
            with _unless(MISSING):
                found[-1] = self._answer(number, _ATTRIBUTES).attributes()
        return found

    def resolve(self, path: str) -> str:
        """The absolute path that the server makes of ``path``."""
        fields = self._ask(_NAME, _REALPATH, _string(path))
        fields.u32()
        return fields.text()

    def create(self, path: str, mode: int) -> bytes:
        """A handle for writing; the file is made where it is not there."""
        return self.open(path, _WRITE | _CREATE, mode)

    def reopen(self, path: str) -> bytes:
        """A handle for writing into a file that is there."""
        return self.open(path, _WRITE)

    def fstat(self, handle: bytes) -> Attributes:
        """What the open file is."""
        return self._ask(_ATTRIBUTES, _FSTAT, _string(handle)).attributes()

    def close(self, handle: bytes) -> None:
        """Close a handle; an error of earlier writes may come only now."""
        self._do(_CLOSE, _string(handle))

    def ask_write(self, handle: bytes, offset: int, piece: bytes) -> int:
        """Send a piece of at most BLOCK bytes; ``written`` waits until the server has it."""
        return self._request(_PUT, _string(handle), struct.pack(">Q", offset), _string(piece))

    def finish(self, handle: bytes, *, seconds: float) -> Attributes:
        """Make a written file durable, where the server can, and close it; the disk may take ``seconds`` for that."""
        usual = self._seconds
        self.wait_for(seconds)
        try:
            syncing = self._request(_EXTEND, _string(FSYNC), _string(handle)) if FSYNC in self.extensions else None
            looking = self._request(_FSTAT, _string(handle))
            closing = self._request(_CLOSE, _string(handle))
            if syncing is not None:
                self.done(syncing)
            found = self._answer(looking, _ATTRIBUTES).attributes()
            self.done(closing)
            return found
        finally:
            self.wait_for(usual)

    def ask_bytes(self, handle: bytes, offset: int, length: int) -> int:
        """Ask for a piece; ``bytes_of`` gives it."""
        return self._request(_GET, _string(handle), struct.pack(">QI", offset, length))

    def bytes_of(self, number: int) -> bytes:
        """At least one byte, at most as many as were asked for. Raises StatusError(END) at the file's end."""
        return self._answer(number, _DATA).raw()

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._do(_REMOVE, _string(path))

    def move(self, old: str, new: str) -> None:
        """In one step, in place of what had the name."""
        self._do(_EXTEND, _string(POSIX_RENAME), _string(old), _string(new))

    def link(self, old: str, new: str) -> None:
        """Another name for a file (hardlink@openssh.com); it fails where ``new`` exists."""
        self._do(_EXTEND, _string(HARDLINK), _string(old), _string(new))

    def move_unless_there(self, old: str, new: str) -> None:
        """As the protocol's own rename: it fails where ``new`` exists."""
        self._do(_RENAME, _string(old), _string(new))

    # Folders

    def make_folder(self, path: str, mode: int) -> None:
        """Make a folder; its parent must exist."""
        self._do(_MKDIR, _string(path), struct.pack(">II", _MODE, mode))

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        self._do(_RMDIR, _string(path))

    def sync_folder(self, path: str, *, seconds: float) -> None:
        """Make new and changed names in ``path`` durable. Raises StatusError where this server cannot do that."""
        handle = self.open(path)
        self.finish(handle, seconds=seconds)

    def folders(self, paths: Sequence[str]) -> list[list[tuple[str, Attributes]] | None]:
        """What is in each of ``paths``, in their order: names and what they are, links not followed; None for one that
        does not exist. All are asked for at once."""
        opening = [self._request(_OPENDIR, _string(path)) for path in paths]
        handles: dict[int, bytes] = {}
        found: list[list[tuple[str, Attributes]] | None] = [None] * len(paths)
        try:
            for index, number in enumerate(opening):
                with _unless(MISSING):
                    handles[index] = self._answer(number, _HANDLE).raw()
            unread = dict(handles)
            while unread:
                reading = {index: self._request(_READDIR, _string(handle)) for index, handle in unread.items()}
                unread = {}
                for index, number in reading.items():
                    with _unless(END):
                        more = list(self._answer(number, _NAME).names())
                        there = found[index] = found[index] or []
                        there += more
                        if not more or len(there) > _MOST_NAMES:
                            raise LostError(f"its listing of {paths[index]} does not end: {len(there)} names until now")
                        unread[index] = handles[index]
        finally:
            for closing in [self._request(_CLOSE, _string(handle)) for handle in handles.values()]:
                self.done(closing)
        return [names if names is not None or index not in handles else [] for index, names in enumerate(found)]

    def space(self, path: str) -> Space:
        """Room of the file system that ``path`` is on (statvfs@openssh.com)."""
        fields = self._ask(_EXTEND_REPLY, _EXTEND, _string(STATVFS), _string(path))
        _block, unit, blocks, _free, available, inodes, _free_inodes, left = (fields.u64() for _ in range(8))
        return Space(total=blocks * unit, free=available * unit, free_inodes=left if inodes else None)

    # The protocol

    def open(self, path: str, flags: int = _READ, mode: int | None = None) -> bytes:
        """A handle, for reading where nothing else is said; with OpenSSH also of a folder, for ``sync``."""
        attributes = struct.pack(">I", 0) if mode is None else struct.pack(">II", _MODE, mode)
        return self._ask(_HANDLE, _OPEN, _string(path), struct.pack(">I", flags), attributes).raw()

    def _do(self, kind: int, *fields: bytes) -> None:
        self.done(self._request(kind, *fields))

    def _ask(self, want: int, kind: int, *fields: bytes) -> _Fields:
        return self._answer(self._request(kind, *fields), want)

    def _request(self, kind: int, *fields: bytes) -> int:
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._send(struct.pack(">BI", kind, self._number) + b"".join(fields))
        self._pending.add(self._number)
        return self._number

    def done(self, number: int) -> None:
        """Wait until the server has done what has this number. Raises StatusError unless it was done."""
        self._answer(number, _STATUS)

    def _answer(self, number: int, want: int) -> _Fields:
        while number not in self._early:
            self._next()
        kind, fields = self._early.pop(number)
        if kind == _STATUS:
            code = fields.u32()
            if code != 0:
                raise StatusError(code, fields.text() if fields.more() else "")
        if kind != want:
            raise LostError(f"the server answered {kind} where {want} was expected")
        return fields

    def _next(self) -> None:
        kind, fields = self._packet()
        number = fields.u32()
        if number not in self._pending:
            raise LostError("the server sent an answer to no request")
        self._pending.remove(number)
        self._early[number] = kind, fields

    def _send(self, content: bytes) -> None:
        try:
            self._channel.sendall(struct.pack(">I", len(content)) + content)
        except TimeoutError as error:
            raise LostError(f"it accepted no data for {self._seconds:g} seconds", hangs=True) from error
        except (OSError, EOFError) as error:
            raise LostError(str(error) or "the connection was closed") from error

    def _packet(self) -> tuple[int, _Fields]:
        size = int.from_bytes(self._bytes(4))
        if not 1 <= size <= _LARGEST:
            raise LostError("the server's data is not SFTP; does its login print something?")
        content = self._bytes(size)
        return content[0], _Fields(content, 1)

    def _bytes(self, count: int) -> bytes:
        while len(self._buffer) < count:
            try:
                more = self._channel.recv(256 * 1024)
            except TimeoutError as error:
                raise LostError(f"no answer within {self._seconds:g} seconds", hangs=True) from error
            except (OSError, EOFError) as error:
                raise LostError(str(error) or "the connection was closed") from error
            if not more:
                raise LostError("the connection was closed")
            self._buffer += more
        found = bytes(memoryview(self._buffer)[:count])
        del self._buffer[:count]
        return found


class _Fields:
    """The fields of an answer, one after the other."""

    def __init__(self, content: bytes, start: int) -> None:
        self._content = content
        self._at = start

    def more(self) -> bool:
        return self._at < len(self._content)

    def u32(self) -> int:
        return int.from_bytes(self._take(4))

    def u64(self) -> int:
        return int.from_bytes(self._take(8))

    def raw(self) -> bytes:
        return self._take(self.u32())

    def text(self) -> str:
        return self.raw().decode("utf-8", "surrogateescape")

    def attributes(self) -> Attributes:
        flags = self.u32()
        size = self.u64() if flags & _SIZE else 0
        if flags & _OWNER:
            self._take(8)
        mode = self.u32() if flags & _MODE else 0
        modified = 0
        if flags & _TIMES:
            self._take(4)
            modified = self.u32()
        if flags & _EXTENDED:
            for _ in range(self.u32()):
                self.raw()
                self.raw()
        return Attributes(size, mode, modified)

    def names(self) -> Iterator[tuple[str, Attributes]]:
        for _ in range(self.u32()):
            name = self.text()
            self.raw()  # as `ls -l` would show it
            yield name, self.attributes()

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._content):
            raise LostError("the server sent half an answer")
        found = self._content[self._at : end]
        self._at = end
        return found


@contextlib.contextmanager
def _unless(code: int) -> Iterator[None]:
    """The server may say ``code``."""
    try:
        yield
    except StatusError as error:
        if error.code != code:
            raise


def _string(value: str | bytes) -> bytes:
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return struct.pack(">I", len(raw)) + raw
