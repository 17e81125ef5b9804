"""Rows of a folder in the layout of a logical backup into staging schemas of a running server, in parallel.

No client program takes part. Statements go to the server as they are in the files, so that every refusal, warning and
number of rows is known; PyMySQL hands large ones on without a copy.

Unique checks stay on, though tools for dumps turn them off: InnoDB would then let duplicates of damaged data in, and
MariaDB would lock the whole table for the first session, which stops the others that fill it. What that costs, deferred
keys bring back.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import CancelledError, ServerError, UsageError
from backupd.model.job import Progress
from backupd.model.table import DumpedTable, TableName, definition_path
from backupd.process.run_context import RunContext
from restore.cutover.staging_schema import Journal, own_schemas
from restore.cutover.table_load import LeftOutError, Means, RowFile, TableLoad

MOST_WORKERS = 16
_WORKERS = 2
"""Where nobody says how many."""
_TICK = 0.2
_SQL_MODE = "NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION,ALLOW_INVALID_DATES"
"""Zero ids, zero dates and impossible dates come back as they were; an engine that is missing is an error."""
_SETTINGS: Mapping[str, str] = {
    "sql_mode": f"'{_SQL_MODE}'",
    "time_zone": "'+00:00'",
    "foreign_key_checks": "0",
    "unique_checks": "1",
    "check_constraint_checks": "0",
    "system_versioning_insert_history": "1",
    "sql_safe_updates": "0",
    "completion_type": "'NO_CHAIN'",
    "net_read_timeout": "3600",
    "wait_timeout": "604800",
    "max_statement_time": "0",
    "max_execution_time": "0",
    "idle_transaction_timeout": "0",
    "idle_write_transaction_timeout": "0",
}
_PRIVILEGED: Mapping[str, str] = {"sql_require_primary_key": "OFF", "sql_generate_invisible_primary_key": "OFF"}
"""Not every account may set these; without them some tables are refused, with the server's words."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """``rows`` of each loaded table, by the name it had in the source, the history of versioned ones included;
    ``failed``: tables that are not there, and why. ``warnings``: one line each."""

    rows: Mapping[TableName, int]
    warnings: tuple[str, ...]
    failed: Mapping[TableName, str]


def load(
    connection: Connection,
    folder: Path,
    tables: Sequence[DumpedTable],
    staging: Mapping[str, str],
    context: RunContext,
) -> Loaded:
    """Create ``tables`` out of ``folder`` and fill them, each row exactly once.

    ``staging``: the schema to load into for each schema of the source (``stagingschema.staging_names``); they are made
    here, and must be empty or of an earlier attempt. After a kill, a lost connection or a restart of the server the
    same call goes on where that one stopped. Tables have no triggers and no foreign keys. A table that cannot be loaded
    is in ``failed`` and not on the server; the others are loaded.

    Raises ServerError when the server is lost, full or denies everything; RefusedError, BusyError while another call
    loads into the same schemas, CancelledError; nothing is lost by any of them but the last transactions.
    """
    missing = sorted({table.name.schema for table in tables} - set(staging))
    if missing:
        raise UsageError(f"no target schema was given for {', '.join(missing)}")
    if not staging:
        return Loaded({}, (), {})
    job = _Load(replace(connection, answer_timeout=None), folder, staging, context)
    return job.run(tables, min(max(1, context.workers or _WORKERS), MOST_WORKERS))


class _Load:
    def __init__(self, connection: Connection, folder: Path, staging: Mapping[str, str], context: RunContext) -> None:
        self._connection, self._folder, self._staging, self._context = connection, folder, staging, context
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._new: deque[TableLoad] = deque()
        self._open: list[TableLoad] = []
        self._beginning = 0
        self._threads: dict[int, int] = {}
        self._warnings: list[str] = []
        self._bytes = self._total = self._done = self._tables = 0

    def run(self, tables: Sequence[DumpedTable], workers: int) -> Loaded:
        journal = Journal(next(iter(self._staging.values())))
        with self._connection.connect() as session:
            journal.claim(session, MOST_WORKERS)
            try:
                loads = self._load(session, journal, tables, workers)
            finally:
                journal.release(session)
        return Loaded(
            {one.name: one.rows for one in loads if one.done},
            tuple(self._warnings),
            {one.name: one.failure for one in loads if not one.done},
        )

    def _load(
        self, session: Session, journal: Journal, tables: Sequence[DumpedTable], workers: int
    ) -> Sequence[TableLoad]:
        earlier = own_schemas(session, journal, tuple(self._staging.values()))
        settings = settings_of(session)
        means = Means(
            journal,
            earlier,
            settings.statements,
            _transactional(session),
            settings.packet,
            self._moved,
            self._report_progress,
            self._warn,
            self._stopped,
        )
        loads = [
            TableLoad(table, replace(table.name, schema=self._staging[table.name.schema]), self._folder, means)
            for table in tables
        ]
        self._total, self._tables = sum(table.bytes for table in tables), len(tables)
        if settings.folds:
            _refuse_twins(loads)
        # A table may take its values from a sequence, which must be there first.
        sequences = [one for one in loads if is_sequence(self._folder, one.name)]
        for group in (sequences, [one for one in loads if one not in sequences] if sequences else loads):
            self._run_group(session, journal, group, workers)
        return loads

    def _run_group(self, session: Session, journal: Journal, loads: Iterable[TableLoad], workers: int) -> None:
        self._new = deque(sorted((one for one in loads if not one.failure), key=lambda one: -one.source.bytes))
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="load") as pool:
            futures = [pool.submit(self._work, journal, number) for number in range(workers)]
            try:
                self._watch(session, futures)
            finally:
                if not all(future.done() for future in futures):
                    self._end(session)

    def _watch(self, session: Session, futures: Sequence[Future[None]]) -> None:
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_TICK)
            for future in done:
                future.result()  # the first to fail says why; the others only that they were ended
            if self._context.is_cancelled():
                self._end(session)
                wait(waiting)
                raise _cancelled()

    def _end(self, session: Session) -> None:
        """Whoever still works stops, also in the middle of a long statement."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
            threads = dict(self._threads)
        for thread in threads.values():
            with contextlib.suppress(ServerError):  # it has ended, or the server is gone and everything with it
                session.execute(f"KILL {thread}")

    # -- a worker

    def _work(self, journal: Journal, number: int) -> None:
        with self._connection.connect() as session:
            journal.claim_worker(session, number)
            with self._changed:
                self._threads[number] = session.thread_id
            try:
                self._take_turns(session)
            except ServerError:
                if self._context.is_cancelled():
                    raise _cancelled() from None
                raise
            finally:
                with self._changed:
                    del self._threads[number]

    def _take_turns(self, session: Session) -> None:
        table: TableLoad | None = None
        while (turn := self._next(table)) is not None:
            table, file = turn
            try:
                if file is None:
                    self._begin(session, table)
                else:
                    table.load(session, file)
            except LeftOutError as error:
                table.failure = table.failure or str(error)
            self._leave(session, table)

    def _begin(self, session: Session, table: TableLoad) -> None:
        try:
            table.begin(session)
        finally:
            with self._changed:
                self._beginning -= 1
                self._open.append(table)
                self._changed.notify_all()

    def _next(self, own: TableLoad | None) -> tuple[TableLoad, RowFile | None] | None:
        """The next file of the table that this session is at, a table that nobody has begun, or help with the one that
        has most left."""
        with self._changed:
            while not self._stop.is_set():
                helped = max(
                    (one for one in self._open if one.files and one.parallel),
                    key=lambda one: one.remaining,
                    default=None,
                )
                for table in (own, None if self._new else helped):
                    if table is not None and table.files and not table.failure:
                        table.active += 1
                        return table, table.files.popleft()
                if self._new:
                    table = self._new.popleft()
                    table.active += 1
                    self._beginning += 1
                    return table, None
                if not self._beginning:
                    return None
                self._changed.wait(_TICK)
            return None

    def _leave(self, session: Session, table: TableLoad) -> None:
        """The last one at a table ends it."""
        with self._changed:
            table.active -= 1
            if table.failure:
                table.files.clear()
            if table.active or table.files or table not in self._open:
                return
            self._open.remove(table)
        try:
            if not table.failure and not table.done:
                table.finish(session)
        except LeftOutError as error:
            table.failure = str(error)
        if table.failure:
            table.discard(session)
        with self._changed:
            self._done += 1
        self._moved(0)

    # -- what is reported

    def _moved(self, size: int) -> None:
        with self._changed:
            self._bytes += size
        self._report_progress()

    def _report_progress(self, note: str = "") -> None:
        self._context.report(Progress("load", self._bytes, self._total, self._done, self._tables, note))

    def _warn(self, line: str) -> None:
        with self._changed:
            self._warnings.append(line)

    def _stopped(self) -> None:
        if self._stop.is_set() or self._context.is_cancelled():
            raise _cancelled()


