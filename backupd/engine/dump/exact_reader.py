"""Our own reader: rows as INSERT statements that bring back every bit, of every kind of table.

No tool of the servers does that: they print FLOAT with six digits, leave out invisible columns or the past of versioned
tables, and cannot name files after some tables. Several sessions read at the same time, each table in one of them, in
the order in which it is in the file, so that an unchanged table gives the same files again. A table that cannot be
read has its reason and stops nothing else.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from typing import Self

from backupd.engine.dump.insert_files import (
    LONG,
    DumpedFile,
    DumpRequest,
    DumpTable,
    RowFiles,
    keeps_transaction_ids,
    reading_of,
    row_pieces,
    row_text,
    unknown_types,
)
from backupd.engine.server.definition_text import Columns, parse_table
from backupd.engine.server.snapshot import Snapshot
from backupd.model.errors import CancelledError, ServerError, ToolError
from backupd.model.server_facts import Position, Tool, Version
from backupd.model.table import TableName

NAME = "backupd"
"""What logical backups name as the tool of tables that were read here."""

_TICK = 0.1
_SETTINGS = (
    "SET SESSION sql_mode = '', time_zone = '+00:00', sql_big_selects = 1",
    "SET SESSION character_set_results = NULL, character_set_connection = binary",
    # The files may have to wait for their destination.
    "SET SESSION net_write_timeout = 31536000, lock_wait_timeout = 60 /*!50708 , max_execution_time = 0 */",
)


@dataclass(frozen=True, slots=True)
class ExactDump:
    """Our own reader as one of the tools that dump tables."""

    @property
    def tool(self) -> Tool:
        """backupd itself, by its installed version; it has no path."""
        text = installed_version("backupd")
        return Tool(NAME, "", Version.parse(text), f"{NAME} {text}")

    def refuses(self, table: DumpTable, columns: Columns) -> str:
        """Only for tables that the server cannot open, types that are not known, and a past kept by transaction ids."""
        if not table.engine:
            return "the server cannot open it"
        if keeps_transaction_ids(columns):
            return "transaction ids version its row history, which no server loads: only physical backups hold it"
        unknown = unknown_types(columns)
        return f"unknown types of its columns: {unknown}" if unknown else ""

    def run(self, request: DumpRequest) -> ExactRun:
        """Connects when it is entered, once for each thread."""
        return ExactRun(request)


class ExactRun:
    """See DumpRun. Connects on entering, so that ``open`` takes milliseconds."""

    def __init__(self, request: DumpRequest) -> None:
        self._request = request
        # Largest first: else one thread may be left alone with it at the end.
        self._waiting = deque(sorted(enumerate(request.tables), key=lambda each: -each[1].size))
        self._sessions: list[Snapshot] = []
        self._threads: list[threading.Thread] = []
        self._done: queue.Queue[DumpedFile | BaseException | None] = queue.Queue(maxsize=2 * request.threads + 2)
        self._verdicts: dict[TableName, str | None] = {}
        self._lost = ""
        self._going = threading.Event()
        self._going.set()
        self._stopped = threading.Event()

    def open(self, seconds: float) -> None:
        """Begin one snapshot after the other; the position is the caller's to know. Raises ServerError, ToolError."""
        deadline = time.monotonic() + seconds
        for session in self._sessions:
            session.open(Position())
            if time.monotonic() > deadline:
                raise ToolError(
                    f"the server needed more than {seconds:g} s to open {len(self._sessions)} snapshots",
                    hint="the server is busy: try again later, or with fewer threads",
                )

    def files(self) -> Iterator[DumpedFile]:
        """Files of all sessions, in the order in which they become complete. Raises CancelledError, OSError,
        ServerError."""
        for number, session in enumerate(self._sessions):
            thread = threading.Thread(target=self._work, args=(session,), name=f"rows-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        running = len(self._threads)
        while running:
            if self._request.cancel is not None and self._request.cancel.is_set():
                raise CancelledError("reading the tables was stopped on request")
            try:
                ready = self._done.get(timeout=_TICK)
            except queue.Empty:
                continue
            if ready is None:
                running -= 1
            elif isinstance(ready, BaseException):
                raise ready
            else:
                yield ready
        for table in self._request.tables:
            self._verdicts.setdefault(table.name, self._lost or "it was not read")

    def verdicts(self) -> Mapping[TableName, str | None]:
        """Also of tables that no session came to: why the last one was lost."""
        return dict(self._verdicts)

    def pause(self) -> None:
        """Every session stops before its next row."""
        self._going.clear()

    def resume(self) -> None:
        """Let all sessions read on."""
        self._going.set()

    def __enter__(self) -> Self:
        try:
            for _ in range(min(self._request.threads, len(self._request.tables))):
                snapshot = Snapshot(self._request.connection)
                self._sessions.append(snapshot)
                for setting in _SETTINGS:
                    snapshot.session.execute(setting)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()

    def _end(self) -> None:
        self._stopped.set()
        self._going.set()
        for session in self._sessions:
            session.session.break_off()
        for thread in self._threads:
            thread.join()
        for session in self._sessions:
            session.session.close()

    # -- in the threads

    def _work(self, session: Snapshot) -> None:
        end: BaseException | None = None
        try:
            while not self._stopped.is_set():
                try:
                    number, table = self._waiting.popleft()
                except IndexError:
                    break
                if not self._take(session, number, table):
                    break
        except BaseException as error:  # noqa: BLE001  not hidden: files() raises it
            end = error
        self._hand_over(end)

    def _take(self, session: Snapshot, number: int, table: DumpTable) -> bool:
        """Read one table and say what became of it. False: the session is of no use any more."""
        try:
            for file in self._read(session, number, table):
                self._hand_over(file)
            changed = session.changed(table.name)
            whole = session.release()
        except ServerError as error:
            reason, usable = error.detail or error.message, _is_whole(session)
        except (OSError, ValueError) as error:
            # Read no further than this: the session is closed.
            reason = str(error) if isinstance(error, ValueError) else f"its file cannot be written: {error}"
            usable = False
        else:
            reason, usable = "its definition was changed while it was read" if changed else "", whole
            if not whole:
                reason = "the server ended the snapshot that it was read in"
        self._verdicts[table.name] = reason or None
        if not usable and not self._lost:
            self._lost = f"it was not read: the session that would have read it was lost ({reason})"
        return usable

    def _read(self, session: Snapshot, number: int, table: DumpTable) -> Iterator[DumpedFile]:
        printed = session.session.query(f"SHOW CREATE TABLE {table.name}")[0][1]
        columns = parse_table(table.name, str(printed)).columns
        reading = reading_of(table.name, columns)
        path = f"{self._request.folder}/{number:06d}"
        with (
            contextlib.closing(session.session.packets(reading.select)) as rows,
            RowFiles(table.name, path, self._request.chunk_bytes, head=reading.head, insert=reading.insert) as files,
        ):
            for row in rows:
                if not self._going.is_set():
                    self._going.wait()
                done = (
                    files.add(row_text(row, reading)) if len(row) < LONG else files.add_long(row_pieces(row, reading))
                )
                if done is not None:
                    yield done
            if (done := files.finish()) is not None:
                yield done

    def _hand_over(self, ready: DumpedFile | BaseException | None) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._done.put(ready, timeout=_TICK)
                return


def _is_whole(session: Snapshot) -> bool:
    """Is it still there, and its snapshot?"""
    try:
        session.session.ping()
        return session.release()
    except ServerError:
        return False
