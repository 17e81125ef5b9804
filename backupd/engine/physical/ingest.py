"""Reading a folder of files as a capture's events, each file removed once it was read.

The files were written by another user, who may have had links lie there instead: nothing is followed, and nothing but
plain files with one name is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from threading import Event

from backupd.engine.physical.capture import Data, End, FileEvent, Hole
from backupd.model.errors import CancelledError, ToolError

CHUNK = 4 * 1024 * 1024
MARK = "db.opt"
"""The file that stands for an empty schema: a backup holds files, not folders. The servers' own name for what belongs
to a schema; one that no longer needs it removes it with the schema."""

Wanted = Callable[[PurePosixPath], bool]


def ingest(base: Path, wanted: Wanted, *, owner: int, cancel: Event | None = None) -> Iterator[FileEvent]:
    """Every file below ``base`` that is ``wanted`` (paths relative to it), in order of names; what is not is left.

    ``owner``: the user id that they must belong to. A folder at the top without files yields an empty ``MARK``.
    Raises ToolError for what is no plain file of theirs, CancelledError.
    """
    buffer = bytearray(CHUNK)
    for root, folders, files, descriptor in os.fwalk(base, follow_symlinks=False):
        folders.sort()
        inside = PurePosixPath(os.path.relpath(root, base))
        names = [name for name in sorted(files) if wanted(inside / name)]
        for name in names:
            yield from _file(descriptor, name, inside / name, owner, buffer, cancel)
            os.unlink(name, dir_fd=descriptor)
        if not names and not folders and len(inside.parts) == 1 and wanted(inside / MARK):
            yield End(str(inside / MARK))


def _file(
    folder: int, name: str, path: PurePosixPath, owner: int, buffer: bytearray, cancel: Event | None
) -> Iterator[FileEvent]:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise ToolError(f"{path} of the copy cannot be read: {error.strerror}") from error
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor has no path
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != owner:
            raise ToolError(
                f"{path} of the copy is not a plain file of the server's own",
                detail=f"{stat.filemode(status.st_mode)}, {status.st_nlink} names, uid {status.st_uid}",
                hint="somebody changed the copy while it was made; nothing was kept of this backup",
            )
        view = memoryview(buffer)
        position = 0
        for begin, end in extents(descriptor, status):
            if begin > position:
                yield Hole(str(path), position, begin - position)
            position = begin
            file.seek(begin)
            while position < end:
                if cancel is not None and cancel.is_set():
                    raise CancelledError("the backup was cancelled")
                count = file.readinto(view[: min(CHUNK, end - position)])
                if not count:
                    raise ToolError(f"{path} of the copy became shorter while it was read")
                yield Data(str(path), position, view[:count])
                position += count
        if position < status.st_size:
            yield Hole(str(path), position, status.st_size - position)
        yield End(str(path))


def extents(descriptor: int, status: os.stat_result) -> Iterator[tuple[int, int]]:
    """(begin, end) of what was written to a file."""
    if status.st_blocks * 512 >= status.st_size:
        yield 0, status.st_size
        return
    position = 0
    while position < status.st_size:
        try:
            begin = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError:  # nothing but a hole up to the end
            return
        position = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, position
