"""Reading the data directory of a server that runs: as whom, what he sees, and what in it is not the server's.

A physical tool loads the libraries that the server names, and copies whatever a link in the data directory leads to:
both belong to the database's user. So the tool is that user when we are root, and reads what he can read anyway; where
anything can be confined it sees the data and writes nothing. A link to somebody else's file, or such a file itself
under a second name, is no part of a server: nothing is copied while one is there.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.physical.tablefiles import OF_ENGINE
from backupd.engine.server.probe import linked_tablespace, read_dialect, system_files
from backupd.engine.server.sandbox import Handed
from backupd.engine.sql.client import Session
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Flavour
from backupd.process.command import Command
from backupd.process.folders import powers_of, user_words
from backupd.process.pipeline import run

_OF_TABLES = frozenset(
    {"frm", "isl", "ibd", "ibu", "new", "cfg", "cfp", "sdi", "par", "opt", "TRG", "TRN", "ARM"}
).union(*OF_ENGINE.values())
"""Endings of the files that the tools copy."""
_OF_SERVER = ("ibdata", "undo", "ib_logfile", "ib_buffer_pool", "aria_log")
"""Beginnings of the names of those that are above the schemas."""
_FOLDERS = ("innodb_undo_directory", "innodb_log_group_home_dir", "aria_log_dir_path", "log_bin_basename", "plugin_dir")
_KEY_FILES = ("file_key_management_filename", "file_key_management_filekey")
_NAMED = (*_FOLDERS, *_KEY_FILES, "rocksdb_datadir", "rocksdb_wal_dir")
"""Variables that name what the tools read besides."""
_LINK = ".isl"
_CHECKPOINTS = "rocksdb_datadir"
"""There the tool removes the copy that it has MyRocks make."""
_SHARED = frozenset({Path("/"), Path("/tmp"), Path("/var/tmp"), Path("/run"), Path("/home"), Path("/root")})  # noqa: S108  never written
"""Folders of everybody: of these only the file that is named is shown."""
_SHOWN = 50
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class LiveData:
    """``reader``: whom the tool runs as, None: as we do; ``readable``: what it has to see, ``written``: what it has to
    write to; ``empty``: folders among the schemas that are not the server's, and in which no table is."""

    datadir: Path
    reader: str | None
    readable: tuple[Path, ...]
    written: tuple[Path, ...]
    empty: tuple[str, ...]

    def reading(self, command: Command, handed: Handed, own: Sequence[Path]) -> Command:
        """``command`` as the reader, confined where that can be done. ``own``: folders of its own. Raises
        RefusedError."""
        return handed.confined(command, writable=(*own, *self.written), readable=self.readable)


def look_at(session: Session) -> LiveData:
    """Raises RefusedError for files of others in the data directory, and for one of root's; ServerError."""
    variables = {str(name): str(value) for name, value in session.query("SHOW GLOBAL VARIABLES")}
    datadir = Path(variables["datadir"])
    reader = reader_of(datadir, session)
    with powers_of(reader):
        found = survey(datadir)
    found.refuse()
    readable = {datadir, datadir.resolve(), *found.targets, *_named(session, variables)}
    written = {*found.linking, *(datadir / variables[name] for name in (_CHECKPOINTS,) if name in variables)}
    return LiveData(datadir, reader, _within_reach(reader, readable), _within_reach(reader, written), found.empty)


def reader_of(datadir: Path, session: Session) -> str | None:
    """As whom a living server's ``datadir`` is read when we are root: its owner. None: we are not, and read it as
    ourselves. Raises RefusedError where it is not here, where nobody but root is left, and where it belongs to somebody
    else than the process that answers: a server may name any folder."""
    try:
        found = datadir.stat()
    except (OSError, ValueError) as error:  # a NUL in its name
        raise RefusedError(
            f"the server's data directory {str(datadir)!r} cannot be read: {error}",
            hint="the tool must run on the server's host, as a user who may read its datadir",
        ) from error
    if os.geteuid() != 0:
        return None
    if found.st_uid == 0:
        raise RefusedError(
            f"the data directory {datadir} belongs to root: the programs that read it load libraries which the server "
            "names, and are never run as root",
            hint=f"run the server as a user of its own, and give it its files: chown -R mysql: {datadir}",
        )
    process = session.server_uid
    if process not in (found.st_uid, 0):  # root may have opened the socket for it, as systemd does
        answers = "is not a process of this host" if process is None else f"is a process of {user_words(process)}"
        raise RefusedError(
            f"the data directory {datadir} belongs to {user_words(found.st_uid)}, but the server at "
            f"{session.connection.address} {answers}: backupd does not read it",
            hint="connect through the server's own socket; if the directory is the server's, give it to the user of "
            "the server: chown -R",
        )
    return _named_user(found.st_uid, found.st_gid)


