"""The server on a restored data directory: first in a sandbox to look and to forget its replication, then for good.

Both are deaf and mute: no network, no replication, no events, no binary log, an id of their own. The second one
knows its accounts again and stays up; handing over means stopping it and starting the real service.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from backupd.engine.server.backup_files import named
from backupd.engine.server.launch import LaunchedServer, ServerConfig, log_tail, option_text
from backupd.engine.sql.client import Connection
from backupd.engine.sql.dialect import dialect_of
from backupd.model.errors import ToolError
from backupd.model.server_facts import ServerInfo
from backupd.process.command import Command
from backupd.process.folders import read_plain, write_anew
from backupd.process.pipeline import run
from backupd.process.runtime import runtime_directory
from restore.datadir.occupancy import Account, find_account, hand_over

START_SECONDS = 600.0

# In a session of its own and not our child, so that nothing ends it when this process ends. The pipe makes the outer
# shell wait for that session: what it leaves in its own process group when it exits is killed.
_DETACH = """setsid --fork sh -c 'echo $$; exec "$@" < /dev/null > /dev/null 2>> "$0"' "$0" "$@" | head -n 1"""


_PID_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Started:
    """A server that is up."""

    socket: Path
    pid: int


def run_folder(restore_id: str) -> Path:
    """Where the started server of a restore has its socket, log and option file: the same for every attempt."""
    return runtime_directory().parent / f"server-{restore_id.rpartition('-')[2]}"


def server_config(
    program: str,
    datadir: Path,
    folder: Path,
    options: Mapping[str, str | None],
    *,
    account: Account,
    store: Path,
    memory: int,
    key_files: Sequence[Path] = (),
) -> ServerConfig:
    """``options``: of ``launch.options_for_copy``; ``store``: of the remapped tablespaces; ``memory``: bytes;
    ``key_files``: of the configuration."""
    return ServerConfig(
        program=program,
        datadir=datadir,
        directory=folder,
        options=options,
        memory=memory,
        user=account.name,
        writable=(store,) if store.is_dir() else (),
        key_files=key_files,
    )


@contextmanager
def looked_at(config: ServerConfig, info: ServerInfo, *, replica: bool) -> Iterator[LaunchedServer]:
    """A confined server for the checks, stopped cleanly afterwards; its replication settings are gone unless
    ``replica``."""
    with LaunchedServer(config) as server:
        if not replica:
            forget_replication(server.connection, info)
        yield server


def forget_replication(connection: Connection, info: ServerInfo) -> None:
    """Remove every replication connection that came with the data. Raises ServerError."""
    with connection.connect() as session:
        dialect_of(info.flavour, info.version).remove_replication(session)


def start_for_good(config: ServerConfig, *, seconds: float = START_SECONDS) -> Started:
    """Start a server that outlives this process, with its own accounts, and wait until it answers.

    It reads the key files themselves: whenever it is started. Raises ToolError with the end of its log, RefusedError
    for key files that the configuration does not name.
    """
    config = replace(config, skip_grants=False, options=named(config.options, config.key_files))
    _lay_out(config)
    argv = (
        "sh",
        "-c",
        _DETACH,
        str(config.error_log),
        config.program,
        f"--defaults-file={config.directory / 'my.cnf'}",
    )
    user = config.user if os.geteuid() == 0 else None
    pid = int(run(Command(argv, cwd=config.datadir, user=user), timeout=60).stdout)
    deadline = time.monotonic() + seconds
    while (started := running(config.directory)) is None:
        if not _lives(pid) or time.monotonic() > deadline:
            raise ToolError(
                f"the server on {config.datadir} did not come up",
                detail=log_tail(config.error_log),
                hint=f"the files are in place; its option file is {config.directory / 'my.cnf'}",
            )
        time.sleep(0.05)
    return started


_SERVER_FOLDER = re.compile(r"server-[0-9a-f]{8}(-look)?")
_GATE = ".servers"


@contextmanager
def starting() -> Iterator[None]:
    """While a server is started here, nobody takes its folder for a dead one's."""
    with _gate(fcntl.LOCK_SH):
        yield


def remove_dead_folders() -> tuple[str, ...]:
    """Remove the folders of started servers that no longer run; gives their names.

    Nothing is removed while another restore is starting a server.
    """
    base = runtime_directory().parent
    removed = []
    with contextlib.suppress(BlockingIOError), _gate(fcntl.LOCK_EX | fcntl.LOCK_NB):
        commands = _commands()
        for folder in sorted(base.iterdir()):
            if not _SERVER_FOLDER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
                continue
            if not any(os.fsencode(folder / "my.cnf") in command for command in commands):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
    return tuple(removed)


@contextmanager
def _gate(operation: int) -> Iterator[None]:
    path = runtime_directory().parent / _GATE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def _commands() -> list[bytes]:
    """The command lines of all processes."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                found.append((process / "cmdline").read_bytes())
    return found


def look_folder(restore_id: str) -> Path:
    """The same for the sandboxed server before it: never to be taken for the one that stays."""
    folder = run_folder(restore_id)
    return folder.with_name(f"{folder.name}-look")


def running(folder: Path) -> Started | None:
    """The server that was started with its option file and socket in ``folder``, when it answers."""
    path, pid = folder / "s.sock", _pid(folder)
    if not pid or not _is_ours(pid, folder):
        return None
    with socket.socket(socket.AF_UNIX) as knock:
        knock.settimeout(2.0)
        try:
            knock.connect(str(path))
            # The protocol's first packet comes unasked.
            answered = len(knock.recv(5)) == 5
        except OSError:
            return None
    return Started(path, pid) if answered else None


def _is_ours(pid: int, folder: Path) -> bool:
    """A number in a file may be anybody's by now."""
    try:
        return os.fsencode(folder / "my.cnf") in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _lives(pid: int) -> bool:
    """A zombie does not: it is gone, only nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _pid(folder: Path) -> int | None:
    try:
        return int(read_plain(folder / "pid", _PID_LIMIT).decode("ascii"))
    except (OSError, ValueError):
        return None


def _lay_out(config: ServerConfig) -> None:
    """The folder of a server that stays: socket, log and temporary files, open to its user alone."""
    account = find_account(config.user)
    temporary = config.directory / "tmp"
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    (config.directory / "pid").unlink(missing_ok=True)
    (config.directory / "s.sock").unlink(missing_ok=True)
    for path, content in ((config.directory / "my.cnf", option_text(config)), (config.error_log, "")):
        write_anew(path, content.encode())
    hand_over(config.directory, account, folder_mode=0o700)
