"""Confining programs that work on bytes of others: copies of a server's files, backups, what a server sends.

Such bytes may be forged, and such files name paths of their source: tablespaces elsewhere, undo and redo folders,
sockets, hosts to replicate from. On the source's own host a tool that follows such a name writes into live data. So
these programs are never root: ``worker`` is a user of backupd's own, under whom no living server runs, without any
capability. Inside the sandbox there is nothing to follow either: the programs' own folders read-only, the folders
given, no network, no other process, no socket of anybody.

There are two ways to make a sandbox. The user makes it, in a user namespace: nothing in it was ever root, and the
service needs no power but to become that user. Or root makes it, and drops everything before the program begins: where
the kernel keeps user namespaces from others, or where the user cannot pass through to the folders.

Measured with bubblewrap 0.8: as root it makes the parents of a bind mount 0700 root, so they are made first;
``--dev`` makes a second user namespace, whose network nobody can enter, so devices are bound one by one; all that costs
6 ms.

A program of the system finds its messages, libraries and plugins by the paths that it was built with. One that is
elsewhere (a release unpacked into /srv) needs options for them, and its sandbox must show them (``program_folders``).

What a program that is not root is handed to reach a server: its option file, and the files for TLS.

They belong to root as a rule, in folders that nobody else can enter. So copies of them are in a private folder of the
user that the program runs as, and go with it. An account without a password may log in as the operating system's user:
for it the server's socket is opened by us (``relayed``), so that it sees us, not who the program runs as; only what we
have started gets through.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import secrets
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from backupd.engine.sql.client import Connection
from backupd.model.errors import BackupdError, RefusedError
from backupd.process.command import Command, become, family, find_account, locate
from backupd.process.folders import give, write_anew
from backupd.process.pipeline import run
from backupd.process.runtime import passable_directory, render_options

SYSTEM_FOLDERS = ("/usr", "/etc", "/opt", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_PARTS = ("bin", "sbin", "lib", "lib64", "libexec", "share")
_MESSAGES = ("share", "share/mysql", "share/mariadb")
_ENGLISH = "english/errmsg.sys"


def is_of_the_system(path: Path) -> bool:
    """Is ``path`` where the system's programs and their files do?"""
    return any(path == Path(folder) or Path(folder) in path.parents for folder in SYSTEM_FOLDERS)


def program_folders(program: Path) -> list[Path]:
    """Folders outside the system's own that ``program`` needs to see: its own, and those of its installation."""
    found = {program.parent, program.resolve().parent}
    for folder in tuple(found):
        if folder.name in _PARTS:
            # Not the whole of it: a data directory may be beside the programs.
            found |= {folder.parent / part for part in _PARTS if (folder.parent / part).is_dir()}
    return sorted(folder for folder in found if not is_of_the_system(folder))


def server_options(program: str) -> dict[str, str]:
    """Options that name to a server program where its own files are; none for a program of the system."""
    if "/" not in program:
        return {}
    path = Path(program).resolve()
    if any(folder in path.parents for folder in (Path("/usr"), Path("/bin"), Path("/sbin"))):
        return {}
    for base in (path.parent.parent, path.parent):
        for folder in _MESSAGES:
            if (base / folder / _ENGLISH).is_file():
                return {"basedir": str(base), "lc_messages_dir": str(base / folder)}
    return {}


WORKER = "backupd-sandbox"
MAKE_WORKER = (
    f"useradd --system --user-group --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin {WORKER}"
)
DATABASE_USER = "mysql"
"""Who databases run as."""
_DEVICES = ("null", "zero", "full", "random", "urandom")


class Way(StrEnum):
    """Who makes the sandbox."""

    USER = "user"
    ROOT = "root"


def worker() -> str | None:
    """Who works on copies when we are root: ``backupd-sandbox``, or the database's user where nobody has made that one.
    None: we are not root, and work as ourselves. Raises RefusedError where there is neither."""
    if os.geteuid() != 0:
        return None
    for name in (WORKER, DATABASE_USER):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise RefusedError(
        f"there is no user {WORKER} on this machine: programs that read backups are never run as root",
        hint=f"scripts/setup makes it, or: {MAKE_WORKER}",
    )


def is_available(user: str | None = None) -> bool:
    """Can this process confine programs that run as ``user`` (None: as ``worker``)? Not without bubblewrap, nor inside
    many containers."""
    return bool(ways(user))


def ways(user: str | None = None) -> tuple[Way, ...]:
    """Those that work here, best first."""
    chosen = user or worker()
    candidates = (Way.USER, Way.ROOT) if chosen is not None else (Way.USER,)
    return tuple(way for way in candidates if not obstacle(way, chosen))


def obstacle(way: Way, user: str | None) -> str:
    """Why no sandbox can be made this way for ``user``, in bubblewrap's own words; "" where it can."""
    return _tried(way, user, proc=True) and _tried(way, user, proc=False)


@functools.cache
def _tried(way: Way, user: str | None, *, proc: bool) -> str:
    try:
        made = _made(Command(("true",), user=user), way, (), (), proc=proc)
        done = run(made, check=False, timeout=20)
        return "" if done.returncode == 0 else done.stderr.strip() or f"bwrap ended with {done.returncode}"
    except BackupdError as error:
        return error.message


