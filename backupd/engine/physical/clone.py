"""CLONE: MySQL's own physical copy, for servers from 8.0.17 on that have no xtrabackup of their series. Full only.

The server copies itself into a folder on its own host (``CLONE LOCAL DATA DIRECTORY``), which takes as much room as its
data; the copy is started once, deaf and mute and without a binary log, so that it recovers; stopped cleanly; and read
file by file, each removed once it was read. Why it is started here, and not at each restore:

* Only the started copy shows which position in the binary log it has (performance_schema.clone_status: file,
  position, GTID set, all three taken by the clone under InnoDB's own commit order). Measured on 9.7.4: equal to the
  server's own under writers that were blocked at that moment; replaying the source's binary log from there gives equal
  checksums.
* What is stored has been started by the server's own program: a copy that cannot be recovered is never a backup.
* A restore has nothing to prepare: the first start finds a server that was shut down cleanly.

It must be started by the very release that made it: an older one refuses the files, a newer one would upgrade them.

Not in the backup: the double-write files, the temporary tablespaces, spare redo files, the clone's own notes and the
copy's ``auto.cnf``, all made anew by the first start. ``backup-my.cnf`` is written by us, in the words of xtrabackup's
file of that name: what a server must be told to read the files. An empty schema is a file ``db.opt`` (see
``capture.ingest``).

Only InnoDB's tables are copied; those of other engines come back empty (``warnings`` says which there are). The plugin
is loaded for the backup where it is not, and unloaded afterwards, in the copy too.

Receipts: backup_type ``clone``, from_lsn 0, to_lsn and last_lsn the log sequence number of the copy's clean shutdown,
which its system tablespace and its redo log must both show before a restored server is started (``verify_prepared``);
tool_version that of the server program, server_version what the source said.

What the files of a stopped server show without starting it: InnoDB writes the log sequence number of a clean shutdown
into the first page of the system tablespace (8 bytes, big endian, at FIL_PAGE_FILE_FLUSH_LSN = 26), and the last
checkpoint into the redo log: two blocks at 512 and 1536 of a file, the number 8 bytes into the block. From 8.0.30 on
the redo log is files ``#innodb_redo/#ib_redoN``, of which the unused ones end in ``_tmp``; before, ``ib_logfile0``.
After a clean shutdown both numbers are the same; any other pair means files of different moments, or a server that did
not come to its end.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import pwd
import secrets
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Self

from backupd.engine.physical.capture import (
    CaptureRequest,
    CaptureRun,
    Data,
    End,
    FileEvent,
    LeftOut,
    PrepareStep,
    Stock,
    ingest,
    nothing,
)
from backupd.engine.physical.datafiles import Contents
from backupd.engine.physical.inventory import base_tables
from backupd.engine.physical.live_datadir import reader_of
from backupd.engine.physical.tablefiles import absent
from backupd.engine.server.backup_files import BACKUP_CNF, ReceiptNames
from backupd.engine.server.clone_plugin import CommitLock, loaded, refuse_unfit
from backupd.engine.server.launch import LaunchedServer, ServerConfig, options_for_copy
from backupd.engine.server.probe import probe, read_dialect
from backupd.engine.sql.client import Session, error_code
from backupd.model.errors import (
    OTHER_BACKUP,
    BackupdError,
    CancelledError,
    RefusedError,
    ServerError,
    TablesChangedError,
    ToolError,
)
from backupd.model.server_facts import Position, Receipts, ServerInfo, Tool
from backupd.model.table import BaseTable
from backupd.model.text import format_size
from backupd.process.folders import locked_folder, make_passable, open_plain, remove_dead
from backupd.process.output import redact
from backupd.process.runtime import render_options

_FLUSHED_AT = 26
_CHECKPOINTS = (512, 1536)
_LSN_IN_BLOCK = 8
_HEADER = 2048


def system_tablespace(variables: Mapping[str, str]) -> str:
    """The first file of the system tablespace, as ``innodb_data_file_path`` names it."""
    return Path(variables.get("innodb_data_file_path", "").split(":")[0].strip() or "ibdata1").name


def flushed_lsn(base: Path, system: str) -> int:
    """The log sequence number at which the server of ``base`` was shut down; ``system``: its system tablespace.

    Raises ToolError when there is none.
    """
    try:
        with os.fdopen(open_plain(base / system), "rb") as file:
            page = file.read(_FLUSHED_AT + 8)
    except FileNotFoundError:
        page = b""
    if len(page) < _FLUSHED_AT + 8:
        raise ToolError(
            f"{base / system} is missing or empty: the copy of the server is not complete", hint=OTHER_BACKUP
        )
    return int(struct.unpack_from(">Q", page, _FLUSHED_AT)[0])


def checkpoint_lsn(base: Path) -> int:
    """The last checkpoint in the redo log of ``base``. Raises ToolError when it has none."""
    files = [path for path in base.glob("#innodb_redo/#ib_redo*") if not path.name.endswith("_tmp")]
    files += [path for path in base.glob("ib_logfile0") if path.is_file()]
    found = 0
    for path in files:
        with os.fdopen(open_plain(path), "rb") as file:  # whose it was may have put a pipe in its place
            header = file.read(_HEADER)
        for block in _CHECKPOINTS:
            if len(header) == _HEADER:
                found = max(found, int(struct.unpack_from(">Q", header, block + _LSN_IN_BLOCK)[0]))
    if not found:
        raise ToolError(f"{base} has no readable redo log: the copy of the server is not complete", hint=OTHER_BACKUP)
    return found


NAME = "clone"
NAMES = ReceiptNames("clone")
"""It writes no receipts of its own; the names that no schema may have are those of a prefix nobody else uses."""
BACKUP_TYPE = "clone"
_PREFIX = "clone-"
_RESERVE = 64 * 1024 * 1024
_COPIED = "InnoDB"
_LEFT_OUT = (
    "#clone/*",
    "#innodb_temp/*",
    "#innodb_redo/*_tmp",
    "#ib_*.dblwr",
    "ibtmp*",
    "auto.cnf",
    "*.pem",
    "*.pid",
    "*.err",
    "performance_schema/*",
)
"""Patterns of files of the started copy that are no part of a backup."""
_IN_CNF = ("innodb_page_size", "innodb_data_file_path")
_NOT_DATA = ("#innodb_temp/*", "ibtmp*", "*.dblwr", "*.err", "*.log", "*.pem")
_RENAMED = ".#clone_ddl"
"""In an error of CLONE (9.7.4: 1025): it could not follow a table into a schema whose folder it had not made yet."""
_DENIED, _CONCURRENT, _NO_FILE = 1227, 3634, frozenset({1006, 1007, 1086, 3})


class Clone:
    """The physical tool of MySQL servers without a fitting xtrabackup."""

    leftovers = (BACKUP_CNF,)
    takes_increments = False

    def __init__(self, tool: Tool) -> None:
        """``tool``: the server's own program under the name ``clone``; to restore, what the manifest says."""
        self.tool = tool

    def warnings(self, info: ServerInfo) -> tuple[str, ...]:
        """One sentence for each engine whose tables come back empty."""
        return tuple(
            f"CLONE copies InnoDB only: {number} tables of engine {engine} come back empty; take logical "
            "backups of them"
            for engine, number in sorted(info.engines.items())
            if engine != _COPIED
        )

    def capture(self, request: CaptureRequest) -> CloneCapture:
        """Needs a ``spool`` with room for the whole server."""
        return CloneCapture(self.tool, request)

    def prepare(self, base: Path, increments: Sequence[Path] = (), *, memory: int) -> tuple[PrepareStep, ...]:  # noqa: ARG002 - nothing is run
        """Makes a folder that no clone has: in it a server describes the tables of plugins that are loaded while it
        runs, such as CLONE's own, and without it they cannot be loaded (error 1123)."""
        if increments:
            raise RefusedError("a clone has no increments", hint="restore the full backup alone")
        (base / "performance_schema").mkdir(mode=0o700, exist_ok=True)
        return ()

    def verify_prepared(
        self,
        base: Path,
        receipts: Receipts,
        logs: Sequence[str],  # noqa: ARG002 - nothing was run
        *,
        left_out: LeftOut = nothing,  # noqa: ARG002
    ) -> None:
        """Do system tablespace and redo log both show the clean shutdown of the receipts? Raises ToolError."""
        found = flushed_lsn(base, _system_of(base)), checkpoint_lsn(base)
        if found != (receipts.last_lsn, receipts.last_lsn):
            raise ToolError(
                f"{base} is not the copy that was shut down at {receipts.last_lsn}",
                detail=f"its system tablespace says {found[0]}, its redo log {found[1]}",
                hint=OTHER_BACKUP,
            )

    def redo_bytes(self, base: Path) -> int:  # noqa: ARG002 - recovered already
        """0: the copy was recovered when it was made."""
        return 0


