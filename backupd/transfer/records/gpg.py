"""How gpg is called, for sealing and unsealing alike, and with which home.

gpg-agent keeps its sockets in the home, and keys that it has opened in its memory. So gpg gets a private home in the
runtime directory, in which everything is a link to the real one's content: its path is short enough for sockets, the
real home may be read-only (as under the unit, or in a volume of a container), and the agent ends as soon as the folder
is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import BinaryIO

from backupd.model.errors import KeyUnusableError
from backupd.process.command import Command
from backupd.process.pipeline import Pipeline, run
from backupd.process.runtime import runtime_directory

_SOCKET_LIMIT = 107
_LONGEST_SOCKET = "/S.gpg-agent.browser"
_OF_ONE_HOME = re.compile(r"S\..*|\.#lk.*|.*\.lock|.*\.tmp|.*~|random_seed")
"""Sockets, locks and what else GnuPG's programs write for themselves: never shared between two homes."""

_guard = threading.Lock()
_sockets: dict[Path, str] = {}
_HARDENED = (
    "--batch",
    "--no-tty",
    # Nobody's gpg.conf adds recipients (encrypt-to), signs, or turns off integrity protection.
    "--no-options",
    # Keys are pinned by fingerprint: no web of trust, and never a look-up in the network or a trustdb to
    # write.
    "--trust-model",
    "always",
    "--no-auto-key-locate",
    "--disable-dirmngr",
    "--no-auto-check-trustdb",
    # Several of us run at once, perhaps on a read-only home: the seed file would only be a lock to wait for.
    "--no-random-seed-file",
)
_READ = 256 * 1024


def usable_home(home: Path) -> Path:
    """A private home with links to the content of ``home``; ``home`` itself, or a short link to it, where an agent runs
    for it already: it may hold a passphrase that somebody typed.

    Keys that are put into the home later are seen by the next call. Raises KeyUnusableError if there is no such folder,
    or it cannot be read.
    """
    if not home.is_dir():
        raise KeyUnusableError(
            f"the GnuPG home {home} does not exist",
            hint="create it and import the keys: gpg --homedir ... --import FILE",
        )
    real = home.resolve()
    short = _short(real)
    return short if _has_agent(short) else _private(real)


@contextlib.contextmanager
def writable_home(home: Path) -> Iterator[Path]:
    """``home`` itself under a path that is short enough, for a program that puts a key into it: what it makes belongs
    to the owner of the folder afterwards, and an agent that it has started ends.

    Raises KeyUnusableError where nothing can be written there.
    """
    if not home.is_dir() or not os.access(home, os.W_OK):
        raise KeyUnusableError(
            f"no key can be made in the GnuPG home {home}: "
            + ("it cannot be written to" if home.is_dir() else "there is no such folder"),
            hint=f"make it for the user of the service (install -d -m 0700 {home}), and run the command where it is "
            "writable: in a container, mount the folder writable",
        )
    real = home.resolve()
    short = _short(real)
    had_agent = _has_agent(short)
    try:
        yield short
    finally:
        if not had_agent:
            run(Command(("gpgconf", "--homedir", str(short), "--kill", "all")), timeout=30, check=False)
        if os.geteuid() == 0:
            _give_to_owner(real)


def _give_to_owner(home: Path) -> None:
    """No link is followed, of which that owner could put one there meanwhile."""
    owner = home.stat()
    for _folder, folders, files, descriptor in os.fwalk(home):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):  # a lock of gpg's
                os.chown(name, owner.st_uid, owner.st_gid, dir_fd=descriptor, follow_symlinks=False)


def _short(real: Path) -> Path:
    return real if len(os.fsencode(str(real) + _LONGEST_SOCKET)) <= _SOCKET_LIMIT else _linked(real)


def _linked(real: Path) -> Path:
    link = _short_path("g", real)
    with _guard, contextlib.suppress(FileExistsError):
        link.symlink_to(real)
    return link


