"""Servers that run on this host: the sockets that processes named mariadbd or mysqld listen at, and the version that
each greets with. Nothing is asked that needs an account."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.sql.client import DEFAULT_SOCKET

_PROGRAMS = ("mariadbd", "mysqld")
_LISTENS = 0x10000
"""__SO_ACCEPTCON, in the column of flags of /proc/net/unix."""
_OF_ANOTHER_PROTOCOL = "mysqlx"
_SECONDS = 3.0
_HEAD = 4
"""Bytes before a packet's content."""
_GREETS = 10
"""The protocol version, with which a server's first packet begins."""
_AS_REPLICA = "5.5.5-"
"""What MariaDB puts before its version."""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """``version``: as the server greets with, "" where it did not greet in time."""

    socket: str
    version: str


def local_servers() -> list[LocalServer]:
    """Those whose processes this user may look into, and one at the usual socket."""
    paths = dict.fromkeys(path for pid in _processes() for path in _sockets(pid))
    if _is_socket(Path(DEFAULT_SOCKET)):
        paths.setdefault(DEFAULT_SOCKET)
    found = {os.path.realpath(path): path for path in reversed(paths)}
    return [LocalServer(path, version) for path in sorted(found.values()) if (version := greeting(path))]


def greeting(path: str) -> str:
    """The version of the server that listens at the socket ``path``; "" where none greets."""
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as way:
        way.settimeout(_SECONDS)
        way.connect(path)
        head = _exactly(way, _HEAD)
        content = _exactly(way, int.from_bytes(head[:3], "little"))
        if content[:1] == bytes([_GREETS]):
            return content[1:].partition(b"\0")[0].decode("ascii", "replace").removeprefix(_AS_REPLICA)
    return ""


def _exactly(way: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (more := way.recv(size - len(found))):
        found += more
    return found


def _processes() -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if (folder / "comm").read_text().strip() in _PROGRAMS:
                    yield int(folder.name)


def _sockets(pid: int) -> Iterator[str]:
    """Sockets in the file system that the process has open and listens at, as paths that can be reached from here."""
    with suppress(OSError):
        process = Path("/proc") / str(pid)
        opened = {str(entry.readlink()) for entry in (process / "fd").iterdir()}
        for line in (process / "net" / "unix").read_text(errors="surrogateescape").splitlines()[1:]:
            fields = line.split(maxsplit=7)
            if len(fields) < 8 or not int(fields[3], 16) & _LISTENS or f"socket:[{fields[6]}]" not in opened:
                continue
            path = (process / "cwd").readlink() / fields[7]
            if _OF_ANOTHER_PROTOCOL not in path.name and _is_socket(path):
                yield str(path)


def _is_socket(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISSOCK(path.stat().st_mode)
    return False
