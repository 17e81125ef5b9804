"""The witness: what the tables held at one moment, to be compared with a restored copy later.

Checksums are CHECKSUM TABLE ... EXTENDED (of tables with virtual columns another sum: ``checksum_statement``)
of user tables in snapshot-reading engines, smallest first, so that a short budget covers as many tables as
it can. Tables of the system schemas are left out: they belong to the server (statistics, positions) and
change by restoring; accounts are counted instead. Tables that no snapshot covers are named with the reason; small ones
of MyISAM and Aria are read as long as the binary log shows that nothing was written (``_Still``). Whatever else the
server holds is noted by kind and name, with a digest of its definition (``_Sight``).

A witness of a backup's own moment needs no second look at the source: mariadb-backup blocks commits for its
last stage, and a snapshot that opens meanwhile belongs to the very position that the backup records.
Measured on 10.11.19 with 2 cores (snapshot opened when the line "Acquired locks for BACKUP STAGE
BLOCK_COMMIT" arrived; file, position and GTID equal to the tool's): 40 of 40 under four sysbench
oltp_write_only clients (2,500 transactions/s), 25 of 25 under four light writers (670 writes/s, MyISAM
among them), 12 of 12 idle. Commits stayed blocked for at least 327 ms, mostly 1 s; opening takes under 1 ms. The
other lines are worse: "Starting BACKUP STAGE BLOCK_COMMIT" comes before the lock (9 of 20, 17 of 25),
"Finishing BACKUP STAGE BLOCK_COMMIT" can come too late (23 of 25).
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Self

from backupd.engine.server.clone_plugin import ANNOUNCEMENT
from backupd.engine.server.probe import read_dialect
from backupd.engine.server.snapshot import Digests, Listing, Snapshot, digests, list_objects, position_now, settled
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.tables import SYSTEM_SCHEMAS, Table, checksum_statement, list_tables
from backupd.model.errors import ServerError
from backupd.model.job import Progress, Report, silent
from backupd.model.proof import Witness
from backupd.model.server_facts import Position
from backupd.model.table import TableName
from backupd.model.text import Clock
from backupd.process.run_context import utc_now

SNAPSHOT_ENGINES = frozenset({"InnoDB", "ROCKSDB"})
_STILL_ENGINES = ("MyISAM", "Aria")
_STILL_BYTES = 32 * 1024 * 1024
"""The largest table that is read without a snapshot: its writers wait meanwhile."""
_COUNT_SECONDS, _STILL_SECONDS = 0.3, 0.6
"""How long rows are counted, and small tables read, while a tool keeps commits blocked: it does not wait for us."""
_BATCH = 50
"""Tables that are read between two looks at the binary log."""
_DEFINITION_SECONDS = 60.0
"""The longest that definitions are read, before and after the moment."""
HELD_LOCKS_SECONDS = 60.0
"""The longest a witness may read where it cannot give back metadata locks: every ALTER TABLE waits for it."""
MAX_HISTORY = 5_000_000
"""Undo records that a witness may make the server keep before it stops reading."""

Include = Callable[[TableName], bool]

_COUNTS = {
    "views": "SELECT COUNT(*) FROM information_schema.VIEWS WHERE TABLE_SCHEMA",
    "triggers": "SELECT COUNT(*) FROM information_schema.TRIGGERS WHERE TRIGGER_SCHEMA",
    "routines": "SELECT COUNT(*) FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA",
    "users": "SELECT COUNT(*) FROM mysql.user WHERE User",
}
_TIME_OVER = frozenset({1969, 3024, 1317})
_NOT_NOW = frozenset({1205, 1213, 1412})
_GONE = frozenset({1146, 1049, 1051})
_CLIENT_ERRORS = range(2000, 3000)
_RELEASE_AFTER = 1.0
"""Seconds after which locks are given back at the latest: DDL waits for them and may deadlock with us."""
_LOOKS_SHARE = 0.1
"""Locks are given back sooner where looking at the tables' ids, needed each time, takes no more than this."""
_MOVED = "renamed or rebuilt after the snapshot"
_LOST = "the server ended the snapshot, as it does to resolve a deadlock with a change of definitions"
_LOOK_AFTER = 5.0


def everything(_table: TableName) -> bool:
    """An Include that takes every user table."""
    return True


@dataclass(slots=True)
class Checksums:
    """``values``: quoted table name to checksum; ``failed``: quoted table name to why there is none; ``rows``: quoted
    table name to its number of rows, where they were counted."""

    values: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


