"""What the physical tools have in common: one run with --stream=xbstream, taken apart as it runs; and the prepare runs,
with what is looked at before and after.

A run is good when the tool exited with 0, its last line ends in "completed OK!", every file of the stream ended, and
the receipts, which it writes last, are there and describe the backup that was asked for. Nothing less is enough: a
stream that is cut between two files looks complete, and the tools exit with 0 over several kinds of trouble.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

from backupd.engine.physical.capture import (
    CaptureRequest,
    CaptureRun,
    Data,
    End,
    FileEvent,
    Hole,
    LeftOut,
    PrepareStep,
    Remove,
    Rename,
    Stock,
    nothing,
)
from backupd.engine.physical.datafiles import Contents, put_aside, swapped
from backupd.engine.physical.imported_tables import existing_tables
from backupd.engine.physical.inventory import Stocktaking, aria_begun
from backupd.engine.physical.live_datadir import LiveData, look_at
from backupd.engine.physical.tablefiles import OF_ENGINE, absent, stem_of, table_of
from backupd.engine.physical.xbstream import Dialect, Doubts, demultiplex, left_out
from backupd.engine.server.backup_files import (
    BACKUP_CNF,
    ReceiptCollector,
    ReceiptNames,
    parse_receipts,
    read_receipts,
)
from backupd.engine.server.sandbox import Groups, can_confine, confine, handed_over, owner_of, worker
from backupd.engine.server_load import LockWatch
from backupd.engine.sql.client import Connection
from backupd.model.errors import (
    OTHER_BACKUP,
    BackupdError,
    CancelledError,
    DamagedError,
    StreamError,
    TablesChangedError,
    ToolError,
    ToolMissingError,
    UnrestorableError,
)
from backupd.model.server_facts import Position, Receipts, Tool
from backupd.process.command import Command
from backupd.process.folders import give
from backupd.process.pipeline import Pipeline

COMPLETED = "completed OK!"
LEFT_OPEN = re.compile(r"Warning: +\d+ files and \d+ streams is left open")
"""What the tool's library prints behind that when it ends, about itself and not about the work."""
_IGNORED = re.compile(r"table was dropped\b.*\bignore the tablespace \S*?([^/\s]+/[^/\s]+)\.ibd")
"""The tool left a table out that it takes for a dropped one; one that was imported just now looks the same to it."""
_VANISHED = re.compile(r"Can't find file: '\./|without redo logging")
"""Printed before a failure, this names a table or partition that was dropped or rebuilt while the tool read it."""
OPEN_FILES = 65536
"""The tools keep every tablespace open while they copy; the system's own limit still holds."""
_FOREIGN = (".qp", ".lz4", ".zst", ".xbcrypt")
"""What xtrabackup appends to names when an option makes it compress or encrypt."""


