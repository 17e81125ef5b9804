"""Puts a prepared copy where the server will look for it, and starts the server on it.

A half-done restore can never be started. The copy is put in place by one rename where that works. Otherwise it is moved
name by name, from a journal: the redo log first and the system tablespace last, because a server refuses to start on a
redo log without a system tablespace; while names are moved, the data directory is closed to the server's user.

The server is started first in a sandbox, to look and to forget its replication, then for good. Both starts are without
network, replication, events and binary log, and under a server id of their own. The second server knows its accounts
again and stays up; handing over means stopping it and starting the real service.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from backupd.engine.physical.datafiles import assert_local
from backupd.engine.server.backup_files import named
from backupd.engine.server.launch import (
    DROP_OWN_ACCOUNT,
    OWN_ACCOUNT,
    LaunchedServer,
    ServerConfig,
    not_started,
    option_text,
    own_account_file,
    own_password,
)
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.dialect import dialect_of
from backupd.model.document import Document
from backupd.model.errors import BackupdError, RefusedError, ToolError
from backupd.model.server_facts import ServerInfo
from backupd.process.command import Command
from backupd.process.folders import opened, read_plain, sync_folder, write_anew
from backupd.process.pipeline import run
from backupd.process.run_context import RunContext
from backupd.process.runtime import runtime_directory
from restore.datadir.occupancy import (
    FOLDER_MODE,
    Account,
    find_account,
    hand_over,
    refuse_non_empty,
    refuse_occupied,
)
from restore.datadir.staging import MARKER, Site, State, fits, read_marker, sync_filesystem, write_marker, write_state

_CLOSED = 0o700
_REDO = ("ib_logfile*", "#innodb_redo", "#ib_redo*")
_SYSTEM = ("ibdata*", "mysql.ibd")


def close_datadir(site: Site) -> None:
    """Keep the server's user out of a data directory that is being filled from inside. Only root can."""
    if site.inside and os.geteuid() == 0:
        os.chown(site.datadir, 0, 0)
        site.datadir.chmod(_CLOSED)


def remove_leftovers(folder: Path, patterns: Sequence[str]) -> None:
    """Remove the files (never folders: a schema may bear any name) at the top of ``folder`` that match."""
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink() and fits(path.name, patterns):
            path.unlink()


def place(site: Site, state: State, account: Account, leftovers: Sequence[str]) -> State:
    """From ``site.data`` to ``site.datadir``, durable; may be repeated after a kill at any moment.

    ``state`` is ``prepared`` or ``placing``; the one given back is ``placed`` and is as the marker in the
    data directory. Raises RefusedError when something got into the data directory meanwhile.
    """
    placed = replace(state, stage="placed", moves=())
    site.refuse_moved()
    try:
        if state.stage != "placing":
            remove_leftovers(site.data, leftovers)
            write_marker(site.data, placed)
            hand_over(site.data, account, folder_mode=state.mode)
            if site.store.is_dir():
                write_marker(site.store, placed)
                hand_over(site.store, account, folder_mode=FOLDER_MODE)
            sync_filesystem(site.folder)
            moves = tuple(_in_order(path.name for path in site.data.iterdir()))
            state = replace(state, stage="placing", moves=moves)
            write_state(site, state)
        _place_store(site, state)
        if site.inside:
            _move_all(site, state, account)
        else:
            _rename(site)
    except OSError as error:
        raise BackupdError(
            f"cannot put the restored files into {site.datadir}: {error.strerror}",
            hint="correct that and repeat the command: it continues where it stopped",
        ) from error
    return placed


def clear(site: Site) -> None:
    """Remove the staging folder, of which nothing is needed any more; what is not backupd's stays where it is."""
    with contextlib.suppress(OSError):
        for path in site.built():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        site.folder.rmdir()
    if site.folder.parent.is_dir():
        sync_folder(site.folder.parent)


