"""The program that copies binary logs from a server: mariadb-binlog, or mysqlbinlog, called for raw copies.

Measured with mariadb-binlog of 10.11.19 and mysqlbinlog 9.7.4, both with ``--raw --stop-never``:

- each event is in the file as soon as the server has sent it; nothing is held back in the program (older ones do
  that, and are refused: ``HoldsBackError``);
- a file is begun anew at its first byte, whatever is there: only a folder of its own keeps earlier copies;
- neither connects again. It ends with 1 when the server is gone (mysqlbinlog with 0 after a clean shutdown), when a
  file is not there, when the server has no next file (RESET), when the disk is full;
- after a RESET that made a file of the *same* name it stays, with nothing more to come, and may end with 0 later:
  only the server's own position tells;
- neither asks for heartbeats: a connection that was cut without a word stays open for ever;
- two with the same connection id push each other out;
- options of the other family in a ``[client]`` group are errors to mysqlbinlog (``ssl-verify-server-cert``).

The program believes every file name that the server sends: the name comes in a Rotate event, and the program opens it
as it is: ``../../x`` as well. So it is never root, and where anything can be confined its folder is all that it can
write to; it keeps the host's network. What it made lies in that folder, which is its own, and nothing there is opened
or believed before it was taken away from it (``collect``): one plain file, under the name of a binary log.

Does the program keep what the server has sent until some more has come (``tried``)? mysqlbinlog writes through stdio,
and before its fflush (5.6; 5.7.13 has none, 5.7.26 has) up to 4 KiB of a copy stay in the program: the last
transactions of a quiet server would reach no archive, and its stream would look like a dead connection for ever. That
is a property of the program, so it is tried once and remembered by its SHA-256.

The trial writes nothing into the server: the copy of its newest log begins where the log ends, so that all that comes
is the head of the file, at once. A program that has not written it after ``PATIENCE`` seconds, while a copy of the very
same bytes that *ends* has brought them, holds them back. It costs the server one connection, which a server that
nobody writes to keeps until it writes its next event: another reason to try only once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from backupd.engine.server.sandbox import Handed, handed_over, owner_of, worker
from backupd.engine.sql.client import Connection, client_options, has_modes, help_of
from backupd.engine.toolset import NO_PATHS, find_tool
from backupd.model.errors import CancelledError, MisnamedError, RefusedError, ToolError
from backupd.model.server_facts import Flavour, Position, Tool
from backupd.process.command import Command
from backupd.process.folders import give, make_passable, write_whole
from backupd.process.pipeline import Heard

_MARIADB_ID = "stop-never-slave-server-id"
_MYSQL_ID = "connection-server-id"
_ONLY_MARIADB = "print-row-count"
_RAW = ("--read-from-remote-server", "--raw", "--result-file=./")
_LOWEST_ID, _HIGHEST_ID = 2**31, 2**32 - 2


class EndKind(StrEnum):
    """Why the program ended."""

    LOST = "lost"
    """The connection broke."""
    UNREACHABLE = "unreachable"
    NOT_THERE = "not-there"
    """The server has no such file."""
    NO_NEXT = "no-next"
    """The server threw its files away (RESET)."""
    TORN = "torn"
    """A file of the server ends within an event, or cannot be read by it."""
    TWIN = "twin"
    """Another connection with the same id."""
    DENIED = "denied"
    DISK = "disk"
    """No room here."""
    MISNAMED = "misnamed"
    """It was told to write a file that it must not, or cannot, make."""
    OTHER = "other"


_SAID = (
    ("Could not find first log file name", EndKind.NOT_THERE),
    ("not found (", EndKind.NOT_THERE),
    ("could not find next log", EndKind.NO_NEXT),
    ("same server_uuid/server_id", EndKind.TWIN),
    ("truncated in the middle of event", EndKind.TORN),
    ("log truncated", EndKind.TORN),
    ("bogus data in log event", EndKind.TORN),
    ("event read from binlog did not pass crc check", EndKind.TORN),
    ("I/O error reading log event", EndKind.TORN),
    ("Could not write into log file", EndKind.DISK),
    ("No space left on device", EndKind.DISK),
    ("Could not create log file", EndKind.MISNAMED),
    ("Could not create output log file", EndKind.MISNAMED),
    ("Access denied", EndKind.DENIED),
    ("REPLICATION SLAVE", EndKind.DENIED),
    ("unknown option", EndKind.DENIED),
    ("unknown variable", EndKind.DENIED),
    ("Failed on connect", EndKind.UNREACHABLE),
    ("Lost connection", EndKind.LOST),
    ("Got error reading packet", EndKind.LOST),
)


_WARNING = re.compile(r"\[Warning\]|^Warning:", re.IGNORECASE)
_NOT_MADE = re.compile(r"Could not create (?:output )?log file:? '?(?:\./)?(?P<name>.*?)'?$", re.MULTILINE)


def not_made(stderr: str) -> str:
    """The file that the program could not make, by its last words; "" where that is not why it ended."""
    found = _NOT_MADE.search(stderr)
    return found["name"] if found else ""


def end_kind(stderr: str) -> EndKind:
    """What the program's last words mean. A warning (of an option that an older program does not know) is no reason."""
    said = "\n".join(line for line in stderr.splitlines() if not _WARNING.search(line))
    return next((kind for words, kind in _SAID if words in said), EndKind.LOST if not said else EndKind.OTHER)


