"""What mydumper says: its log, line by line, and its file ``metadata``, of all versions that are called.

The exit code says little: it was 0 over broken tables in some versions, the number of errors in others, and 1 here
means "some table failed". What counts is said per table:

* 0.10.1, ``-v 3``: one line when a thread begins a table; the same thread's next line comes after it closed that
  table's last file. So of a tool that was killed, too, it is known which tables are complete;
* 0.16 and later: several threads may read one table, so nothing is known of single tables before the end;
* errors name the table as ``schema.table``, without quotes. One that names none that could be meant is trouble of the
  whole run, since the words may be those of a version that is not known;
* without locks of its own, 0.16 and later make a **new connection** when one is lost and read on with it, outside the
  snapshot; a warning is all that is said of it ("Reconnecting due errors", and, where a query could not be begun,
  "Retrying last failed executed statement");
* the end is announced ("Finished dump at"), and ``metadata.partial`` is renamed to ``metadata``.

One run of mydumper: started, its files handed over while it runs, and what became of each table.

A file is complete when mydumper no longer has it open: the folder is listed first and its open files (/proc/PID/fd)
are looked at afterwards, so that a file which is in the list and not open was closed. Each complete file is moved away
before it is looked at and handed over, because mydumper renames the only file of a table after closing it. What was
handed over is not touched again; everything else is gone when the run is left.

mydumper is stopped (SIGSTOP) while too many complete files wait, and when the disk is nearly full and files wait; its
sessions have settings under which they live through that.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from backupd.engine.dump.insert_files import DumpedFile, DumpRequest, inspect, settings
from backupd.engine.server.sandbox import Groups, handed_over, owner_of, worker
from backupd.engine.sql.client import Connection
from backupd.engine.sql.tables import table_names
from backupd.model.errors import CancelledError, RefusedError, ToolError
from backupd.model.server_facts import Tool
from backupd.model.table import TableName
from backupd.process.command import Child, Command, family, stop
from backupd.process.folders import give, is_plain, make_passable
from backupd.process.pipeline import Heard, describe_exit, run

_LINE = re.compile(
    r"(?:\*\* )?(?:\([^()]*\): )?(?P<level>Message|WARNING|CRITICAL|ERROR)(?: \*\*)?: "
    r"(?:\d\d:\d\d:\d\d\.\d+: )?(?P<text>.*)"
)
_THREAD = re.compile(r"Thread (?P<thread>\d+)\b")
_BEGUN = re.compile(
    r"Thread (?P<thread>\d+):? (?:dumping data (?:for|from) )?`(?P<schema>[^`]+)`\.`(?P<table>[^`]+)`(?P<rest>.*)"
)
_READY = "Transactions started, unlocking tables"
_FINISHED = "Finished dump at"
_NO_WRITE = "Couldn't write data to a file"
_OF_TABLE: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"Error dumping table \((?P<name>.+)"), (") data",)),
    (re.compile(r"Could not read data from (?P<name>.+)"), (" to write on ", ":")),
    (re.compile(r"Could not write out (?:data|closing newline) for (?P<name>.+)"), (",",)),
    (re.compile(r"Fail to write on (?:.*/)?(?P<schema>[^./]+)\.(?P<table>[^./]+)(?:\.\d+)*\.sql"), ()),
    (re.compile(r"Error: DB: (?P<schema>.+?) TABLE: (?P<table>.+?) Could not create output file"), ()),
    (re.compile(r"Broken table (?:detected|found).*?: (?P<name>.+)"), ()),
)
"""The name, or all that is from its beginning on; and what may come behind it."""
_A_NAME = re.compile(r"[^\s.,:;()`'\"]+\.[^\s.,:;()`'\"]+")
_OF_SCHEMA = (
    re.compile(r"Error: DB: (?P<schema>.+?) - Could not execute query"),
    re.compile(r"Could not list tables for (?P<schema>.+?):"),
)
_RECONNECTS = "Reconnecting due"
_RETRIES = "Retrying last failed"
_STAYS = ("doesn't exist", "definition has changed")
"""What the server refuses so costs no connection; so what the thread reads afterwards is of its snapshot."""


class DumpLog:
    """Hears each line, from one thread; asked from any. ``wanted``: the tables of the run, what concerns others is of
    no interest. ``whole``: a table is read by one thread in one go (0.10.1)."""

    def __init__(self, wanted: Collection[TableName], *, whole: bool) -> None:
        self._wanted = {f"{name.schema}.{name.table}": name for name in wanted}
        self._schemas: dict[str, list[TableName]] = {}
        for name in wanted:
            self._schemas.setdefault(name.schema, []).append(name)
        self._whole = whole
        self._under_way: dict[str, TableName] = {}
        self._no_write = ""
        self._refused: set[str] = set()
        """Threads whose query was refused, and whose connection stays."""
        self.ready = threading.Event()
        """Every thread has its snapshot."""
        self.finished = False
        self.begun: set[TableName] = set()
        self.ended: set[TableName] = set()
        """Read to the end and written, by the tool's own word."""
        self.failed: dict[TableName, str] = {}
        """In the tool's words."""
        self.errors = 0
        """Those of which is known what they concern, so that they explain an exit code."""
        self.trouble: list[str] = []
        """Errors that name no table, and lost snapshots: nothing of this run can be trusted."""

    def heard(self, line: str) -> None:
        """Take one line of the log; lines that mydumper does not write itself are passed over."""
        match = _LINE.match(line)
        if match is None:
            return
        text = match["text"].strip()
        self._progress(text)
        if match["level"] == "Message":
            if text == _READY:
                self.ready.set()
            elif text.startswith(_FINISHED):
                self.finished = True
        else:
            self._error(text, warning=match["level"] == "WARNING")

    def _progress(self, text: str) -> None:
        thread = _THREAD.match(text)
        if thread is None:
            return
        before = self._under_way.pop(thread["thread"], None)
        if before is not None:
            self.ended.add(before)
        begun = _BEGUN.match(text)
        name = self._wanted.get(f"{begun['schema']}.{begun['table']}") if begun else None
        if begun is None or name is None:
            return
        self.begun.add(name)
        if self._whole and not begun["rest"]:
            self._under_way[thread["thread"]] = name

    def _error(self, text: str, *, warning: bool) -> None:
        if text.startswith(_NO_WRITE):
            self._no_write = text  # the next line names the table
        elif not (self._of_table(text) or self._of_schema(text) or self._of_connection(text) or warning):
            self._distrust(text)

    def _of_table(self, text: str) -> bool:
        found = next(((match, ends) for pattern, ends in _OF_TABLE if (match := pattern.search(text))), None)
        if found is None:
            return False
        match, ends = found
        groups = match.groupdict()
        readings = _readings(groups.get("name") or f"{groups['schema']}.{groups['table']}", ends)
        names = [self._wanted[reading] for reading in readings if reading in self._wanted]
        why = f"{self._no_write}: {text}" if self._no_write and "write out" in text else text
        for name in names:
            self.failed.setdefault(name, why)
        if not names and not _A_NAME.fullmatch(readings[0]):
            self._distrust(text)
            return True
        self.errors += 1
        thread = _THREAD.match(text)
        if thread is not None and any(words in text for words in _STAYS):
            self._refused.add(thread["thread"])
        return True

    def _of_schema(self, text: str) -> bool:
        match = next((match for pattern in _OF_SCHEMA if (match := pattern.search(text))), None)
        if match is None:
            return False
        self.errors += 1
        for name in self._schemas.get(match["schema"], ()):
            self.failed.setdefault(name, text)
        return True

    def _of_connection(self, text: str) -> bool:
        thread = _THREAD.match(text)
        number = thread["thread"] if thread else ""
        if _RECONNECTS in text or (_RETRIES in text and number not in self._refused):
            self._distrust(f"{text}: the rows that it read after that are of a later moment")
            return True
        self._refused.discard(number)
        return _RETRIES in text

    def _distrust(self, text: str) -> None:
        self.errors += 1
        self.trouble.append(text)


