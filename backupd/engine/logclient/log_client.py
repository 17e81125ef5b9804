"""The program that copies binary logs from a server: mariadb-binlog, or mysqlbinlog, called for raw copies.

Measured with mariadb-binlog of 10.11.19 and mysqlbinlog 9.7.4, both with ``--raw --stop-never``:

- each event is in the file as soon as the server has sent it; nothing is held back in the program (older ones do
  that, and are refused: ``holdback``);
- a file is begun anew at its first byte, whatever is there: only a folder of its own keeps earlier copies;
- neither connects again. It ends with 1 when the server is gone (mysqlbinlog with 0 after a clean shutdown), when a
  file is not there, when the server has no next file (RESET), when the disk is full;
- after a RESET that made a file of the *same* name it stays, with nothing more to come, and may end with 0 later:
  only the server's own position tells;
- neither asks for heartbeats: a connection that was cut without a word stays open for ever;
- two with the same connection id push each other out;
- options of the other family in a ``[client]`` group are errors to mysqlbinlog (``ssl-verify-server-cert``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from backupd.engine.sql.client import Connection
from backupd.engine.sql.client_options import client_options, has_modes, help_of
from backupd.engine.toolset import NO_PATHS, find_tool
from backupd.model.errors import ToolError
from backupd.model.server_facts import Flavour, Tool
from backupd.process.command import Command

_MARIADB_ID = "stop-never-slave-server-id"
_MYSQL_ID = "connection-server-id"
_ONLY_MARIADB = "print-row-count"
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
    flavour: Flavour
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
        return Command(
            (
                self.tool.path,
                f"--defaults-file={option_file}",
                "--read-from-remote-server",
                "--raw",
                "--result-file=./",
                *options,
            ),
            cwd=folder,
        )


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
    return BinlogTool(tool, flavour, _MYSQL_ID if _MYSQL_ID in options else _MARIADB_ID, has_modes(tool))


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