@dataclass(frozen=True, slots=True)
class BinlogTool:
    """``id_option``: how it is told the server id to present. ``modes``: see
    ``client_options``."""

    tool: Tool
    id_option: str
    modes: bool

    def stream(self, option_file: Path, folder: Path, first: str, connection_id: int, *, start: int = 0) -> Command:
        """Copy ``first`` (``start``: its head, and what follows that place) and all that follows it into ``folder``,
        for ever."""
        return self._command(
            option_file, folder, "--stop-never", f"--{self.id_option}={connection_id}", *_from(start), first
        )

    def fetch(self, option_file: Path, folder: Path, name: str, connection_id: int, *, start: int = 0) -> Command:
        """Copy the file ``name`` into ``folder`` as far as it goes now. ``start``: as above."""
        which = [f"--{_MYSQL_ID}={connection_id}"] if self.id_option == _MYSQL_ID else []
        return self._command(option_file, folder, *which, *_from(start), name)

    def option_groups(self, connection: Connection) -> dict[str, dict[str, str | None]]:
        """What its option file holds: how to reach the server, in the words of this program."""
        return client_options(connection, modes=self.modes)

    def _command(self, option_file: Path, folder: Path, *options: str) -> Command:
        # Relative to where it begins: it may not be able to come there by any path.
        return Command((self.tool.path, f"--defaults-file={option_file}", *_RAW, *options), cwd=folder)


def _from(start: int) -> list[str]:
    return [f"--start-position={start}"] if start else []


def binlog_tool(flavour: Flavour, *, paths: Mapping[str, str] = NO_PATHS) -> BinlogTool:
    """The program that copies the binary logs of such a server. ``paths``: as of toolset.

    Raises ToolMissingError, or ToolError where what is installed is the other family's.
    """
    if flavour is Flavour.MARIADB:
        tool = find_tool(("mariadb-binlog", "mysqlbinlog"), paths=paths)
    else:
        tool = find_tool(("mysqlbinlog",), paths=paths, hint=_to_install(flavour))
    options = help_of(tool.path, tool.sha256)
    is_mariadb = _ONLY_MARIADB in options
    if is_mariadb is not (flavour is Flavour.MARIADB):
        raise ToolError(
            f"{tool.path} cannot copy the binary logs of a {flavour} server",
            detail=f"it is {'MariaDB' if is_mariadb else 'MySQL'}'s: {tool.version_text}",
            hint=_to_install(flavour),
        )
    return BinlogTool(tool, _MYSQL_ID if _MYSQL_ID in options else _MARIADB_ID, has_modes(tool))


def connection_id(server: str, installation: str, taken: Collection[int] = ()) -> int:
    """The server id that the stream of ``server`` presents: always the same for one installation, far from those that
    people give, and none of ``taken``."""
    span = _HIGHEST_ID - _LOWEST_ID
    number = int.from_bytes(hashlib.sha256(f"{installation}/{server}".encode()).digest()[:8], "big")
    while (found := _LOWEST_ID + number % span) in taken:
        number += 1
    return found


def _to_install(flavour: Flavour) -> str:
    if flavour is Flavour.MARIADB:
        return "apt-get install mariadb-client, or name the program: `programs: {mariadb-binlog: /path/to/it}`"
    return (
        "install the MySQL client programs of the server's series, or name the program:"
        " `programs: {mysqlbinlog: /path/to/mysqlbinlog}`"
    )


@dataclass(frozen=True, slots=True)
class LogClient:
    """How the program reaches one server."""

    tool: BinlogTool
    handed: Handed

    def stream(self, folder: Path, first: str, connection_id: int, *, start: int = 0) -> Command:
        """As of BinlogTool; ``folder`` was made by ``make_intake``."""
        return self._confined(self.tool.stream(self.handed.options, folder, first, connection_id, start=start), folder)

    def fetch(self, folder: Path, name: str, connection_id: int, *, start: int = 0) -> Command:
        """As of BinlogTool; ``folder`` was made by ``make_intake``."""
        return self._confined(self.tool.fetch(self.handed.options, folder, name, connection_id, start=start), folder)

    def _confined(self, command: Command, folder: Path) -> Command:
        plain = replace(command, user=worker())
        try:
            return self.handed.confined(plain, writable=[folder], scratch=False)
        except RefusedError:  # it cannot come to the folder by its path, and needs none
            return plain


@contextlib.contextmanager
def log_client(tool: BinlogTool, connection: Connection) -> Iterator[LogClient]:
    """``tool`` for this server while the block lasts. Raises RefusedError, OSError."""
    with handed_over(connection, worker(), tool.option_groups) as handed:
        yield LogClient(tool, handed)