def _place_store(site: Site, state: State) -> None:
    """The tablespaces from elsewhere first: without them the data directory must not be complete."""
    if site.store.is_dir():
        marker = read_marker(site.final_store)
        if marker is None or not marker.same_work(state):
            refuse_non_empty(site.final_store)
            _bring(site.store, site.final_store)
            sync_folder(site.final_store.parent)
        shutil.rmtree(site.store, ignore_errors=True)
    if site.data.is_dir():
        assert_local(site.data, site.final_store)


def _bring(source: Path, goal: Path) -> None:
    """Rename a folder, or copy it where the data directory is a file system of its own and beside it is another."""
    try:
        source.rename(goal)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        fresh = goal.with_name(f"{goal.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        run(Command(("cp", "-a", "--sparse=always", "--", str(source), str(fresh))))
        sync_filesystem(fresh)
        fresh.rename(goal)


def _rename(site: Site) -> None:
    if not site.data.exists():
        return  # renamed by an earlier attempt
    try:
        # Replaces an empty directory in one step, and fails on one that something was put into meanwhile.
        site.data.rename(site.datadir)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            refuse_non_empty(site.datadir)
        raise
    sync_folder(site.datadir.parent)


def _in_order(names: Iterable[str]) -> list[str]:
    """Redo first, system tablespace last, the marker after everything."""
    return sorted(names, key=lambda name: (name == MARKER, fits(name, _SYSTEM), not fits(name, _REDO), name))


def _move_all(site: Site, state: State, account: Account) -> None:
    refuse_non_empty(site.datadir, ours=(*site.ours, *state.moves))
    close_datadir(site)
    *content, marker = state.moves
    for name in content:
        _move(site, name)
    sync_folder(site.datadir)
    if os.geteuid() == 0:
        os.chown(site.datadir, account.uid, account.gid)
    site.datadir.chmod(state.mode)
    _move(site, marker)
    sync_folder(site.datadir)


def _move(site: Site, name: str) -> None:
    source, goal = site.data / name, site.datadir / name
    if os.path.lexists(source):
        if os.path.lexists(goal):
            raise RefusedError(
                f"{goal} appeared while the restore was being put in place",
                hint="remove what does not belong there and repeat the command",
            )
        source.rename(goal)
    elif not os.path.lexists(goal):
        raise RefusedError(
            f"{name!r} is gone from {site.data}: another process changed it",
            hint=f"remove {site.folder} and everything the restore put beside it, then restore again",
        )


START_SECONDS = 600.0
SERVER_MEMORY = 512 * 1024 * 1024
"""Most bytes of buffer pool for a server that is started to be looked at."""

# In a session of its own and not our child, so that nothing ends it when this process ends. The pipe makes the outer
# shell wait for that session: what it leaves in its own process group when it exits is killed.
_DETACH = """setsid --fork sh -c 'echo $$; exec "$@" < /dev/null > /dev/null 2>> "$0"' "$0" "$@" | head -n 1"""


_PID_LIMIT = 64
NO_VARIABLES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Started(Document):
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
    context: RunContext,
    *,
    account: Account,
    store: Path,
    memory: int | None = None,
) -> ServerConfig:
    """``options``: of ``launch.options_for_copy``; ``store``: of the remapped tablespaces; ``memory``: bytes of its
    buffer pool, None for what a server is given that is only looked at."""
    return ServerConfig(
        program=program,
        datadir=datadir,
        directory=folder,
        options=options,
        memory=min(context.memory, SERVER_MEMORY) if memory is None else memory,
        user=account.name,
        writable=(store,) if store.is_dir() else (),
        key_files=context.key_files,
    )


@contextmanager
def looked_at(config: ServerConfig, info: ServerInfo, *, replica: bool) -> Iterator[LaunchedServer]:
    """A confined server for the checks, stopped cleanly afterwards; its replication settings are gone unless
    ``replica``."""
    refuse_occupied(config.datadir)
    with LaunchedServer(config) as server:
        if not replica:
            forget_replication(server.connection, info)
        yield server


