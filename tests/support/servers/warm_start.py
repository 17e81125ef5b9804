"""A process that has imported backupd already and forks itself for each command: what a command does is the same, but
half a second of processor time for importing is saved, thousands of times in a run of the tests.

Run as a script: ``python warm_start.py ADDRESS``. It ends when its stdin is closed. See ``warm``, which asks it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

PACKAGES = ("backupd", "restore", "storage", "policies")


def warm_up() -> None:
    """Import whatever a command may need."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__") and ".alembic_scripts" not in module.name:
                with contextlib.suppress(ImportError):  # it fails in the command that needs it, where it is seen
                    importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be the command that was asked for, to its end."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv = list(request["argv"])
        from backupd.cli.main import main

        sys.exit(main())
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException:  # noqa: BLE001  printed, as the interpreter would
        traceback.print_exc()
        code = 1
    finally:
        # What the interpreter does at its end; but it would end the process that this one was forked from, too.
        threading._shutdown()  # type: ignore[attr-defined]  # it has no public name
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def attend(connection: socket.socket) -> None:
    """One request: fork, say the process's id, wait for its end, say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raw, descriptors, _flags, _from = socket.recv_fds(connection, 1 << 20, 3)
    size = int.from_bytes(raw[:4], "big")
    while len(raw) < size + 4:
        raw += connection.recv(1 << 20)
    child = os.fork()
    if child == 0:
        connection.close()
        become(json.loads(raw[4:]), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(child.to_bytes(4, "big"))
    _pid, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def serve(listening: int) -> None:
    """At the socket of this number, until stdin is closed."""
    sys.path.pop(0)  # the folder of this file
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=listening) as door:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            readable, _, _ = select.select([door, sys.stdin], [], [])
            if door not in readable:
                return
            connection, _from = door.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                door.close()
                try:
                    attend(connection)
                finally:
                    os._exit(0)
            connection.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