@functools.cache
def can_confine(program: str) -> bool:
    """Can ``program`` (a path) be started inside? Not when it is a script that calls something from a folder that
    nobody knows of, or needs libraries from one."""
    if not is_available():
        return False
    ask = Command((program, "--no-defaults", "--version"), user=worker())
    try:
        plain = run(ask, check=False, timeout=20)
        inside = run(confine(ask, writable=()), check=False, timeout=20)
    except BackupdError:
        return False
    return inside.returncode == plain.returncode


def confine(
    command: Command,
    *,
    writable: Sequence[Path],
    readable: Sequence[Path] = (),
    network: bool = False,
) -> Command:
    """``command`` inside a sandbox where ``writable`` and ``readable`` (files or folders, absolute) are all there is
    besides the programs. No network, or the host's (``network``). It may write into a /tmp that goes with it. Root's
    commands have a ``user``, who is not root.

    Raises RefusedError where that user cannot reach the folders, and root cannot bring him there.
    """
    if os.geteuid() == 0 and (command.user is None or find_account(command.user).pw_uid == 0):
        raise ValueError(f"{command.program} would run as root")
    shown = [*readable, *program_folders(Path(command.located()))]
    found = ways(command.user)
    way = Way.USER if Way.USER in found else Way.ROOT
    if way is Way.USER and (lost := out_of_reach(command.user, [*writable, *shown])):
        if Way.ROOT not in found:
            raise RefusedError(
                f"the user {command.user} cannot reach the files that {command.program} needs",
                detail=lost,
                hint="let other users pass through the folders above it (chmod o+x), or choose another folder",
            )
        way = Way.ROOT
    return _made(command, way, writable, shown, network=network)


def out_of_reach(user: str | None, paths: Sequence[Path | str]) -> str:
    """Which of ``paths`` this user cannot come to (into a folder that ends with ``/.``), in the system's words; ACLs
    and groups count, so he tries."""
    if user is None or not paths:
        return ""
    asked = Command(("ls", "-d", "--", *map(str, paths)), user=user)
    done = run(asked, check=False, timeout=20)
    return done.stderr if done.returncode != 0 else ""


def _made(
    command: Command,
    way: Way,
    writable: Iterable[Path],
    readable: Iterable[Path],
    *,
    network: bool = False,
    proc: bool | None = None,
) -> Command:
    """``proc``: with a /proc inside? The kernel lets no user mount one of his own while something is over a part of
    the one he sees, as systemd and containers have it: None tries."""
    if proc is None:
        proc = not _tried(way, command.user, proc=True)
    argv = [locate("bwrap"), *_frame(writable, readable, proc=proc)]
    if not network:
        argv += ["--unshare-net"]
    argv += ["--chdir", str(command.cwd or "/"), "--cap-drop", "ALL"]
    user = command.user
    if way is Way.ROOT and user is not None:
        for power in ("CAP_SETUID", "CAP_SETGID", "CAP_DAC_READ_SEARCH"):  # until the user is that one
            argv += ["--cap-add", power]
        argv += ["--", "setpriv", *become(user), "--inh-caps", "-all"]
        user = None
    return replace(
        command, argv=(*argv, "--", command.located(), *command.argv[1:]), user=user, cwd=None, wrapped=command.program
    )


def _frame(writable: Iterable[Path], readable: Iterable[Path], *, proc: bool) -> list[str]:
    argv = ["--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    for folder in SYSTEM_FOLDERS:
        argv += ["--ro-bind-try", folder, folder]
    argv += ["--perms", "0755", "--tmpfs", "/dev", "--symlink", "/proc/self/fd", "/dev/fd"]
    for device in _DEVICES:
        argv += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    argv += ["--proc" if proc else "--dir", "/proc", "--perms", "1777", "--tmpfs", "/tmp"]  # noqa: S108  inside the sandbox
    argv += ["--perms", "0755", "--tmpfs", "/run"]
    mounts = [(path, "--ro-bind") for path in readable] + [(path, "--bind") for path in writable]
    made: set[Path] = set()
    # Who made the sandbox owns its folders: what is above the given ones must not take files that nobody would find.
    closed = ["/dev", "/run", "/"]
    # Outer folders first: a mount hides what was mounted below it before.
    for path, kind in sorted(mounts, key=lambda mount: len(mount[0].parts)):
        for parent in reversed(path.parents[:-1]):
            if parent not in made and not is_of_the_system(parent):
                made.add(parent)
                open_above = parent.parent == Path("/tmp")  # noqa: S108  inside the sandbox
                argv += ["--perms", "0755", "--tmpfs" if open_above else "--dir", str(parent)]
                closed += [str(parent)] if open_above else []
        made.add(path)
        argv += [kind, str(path), str(path)]
    for folder in closed:
        argv += ["--remount-ro", folder]
    return argv


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

    def confined(self, command: Command, *, writable: Sequence[Path] = (), readable: Sequence[Path] = ()) -> Command:
        """``command`` in a sandbox from which it reaches the server, where anything can be confined; its user is the
        one to whom all this was handed. Raises RefusedError."""
        if not (can_confine(command.argv[0]) and is_available(command.user)):
            return command
        return confine(
            command,
            writable=writable,
            readable=[self.folder, *self.ways, *readable],
            network=not self.connection.socket,
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
            hint="check the ssl-* settings in the defaults file of this server",
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
