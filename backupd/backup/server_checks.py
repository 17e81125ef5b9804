"""Is the server that answers the one whose files are here?

A physical tool asks the server for locks and positions and reads the files itself. Through a proxy, or with
the files of another server of the same path, it would mix two servers into one backup and call it complete.

Tables that the physical backups of a server leave out: are they in a logical one?

Preflight of the binary log: what keeps it from being streamed, and what makes a replay of it silently incomplete.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from backupd.backup.acknowledgement_checks import examine_acknowledgement
from backupd.backup.finding import Finding, error, fine, from_error, warning
from backupd.engine.binlog_program import binlog_program
from backupd.engine.physical.live_datadir import READABLE, closed_links, is_folder, reader_of, survey
from backupd.engine.receiver.receiver import connection_id, trial
from backupd.engine.server.binary_logs import BinlogSource
from backupd.engine.server.probe import CLONE, ROCKSDB, kept_for, read_dialect, system_files, uncovered, unlogged
from backupd.engine.server.semi_sync import read_semi_sync
from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import Table
from backupd.engine.toolset import NO_PATHS
from backupd.model.errors import RefusedError, ServerError, ToolError
from backupd.model.server_facts import Flavour, ServerInfo, Tool
from backupd.model.table import TableName, TablePattern, fits_any
from backupd.model.text import few, format_duration
from backupd.process.folders import open_plain, powers_of
from backupd.recovery.windows import REPLAY_STOPS
from policies.policy import Logical

_PROXIES = ("proxysql", "maxscale", "mysql-router", "mysqlrouter", "haproxy", "vitess")


def examine_location(session: Session, info: ServerInfo, *, physical: bool = True) -> Iterator[Finding]:
    """Proxy, another host, unreadable files. ``physical`` False: nobody reads its files, so they may be anywhere.
    Raises ServerError when the server goes away."""
    yield from _between(session, info)
    if not physical:
        return
    if (far := elsewhere(session, info.hostname)) is not None:
        yield error(
            "datadir", far, "run backupd there; if this host has another name, connect through the server's socket"
        )
        return
    yield from _files(info)
    yield from _process(session, info)


def elsewhere(session: Session, hostname: str) -> str | None:
    """Why no physical backup can be taken from here, where the server says that it runs on another host."""
    if session.connection.socket or not hostname or hostname == socket.gethostname():
        return None
    return (
        f"the server says it runs on {hostname}, this is {socket.gethostname()}: a physical backup reads the "
        "server's files, so it must run on the database host"
    )


def examine_owners(session: Session, info: ServerInfo, tool: str) -> Iterator[Finding]:
    """Do others own what ``tool`` (its name) would copy, or would it have to run as root?"""
    datadir = Path(info.datadir)
    if not os.access(datadir, os.R_OK | os.X_OK, effective_ids=True):
        return  # which is reported
    try:
        with powers_of(reader_of(datadir, session)):
            if tool == CLONE:  # the server copies itself, and follows none
                return
            found = survey(datadir)
            found.refuse()
            closed = closed_links(found, info.flavour)
    except RefusedError as problem:
        yield from_error("datadir", problem)
        return
    if closed:
        yield error(
            "datadir",
            f"tables there have a DATA DIRECTORY: {tool} opens their .isl files as if to write, and "
            f"cannot do that in {', '.join(closed[:5])}{' and others' if len(closed) > 5 else ''}",
            "where the unit protects that folder: name it in ReadWritePaths= (systemctl edit backupd); a "
            "service that is not root needs rwX there, not rX",
        )


def proxy_between(session: Session, version_text: str) -> str:
    """That a proxy answers, in words; "" where nothing shows one. Raises ServerError."""
    words = f"{session.greeting} {version_text}".lower()
    named = next((name for name in _PROXIES if name in words), None)
    if named:
        return f"this is {named}, a proxy, not a database server"
    if session.thread_id != int(session.scalar("SELECT CONNECTION_ID()")):
        return "a proxy responds instead of the server (connection IDs differ)"
    return ""


def _between(session: Session, info: ServerInfo) -> Iterator[Finding]:
    greeting = session.greeting.removeprefix("5.5.5-")
    hint = "connect to the server itself, best through its socket"
    if proxy := proxy_between(session, info.version_text):
        yield error("server", proxy, hint)
    elif greeting != info.variables.get("version", greeting) and not greeting.startswith(str(info.version)):
        yield error(
            "server", f"the greeting reports version {greeting}, the server reports {info.variables['version']}", hint
        )
    elif session.connection.host and info.variables.get("port") not in (str(session.connection.port), None):
        yield warning(
            "server",
            f"connected to port {session.connection.port}, but the server listens on "
            f"{info.variables['port']}: check for a proxy or a forwarded port between them",
            hint,
        )


def _files(info: ServerInfo) -> Iterator[Finding]:
    datadir = Path(info.datadir)
    hint = READABLE
    if not is_folder(datadir):
        reason = "is not on this host" if not os.path.lexists(datadir) else "cannot be entered"
        yield error(
            "datadir", f"{datadir} {reason}", "run backupd on the database host, as root or the database's user"
        )
        return
    closed = [str(path) for path in _wanted(info, datadir) if not _can_be_read(path)]
    if not os.access(datadir, os.R_OK | os.X_OK, effective_ids=True):
        yield error("datadir", f"{datadir} cannot be read", hint)
    elif closed:
        yield error("datadir", f"cannot be read: {few(closed, 5)}", hint)
    else:
        yield fine("datadir", f"{datadir} can be read")
    if os.path.ismount(datadir):
        yield fine("datadir", f"{datadir} is a mount point: a restore onto it moves files in, it cannot be renamed")


def _can_be_read(path: Path) -> bool:
    """One byte is, where it is a file: modes alone do not know of mandatory access control."""
    try:
        if path.is_file():
            with open(open_plain(path, follow=True), "rb") as file:  # noqa: PTH123 - a descriptor has no path
                file.read(1)
            return True
    except OSError:
        return False
    return os.access(path, os.R_OK, effective_ids=True)


def _process(session: Session, info: ServerInfo) -> Iterator[Finding]:
    """A server works in its datadir, so the process behind a socket shows whether this is the folder it
    means.
    """
    pid = session.peer_pid
    try:
        here = Path(f"/proc/{pid}/cwd").stat() if pid else None
        there = Path(info.datadir).stat()
    except OSError:
        return  # gone, or another user's process: nothing to compare
    if here is not None and (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
        yield error(
            "datadir",
            f"the process behind {session.connection.socket} (pid {pid}) does not work in {info.datadir}: "
            "the path means another folder here, or a proxy listens on the socket",
            "run backupd where the server runs (inside its container), on the server's own socket",
        )


def _wanted(info: ServerInfo, datadir: Path) -> Iterator[Path]:
    for name in system_files(info.variables):
        yield datadir / name
    for entry in info.external:
        if entry.kind not in ("binlog", "redo", "undo"):
            yield Path(entry.path)


_ENGINES = "engines"
REMEDY = (
    "add a logical schedule to the policy: it dumps such tables regardless of tables.include and max_size, unless "
    "tables.exclude matches them; or move them to InnoDB: ALTER TABLE ... "
    "ENGINE=InnoDB"
)
_NO_SNAPSHOTS = ("MyISAM", "Aria")
_SHOWN = 10
_ROCKS_REMEDY = (
    "name them in tables.include of a logical schedule, so that a dump holds them too; or move them to "
    "InnoDB: ALTER TABLE ... ENGINE=InnoDB"
)


def left_out(tables: Iterable[Table], flavour: Flavour, tool: str) -> dict[str, list[TableName]]:
    """By engine, the tables whose rows are in no physical backup by ``tool`` (its name)."""
    by_engine: dict[str, list[TableName]] = defaultdict(list)
    for table in tables:
        if not table.is_system:
            by_engine[table.engine].append(table.name)
    return {engine: by_engine[engine] for engine in sorted(uncovered(by_engine, flavour, tool))}


def in_no_backup(left: Mapping[str, Sequence[TableName]], logical: Logical | None) -> dict[str, list[TableName]]:
    """By engine, those of ``left`` (see ``left_out``) that the ``logical`` leg of the policy does not take either."""
    lost = {engine: [name for name in names if not _is_dumped(name, logical)] for engine, names in left.items()}
    return {engine: names for engine, names in lost.items() if names}


def lost_words(engine: str, names: Sequence[TableName]) -> str:
    """In words, of ``engine``: which tables (``names``) are in no backup at all."""
    shown = few((name.shown for name in names), _SHOWN)
    return (
        f"{len(names)} tables of engine {engine} are in no backup, as physical backups leave that engine out: {shown}"
    )


def rocks_words(names: Sequence[TableName]) -> str:
    """In words: what can not be done with the MyRocks tables ``names``, though physical backups hold them."""
    shown = few((name.shown for name in names), _SHOWN)
    return (
        f"the {len(names)} tables of engine {ROCKSDB} are in physical backups, and come back only with a restore "
        "of the whole server as it was at a backup: the private server of a test restore, of a restore of tables "
        "and of a replay does not load that engine, so these backups are never proved, and "
        f"{REPLAY_STOPS} of their rows: {shown}"
    )


def examine_coverage(
    tables: Iterable[Table], flavour: Flavour, tool: str, logical: Logical | None
) -> Iterator[Finding]:
    """``tool``: the name of the one that takes the physical backups. ``logical``: the policy's logical leg."""
    known = [table for table in tables if not table.is_system]
    left = left_out(known, flavour, tool)
    rocks = [table.name for table in known if table.engine == ROCKSDB]
    if rocks and ROCKSDB not in left:
        yield warning(_ENGINES, rocks_words(rocks), _ROCKS_REMEDY)
    lost = in_no_backup(left, logical)
    for engine, names in left.items():
        if engine in lost:
            yield warning(_ENGINES, lost_words(engine, lost[engine]), REMEDY)
        else:
            yield fine(
                _ENGINES,
                f"physical backups leave out the {len(names)} tables of engine {engine}; all of them "
                "are in logical ones",
            )


