"""Is a data directory free to be filled? Empty, and no server living in it, whoever started that server.

And whose files it holds once it is filled, with which modes: the server's user, nobody else's.

Memory and room for a restore, chosen and checked before the first byte moves.

Memory of a prepare: recovery keeps the redo records in a hash table and the pages they touch in a buffer pool. When the
table does not fit, the redo is read again in several passes, which is what makes a prepare slow; memory beyond that
only caches pages.

Room: what a restore takes in bytes and inodes, and whether the file system has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.server.sandbox import out_of_reach, worker
from backupd.model.errors import DamagedError, RefusedError, ToolError
from backupd.model.manifest import Entry, StoredObject
from backupd.model.text import format_size
from backupd.process.folders import closed_words, give, give_in, opened, read_plain
from restore.datadir.staging import INSIDE, MARKER, reserved
from storage.layout import REPOSITORY

FILE_MODE = 0o660
FOLDER_MODE = 0o700
"""As the servers themselves make them."""

_LOCKED_FILES = ("ibdata1", "aria_log_control", "mysql.ibd")
"""Files that servers hold a POSIX lock on as long as they run."""
_NESTED = (*_LOCKED_FILES, MARKER, INSIDE)
"""What shows that a folder is, or is about to be, a data directory."""
_LISTED = 20
_PID_LIMIT = 64
_PROC = Path("/proc")
_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of x86-64 and arm64 Linux: type, whence, start, length, pid (fcntl(2))."""


@dataclass(frozen=True, slots=True)
class Account:
    """An operating system user by name, with its numbers on this machine."""

    name: str
    uid: int
    gid: int


def find_account(name: str) -> Account:
    """Raises RefusedError for a user that does not exist, or to whom we may not give files."""
    try:
        found = pwd.getpwnam(name)
    except KeyError as error:
        raise RefusedError(
            f"there is no user {name!r} on this machine",
            hint="install the database server first, or name its user with the server's `owner` in backupd.yaml",
        ) from error
    if os.geteuid() not in (0, found.pw_uid):
        raise RefusedError(
            f"only root may give files to the user {name!r}", hint=f"run the restore as root or as {name}"
        )
    return Account(name, found.pw_uid, found.pw_gid)


def refuse_closed(datadir: Path, account: Account) -> None:
    """Raises RefusedError where a folder above ``datadir`` (a real path) lets the server's user not pass: no server
    could run there."""
    user = account.name if os.geteuid() == 0 else None
    there = [folder for folder in reversed(datadir.parents) if folder.exists()]
    if not out_of_reach(user, [f"{there[-1]}/."]):
        return
    closed = next(folder for folder in there if out_of_reach(user, [f"{folder}/."]))
    raise RefusedError(
        f"the server's user {account.name} cannot enter {closed}, so a server could not run in {datadir}",
        detail=closed_words(closed),
        hint=f"let others pass through it (chmod o+x {closed}), or choose another data directory",
    )


def worker_account() -> Account:
    """Whose copies are while programs work on them: not yet the server's, under whose user others live. Raises
    RefusedError where there is no such user."""
    name = worker()
    return find_account(name if name is not None else pwd.getpwuid(os.geteuid()).pw_name)


def refuse_links(folder: Path) -> None:
    """Raises DamagedError for links and pipes in ``folder``, where a program worked on what may be forged: they would
    lead us, who have more power than it had, to other files, or stop us. No server and no tool makes any there."""
    found = [
        str(Path(root, name))
        for root, folders, files in os.walk(folder)
        for name in (*folders, *files)
        if stat.S_IFMT(Path(root, name).lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR)
    ]
    if found:
        raise DamagedError(
            f"a tool that worked in {folder} created links or pipes there",
            found[:20],
            hint="nothing was put in place; no server writes such a backup: find out who wrote it",
        )


