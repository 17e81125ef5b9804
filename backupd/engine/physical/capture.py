"""What every physical backup tool looks like to the rest: a capture that yields files, and a prepare.

The events of a capture arrive in the order of the tool's stream; several files may be open at once. A file
exists for the reader from its first event to its ``End``; an empty file has only an ``End``.

``ingest`` reads a folder of files as such events. The files were written by another user, who may have put links in
their place: nothing is followed, and nothing but plain files with one name is read.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Protocol

from backupd.engine.sql.client import Connection
from backupd.model.errors import OTHER_BACKUP, CancelledError, DamagedError, ToolError
from backupd.model.server_facts import Receipts, Tool, WsrepState
from backupd.model.table import BaseTable, TableName
from backupd.process.command import Command


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of ``path`` at ``offset``. ``payload`` is a view of a reused buffer: valid until the next
    event.
    """

    path: str
    offset: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Hole:
    """``length`` bytes of ``path`` at ``offset`` were never written at the source; they read as zeros."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class End:
    """``path`` is complete."""

    path: str


@dataclass(frozen=True, slots=True)
class Remove:
    """``path``, which had ended, is not part of the backup after all: its table was dropped while the tool
    ran, or the tool copies it again (then its new content follows)."""

    path: str


@dataclass(frozen=True, slots=True)
class Rename:
    """``path``, which had ended, is called ``to``: its table was renamed while the tool ran. There is no
    ``to`` yet.
    """

    path: str
    to: str


FileEvent = Data | Hole | End | Remove | Rename

LeftOut = Callable[[str], bool]
"""Was a file (its path in the data directory) left out of a copy on purpose?"""


def nothing(_path: str) -> bool:
    """Of a whole copy: every file must be there."""
    return False


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to back up and how.

    ``workdir``: an empty private folder for the tool's own small files. ``parallel``: reading threads of
    the tool. ``incremental_lsn``: copy only pages newer than this, None for everything. ``on_stderr`` gets
    every line the tool prints, as printed, from another thread. ``replica``: also record what the server
    replicates from (the account then needs REPLICA MONITOR). ``log``: file for the tool's whole stderr,
    redacted. ``cancel``: set it to stop. ``spool``: a folder on a disk, for a tool that cannot stream and has to copy
    the server first; made if needed.
    """

    connection: Connection
    workdir: Path
    parallel: int = 1
    incremental_lsn: int | None = None
    on_stderr: Callable[[str], None] | None = None
    replica: bool = False
    log: Path | None = None
    cancel: threading.Event | None = None
    spool: Path | None = None


@dataclass(frozen=True, slots=True)
class Stock:
    """What is known of the tables that a backup should hold. ``inventory``: all of them, at the backup's position; None
    where that is not known, and ``problem`` says why. ``missing``: tables that the server had at that position and of
    which a file is not in the backup. ``fetched``: tables whose files the tool left out and that were read from the
    server instead. ``swapped``: stems of tables of InnoDB that took each other's names while the tool ran. ``node``: of
    a Galera node, as it was at the backup's position; None where that is not known."""

    inventory: tuple[BaseTable, ...] | None = None
    missing: tuple[BaseTable, ...] = ()
    fetched: tuple[TableName, ...] = ()
    swapped: tuple[str, ...] = ()
    problem: str = ""
    node: WsrepState | None = None


class Capture(AbstractContextManager["Capture"], Protocol):
    """One run of the tool. A context manager; leaving it early leaves no process."""

    @property
    def tool(self) -> Tool:
        """The program that makes this backup."""

    @property
    def log_tail(self) -> str:
        """The tool's last lines, redacted."""

    def events(self) -> Iterator[FileEvent]:
        """Ends only when the whole run is verified good: exit code, the tool's own end mark, its receipts
        present, every file ended. Raises ToolError with the tool's last lines, or StreamError."""

    def receipts(self) -> Receipts:
        """What the tool recorded about this run; after ``events`` has ended. Raises StreamError when
        unreadable.
        """

    def stock(self) -> Stock:
        """Which tables the backup should hold, and which it does not; after ``events`` has ended."""


class CaptureRun:
    """What the captures of all tools have in common."""

    def __init__(self, tool: Tool, request: CaptureRequest) -> None:
        self.tool, self._request = tool, request
        self._stack = ExitStack()
        self._receipts: Receipts | None = None

    def receipts(self) -> Receipts:
        """Raises ValueError before the events have ended."""
        if self._receipts is None:
            raise ValueError("the capture has not ended yet")
        return self._receipts

    def __exit__(self, *_error: object) -> None:
        self._stack.close()


@dataclass(frozen=True, slots=True)
class PrepareStep:
    """``command``: what to run, confined to the folders it works on where the host can do that. ``plain``:
    the same without the confinement, as a runbook shows it. ``before``: to be called right before it."""

    title: str
    command: Command
    plain: Command
    before: Callable[[], object] | None = None


class PhysicalTool(Protocol):
    """A physical tool of one flavour and series."""

    @property
    def tool(self) -> Tool:
        """The program, as manifests name it."""

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Glob patterns of files at the top of a prepared backup that do not belong into a datadir."""

    @property
    def takes_increments(self) -> bool:
        """Can it copy what changed since a log sequence number (``CaptureRequest.incremental_lsn``)?"""

    def capture(self, request: CaptureRequest) -> Capture:
        """One run that makes a backup; nothing is started before it is entered."""

    def prepare(self, base: Path, increments: Sequence[Path] = (), *, memory: int) -> tuple[PrepareStep, ...]:
        """The steps that make ``base`` startable; ``memory`` in bytes. Each one's stderr is wanted by
        ``verify_prepared``. Raises DamagedError when files are missing that the tool itself would not
        miss."""

    def verify_prepared(
        self, base: Path, receipts: Receipts, logs: Sequence[str], *, left_out: LeftOut = nothing
    ) -> None:
        """Did prepare really reach the end of the redo? ``receipts`` of the last backup applied, ``logs``:
        stderr of each step in order; only files that were ``left_out`` may be missing. Raises ToolError; the tools
        say "completed OK!" over damaged backups."""

    def redo_bytes(self, base: Path) -> int:
        """Size of the redo that prepare has to apply, in bytes."""


def file_sizes(base: Path) -> dict[str, int]:
    """Bytes of every regular file below ``base``, by relative path with forward slashes; links are not followed and not
    listed."""
    files = (path for path in sorted(base.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(base).as_posix(): path.lstat().st_size for path in files}


def verify_files(base: Path, expected: Mapping[str, int]) -> None:
    """Is every expected file there, with its size in bytes, and nothing else? Call it before ``prepare``:
    the tools prepare a backup that lacks tables and say that all is well. Raises DamagedError with every
    difference."""
    there = file_sizes(base)
    wrong: list[str] = []
    for path in sorted({*expected, *there}):
        wanted, found = expected.get(path), there.get(path)
        if found is None:
            wrong.append(f"{path} is missing ({wanted} bytes)")
        elif wanted is None:
            wrong.append(f"{path} is not a file of the backup ({found} bytes)")
        elif found != wanted:
            wrong.append(f"{path} has {found} bytes instead of {wanted}")
    if wrong:
        raise DamagedError(f"{len(wrong)} files in {base} are not those of the backup", wrong, hint=OTHER_BACKUP)


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
                f"{path} of the copy is not a regular file of the server's user",
                detail=f"{stat.filemode(status.st_mode)}, {status.st_nlink} names, uid {status.st_uid}",
                hint="another process changed the copy while it was made; no part of this backup was kept",
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