def checksums(session: Session, tables: Iterable[TableName]) -> Checksums:
    """The checksum of each of ``tables``, whatever its engine, as the session sees them.

    A table that is missing or unreadable is in ``failed``. Raises ServerError when the server is gone.
    """
    answer = Checksums()
    for table in tables:
        _add(answer, session, table)
    return answer


def object_counts(session: Session) -> dict[str, int]:
    """How many views, triggers, routines, events (outside the system schemas) and users there are.

    A kind that the account may not look at is missing. Raises ServerError when the server is gone.
    """
    counts: dict[str, int] = {}
    outside = f"NOT IN ({', '.join(['%s'] * len(SYSTEM_SCHEMAS))})"
    events = f"SELECT COUNT(*) FROM {read_dialect(session).events}"  # noqa: S608 - of our own table of statements
    for kind, question in {**_COUNTS, "events": events}.items():
        if rows := session.permitted(f"{question} {outside}", *SYSTEM_SCHEMAS):
            counts[kind] = int(rows[0][0])
    return counts


def take(
    connection: Connection,
    *,
    server: str,
    max_seconds: float,
    include: Include = everything,
    clock: Clock = utc_now,
    report: Report = silent,
) -> Witness:
    """Read a witness now. ``server``: its name with us; ``max_seconds``: the budget, tables beyond it are
    uncovered.

    Nothing waits for it but, where the account lacks BINLOG ADMIN, ALTER TABLE (for HELD_LOCKS_SECONDS at
    most). Raises ServerError.
    """
    with MomentWitness(connection, include=include, clock=clock) as witness:
        witness.open()
        return witness.read(server=server, max_seconds=max_seconds, report=report)


class MomentWitness:
    """A witness whose moment the caller chooses, and which is read afterwards. A context manager; for one thread. All
    of it raises ServerError."""

    def __init__(self, connection: Connection, *, include: Include = everything, clock: Clock = utc_now) -> None:
        self._connection, self._include, self._clock = connection, include, clock
        self._taken_at = clock()
        self._counts: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._snapshot = Snapshot(self._connection)
        try:
            self._counts = object_counts(self._snapshot.session)
            self._sight = _Sight(self._snapshot, self._include)
        except BaseException:
            self._snapshot.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._snapshot.close()

    @property
    def position(self) -> Position:
        """Where it was opened."""
        return self._snapshot.position

    def open(self) -> None:
        """This is the moment."""
        self._taken_at = self._clock()
        self._snapshot.open()
        self._sight.look()

    def read(self, *, server: str, max_seconds: float, report: Report = silent) -> Witness:
        """Read the tables as they were at the moment, for ``max_seconds`` at most."""
        return self._sight.witness(self._counts, self._taken_at, server=server, max_seconds=max_seconds, report=report)


def same_moment(one: Position, other: Position) -> bool:
    """Are both the same position in the same server's binary log? GTID texts may order their domains
    differently.
    """
    return bool(one.file) and (one.file, one.pos) == (other.file, other.pos)


