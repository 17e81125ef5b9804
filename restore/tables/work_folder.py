"""The folder in which a restore of tables keeps what it has so far, from one attempt to the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from backupd.model.errors import BusyError, RefusedError
from backupd.process.folders import make_passable
from restore.tables.spec import TablesSpec

_PREFIX = "tables-"
_OVER = ".over"
"""At the end of a folder's name: its restore is over, it was killed while it removed this."""
_ABANDONED = 3 * 86400
"""Seconds after which what an unfinished restore left is taken for forgotten, when the next one begins."""


@contextlib.contextmanager
def workplace(spec: TablesSpec) -> Iterator[Path]:
    """The folder of this restore, locked. It is removed when the block is left well, and kept for the next attempt
    otherwise; what nobody came back to for days is removed first. Raises BusyError, RefusedError."""
    _remove_forgotten(spec.folder)
    folder = spec.folder / f"{_PREFIX}{spec.restore_id}"
    try:
        make_passable(spec.folder)
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise RefusedError(
            f"cannot keep the rows of tables at {folder}: {error.strerror}",
            hint="restore.scratch.path in the configuration must be a folder that this user may make folders in",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"restore {spec.restore_id} is being done by another process", hint="wait for it, or stop it"
            ) from None
        try:
            yield folder
        except BaseException:
            with contextlib.suppress(OSError):
                folder.rmdir()  # where there is nothing in it that the next attempt could use
            raise
        shutil.rmtree(folder.rename(folder.with_suffix(_OVER)), ignore_errors=True)
    finally:
        os.close(descriptor)


def discard(path: Path, restore_id: str) -> None:
    """Remove what a restore that nobody goes on with kept below ``path``, unless somebody is at it."""
    _remove(path / f"{_PREFIX}{restore_id}", lambda _folder: True)


def _remove_forgotten(path: Path) -> None:
    for folder in sorted(path.glob(f"{_PREFIX}*")):
        _remove(folder, lambda one: one.suffix == _OVER or time.time() - one.stat().st_mtime > _ABANDONED)


def _remove(folder: Path, condemned: Callable[[Path], bool]) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if condemned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
