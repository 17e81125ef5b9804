"""Percona XtraBackup, for MySQL and Percona Server: its command lines, and what has to be true besides "completed OK!".

Seen with 2.4.4, each time with exit code 0 and "completed OK!" as the last line; every one of them is noticed here or
by ``verify_files``:

* prepare of a backup that was interrupted, or that lost its xtrabackup_checkpoints: it prints "seems not to have
  correct metadata" and goes on. ``prepare`` asks for the receipts first.
* prepare with a missing .ibd: ``verify_files`` before it, a line about the tablespace after it.
* prepare with damaged redo: recovery stops early, and the tool compares with to_lsn only, not with last_lsn.
  ``verify_prepared`` compares the number of the last "Shutdown completed" line.
* copy-back of what was never prepared, or with --apply-log-only only: backup_type must be full-prepared.
* a stream cut between two files: the receipts, written last, are missing.
* an unknown option is ignored by 2.4 and ends later ones: the tool's own ``--help`` tells what it knows.

It shows a password of its command line in the process list, so that stands in the option file, which is the only one
that is read: an [xtrabackup] group of the server's could change the format of the stream, and what the clients keep in
~/.mylogin.cnf would win over our credentials even so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.physical.capture import CaptureRequest, LeftOut, PrepareStep, nothing
from backupd.engine.physical.streaming import (
    StreamingCapture,
    StreamingTool,
    check_chain,
    check_logs,
    prepare_step,
    size_of_redo,
    without_left_out,
)
from backupd.engine.physical.xbstream import Dialect
from backupd.engine.server.backup_files import BACKUP_CNF, ReceiptNames, read_receipts
from backupd.engine.sql.client import Connection, ssl_mode
from backupd.model.errors import OTHER_BACKUP, RefusedError, ToolError, UnrestorableError
from backupd.model.server_facts import Receipts, ServerInfo, Tool, Version
from backupd.process.command import Command
from backupd.process.pipeline import run

REDO = "xtrabackup_logfile"
APPLIED_TYPE = "log-applied"
PREPARED_TYPE = "full-prepared"

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
of InnoDB's the redo log tells."""
_MOMENT = re.compile("Starting to backup non-InnoDB tables")
"""Of a series before: it has the global read lock, and will record the position before it gives it back."""
_NO_TLS_BEFORE = Version(2, 4, 5)

_SILENT_FAILURES = (
    "seems not to have correct metadata",
    "The log was not applied to the intended LSN",
    "The transaction log file is corrupted",
    "Database page corruption",
    "log block numbers mismatch",
)
"""In a prepare's log each of these means: what comes out is not the server at the end of its backup."""
_MISSING_TABLES = ("was not found at", "Could not find a valid tablespace file for")
_MOVED_FILES = "Have you deleted or moved .ibd files"
"""In the log of the last step. Files called #sql... may be missing at the source, too: leftovers of broken DDL."""
_SHUTDOWN = re.compile(r"Shutdown completed; log sequence number (\d+)")
"""2.4 prints it after "InnoDB: ", 8.0 and later after a time stamp and [InnoDB]."""

_HINTS: Mapping[str, str] = {
    "Unable to obtain lock": "statements ran for longer than the backup may wait: SHOW PROCESSLIST names them; take the"
    " backup when they have ended",
    "Lock wait timeout exceeded": "somebody held a lock for longer than the backup may wait: SHOW PROCESSLIST names"
    " them",
    "log has wrapped around": "the server overwrote its redo log before it was copied: raise innodb_log_file_size, or"
    " take the backup while less is written",
    "redo log was overwritten": "the server overwrote its redo log before it was copied: raise"
    " innodb_redo_log_capacity, or take the backup while less is written",
    "Access denied; you need": "grant the account what is named; `backupd check` names each missing privilege",
    "privilege(s) for this operation": "grant the account what is named; `backupd check` names each missing privilege",
    "Access denied": "wrong user or password: look at defaults_file, user and password_file of this server",
    "missing required privilege": "grant the account what is named; `backupd check` names each missing privilege",
    "Can't connect to": "is the server running, and are its socket or host and port right?",
    "gone away": "the server ended while the backup ran: look at its error log",
    "page corruption detected": "a page of the server's own files is damaged: CHECK TABLE the table that is named",
    "seems to be corrupted": "a page of the server's own files is damaged: CHECK TABLE the table that is named",
    "Too many open files": "raise the limit of open files (LimitNOFILE) for the backup service",
    "Unsupported redo log format": "the tool is of another series than the server: install the one that fits",
    "Unsupported server version": "the tool is older than the server: install its newest release of the same series",
    "without redo logging": "DDL ran while the backup was taken; take it again when none runs",
    "error number 13 in a file operation": "the tool must run as a user who may read the server's datadir",
    "Permission denied": "the tool must run as a user who may read the server's datadir",
    "Can't change dir to": "the tool must run on the server's host, as a user who may read its datadir",
    "Please set parameter 'datadir'": "the server did not report its data directory: may the account read @@datadir?",
    "keyring": "the server encrypts tablespaces: the tool needs the same keyring plugin and its keys",
}
"""What the tool prints, and what helps; the first that fits."""