class LockWindowWitness:
    """A witness of the moment that a physical backup records. A context manager around the tool's run.

    Hand each line of the tool's stderr to ``on_stderr``: it only sets a flag, so the tool is never held up;
    a thread of this object opens the snapshot. ``collect`` afterwards reads the tables. A witness that
    cannot be had never costs the backup: nothing here raises, ``problem`` says why. Compare
    ``same_moment(witness.position, receipts position)``; where it is False the witness is still true, of
    its own position.
    """

    _TRIGGER = re.compile(
        r"Acquired locks for BACKUP STAGE BLOCK_COMMIT"
        # Series without the line above log this one under the same lock.
        r"|Executing FLUSH NO_WRITE_TO_BINLOG ENGINE LOGS"
        # CLONE's, whose commits are blocked by us.
        rf"|{re.escape(ANNOUNCEMENT)}"
    )
    _PING_EVERY = 30.0
    _PATIENCE = 60.0

    def __init__(
        self,
        connection: Connection,
        *,
        server: str,
        include: Include = everything,
        clock: Clock = utc_now,
        report: Report = silent,
    ) -> None:
        self.problem = ""
        self._connection, self._server, self._include = connection, server, include
        self._clock, self._report = clock, report
        self._snapshot: Snapshot | None = None
        self._sight: _Sight | None = None
        self._counts: dict[str, int] = {}
        self._taken_at: datetime | None = None
        self._go = threading.Event()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="lock-window-witness", daemon=True)

    @property
    def position(self) -> Position | None:
        """Where the snapshot was opened, as soon as it is."""
        return self._snapshot.position if self._snapshot and self._taken_at else None

    def on_stderr(self, line: str) -> None:
        """Look at one line of the tool's log. Cheap; never raises; any thread."""
        if not self._go.is_set() and self._TRIGGER.search(line):
            self._go.set()

    def collect(self, *, max_seconds: float) -> Witness | None:
        """Read the tables, for ``max_seconds`` at most. None when there is no snapshot: see ``problem``."""
        if self._sight is None:
            return None
        if not self._go.is_set():
            self.problem = self.problem or "the tool did not report that it blocked commits"
            return None
        self._thread.join(self._PATIENCE)
        if self._taken_at is None:
            self.problem = self.problem or f"the snapshot did not open within {self._PATIENCE:.0f} seconds"
            return None
        try:
            return self._sight.witness(
                self._counts, self._taken_at, server=self._server, max_seconds=max_seconds, report=self._report
            )
        except ServerError as error:
            self.problem = f"{error.message}: {error.detail}"
            return None

    def __enter__(self) -> Self:
        try:
            self._snapshot = Snapshot(self._connection)
            self._sight = _Sight(self._snapshot, self._include)
        except ServerError as error:
            self.problem = f"{error.message}: {error.detail}"
        else:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._leave.set()
        self._go.set()
        if self._thread.is_alive():
            self._thread.join(self._PATIENCE)
        if self._snapshot is not None:
            self._snapshot.close()

    def _wait(self) -> None:
        snapshot, sight = self._snapshot, self._sight
        if snapshot is None or sight is None:
            return
        try:
            while not self._go.wait(self._PING_EVERY):
                snapshot.session.ping()  # or a firewall forgets the connection before the tool is there
            if self._leave.is_set():
                return
            snapshot.open()
            self._taken_at = self._clock()
            # DDL is blocked like the commits, so this counts the very moment unless it takes too long.
            self._counts = object_counts(snapshot.session)
            sight.look()
            sight.still.read(_STILL_SECONDS, blocked=True)
        except ServerError as error:
            self._taken_at = None
            self.problem = f"{error.message}: {error.detail}"


class _Sight:
    """What was there at the moment of a snapshot, by kind and name. Made before it; ``look`` right after it opened."""

    def __init__(self, snapshot: Snapshot, include: Include) -> None:
        self._snapshot, self._include = snapshot, include
        self._before = digests(snapshot.session, list_objects(snapshot.session), seconds=_DEFINITION_SECONDS)
        self._listed: Listing | None = None
        self.still = _Still(snapshot, include)

    def look(self) -> None:
        """List what there is: all of it was there at the snapshot where the binary log has not moved since, for each
        change of a definition is in it. Raises ServerError."""
        listed = list_objects(self._snapshot.session)
        self._listed = listed if self.still.is_so() else None

    def definitions(self) -> Digests:
        """Look again, and report what is certain. Raises ServerError."""
        session = self._snapshot.session
        after = digests(session, list_objects(session), seconds=_DEFINITION_SECONDS)
        return settled(self._before, self._listed, after)

    def witness(
        self, counts: Mapping[str, int], taken_at: datetime, *, server: str, max_seconds: float, report: Report
    ) -> Witness:
        """Read the tables, for ``max_seconds`` at most. ``counts``: of objects, at that moment. Raises ServerError."""
        snapshot = self._snapshot
        begun = time.monotonic()
        answer = Checksums()
        wanted: list[Table] = []
        self.still.read(min(_STILL_SECONDS, max_seconds / 4), blocked=False)
        definitions = self.definitions()
        for table in list_tables(snapshot.session):
            if table.is_system or not self._include(table.name):
                continue
            if str(table.name) in self.still.answer.values:
                answer.values[str(table.name)] = self.still.answer.values[str(table.name)]
                continue
            if table.is_sequence:
                answer.failed[str(table.name)] = "a sequence: its value is not part of a snapshot"
            elif table.engine not in SNAPSHOT_ENGINES:
                answer.failed[str(table.name)] = f"engine {table.engine or 'unknown'}: not part of a snapshot"
            else:
                wanted.append(table)
        wanted.sort(key=lambda table: (table.size, table.name))
        _Reading(snapshot, answer, max_seconds, begun).run(wanted, report)
        counted = object_counts(snapshot.session)
        return Witness(
            server=server,
            taken_at=taken_at,
            position=snapshot.position,
            checksums=answer.values,
            uncovered=answer.failed,
            # Definitions are not versioned: a kind whose number moved meanwhile cannot be compared.
            objects={kind: number for kind, number in counts.items() if counted.get(kind) == number},
            seconds=time.monotonic() - begun,
            definitions=definitions,
            version=str(snapshot.session.scalar("SELECT @@GLOBAL.version")),
            rows={name: number for name, number in self.still.counted.items() if name not in answer.values},
        )