def _readings(text: str, ends: Sequence[str]) -> list[str]:
    """Where a name may end that ``text`` begins with, the shortest first: a name may hold what comes behind it, too."""
    at = sorted({match.start() for end in ends for match in re.finditer(re.escape(end), text)})
    return [*(text[:end] for end in at if end), text]


@dataclass(frozen=True, slots=True)
class Metadata:
    """``finished``: the dump came to its end. ``rows``: of each table, told from 0.16 on."""

    finished: bool
    rows: Mapping[TableName, int] = field(default_factory=dict)


_SECTION = re.compile(r"\[(?:`(?P<schema>[^`]+)`\.`(?P<table>[^`]+)`|[^\]]+)\]")


def read_metadata(text: str) -> Metadata:
    """Both formats: the free text of 0.10.1 and the key file of 0.16 and later."""
    rows: dict[TableName, int] = {}
    table: TableName | None = None
    for line in text.splitlines():
        if match := _SECTION.fullmatch(line.strip()):
            table = TableName(match["schema"], match["table"]) if match["schema"] else None
            continue
        key, _, value = (part.strip() for part in line.strip().lstrip("# ").partition("="))
        if table is not None and key == "rows" and value.isdecimal():
            rows[table] = int(value)
    return Metadata(any(line.lstrip("# ").startswith(_FINISHED) for line in text.splitlines()), rows)