class XtraBackup:
    """The physical tool of MySQL and Percona Server."""

    def __init__(self, tool: Tool, names: ReceiptNames) -> None:
        """``tool``: found by toolset; ``names``: what it calls its receipts."""
        self._tool = tool
        self._made = StreamingTool(
            tool,
            names,
            Dialect.PERCONA,
            arguments=self._arguments,
            groups=self._groups,
            hints=_HINTS,
            login_file="MYSQL_TEST_LOGIN_FILE",
            lock_seconds=LOCK_SECONDS,
            moment=_MOMENT if tool.version < _LOCKS_DDL else None,
            redo=REDO if tool.version < _LOCKS_DDL else "",
        )

    @property
    def tool(self) -> Tool:
        """xtrabackup, of a series that fits the server."""
        return self._tool

    @property
    def leftovers(self) -> tuple[str, ...]:
        """The receipts and the option file."""
        # Not ib_logfile*: prepare makes the redo logs that the server starts with.
        return (BACKUP_CNF, "xtrabackup_*")

    @property
    def takes_increments(self) -> bool:
        """Yes, by the log sequence number."""
        return True

    def capture(self, request: CaptureRequest) -> StreamingCapture:
        """One ``xtrabackup --backup``."""
        return StreamingCapture(self._made, request)

    def prepare(self, base: Path, increments: Sequence[Path] = (), *, memory: int) -> tuple[PrepareStep, ...]:
        """One step for the base and one for each increment, all but the last with ``--apply-log-only``. Raises
        DamagedError."""
        # Without --apply-log-only the last step rolls back what was not committed, and no increment fits any more.
        ready = ("full-backuped", APPLIED_TYPE)
        check_chain(base, increments, redo=REDO, startable=ready if increments else (*ready, PREPARED_TYPE))
        steps: list[PrepareStep] = []
        for number, increment in enumerate((None, *increments)):
            title = f"apply increment {number} of {len(increments)}" if number else "apply the redo log"
            switches = ("--apply-log-only",) if number < len(increments) else ()
            steps.append(prepare_step(self._tool, title, base, increment, memory=memory, switches=switches))
        return tuple(steps)

    def verify_prepared(
        self, base: Path, receipts: Receipts, logs: Sequence[str], *, left_out: LeftOut = nothing
    ) -> None:
        """By the steps' logs, the receipts, and how far the redo log was applied. Raises ToolError,
        UnrestorableError."""
        check_logs(self._tool, base, logs, silent=_SILENT_FAILURES)
        whole = left_out is nothing
        last = [_without_temporary_tables(without_left_out(log, left_out)) for log in logs[-1:]]
        check_logs(self._tool, base, last, silent=(*_MISSING_TABLES, *((_MOVED_FILES,) if whole else ())))
        found = read_receipts(base)
        if found.backup_type != PREPARED_TYPE:
            raise ToolError(
                f"{base} is not prepared: its backup_type is {found.backup_type}, not {PREPARED_TYPE}",
                hint="run the prepare steps again, the last one without --apply-log-only",
            )
        if found.to_lsn != receipts.to_lsn:
            raise ToolError(
                f"{base} is prepared up to the backup that ends at {found.to_lsn}, not {receipts.to_lsn}",
                hint=f"an increment was left out: {OTHER_BACKUP}",
            )
        told = _SHUTDOWN.findall(logs[-1]) if logs else []
        if not told:
            raise ToolError(
                f"{self._tool.name} did not report how far it applied the redo log",
                detail="\n".join(logs[-1].splitlines()[-20:]) if logs else "",
                hint="this version of the tool is not supported",
            )
        reached = int(told[-1])
        if reached < receipts.last_lsn:
            raise UnrestorableError(
                f"{self._tool.name} applied the redo log up to {reached} only; the backup goes to {receipts.last_lsn}",
                [f"{receipts.last_lsn - reached} bytes of redo in {base / REDO} could not be read"],
                hint=f"the redo log of this backup is damaged: {OTHER_BACKUP}",
            )

    def redo_bytes(self, base: Path) -> int:
        """Size of ``xtrabackup_logfile``. Raises ToolError without one."""
        return size_of_redo(base, REDO)

    def _arguments(self, request: CaptureRequest) -> tuple[str, ...]:
        """Options of this version. The server is asked for its datadir: the manual wants it told wherever no option
        file of the server's is read. Raises ServerError."""
        with request.connection.connect() as session:
            datadir = str(session.scalar("SELECT @@datadir"))
        version = self._tool.version
        known = known_options(self._tool)
        return (f"--datadir={datadir}", *(option.text for option in _OPTIONS if option.is_for(version, known)))

    def _groups(self, connection: Connection) -> dict[str, dict[str, str | None]]:
        """The [client] group in this tool's words, and the same as [xtrabackup]. Raises RefusedError."""
        client = {
            name: value
            for name, value in connection.option_groups()["client"].items()
            if name not in ("protocol", "ssl", "ssl-verify-server-cert")
        }
        if connection.host == "localhost":
            client["host"] = "127.0.0.1"  # it knows no --protocol, and takes the name for "the socket"
        mode = ssl_mode(connection)
        if mode and not connection.socket and not (mode == "DISABLED" and self._tool.version < _NO_TLS_BEFORE):
            if self._tool.version < _NO_TLS_BEFORE:
                raise RefusedError(
                    f"{self._tool.name} {self._tool.version} cannot encrypt its connection to {connection.address}",
                    hint="let it use the server's socket, it runs on the server's host anyway; or install a newer one",
                )
            client["ssl-mode"] = mode
        return {"client": client, "xtrabackup": client}


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
    told = done.stdout.decode("utf-8", "replace") + "\n" + done.stderr
    known = frozenset(_LISTED.findall(told))
    if "--backup" not in known:
        raise ToolError(
            f"{path} --help does not list its options", detail=told[-2000:], hint="is this really xtrabackup?"
        )
    return known


def _without_temporary_tables(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "#sql" not in line)
