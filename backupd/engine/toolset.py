"""Which programs belong to which server: one table, flavour by version.

Everything that differs between flavours and series is a row here; the rest of the project asks for what it
wants and never compares versions. A physical tool must be of the server's own series: mariadb-backup reads
InnoDB's files with the code of one series, and xtrabackup refuses or, worse, misreads others. A server may have several
kinds of tools, best first; a restore takes the kind that made the backup.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from backupd.engine.physical import clone
from backupd.engine.physical.capture import PhysicalTool
from backupd.engine.physical.clone import Clone
from backupd.engine.physical.mariabackup_xtrabackup import MariaBackup, XtraBackup, refuse_encrypted
from backupd.engine.server import backup_files, clone_plugin
from backupd.engine.server.backup_files import ReceiptNames
from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import schemas_named, with_a_backtick
from backupd.model.errors import RefusedError, ToolError, ToolMissingError
from backupd.model.server_facts import Flavour, ServerInfo, Tool, Version
from backupd.process.command import Command, locate
from backupd.process.pipeline import run

XTRABACKUP = "xtrabackup"
"""What its backups name as their tool."""

_LOCKED_BY_NAME = ("MyISAM", "Aria", "CSV")
NO_PATHS: Mapping[str, str] = MappingProxyType({})
_BESIDE_VERSION = ("ersion", "based on", "Ver ", "built against")
"""What is in the line in which a program reports its version."""


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of physical tool.

    ``programs``: the names to look for, best first, each of them the name of the tool in manifests. ``names``: what it
    calls its receipts. ``package``: what to install, with ``{series}`` of the server and its ``{digits}``. ``fits``:
    may this version of the tool (first) touch files of this version of a server (second)?"""

    programs: tuple[str, ...]
    names: ReceiptNames
    package: str
    fits: Callable[[Version, Version], bool]
    make: Callable[[Tool, ReceiptNames], PhysicalTool]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: servers of ``flavour`` from version ``first`` on, up to and without ``end``.

    ``families``: the physical tools, best first; the first that is installed and fits is taken. ``server`` and
    ``install``: the names of the server's own programs.
    """

    flavour: Flavour
    first: Version
    end: Version
    families: tuple[Family, ...]
    server: tuple[str, ...]
    install: tuple[str, ...]


def _same_series(tool: Version, server: Version) -> bool:
    """MariaDB's rule; and from XtraBackup 8.1 on Percona's, too: its manuals of 8.4 and of the innovation releases have
    each tool serve every server of its own series (8.4.0 all of 8.4), and no other."""
    return tool.series == server.series


_SERVES_LATER = Version(8, 0, 34)


def _series_80(tool: Version, server: Version) -> bool:
    """Percona's manual of 8.0 ("Server version and backup version comparison", "Supported versions"): a tool before
    8.0.34 needs a server that is not newer; 8.0.34 dropped the check, and from there on the tool serves older and later
    servers of 8.0, while lock-ddl is ON, its default. The last tool is 8.0.35 with a number of its own (8.0.35-35); the
    servers went on."""
    return tool.series == server.series and (tool >= _SERVES_LATER or tool >= server)


def _series_24(tool: Version, _server: Version) -> bool:
    return tool.series == "2.4"


def _clone(tool: Tool, _names: ReceiptNames) -> PhysicalTool:
    return Clone(tool)


_MARIADB_OLD = Family(
    ("mariadb-backup", "mariabackup"), backup_files.XTRABACKUP, "mariadb-backup {series}", _same_series, MariaBackup
)
_MARIADB_NEW = Family(
    ("mariadb-backup",), backup_files.MARIADB_BACKUP, "mariadb-backup {series}", _same_series, MariaBackup
)
# XTRABACKUP: Percona's numbers its tools apart from the servers up to 2.4, like the servers from 8.0 on.
_XTRABACKUP_24 = Family((XTRABACKUP,), backup_files.XTRABACKUP, "percona-xtrabackup-24", _series_24, XtraBackup)
_XTRABACKUP_80 = Family(
    (XTRABACKUP,), backup_files.XTRABACKUP, "percona-xtrabackup-80 (8.0.34 or later)", _series_80, XtraBackup
)
_OF_SERIES = "Percona XtraBackup {series} (percona-xtrabackup-{digits})"
_XTRABACKUP = Family((XTRABACKUP,), backup_files.XTRABACKUP, _OF_SERIES, _same_series, XtraBackup)
_CLONE = Family((clone.NAME,), clone.NAMES, "the server's own program mysqld", operator.eq, _clone)

_MYSQL = (("mysqld",), ("mysqld",))
_MARIADB = (("mariadbd",), ("mariadb-install-db",))
_MARIADB_OR_LINKS = (("mariadbd", "mysqld"), ("mariadb-install-db", "mysql_install_db"))

TABLE: tuple[Row, ...] = (
    Row(Flavour.MARIADB, Version(10, 8), Version(11, 1), (_MARIADB_OLD,), *_MARIADB_OR_LINKS),
    Row(Flavour.MARIADB, Version(11, 1), Version(14, 0), (_MARIADB_NEW,), *_MARIADB),
    *(
        row
        for flavour in (Flavour.MYSQL, Flavour.PERCONA)
        for row in (
            Row(flavour, Version(5, 5), Version(8, 0), (_XTRABACKUP_24,), *_MYSQL),
            Row(flavour, Version(8, 0), clone_plugin.FIRST, (_XTRABACKUP_80,), *_MYSQL),
            Row(flavour, clone_plugin.FIRST, Version(8, 1), (_XTRABACKUP_80, _CLONE), *_MYSQL),
            Row(flavour, Version(8, 1), Version(10, 0), (_XTRABACKUP, _CLONE), *_MYSQL),
        )
    ),
)
"""MariaDB from 10.8 on, because the redo file of that format shows how far a prepare came (see
mariabackup_xtrabackup.reached_lsn).
"""


@dataclass(frozen=True, slots=True)
class ClientPrograms:
    """Names of the programs that come with a server: ``client`` runs statements, ``admin`` administrates, ``check``
    checks tables, ``binlog`` prints binary logs."""

    client: str
    admin: str
    check: str
    binlog: str


_MYSQL_CLIENTS = ClientPrograms("mysql", "mysqladmin", "mysqlcheck", "mysqlbinlog")
CLIENTS: Mapping[Flavour, ClientPrograms] = {
    Flavour.MARIADB: ClientPrograms("mariadb", "mariadb-admin", "mariadb-check", "mariadb-binlog"),
    Flavour.MYSQL: _MYSQL_CLIENTS,
    Flavour.PERCONA: _MYSQL_CLIENTS,
}


def row_for(flavour: Flavour, version: Version) -> Row:
    """The line for a server. Raises ToolError naming what would be needed when there is none."""
    for row in TABLE:
        if row.flavour is flavour and row.first <= version < row.end:
            return row
    known = ", ".join(f"{row.first.series} to before {row.end.series}" for row in TABLE if row.flavour is flavour)
    raise ToolError(
        f"physical backups of {flavour} {version} are not supported by this version",
        detail=f"supported of {flavour}: {known}",
        hint="a logical backup does not depend on the server's files",
    )


def refuse_clashes(session: Session, info: ServerInfo) -> None:
    """Raises RefusedError for names that the tool fails over: a schema that is called as a file which the tool itself
    writes into its stream (file and folder cannot both be unpacked, by anybody), and on MariaDB tables that
    mariadb-backup cannot lock (10.11.19: it does not double a backtick in BACKUP LOCK)."""
    names = frozenset().union(*(family.names.all for family in row_for(info.flavour, info.version).families))
    clashes = schemas_named(session, names)
    if clashes:
        raise RefusedError(
            f"schema {', '.join(clashes)} has the name of one of the backup tool's own files",
            hint="move its tables into a schema of another name; no physical backup can hold this one",
        )
    odd = with_a_backtick(session, _LOCKED_BY_NAME) if info.flavour is Flavour.MARIADB else []
    if odd:
        raise RefusedError(
            f"mariadb-backup fails on {odd[0].shown}: a table of {', '.join(_LOCKED_BY_NAME)} with a backtick in its "
            "name or its schema's",
            detail=", ".join(name.shown for name in odd),
            hint="RENAME TABLE it, or ALTER TABLE ... ENGINE=InnoDB; meanwhile logical backups hold it",
        )


def physical_backup_tool(flavour: Flavour, version: Version, *, paths: Mapping[str, str] = NO_PATHS) -> Tool:
    """The tool that takes physical backups of such a server: the first of its families that is installed and fits.

    ``paths`` maps a program's name to a configured path. Raises ToolMissingError, or ToolError when what is installed
    is of another series; both say what to install.
    """
    return _chosen(flavour, version, paths)[1]


def physical_tool(
    info: ServerInfo, *, paths: Mapping[str, str] = NO_PATHS, made_by: Tool | None = None
) -> PhysicalTool:
    """The physical tool for a probed server; with ``made_by`` (what a manifest names) the one that can restore such a
    backup. Raises ToolMissingError, ToolError."""
    family, tool = _chosen(info.flavour, info.version, paths, made_by)
    return family.make(tool, family.names)


def shortcomings(tool: PhysicalTool, info: ServerInfo, *, paths: Mapping[str, str] = NO_PATHS) -> tuple[str, ...]:
    """What a backup of this server by this tool lacks, in sentences for people, and which better tool was passed over
    and why. One that is neither installed nor configured is not passed over."""
    return (*_passed_over(tool, info, paths), *(tool.warnings(info) if isinstance(tool, Clone) else ()))


def _passed_over(tool: PhysicalTool, info: ServerInfo, paths: Mapping[str, str]) -> Iterator[str]:
    for family in row_for(info.flavour, info.version).families:
        if tool.tool.name in family.programs:
            return
        try:
            _fitting(family, info.flavour, info.version, paths)
        except ToolError as error:
            if not isinstance(error, ToolMissingError) or any(map(paths.get, family.programs)):
                yield (f"{error.message}, so {tool.tool.name} is used instead; {_to_install((family,), info.version)}")


def refuse_unfit(session: Session, info: ServerInfo, tool: Tool) -> None:
    """Raises RefusedError when ``tool`` cannot back up this server, though it is of the right series; ServerError."""
    if tool.name == clone.NAME:
        clone_plugin.refuse_unfit(session, info)
    if tool.name == XTRABACKUP:
        refuse_encrypted(info)


def _chosen(
    flavour: Flavour, version: Version, paths: Mapping[str, str], made_by: Tool | None = None
) -> tuple[Family, Tool]:
    families = row_for(flavour, version).families
    if made_by is not None:
        families = tuple(family for family in families if made_by.name in family.programs)
        if not families:
            raise ToolError(
                f"a backup of {flavour} {version} by {made_by.name} cannot be restored by this version",
                hint="restore it with the release of backupd that made it",
            )
        if made_by.name == clone.NAME:
            return families[0], made_by  # nothing of it is run again
    problems: list[ToolError] = []
    for family in families:
        try:
            return family, _fitting(family, flavour, version, paths)
        except ToolError as error:
            problems.append(error)
    # What is there and does not fit says more than what is not there.
    first = next((problem for problem in problems if not isinstance(problem, ToolMissingError)), problems[0])
    others = [problem.line for problem in problems if problem is not first]
    raise type(first)(
        first.message, detail="\n".join(filter(None, [first.detail, *others])), hint=_to_install(families, version)
    )


def _fitting(family: Family, flavour: Flavour, version: Version, paths: Mapping[str, str]) -> Tool:
    if family is _CLONE:
        server = server_program(flavour, version, paths=paths)
        tool = replace(server, name=clone.NAME)
    else:
        tool = find_tool(family.programs, paths=paths)
    if not family.fits(tool.version, version):
        raise ToolError(
            f"{tool.name} {tool.version} cannot back up or prepare files of a {flavour} {version} server",
            detail=f"{tool.path}: {tool.version_text}",
        )
    return tool


def _to_install(families: Sequence[Family], version: Version) -> str:
    series = version.series
    wanted = [family.package.format(series=series, digits=series.replace(".", "")) for family in families]
    return f"install {' or '.join(wanted)} on this host, from the server's own repository"


def server_program(flavour: Flavour, version: Version, *, paths: Mapping[str, str] = NO_PATHS) -> Tool:
    """The server program that can start a copy of such a server's files. ``paths`` decides where it names the program
    by its own name; by another one (``mysqld``, which may be that of another server here) it is only tried first.
    Raises as ``physical_backup_tool`` does.
    """
    names = row_for(flavour, version).server
    hint = (
        f"install the {flavour} server {version.series} on this host, or name its program: `programs: "
        f"{{{names[0]}: /path/to/{names[0]}}}`"
    )
    refusals: list[ToolError] = []
    for name in names[:1] if paths.get(names[0]) else sorted(names, key=lambda one: not paths.get(one)):
        try:
            tool = find_tool((name,), paths=paths, hint=hint)
        except ToolError as error:
            refusals.append(error)
            continue
        if tool.version.series == version.series and (flavour is Flavour.MARIADB) == _is_mariadb(tool.version_text):
            return tool
        refusals.append(
            ToolError(
                f"{tool.name} {tool.version} must not be started on files of a {flavour} {version} server",
                detail=f"{tool.path}: {tool.version_text}",
                hint=f"{hint}; moving to another series is a separate upgrade",
            )
        )
    raise next((refusal for refusal in refusals if not isinstance(refusal, ToolMissingError)), refusals[0])


def find_tool(
    names: tuple[str, ...],
    *,
    paths: Mapping[str, str] = NO_PATHS,
    hint: str = "",
    asked: tuple[str, ...] = ("--no-defaults", "--version"),
) -> Tool:
    """The first of ``names`` that is installed, with its version and the SHA-256 of the program.

    ``paths`` maps a name to the path to use instead of searching; ``asked``: the options that make it report its
    version. Raises ToolMissingError, or ToolError when it does not report it.
    """
    for name in names:
        if paths.get(name):
            return _inspect(name, locate(paths[name]), asked)
    missing: ToolMissingError | None = None
    for name in names:
        try:
            return _inspect(name, locate(name), asked)
        except ToolMissingError as error:
            missing = missing or error
    if missing is None:
        raise ValueError("no program was asked for")
    raise ToolMissingError(missing.message, hint=hint or missing.hint)


def _inspect(name: str, path: str, asked: tuple[str, ...]) -> Tool:
    status = Path(path).stat()
    return _inspected(name, path, asked, status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=32)
def _inspected(name: str, path: str, asked: tuple[str, ...], _changed: int, _size: int, _inode: int) -> Tool:
    """The further arguments make a replaced program a new question."""
    done = run(Command((path, *asked)), check=False, timeout=30)
    # The physical tools print their version on stderr, the servers on stdout.
    lines = (done.stdout.decode("utf-8", "replace") + "\n" + done.stderr).splitlines()
    for line in lines:
        if any(word in line for word in _BESIDE_VERSION):
            try:
                version = Version.parse(line)
            except ValueError:
                continue
            with Path(path).open("rb") as program:
                digest = hashlib.file_digest(program, "sha256").hexdigest()
            return Tool(name, path, version, line.strip(), digest)
    raise ToolError(
        f"cannot determine the version of {path}", detail="\n".join(lines[-5:]), hint=f"check that it is {name}"
    )


def _is_mariadb(version_text: str) -> bool:
    return "mariadb" in version_text.lower()
