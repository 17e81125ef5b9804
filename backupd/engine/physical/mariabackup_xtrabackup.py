"""mariadb-backup, for MariaDB, and Percona XtraBackup, for MySQL and Percona Server: their command lines, and what has
to be true besides their "completed OK!".

mariadb-backup, measured with 10.11.19; every point here is a run that ended with exit code 0 and "completed OK!":

* prepare with damaged or cut redo: recovery stops early. ``verify_prepared`` compares where it stopped with
last_lsn. * prepare with a missing .ibd: ``verify_files`` before it, and the tool's "was not found at" line
after it. * prepare with --no-defaults: backup-my.cnf is not read, so page size and system tablespace are
the defaults' (then the exit code is 1 with a misleading text when the page size differs). We name the file.
* backup while Aria tables are renamed: their data is left out (see xbstream). * a stream cut between two
files: the receipts, written last, are missing. * an increment since whose base a table was renamed, and another
one was made by its name while the tool ran: the first one's rows are removed (``put_aside``).

SIGTERM does not end it (blocked); SIGINT and SIGKILL do, and ``Pipeline`` knows.

XtraBackup, seen with 2.4.4, each time with exit code 0 and "completed OK!" as the last line; every one of them is
noticed here or by ``verify_files``:

* prepare of a backup that was interrupted, or that lost its xtrabackup_checkpoints: it prints "seems not to have
  correct metadata" and goes on. ``prepare`` asks for the receipts first.
* prepare with a missing .ibd: ``verify_files`` before it, a line about the tablespace after it.
* prepare with damaged redo: recovery stops early, and the tool compares with to_lsn only, not with last_lsn.
  ``verify_prepared`` compares the number of the last "Shutdown completed" line.
* copy-back of what was never prepared, or with --apply-log-only only: backup_type must be full-prepared.
* a stream cut between two files: the receipts, written last, are missing.
* an unknown option is ignored by 2.4 and ends later ones: the tool's own ``--help`` lists what it knows.

It shows a password of its command line in the process list, so that is in the option file, which is the only one
that is read: an [xtrabackup] group of the server's could change the format of the stream, and what the clients keep in
~/.mylogin.cnf would win over our credentials even so.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from backupd.engine.physical.capture import CaptureRequest, LeftOut, nothing
from backupd.engine.physical.datafiles import without_earlier_names
from backupd.engine.physical.streaming import StreamingTool, check_logs, no_redo, without_left_out
from backupd.engine.physical.xbstream import Dialect
from backupd.engine.server.backup_files import BACKUP_CNF
from backupd.engine.server.sandbox import Groups
from backupd.engine.sql.client import Connection, ssl_mode
from backupd.model.errors import OTHER_BACKUP, RefusedError, ToolError
from backupd.model.server_facts import Receipts, ServerInfo, Tool, Version
from backupd.process.command import Command
from backupd.process.pipeline import run

_GRANT = "grant the account the missing privileges; `backupd check` lists them"
_LOGIN = "wrong user or password: check defaults_file, user and password_file of this server"
_OPEN_FILES = "raise the limit of open files (LimitNOFILE) for the backup service"
_PAGE = "a page of the server's own files is damaged: CHECK TABLE the table that is named"
_READER = "the tool must run as a user who may read the server's datadir"

_REDO_HEADER = 0x3000
_CHECKPOINTS = (0x1000, 0x2000)


_MARIADB_HINTS: Mapping[str, str] = {
    "Try increasing the innodb_log_file_size": "the server overwrote its redo log before it was copied: raise"
    " innodb_log_file_size, or take the backup while less is written",
    "privilege(s) for this operation": _GRANT,
    "Access denied": _LOGIN,
    "missing required privilege": _GRANT,
    "aria_read data from": "an Aria table with DATA DIRECTORY or a damaged one: the tool cannot copy it",
    "Database page corruption": _PAGE,
    "Too many open files": _OPEN_FILES,
    "Can't change dir to": "the tool must run on the server's host, as a user who may read its datadir",
    "Can't open datafile": "for a table with DATA DIRECTORY the tool opens the .isl file in the data directory for"
    " writing: a service whose unit protects that folder needs it in ReadWritePaths= (systemctl edit backupd)",
    "Permission denied": _READER,
}


class MariaBackup(StreamingTool):
    """The physical tool of MariaDB servers."""

    dialect = Dialect.MARIADB
    leftovers = (BACKUP_CNF, "xtrabackup_*", "mariadb_backup_*")
    redo_file = "ib_logfile0"
    prepared = "log-applied"
    again = "run the prepare steps again; repeating them is harmless"
    puts_aside = True
    silent = (
        "only scanned up to",
        "when restoring a (partial?) backup",
        "[ERROR]",
        "FATAL ERROR",
        "The log was not applied to the intended LSN",
    )
    moment: ClassVar[re.Pattern[str]] = re.compile(
        "Acquired locks for BACKUP STAGE BLOCK_COMMIT"
        # Series without the line above log this one under the same lock.
        "|Executing FLUSH NO_WRITE_TO_BINLOG ENGINE LOGS"
    )
    """From here on it keeps commits and changes of definitions blocked, until it has recorded the position."""
    hints = _MARIADB_HINTS

    def _check_logs(self, base: Path, logs: Sequence[str], left_out: LeftOut) -> None:
        cleaned = [without_left_out(log, left_out) for log in logs]
        if left_out is not nothing:
            cleaned = [without_earlier_names(log, base) for log in cleaned]
        check_logs(self.tool, base, cleaned, silent=self.silent)

    def _reached(self, base: Path, *_rest: object) -> int:
        return reached_lsn(base)


def reached_lsn(base: Path) -> int:
    """Up to which log sequence number a prepared backup goes, from its redo file.

    After prepare the file holds nothing but a checkpoint, so its end is the checkpoint's number plus what
    follows the header (16 bytes as a rule). Format since MariaDB 10.8 (log0log.h): "Phys" at 0; two
    checkpoint blocks at 0x1000 and 0x2000, each beginning with the number as 8 bytes, big endian; records
    from 0x3000 on. Raises ToolError.
    """
    path = base / MariaBackup.redo_file
    try:
        with path.open("rb") as file:
            header = file.read(_REDO_HEADER)
            size = file.seek(0, 2)
    except FileNotFoundError:
        raise no_redo(base, MariaBackup.redo_file) from None
    if len(header) < _REDO_HEADER or not header.startswith(b"Phys"):
        raise ToolError(f"{path} is not the redo log of a prepared backup", hint="run the prepare steps again")
    checkpoint = max(int(struct.unpack_from(">Q", header, offset)[0]) for offset in _CHECKPOINTS)
    return checkpoint + size - _REDO_HEADER


QUERY_WAIT_SECONDS = 180
"""Before the global read lock: how long statements older than QUERY_AGE_SECONDS may go on. Nobody is blocked yet, so
this may be generous; a server that always has such a statement needs the backup at another hour."""
QUERY_AGE_SECONDS = 10
"""What runs for longer is waited for; the default of 60 would let the lock wait behind a statement of 59 seconds."""
LOCK_SECONDS = 30
"""While the lock is waited for, every writer waits behind it: an outage, and no backup is worth a longer one."""
DDL_LOCK_SECONDS = 300
"""LOCK INSTANCE FOR BACKUP waits for DDL only, and only DDL waits behind it."""


@dataclass(frozen=True, slots=True)
class _Option:
    """An option that versions from ``first`` on, up to and without ``end``, need where this build knows it."""

    text: str
    first: Version | None = None
    end: Version | None = None

    def is_for(self, version: Version, known: Collection[str]) -> bool:
        needed = (self.first is None or self.first <= version) and (self.end is None or version < self.end)
        return needed and self.text.partition("=")[0] in known


_OPTIONS = (
    _Option("--no-version-check"),  # it would call home; builds without that check do not know the option
    _Option(f"--ftwrl-wait-timeout={QUERY_WAIT_SECONDS}"),
    _Option(f"--ftwrl-wait-threshold={QUERY_AGE_SECONDS}"),
    _Option("--ftwrl-wait-query-type=all"),
    _Option(f"--backup-lock-timeout={LOCK_SECONDS - 5}"),
    _Option("--lock-ddl", Version(8, 0), Version(8, 0, 23)),  # the default from there on
    _Option(f"--lock-ddl-timeout={DDL_LOCK_SECONDS}", Version(8, 0)),
)
"""Which options the command line of a backup gets besides those that all versions share.

