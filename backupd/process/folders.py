"""Folders for the time of one job, that the next job removes when this one was killed.

Who works in such a folder holds a lock on it; where nobody does, its owner is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PASSABLE = 0o711
"""Others may pass through to what they are told of, and list nothing."""


def make_passable(folder: Path) -> None:
    """Make ``folder`` if needed, and let others pass through it, whatever the umask is, where it is ours.

    Raises OSError.
    """
    folder.mkdir(mode=PASSABLE, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o011 != 0o011:
        folder.chmod(status.st_mode & 0o7777 | 0o011)


@contextlib.contextmanager
def locked_folder(folder: Path, *, mode: int = PASSABLE) -> Iterator[Path]:
    """Make ``folder``, hold its lock, and remove it with everything in it at the end. Raises OSError."""
    descriptor = _locked(folder, mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked(folder: Path, mode: int) -> int:
    """Make and lock it. Between the two somebody may take it for a dead one's, and remove it: then once more."""
    while True:
        folder.mkdir(mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            os.fchmod(descriptor, mode)  # whatever the umask is
            return descriptor
        os.close(descriptor)


def remove_dead(base: Path, prefix: str) -> tuple[str, ...]:
    """Remove the folders in ``base`` that begin with ``prefix`` and that nobody holds. Gives their names."""
    removed = []
    for folder in sorted(base.glob(f"{prefix}*")):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # not a folder of ours, or just removed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
        finally:
            os.close(descriptor)
    return tuple(removed)
