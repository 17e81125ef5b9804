"""Where a restore may go: what can be told before it begins, and for whom."""

from __future__ import annotations

import os
from pathlib import Path

from backupd.app.restorerequest import RestoreRequest
from backupd.app.wiring import Wiring
from backupd.model.access import Actor, Role
from backupd.model.errors import ForbiddenError, RefusedError
from restore.occupancy import refuse_nested, refuse_non_empty
from restore.staging import INSIDE, unfinished
from restore.state import read_marker


def refuse_place(wiring: Wiring, actor: Actor, request: RestoreRequest) -> None:
    """Raises ForbiddenError for a folder that ``actor`` may not restore into, NotFoundError for a server that is not
    there for it, RefusedError for a folder in which something lies that is not of this very restore."""
    if request.into:
        wiring.settings.server(request.into)
    folder = request.sql or request.datadir
    if not folder:
        return
    _allowed(wiring, actor, folder)
    try:
        if request.sql:
            refuse_non_empty(Path(folder))
        else:
            _refuse_foreign(Path(os.path.realpath(folder)), request)
    except OSError as error:
        raise RefusedError(f"{folder} cannot be looked at: {error.strerror or error}",
                           hint="name a folder that the service may read and write") from error


def _allowed(wiring: Wiring, actor: Actor, folder: str) -> None:
    if actor.has(Role.ADMIN):
        return
    allowed = wiring.settings.needs_restore().folders
    real = Path(os.path.realpath(folder))
    if not any(real.is_relative_to(os.path.realpath(one)) and real != Path(os.path.realpath(one)) for one in allowed):
        raise ForbiddenError(
            f"an operator may not restore into {folder}",
            detail=f"allowed is any folder beneath {', '.join(map(str, allowed))}" if allowed else
            "restore.folders names no folder for operators",
            hint="choose a folder beneath one of restore.folders in the configuration, or ask an admin")


def _refuse_foreign(datadir: Path, request: RestoreRequest) -> None:
    """What an interrupted restore of the same server left is no obstacle: whether it is of the same backup, and nobody
    lives there, the restore itself looks at."""
    refuse_nested(datadir)
    if unfinished(datadir) is not None:
        return
    marker = read_marker(datadir)
    if marker is not None and marker.server == request.server and request.start:
        return  # one that is finished: its server is asked for again
    refuse_non_empty(datadir, ours=(INSIDE,))