class CloneCapture(CaptureRun):
    """One CLONE, recovered and read. Its receipts: see the head of this module."""

    def __init__(self, tool: Tool, request: CaptureRequest) -> None:
        super().__init__(tool, request)
        self._lines: deque[str] = deque(maxlen=50)
        self._tables: tuple[BaseTable, ...] = ()
        self._contents = Contents()
        self._folder = Path()
        self._info: ServerInfo | None = None
        self._owner, self._user = -1, ""
        self._size = 0
        self._ours = False

    @property
    def log_tail(self) -> str:
        """The last 50 lines about this run."""
        return "\n".join(self._lines)

    def __enter__(self) -> Self:
        """Look at the server and make room. Raises RefusedError, ServerError, ToolError."""
        request = self._request
        if request.incremental_lsn is not None:
            raise RefusedError(
                "CLONE always copies everything: it makes no incremental backups",
                hint="take a full backup, or install Percona XtraBackup of the server's series",
            )
        if request.spool is None:
            raise RefusedError("CLONE needs a folder to copy the server into", hint="configure a spool")
        info = self._info = probe(request.connection)
        if self.tool.version != info.version:
            raise ToolError(
                f"{self.tool.path} is {self.tool.version}; a clone of this server can be started by "
                f"{info.version} only",
                detail=self.tool.version_text,
                hint="name the server's own program under `programs: {mysqld: ...}`",
            )
        with request.connection.connect() as session:
            refuse_unfit(session, info)
            self._owner, self._user = _owner_of(Path(info.datadir), session)
        with contextlib.ExitStack() as stack:
            self._ours = stack.enter_context(loaded(request.connection, self._report))
            self._folder = _make_folder(stack, request.spool, self._owner)
            self._size = _refuse_no_room(Path(info.datadir), self._folder)
            self._stack = stack.pop_all()
        return self

    def events(self) -> Iterator[FileEvent]:
        """Clones, starts and stops the copy, then reads it. Raises ToolError, ServerError, TablesChangedError,
        CancelledError."""
        if self._info is None:
            raise ValueError("the capture was not entered")
        info, copy = self._info, self._folder / "data"
        self._clone(copy)
        position = self._recover(copy, info)
        # From here on nobody but us changes it.
        os.chown(self._folder, os.geteuid(), -1)
        self._folder.chmod(0o700)
        system = system_tablespace(info.variables)
        lsn = flushed_lsn(copy, system)
        if checkpoint_lsn(copy) != lsn:
            raise ToolError("the copy was not shut down cleanly", detail=self.log_tail)
        cnf = render_options({"mysqld": {name: info.variables[name] for name in _IN_CNF if name in info.variables}})
        yield Data(BACKUP_CNF, 0, memoryview(cnf.encode()))
        yield End(BACKUP_CNF)
        for event in ingest(copy, _is_wanted, owner=self._owner, cancel=self._request.cancel):
            self._contents.take(event)
            yield event
        self._receipts = Receipts(
            backup_type=BACKUP_TYPE,
            from_lsn=0,
            to_lsn=lsn,
            last_lsn=lsn,
            position=position,
            tool_version=str(self.tool.version),
            server_version=info.version_text,
        )

    def stock(self) -> Stock:
        """The copy's own dictionary lists the tables; it is of the very transaction that the position names."""
        copied = [table for table in self._tables if table.engine == _COPIED]
        return Stock(self._tables, absent(copied, self._contents.paths))

    def _report(self, line: str) -> None:
        self._lines.append(line)
        if self._request.log is not None:
            with self._request.log.open("a", encoding="utf-8") as log:
                log.write(redact(line) + "\n")
        if self._request.on_stderr is not None:
            self._request.on_stderr(line)

    # -- the copy

    def _clone(self, copy: Path) -> None:
        """Have the server copy itself; ends with the statement, whatever happens."""
        request = self._request
        self._report(f"cloning into {copy}")
        with request.connection.connect() as session:
            number = int(session.scalar("SELECT CONNECTION_ID()"))
            statement = _Statement(session, "CLONE LOCAL DATA DIRECTORY = %s", str(copy))
            try:
                # Only somebody who listens has a use for the lock.
                with self._commit_lock() as lock:
                    statement.start()
                    while statement.is_alive():
                        if request.cancel is not None and request.cancel.is_set():
                            raise CancelledError("the backup was cancelled")
                        if lock is None:
                            statement.join(0.02)
                        else:
                            lock.look()
                    if lock is not None and statement.error is None:
                        lock.ended()
            finally:
                self._end(statement, number)
        if statement.error is not None:
            raise _clone_error(statement.error, copy, self._owner)
        self._report("cloned")

    def _commit_lock(self) -> contextlib.AbstractContextManager[CommitLock | None]:
        if self._request.on_stderr is None:
            return contextlib.nullcontext()
        return CommitLock(self._request.connection, self._size, self._report)

    def _end(self, statement: _Statement, number: int) -> None:
        """KILL QUERY until it is over: everybody may end his own account's statements."""
        while statement.is_alive():
            try:
                with self._request.connection.connect() as killer:
                    killer.execute(f"KILL QUERY {number}")
            except ServerError as error:
                self._report(f"the clone statement could not be ended: {error.message}")
            statement.join(0.5)

    def _recover(self, copy: Path, info: ServerInfo) -> Position:
        """Start the copy, ask it where it is, stop it. Raises ToolError, ServerError."""
        config = ServerConfig(
            program=self.tool.path,
            datadir=copy,
            directory=self._folder / "run",
            options={
                **options_for_copy(copy, info.variables),
                "performance_schema": "ON",
                "plugin_load_add": "mysql_clone.so",
            },
            user=self._user,
        )
        self._report("starting the copy")
        server = LaunchedServer(config, cancel=self._request.cancel)
        with server, server.connection.connect() as session:
            rows = session.records("SELECT * FROM performance_schema.clone_status")
            gtid = _flat(session.scalar("SELECT @@GLOBAL.gtid_executed"))
            if len(rows) != 1 or rows[0]["STATE"] != "Completed" or int(rows[0]["ERROR_NO"]):
                states = "; ".join(f"{row['STATE']} {row['ERROR_NO']} {row['ERROR_MESSAGE']}" for row in rows)
                raise ToolError("the copy does not report its recovery", detail=states or "clone_status is empty")
            row = rows[0]
            if _flat(row["GTID_EXECUTED"]) != gtid:
                raise ToolError(
                    "the copy has executed other transactions than its clone status reports",
                    detail=f"{gtid}, not {_flat(row['GTID_EXECUTED'])}",
                )
            self._tables = base_tables(session, read_dialect(session), Path(info.datadir))
            if self._ours:
                session.execute("DELETE FROM mysql.plugin WHERE name = 'clone'")
        self._report("the copy was recovered and shut down")
        if not info.log_bin or not row["BINLOG_FILE"]:
            return Position()
        return Position(file=Path(str(row["BINLOG_FILE"])).name, pos=int(row["BINLOG_POSITION"]), gtid=gtid)


