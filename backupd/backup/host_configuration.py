"""The configuration artefact: everything a bare host needs besides the data.

A tar of the server's option files, of what the policy names, of the server's settings and accounts, and of what was
true of the host. Nearly all of it is secret: it exists in the clear only in memory, and is sealed before it is stored.

The host is seen from the server's process: which option files it read, its mounts, system, packages.

Files of the host are members with their modes, owners and times, equal files giving equal bytes. Nothing fails for a
file's sake: what cannot be taken is reported in ``warnings`` (somebody should act) or in ``notes`` (worth knowing when
it is unpacked).
"""

from __future__ import annotations

import contextlib
import grp
import io
import json
import os
import platform
import pwd
import re
import socket
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backupd.engine.physical.live_datadir import user_behind
from backupd.engine.server.accounts import read_accounts
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.dialect import dialect_of
from backupd.engine.sql.option_files import read_option_file
from backupd.model.errors import ServerError, ToolError
from backupd.model.server_facts import ServerInfo
from backupd.model.text import format_size
from backupd.process.command import Command
from backupd.process.folders import powers_of, read_plain
from backupd.process.pipeline import run

FILES = "host/files"
"""In front of the absolute path of each file."""
LARGEST_FILE = 8 * 1024**2
LARGEST_SUM = 64 * 1024**2
MOST_MEMBERS = 20_000
NAMED = 20
"""So many files that are left out are named, the others counted."""
_KINDS = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe", stat.S_IFBLK: "a device", stat.S_IFCHR: "a device"}