def hand_over(folder: Path, account: Account, *, folder_mode: int) -> None:
    """Give everything below ``folder`` to ``account`` with the servers' modes, and itself with
    ``folder_mode``."""
    owner = (account.uid, account.gid)
    for _root, folders, files, descriptor in os.fwalk(folder):
        for name in folders:
            give_in(descriptor, name, owner, FOLDER_MODE)
        for name in files:
            give_in(descriptor, name, owner, FILE_MODE)
    give(folder, owner, folder_mode)


def foreign_entries(datadir: Path, ours: Collection[str] = ()) -> list[str]:
    """Names inside ``datadir`` that are neither ``ours`` nor the file system's own ``lost+found``, sorted.

    A missing ``datadir`` is empty. Raises RefusedError when it is not a directory.
    """
    try:
        with os.scandir(datadir) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.name not in ours and not (entry.name == "lost+found" and entry.is_dir(follow_symlinks=False))
            )
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise RefusedError(f"{datadir} is not a directory", hint="name the data directory to restore into") from error


def refuse_non_empty(datadir: Path, ours: Collection[str] = ()) -> None:
    """Raises RefusedError listing what is there."""
    found = foreign_entries(datadir, ours)
    if not found:
        return
    listed = "\n".join(found[:_LISTED])
    if len(found) > _LISTED:
        listed += f"\n... and {len(found) - _LISTED} more"
    raise RefusedError(
        f"the data directory {datadir} is not empty: {len(found)} entries",
        detail=listed,
        hint="restore into an empty directory, or move this away yourself; backupd never overwrites it",
    )


def refuse_nested(datadir: Path) -> None:
    """Raises RefusedError when ``datadir`` (a real path) is inside somebody's data directory, in a repository, or in
    what another restore builds and removes, or bears such a name. It may as well be a folder for SQL files.

    The files of a data directory in ``datadir`` itself are ``refuse_non_empty``'s business: they may be our own.
    """
    for folder in (datadir, *datadir.parents):
        if os.path.lexists(folder / REPOSITORY):
            raise RefusedError(
                f"{datadir} lies in a repository of backups: {folder}",
                detail=f"{folder / REPOSITORY} is there",
                hint="restore outside every destination: files in a destination are checked and removed like backups",
            )
        if why := reserved(folder):
            raise RefusedError(
                f"{datadir} lies in a staging folder of restores: {folder}"
                if folder != datadir
                else f"{datadir} has the name of a staging folder of restores",
                detail=why,
                hint="restore into another folder, or give it another name: its contents are removed at the end",
            )
        signs = [name for name in _NESTED if folder != datadir and os.path.lexists(folder / name)]
        if signs:
            raise RefusedError(
                f"{datadir} lies inside the data directory of a server: {folder}",
                detail=f"{folder / signs[0]} is there",
                hint="restore beside it: a server treats every folder in its data directory as a schema",
            )


def refuse_occupied(datadir: Path) -> None:
    """Raises RefusedError naming the processes that live in ``datadir``."""
    occupants = list(find_occupants(datadir))
    if occupants:
        raise RefusedError(
            f"the data directory {datadir} is in use",
            detail="\n".join(occupants[:_LISTED]),
            hint="stop that server (or leave that directory) and repeat the command",
        )


def find_occupants(datadir: Path) -> Iterator[str]:
    """In words, every sign of a process at work in ``datadir``: locks, sockets, pid files, open files, working
    directories."""
    if datadir.is_dir():
        for look in (_lock_holders, _listeners, _pid_files, _inhabitants):
            yield from look(datadir.resolve())


def not_looked_at(datadir: Path) -> list[str]:
    """What is to be said where we may not see what every process does: then nobody knows whether one uses
    ``datadir``."""
    hidden = 0
    above = {1, *_ancestors()}  # who has started us, and everything, is no database server
    for process in _PROC.iterdir():
        if process.name.isdigit() and int(process.name) not in above:
            try:
                (process / "cwd").readlink()
            except PermissionError:
                hidden += 1
            except OSError:
                continue  # it has ended, or is the kernel's own
    if not hidden:
        return []
    problem = f"cannot determine whether one of {hidden} processes uses {datadir}: backupd may not inspect them"
    return [f"{problem} (root with CAP_SYS_PTRACE may, see deploy/backupd.service)"]