class StreamingTool(ABC):
    """What the tools have in common (see PhysicalTool), and what differs between them.

    ``redo_file``: the redo log in a backup; ``prepared``: the backup_type once it is prepared, and ``again``: what to
    do where it is not; ``unfinished``: the switches of all steps of a prepare but the last; ``puts_aside``: see
    ``datafiles.put_aside``; ``silent``: in a prepare's log each of these means: what comes out is not the server at the
    end of its backup. ``hints``: what the tool prints, and what helps, the first that fits; ``login_file``: the
    variable that names another file with credentials, which the tool would read on its own; ``lock_seconds``: how long
    it may wait for a lock that stops all writers, None where it takes no such lock."""

    dialect: ClassVar[Dialect]
    leftovers: tuple[str, ...]
    redo_file: ClassVar[str]
    prepared: ClassVar[str]
    again: ClassVar[str]
    unfinished: ClassVar[tuple[str, ...]] = ()
    puts_aside: ClassVar[bool] = False
    silent: ClassVar[tuple[str, ...]]
    hints: ClassVar[Mapping[str, str]]
    login_file: ClassVar[str] = ""
    lock_seconds: ClassVar[float | None] = None
    takes_increments = True

    def __init__(self, tool: Tool, names: ReceiptNames) -> None:
        """``tool``: found by toolset; ``names``: what it calls its receipts."""
        self.tool, self.names = tool, names

    @property
    @abstractmethod
    def moment(self) -> re.Pattern[str] | None:
        """See ``Stocktaking``."""

    @property
    def redo(self) -> str:
        """The redo log to which it leaves all changes of InnoDB's definitions, "" where it follows them itself."""
        return ""

    def arguments(self, request: CaptureRequest) -> tuple[str, ...]:  # noqa: ARG002 - of those that have some
        """The command line after the option file and before the common part. Raises ServerError."""
        return ()

    def groups(self, connection: Connection) -> Groups:
        """The content of the option file. Raises RefusedError."""
        return connection.option_groups()

    def capture(self, request: CaptureRequest) -> StreamingCapture:
        """One ``--backup``."""
        return StreamingCapture(self, request)

    def prepare(self, base: Path, increments: Sequence[Path] = (), *, memory: int) -> tuple[PrepareStep, ...]:
        """One step for the base and one for each increment. Raises DamagedError."""
        ready = ("full-backuped", "log-applied", *(() if increments else (self.prepared,)))
        check_chain(base, increments, redo=self.redo_file, startable=tuple(dict.fromkeys(ready)))
        steps: list[PrepareStep] = []
        for number, increment in enumerate((None, *increments)):
            title = f"apply increment {number} of {len(increments)}" if number else "apply the redo log"
            switches = self.unfinished if number < len(increments) else ()
            step = prepare_step(self.tool, title, base, increment, memory=memory, switches=switches)
            if increment is not None and self.puts_aside:
                step = replace(step, before=partial(put_aside, base, increment))
            steps.append(step)
        return tuple(steps)

    def verify_prepared(
        self, base: Path, receipts: Receipts, logs: Sequence[str], *, left_out: LeftOut = nothing
    ) -> None:
        """By the steps' logs, the receipts, and how far the redo log was applied. Raises ToolError,
        UnrestorableError."""
        self._check_logs(base, logs, left_out)
        found = read_receipts(base)
        if found.backup_type != self.prepared:
            raise ToolError(
                f"{base} is not prepared: its backup_type is {found.backup_type}, not {self.prepared}", hint=self.again
            )
        reached = self._reached(base, found, receipts, logs)
        if reached < receipts.last_lsn:
            raise UnrestorableError(
                f"{self.tool.name} applied the redo log up to {reached} only; the backup goes to {receipts.last_lsn}",
                [f"{receipts.last_lsn - reached} bytes of redo in {base / self.redo_file} could not be read"],
                hint=f"the redo log of this backup is damaged: {OTHER_BACKUP}",
            )

    @abstractmethod
    def _check_logs(self, base: Path, logs: Sequence[str], left_out: LeftOut) -> None:
        """Did every step end well? Raises ToolError, UnrestorableError."""

    @abstractmethod
    def _reached(self, base: Path, found: Receipts, wanted: Receipts, logs: Sequence[str]) -> int:
        """The log sequence number up to which ``base`` goes, whose receipts are ``found``; ``wanted``: of the last
        backup applied. Raises ToolError."""

    def redo_bytes(self, base: Path) -> int:
        """Size of the redo log. Raises ToolError without one."""
        try:
            return (base / self.redo_file).stat().st_size
        except FileNotFoundError:
            raise no_redo(base, self.redo_file) from None