class HostFiles:
    """Collects members in any order; ``tar`` gives them sorted by name."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self._members: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
        self._room = LARGEST_SUM
        self._full = False
        self._left_out, self._others = 0, ""

    def text(self, name: str, text: str) -> None:
        """A document of ours. It belongs to nobody and has no time, so that equal text is an equal member."""
        content = text.encode("utf-8", "backslashreplace")
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o600
        self._members[name] = (member, content)

    def option_file(self, path: Path) -> None:
        """A file of the server with everything that it includes. Its absence is reported."""
        read = read_option_file(path, ())
        for problem in read.problems:
            self.warnings.append(f"option file {problem}")
        for file in dict.fromkeys((path, *read.files, *(Path(problem.file) for problem in read.problems))):
            if os.path.lexists(file):
                self.add(file)

    def add(self, path: Path) -> None:
        """A file or folder with all that is in it; a link with what it leads to. Its absence is reported."""
        waiting = [path]  # folders may be nested deeper than calls
        while waiting:
            waiting += reversed(self._one(waiting.pop()))

    def tar(self) -> bytes:
        """The archive (GNU format, not compressed) of all that was collected."""
        output = io.BytesIO()
        # GNU's format takes names of any length and bytes.
        with tarfile.open(
            fileobj=output, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as tar:
            for _, (member, content) in sorted(self._members.items()):
                tar.addfile(member, io.BytesIO(content))
        return output.getvalue()

    def _one(self, path: Path) -> list[Path]:
        """Take what ``path`` names; gives what belongs to it: where a link leads to, what is in a folder."""
        name = _member_name(path)
        if name in self._members or not self._has_room(path):
            return []
        try:
            found = path.lstat()
            kind = stat.S_IFMT(found.st_mode)
            if kind == stat.S_IFLNK:
                target = path.readlink()
                self._put(name, found, tarfile.SYMTYPE, link=str(target))
                return [Path(os.path.normpath(path.parent / target))]
            if kind == stat.S_IFDIR:
                inside = sorted(entry.name for entry in os.scandir(path))
                self._put(name, found, tarfile.DIRTYPE)
                return [child for entry in inside if not self._leads_to_folder(child := path / entry)]
            if kind == stat.S_IFREG:
                self._file(path, name)
            else:
                self.notes.append(f"{path} is not kept: it is {_KINDS.get(kind, 'no file')}")
        except OSError as error:
            self.warnings.append(f"{path} is not kept: {error.strerror}")
        return []

    def _leads_to_folder(self, child: Path) -> bool:
        """A link to a folder inside a folder stays a link: it may lead to the whole disk."""
        if not (child.is_symlink() and child.is_dir()):
            return False
        self._put(_member_name(child), child.lstat(), tarfile.SYMTYPE, link=str(child.readlink()))
        self.notes.append(
            f"{child} is kept as a link; the folder that it points to is kept only if config_files names it"
        )
        return True

    def _file(self, path: Path, name: str) -> None:
        # Not blocking and not following: it may have become a pipe or a link since it was looked at.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                self.notes.append(f"{path} is not kept: it is no file")
                return
            limit = min(LARGEST_FILE, self._room)
            content = file.read(limit + 1) if found.st_size <= limit else b""
        if len(content) > limit or found.st_size > limit:
            self._leave_out(path, max(found.st_size, len(content)))
            return
        self._room -= len(content)
        self._put(name, found, tarfile.REGTYPE, content)

    def _leave_out(self, path: Path, size: int) -> None:
        self._left_out += 1
        if self._left_out <= NAMED:
            why = (
                f"{format_size(size)} exceeds the limit of {format_size(LARGEST_FILE)} per file"
                if size > LARGEST_FILE
                else f"with its {format_size(size)} the total would exceed {format_size(LARGEST_SUM)}"
            )
            self.warnings.append(f"{path} is not kept: {why}")
            return
        if self._others:
            self.warnings.remove(self._others)
        self._others = (
            f"{self._left_out - NAMED} more files are not kept, for the same reasons: name folders of "
            "configuration, none of data"
        )
        self.warnings.append(self._others)

    def _has_room(self, path: Path) -> bool:
        if len(self._members) < MOST_MEMBERS:
            return True
        if not self._full:
            self.warnings.append(f"{path} and what comes after it are not kept: more than {MOST_MEMBERS} files")
        self._full = True
        return False

    def _put(self, name: str, found: os.stat_result, kind: bytes, content: bytes = b"", *, link: str = "") -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, link, len(content)
        member.mode, member.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
        member.uid, member.gid = found.st_uid, found.st_gid
        with contextlib.suppress(KeyError):  # an id without a name stays a number
            member.uname = pwd.getpwuid(found.st_uid).pw_name
        with contextlib.suppress(KeyError):
            member.gname = grp.getgrgid(found.st_gid).gr_name
        self._members[name] = (member, content)


def _member_name(path: Path) -> str:
    return FILES + os.path.normpath(Path("/") / path)


_USUAL = ("/etc/my.cnf", "/etc/mysql/my.cnf", "/usr/etc/my.cnf", "/usr/local/etc/my.cnf", "/usr/local/mysql/etc/my.cnf")
"""Where builds of MySQL, Percona Server and MariaDB look; each looks at some of them (their --verbose --help)."""
_PACKAGES = ("*mysql*", "*mariadb*", "percona*", "Percona*", "galera*", "libaio*", "jemalloc*", "libjemalloc*")
_WHOLE_PAGES = frozenset({"zfs"})
"""File systems that never leave half a page behind, by themselves."""
_TOOL_SECONDS = 30.0
_PID_LIMIT = 64

_GONE = frozenset({0, 2003, 2006, 2013})
"""Codes of errors after which there is no server to ask."""
_PLUGINS = """
SELECT PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_STATUS, PLUGIN_TYPE, COALESCE(PLUGIN_LIBRARY, '-')
FROM information_schema.PLUGINS ORDER BY 1
"""
_SAVED = "mysqld-auto.cnf"
"""Where MySQL keeps SET PERSIST: configuration, so not part of a clone."""
_README = """\
The configuration of {name} ({flavour} {version}), kept with its backup.

host/files/...         option files of the server with all that they include, and what the policy's config_files names,
                       each under its whole path
host/mounts.txt        file systems of the data, with a remark when the doublewrite buffer is off
host/os.txt            operating system, limits and command line of the server
host/packages.txt      installed packages
server/variables.txt   SHOW GLOBAL VARIABLES
server/plugins.txt     plugins, components and loadable functions
server/accounts.sql    users, roles and grants, to be replayed on an empty server
server/status.json     what the server was, and whom it replicated from
NOTES.txt              what is not here, and why

