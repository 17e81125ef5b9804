"""The program that copies binary logs at work: it believes every file name that the other side sends it.

The name of each file comes in a Rotate event, and the program opens it as it is: ``../../x`` as well. So it is never
root, and where anything can be confined its folder is all that it can write to; it keeps the host's network. What it
made lies in that folder, which is its own, and nothing there is opened or believed before it was taken away from it
(``collect``): one plain file, under the name of a binary log.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from backupd.engine.access.client_files import Handed, handed_over, owner_of
from backupd.engine.instance.sandbox import worker
from backupd.engine.logclient.log_client import BinlogTool
from backupd.engine.sql.client import Connection
from backupd.model.errors import MisnamedError, RefusedError
from backupd.process.command import Command
from backupd.process.folders import give


@dataclass(frozen=True, slots=True)
class LogClient:
    """How the program reaches one server."""

    tool: BinlogTool
    handed: Handed

    def stream(self, folder: Path, first: str, connection_id: int, *, start: int = 0) -> Command:
        """As of BinlogTool; ``folder`` was made by ``make_intake``."""
        return self._confined(self.tool.stream(self.handed.options, folder, first, connection_id, start=start), folder)

    def fetch(self, folder: Path, name: str, connection_id: int, *, start: int = 0) -> Command:
        """As of BinlogTool; ``folder`` was made by ``make_intake``."""
        return self._confined(self.tool.fetch(self.handed.options, folder, name, connection_id, start=start), folder)

    def _confined(self, command: Command, folder: Path) -> Command:
        plain = replace(command, user=worker())
        try:
            return self.handed.confined(plain, writable=[folder], scratch=False)
        except RefusedError:  # it cannot come to the folder by its path, and needs none
            return plain


@contextlib.contextmanager
def log_client(tool: BinlogTool, connection: Connection) -> Iterator[LogClient]:
    """``tool`` for this server while the block lasts. Raises RefusedError, OSError."""
    with handed_over(connection, worker(), tool.option_groups) as handed:
        yield LogClient(tool, handed)


def make_intake(folder: Path) -> None:
    """An empty folder of the program's own, in the place of whatever is called so. Raises OSError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    if (owner := owner_of(worker())) is not None:
        give(folder, owner, 0o700)


def collect(intake: Path, target: Path, address: str, *, expected: Callable[[str], bool]) -> None:
    """Take what the program made out of ``intake`` into ``target``, a folder of ours alone; it may go on writing.

    Raises MisnamedError for a name that is not ``expected``, and for what is no plain file of its own; OSError.
    """
    with _opened(intake) as there, _opened(target) as here:
        with os.scandir(there) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            if not expected(name):
                raise MisnamedError(name, address)
            _take(there, here, name, address)


def _take(there: int, here: int, name: str, address: str) -> None:
    os.rename(name, name, src_dir_fd=there, dst_dir_fd=here)
    # Only now nobody else can put something into its place.
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            os.rename(name, name, src_dir_fd=here, dst_dir_fd=there)
            raise MisnamedError(name, address, "it is no plain file of its own")
        if found.st_uid != os.geteuid():
            os.chown(name, os.geteuid(), os.getegid(), dir_fd=here, follow_symlinks=False)
        os.chmod(name, 0o600, dir_fd=here)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
