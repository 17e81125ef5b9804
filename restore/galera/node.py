"""The node's own server: what its option file says, starting it so that it outlives this process, finding it again,
and ending it.

It is started on the data directory that was restored, whatever its option file says of one. It carries the id of its
restore in its environment: by that it is known again, and nothing else is ever ended.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.sql.option_files import read_option_file
from backupd.model.errors import ConfigurationError, RefusedError, ToolError
from backupd.process.folders import open_to_append
from restore.datadir.occupancy import Account
from restore.datadir.start import detached

USUAL_FILES = (Path("/etc/my.cnf"), Path("/etc/mysql/my.cnf"))
"""Read by a server that is given no option file."""
_SERIES = ("10.4", "10.5", "10.6", "10.11", "11.4", "11.8")
_NAMES = ("mysqld", "mariadb", "mariadbd")
_GROUPS = ("server", "galera", *_NAMES, *(f"{name}-{series}" for name in _NAMES for series in _SERIES))
_MARK = "BACKUPD_RESTORE"
_SERVERS = ("mariadbd", "mysqld")
_POLITE_SECONDS = 20.0
_GONE_SECONDS = 60.0


def server_option(option_file: Path | None, name: str) -> str:
    """The last value that ``option_file`` (None: the usual ones) gives to an option of a server; "" for none. Raises
    ConfigurationError."""
    found = ""
    files = (option_file,) if option_file is not None else tuple(path for path in USUAL_FILES if path.exists())
    for path in files:
        read = read_option_file(path, _GROUPS)
        if read.problems:
            raise ConfigurationError(read.problems, hint="; ".join(read.hints))
        for one in read.options:
            if one.name.replace("-", "_") == name:
                found = one.value or ""
    return found


def refuse_no_node(option_file: Path | None) -> None:
    """Raises RefusedError where the option file is no node's."""
    shown = option_file or " and ".join(map(str, USUAL_FILES))
    on = server_option(option_file, "wsrep_on").upper() in ("ON", "1", "TRUE")
    if not on or not server_option(option_file, "wsrep_cluster_address"):
        raise RefusedError(
            f"{shown} does not make a server a node: it lacks wsrep_on=ON or wsrep_cluster_address",
            hint="name the option file that the node's service starts with: `server_defaults_file` of this server",
        )


@dataclass(frozen=True, slots=True)
class Node:
    """``restore_id``: of the restore that it is started by. ``option_file``: None for the usual ones."""

    restore_id: str
    program: str
    option_file: Path | None
    datadir: Path
    account: Account

    @property
    def output(self) -> Path:
        """Where it writes before it has opened its log; beside its data, which an SST removes."""
        return self.datadir.with_name(f"{self.datadir.name}.start.log")

    @property
    def log(self) -> Path:
        """Where its server writes what it does."""
        name = server_option(self.option_file, "log_error")
        if not name:
            return self.output
        path = self.datadir / name
        return path if path.suffix else path.with_name(f"{path.name}.err")  # as a server completes it

    def start(self) -> int:
        """Start it; gives its process id. Raises ToolError where it cannot be started at all."""
        os.close(open_to_append(self.output, owner=(self.account.uid, self.account.gid)))
        named = (f"--defaults-file={self.option_file}",) if self.option_file is not None else ()
        return detached(
            (self.program, *named, f"--datadir={self.datadir}"),
            log=self.output,
            folder=self.datadir,
            account=self.account,
            env={_MARK: self.restore_id},
        )

    def end(self) -> None:
        """End every such process. Raises ToolError for one that does not go away."""
        end_all(self.restore_id, self.datadir)


def end_all(restore_id: str, datadir: Path) -> None:
    """End the node's server that the restore of this id started on ``datadir``, and then what that started: the scripts
    and tools of an SST outlive it, and go on waiting for a donor's files. Raises ToolError for a process that does not
    go away."""
    for servers in (True, False):
        while left := tuple(_processes(restore_id, servers=servers)):
            for pid in left:
                _end(pid, restore_id, datadir)


def _end(pid: int, restore_id: str, datadir: Path) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not _is_of(pid, restore_id):
            return  # it ended just now, and the number is another one's
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not _ended(handle, _POLITE_SECONDS):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            if not _ended(handle, _GONE_SECONDS):
                raise ToolError(
                    f"process {pid}, started for the node on {datadir}, cannot be ended",
                    hint="see what it waits for (/proc/PID/stack); nothing may use its files before it is gone",
                )
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def started_by(restore_id: str) -> int | None:
    """The process of a node's server that the restore of this id started, also in an earlier attempt."""
    return next(_processes(restore_id), None)


def _processes(restore_id: str, *, servers: bool = True) -> Iterator[int]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _is_of(int(process.name), restore_id, servers=servers):
            yield int(process.name)


def _is_of(pid: int, restore_id: str, *, servers: bool = False) -> bool:
    """Was it started for the restore, by us or by what we started? ``servers``: and is a server."""
    process, mark = Path("/proc", str(pid)), f"{_MARK}={restore_id}".encode()
    try:
        if servers and (process / "comm").read_text().strip() not in _SERVERS:
            return False
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended


def _ended(handle: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