A whole restore needs no accounts.sql: the accounts are in the data. Compare host/files with the new host before you
copy them there; paths, memory and server_id may have to differ.
"""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server of this host. ``pid`` 0: it could not be found. ``arguments``: its command line."""

    pid: int
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    @property
    def program(self) -> str:
        """The path of its program; empty when that is unknown."""
        try:
            return str(Path(f"/proc/{self.pid}/exe").readlink()) if self.pid else ""
        except OSError:
            return ""


def is_local(session: Session, info: ServerInfo) -> bool:
    """Does the server run on this host, so that its files are here?"""
    return bool(session.connection.socket) or info.hostname == socket.gethostname()


def find_process(session: Session, info: ServerInfo) -> ServerProcess:
    """The process behind a local server: the socket's other end, else the one in its pid file; it works in the
    datadir, or it is another one."""
    for pid in (session.peer_pid, _pid_in(info.variables.get("pid_file", ""), info.datadir)):
        if not pid:
            continue
        try:
            here, there = Path(f"/proc/{pid}/cwd").stat(), Path(info.datadir).stat()
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
            arguments = tuple(os.fsdecode(word) for word in words.rstrip(b"\0").split(b"\0"))
            return ServerProcess(pid, arguments, _environment(pid))
    return ServerProcess(0)


def option_files(process: ServerProcess, named: Iterable[str]) -> Iterator[Path]:
    """The option files that the server began with: those of its command line, else the usual ones that exist; and
    what the server itself names (``named``)."""
    given, alone = [], False
    for word in process.arguments[1:]:
        name, _, value = word.partition("=")
        if name in ("--defaults-file", "--defaults-extra-file") and value:
            given.append(Path(value))
            alone = alone or name == "--defaults-file"
        elif name == "--no-defaults":
            alone = True
    homes = process.environment or {}
    usual = [Path(path) for path in _USUAL]
    usual += [Path(homes["MYSQL_HOME"]) / "my.cnf"] if homes.get("MYSQL_HOME") else []
    usual += [Path(homes["HOME"]) / ".my.cnf"] if homes.get("HOME") else []
    yield from given
    others = [Path(path) for path in named if path.startswith("/")]
    for path in (*(() if alone else usual), *others):
        if os.path.lexists(path):
            yield path


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    kind: str
    source: str
    options: str

    def __str__(self) -> str:
        return f"{self.point} ({self.kind}, {self.source}; {self.options})"


def read_mounts(text: str) -> list[Mount]:
    """``text`` of mountinfo, in its order: of two mounts on one point the later one counts."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, source = left.split(" "), right.split(" ")
        if len(fields) >= 6 and len(source) >= 3:
            options = ",".join(dict.fromkeys((*fields[5].split(","), *source[2].split(","))))
            found.append(Mount(_plain(fields[4]), source[0], _plain(source[1]), options))
    return found


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that ``path`` (as it really is, links followed) is on."""
    real = Path(os.path.realpath(path))
    best: Mount | None = None
    for mount in mounts:
        if real.is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def describe_mounts(info: ServerInfo, variables: Mapping[str, str]) -> tuple[str, str]:
    """The file systems of the datadir and of everything outside it, as a document; and a warning, or nothing."""
    mounts = read_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    paths = {info.datadir: "datadir", **{entry.path: f"{entry.kind} {entry.name}" for entry in info.external}}
    lines = [
        f"{path}\n    {what}\n    on {mount_of(path, mounts) or 'an unknown mount'}" for path, what in paths.items()
    ]
    doublewrite = variables.get("innodb_doublewrite", "ON").upper()
    lines.append(f"innodb_doublewrite = {doublewrite}")
    warning = ""
    if doublewrite in ("OFF", "0", "DETECT_ONLY"):
        mount = mount_of(info.datadir, mounts)
        kind = mount.kind if mount else "an unknown file system"
        lines.append(
            "Without the doublewrite buffer a power failure leaves half-written pages, on every file system that does\n"
            "not write 16 KiB at once by itself. Where this configuration is restored on another file system than the\n"
            "one above, remove the option before the first start, or make sure that the new one is as good."
        )
        if kind not in _WHOLE_PAGES:
            warning = (
                f"innodb_doublewrite is {doublewrite} and {info.datadir} is on {kind}: unless the device writes "
                "whole pages, a power failure damages tables beyond repair"
            )
    return "\n".join(lines) + "\n", warning


