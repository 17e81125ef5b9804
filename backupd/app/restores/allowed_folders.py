"""Where a restore may write, and for whom: everything that can be checked before it begins."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from backupd.app.context.access import see
from backupd.app.context.wiring import Wiring
from backupd.app.restores.request import RestoreRequest
from backupd.model.access import Actor, Role
from backupd.model.errors import BusyError, ForbiddenError, RefusedError
from backupd.model.job import JobState
from restore.datadir.occupancy import refuse_nested, refuse_non_empty
from restore.datadir.staging import INSIDE, read_marker, unfinished


def with_real_paths(request: RestoreRequest) -> RestoreRequest:
    """With its folder as the system calls it: without symbolic links, dots and doubled slashes. One folder has one
    name then, and a job can check that it is still the one that was allowed."""
    return replace(
        request, **{name: os.path.realpath(folder) for name in ("datadir", "sql") if (folder := getattr(request, name))}
    )


def refuse_unseen(wiring: Wiring, actor: Actor, request: RestoreRequest) -> None:
    """Raises NotFoundError for a server that is not there for ``actor``."""
    for name in filter(None, (request.server, request.into)):
        see(actor, name, f"server {name[:80]!r}")
        (wiring.settings.server if name == request.server else wiring.settings.reached)(name)


def refuse_folder(wiring: Wiring, actor: Actor, request: RestoreRequest) -> None:
    """Raises ForbiddenError for a folder that ``actor`` may not restore into, RefusedError for one that holds
    something else than this very restore; what that is, only those who see all servers are shown. ``request`` is
    ``with_real_paths``."""
    folder = request.folder
    if not folder:
        return
    _allowed(wiring, actor, folder)
    _refuse_taken(request, named=actor.servers is None)


def refuse_changed(request: RestoreRequest) -> None:
    """For the job, once it begins: raises RefusedError where the folder has become another one since the request, or
    can no longer be used. Everybody who sees the server may read that, so nothing that the folder holds is named."""
    folder = request.folder
    if not folder:
        return
    if (leads := os.path.realpath(folder)) != folder:
        raise RefusedError(
            f"{folder} is no longer the folder that was requested",
            detail=f"it leads to {leads} now",
            hint="a symbolic link was put on its path: find out who did that, then request the restore again",
        )
    _refuse_taken(request, named=False)


def refuse_shared(wiring: Wiring, request: RestoreRequest) -> None:
    """Raises BusyError where a restore of another server waits or runs that goes there."""
    for state in (JobState.QUEUED, JobState.RUNNING):
        found = wiring.catalog.restores.list(state=state, datadir=request.datadir) if request.datadir else ()
        if any(row.server != request.server for row in found):
            raise BusyError(
                f"another restore into {request.datadir} is queued or running already", hint="choose another folder"
            )


def _allowed(wiring: Wiring, actor: Actor, folder: str) -> None:
    if actor.has(Role.ADMIN):
        return
    allowed = wiring.settings.needs_restore().folders
    real = Path(folder)
    if not any(real.is_relative_to(os.path.realpath(one)) and real != Path(os.path.realpath(one)) for one in allowed):
        raise ForbiddenError(
            f"an operator may not restore into {folder}",
            detail=f"allowed is any folder beneath {', '.join(map(str, allowed))}"
            if allowed
            else "restore.folders names no folder for operators",
            hint="choose a folder beneath one of restore.folders in the configuration, or ask an admin",
        )


def _refuse_taken(request: RestoreRequest, *, named: bool) -> None:
    folder = Path(request.folder)
    try:
        refuse_nested(folder)
        if request.sql:
            refuse_non_empty(folder)
        else:
            _refuse_foreign(folder, request)
    except RefusedError as error:
        if not named:
            error.detail = ""
        raise
    except OSError as error:
        raise RefusedError(
            f"{folder} cannot be read: {error.strerror or error}",
            hint="name a folder that the service may read and write",
        ) from error


def _refuse_foreign(datadir: Path, request: RestoreRequest) -> None:
    """What an interrupted restore of the same server left is no obstacle: the restore itself checks that it is of
    the same backup, and that no server runs on it."""
    earlier = unfinished(datadir)
    if earlier is not None and earlier.server == request.server:
        return
    if earlier is not None:
        raise RefusedError(
            f"{datadir} holds an unfinished restore of another server",
            detail=f"of {earlier.server}: backup {earlier.chain[-1]}, target {earlier.target}",
            hint="choose another folder; whoever started that restore can continue or remove it",
        )
    marker = read_marker(datadir)
    if marker is not None and marker.server == request.server and request.start:
        return  # one that is finished: its server is asked for again
    if request.of_node:
        return  # the old data directory of a dead node is moved aside, and looked at first
    refuse_non_empty(datadir, ours=(INSIDE,))
