"""mariadb-backup: its command lines, and what has to be true besides its "completed OK!".

Measured with 10.11.19; every point here is a run that ended with exit code 0 and "completed OK!":

* prepare with damaged or cut redo: recovery stops early. ``verify_prepared`` compares where it stopped with
last_lsn. * prepare with a missing .ibd: ``verify_files`` before it, and the tool's "was not found at" line
after it. * prepare with --no-defaults: backup-my.cnf is not read, so page size and system tablespace are
the defaults' (then the exit code is 1 with a misleading text when the page size differs). We name the file.
* backup while Aria tables are renamed: their data is left out (see xbstream). * a stream cut between two
files: the receipts, written last, are missing.

SIGTERM does not end it (blocked); SIGINT and SIGKILL do, and ``Pipeline`` knows.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from backupd.engine.defaults import read_option_file
from backupd.engine.physical import CaptureRequest, Data, End, FileEvent, PrepareStep, Remove, Rename
from backupd.engine.receipts import (
    BACKUP_CNF,
    ReceiptCollector,
    ReceiptNames,
    parse_receipts,
    read_receipts,
)
from backupd.engine.sandbox import confine, is_available
from backupd.engine.xbstream import Dialect, demultiplex
from backupd.model.errors import DamagedError, StreamError, ToolError, ToolMissingError
from backupd.model.server import Receipts, Tool
from backupd.process.command import Command
from backupd.process.optionfile import option_file
from backupd.process.pipeline import Pipeline

COMPLETED = "completed OK!"
REDO = "ib_logfile0"
PREPARED_TYPE = "log-applied"
OPEN_FILES = 65536
"""The tool keeps every tablespace open while it copies; the system's own limit still holds."""

_MIB = 1024 * 1024
_SILENT_FAILURES = (
    "only scanned up to",
    "when restoring a (partial?) backup",
    "[ERROR]",
    "FATAL ERROR",
    "The log was not applied to the intended LSN",
)
"""In a prepare's log each of these means: what comes out is not the server at the end of its backup."""
_HINTS = {
    "Try increasing the innodb_log_file_size": "the server overwrote its redo log before it was copied: raise"
    " innodb_log_file_size, or take the backup while less is written",
    "Access denied": "wrong user or password: look at defaults_file, user and password_file of this server",
    "missing required privilege": "grant the account what is named; `backupd check` names each missing privilege",
    "aria_read data from": "an Aria table with DATA DIRECTORY or a damaged one: the tool cannot copy it",
    "Database page corruption": "a page of the server's own files is damaged: CHECK TABLE the table that is named",
    "Too many open files": "raise the limit of open files (LimitNOFILE) for the backup service",
    "Can't change dir to": "the tool must run on the server's host, as a user who may read its datadir",
    "Permission denied": "the tool must run as a user who may read the server's datadir",
}
"""What the tool prints, and what helps."""
_REDO_HEADER = 0x3000
_CHECKPOINTS = (0x1000, 0x2000)