class _Statement(threading.Thread):
    """One statement in a thread of its own; ``error`` is what it failed with."""

    def __init__(self, session: Session, sql: str, *args: str) -> None:
        super().__init__(name="clone", daemon=True)
        self._session, self._sql, self._args = session, sql, args
        self.error: ServerError | None = None

    def run(self) -> None:
        try:
            self._session.execute(self._sql, *self._args)
        except ServerError as error:
            self.error = error


def _make_folder(stack: contextlib.ExitStack, spool: Path, owner: int) -> Path:
    """A folder of this run in ``spool`` that the server can write into, and nobody else; ``stack`` removes it. What
    killed runs left there is removed first. Raises RefusedError."""
    try:
        for folder in (spool, spool.parent):
            make_passable(folder)  # which shows no name
        remove_dead(spool, _PREFIX)
        made = stack.enter_context(locked_folder(spool / f"{_PREFIX}{secrets.token_hex(4)}", mode=0o700))
        if os.geteuid() == 0:
            os.chown(made, owner, -1)
    except OSError as error:
        raise RefusedError(
            f"{spool} cannot be used for a clone: {error.strerror}",
            hint="it must be a folder of this user on a disk with space for the whole server",
        ) from error
    return made


def _owner_of(datadir: Path, session: Session) -> tuple[int, str]:
    """The server's user, by number and as whom its copy is started. Raises RefusedError when its files are not here,
    or not ours to read, or root's, or not of who answers."""
    user = reader_of(datadir, session)
    owner = datadir.stat().st_uid
    if os.geteuid() not in (0, owner):
        raise RefusedError(
            f"the server runs as uid {owner}, this process as uid {os.geteuid()}: it cannot read the files that CLONE "
            "writes",
            hint="run the service as root or as the server's user",
        )
    return owner, user or pwd.getpwuid(owner).pw_name


