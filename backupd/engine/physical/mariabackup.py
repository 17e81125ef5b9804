"""mariadb-backup: its command lines, and what has to be true besides its "completed OK!".

Measured with 10.11.19; every point here is a run that ended with exit code 0 and "completed OK!":

* prepare with damaged or cut redo: recovery stops early. ``verify_prepared`` compares where it stopped with
last_lsn. * prepare with a missing .ibd: ``verify_files`` before it, and the tool's "was not found at" line
after it. * prepare with --no-defaults: backup-my.cnf is not read, so page size and system tablespace are
the defaults' (then the exit code is 1 with a misleading text when the page size differs). We name the file.
* backup while Aria tables are renamed: their data is left out (see xbstream). * a stream cut between two
files: the receipts, written last, are missing. * an increment since whose base a table was renamed, and another
one was made by its name while the tool ran: the first one's rows are removed (``put_aside``).

SIGTERM does not end it (blocked); SIGINT and SIGKILL do, and ``Pipeline`` knows.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from backupd.engine.physical.capture import CaptureRequest, LeftOut, PrepareStep, nothing
from backupd.engine.physical.datafiles import put_aside, without_earlier_names
from backupd.engine.physical.streaming import (
    StreamingCapture,
    StreamingTool,
    check_chain,
    check_logs,
    no_redo,
    prepare_step,
    size_of_redo,
    without_left_out,
)
from backupd.engine.physical.xbstream import Dialect
from backupd.engine.server.backup_files import BACKUP_CNF, ReceiptNames, read_receipts
from backupd.model.errors import OTHER_BACKUP, ToolError, UnrestorableError
from backupd.model.server_facts import Receipts, Tool

REDO = "ib_logfile0"
PREPARED_TYPE = "log-applied"

_SILENT_FAILURES = (
    "only scanned up to",
    "when restoring a (partial?) backup",
    "[ERROR]",
    "FATAL ERROR",
    "The log was not applied to the intended LSN",
)
"""In a prepare's log each of these means: what comes out is not the server at the end of its backup."""
HINTS = {
    "Try increasing the innodb_log_file_size": "the server overwrote its redo log before it was copied: raise"
    " innodb_log_file_size, or take the backup while less is written",
    "privilege(s) for this operation": "grant the account what is named; `backupd check` names each missing privilege",
    "Access denied": "wrong user or password: look at defaults_file, user and password_file of this server",
    "missing required privilege": "grant the account what is named; `backupd check` names each missing privilege",
    "aria_read data from": "an Aria table with DATA DIRECTORY or a damaged one: the tool cannot copy it",
    "Database page corruption": "a page of the server's own files is damaged: CHECK TABLE the table that is named",
    "Too many open files": "raise the limit of open files (LimitNOFILE) for the backup service",
    "Can't change dir to": "the tool must run on the server's host, as a user who may read its datadir",
    "Can't open datafile": "of a table with DATA DIRECTORY the tool opens the .isl file in the data directory as if to"
    " write: a service whose unit protects that folder needs it in ReadWritePaths= (systemctl edit backupd)",
    "Permission denied": "the tool must run as a user who may read the server's datadir",
}
"""What the tool prints, and what helps."""
_MOMENT = re.compile(
    "Acquired locks for BACKUP STAGE BLOCK_COMMIT"
    # Series without the line above log this one under the same lock.
    "|Executing FLUSH NO_WRITE_TO_BINLOG ENGINE LOGS"
)
"""From here on it keeps commits and changes of definitions blocked, until it has recorded the position."""
_REDO_HEADER = 0x3000
_CHECKPOINTS = (0x1000, 0x2000)


class MariaBackup:
    """The physical tool of MariaDB servers."""

    def __init__(self, tool: Tool, names: ReceiptNames) -> None:
        """``tool``: found by toolset; ``names``: what it calls its receipts."""
        self._tool = tool
        self._made = StreamingTool(
            tool, names, Dialect.MARIADB, arguments=lambda _request: (), hints=HINTS, moment=_MOMENT
        )

    @property
    def tool(self) -> Tool:
        """mariadb-backup, of the server's series."""
        return self._tool

    @property
    def leftovers(self) -> tuple[str, ...]:
        """The receipts of both families, and the option file."""
        return (BACKUP_CNF, "xtrabackup_*", "mariadb_backup_*")

    @property
    def takes_increments(self) -> bool:
        """Yes, by the log sequence number."""
        return True

    def capture(self, request: CaptureRequest) -> StreamingCapture:
        """One ``mariadb-backup --backup``."""
        return StreamingCapture(self._made, request)

    def prepare(self, base: Path, increments: Sequence[Path] = (), *, memory: int) -> tuple[PrepareStep, ...]:
        """One step for the base and one for each increment; before each of these ``put_aside``. Raises DamagedError."""
        check_chain(base, increments, redo=REDO, startable=("full-backuped", PREPARED_TYPE))
        steps = [prepare_step(self._tool, "apply the redo log", base, None, memory=memory)]
        for number, increment in enumerate(increments, start=1):
            title = f"apply increment {number} of {len(increments)}"
            step = prepare_step(self._tool, title, base, increment, memory=memory)
            steps.append(replace(step, before=partial(put_aside, base, increment)))
        return tuple(steps)

    def verify_prepared(
        self, base: Path, receipts: Receipts, logs: Sequence[str], *, left_out: LeftOut = nothing
    ) -> None:
        """By the steps' logs, the receipts, and how far the redo log was applied. Raises ToolError,
        UnrestorableError."""
        told = [without_left_out(log, left_out) for log in logs]
        if left_out is not nothing:
            told = [without_earlier_names(log, base) for log in told]
        check_logs(self._tool, base, told, silent=_SILENT_FAILURES)
        found = read_receipts(base).backup_type
        if found != PREPARED_TYPE:
            raise ToolError(
                f"{base} is not prepared: its backup_type is {found}, not {PREPARED_TYPE}",
                hint="run the prepare steps again; repeating them is harmless",
            )
        reached = reached_lsn(base)
        if reached < receipts.last_lsn:
            name = self._tool.name
            raise UnrestorableError(
                f"{name} applied the redo log up to {reached} only; the backup goes to {receipts.last_lsn}",
                [f"{receipts.last_lsn - reached} bytes of redo in {base / REDO} could not be read"],
                hint=f"the redo log of this backup is damaged: {OTHER_BACKUP}",
            )

    def redo_bytes(self, base: Path) -> int:
        """Size of ``ib_logfile0``. Raises ToolError without one."""
        return size_of_redo(base, REDO)


def reached_lsn(base: Path) -> int:
    """Up to which log sequence number a prepared backup goes, from its redo file.

    After prepare the file holds nothing but a checkpoint, so its end is the checkpoint's number plus what
    follows the header (16 bytes as a rule). Format since MariaDB 10.8 (log0log.h): "Phys" at 0; two
    checkpoint blocks at 0x1000 and 0x2000, each beginning with the number as 8 bytes, big endian; records
    from 0x3000 on. Raises ToolError.
    """
    path = base / REDO
    try:
        with path.open("rb") as file:
            header = file.read(_REDO_HEADER)
            size = file.seek(0, 2)
    except FileNotFoundError:
        raise no_redo(base, REDO) from None
    if len(header) < _REDO_HEADER or not header.startswith(b"Phys"):
        raise ToolError(f"{path} is not the redo log of a prepared backup", hint="run the prepare steps again")
    checkpoint = max(int(struct.unpack_from(">Q", header, offset)[0]) for offset in _CHECKPOINTS)
    return checkpoint + size - _REDO_HEADER