def user_behind(session: Session) -> str | None:
    """As whom we look at files of this host that only the server names, when we are root: who it runs as, or nobody
    where the kernel does not say that. None: we are not root."""
    if os.geteuid() != 0:
        return None
    return _named_user(session.server_uid or _NOBODY, _NOBODY)


@dataclass(frozen=True, slots=True)
class Survey:
    """``foreign``: what is not the server's, in words; ``targets``: what its links lead to; ``linking``: folders with
    files that name tablespaces elsewhere, which the tools open as if to write; ``empty``: as of LiveData."""

    datadir: Path
    foreign: tuple[str, ...]
    targets: frozenset[Path]
    linking: frozenset[Path]
    empty: tuple[str, ...]

    def refuse(self) -> None:
        """Raises RefusedError that names every foreign file."""
        if not self.foreign:
            return
        more = len(self.foreign) - _SHOWN
        raise RefusedError(
            f"files of other users than the server's are in its data directory {self.datadir}: {len(self.foreign)}",
            detail="\n".join((*self.foreign[:_SHOWN], *((f"and {more} more",) if more > 0 else ()))),
            hint="no physical backup is taken with them: remove each file named, or, if it is the server's, give it "
            "to the server's user with chown",
        )


READABLE = (
    "run backupd as root or as the database's own user, or let its user read the data directory: "
    'docs/installing.md, "What works where", has the commands'
)


def survey(datadir: Path) -> Survey:
    """Look at everything that a physical tool would copy. A link is the server's own where it leads to a file, or as a
    schema to a folder, of the user who owns the data directory. Raises RefusedError where it cannot be read."""
    try:
        owner = datadir.stat()
        return _survey(datadir, owner)
    except OSError as error:
        raise RefusedError(f"the data directory {datadir} cannot be read: {error}", hint=READABLE) from error


def _survey(datadir: Path, owner: os.stat_result) -> Survey:
    foreign: list[str] = []
    empty: list[str] = []
    targets: set[Path] = set()
    linking: set[Path] = set()
    for entry in _entries(datadir):
        if not entry.is_dir():
            if entry.name.startswith(_OF_SERVER) or _is_of_table(entry):
                foreign += _doubts(entry, entry.name, owner, targets)
                linking |= {datadir} if entry.name.endswith(_LINK) else set()
            continue
        if entry.is_symlink() and (doubts := list(_doubts(entry, entry.name, owner, targets, folder=True))):
            foreign += doubts
            continue
        files = []
        with contextlib.suppress(FileNotFoundError):  # dropped since
            strange = entry.stat(follow_symlinks=False).st_uid != owner.st_uid
            with contextlib.suppress(*(PermissionError,) if strange else ()):  # lost+found
                files = [file for file in _entries(Path(entry.path)) if _is_of_table(file)]
            if not files and strange:
                empty.append(entry.name)
        for file in files:
            foreign += _doubts(file, f"{entry.name}/{file.name}", owner, targets)
        linking |= {Path(entry.path) for file in files if file.name.endswith(_LINK)}
    named = tuple(name for name in empty if len(name.split()) == 1)  # others cannot be named to the tools
    return Survey(datadir, tuple(foreign), frozenset(targets), frozenset(linking), named)


def closed_links(found: Survey, flavour: Flavour) -> tuple[str, ...]:
    """Folders with files that name tablespaces elsewhere, and in which nothing can be written: MariaDB's tool fails.
    None of a server whose tool only reads those files."""
    if flavour is not Flavour.MARIADB:
        return ()
    return tuple(str(folder) for folder in sorted(found.linking) if not os.access(folder, os.W_OK, effective_ids=True))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _is_of_table(entry: os.DirEntry[str]) -> bool:
    return entry.name.rpartition(".")[2] in _OF_TABLES


