"""The process from which the service forks those of its jobs and streams: ``python -m backupd.cli.fork_server``, with
the descriptor of a socket and the kinds of destinations in use.

It imports what they need, once, and holds nothing else: no settings, no connection, no secret.
"""

from __future__ import annotations

import pkgutil
import socket
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from backupd.process.forking import PACKAGES, TITLE_ROOM, answer_requests, files_state, show_as
from backupd.process.runtime import hide_memory

_NOT_NEEDED = (
    "backupd.__main__",
    "backupd.alerts.channels",
    "backupd.alerts.email",
    "backupd.app.alerting",
    "backupd.app.service.api_process",
    "backupd.app.service.daemon",
    "backupd.app.views.metrics",
    "backupd.catalog.migrations",
    "backupd.cli",
    "backupd.metrics",
)
"""Modules and packages, and what is in them, that no job and no stream imports."""
_KINDS = ("s3", "sftp")
"""Kinds of destinations with a library of others, which is imported where such a one is in use."""


def import_everything(kinds: Collection[str]) -> None:
    """What jobs and streams need with destinations of these ``kinds``, and the validators of the settings that are
    handed on to them; the command line's own part by and by."""
    unused = tuple(f"storage.{kind}" for kind in _KINDS if kind not in kinds)
    for package in PACKAGES:
        for found in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
            if not f"{found.name}.".startswith(tuple(f"{name}." for name in (*_NOT_NEEDED, *unused))):
                import_module(found.name)
    import_module("backupd.cli.commands.serve")
    from backupd.app.binlogs.stream_holder import code
    from policies.handed import prepare

    prepare()
    code()  # of the files that were imported: each stream needs it


def run(descriptor: int, kinds: Sequence[str]) -> int:
    """Serve; in a child: run its command. Gives the exit code."""
    folders = [folder for package in PACKAGES for folder in import_module(package).__path__]
    state = files_state(folders)  # before anything else is imported: what is exchanged from now on is seen
    hide_memory()
    show_as([sys.executable, "-m", "backupd.cli.fork_server", *kinds])
    import_everything(kinds)
    with socket.socket(fileno=descriptor) as connection:
        words = answer_requests(connection, folders, state)
    if words is None:
        return 0
    from backupd.cli.main import main

    sys.argv = ["backupd", *words]  # what is reported as the holder of a lock
    return main()


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), [word for word in sys.argv[2:] if word != TITLE_ROOM]))