class StreamingCapture(CaptureRun):
    """One ``--backup --stream=xbstream``."""

    def __init__(self, made: StreamingTool, request: CaptureRequest) -> None:
        super().__init__(made.tool, request)
        self._made = made
        self._pipeline: Pipeline | None = None
        self._watch: LockWatch | None = None
        self._last_line = ""
        self._ignored: list[str] = []
        self._vanished = ""
        self._tables: set[str] = set()
        self._doubts = Doubts()
        self._contents = Contents()
        self._stocktaking = Stocktaking(request.connection, made.moment, twice=bool(made.redo))
        self._stock = Stock()
        self._log_tail = ""

    @property
    def log_tail(self) -> str:
        """The last lines of the tool, redacted."""
        if self._pipeline is not None:
            self._log_tail = self._pipeline.stderr_tail(self._program)
        return self._log_tail

    def __enter__(self) -> Self:
        """Start the tool. Raises ToolMissingError, ToolError when it cannot be started, RefusedError where files of
        others lie in the data directory, ServerError, ValueError for a used workdir."""
        request = self._request
        if any(request.workdir.iterdir()):
            raise ValueError(f"{request.workdir} is not empty")
        with request.connection.connect() as session:
            live = look_at(session)
        _allow_open_files()
        # The tool's own: the target must be named although everything goes to stdout, the other gets the receipts.
        target, lsn = folders = request.workdir / "target", request.workdir / "lsn"
        for folder in folders:
            folder.mkdir(mode=0o700)
            if (owner := owner_of(live.reader)) is not None:
                give(folder, owner)
        arguments = tuple(self._made.arguments(request))
        with contextlib.ExitStack() as stack:
            handed = stack.enter_context(handed_over(request.connection, live.reader, self._made.groups))
            argv = (self.tool.path, f"--defaults-file={handed.options}", *arguments, *self._common(target, lsn, live))
            name = self._made.login_file
            plain = Command(argv, env={name: str(handed.folder / "no-such-file")} if name else {}, user=live.reader)
            command = live.reading(plain, handed, folders)
            stack.enter_context(self._stocktaking)
            self._pipeline = Pipeline([command], on_stderr=self._heard, log=request.log, cancel=request.cancel)
            if self._made.lock_seconds is not None:
                self._watch = stack.enter_context(
                    LockWatch(request.connection, self._pipeline.kill, seconds=self._made.lock_seconds)
                )
            stack.enter_context(self._pipeline)
            self._stack = stack.pop_all()
        return self

    def events(self) -> Iterator[FileEvent]:
        """As they come out of the stream; at the end what the tool left out and the server still has. Raises ToolError,
        StreamError, TablesChangedError, CancelledError."""
        if self._pipeline is None:
            raise ValueError("the capture was not entered")
        collector = ReceiptCollector()
        for event in self._stream(self._pipeline):
            if isinstance(event, Data):
                collector.data(event.path, event.payload)
                if event.path.endswith(".MAI") and not event.offset and (begun := aria_begun(event.payload)):
                    self._stocktaking.copied[event.path] = begun
                if event.path == self._made.redo and self._stocktaking.imports is not None:
                    self._stocktaking.imports.redo(event.payload)
            elif isinstance(event, End):
                collector.end(event.path)
                self._note(event.path)
            elif isinstance(event, Remove | Rename):
                if event.path in self._made.names.all:
                    raise StreamError(f"{self.tool.name} took back {event.path}", detail=self.log_tail)
                self._stocktaking.copied.pop(event.path, None)
            self._contents.take(event)
            yield event
            self._stocktaking.pause()
        receipts = self._verified(collector)
        yield from self._complete(receipts.position)
        self._receipts = receipts

    def _complete(self, position: Position) -> Iterator[FileEvent]:
        """What the tool left out and the server still has. Raises StreamError where it left out something and nobody
        knows what there should be, TablesChangedError where its prepare would."""
        stock, contents, doubts = self._stocktaking, self._contents, self._doubts
        stock.settle(position)
        if stock.imports is not None:
            stock.imports.refuse()
        if stock.unread:
            raise TablesChangedError(
                f"a partition was exchanged while the backup ran, and {self.tool.name} does not see DDL after that: "
                f"{', '.join(name.shown for name in stock.unread[:20])} may have their earlier definition in it",
                hint="take the backup when no ALTER TABLE ... EXCHANGE PARTITION runs",
            )
        known = stock.tables is not None and stock.is_whole
        if not known and (doubts.lost or doubts.crossed):
            raise left_out(doubts.lost or doubts.crossed)
        for path in sorted(doubts.withdrawn):
            if not stock.has_owner(path):
                contents.take(Remove(path))
                yield Remove(path)
        tables = stock.due
        renamed = {table_of(stem_of(path)) for path in doubts.renamed if stem_of(path)}
        wrong = dict.fromkeys(absent(tables, contents.paths, contents.renamed))
        wrong |= dict.fromkeys(table for table in tables if table.name in renamed and table.engine.lower() in OF_ENGINE)
        again = {stem_of(path) for path in stock.begun_again}
        if "" in again:
            raise TablesChangedError(
                "system tables were emptied or loaded while the backup ran: "
                + ", ".join(sorted(path for path in stock.begun_again if not stem_of(path))),
                hint="take the backup when no such work runs (mysql_tzinfo_to_sql, for example)",
            )
        wrong |= dict.fromkeys(table for table in tables if table.name in {table_of(stem) for stem in again})
        for table in wrong:
            for event in stock.fetch(table, sorted(contents.paths)):
                contents.take(event)
                yield event
        for path in sorted(contents.paths):  # rows of two times are worse than none
            if stem_of(path) in again and table_of(stem_of(path)) not in stock.fetched:
                contents.take(Remove(path))
                yield Remove(path)
        self._stock = Stock(
            stock.inventory,
            tuple(table for table in wrong if table.name not in stock.fetched),
            tuple(stock.fetched),
            swapped(contents.renamed),
            stock.problem,
            stock.node,
        )

    def stock(self) -> Stock:
        """Empty before the events have ended."""
        return self._stock

    def _note(self, path: str) -> None:
        stem = path.removesuffix(".delta")
        if stem.endswith((".ibd", ".new")):
            self._tables.add(stem.rpartition(".")[0])

    def _stream(self, pipeline: Pipeline) -> Iterator[FileEvent]:
        try:
            for event in demultiplex(pipeline, self._made.dialect, self._doubts):
                if isinstance(event, Data | Hole | End) and event.path.endswith(_FOREIGN):
                    raise StreamError(
                        f"{self.tool.name} compresses or encrypts what it writes: {event.path}",
                        hint="it read other options than those of backupd's option file: check that the program is "
                        "not a wrapper script",
                    )
                yield event
        except ToolMissingError:
            raise
        except ToolError as error:
            hints = self._made.hints
            if self._vanished:
                raise TablesChangedError(
                    f"{error.message}: a table was dropped, renamed or rebuilt while it was read",
                    detail=f"{self._vanished}\n{error.detail}",
                    hint="take the backup when no such statement runs",
                ) from error
            hint = next((hint for mark, hint in hints.items() if mark in error.detail), error.hint)
            raise ToolError(error.message, detail=error.detail, hint=hint) from error
        except CancelledError as error:
            if self._watch is None or not self._watch.expired:
                raise
            raise ToolError(
                f"{self.tool.name} did not get its lock within {self._made.lock_seconds:g} s and was stopped,"
                " because all writers wait behind it",
                detail="\n".join(text for text in (self.log_tail, self._watch.trouble) if text),
                hint="a long statement blocks it: SHOW PROCESSLIST lists it; take the backup when it has ended"
                + ("; kill a FLUSH TABLES that still waits there" if self._watch.trouble else ""),
            ) from error

    def _verified(self, collector: ReceiptCollector) -> Receipts:
        name = self.tool.name
        if not self._last_line.rstrip().endswith(COMPLETED):
            raise ToolError(
                f"{name} exited with 0 but did not print {COMPLETED!r}",
                detail=self.log_tail,
                hint="see its last lines; no part of this backup was kept",
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
            raise StreamError(
                f"{name} made a backup from {receipts.from_lsn} to {receipts.to_lsn}, not since {since}",
                hint="the server is not the one that the backup before it was taken from: take a full backup",
            )
        self._refuse_ignored()
        return receipts

    def _refuse_ignored(self) -> None:
        """Are the tables that the tool left out really gone? One that was dropped and made again is in the stream."""
        doubtful = [name for name in dict.fromkeys(self._ignored) if name not in self._tables]
        if not doubtful:
            return
        with self._request.connection.connect() as session:
            left_out = existing_tables(session, doubtful)
        if left_out:
            raise ToolError(
                f"{self.tool.name} left out {len(left_out)} tables that the server has: {', '.join(left_out[:20])}",
                detail=self.log_tail,
                hint="the tool takes a newly imported table (IMPORT TABLESPACE) for a dropped one until the server's "
                "next checkpoint: take the backup again in a few minutes",
            )

    def _heard(self, line: str) -> None:
        if line.strip() and not LEFT_OPEN.search(line):
            self._last_line = line
        ignored = _IGNORED.search(line)
        if ignored:
            self._ignored.append(ignored[1])
        if not self._vanished and _VANISHED.search(line):
            self._vanished = line.strip()
        self._stocktaking.heard(line)
        if self._watch is not None:
            self._watch.heard(line)
        if self._request.on_stderr is not None:
            self._request.on_stderr(line)

    @property
    def _program(self) -> str:
        return Path(self.tool.path).name

    def _common(self, target: Path, lsn: Path, live: LiveData) -> tuple[str, ...]:
        request = self._request
        argv = [
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
        if live.empty:  # a folder that it may not open would be the end of it
            argv.append(f"--databases-exclude={' '.join(live.empty)}")
        return tuple(argv)


def _allow_open_files() -> None:
    """Who is not root cannot raise this limit himself. It is left as it is where we may not either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if os.geteuid() == 0 and hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, OPEN_FILES))


_MIB = 1024 * 1024


def prepare_step(
    tool: Tool, title: str, base: Path, increment: Path | None, *, memory: int, switches: Sequence[str] = ()
) -> PrepareStep:
    """One run of ``--prepare`` as ``worker``; ``memory`` in bytes. backup-my.cnf is named, because page size and layout
    of the system tablespace stand in it, and nothing but it may be read: ``write_known`` has made it ours."""
    argv = [tool.path, f"--defaults-file={base / BACKUP_CNF}", "--prepare", *switches, f"--target-dir={base}"]
    argv.append(f"--use-memory={max(memory // _MIB, 1)}M")
    if increment is not None:
        argv.append(f"--incremental-dir={increment}")
    plain = Command(tuple(argv), cwd=base, user=worker())
    # The tool renames files from the increment to the base, which two mounts of their own would forbid.
    writable = [base] if increment is None else sorted({base.parent, increment.parent})
    command = confine(plain, writable=writable) if can_confine(tool.path) else plain
    return PrepareStep(title, command, plain)


def check_chain(base: Path, increments: Sequence[Path], *, redo: str, startable: Sequence[str]) -> None:
    """Does each backup of a chain continue the one before it, with its receipts and its redo (a file called
    ``redo``)? ``startable``: what the backup_type of ``base`` may be. Raises DamagedError naming everything that is
    wrong: the tools prepare a backup without its tables, and some apply increments in any order."""
    damages: list[str] = []
    previous: Receipts | None = None
    for folder in (base, *increments):
        wanted = ("incremental",) if previous is not None or folder is not base else tuple(startable)
        try:
            receipts = read_receipts(folder)
        except (StreamError, OSError) as error:
            damages.append(f"{folder}: {error.message if isinstance(error, StreamError) else error}")
            continue
        if receipts.backup_type not in wanted:
            damages.append(f"{folder}: backup_type is {receipts.backup_type}, not {' or '.join(wanted)}")
        if previous is not None and receipts.from_lsn != previous.to_lsn:
            damages.append(f"{folder} continues at {receipts.from_lsn}, the backup before it ends at {previous.to_lsn}")
        if not (folder / redo).is_file():
            damages.append(f"{folder / redo} is missing")
        previous = receipts
    if damages:
        raise DamagedError("this is not a backup that can be prepared", damages, hint=OTHER_BACKUP)


_MISSING = re.compile(r"(?:was not found at|valid tablespace file for) (?P<path>\S+)")
_TWO_NAMES = re.compile(r"`?(?P<schema>[^`/]+)`?[./]`?(?P<file>[^`/]+)`?")


def without_left_out(log: str, left_out: LeftOut) -> str:
    """``log`` of a prepare without the lines that miss a file which was ``left_out``. They name its path, or the table
    as ``schema/table``; a path of another folder stands for the one in the data directory."""
    return "\n".join(line for line in log.splitlines() if not _misses(line, left_out))


def _misses(line: str, left_out: LeftOut) -> bool:
    match = _MISSING.search(line)
    names = _TWO_NAMES.fullmatch("/".join(match["path"].rstrip(".").split("/")[-2:])) if match else None
    return names is not None and left_out(f"{names['schema']}/{names['file']}")


def check_logs(tool: Tool, base: Path, logs: Sequence[str], *, silent: Sequence[str]) -> None:
    """Did every step of a prepare end well by its own words? ``silent``: texts that report trouble over which the
    tool still says "completed OK!". Raises ToolError, UnrestorableError."""
    for log in logs:
        lines = [line for line in log.splitlines() if line.strip() and not LEFT_OPEN.search(line)]
        if not lines or not lines[-1].rstrip().endswith(COMPLETED):
            tail = "\n".join(lines[-20:])
            raise ToolError(f"{tool.name} worked on {base} but did not print {COMPLETED!r}", detail=tail)
        bad = [line for line in lines if any(mark in line for mark in silent)]
        if bad:
            raise UnrestorableError(f"{tool.name} prepared {base}, but not completely", bad[:20], hint=OTHER_BACKUP)


_BAD_DATA = re.compile(r"corrupt|Can't rename|was not found at|may be crashed", re.IGNORECASE)
_ELSEWHERE = re.compile(
    "No space left|errno: 28|allocate|out of memory|Too many open files|Permission denied|crypt|plugin", re.IGNORECASE
)
"""Of a full disk, too little memory, missing rights; without its keys encrypted data looks corrupted, too."""
_COPIED = re.compile(r"\b(?:Copying|Renaming|Removing|Applying) ")


def why_unprepared(error: ToolError, log: str) -> BackupdError:
    """What ``error``, with which a prepare ended, comes to by what the tool has said: UnrestorableError where its data
    was bad, ``error`` itself where something else may have been in the way."""
    lines = [line for line in log.splitlines() if not _COPIED.search(line)]
    bad = [line for line in lines if _BAD_DATA.search(line)]
    if not bad or any(map(_ELSEWHERE.search, lines)):
        return error
    return UnrestorableError(error.message, [*bad[:20], *error.detail.splitlines()], hint=OTHER_BACKUP)


_LAST_BINLOG = re.compile(
    r"Last (?:MySQL )?binlog file (?:(?P<first>\S+), position (?P<pos>\d+)$|position (?:\d+ )?(?P<at>\d+), "
    r"file name (?P<name>\S+))",
    re.MULTILINE,
)


def innodb_position(logs: Sequence[str]) -> Position | None:
    """Up to where in the binary log InnoDB has applied transactions, as the last of ``logs`` (a prepare's) that says
    it says; None where none does. The tools print what InnoDB keeps in its own pages: "Last binlog file
    ./binlog.000001, position 5102864" (MariaDB 10.11), "Last MySQL binlog file position 1234, file name bin.000001"."""
    for log in reversed(logs):
        found = list(_LAST_BINLOG.finditer(log))
        if found:
            last = found[-1]
            return Position(Path(last["first"] or last["name"]).name, int(last["pos"] or last["at"]))
    return None


def no_redo(base: Path, redo: str) -> ToolError:
    """The error for a backup without its redo log."""
    return ToolError(f"{base / redo} is missing: this is not a complete backup", hint=OTHER_BACKUP)
