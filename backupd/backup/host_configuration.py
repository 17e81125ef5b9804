"""The configuration artefact: everything a bare host needs besides the data.

A tar of the server's option files, of what the policy names, of the server's settings and accounts, and of what was
true of the host. Nearly all of it is secret: it exists in the clear only in memory, and is sealed before it is stored.

The host is seen from the server's process: which option files it read, its mounts, system, packages.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backupd.backup.host_files import HostFiles
from backupd.engine.physical.live_datadir import user_behind
from backupd.engine.schema.accounts import read_accounts
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.dialect import dialect_of
from backupd.model.errors import ServerError, ToolError
from backupd.model.server_facts import ServerInfo
from backupd.process.command import Command
from backupd.process.folders import powers_of, read_plain
from backupd.process.pipeline import run

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
    """The mount that ``path`` (as it really is, links followed) lies on."""
    real = Path(os.path.realpath(path))
    best: Mount | None = None
    for mount in mounts:
        if real.is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def describe_mounts(info: ServerInfo, variables: Mapping[str, str]) -> tuple[str, str]:
    """The file systems of the datadir and of everything outside it, as a document; and a warning, or nothing."""
    mounts = read_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    places = {info.datadir: "datadir", **{entry.path: f"{entry.kind} {entry.name}" for entry in info.external}}
    lines = [
        f"{path}\n    {what}\n    on {mount_of(path, mounts) or 'an unknown mount'}" for path, what in places.items()
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
            "one above, take the option out before the first start, or make sure that the new one is as good."
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
            told = run(Command((*ask, *_PACKAGES)), timeout=_TOOL_SECONDS, check=False).stdout
        except ToolError:
            continue
        lines = sorted(
            line.strip() for line in told.decode("utf-8", "replace").splitlines() if not line.startswith("un")
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
    """Everything that can be had, told or read. Equal input gives equal bytes.

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
                "the server's process was not found, so its command line is unknown: the option files "
                "are those of the usual places"
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
            f"the server runs on {info.hostname}: its files, mounts and packages are not here, only what it answers"
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
        lines += ["\t".join(str(value) for value in row) for row in _ask(session, question, files)]
    files.text("server/plugins.txt", "".join(f"{line}\n" for line in lines))


def _status(session: Session, info: ServerInfo, files: HostFiles) -> None:
    rows = _ask_records(session, dialect_of(info.flavour, info.version).replica_status, files)
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
    try:
        accounts = read_accounts(session, info.flavour, info.version)
    except ServerError as error:
        _tell(error, files)
        return
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


def _ask(session: Session, question: str, files: HostFiles) -> list[tuple[Any, ...]]:
    try:
        return session.query(question, shown=True)
    except ServerError as error:
        _tell(error, files)
        return []


def _ask_records(session: Session, question: str, files: HostFiles) -> list[dict[str, Any]]:
    try:
        return session.records(question, shown=True)
    except ServerError as error:
        _tell(error, files)
        return []


def _tell(error: ServerError, files: HostFiles) -> None:
    if error_code(error) in _GONE:
        raise error
    known = files.warnings if is_denied(error) else files.notes
    known.append(f"the server did not answer: {error.detail}")
