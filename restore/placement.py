"""Puts a prepared copy where the server will look for it, so that a half-done restore can never be started.

By one rename where that works. Otherwise name by name, from a journal: the redo log first and the system
tablespace last, because a server refuses to start on a redo log without a system tablespace; and while names
are moved the data directory is closed to the server's user.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from backupd.engine.physical.datafiles import assert_local
from backupd.model.errors import BackupdError, RefusedError
from backupd.process.command import Command
from backupd.process.folders import sync_folder
from backupd.process.pipeline import run
from restore.datadir.occupancy import FOLDER_MODE, Account, hand_over, refuse_non_empty
from restore.datadir.staging import MARKER, Site, State, read_marker, write_marker, write_state
from restore.fetch.objects import sync_filesystem

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
        if path.is_file() and not path.is_symlink() and any(fnmatch.fnmatchcase(path.name, p) for p in patterns):
            path.unlink()


def place(site: Site, state: State, account: Account, leftovers: Sequence[str]) -> State:
    """From ``site.data`` to ``site.datadir``, durable; may be repeated after a kill at any moment.

    ``state`` is ``prepared`` or ``placing``; the one given back is ``placed`` and lies as the marker in the
    data directory. Raises RefusedError when something got into the data directory meanwhile.
    """
    placed = replace(state, stage="placed", moves=())
    site.refuse_moved()
    try:
        if state.stage != "placing":
            remove_leftovers(site.data, leftovers)
            write_marker(site.data, placed)
            hand_over(site.data, account, folder_mode=state.mode)
            if site.store.is_dir():
                write_marker(site.store, placed)
                hand_over(site.store, account, folder_mode=FOLDER_MODE)
            sync_filesystem(site.folder)
            moves = tuple(_in_order(path.name for path in site.data.iterdir()))
            state = replace(state, stage="placing", moves=moves)
            write_state(site, state)
        _place_store(site, state)
        if site.inside:
            _move_all(site, state, account)
        else:
            _rename(site)
    except OSError as error:
        raise BackupdError(
            f"cannot put the restored files into {site.datadir}: {error.strerror}",
            hint="mend that and repeat the command: it continues where it stopped",
        ) from error
    return placed


def clear(site: Site) -> None:
    """Remove the staging folder, of which nothing is needed any more; what is not backupd's stays where it is."""
    with contextlib.suppress(OSError):
        for path in site.built():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        site.folder.rmdir()
    if site.folder.parent.is_dir():
        sync_folder(site.folder.parent)


def _place_store(site: Site, state: State) -> None:
    """The tablespaces from elsewhere first: without them the data directory must not be complete."""
    if site.store.is_dir():
        marker = read_marker(site.final_store)
        if marker is None or not marker.same_work(state):
            refuse_non_empty(site.final_store)
            _bring(site.store, site.final_store)
            sync_folder(site.final_store.parent)
        shutil.rmtree(site.store, ignore_errors=True)
    if site.data.is_dir():
        assert_local(site.data, site.final_store)


def _bring(source: Path, goal: Path) -> None:
    """Rename a folder, or copy it where the data directory is a file system of its own and beside it is another."""
    try:
        source.rename(goal)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        fresh = goal.with_name(f"{goal.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        run(Command(("cp", "-a", "--sparse=always", "--", str(source), str(fresh))))
        sync_filesystem(fresh)
        fresh.rename(goal)


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


def _move_all(site: Site, state: State, account: Account) -> None:
    refuse_non_empty(site.datadir, ours=(*site.ours, *state.moves))
    close_datadir(site)
    *content, marker = state.moves
    for name in content:
        _move(site, name)
    sync_folder(site.datadir)
    if os.geteuid() == 0:
        os.chown(site.datadir, account.uid, account.gid)
    site.datadir.chmod(state.mode)
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