class _Still:
    """Small tables of engines without snapshots, read while the binary log is where the snapshot saw it: so nobody
    changed them since. A server that leaves schemas out of its log says nothing by that."""

    def __init__(self, snapshot: Snapshot, include: Include) -> None:
        self._snapshot = snapshot
        tables = [table for table in list_tables(snapshot.session) if table.engine in _STILL_ENGINES]
        wanted = [one for one in tables if not (one.is_system or one.is_sequence) and include(one.name)]
        self._tables = sorted(wanted, key=lambda table: (table.size, table.name))
        self._rows_logged = str(snapshot.session.scalar("SELECT @@GLOBAL.binlog_format")) == "ROW"
        self._is_logged = self._can_be_logged()
        self.counted: dict[str, int] = {}
        self.answer = Checksums()

    def _can_be_logged(self) -> bool:
        try:
            status = self._snapshot.session.records(self._snapshot.dialect.binlog_status)
        except ServerError as error:
            if not is_denied(error):
                raise
            return False
        return bool(status) and not any(status[0].get(f"Binlog_{kind}_DB") for kind in ("Do", "Ignore"))

    def is_so(self) -> bool:
        """Has nothing been written since the snapshot, for certain? Raises ServerError."""
        return self._is_logged and same_moment(
            self._snapshot.position, position_now(self._snapshot.session, self._snapshot.dialect)
        )

    def read(self, seconds: float, *, blocked: bool) -> None:
        """For ``seconds`` at most. ``blocked``: somebody keeps commits blocked right now. Raises ServerError."""
        if not self._tables or not self.is_so():
            return
        with self._snapshot.session.connection.connect() as session:
            session.execute("SET SESSION lock_wait_timeout = 1")
            end = time.monotonic() + seconds
            wanted = [table for table in self._tables if str(table.name) not in self.answer.values | self.counted]
            if not self._sweep(session, wanted, self._count, min(end, time.monotonic() + _COUNT_SECONDS), blocked):
                return
            small = [
                table
                for table in self._tables
                if table.size <= _STILL_BYTES and str(table.name) not in self.answer.values
            ]
            self._sweep(session, small, partial(self._checksum, end), end, blocked)

    def _sweep(
        self,
        session: Session,
        tables: Iterable[Table],
        ask: Callable[[Session, Table], Checksums],
        end: float,
        blocked: bool,
    ) -> bool:
        """``ask`` about the tables until ``end``; an answer counts when nothing was written before the log was looked
        at again. False: something was written."""
        waiting = iter(tables)
        while batch := list(itertools.islice(waiting, _BATCH)):
            answers = []
            for table in batch:
                if time.monotonic() >= end:
                    break
                answers.append((ask(session, table), self._may_count(session, table, blocked)))
            if not self.is_so():
                return False
            for answer, certain in answers:
                if certain:
                    self.answer.values.update(answer.values)
                    self.counted.update(answer.rows)
            if time.monotonic() >= end:
                break
        return True

    def _count(self, session: Session, table: Table) -> Checksums:
        try:
            return Checksums(rows={str(table.name): int(session.scalar(f"SELECT COUNT(*) FROM {table.name}"))})  # noqa: S608 - a quoted name
        except ServerError:
            session.ping()
            return Checksums()

    def _checksum(self, end: float, session: Session, table: Table) -> Checksums:
        found = Checksums()
        limited = partial(self._snapshot.dialect.limited, seconds=end - time.monotonic())
        _add(found, session, table.name, limited)
        return found

    def _may_count(self, session: Session, table: Table, blocked: bool) -> bool:
        """A transaction that also changed InnoDB may log what it wrote to such a table with its end only: then the file
        shows whether somebody wrote to it since the snapshot, or nothing does."""
        if blocked or self._rows_logged:
            return True
        opened = self._snapshot.opened_at
        moved = session.scalar(
            "SELECT UPDATE_TIME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
            table.name.schema,
            table.name.table,
        )
        return table.engine == "MyISAM" and moved is not None and opened is not None and moved < opened


