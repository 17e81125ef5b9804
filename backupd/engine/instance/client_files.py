"""What a program that is not root is handed to reach a server: its option file, and the files for TLS.

They belong to root as a rule, in folders that nobody else can enter. So copies of them are in a private folder of the
user that the program runs as, and go with it. An account without a password may log in as the operating system's user:
for it the server's socket is opened by us (``relayed``), so that it sees us, not who the program runs as; only what we
have started gets through.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backupd.engine.instance.sandbox import can_confine, confine, is_available, is_of_the_system
from backupd.engine.sql.client import Connection
from backupd.model.errors import RefusedError
from backupd.process.command import Command, find_account
from backupd.process.folders import give, write_anew
from backupd.process.runtime import passable_directory, render_options
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


Groups = Mapping[str, Mapping[str, str | None]]

_FILES = ("ca", "cert", "key")
"""Of the options for TLS."""
_RESOLVER = Path("/etc/resolv.conf")


@dataclass(frozen=True, slots=True)
class Handed:
    """``folder``: all that was handed over; ``options``: the option file in it; ``connection``: with the copies of the
    files; ``ways``: what else of the host it takes to reach the server."""

    folder: Path
    options: Path
    connection: Connection
    ways: tuple[Path, ...]

    def confined(
        self, command: Command, *, writable: Sequence[Path] = (), readable: Sequence[Path] = (), scratch: bool = True
    ) -> Command:
        """``command`` in a sandbox from which it reaches the server, where anything can be confined; its user is the
        one to whom all this was handed. Raises RefusedError."""
        if not (can_confine(command.argv[0]) and is_available(command.user)):
            return command
        return confine(
            command,
            writable=writable,
            readable=[self.folder, *self.ways, *readable],
            network=not self.connection.socket,
            scratch=scratch,
        )


@contextlib.contextmanager
def handed_over(
    connection: Connection, user: str | None, groups: Callable[[Connection], Groups] = Connection.option_groups
) -> Iterator[Handed]:
    """What a program of ``user`` (None: our own) needs for ``connection``; ``groups`` says it in the program's words.

    Raises RefusedError, also where a file of the connection cannot be read.
    """
    owner = owner_of(user)
    folder = passable_directory() / f"c{secrets.token_hex(6)}"
    folder.mkdir(mode=0o700)
    relays = contextlib.ExitStack()
    try:
        files: dict[str, str] = {}
        for name in _FILES:
            if path := connection.ssl.get(name):
                files[name] = str(folder / f"{name}.pem")
                write_anew(folder / f"{name}.pem", _content(path, connection), owner=owner)
        handed = replace(connection, ssl={**connection.ssl, **files})
        if owner is not None and connection.socket and not connection.password:
            handed = replace(handed, socket=str(folder / "s.sock"))
            relays.enter_context(relayed(Path(connection.socket), folder / "s.sock", owner))
        options = folder / "options.cnf"
        write_anew(options, render_options(groups(handed)).encode(), owner=owner)
        if owner is not None:
            give(folder, owner, 0o700)
        yield Handed(folder, options, handed, tuple(_ways_to(handed)))
    finally:
        relays.close()
        shutil.rmtree(folder, ignore_errors=True)


def owner_of(user: str | None) -> tuple[int, int] | None:
    """Whom files are given to that a program of ``user`` works with."""
    if user is None:
        return None
    account = find_account(user)
    return account.pw_uid, account.pw_gid


def _content(path: str, connection: Connection) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RefusedError(
            f"{path}, which the connection to {connection.address} needs, cannot be read: {error.strerror}",
            hint="look at the ssl-* settings in the defaults file of this server",
        ) from error


def _ways_to(connection: Connection) -> Iterator[Path]:
    if connection.socket:
        yield Path(connection.socket)
        return
    if folder := connection.ssl.get("capath"):
        yield Path(folder)
    names = _RESOLVER.resolve()
    if names.exists() and not is_of_the_system(names):
        yield names