WAITING_CHUNKS = 4
"""As many chunks of complete files may wait before mydumper is stopped."""
LITTLE_ROOM = 64 * 1024 * 1024
"""Bytes of the disk below which it is stopped while files wait."""
_LOOK_EVERY = 0.05
_TAIL_LINES = 12
_FILE = re.compile(r"(?P<schema>[^.]+)\.(?P<table>[^.]+)(?:\.\d+)*\.sql")
_BREAKS = frozenset("\r\n\0\u2029")
"""What ends a line in the list of tables to leave out."""
_HINTS = {
    "privilege(s) for this operation": "grant the account the missing privileges; `backupd check` lists them",
    "Access denied": "wrong user or password: check defaults_file, user and password_file of this server",
    "Can't connect": "check that the server is running and that host and port (or the socket) are right",
    "Unknown option": "this program rejected an option that mydumper of its version has: check that it is mydumper",
    "Cannot parse": "this program reads an option in another way than its version of mydumper: is it mydumper?",
    "Too many connections": "the server has no free connection slot: raise max_connections or close idle clients",
    "SSL": "check the ssl-* settings in the defaults file of this server",
    "No space left": "free space on the disk of the spool",
}


class MyDumperRun:
    """See DumpRun. ``arguments``: for a connection, without option file and folders; ``settings``: session
    variables; ``whole``: does this version read each table by one thread in one go?

    mydumper is never root. It writes into a folder of its own, and what it made there is opened only after it was taken
    away from it."""

    def __init__(
        self,
        tool: Tool,
        arguments: Callable[[Connection], Sequence[str]],
        settings: Mapping[str, str],
        request: DumpRequest,
        *,
        whole: bool,
    ) -> None:
        self._tool, self._arguments, self._settings = tool, arguments, settings
        self._request = request
        self._names = {(table.name.schema, table.name.table): table.name for table in request.tables}
        self._log = DumpLog(self._names.values(), whole=whole)
        self._out = request.folder / "out"
        self._stack = contextlib.ExitStack()
        self._command: Command | None = None
        self._program: Heard | None = None
        self._metadata = Metadata(finished=False)
        self._rows: Counter[TableName] = Counter()
        self._faults: dict[TableName, str] = {}
        self._handed = 0
        self._looked_at = 0.0
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._over = False

    # -- life

    def __enter__(self) -> Self:
        request = self._request
        if any(request.folder.iterdir()):
            raise ValueError(f"{request.folder} is not empty")
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._out, ignore_errors=True)
            omit = request.folder / "omit"
            stack.callback(omit.unlink, missing_ok=True)
            self._write_omitted(omit)
            user = worker()
            handed = stack.enter_context(handed_over(request.connection, user, self._option_groups))
            self._out.mkdir(mode=0o700)
            if (owner := owner_of(user)) is not None:
                make_passable(request.folder)
                give(self._out, owner)
                give(omit, owner)
            # Relative to where it begins: it may not be able to come there by any path.
            files = (f"--outputdir={self._out.name}", f"--omit-from-file={omit.name}")
            plain = Command(
                (self._tool.path, f"--defaults-file={handed.options}", *files, *self._arguments(handed.connection)),
                env={"CHARSET": "UTF-8"},  # else names in its log are escaped
                cwd=request.folder,
                user=user,
            )
            try:
                self._command = handed.confined(plain, readable=[request.folder], writable=[self._out])
            except RefusedError:
                self._command = plain
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._over = True
            if self._program is not None:
                self._program.child.send(signal.SIGCONT)  # a stopped process does not end
        self._stack.close()

    def open(self, seconds: float) -> None:
        """Start mydumper, and wait for its line about the snapshots. Raises ToolError with its last lines,
        CancelledError."""
        deadline = time.monotonic() + seconds
        child = self._start()
        while not self._log.ready.wait(0.02):
            self._check_cancel()
            code = child.poll()
            if code is not None:
                self._hear_out()  # small tables: it may have read and written them all, and ended, before we heard it
                if self._log.ready.is_set():
                    return
                raise self._failure(f"{self._tool.name} {describe_exit(code)} before it opened its snapshots")
            if time.monotonic() > deadline:
                stop([child])
                raise self._failure(f"{self._tool.name} did not open its snapshots within {seconds:g} s")

    def pause(self) -> None:
        """Stop the program (SIGSTOP)."""
        self._hold("caller", held=True)

    def resume(self) -> None:
        """Let the program run on, unless too many files wait."""
        self._hold("caller", held=False)

    # -- results

    def files(self) -> Iterator[DumpedFile]:
        """Each file once mydumper has closed it, checked and with our own head. Raises ToolError for anything but a
        plain file, CancelledError, OSError."""
        child = self._running()
        while True:
            self._check_cancel()
            ended = child.poll() is not None
            if ended:
                self._hear_out()
            handed = False
            for written in self._complete(ended=ended):
                self._check_cancel()
                self._balance()
                found = self._take(written)
                if found is not None:
                    handed = True
                    yield found
            if ended:
                return
            self._balance()
            if not handed:
                time.sleep(_LOOK_EVERY)

    def verdicts(self) -> Mapping[TableName, str | None]:
        """By mydumper's log, its exit code, its count of rows and the look at each file. Raises ValueError while it
        runs."""
        code = self._running().poll()
        if code is None:
            raise ValueError("mydumper has not ended yet")
        self._hear_out()
        death = self._death(code)
        return {name: next(self._doubts(name, death), None) for name in self._names.values()}

    # -- how

    def _start(self) -> Child:
        if self._command is None or self._program is not None:
            raise ValueError("a run is entered and opened once")
        program = Heard(self._command, log=self._request.log, on_line=self._heard)
        self._program = self._stack.enter_context(program)
        return program.child

    def _heard(self, line: str) -> None:
        self._log.heard(line)
        if self._request.on_stderr is not None:
            self._request.on_stderr(line)

    def _hear_out(self) -> None:
        """The tool has ended: take in its last words, and what it left."""
        if self._program is not None:
            self._program.voice.finish()
            if self._program.voice.failure is not None:
                raise self._program.voice.failure
        metadata = self._request.folder / "metadata"
        with contextlib.suppress(FileNotFoundError):
            (self._out / metadata.name).rename(metadata)
            self._stack.callback(metadata.unlink, missing_ok=True)
            if is_plain(metadata):
                self._metadata = read_metadata(metadata.read_text(encoding="utf-8", errors="replace"))

    def _complete(self, *, ended: bool) -> list[Path]:
        """Files that nobody writes any more, in the order of their names."""
        try:
            with os.scandir(self._out) as entries:
                there = {entry.inode(): entry.path for entry in entries if entry.name.endswith(".sql")}
        except FileNotFoundError:
            return []
        if not ended:
            for inode in self._open_inodes():
                there.pop(inode, None)
        return [Path(path) for path in sorted(there.values())]

    def _open_inodes(self) -> Iterator[int]:
        device = self._out.stat().st_dev
        for pid in family(self._running().pid):  # it may be in a sandbox
            for number, inode in self._open_files(pid):
                if number == device:
                    yield inode

    def _open_files(self, pid: int) -> Iterator[tuple[int, int]]:
        """Device and inode of each."""
        try:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    status = link.stat()
                    yield status.st_dev, status.st_ino
        except (FileNotFoundError, ProcessLookupError):
            return
        except PermissionError:  # root in a container may not look at another user's process, and that one may
            asked = Command(("find", "-L", f"/proc/{pid}/fd", "-maxdepth", "1", "-printf", "%D %i\n"), user=worker())
            for line in run(asked, check=False).stdout.split(b"\n")[:-1]:
                number, inode = line.split()
                yield int(number), int(inode)

    def _take(self, written: Path) -> DumpedFile | None:
        """Move it away and look at it. None: it is not to be handed over."""
        self._handed += 1
        path = self._request.folder / f"{self._handed:08d}.sql"
        try:
            if not written.lstat().st_size:
                return None  # mydumper removes it itself
            written.rename(path)
        except FileNotFoundError:
            return None  # renamed or removed just now: seen again next time, or never
        if not is_plain(path):
            path.unlink()
            raise ToolError(
                f"{self._tool.name} was to write {written.name}, but that is not a regular file of its user",
                hint="check which process writes into its folder, and that the server is the one that you mean",
            )
        match = _FILE.fullmatch(written.name)
        name = self._names.get((match["schema"], match["table"])) if match else None
        if name is None:
            path.unlink()
            return None
        found = inspect(path)
        if found.fault:
            self._faults.setdefault(name, f"{written.name}: {found.fault}")
            path.unlink()
            return None
        self._rows[name] += found.rows
        head = settings(found.charset) if found.charset else b""
        size = path.stat().st_size - found.head + len(head)
        return DumpedFile(name, path, size, found.rows, head, found.head)

    def _balance(self) -> None:
        """Stop mydumper while too much waits, let it go on when it does not."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_EVERY:
            return
        self._looked_at = now
        waiting = 0
        for path in self._complete(ended=False):
            with contextlib.suppress(FileNotFoundError):
                waiting += path.lstat().st_size
        disk = os.statvfs(self._request.folder)
        full = waiting > 0 and disk.f_bavail * disk.f_frsize < LITTLE_ROOM
        self._hold("files", held=full or waiting > WAITING_CHUNKS * self._request.chunk_bytes)

    def _hold(self, who: str, *, held: bool) -> None:
        with self._lock:
            before = bool(self._held)
            (self._held.add if held else self._held.discard)(who)
            if self._program is not None and not self._over and before is not bool(self._held):
                self._program.child.send(signal.SIGSTOP if self._held else signal.SIGCONT)

    def _death(self, code: int) -> str:
        """Why a table that is not known to be complete is not; empty when the run came to a good end."""
        if not (self._log.finished and self._metadata.finished):
            return f"mydumper {describe_exit(code)} before it finished" + self._last_words()
        if code != 0 and not self._log.errors:
            return f"mydumper {describe_exit(code)} without an error message" + self._last_words()
        return ""

    def _doubts(self, name: TableName, death: str) -> Iterator[str]:
        """Why not every row of the table may have been written, the best reason first."""
        if why := self._log.failed.get(name):
            yield f"mydumper: {why}"
        if why := self._faults.get(name):
            yield f"the file from mydumper is damaged (was the disk full?): {why}"
        if self._log.trouble:
            yield f"mydumper: {self._log.trouble[0]}"
        if death and name not in self._log.ended:
            yield death
        if name not in self._log.begun:
            yield "mydumper did not find it: it was dropped or renamed, or mydumper does not treat it as a table"
        metadata = self._metadata.rows.get(name)
        if metadata is not None and metadata != self._rows[name]:
            yield f"mydumper read {metadata} rows of it but wrote {self._rows[name]}"

    def _failure(self, message: str) -> ToolError:
        if self._program is not None:
            self._program.voice.finish()
        detail = self._said()
        return ToolError(
            message,
            detail=detail,
            hint=next((hint for mark, hint in _HINTS.items() if mark in detail), "see its last lines"),
        )

    def _said(self) -> str:
        return self._program.last_words(_TAIL_LINES) if self._program is not None else ""

    def _last_words(self) -> str:
        said = [line for line in self._said().splitlines() if "Message:" not in line and "no-locks" not in line]
        return f": {said[-1]}" if said else ""

    def _write_omitted(self, path: Path) -> None:
        """Every table of the server that is not wanted. One that cannot be named there is dumped and thrown away, as
        is one that is created after this."""
        with self._request.connection.connect() as session:
            session.execute("SET SESSION sql_select_limit = 18446744073709551615")
            there = sorted(table_names(session))
        lines = [
            f"{name.schema}.{name.table}\n"
            for name in there
            if (name.schema, name.table) not in self._names and not _BREAKS & set(name.schema + name.table)
        ]
        path.touch(mode=0o600)
        path.write_text("".join(lines), encoding="utf-8")

    def _option_groups(self, connection: Connection) -> Groups:
        """Read by the client library in mydumper and, from 0.16 on, as a key file: no switches without a value."""
        groups = connection.option_groups()
        client = groups["client"]
        if client.get("host") == "localhost":
            # The library takes this one name for "the socket", whatever the protocol.
            client |= {"host": "127.0.0.1", "protocol": "tcp"}
        for name, value in client.items():
            client[name] = "1" if value is None else value
        client["init-command"] = "SET SESSION " + ", ".join(f"{name}={value}" for name, value in self._settings.items())
        return groups

    def _check_cancel(self) -> None:
        if self._request.cancel is not None and self._request.cancel.is_set():
            raise CancelledError(f"{self._tool.name} was stopped on request")

    def _running(self) -> Child:
        if self._program is None:
            raise ValueError("the run was not opened")
        return self._program.child