Left out on purpose: --lock-ddl in 2.4 (an error on MySQL, only Percona Server has the statement), --lock-ddl=REDUCED (a
preview), --register-redo-log-consumer (the server stops writers when we are slow), --no-server-version-check and
--kill-long-queries-timeout. From 8.0 on an unknown option is an error by itself (--strict is the default)."""

_LISTED = re.compile(r"^\s+(?:-\w, )?(--[a-z0-9][a-z0-9-]*)", re.MULTILINE)
"""An option in the output of --help: ``  -?, --help  ...``, ``  --parallel=#  ...``, ``  --stream[=name] ...``."""
_NO_TABLESPACES = frozenset({"encrypt_binlog", "aria_encrypt_tables"})
"""What a server encrypts that the tool does not open."""
_LOCKS_DDL = Version(8, 0)
"""From here on changes of definitions are blocked for the whole run. Before, they go on until the global read lock, and
of InnoDB's the redo log knows."""
_MOMENT = re.compile("Starting to backup non-InnoDB tables")
"""Of a series before: it has the global read lock, and will record the position before it gives it back."""
_NO_TLS_BEFORE = Version(2, 4, 5)

_MISSING_TABLES = ("was not found at", "Could not find a valid tablespace file for")
_MOVED_FILES = "Have you deleted or moved .ibd files"
"""In the log of the last step. Files called #sql... may be missing at the source, too: leftovers of broken DDL."""
_SHUTDOWN = re.compile(r"Shutdown completed; log sequence number (\d+)")
"""2.4 prints it after "InnoDB: ", 8.0 and later after a time stamp and [InnoDB]."""


