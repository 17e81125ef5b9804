"""Memory of this process: what the C library keeps of it instead of giving it back, and who may look at it.

The private directory where this process keeps sockets and files with secrets, option files among them: how a
password reaches a database tool without being seen in its argv.

Format: https://mariadb.com/kb/en/configuring-mariadb-with-option-files/ and the parser in mysys/my_default.c. mydumper
reads another format (GLib key files); nothing here is for it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import re
import resource
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import RefusedError

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""Parameters of glibc's ``mallopt``."""
_LARGE = 1024 * 1024
_PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """Rows and passphrases are in it: from now on it is written into no core dump, nor is that of what is started; and
    nobody but root reads it, or traces this process, not even another process of the same user.

    The limit alone does not do: a kernel that pipes core dumps into a program does not look at it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def return_large_blocks() -> None:
    """From now on blocks of a MiB and more go back to the system as soon as they are free.

    By default glibc takes every large block that is freed for a sign that more will follow, and keeps blocks of that
    size, up to 32 MiB, in the arena of each thread. Parts of a backup are that large and pass through several threads:
    a logical backup took 207 MiB at its peak instead of 166, a physical one 218 instead of 199. Other C libraries have
    no such parameter and are left as they are.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def share_arenas() -> None:
    """From now on threads take memory from two arenas, where there are no more yet.

    By default glibc gives each thread one of its own, up to eight for each core, and what is freed in one is not used
    by another: a service of 300 servers, whose checks begin in new threads all the time, kept 15 MiB in them for
    nothing after ten minutes. Its threads wait for one another anyway, as all of Python's do.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 2)


_LOCK_NAME = ".lock"
_LONGEST = 60
"""Bytes that the path may have: 107 are all that a socket's path can, and names come behind it."""


@dataclass(slots=True)
class _Own:
    path: Path
    process: int
    lock: int


_guard = threading.Lock()
_own: dict[tuple[Path, int], _Own] = {}
"""By base folder and mode."""


def runtime_directory() -> Path:
    """This process's private directory: 0700, short enough for sockets, gone when the process ends.

    It is in ``$BACKUPD_RUNTIME`` if set, else in ``/run/backupd``, else (without the right to write there)
    in a private folder in /tmp. What processes that were killed left there is removed first. Raises
    RefusedError if the folder is not private or its path is too long.
    """
    return _directory(0o700)


def passable_directory() -> Path:
    """As ``runtime_directory``, but others may pass through it to a path that they were given, and list nothing: for
    what is handed to programs that run as another user."""
    return _directory(0o711)


def _directory(mode: int) -> Path:
    base = _base()
    with _guard:
        own = _own.get((base, mode))
        if own is None or own.process != os.getpid() or not own.path.is_dir():
            try:
                own = _own[base, mode] = _create(base, mode)
            except OSError as error:
                raise _unusable(base, error) from error
        return own.path


def shared_directory(name: str) -> Path:
    """A private folder beside ``runtime_directory`` that all processes of this user share. It stays. Raises
    RefusedError."""
    path = _base() / name
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return path


def _base() -> Path:
    wanted = os.environ.get("BACKUPD_RUNTIME")
    if wanted:
        return _secured(Path(wanted).absolute())
    if os.geteuid() == 0 or os.access("/run/backupd", os.W_OK):
        return _secured(Path("/run/backupd"))
    return _secured(Path(tempfile.gettempdir()) / f"backupd-{os.geteuid()}")


def _secured(base: Path) -> Path:
    try:
        # 0711: servers that we start as another user reach what is handed to them by its full path, and list
        # nothing.
        with contextlib.suppress(FileExistsError):
            base.mkdir(mode=0o711, parents=True)
            base.chmod(0o711)  # whatever the umask is
        found = base.lstat()
    except OSError as error:
        raise _unusable(base, error) from error
    # In a folder like /tmp (sticky) others cannot rename or remove what is ours.
    exposed = bool(found.st_mode & 0o022) and not found.st_mode & stat.S_ISVTX
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or exposed:
        raise RefusedError(
            f"the runtime directory {base} is not private: secrets would be written there",
            detail=f"owner uid {found.st_uid}, mode {stat.filemode(found.st_mode)}; this process is uid {os.geteuid()}",
            hint=f"chown it to this user and chmod go-w {base}, or set BACKUPD_RUNTIME to another folder",
        )
    if len(os.fsencode(base)) > _LONGEST:
        raise RefusedError(
            f"the path of the runtime directory {base} is too long for sockets",
            hint=f"set BACKUPD_RUNTIME to a path of at most {_LONGEST} bytes",
        )
    return base


def _unusable(base: Path, error: OSError) -> RefusedError:
    return RefusedError(
        f"the runtime directory {base} cannot be used: {error.strerror}",
        hint="set BACKUPD_RUNTIME to a folder that belongs to this user",
    )


def _create(base: Path, mode: int) -> _Own:
    # One process at a time: else the cleaner could meet a directory whose owner has not locked it yet.
    gate = os.open(base / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        _remove_stale(base)
        path = base / f"{os.getpid()}-{secrets.token_hex(3)}"
        path.mkdir(mode=0o700)
        path.chmod(mode)  # whatever the umask is
        lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(gate)
    own = _Own(path, os.getpid(), lock)
    atexit.register(_remove, own)
    return own


def _remove_stale(base: Path) -> None:
    """Remove the directories whose owner is dead: nobody holds their lock any more."""
    for path in base.iterdir():
        if path.name == _LOCK_NAME or not path.is_dir() or path.is_symlink():
            continue
        try:
            lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            # Killed between mkdir and lock, or not ours; with the gate held nobody is in between.
            if _looks_ours(path):
                shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _looks_ours(path: Path) -> bool:
    process, _, token = path.name.partition("-")
    return process.isdigit() and len(token) == 6


def _remove(own: _Own) -> None:
    if own.process == os.getpid():
        shutil.rmtree(own.path, ignore_errors=True)
        os.close(own.lock)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b"})
_LINE_LIMIT = 4000
"""Bytes: the parser reads lines into 4096 and refuses what is longer."""


@contextlib.contextmanager
def option_file(groups: Mapping[str, Mapping[str, str | None]], *, directory: Path | None = None) -> Iterator[Path]:
    """A 0600 option file that is gone when the context is left.

    ``groups`` maps a group (``client``) to options; an option without value (None) is a switch.
    ``directory``: a private one, by default ``runtime_directory()``. Raises ValueError for a name or value
    that no option file can hold. Pass it as ``--defaults-file=...`` (or ``--defaults-extra-file=...``), as
    the tool's first argument.
    """
    text = render_options(groups)
    path = (directory if directory is not None else runtime_directory()) / f"o{secrets.token_hex(6)}.cnf"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
        yield path
    finally:
        path.unlink(missing_ok=True)


def render_options(groups: Mapping[str, Mapping[str, str | None]]) -> str:
    """The text of an option file: every value in double quotes, escaped, so that it is read back
    unchanged."""
    lines: list[str] = []
    for group, options in groups.items():
        lines.append(f"[{_checked(group)}]")
        for name, value in options.items():
            line = _checked(name) if value is None else f'{_checked(name)}="{_escaped(name, value)}"'
            if len(line.encode()) > _LINE_LIMIT:
                raise ValueError(f"the value of {name} is too long for an option file")
            lines.append(line)
    return "\n".join(lines) + "\n"


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of an option or of a group")
    return name


def _escaped(name: str, value: str) -> str:
    if "\0" in value:
        raise ValueError(f"the value of {name} holds a NUL byte")
    return value.translate(_ESCAPES)
