"""Puts a prepared copy where the server will look for it, so that a half-done restore can never be started.

By one rename where that works. Otherwise name by name, from a journal: the redo log first and the system
tablespace last, because a server refuses to start on a redo log without a system tablespace; and while names
are moved the data directory is closed to the server's user.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from backupd.model.errors import BackupdError, RefusedError
from restore.fetch import sync_filesystem
from restore.occupancy import refuse_non_empty
from restore.ownership import Account, hand_over
from restore.staging import MARKER, Site, State, sync_folder, write_marker, write_state

DATADIR_MODE = 0o750
"""Of a data directory that did not exist; an existing one keeps its own."""
_CLOSED = 0o700
_REDO = ("ib_logfile*", "#innodb_redo", "#ib_redo*")
_SYSTEM = ("ibdata*", "mysql.ibd")


def close_datadir(site: Site) -> None:
    """Keep the server's user out of a data directory that is being filled from inside. Only root can."""
    if site.inside and os.geteuid() == 0:
        os.chown(site.datadir, 0, 0)
        site.datadir.chmod(_CLOSED)


def remove_leftovers(folder: Path, patterns: Sequence[str]) -> None:
    """Remove the files (never folders: a schema may bear any name) at the top of ``folder`` that match."""
    for path in folder.iterdir():
        if (
            path.is_file()
            and not path.is_symlink()
            and any(fnmatch.fnmatchcase(path.name, p) for p in patterns)
        ):
            path.unlink()


def place(
    site: Site, state: State, account: Account, leftovers: Sequence[str], *, datadir_mode: int
) -> State:
    """From ``site.data`` to ``site.datadir``, durable; may be repeated after a kill at any moment.

    ``state`` is ``prepared`` or ``placing``; the one given back is ``placed`` and lies as the marker in the
    data directory. Raises RefusedError when something got into the data directory meanwhile.
    """
    placed = replace(state, stage="placed", moves=())
    try:
        if state.stage != "placing":
            remove_leftovers(site.data, leftovers)
            write_marker(site.data, placed)
            hand_over(site.data, account, folder_mode=datadir_mode)
            sync_filesystem(site.folder)
            moves = tuple(_in_order(path.name for path in site.data.iterdir()))
            state = replace(state, stage="placing", moves=moves)
            write_state(site, state)
        if site.inside:
            _move_all(site, state, account, datadir_mode)
        else:
            _rename(site)
    except OSError as error:
        raise BackupdError(
            f"cannot put the restored files into {site.datadir}: {error.strerror}",
            hint="mend that and repeat the command: it continues where it stopped",
        ) from error
    return placed


def clear(site: Site) -> None:
    """Remove the staging folder, of which nothing is needed any more."""
    shutil.rmtree(site.folder, ignore_errors=True)
    if site.folder.parent.is_dir():
        sync_folder(site.folder.parent)


def _rename(site: Site) -> None:
    if not site.data.exists():
        return  # renamed by an earlier attempt
    try:
        # Replaces an empty directory in one step, and fails on one that something was put into meanwhile.
        site.data.rename(site.datadir)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            refuse_non_empty(site.datadir)
        raise
    sync_folder(site.datadir.parent)


def _in_order(names: Iterable[str]) -> list[str]:
    """Redo first, system tablespace last, the marker after everything."""

    def rank(name: str) -> int:
        if name == MARKER:
            return 3
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _SYSTEM):
            return 2
        return 0 if any(fnmatch.fnmatchcase(name, pattern) for pattern in _REDO) else 1

    return sorted(names, key=lambda name: (rank(name), name))


def _move_all(site: Site, state: State, account: Account, datadir_mode: int) -> None:
    refuse_non_empty(site.datadir, ours=(*site.ours, *state.moves))
    close_datadir(site)
    *content, marker = state.moves
    for name in content:
        _move(site, name)
    sync_folder(site.datadir)
    if os.geteuid() == 0:
        os.chown(site.datadir, account.uid, account.gid)
    site.datadir.chmod(datadir_mode)
    _move(site, marker)
    sync_folder(site.datadir)


def _move(site: Site, name: str) -> None:
    source, goal = site.data / name, site.datadir / name
    if os.path.lexists(source):
        if os.path.lexists(goal):
            raise RefusedError(
                f"{goal} appeared while the restore was being put in place",
                hint="remove what does not belong there and repeat the command",
            )
        source.rename(goal)
    elif not os.path.lexists(goal):
        raise RefusedError(
            f"{name!r} is gone from {site.data}: somebody else was at work there",
            hint=f"remove {site.folder} and everything the restore put beside it, then restore anew",
        )