def recommend(engines: Mapping[str, int]) -> Iterator[Finding]:
    """What backups of tables without snapshots cannot do. ``engines``: numbers of user tables."""
    old = {engine: engines[engine] for engine in _NO_SNAPSHOTS if engine in engines}
    if old:
        shown = ", ".join(f"{count} of {engine}" for engine, count in old.items())
        yield warning(
            _ENGINES,
            f"tables of engines without snapshots ({shown}): a crash can damage them, a dump may "
            "have newer rows than its position, and a witness compares them only where nothing is "
            "written meanwhile",
            "move them to InnoDB where the application allows: ALTER TABLE ... ENGINE=InnoDB",
        )


def _is_dumped(name: TableName, logical: Logical | None) -> bool:
    """The set without a name takes all such tables that it does not exclude."""
    if logical is None:
        return False
    return any(
        (not table_set or fits_any(name, map(TablePattern.parse, tables.include)))
        and not fits_any(name, map(TablePattern.parse, tables.exclude))
        for table_set, (_cadence, tables) in logical.selections.items()
    )


BINLOG = "binlog"
TRANSACTIONAL = frozenset({"InnoDB", "ROCKSDB"})
_NO_ROWS = frozenset({"MRG_MYISAM", "MRG_MyISAM", "BLACKHOLE", "SEQUENCE", "PERFORMANCE_SCHEMA"})
SHORTEST = timedelta(hours=6)
"""A server that keeps its log for less leaves nobody the time to mend a stream that failed in the night."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """What the policy asks of the binary log. ``fulls``: the longest time between two full backups, None without.
    ``acknowledges``: do commits wait for it?"""

    fulls: timedelta | None = None
    acknowledges: bool = False


def examine_binary_log(
    session: Session,
    info: ServerInfo,
    streaming: Streaming,
    *,
    programs: Mapping[str, str] = NO_PATHS,
) -> Iterator[Finding]:
    """For a server whose binary log is streamed. ``programs``: paths of tools that are not searched."""
    if not info.log_bin:
        yield error(
            BINLOG,
            "the policy streams the binary log, and this server writes none (log_bin is off)",
            "set log_bin (and server_id) in the server's option file and restart it, or take binlog: out of the policy",
        )
        return
    try:
        yield _copies(session, binlog_program(info.flavour, paths=programs))
    except (ServerError, ToolError) as problem:
        yield from_error(BINLOG, problem)
    problems = [*_expiry(info.variables, streaming.fulls), *_engines(info.engines)]
    try:
        problems += [
            warning(BINLOG, sentence, "make these sessions write to the binary log again, or take a backup after them")
            for sentence in unlogged(session, read_dialect(session))
        ]
        if streaming.acknowledges:
            problems += examine_acknowledgement(read_semi_sync(session), info.flavour, info.version)
    except ServerError as problem:
        problems.append(from_error(BINLOG, problem))
    yield from problems


def _copies(session: Session, program: Tool) -> Finding:
    """Raises ServerError."""
    named = f"{program.name} {program.version} at {program.path} replays it"
    position = BinlogSource(session.connection).look(files=False).position
    said = trial(session.connection, position, connection_id("check", secrets.token_hex(8)))
    if said:
        return warning(
            BINLOG,
            f"the end of the binary log was not received: {said}",
            "grant REPLICATION SLAVE ON *.* to the account, and check that this host can connect to the server",
        )
    return fine(BINLOG, f"the binary log is received up to its end; {named}")


def _expiry(variables: Mapping[str, str], fulls: timedelta | None) -> Iterator[Finding]:
    kept = kept_for(variables)
    if kept is None:
        return
    hint = "raise binlog_expire_logs_seconds (expire_logs_days on old servers) there"
    if kept < SHORTEST:
        yield warning(
            BINLOG,
            f"the server removes its binary log after {_span(kept)}: a stream that is interrupted for longer leaves a "
            "gap",
            hint,
        )
    elif fulls is not None and kept < fulls:
        yield warning(
            BINLOG,
            f"the server removes its binary log after {_span(kept)}, and full backups are up to "
            f"{_span(fulls)} apart: binary log that the archive loses in between cannot be fetched again, and the gap "
            "remains until the next full backup",
            hint,
        )


def _engines(engines: Mapping[str, int]) -> Iterator[Finding]:
    others = {engine: count for engine, count in engines.items() if engine not in TRANSACTIONAL | _NO_ROWS}
    if others:
        shown = ", ".join(f"{count} of {engine}" for engine, count in sorted(others.items()))
        yield warning(
            BINLOG,
            f"tables of engines without transactions ({shown}): a statement that failed halfway has changed rows "
            "there, and a replay that stops there differs from the source",
            "ALTER TABLE ... ENGINE=InnoDB where the application allows",
        )


def _span(span: timedelta) -> str:
    return format_duration(span.total_seconds())