def describe_system(process: ServerProcess) -> str:
    """The operating system, the limits of the server's process, and who watches over it."""
    parts = [
        ("kernel", " ".join((platform.system(), platform.release(), platform.machine()))),
        ("processors", str(os.cpu_count())),
        ("memory", _line(Path("/proc/meminfo"))),
        ("transparent huge pages", _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))),
        ("SELinux", {"1": "enforcing", "0": "permissive"}.get(_read(Path("/sys/fs/selinux/enforce")), "off")),
        ("AppArmor", {"Y": "on"}.get(_read(Path("/sys/module/apparmor/parameters/enabled")), "off")),
    ]
    if process.pid:
        parts += [
            ("security label of the server", _read(Path(f"/proc/{process.pid}/attr/current")).rstrip("\0")),
            ("program", process.program),
            ("command line", "\n".join(process.arguments)),
            ("limits", _read(Path(f"/proc/{process.pid}/limits"))),
        ]
    parts.append(("/etc/os-release", _read(Path("/etc/os-release"))))
    return "".join(f"{title}:\n    {'    '.join(text.splitlines(keepends=True))}\n\n" for title, text in parts)


def describe_packages(process: ServerProcess) -> str:
    """Installed packages of the server and its tools, where dpkg or rpm can tell."""
    answers = []
    for ask in (
        ("dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}${Package} ${Version} ${Architecture}\n"),
        ("rpm", "--query", "--all"),
    ):
        try:
            answer = run(Command((*ask, *_PACKAGES)), timeout=_TOOL_SECONDS, check=False).stdout
        except ToolError:
            continue
        lines = sorted(
            line.strip() for line in answer.decode("utf-8", "replace").splitlines() if not line.startswith("un")
        )
        answers += [f"{ask[0]}:", *(f"    {line}" for line in lines if line)]
    if process.program:
        answers.append(f"program of the server: {process.program}")
    return "\n".join(answers or ["neither dpkg nor rpm can tell"]) + "\n"


def _pid_in(pid_file: str, datadir: str) -> int:
    try:
        text = read_plain(Path(datadir) / pid_file, _PID_LIMIT, follow=True).decode("ascii").strip() if pid_file else ""
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdecimal() else 0


def _environment(pid: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(word).partition("=") for word in words)
    return {name: value for name, _, value in pairs if name in ("HOME", "MYSQL_HOME")}


def _plain(field: str) -> str:
    """A field of mountinfo, in which blanks are written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), field)


def _read(path: Path) -> str:
    """A small file of the kernel or the system; empty when there is none, or it is closed to us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _line(path: Path) -> str:
    return next(iter(_read(path).splitlines()), "")


@dataclass(frozen=True, slots=True)
class Artefact:
    """``content``: the tar. ``warnings``: sentences without secrets, for the record of the backup."""

    content: bytes
    warnings: tuple[str, ...]