class _Reading:
    """Reads tables in a snapshot until the budget is spent or the server's history grows too long."""

    def __init__(self, snapshot: Snapshot, answer: Checksums, max_seconds: float, begun: float) -> None:
        self.snapshot, self.answer = snapshot, answer
        self.budget = min(max_seconds, HELD_LOCKS_SECONDS) if snapshot.holds_locks else max_seconds
        self.end = begun + self.budget
        self.released = self.looked = begun
        self.look_seconds = 0.0
        self.unsettled: list[Table] = []
        self.moved = self._look()

    def run(self, tables: list[Table], report: Report) -> None:
        bytes_total = sum(table.size for table in tables)
        bytes_done = 0
        stopped = ""
        for number, table in enumerate(tables):
            stopped = stopped or self._why_stop()
            if stopped:
                self.answer.failed[str(table.name)] = stopped
                continue
            report(Progress("witness", bytes_done, bytes_total, number, len(tables), note=str(table.name)))
            stopped = self._checksum(table)
            bytes_done += table.size
        self._settle()

    def _checksum(self, table: Table) -> str:
        """Read one table. Returns why no other can be read, empty as a rule."""
        name, values = table.name, self.answer.values
        self.unsettled.append(table)
        try:
            left = self.end - time.monotonic()
            limited = partial(self.snapshot.dialect.limited, seconds=left)
            _add(self.answer, self.snapshot.session, name, limited, over=self._time_over())
            if str(name) in values and table.engine == "InnoDB" and self.moved(name):
                self._reject(name, _MOVED)
            elif str(name) in values and self.snapshot.changed(name):
                renamed = table.engine == "InnoDB" and self._look()(name)
                self._reject(name, _MOVED if renamed else "its definition changed after the snapshot")
        except ServerError as error:
            if error_code(error) in _CLIENT_ERRORS or not error_code(error):
                raise
            self._reject(name, error.detail)
        pause = min(_RELEASE_AFTER, self.look_seconds / _LOOKS_SHARE)
        due = str(name) not in values or time.monotonic() - self.released >= pause
        return self._settle() if due else ""

    def _settle(self) -> str:
        """Keep what was read since the last time if the snapshot still is and names mean the same tables.

        Returns why nothing more can be read, empty as a rule.
        """
        moved = self._look()
        lost = "" if self.snapshot.release() else _LOST
        for table in self.unsettled:
            if str(table.name) in self.answer.values and (lost or (table.engine == "InnoDB" and moved(table.name))):
                self._reject(table.name, lost or _MOVED)
        self.unsettled.clear()
        self.moved, self.released = moved, time.monotonic()
        return lost

    def _reject(self, table: TableName, why: str) -> None:
        self.answer.values.pop(str(table), None)
        self.answer.failed[str(table)] = why

    def _look(self) -> Callable[[TableName], bool]:
        begun = time.monotonic()
        moved = self.snapshot.moved()
        self.look_seconds = time.monotonic() - begun
        return moved

    def _why_stop(self) -> str:
        now = time.monotonic()
        if now >= self.end:
            return self._time_over()
        if now - self.looked >= _LOOK_AFTER:
            self.looked = now
            rows = self.snapshot.session.query("SHOW GLOBAL STATUS LIKE 'Innodb_history_list_length'")
            if rows and int(rows[0][1]) > MAX_HISTORY:
                return f"the server's history list grew over {MAX_HISTORY} entries"
        return ""

    def _time_over(self) -> str:
        why = f"not reached within {self.budget:.0f} seconds"
        if self.snapshot.holds_locks and self.budget == HELD_LOCKS_SECONDS:
            needed = self.snapshot.dialect.binlog_session_privilege
            why += f", the limit for an account without {needed}, whose reading makes ALTER TABLE wait"
        return why


def _add(
    answer: Checksums, session: Session, table: TableName, limited: Callable[[str], str] = str, *, over: str = ""
) -> None:
    name = str(table)
    try:
        value = session.query(limited(checksum_statement(session, table)))[0][-1]
        if value is None:
            warnings = session.query("SHOW WARNINGS")
            code, text = (int(warnings[-1][1]), str(warnings[-1][2])) if warnings else (0, "no checksum")
            answer.failed[name] = "dropped or renamed since" if code in _GONE else text
        else:
            answer.values[name] = int(value)
    except ServerError as error:
        code = error_code(error)
        if code in _TIME_OVER:
            answer.failed[name] = over or error.detail
        elif code in _NOT_NOW | _GONE or is_denied(error):
            answer.failed[name] = error.detail
        else:
            raise