class MariaBackup:
    """The physical tool of MariaDB servers."""

    def __init__(self, tool: Tool, names: ReceiptNames, *, runtime: Path | None = None) -> None:
        """``tool``: found by toolset; ``names``: what it calls its receipts; ``runtime``: a private folder
        for option files (default: this process's own)."""
        self._tool = tool
        self._names = names
        self._runtime = runtime

    @property
    def tool(self) -> Tool:
        return self._tool

    @property
    def leftovers(self) -> tuple[str, ...]:
        return (BACKUP_CNF, "xtrabackup_*", "mariadb_backup_*")

    def capture(self, request: CaptureRequest) -> MariaBackupCapture:
        return MariaBackupCapture(self._tool, self._names, request, self._runtime)

    def prepare(self, base: Path, increments: Sequence[Path] = (), *, memory: int) -> tuple[PrepareStep, ...]:
        _check_chain(base, increments)
        steps = [self._step("apply the redo log", base, None, memory)]
        for number, increment in enumerate(increments, start=1):
            steps.append(self._step(f"apply increment {number} of {len(increments)}", base, increment, memory))
        return tuple(steps)

    def verify_prepared(self, base: Path, receipts: Receipts, logs: Sequence[str]) -> None:
        name = self._tool.name
        for log in logs:
            lines = [line for line in log.splitlines() if line.strip()]
            tail = "\n".join(lines[-20:])
            if not lines or not lines[-1].rstrip().endswith(COMPLETED):
                raise ToolError(f"{name} did not end its work on {base} with {COMPLETED!r}", detail=tail)
            bad = [line for line in lines if any(mark in line for mark in _SILENT_FAILURES)]
            if bad:
                raise ToolError(
                    f"{name} prepared {base}, but not completely",
                    detail="\n".join(bad[:20]),
                    hint="fetch the backup again, from another destination if there is one",
                )
        found = read_receipts(base).backup_type
        if found != PREPARED_TYPE:
            raise ToolError(
                f"{base} is not prepared: its backup_type is {found}, not {PREPARED_TYPE}",
                hint="run the prepare steps again; repeating them is harmless",
            )
        reached = reached_lsn(base)
        if reached < receipts.last_lsn:
            raise ToolError(
                f"{name} applied the redo log up to {reached} only; the backup goes to {receipts.last_lsn}",
                detail=f"{receipts.last_lsn - reached} bytes of redo in {base / REDO} could not be read,"
                f" although {name} said {COMPLETED!r}",
                hint="the redo log of this copy is damaged: fetch the backup again, from another destination if there"
                " is one",
            )

    def redo_bytes(self, base: Path) -> int:
        try:
            return (base / REDO).stat().st_size
        except FileNotFoundError:
            raise _no_redo(base) from None

    def _step(self, title: str, base: Path, increment: Path | None, memory: int) -> PrepareStep:
        argv = [
            self._tool.path,
            f"--defaults-file={base / BACKUP_CNF}",
            "--prepare",
            f"--target-dir={base}",
            f"--use-memory={max(memory // _MIB, 1)}M",
        ]
        if increment is not None:
            argv.append(f"--incremental-dir={increment}")
        plain = Command(tuple(argv), cwd=base)
        writable = [base] if increment is None else [base, increment]
        command = confine(plain, writable=writable, readable=key_files(base)) if is_available() else plain
        return PrepareStep(title, command, plain)


