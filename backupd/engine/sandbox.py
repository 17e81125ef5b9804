"""Confining programs that work on copies of a server's files.

Such files name places of their source: tablespaces elsewhere, undo and redo folders, sockets, hosts to
replicate from. On the source's own host a tool that follows such a name writes into live data. Inside the
sandbox there is nothing to follow: the programs' own folders read-only, the folders given, no network, no
other process, no socket of anybody. Two servers of ours that must talk share one such network, which is a
loopback and nothing else.

Measured with bubblewrap 0.8 as root: it makes the parents of a bind mount 0700 root, so they are made
first; ``setpriv`` has to come inside (bwrap needs root for its mounts, the server must not have it); all
that costs 6 ms.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from backupd.engine.installation import SYSTEM_FOLDERS, is_of_the_system
from backupd.engine.installation import places as program_places
from backupd.model.errors import BackupdError
from backupd.process.command import Command, find_account, locate
from backupd.process.run import run


@functools.cache
def is_available() -> bool:
    """Can this process confine others? Not without bubblewrap, nor inside many containers."""
    try:
        return run(Command((*_frame((), ()), "--", "true")), check=False, timeout=20).returncode == 0
    except BackupdError:
        return False


@functools.cache
def can_confine(program: str) -> bool:
    """Can ``program`` (a path) be started inside? Not when it is a script that calls something from a folder that
    nobody knows of, or needs libraries from one."""
    if not is_available():
        return False
    ask = Command((program, "--no-defaults", "--version"))
    try:
        plain = run(ask, check=False, timeout=20)
        inside = run(confine(ask, writable=()), check=False, timeout=20)
    except BackupdError:
        return False
    return inside.returncode == plain.returncode


def confine(
    command: Command, *, writable: Sequence[Path], readable: Sequence[Path] = (), setpriv: bool = True,
    network_of: int | None = None,
) -> Command:
    """``command`` inside a sandbox where ``writable`` and ``readable`` (files or folders, absolute) are all
    there is besides the programs; no network, or that of process ``network_of``, which is in another sandbox: one
    loopback that these two share with nobody. ``command.user`` takes effect inside when ``setpriv``."""
    program = Path(command.located())
    places = [*readable, *program_places(program)]
    argv = [*_frame(writable, places, network_of), "--chdir", str(command.cwd or "/"), "--"]
    if command.user is not None and setpriv and os.geteuid() == 0:
        argv += [
            "setpriv",
            "--reuid",
            command.user,
            "--regid",
            _group(command.user),
            "--init-groups",
            "--no-new-privs",
            "--",
        ]
    return replace(command, argv=(*argv, str(program), *command.argv[1:]), user=None, cwd=None,
                   wrapped=command.program)


def _frame(writable: Iterable[Path], readable: Iterable[Path], network_of: int | None = None) -> list[str]:
    if network_of is None:
        argv = [locate("bwrap"), "--unshare-net"]
    else:
        # Who is not root may enter only as a member of the sandbox's own user namespace.
        argv = [locate("nsenter"), f"--net=/proc/{network_of}/ns/net"]
        if os.geteuid() != 0:
            argv += [f"--user=/proc/{network_of}/ns/user", "--preserve-credentials"]
        argv += ["--", locate("bwrap")]
    argv += ["--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    for folder in SYSTEM_FOLDERS:
        argv += ["--ro-bind-try", folder, folder]
    argv += [
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--perms",
        "1777",
        "--tmpfs",
        "/tmp",  # noqa: S108  inside the sandbox
        "--perms",
        "0755",
        "--tmpfs",
        "/run",
    ]
    mounts = [(path, "--ro-bind") for path in readable] + [(path, "--bind") for path in writable]
    made: set[Path] = set()
    # Outer folders first: a mount hides what was mounted below it before.
    for path, kind in sorted(mounts, key=lambda mount: len(mount[0].parts)):
        for parent in reversed(path.parents[:-1]):
            if parent not in made and not is_of_the_system(parent):
                made.add(parent)
                argv += ["--perms", "0755", "--dir", str(parent)]
        argv += [kind, str(path), str(path)]
    return argv


def _group(user: str) -> str:
    return str(find_account(user).pw_gid)
