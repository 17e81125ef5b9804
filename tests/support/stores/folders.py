"""Short temporary folders that the database's own user can enter.

pytest's ``tmp_path`` is deep (a socket path may have 107 bytes) and closed to other users, so a server that
runs as ``mysql`` cannot live there.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

DATABASE_USER = "mysql"


def runs_as_root() -> bool:
    return os.geteuid() == 0


def give_to_database(path: Path) -> None:
    """Make ``path`` (not its content) belong to the database's user; nothing happens when we are not root."""
    if runs_as_root():
        entry = pwd.getpwnam(DATABASE_USER)
        os.chown(path, entry.pw_uid, entry.pw_gid)


_made: list[Path] = []
_kept: list[Path] = []
_keeping = False


def keep() -> None:
    """Remove no folder of a test from now on: its data differs from what it should be."""
    global _keeping  # noqa: PLW0603 - what is asked for by an exception and done by fixtures has no common owner
    _keeping = True


def keep_nothing() -> None:
    """The test has passed all the same: remove what was kept."""
    global _keeping  # noqa: PLW0603
    _keeping = False
    for path in _kept:
        shutil.rmtree(path, ignore_errors=True)
    _kept.clear()


def discard(path: Path) -> None:
    """Remove a test's folder, unless it is to be kept."""
    if _keeping:
        _kept.append(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def living() -> list[Path]:
    """The folders of this process's tests, those that templates are in left out."""
    return [path for path in _made if path.exists() and path.name.startswith("bt-") and "-" not in path.name[3:]]


def make_short_directory(prefix: str = "bt-", base: str = "") -> Path:
    """A new folder such as ``/tmp/bt-x3k9``, 0755 and owned by the database's user; in ``base``, or where the
    environment wants it."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=base or os.environ.get("BACKUPD_TEST_TMP", "/tmp")))
    path.chmod(0o755)
    give_to_database(path)
    _made.append(path)
    return path


@contextlib.contextmanager
def short_directory(prefix: str = "bt-", base: str = "") -> Iterator[Path]:
    """``make_short_directory`` that is removed at the end."""
    path = make_short_directory(prefix, base)
    try:
        yield path
    finally:
        discard(path)