def _refuse_no_room(datadir: Path, folder: Path) -> int:
    """The bytes that a clone takes. Raises RefusedError before the server fills the disk."""
    need = 0
    for root, _folders, names in os.walk(datadir):  # which passes over schemas that are dropped meanwhile
        for path in (Path(root) / name for name in names):
            with contextlib.suppress(FileNotFoundError):
                if not path.is_symlink() and _is_copied(PurePosixPath(path.relative_to(datadir))):
                    need += path.lstat().st_blocks * 512
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < need + _RESERVE:
        raise RefusedError(
            f"not enough space in {folder.parent}: a clone needs {format_size(need)}, {format_size(free)} are free",
            detail=f"{need:,} bytes and {_RESERVE:,} in reserve; free: {free:,} bytes",
            hint="move the spool to a disk with space for the whole server, or install Percona XtraBackup of the "
            "server's series",
        )
    return need


def _is_copied(path: PurePosixPath) -> bool:
    """Does CLONE copy such a file of a data directory?"""
    inside = str(path)
    if any(fnmatch.fnmatchcase(inside, pattern) for pattern in _NOT_DATA):
        return False
    files = ("ibdata", "undo", "#innodb_redo/", "ib_logfile")
    return path.suffix in {".ibd", ".ibu"} or inside.startswith(files)


