"""Whose files a restored data directory holds, and with which modes: the server's user, nobody else's."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import RefusedError

FILE_MODE = 0o660
FOLDER_MODE = 0o700
"""As the servers themselves make them."""


@dataclass(frozen=True, slots=True)
class Account:
    """An operating system user by name, with its numbers on this machine."""

    name: str
    uid: int
    gid: int


def find_account(name: str) -> Account:
    """Raises RefusedError for a user that does not exist, or to whom we may not give files."""
    try:
        found = pwd.getpwnam(name)
    except KeyError as error:
        raise RefusedError(
            f"there is no user {name!r} on this machine",
            hint="install the database server first, or name its user with the server's `owner` in backupd.yaml",
        ) from error
    if os.geteuid() not in (0, found.pw_uid):
        raise RefusedError(
            f"only root may give files to the user {name!r}", hint=f"run the restore as root or as {name}"
        )
    return Account(name, found.pw_uid, found.pw_gid)


def hand_over(folder: Path, account: Account, *, folder_mode: int) -> None:
    """Give everything below ``folder`` to ``account`` with the servers' modes, and itself with
    ``folder_mode``."""
    for root, folders, files in os.walk(folder):
        for name in folders:
            _give(Path(root, name), account, FOLDER_MODE)
        for name in files:
            _give(Path(root, name), account, FILE_MODE)
    _give(folder, account, folder_mode)


def _give(path: Path, account: Account, mode: int) -> None:
    found = path.lstat()
    if (found.st_uid, found.st_gid) != (account.uid, account.gid):
        os.lchown(path, account.uid, account.gid)
    if not stat.S_ISLNK(found.st_mode) and stat.S_IMODE(found.st_mode) != mode:
        path.chmod(mode)