def collect(connection: Connection, info: ServerInfo, config_files: Iterable[Path] = ()) -> Artefact:
    """Everything that can be had, reported or read. Equal input gives equal bytes.

    Never raises because of a file or a missing privilege; raises ServerError when the server cannot be reached.
    """
    files = HostFiles()
    with connection.connect() as session:
        here = is_local(session, info)
        process = find_process(session, info) if here else ServerProcess(0)
        variables = _variables(session, files)
        _plugins(session, info, files)
        _status(session, info, files)
        _accounts(session, info, files)
        named = _named_by_server(session, info) if here else []
        user = user_behind(session)
    if here:
        if not process.pid:
            files.notes.append(
                "the server's process was not found, so its command line is unknown: the option files are read from "
                "the default locations"
            )
        with powers_of(user):  # who names these files is the server
            for path in dict.fromkeys(option_files(process, named)):
                _option_file(files, path)
            if os.path.lexists(saved := Path(info.datadir) / _SAVED):
                files.add(saved)
        for path in config_files:
            files.add(path)
        mounts, warning = describe_mounts(info, variables)
        files.text("host/mounts.txt", mounts)
        files.text("host/os.txt", describe_system(process))
        files.text("host/packages.txt", describe_packages(process))
        files.warnings += [warning] if warning else []
    else:
        files.notes.append(
            f"the server runs on {info.hostname}: its files, mounts and packages are not kept, only what it reports "
            "over the connection"
        )
        files.warnings += [
            f"{path} is not kept: the server runs on another host, {info.hostname}" for path in config_files
        ]
    files.text("README.txt", _README.format(name=info.hostname, flavour=info.flavour, version=info.version))
    files.text("NOTES.txt", "".join(f"{line}\n" for line in (*files.warnings, *files.notes)))
    return Artefact(files.tar(), tuple(f"configuration: {warning}" for warning in files.warnings))


def _option_file(files: HostFiles, path: Path) -> None:
    if path.is_absolute():
        files.option_file(path)
    else:
        files.warnings.append(f"option file {path} is not kept: the server was started with a relative path")


def _variables(session: Session, files: HostFiles) -> Mapping[str, str]:
    variables = {str(name).lower(): str(value) for name, value in session.query("SHOW GLOBAL VARIABLES", shown=True)}
    files.text("server/variables.txt", "".join(f"{name} = {value}\n" for name, value in sorted(variables.items())))
    return variables


def _plugins(session: Session, info: ServerInfo, files: HostFiles) -> None:
    lines = []
    questions = [_PLUGINS, "SELECT 'function', name, dl FROM mysql.func ORDER BY 2"]
    if components := dialect_of(info.flavour, info.version).components:
        questions.append(components)
    for question in questions:
        with _answering(files):
            lines += ["\t".join(str(value) for value in row) for row in session.query(question, shown=True)]
    files.text("server/plugins.txt", "".join(f"{line}\n" for line in lines))


def _status(session: Session, info: ServerInfo, files: HostFiles) -> None:
    rows: list[dict[str, Any]] = []
    with _answering(files):
        rows = session.records(dialect_of(info.flavour, info.version).replica_status, shown=True)
    replication = [{name: str(value) for name, value in row.items() if "password" not in name.lower()} for row in rows]
    document = {
        "flavour": str(info.flavour),
        "version": info.version_text,
        "hostname": info.hostname,
        "server_id": info.server_id,
        "server_uuid": info.server_uuid,
        "role": str(info.role),
        "datadir": info.datadir,
        "replication": replication,
    }
    files.text("server/status.json", json.dumps(document, indent=2, sort_keys=True) + "\n")


def _accounts(session: Session, info: ServerInfo, files: HostFiles) -> None:
    with _answering(files):
        accounts = read_accounts(session, info.flavour, info.version)
        files.text("server/accounts.sql", accounts.sql)
        files.warnings += accounts.problems


def _named_by_server(session: Session, info: ServerInfo) -> list[str]:
    """Option files that the server says its variables came from; none when it cannot say, or not to us."""
    try:
        return [str(path) for (path,) in session.query(dialect_of(info.flavour, info.version).option_files) if path]
    except ServerError as error:
        if error_code(error) in _GONE:
            raise
        return []


@contextlib.contextmanager
def _answering(files: HostFiles) -> Iterator[None]:
    """What the server does not answer is reported. Raises ServerError when it is gone."""
    try:
        yield
    except ServerError as error:
        if error_code(error) in _GONE:
            raise
        known = files.warnings if is_denied(error) else files.notes
        known.append(f"the server did not answer: {error.detail}")