def _lock_holders(datadir: Path) -> Iterator[str]:
    for name in _LOCKED_FILES:
        path = datadir / name
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
            except OSError:
                continue  # not there, or not a file a server could lock
            answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            kind, _whence, _start, _length, pid = _FLOCK.unpack(answer)
            if kind != fcntl.F_UNLCK:
                yield f"{path} is locked by {_who(pid)}"


def _listeners(datadir: Path) -> Iterator[str]:
    for path in sorted(datadir.glob("*.sock")):
        if not path.is_socket():
            continue
        with socket.socket(socket.AF_UNIX) as knock, contextlib.suppress(OSError):
            knock.settimeout(2)
            # Through the folder's descriptor: a socket's own path may have 107 bytes only.
            with opened(datadir, os.O_PATH | os.O_DIRECTORY) as folder:
                knock.connect(f"/proc/self/fd/{folder}/{path.name}")
            yield f"a server answers at {path}"


def _pid_files(datadir: Path) -> Iterator[str]:
    for path in sorted(datadir.glob("*.pid")):
        try:
            pid = int(read_plain(path, _PID_LIMIT).decode("ascii").strip())
            name = (_PROC / str(pid) / "comm").read_text().strip()
        except (OSError, ValueError):
            continue  # stale: nobody has that number
        if name in ("mysqld", "mariadbd", "mysqld_safe", "mariadbd-safe"):
            yield f"{path} names {_who(pid)}"


def _inhabitants(datadir: Path) -> Iterator[str]:
    """Processes with open files in ``datadir``, or working there (an operator's own shell does not count)."""
    ancestors = set(_ancestors())
    for process in _PROC.iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        pid = int(process.name)
        # Processes end while we look, and not everybody may look at all of them.
        with contextlib.suppress(OSError):
            if pid not in ancestors and _inside(process / "cwd", datadir):
                yield f"{_who(pid)} has its working directory here"
                continue
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if _inside(descriptor, datadir):
                        yield f"{_who(pid)} has {descriptor.readlink()} open"
                        break


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 1:
        yield pid
        try:
            # The name in brackets may hold anything, so read behind its last bracket: state, then the parent.
            pid = int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return


def _inside(link: Path, datadir: Path) -> bool:
    target = str(link.readlink())
    return target == str(datadir) or target.startswith(f"{datadir}/")


def _who(pid: int) -> str:
    if pid <= 0:
        return "a process outside this container"
    try:
        return f"process {pid} ({(_PROC / str(pid) / 'comm').read_text().strip()})"
    except OSError:
        return f"process {pid}"


MIB = 1024 * 1024
FLOOR = 96 * MIB
"""Below this the tools' own recovery is not able to run reliably; their default is 96 to 100 MiB."""
DEFAULT_CAP = 8 * 1024 * MIB

RESERVE = 64 * 1024 * 1024
"""Bytes for logs, temporary tablespace and the file system's own bookkeeping."""
_BLOCK = 4096
_DELTA = ".delta"
"""Pages of one increment; those of the next come on top."""


