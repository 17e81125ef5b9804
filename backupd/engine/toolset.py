"""Which programs belong to which server: one table, flavour by version.

Everything that differs between flavours and series is a row here; the rest of the project asks for what it
wants and never compares versions. A physical tool must be of the server's own series: mariadb-backup reads
InnoDB's files with the code of one series, and xtrabackup refuses or, worse, misreads others.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from backupd.engine.client import Session
from backupd.engine.mariabackup import MariaBackup
from backupd.engine.physical import PhysicalTool
from backupd.engine.receipts import MARIADB_BACKUP, XTRABACKUP, ReceiptNames
from backupd.engine.tables import schemas_named
from backupd.model.errors import RefusedError, ToolError, ToolMissingError
from backupd.model.server import Flavour, ServerInfo, Tool, Version
from backupd.process.command import Command, locate
from backupd.process.run import run

NO_PATHS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: servers of ``flavour`` from version ``first`` on, up to and without ``end``.

    Program tuples hold the names to look for, best first. ``receipts``: what the tool calls its files.
    """

    flavour: Flavour
    first: Version
    end: Version
    backup: tuple[str, ...]
    server: tuple[str, ...]
    install: tuple[str, ...]
    receipts: ReceiptNames
    package: str


TABLE: tuple[Row, ...] = (
    Row(
        Flavour.MARIADB,
        Version(10, 8),
        Version(11, 1),
        ("mariadb-backup", "mariabackup"),
        ("mariadbd", "mysqld"),
        ("mariadb-install-db", "mysql_install_db"),
        XTRABACKUP,
        "mariadb-backup",
    ),
    Row(
        Flavour.MARIADB,
        Version(11, 1),
        Version(14, 0),
        ("mariadb-backup",),
        ("mariadbd",),
        ("mariadb-install-db",),
        MARIADB_BACKUP,
        "mariadb-backup",
    ),
)
"""From 10.8 on, because the redo file of that format shows how far a prepare came (see
mariabackup.reached_lsn).
"""

_NEEDED: Mapping[Flavour, str] = {
    Flavour.MYSQL: "Percona XtraBackup of the series {series}",
    Flavour.PERCONA: "Percona XtraBackup of the series {series}",
    Flavour.MARIADB: "mariadb-backup of a server from 10.8 on",
}


def row_for(flavour: Flavour, version: Version) -> Row:
    """The line for a server. Raises ToolError naming what would be needed when there is none."""
    for row in TABLE:
        if row.flavour is flavour and row.first <= version < row.end:
            return row
    needed = _NEEDED[flavour].format(series=version.series)
    known = ", ".join(f"{row.flavour} {row.first.series} to before {row.end.series}" for row in TABLE)
    raise ToolError(
        f"physical backups of {flavour} {version} are not supported by this version",
        detail=f"it would need {needed}; supported: {known}",
        hint="a logical backup does not depend on the server's files",
    )


def refuse_clashes(session: Session, info: ServerInfo) -> None:
    """Raises RefusedError when a schema has the name of a file that the tool itself writes into its stream: file and
    folder cannot both be unpacked, by anybody."""
    clashes = schemas_named(session, row_for(info.flavour, info.version).receipts.all)
    if clashes:
        raise RefusedError(
            f"schema {', '.join(clashes)} has the name of one of the backup tool's own files",
            hint="move its tables into a schema of another name; no physical backup can hold this one")


def physical_backup_tool(flavour: Flavour, version: Version, *, paths: Mapping[str, str] = NO_PATHS) -> Tool:
    """The tool that takes and prepares physical backups of such a server.

    ``paths`` maps a program's name to a configured path. Raises ToolMissingError, or ToolError when it is
    of another series; both say what to install.
    """
    row = row_for(flavour, version)
    tool = find_tool(row.backup, paths=paths, hint=f"install {row.package} {version.series}, the server's own series")
    if tool.version.series != version.series:
        raise ToolError(
            f"{tool.name} {tool.version} cannot back up or prepare files of a {flavour} {version} server",
            detail=f"{tool.path}: {tool.version_text}",
            hint=f"install {row.package} {version.series}, the server's own series, on this host"
            f" (apt-get install {row.package} from the server's repository)",
        )
    return tool


def physical_tool(info: ServerInfo, *, paths: Mapping[str, str] = NO_PATHS) -> PhysicalTool:
    """The physical tool for a probed server (or for the server a manifest tells of). Raises ToolMissingError,
    ToolError."""
    row = row_for(info.flavour, info.version)
    return MariaBackup(physical_backup_tool(info.flavour, info.version, paths=paths), row.receipts)


def server_program(flavour: Flavour, version: Version, *, paths: Mapping[str, str] = NO_PATHS) -> Tool:
    """The server program that can start a copy of such a server's files. Raises as ``physical_backup_tool``
    does.
    """
    row = row_for(flavour, version)
    tool = find_tool(row.server, paths=paths, hint=f"install the {flavour} server {version.series} on this host")
    if tool.version.series != version.series or (flavour is Flavour.MARIADB) != _is_mariadb(tool.version_text):
        raise ToolError(
            f"{tool.name} {tool.version} must not be started on files of a {flavour} {version} server",
            detail=f"{tool.path}: {tool.version_text}",
            hint=f"install the {flavour} server {version.series} on this host; going to another series is an upgrade"
            " of its own",
        )
    return tool


def find_tool(names: tuple[str, ...], *, paths: Mapping[str, str] = NO_PATHS, hint: str = "") -> Tool:
    """The first of ``names`` that is installed, with its version and the SHA-256 of the program.

    ``paths`` maps a name to the path to use instead of searching. Raises ToolMissingError, or ToolError
    when it does not tell its version.
    """
    for name in names:
        if paths.get(name):
            return _inspect(name, locate(paths[name]))
    missing: ToolMissingError | None = None
    for name in names:
        try:
            return _inspect(name, locate(name))
        except ToolMissingError as error:
            missing = missing or error
    if missing is None:
        raise ValueError("no program was asked for")
    raise ToolMissingError(missing.message, hint=hint or missing.hint)


def _inspect(name: str, path: str) -> Tool:
    status = Path(path).stat()
    return _inspected(name, path, status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=32)
def _inspected(name: str, path: str, _changed: int, _size: int, _inode: int) -> Tool:
    """The further arguments make a replaced program a new question."""
    done = run(Command((path, "--no-defaults", "--version")), check=False, timeout=30)
    # The physical tools print their version on stderr, the servers on stdout.
    lines = (done.stdout.decode("utf-8", "replace") + "\n" + done.stderr).splitlines()
    for line in lines:
        if "ersion" in line or "based on" in line or "Ver " in line:
            try:
                version = Version.parse(line)
            except ValueError:
                continue
            with Path(path).open("rb") as program:
                digest = hashlib.file_digest(program, "sha256").hexdigest()
            return Tool(name, path, version, line.strip(), digest)
    raise ToolError(f"{path} does not tell its version", detail="\n".join(lines[-5:]), hint=f"is this really {name}?")


def _is_mariadb(version_text: str) -> bool:
    return "mariadb" in version_text.lower()