def _is_wanted(path: PurePosixPath) -> bool:
    return not any(fnmatch.fnmatchcase(str(path), pattern) for pattern in _LEFT_OUT)


def _system_of(base: Path) -> str:
    """The system tablespace of a fetched backup, by its backup-my.cnf."""
    options = options_for_copy(base, {})
    return system_tablespace({name: value or "" for name, value in options.items()})


def _clone_error(error: ServerError, copy: Path, owner: int) -> BackupdError:
    code = error_code(error)
    if _RENAMED in error.detail:
        return TablesChangedError(
            "the server could not clone itself while a table was renamed",
            detail=f"{error.message}: {error.detail}",
            hint="take the backup when no such statement runs",
        )
    hint = "no part of this backup was kept; see the server's error log"
    if code == _DENIED:
        hint = "GRANT BACKUP_ADMIN ON *.* to the account; `backupd check` names each missing privilege"
    elif code == _CONCURRENT:
        hint = "another clone of this server runs: wait for it to end"
    elif code in _NO_FILE:
        hint = (
            f"the server (uid {owner}) must be able to write into {copy.parent}: check AppArmor, SELinux, and "
            "ProtectSystem, PrivateTmp, ReadWritePaths of its service"
        )
    return ToolError("the server could not clone itself", detail=f"{error.message}: {error.detail}", hint=hint)


def _flat(gtid: object) -> str:
    return "".join(str(gtid or "").split())