class MariaBackupCapture:
    """One ``mariadb-backup --backup --stream=xbstream``, taken apart as it runs."""

    def __init__(self, tool: Tool, names: ReceiptNames, request: CaptureRequest, runtime: Path | None) -> None:
        self.tool = tool
        self._names = names
        self._request = request
        self._runtime = runtime
        self._stack = contextlib.ExitStack()
        self._pipeline: Pipeline | None = None
        self._last_line = ""
        self._receipts: Receipts | None = None
        self._log_tail = ""

    @property
    def log_tail(self) -> str:
        if self._pipeline is not None:
            self._log_tail = self._pipeline.stderr_tail(self._program)
        return self._log_tail

    def __enter__(self) -> Self:
        """Start the tool. Raises ToolMissingError, ToolError when it cannot be started, ValueError for a used
        workdir."""
        request = self._request
        target, lsn = request.workdir / "target", request.workdir / "lsn"
        if any(request.workdir.iterdir()):
            raise ValueError(f"{request.workdir} is not empty")
        for folder in (target, lsn):
            folder.mkdir(mode=0o700)
        with contextlib.ExitStack() as stack:
            options = stack.enter_context(option_file(request.connection.option_groups(), directory=self._runtime))
            self._pipeline = stack.enter_context(
                Pipeline(
                    [self._command(options, target, lsn)], on_stderr=self._heard, log=request.log, cancel=request.cancel
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def events(self) -> Iterator[FileEvent]:
        if self._pipeline is None:
            raise ValueError("the capture was not entered")
        collector = ReceiptCollector()
        for event in self._stream(self._pipeline):
            if isinstance(event, Data):
                collector.data(event.path, event.payload)
            elif isinstance(event, End):
                collector.end(event.path)
            elif isinstance(event, Remove | Rename) and event.path in self._names.all:
                raise StreamError(f"{self.tool.name} took back {event.path}", detail=self.log_tail)
            yield event
        self._receipts = self._verified(collector)

    def receipts(self) -> Receipts:
        if self._receipts is None:
            raise ValueError("the capture has not ended yet")
        return self._receipts

    def _stream(self, pipeline: Pipeline) -> Iterator[FileEvent]:
        try:
            yield from demultiplex(pipeline, Dialect.MARIADB)
        except ToolMissingError:
            raise
        except ToolError as error:
            hint = next((hint for mark, hint in _HINTS.items() if mark in error.detail), error.hint)
            raise ToolError(error.message, detail=error.detail, hint=hint) from error

    def _verified(self, collector: ReceiptCollector) -> Receipts:
        name = self.tool.name
        if not self._last_line.rstrip().endswith(COMPLETED):
            raise ToolError(
                f"{name} exited with 0 but did not say {COMPLETED!r}",
                detail=self.log_tail,
                hint="its last lines tell why; nothing was kept of this backup",
            )
        try:
            receipts = parse_receipts(collector.files)
        except StreamError as error:
            raise StreamError(error.message, detail=self.log_tail, hint=error.hint) from error
        expected = "full-backuped" if self._request.incremental_lsn is None else "incremental"
        if receipts.backup_type != expected:
            raise StreamError(f"{name} made a backup of type {receipts.backup_type}, not {expected}")
        since = self._request.incremental_lsn or 0
        if receipts.from_lsn != since or receipts.to_lsn < since:
            raise StreamError(f"{name} made a backup from {receipts.from_lsn} to {receipts.to_lsn}, not since {since}",
                              hint="the server is not the one that the backup before it was taken from: take a full")
        return receipts

    def _heard(self, line: str) -> None:
        if line.strip():
            self._last_line = line
        if self._request.on_stderr is not None:
            self._request.on_stderr(line)

    @property
    def _program(self) -> str:
        return Path(self.tool.path).name

    def _command(self, options: Path, target: Path, lsn: Path) -> Command:
        request = self._request
        argv = [
            self.tool.path,
            f"--defaults-file={options}",
            "--backup",
            "--stream=xbstream",
            f"--target-dir={target}",
            f"--extra-lsndir={lsn}",
            f"--parallel={max(request.parallel, 1)}",
            f"--open-files-limit={OPEN_FILES}",
        ]
        if request.incremental_lsn is not None:
            argv.append(f"--incremental-lsn={request.incremental_lsn}")
        if request.replica:
            argv.append("--slave-info")
        return Command(tuple(argv))


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
        raise _no_redo(base) from None
    if len(header) < _REDO_HEADER or not header.startswith(b"Phys"):
        raise ToolError(f"{path} is not the redo log of a prepared backup", hint="run the prepare steps again")
    checkpoint = max(int(struct.unpack_from(">Q", header, offset)[0]) for offset in _CHECKPOINTS)
    return checkpoint + size - _REDO_HEADER


def key_files(base: Path) -> tuple[Path, ...]:
    """Files outside of the backup that its key plugin reads, as backup-my.cnf names them."""
    options = read_option_file(base / BACKUP_CNF, ("mysqld", "mariadb", "mariadbd")).options
    named = [
        Path(option.value)
        for option in options
        if option.value and option.name.startswith("file-key-management-") and option.value.startswith("/")
    ]
    return tuple(path for path in named if path.exists())


def _check_chain(base: Path, increments: Sequence[Path]) -> None:
    """The tool prepares a backup without its tables, and increments in the wrong order: look first."""
    damages: list[str] = []
    previous: Receipts | None = None
    for folder in (base, *increments):
        wanted = ("incremental",) if previous is not None else ("full-backuped", PREPARED_TYPE)
        try:
            receipts = read_receipts(folder)
        except (StreamError, OSError) as error:
            damages.append(f"{folder}: {error.message if isinstance(error, StreamError) else error}")
            continue
        if receipts.backup_type not in wanted:
            damages.append(f"{folder}: backup_type is {receipts.backup_type}, not {' or '.join(wanted)}")
        if previous is not None and receipts.from_lsn != previous.to_lsn:
            damages.append(f"{folder} continues at {receipts.from_lsn}, the backup before it ends at {previous.to_lsn}")
        if not (folder / REDO).is_file():
            damages.append(f"{folder / REDO} is missing")
        previous = receipts
    if damages:
        raise DamagedError("this is not a backup that can be prepared", damages, hint="fetch the backup again")


def _no_redo(base: Path) -> ToolError:
    return ToolError(f"{base / REDO} is missing: this is not a complete backup", hint="fetch the backup again")