def _doubts(
    entry: os.DirEntry[str],
    name: str,
    owner: os.stat_result,
    targets: set[Path],
    *,
    folder: bool = False,
) -> Iterator[str]:
    """Why ``entry`` is not the server's own; where its link leads to comes to ``targets``."""
    with contextlib.suppress(FileNotFoundError):  # gone since; or it leads nowhere, and nothing can be copied
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            target = os.path.normpath(Path(entry.path).parent / Path(entry.path).readlink())
            try:
                found = entry.stat()
            except PermissionError:
                yield f"{name} is a link to {target}, which {user_words(owner.st_uid)} cannot read"
                return
            wanted = stat.S_ISDIR if folder else stat.S_ISREG
            if found.st_uid != owner.st_uid or not wanted(found.st_mode):
                yield f"{name} is a link to {target}, {_kind(found)} of {user_words(found.st_uid)}"
            else:
                targets |= {Path(target), Path(entry.path).resolve()}
        elif stat.S_ISREG(found.st_mode):
            if found.st_uid != owner.st_uid and not _is_readable(found, owner):
                yield (
                    f"{name} belongs to {user_words(found.st_uid)}"
                    + (f" and has {found.st_nlink} names" if found.st_nlink > 1 else "")
                )
            elif name.endswith(_LINK):
                target = linked_tablespace(Path(entry.path))
                targets.add(Path(target))
                try:
                    found = Path(target).stat()
                except PermissionError:
                    yield f"{name} leads to {target}, which {user_words(owner.st_uid)} cannot read"
                    return
                if found.st_uid != owner.st_uid:
                    yield f"{name} leads to {target}, {_kind(found)} of {user_words(found.st_uid)}"
        elif not stat.S_ISDIR(found.st_mode):
            yield f"{name} is {_kind(found)}"


def _is_readable(found: os.stat_result, owner: os.stat_result) -> bool:
    """May the server's user read a file of somebody else, which was put there by him? Then it is forgotten chown at
    worst; a second name of a file is somebody's trick."""
    grouped = found.st_gid == owner.st_gid and bool(found.st_mode & stat.S_IRGRP)
    return found.st_nlink == 1 and (grouped or bool(found.st_mode & stat.S_IROTH))


def _kind(found: os.stat_result) -> str:
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(found.st_mode), "a device")


def _named_user(uid: int, gid: int) -> str:
    """As of Command; ``gid`` where the user has no name here, as a container's."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"{uid}:{gid}"


def _named(session: Session, variables: Mapping[str, str]) -> Iterator[Path]:
    """What is outside of the data directory by what the server says."""
    paths = [
        *system_files(variables),
        *(variables.get(name, "").removeprefix("FILE:") for name in _NAMED),
        *variables.get("innodb_directories", "").split(";"),
    ]
    tablespaces = session.permitted(read_dialect(session).tablespaces)
    paths += [str(path) for _name, path, _size in tablespaces or () if path]
    datadir = Path(variables["datadir"])
    for path in filter(None, dict.fromkeys(paths)):
        external = Path(os.path.normpath(datadir / path))
        if not external.is_relative_to(datadir):
            yield external


def is_folder(path: Path) -> bool:
    """Can we come to it, and is it one? A server may name anything, and the way there may be closed to us."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _within_reach(reader: str | None, paths: Iterable[Path]) -> tuple[Path, ...]:
    """Folders, or files, of those ``paths`` that the reader comes to himself: what he does not, nobody brings him to by
    naming it."""
    shown = {path if is_folder(path) or path.parent in _SHARED else path.parent for path in paths}
    shown = {path for path in shown if path not in _SHARED}
    if not shown:
        return ()
    asked = Command(("find", *map(str, sorted(shown)), "-maxdepth", "0", "-print0"), user=reader)
    return tuple(Path(os.fsdecode(path)) for path in run(asked, check=False).stdout.split(b"\0") if path)
