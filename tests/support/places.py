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


def make_short_directory(prefix: str = "bt-") -> Path:
    """A new folder such as ``/tmp/bt-x3k9``, 0755 and owned by the database's user."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=os.environ.get("BACKUPD_TEST_TMP", "/tmp")))
    path.chmod(0o755)
    give_to_database(path)
    return path


@contextlib.contextmanager
def short_directory(prefix: str = "bt-") -> Iterator[Path]:
    """``make_short_directory`` that is removed at the end."""
    path = make_short_directory(prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
