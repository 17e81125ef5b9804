"""Whose files a restored data directory holds, and with which modes: the server's user, nobody else's."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.instance.sandbox import out_of_reach, worker
from backupd.model.errors import DamagedError, RefusedError
from backupd.process.folders import closed_words, give, give_in

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


def refuse_closed(datadir: Path, account: Account) -> None:
    """Raises RefusedError where a folder above ``datadir`` (a real path) lets the server's user not pass: no server
    could run there."""
    user = account.name if os.geteuid() == 0 else None
    there = [folder for folder in reversed(datadir.parents) if folder.exists()]
    if not out_of_reach(user, [f"{there[-1]}/."]):
        return
    closed = next(folder for folder in there if out_of_reach(user, [f"{folder}/."]))
    raise RefusedError(
        f"the server's user {account.name} cannot enter {closed}, so no server could run in {datadir}",
        detail=closed_words(closed),
        hint=f"let others pass through it (chmod o+x {closed}), or choose another data directory",
    )


def worker_account() -> Account:
    """Whose copies are while programs work on them: not yet the server's, under whose user others live. Raises
    RefusedError where there is no such user."""
    name = worker()
    return find_account(name if name is not None else pwd.getpwuid(os.geteuid()).pw_name)


def refuse_links(folder: Path) -> None:
    """Raises DamagedError for links and pipes in ``folder``, where a program worked on what may be forged: they would
    lead us, who have more power than it had, to other files, or stop us. No server and no tool makes any there."""
    found = [
        str(Path(root, name))
        for root, folders, files in os.walk(folder)
        for name in (*folders, *files)
        if stat.S_IFMT(Path(root, name).lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR)
    ]
    if found:
        raise DamagedError(
            f"links or pipes appeared in {folder} while a program worked there",
            found[:20],
            hint="nothing was put in place; the backup is not what a server gave: look who wrote it",
        )


def hand_over(folder: Path, account: Account, *, folder_mode: int) -> None:
    """Give everything below ``folder`` to ``account`` with the servers' modes, and itself with
    ``folder_mode``."""
    owner = (account.uid, account.gid)
    for _root, folders, files, descriptor in os.fwalk(folder):
        for name in folders:
            give_in(descriptor, name, owner, FOLDER_MODE)
        for name in files:
            give_in(descriptor, name, owner, FILE_MODE)
    give(folder, owner, folder_mode)