_XTRABACKUP_HINTS: Mapping[str, str] = {
    "Unable to obtain lock": "statements ran for longer than the backup may wait: SHOW PROCESSLIST lists them; take the"
    " backup when they have ended",
    "Lock wait timeout exceeded": "another session held a lock for longer than the backup may wait: SHOW PROCESSLIST"
    " lists it",
    "log has wrapped around": "the server overwrote its redo log before it was copied: raise innodb_log_file_size, or"
    " take the backup while less is written",
    "redo log was overwritten": "the server overwrote its redo log before it was copied: raise"
    " innodb_redo_log_capacity, or take the backup while less is written",
    "Access denied; you need": _GRANT,
    "privilege(s) for this operation": _GRANT,
    "Access denied": _LOGIN,
    "missing required privilege": _GRANT,
    "Can't connect to": "check that the server is running and that its socket or host and port are right",
    "gone away": "the server stopped during the backup: check its error log",
    "page corruption detected": _PAGE,
    "seems to be corrupted": _PAGE,
    "Too many open files": _OPEN_FILES,
    "Unsupported redo log format": "the tool is of another series than the server: install the server's series of it",
    "Unsupported server version": "the tool is older than the server: install its newest release of the same series",
    "without redo logging": "DDL ran while the backup was taken; take it again when none runs",
    "error number 13 in a file operation": _READER,
    "Permission denied": _READER,
    "Can't change dir to": "the tool must run on the server's host, as a user who may read its datadir",
    "Please set parameter 'datadir'": "the server did not report @@datadir: check that the account may read it",
    "keyring": "the server encrypts tablespaces: the tool needs the same keyring plugin and its keys",
}