def _cancelled() -> CancelledError:
    return CancelledError("the restore was cancelled while loading", hint="the same command continues where it stopped")


@dataclass(frozen=True, slots=True)
class Settings:
    """``statements`` that make a session fit to load with; ``packet``: the largest that it may send; ``folds``: are
    names that differ in case only the same here?"""

    statements: tuple[str, ...]
    packet: int
    folds: bool


def settings_of(session: Session) -> Settings:
    """Raises ServerError."""
    known = {str(name).lower(): str(value) for name, value in session.query("SHOW SESSION VARIABLES")}
    chosen = [f"SESSION {name} = {value}" for name, value in _SETTINGS.items() if name in known]
    statements = ["SET NAMES utf8mb4", f"SET {', '.join(chosen)}"]
    for name, value in _PRIVILEGED.items():
        if known.get(name, value).upper() not in (value, "0"):
            statement = f"SET SESSION {name} = {value}"
            with contextlib.suppress(ServerError):  # the server says so where it matters
                session.execute(statement)
                statements.append(statement)
    return Settings(
        tuple(statements), int(known["max_allowed_packet"]), known.get("lower_case_table_names", "0") != "0"
    )


def _transactional(session: Session) -> frozenset[str]:
    rows = session.query("SELECT ENGINE FROM information_schema.ENGINES WHERE TRANSACTIONS = 'YES'")
    return frozenset(str(engine).upper() for (engine,) in rows)


def is_sequence(folder: Path, name: TableName) -> bool:
    """By its definition in ``folder``."""
    with contextlib.suppress(OSError), (folder / definition_path(name)).open("rb") as file:
        return b"CREATE SEQUENCE" in file.read(1024)
    return False


def _refuse_twins(loads: Sequence[TableLoad]) -> None:
    """Where upper and lower case are the same, two tables may have one name."""
    seen: dict[TableName, TableName] = {}
    for one in loads:
        folded = TableName(one.staged.schema, one.staged.table.casefold())
        first = seen.setdefault(folded, one.name)
        if first != one.name:
            one.failure = f"this server does not distinguish its name from {first.shown}: load it separately"
