"""The inside of a fork server: a process that has imported everything, and forks a child for each request.

A child is forked twice, so that its parent becomes the process that asked (see ``adopting``), which waits for it and
signals it as if it had started it: when the fork server is killed, its children go on. A child begins its work only
when that process has said so, because only then it is watched; and it is killed when that process ends, unless the
request says that it ``outlives`` it.

A request is one message: a JSON document, and two descriptors, stderr and what a child reads the permission from. The
answer is a JSON document, too: ``pid``, ``error``, or ``outdated`` where files of the program were exchanged after it
was imported.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("backupd", "policies", "restore", "storage")
"""Whose modules jobs and streams import."""
READY = b"ready"
"""The first message of a fork server."""
GO = b"1"
"""The permission for a child to begin."""
LARGEST = 65536
"""Bytes of a message."""
TITLE_ROOM = "." * 2000
"""The last argument of a fork server: room for the command lines of its children, which they write over its one."""
_SET_DEATH_SIGNAL = 1
_ARGUMENTS = 48
"""Field of /proc/PID/stat, see proc(5): where the command line begins in memory; the next one is its end."""


def files_state(folders: Sequence[str]) -> list[object]:
    """Differs after a file in one of these folders, Python, or a library that is installed on its path was exchanged or
    removed."""
    found: list[object] = [_state(sys.executable)]
    for entry in sys.path:
        with suppress(OSError):  # there is none
            libraries = sorted(name for name in os.listdir(entry) if name.endswith((".dist-info", ".egg-info")))  # noqa: PTH208  as below
            found += [(entry, name, _state(os.path.join(entry, name))) for name in libraries]  # noqa: PTH118  as below
    for folder in folders:
        for inside, folders_inside, names in os.walk(folder):
            folders_inside[:] = sorted(set(folders_inside) - {"__pycache__"})
            found += [(inside, name, _state(os.path.join(inside, name))) for name in sorted(names)]  # noqa: PTH118  twice as fast
    return found


def _state(path: str) -> tuple[int, ...]:
    with suppress(OSError):
        found = os.stat(path)  # noqa: PTH116  as above
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return ()


def installed_files(packages: Sequence[str]) -> list[object]:
    """``files_state`` of these packages."""
    return files_state(
        [folder for name in packages if (spec := find_spec(name)) for folder in spec.submodule_search_locations or ()]
    )


def answer_requests(connection: socket.socket, folders: Sequence[str], imported: list[object]) -> list[str] | None:
    """Serve until whoever asks is gone, or files differ from ``imported`` (see ``files_state``).

    Returns in each child, with the words of its command, and in the fork server with None when that is over. To be
    called by a process of a single thread.
    """
    gc.collect()
    gc.freeze()  # looking for garbage would write into memory that all children share
    asker = os.getppid()
    connection.send(READY)
    while True:
        message, descriptors, _flags, _address = socket.recv_fds(connection, LARGEST, 2)
        if not message:
            return None
        if files_state(folders) != imported:
            connection.send(json.dumps({"outdated": True}).encode())
            return None
        try:
            child = _fork_twice()
        except OSError as error:
            answer: dict[str, object] = {"error": error.strerror}
        else:
            if child == 0:
                connection.close()
                request = json.loads(message)
                stderr, permission = descriptors
                _begin(stderr, permission, asker, outlives=request["outlives"])
                show_as(request["shown"])
                words: list[str] = request["words"]
                return words
            answer = {"pid": child}
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(answer).encode())


def _fork_twice() -> int:
    """The id of a child that has no parent here any more; 0 in that child. Raises OSError."""
    ear, mouth = os.pipe2(os.O_CLOEXEC)
    try:
        between = os.fork()
        if between == 0:
            try:
                child = os.fork()
            except OSError:
                os._exit(1)
            if child:
                os.write(mouth, str(child).encode())
                os._exit(0)
            return 0
        os.waitpid(between, 0)  # now its child has another parent
        os.set_blocking(ear, False)
        try:
            return int(os.read(ear, 20))
        except BlockingIOError:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
    finally:
        os.close(ear)
        os.close(mouth)


def _begin(stderr: int, permission: int, asker: int, *, outlives: bool) -> None:
    """Become a separate process, that ends with ``asker`` unless it ``outlives`` it; and end here unless that one
    permits to begin."""
    os.setsid()
    os.dup2(stderr, 2)
    os.close(stderr)
    permitted = os.read(permission, 1) == GO
    os.close(permission)
    if not outlives:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if not permitted or not (outlives or os.getppid() == asker):
        os._exit(0)


def show_as(words: Sequence[str]) -> None:
    """From now on these are the command line of this process, as ps shows it, as far as there is room."""
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS - 3]), int(fields[_ARGUMENTS - 2])
    if begin < end:
        text = os.fsencode("\0".join(words))[: end - begin - 1]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, len(text))