class XtraBackup(StreamingTool):
    """The physical tool of MySQL and Percona Server."""

    dialect = Dialect.PERCONA
    leftovers = (BACKUP_CNF, "xtrabackup_*")  # not ib_logfile*: prepare makes the redo logs that the server starts with
    redo_file = "xtrabackup_logfile"
    prepared = "full-prepared"
    again = "run the prepare steps again, the last one without --apply-log-only"
    unfinished = ("--apply-log-only",)
    """Without it the last step rolls back what was not committed, and no increment fits any more."""
    silent = (
        "seems not to have correct metadata",
        "The log was not applied to the intended LSN",
        "The transaction log file is corrupted",
        "Database page corruption",
        "log block numbers mismatch",
    )
    login_file = "MYSQL_TEST_LOGIN_FILE"
    lock_seconds = LOCK_SECONDS
    hints = _XTRABACKUP_HINTS

    @property
    def moment(self) -> re.Pattern[str] | None:
        """Only of a series before those that keep changes of definitions away."""
        return _MOMENT if self.tool.version < _LOCKS_DDL else None

    @property
    def redo(self) -> str:
        """Its own, of these series."""
        return self.redo_file if self.tool.version < _LOCKS_DDL else ""

    def arguments(self, request: CaptureRequest) -> tuple[str, ...]:
        """Options of this version. The server is asked for its datadir: the manual wants it named wherever no option
        file of the server's is read. Raises ServerError."""
        with request.connection.connect() as session:
            datadir = str(session.scalar("SELECT @@datadir"))
        version = self.tool.version
        known = known_options(self.tool)
        return (f"--datadir={datadir}", *(option.text for option in _OPTIONS if option.is_for(version, known)))

    def groups(self, connection: Connection) -> Groups:
        """The [client] group in this tool's words, and the same as [xtrabackup]. Raises RefusedError."""
        client = {
            name: value
            for name, value in connection.option_groups()["client"].items()
            if name not in ("protocol", "ssl", "ssl-verify-server-cert")
        }
        if connection.host == "localhost":
            client["host"] = "127.0.0.1"  # it knows no --protocol, and takes the name for "the socket"
        mode = ssl_mode(connection)
        if mode and not connection.socket and not (mode == "DISABLED" and self.tool.version < _NO_TLS_BEFORE):
            if self.tool.version < _NO_TLS_BEFORE:
                raise RefusedError(
                    f"{self.tool.name} {self.tool.version} cannot encrypt its connection to {connection.address}",
                    hint="use the server's socket (the tool runs on the server's host), or install a newer release",
                )
            client["ssl-mode"] = mode
        return {"client": client, "xtrabackup": client}

    def _check_logs(self, base: Path, logs: Sequence[str], left_out: LeftOut) -> None:
        check_logs(self.tool, base, logs, silent=self.silent)
        last = [_without_temporary_tables(without_left_out(log, left_out)) for log in logs[-1:]]
        moved = (_MOVED_FILES,) if left_out is nothing else ()
        check_logs(self.tool, base, last, silent=(*_MISSING_TABLES, *moved))

    def _reached(self, base: Path, found: Receipts, wanted: Receipts, logs: Sequence[str]) -> int:
        if found.to_lsn != wanted.to_lsn:
            raise ToolError(
                f"{base} is prepared up to the backup that ends at {found.to_lsn}, not {wanted.to_lsn}",
                hint=f"an increment was left out: {OTHER_BACKUP}",
            )
        reached = _SHUTDOWN.findall(logs[-1]) if logs else []
        if not reached:
            raise ToolError(
                f"{self.tool.name} did not report how far it applied the redo log",
                detail="\n".join(logs[-1].splitlines()[-20:]) if logs else "",
                hint="this version of the tool is not supported",
            )
        return int(reached[-1])


def refuse_encrypted(info: ServerInfo) -> None:
    """Raises RefusedError where tablespaces are encrypted: the tool needs the keys of the server's key store for the
    backup and for its prepare, and nothing here gives them to it. Without, it ends with a stack trace at the first."""
    found = [name for name in info.encrypted if name not in _NO_TABLESPACES]
    if found:
        raise RefusedError(
            f"{len(found)} tablespaces of this server are encrypted, and backupd cannot give xtrabackup their keys: no "
            "physical backup of this server can succeed",
            detail=", ".join(found[:20]) + (" ..." if len(found) > 20 else ""),
            hint="take logical backups of this server (`logical` in its policy, `physical` without a schedule), or "
            "ALTER TABLE ... ENCRYPTION='N'",
        )


def known_options(tool: Tool) -> frozenset[str]:
    """The options that this build knows (``--name``), by its own ``--help``. Raises ToolError when it lists none."""
    return _known_options(tool.path, tool.sha256)


@functools.lru_cache(maxsize=16)
def _known_options(path: str, _sha256: str) -> frozenset[str]:
    done = run(Command((path, "--no-defaults", "--help")), check=False, timeout=30)
    help_text = done.stdout.decode("utf-8", "replace") + "\n" + done.stderr
    known = frozenset(_LISTED.findall(help_text))
    if "--backup" not in known:
        raise ToolError(
            f"{path} --help does not list its options", detail=help_text[-2000:], hint="check that it is xtrabackup"
        )
    return known


def _without_temporary_tables(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "#sql" not in line)