def make_intake(folder: Path) -> None:
    """An empty folder of the program's own, in the place of whatever is called so. Raises OSError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    if (owner := owner_of(worker())) is not None:
        give(folder, owner, 0o700)


def collect(intake: Path, target: Path, address: str, *, expected: Callable[[str], bool]) -> None:
    """Take what the program made out of ``intake`` into ``target``, a folder of ours alone; it may go on writing.

    Raises MisnamedError for a name that is not ``expected``, and for what is no plain file of its own; OSError.
    """
    with _opened(intake) as there, _opened(target) as here:
        with os.scandir(there) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            if not expected(name):
                raise MisnamedError(name, address)
            _take(there, here, name, address)


def _take(there: int, here: int, name: str, address: str) -> None:
    os.rename(name, name, src_dir_fd=there, dst_dir_fd=here)
    # Only now nobody else can put something into its place.
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            os.rename(name, name, src_dir_fd=here, dst_dir_fd=there)
            raise MisnamedError(name, address, "it is not a regular file with one name")
        if found.st_uid != os.geteuid():
            os.chown(name, os.geteuid(), os.getegid(), dir_fd=here, follow_symlinks=False)
        os.chmod(name, 0o600, dir_fd=here)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


PATIENCE = 5.0
"""Seconds within which what a server has sent is to be in the file."""
_MEMORY = "programs.json"


class HoldsBackError(ToolError):
    """Binary logs cannot be streamed with this program."""

    def __init__(self, tool: Tool) -> None:
        named = tool.version_text if tool.path in tool.version_text else f"{tool.path} ({tool.version_text})"
        super().__init__(
            f"{named} holds back the end of each binary log, so the last transactions of a quiet server would not be "
            "archived: its binary log is not streamed until the mysqlbinlog of MySQL 5.7.26 or later is installed",
            detail=f"{PATIENCE:.0f} s after the server had sent bytes, the file did not have them, as with MySQL 5.6 "
            "and 5.7 before 5.7.26",
            hint="install the mysqlbinlog of MySQL 5.7.26 or later or of 8.0, which copies the logs of older servers "
            "too, and name it: `programs: {mysqlbinlog: /path/to/mysqlbinlog}`",
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """``holds``: does it hold bytes back? None where that could not be tried, and ``said`` tells why."""

    holds: bool | None
    said: str = ""


def tried(
    tool: BinlogTool,
    connection: Connection,
    position: Position,
    spool: Path,
    connection_id: int,
    *,
    cancel: threading.Event | None = None,
) -> Trial:
    """Try it, or give what was found before. ``position``: where the server writes. ``spool``: where it is remembered,
    and a folder may be made. Raises CancelledError, OSError."""
    memory = spool / _MEMORY
    known = _read(memory)
    name = f"{tool.tool.sha256} {tool.tool.version_text}"
    if isinstance(found := known.get(name), bool):
        return Trial(found)
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=spool, prefix="trial-") as folder:
        if worker() is not None:  # who copies comes to its own folder by its path
            for passed in (spool, Path(folder)):
                make_passable(passed)
        trial = _try(tool, connection, position, Path(folder), connection_id, cancel or threading.Event())
    if trial.holds is not None:
        write_whole(memory, json.dumps({**known, name: trial.holds}).encode())
    return trial


def _try(
    tool: BinlogTool,
    connection: Connection,
    position: Position,
    folder: Path,
    connection_id: int,
    cancel: threading.Event,
) -> Trial:
    going, ending = folder / "going", folder / "ending"
    for intake in (going, ending):
        make_intake(intake)
    with (
        log_client(tool, connection) as client,
        _Program(client.stream(going, position.file, connection_id, start=position.pos)) as one,
    ):
        if (said := one.wait(going / position.file, cancel)) is not None:
            return Trial(None, said)
        if _size(going / position.file):
            return Trial(False)
        with _Program(client.fetch(ending, position.file, connection_id + 1, start=position.pos)) as other:
            said = other.wait(None, cancel)
        if said != "" or not _size(ending / position.file):
            return Trial(None, said or f"{connection.address} sent nothing of {position.file}")
        return (
            Trial(True)
            if not _size(going / position.file) and one.child.poll() is None
            else Trial(None, "it was interrupted")
        )


class _Program(Heard):
    def wait(self, path: Path | None, cancel: threading.Event) -> str | None:
        """Until ``path`` holds something (None), the program has ended (its last words, "" where it ended well), or
        PATIENCE is over (None)."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            code = self.child.poll()  # first the program, then its file: it may have written right before its end
            if path is not None and _size(path):
                return None
            if code is not None:
                self.voice.finish()
                said = self.last_words(20).strip()
                return "" if code == 0 and path is None else said or f"it ended with {code}"
            if cancel.wait(0.02):
                raise CancelledError("stopped while a program was tried")
        return None


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _read(memory: Path) -> dict[str, object]:
    try:
        found = json.loads(memory.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