def _short_path(kind: str, real: Path) -> Path:
    return runtime_directory() / f"{kind}{hashlib.sha256(os.fsencode(real)).hexdigest()[:10]}"


def _has_agent(home: Path) -> bool:
    with _guard:
        if home not in _sockets:
            result = run(Command(("gpgconf", "--homedir", str(home), "--list-dirs", "agent-socket")), timeout=30)
            _sockets[home] = os.fsdecode(result.stdout.rstrip(b"\n"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        try:
            agent.connect(_sockets[home])
        except OSError:
            return False
    return True


def _private(real: Path) -> Path:
    home = _short_path("k", real)
    try:
        wanted = {path.name for path in real.iterdir() if not _OF_ONE_HOME.fullmatch(path.name)}
    except OSError as error:
        raise KeyUnusableError(
            f"the GnuPG home {real} cannot be read: {error.strerror}",
            hint="run the command as the user that owns it, or correct its permissions",
        ) from error
    try:
        with _guard:
            home.mkdir(mode=0o700, exist_ok=True)
            _mirror(real, home, wanted)
    except OSError as error:
        raise KeyUnusableError(
            f"gpg cannot write to its home {real}, and not to {home} either: {error.strerror}",
            hint="make room there, or set BACKUPD_RUNTIME to another folder",
        ) from error
    return home


def _mirror(real: Path, home: Path, wanted: set[str]) -> None:
    """Let every name in ``wanted`` be a link in ``home``, also where gpg has made an empty thing of that name for want
    of it; links to what is no longer there go."""
    for entry in home.iterdir():
        if entry.is_symlink():
            if entry.name not in wanted:
                entry.unlink()
        elif entry.name in wanted:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    for name in wanted:
        with contextlib.suppress(FileExistsError):
            (home / name).symlink_to(real / name)


def gpg(home: Path, status: Status, *arguments: str) -> Command:
    """``gpg --batch --homedir HOME ... ARGUMENTS`` with its status lines going to ``status``.

    Raises KeyUnusableError if the home does not exist, or cannot be read.
    """
    return Command(
        ("gpg", *_HARDENED, "--homedir", str(usable_home(home)), "--status-fd", str(status.descriptor), *arguments)
    )


def through(
    command: Command,
    status: Status,
    feed: Callable[[BinaryIO], None],
    take: Callable[[memoryview], object],
    *descriptors: int,
) -> None:
    """Run ``command``, which reports to ``status``, with what ``feed`` writes as its input; ``take`` gets what it
    prints. ``descriptors``: what it inherits besides. Raises ToolError."""
    with Pipeline([command], feed=feed, pass_fds=(status.descriptor, *descriptors)) as pipeline:
        for chunk in pipeline.chunks(_READ):
            take(chunk)


def answer(command: Command, status: Status, content: bytes, *descriptors: int) -> bytes:
    """Everything that ``command`` prints, with ``content`` as its input. Raises as ``through``."""
    output = io.BytesIO()
    through(command, status, methodcaller("write", content), output.write, *descriptors)
    return output.getvalue()


class Status:
    """Collects what gpg reports with ``--status-fd``: pass ``descriptor`` on to it, read ``lines`` after its
    end.

    It is a file in memory and not a pipe, so nobody has to read it meanwhile.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("gpg-status", os.MFD_CLOEXEC)

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def lines(self) -> list[StatusLine]:
        """What gpg has reported until now; lines that are no status lines are left out."""
        raw = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)
        found = []
        for line in raw.decode("utf-8", "replace").splitlines():
            prefix, _, rest = line.partition(" ")
            if prefix == "[GNUPG:]":
                keyword, _, text = rest.partition(" ")
                found.append(StatusLine(keyword, text))
        return found


@dataclass(frozen=True, slots=True)
class StatusLine:
    """``[GNUPG:] KEYWORD TEXT``; the words are explained in doc/DETAILS of GnuPG."""

    keyword: str
    text: str
