"""A server's socket, opened by us for a program of ours that runs as another user.

For accounts without a password that log in as the operating system's user who connects (unix_socket, auth_socket): the
server is to see us, not who the program runs as. Only what we have started gets through.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from backupd.process.folders import give
from backupd.process.supervise import family

_BLOCK = 256 * 1024
_LOOK_AGAIN = 0.2


@contextlib.contextmanager
def relayed(server: Path, listen: Path, owner: tuple[int, int]) -> Iterator[None]:
    """While the block lasts, who connects to ``listen`` (made for ``owner``, in a private folder) talks to ``server``.
    Raises OSError."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(listen))
        give(listen, owner, 0o600)
        listener.listen()
        listener.settimeout(_LOOK_AGAIN)
        relay = _Relay(server, listener)
        relay.start()
        try:
            yield
        finally:
            relay.stop()


class _Relay:
    def __init__(self, server: Path, listener: socket.socket) -> None:
        self._server, self._listener = server, listener
        self._over = threading.Event()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="socket-relay", daemon=True)]

    def start(self) -> None:
        self._threads[0].start()

    def stop(self) -> None:
        """Nobody is connected any more when this returns."""
        self._over.set()
        self._threads[0].join()
        for end in self._ends:
            _shut(end)
        for thread in self._threads[1:]:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _address = self._listener.accept()
            except TimeoutError:
                continue
            if _peer(client) not in family(os.getpid()):
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            self._ends += [client, server]
            try:
                server.connect(str(self._server))
            except OSError:
                _shut(client)  # the program says that the server is away
                continue
            for source, target in ((client, server), (server, client)):
                client.settimeout(None)
                thread = threading.Thread(target=_pass_on, args=(source, target), name="socket-relay", daemon=True)
                self._threads.append(thread)
                thread.start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    block = memoryview(bytearray(_BLOCK))
    with contextlib.suppress(OSError):
        while count := source.recv_into(block):
            target.sendall(block[:count])
    for end in (source, target):
        _shut(end)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _peer(client: socket.socket) -> int:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])