def choose_memory(*, redo: int, available: int, cap: int = DEFAULT_CAP) -> int:
    """Memory for a prepare, a whole number of MiB: grows with the redo to apply and with free memory, up to ``cap``
    (all in bytes).

    Twice the redo for its hash table, plus an eighth of the free memory for pages; never more than half of
    the free memory, because page cache and the server next door need some too.
    """
    chosen = min(2 * redo + available // 8, available // 2, cap)
    return max(chosen, FLOOR) // MIB * MIB


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that the kernel would give without swapping (``MemAvailable``, proc(5)). Raises ToolError."""
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ToolError(
        f"{meminfo} does not say how much memory is available",
        hint="set restore.scratch.memory in the configuration",
    )


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by purpose. ``least`` counts sparse files by what is stored of them, not by their length."""

    files: int
    growth: int
    redo: int
    least: int
    inodes: int

    @property
    def bytes(self) -> int:
        """The most that the restore takes, with the reserve."""
        return self.files + self.growth + self.redo + RESERVE

    @property
    def least_bytes(self) -> int:
        """The least that it takes: when every hole of a sparse file stays one."""
        return self.least + self.growth + self.redo + RESERVE

    def describe(self) -> str:
        """Each purpose with its bytes and the sum, for the detail of a refusal."""
        return (
            f"{self.files:,} bytes of files (staged, then renamed: stored once), "
            f"{self.growth:,} bytes of growth while redo and increments are applied, "
            f"{self.redo:,} bytes for the server's own redo log, {RESERVE:,} bytes reserve: "
            f"{self.bytes:,} bytes ({format_size(self.bytes)})"
        )


def measure(
    chains: Iterable[tuple[Iterable[Entry], Mapping[str, StoredObject]]], *, redo_applied: int, redo_log: int
) -> Need:
    """What a restore takes: every backup of the chain is fetched whole, then redo is applied, and each increment is
    copied over the full backup: pages into their tables, other files in the place of the earlier ones.

    ``redo_applied``: bytes of the redo copies, the most by which applying them can make files grow;
    ``redo_log``: bytes of the redo log that the restored server will make for itself.
    """
    files = least = inodes = 0
    copied = 0
    held: dict[str, int] = {}
    for number, (entries, objects) in enumerate(chains):
        for entry in entries:
            if number:
                copied += max(0, entry.size - held.get(entry.path, 0))
            held[entry.path] = 0 if entry.path.endswith(_DELTA) else entry.size
            size = -(-entry.size // _BLOCK) * _BLOCK
            files += size
            # Stored bytes of a sparse file are compressed; a hole costs next to nothing, so this is a lower
            # bound.
            least += min(size, sum(objects[part.object].size for part in entry.parts)) if entry.sparse else size
            inodes += 1
    return Need(files=files, growth=redo_applied + copied, redo=redo_log, least=least, inodes=inodes)


def refuse_full(folder: Path, need: int, what: str, *, detail: str = "", hint: str) -> None:
    """Raises RefusedError when fewer than ``need`` bytes are free for ``what`` at ``folder``, or the nearest one above
    it that is there."""
    there = next(ancestor for ancestor in (folder, *folder.parents) if ancestor.exists())
    room = os.statvfs(there)
    free = room.f_bavail * room.f_frsize
    if free < need:
        raise RefusedError(
            f"not enough space at {there} for {what}: {format_size(need)} needed, {format_size(free)} free",
            detail=detail,
            hint=hint,
        )


def refuse_too_small(need: Need, folder: Path, *, there: tuple[int, int] = (0, 0)) -> tuple[str, ...]:
    """Raises RefusedError when ``folder``'s file system has too little room; gives warnings when it may be
    tight."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize + there[0]
    if free < need.least_bytes:
        raise RefusedError(
            f"not enough space at {folder}: {format_size(need.bytes)} needed, {format_size(free)} free",
            detail=f"{need.describe()}; free: {free:,} bytes; missing: {need.bytes - free:,} bytes",
            hint="free some space there, or restore onto a larger file system",
        )
    if room.f_files and room.f_favail + there[1] < need.inodes:
        raise RefusedError(
            f"too few inodes at {folder}: {need.inodes:,} files, {room.f_favail:,} inodes free",
            hint="restore onto a file system with more inodes",
        )
    if free < need.bytes:
        tight = f"{format_size(need.bytes)} needed at most, {format_size(free)} free"
        return (f"room at {folder} is enough only if sparse files stay sparse: {tight}",)
    return ()