def forget_replication(connection: Connection, info: ServerInfo) -> None:
    """Remove every replication connection that came with the data. Raises ServerError."""
    with connection.connect() as session:
        dialect_of(info.flavour, info.version).remove_replication(session)


def detached(
    argv: Sequence[str], *, log: Path, folder: Path, account: Account, env: Mapping[str, str] = NO_VARIABLES
) -> int:
    """Start a program that nothing ends when this process ends; gives its process id. What it prints is added to
    ``log``, which ``account`` may write; it works in ``folder``."""
    user = account.name if os.geteuid() == 0 else None
    command = Command(("sh", "-c", _DETACH, str(log), *argv), cwd=folder, user=user, env=env)
    return int(run(command, timeout=60).stdout)


def start_for_good(config: ServerConfig, *, seconds: float = START_SECONDS, first: bytes = b"") -> Started:
    """Start a server that outlives this process, with its own accounts, and wait until it answers. ``first``: what one
    with an account of ours executes at its start.

    It reads the key files themselves: whenever it is started. Raises ToolError with the end of its log, RefusedError
    for key files that the configuration does not name.
    """
    refuse_occupied(config.datadir)
    config = replace(config, skip_grants=False, options=named(config.options, config.key_files))
    _lay_out(config, first)
    options = config.directory / "my.cnf"
    argv = (config.program, f"--defaults-file={options}")
    pid = detached(argv, log=config.error_log, folder=config.datadir, account=find_account(config.user))
    deadline = time.monotonic() + seconds
    while (started := running(config.directory)) is None:
        if not _lives(pid) or time.monotonic() > deadline:
            raise not_started(
                config,
                f"the server on {config.datadir} did not start",
                f"the files are in place; its option file is {options}",
            )
        time.sleep(0.05)
    if first:
        config.init_file.unlink(missing_ok=True)
        _write_options(replace(config, own_account=False))  # of its next start
    return started


def start_with_account(config: ServerConfig) -> tuple[Started, Connection]:
    """As ``start_for_good``, and how to ask the server as an account of ours, which it has until ``drop_account``.
    Raises as that does."""
    password = own_password()
    started = start_for_good(replace(config, own_account=True), first=own_account_file(password))
    return started, Connection(socket=str(started.socket), user=OWN_ACCOUNT, password=password)


def end_started(started: Started) -> None:
    """Shut a server down that was started for good, and wait until it is gone. Raises ToolError."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(started.pid, signal.SIGTERM)
    deadline = time.monotonic() + START_SECONDS
    while _lives(started.pid):
        if time.monotonic() > deadline:
            raise ToolError(
                f"process {started.pid}, a server that backupd started, does not end",
                hint="end it by hand, then repeat the command",
            )
        time.sleep(0.05)


def drop_account(session: Session) -> None:
    """Remove that account; ``session``, which is one of it, goes on. Raises ServerError."""
    session.execute(DROP_OWN_ACCOUNT)


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
    with opened(runtime_directory().parent / _GATE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as descriptor:
        fcntl.flock(descriptor, operation)
        yield


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


def _lay_out(config: ServerConfig, first: bytes) -> None:
    """The folder of a server that stays: socket, log and temporary files, open to its user alone."""
    account = find_account(config.user)
    temporary = config.directory / "tmp"
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    (config.directory / "pid").unlink(missing_ok=True)
    (config.directory / "s.sock").unlink(missing_ok=True)
    write_anew(config.error_log, b"")
    if first:
        write_anew(config.init_file, first)
    _write_options(config)
    hand_over(config.directory, account, folder_mode=0o700)


def _write_options(config: ServerConfig) -> None:
    owner = find_account(config.user) if os.geteuid() == 0 else None
    write_anew(
        config.directory / "my.cnf",
        option_text(config).encode(),
        owner=(owner.uid, owner.gid) if owner is not None else None,
    )
