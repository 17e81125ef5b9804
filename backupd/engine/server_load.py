"""Who waits for locks on tables, and for how long: the statements that a lock on all tables would wait for, and a limit
to how long a backup tool may keep everybody who writes waiting.

FLUSH TABLES WITH READ LOCK waits for every running statement, and from its first moment all writers wait behind it:
one forgotten SELECT stops the service. xtrabackup waits for as long as it takes (it sets lock_wait_timeout to a year),
and its own limit, --ftwrl-wait-timeout, holds only before the statement is sent. Ending the tool is not enough, since a
server does not notice in that wait that its client has gone; the statement has to be killed, too.

The load of a server, so that a backup can step back: lag of replicas, latency of its disk, the oldest statement of
somebody else. A thread reads the gauges (``PressureWatch``); whoever moves bytes only looks at its last result.

Reported lag is unreliable: NULL means that replication is stopped, and some servers answer 2E16 or less than nothing.
What cannot be known is treated as pressure, never as none.

Of statements only those of other accounts count. Whatever runs under our own account is ours: the tools' SELECTs are
long because tables are large, and to wait for them would be to wait for ourselves. So would it be with a statement that
waits for a lock: an ALTER TABLE that our snapshot keeps waiting begins only when the backup has ended.
"""

from __future__ import annotations

import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from backupd.engine.binlog.statements import effect, masked
from backupd.engine.server.accounts import read_grants
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Connection, Session, is_denied
from backupd.model.binlog import ChangeKind
from backupd.model.errors import BackupdError, ServerError
from backupd.model.table import TableName

_NOT_STATEMENTS = frozenset(
    {
        "sleep",
        "daemon",
        "binlog dump",
        "binlog dump gtid",
        "connect",
        "delayed insert",
        "slave_io",
        "field list",
        "quit",
    }
)
_NO_TABLES = re.compile(r"\s*(?:SELECT|DO)\s+(?:SLEEP|GET_LOCK|\w*WAIT\w*)\s*\([^()]*\)\s*;?\s*", re.IGNORECASE)
_WAITS_FOR_US = re.compile(r"Waiting for (?:global read lock|backup lock|commit lock)", re.IGNORECASE)
_WAITS_FOR_DEFINITION = re.compile(r"Waiting for table metadata lock", re.IGNORECASE)
_SHOWN = 120
_STRUCTURE = frozenset({ChangeKind.CREATE, ChangeKind.ALTER, ChangeKind.DROP})
_ROWS = frozenset({ChangeKind.INSERT, ChangeKind.UPDATE, ChangeKind.DELETE})


@dataclass(frozen=True, slots=True)
class Running:
    """``statement``: its beginning, without secrets. ``seconds`` that it has been at it."""

    id: int
    user: str
    host: str
    schema: str
    seconds: int
    state: str
    statement: str

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (connection {self.id}) since {self.seconds} s: {self.statement}"


@dataclass(frozen=True, slots=True)
class Changing:
    """A statement that changes the definitions of ``tables``, or rebuilds them."""

    by: Running
    tables: tuple[TableName, ...]


def running(session: Session, seconds: float) -> tuple[Running, ...]:
    """Statements that have been running for ``seconds`` or longer, the oldest first. Those that only sleep or wait for
    a lock by name are none, nor are those that themselves wait for a lock on everything. Needs PROCESS to see those of
    other accounts. Raises ServerError."""
    found = [one for one, _text in _statements(session) if one.seconds >= seconds]
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.id)))


def changing(session: Session) -> tuple[Changing, ...]:
    """Statements that alter, create or drop tables just now, as far as their text shows. Raises ServerError."""
    return tuple(_changing(session, lambda _one, kind: kind in _STRUCTURE))


def waiting(session: Session) -> tuple[Changing, ...]:
    """Statements that wait just now until nobody uses a table any more whose definition (or all rows, or name) they
    change, as far as their text shows which. Raises ServerError."""
    return tuple(
        _changing(session, lambda one, kind: kind not in _ROWS and _WAITS_FOR_DEFINITION.match(one.state) is not None)
    )


def _changing(session: Session, counts: Callable[[Running, ChangeKind], bool]) -> Iterator[Changing]:
    for one, text in _statements(session):
        changes = [change for change in effect(text, one.schema).changes if change.name and counts(one, change.kind)]
        if tables := [TableName(change.schema, change.name) for change in changes]:
            yield Changing(one, tuple(tables))


def _statements(session: Session) -> Iterator[tuple[Running, str]]:
    for row in session.records("SHOW FULL PROCESSLIST", shown=True):
        text = row["Info"]
        state = str(row["State"] or "")
        if (
            not text
            or int(row["Id"]) == session.thread_id
            or str(row["Command"]).lower() in _NOT_STATEMENTS
            or _NO_TABLES.fullmatch(str(text))
            or _WAITS_FOR_US.match(state)
        ):
            continue
        shown = " ".join(masked(str(text)).split())
        yield (
            Running(
                id=int(row["Id"]),
                user=str(row["User"]),
                host=str(row["Host"] or "").partition(":")[0],
                schema=str(row["db"] or ""),
                seconds=int(row["Time"] or 0),
                state=state,
                statement=shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ...",
            ),
            str(text),
        )


_SENT = ("Executing FLUSH NO_WRITE_TO_BINLOG TABLES", "Executing FLUSH TABLES WITH READ LOCK")
_STATEMENTS = ("FLUSH NO_WRITE_TO_BINLOG TABLES", "FLUSH TABLES WITH READ LOCK")
_MEANWHILE = ">> log scanned up to"
"""Printed every second by another thread of the tool."""


class LockWatch:
    """Hears the tool's lines; when none follows that of a lock statement for ``seconds``, kills the statement and
    calls ``stop``. A context manager; ``heard`` may be called from any thread."""

    def __init__(self, connection: Connection, stop: Callable[[], None], *, seconds: float) -> None:
        self._connection, self._stop, self._seconds = connection, stop, seconds
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False
        self.expired = False
        """The tool was stopped for this."""
        self.trouble = ""
        """Why the statement could not be killed; empty when it was."""

    def heard(self, line: str) -> None:
        """Take one line of the tool's log: that of a lock statement starts the clock, any other one stops it."""
        if not line.strip(" .") or _MEANWHILE in line:
            return
        with self._lock:
            self._disarm()
            if any(mark in line for mark in _SENT) and not self._closed:
                self._timer = threading.Timer(self._seconds, self._expire)
                self._timer.daemon = True
                self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._closed = True
            self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        with self._lock:
            if self._closed or self._timer is not threading.current_thread():
                return
            self.expired = True
        try:
            kill_lock_statements(self._connection)
        except ServerError as error:
            self.trouble = str(error)
        self._stop()


def kill_lock_statements(connection: Connection) -> int:
    """Kill the account's own FLUSH TABLES statements that still wait; how many there were. Everybody may kill
    connections of his own account. Raises ServerError."""
    with connection.connect() as session:
        # Not out of information_schema: MySQL's has no answer at all while one statement there is no valid UTF-8.
        user = str(session.scalar("SELECT SUBSTRING_INDEX(USER(), '@', 1)"))
        waiting = [
            row["Id"]
            for row in session.records("SHOW PROCESSLIST", shown=True)
            if row["User"] == user and row["Info"] in _STATEMENTS
        ]
        for number in waiting:
            session.execute(f"KILL {int(number)}")
    return len(waiting)


LONGEST_LAG = 366 * 86400
"""Seconds; a replica that claims more is not believed."""
DISKSTATS = Path("/proc/diskstats")


@dataclass(frozen=True, slots=True)
class Reading:
    """``value`` in seconds, None when it cannot be known; ``text``: what was read, or why nothing was."""

    value: float | None
    text: str


class Gauge(Protocol):
    """Something to be read now and then, by one thread."""

    def read(self) -> Reading:
        """Never raises: trouble is an unknown value."""

    def close(self) -> None:
        """Give back what is held open; a later ``read`` opens it again."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Those that can be read, and in ``warnings`` why others cannot."""

    found: tuple[Gauge, ...] = ()
    warnings: tuple[str, ...] = ()


# -- replicas


class SessionGauge(ABC):
    """A gauge that asks a server, and keeps one session open. ``unknown``: what is not known where it does not
    answer."""

    def __init__(self, connection: Connection, unknown: str) -> None:
        self._connection, self._unknown = connection, unknown
        self._session: Session | None = None

    def read(self) -> Reading:
        """What the server answers; unknown where it does not."""
        try:
            if self._session is None:
                self._session = self._connection.connect()
            return self._asked(self._session)
        except BackupdError as error:
            self.close()
            return Reading(None, f"{self._unknown} is unknown: {error.detail or error.message}")

    @abstractmethod
    def _asked(self, session: Session) -> Reading:
        """Raises BackupdError."""

    def close(self) -> None:
        """End the session, if one is open."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


class LagGauge(SessionGauge):
    """How far one replica is behind, on purpose (a configured delay) not counted: see ``lag_of``."""

    def __init__(self, name: str, connection: Connection) -> None:
        super().__init__(connection, f"the lag of {name}")
        self._name = name

    def _asked(self, session: Session) -> Reading:
        return lag_of(self._name, session.records(read_dialect(session).replica_status))


def lag_of(name: str, channels: Sequence[Mapping[str, Any]]) -> Reading:
    """The worst lag of all channels of a replica, from the rows of its replication status."""
    worst = 0.0
    for row in channels:
        behind = row.get("Seconds_Behind_Source", row.get("Seconds_Behind_Master"))
        if behind is None:
            threads = ", ".join(
                f"{key} {row[key]}"
                for key in ("Slave_IO_Running", "Slave_SQL_Running", "Replica_IO_Running", "Replica_SQL_Running")
                if key in row
            )
            return Reading(None, f"the lag of {name} is unknown: replication is stopped ({threads})")
        try:
            lag = float(behind)
        except (TypeError, ValueError):
            lag = -1.0
        if not 0 <= lag <= LONGEST_LAG:
            return Reading(None, f"the lag of {name} is unknown: it reports {str(behind)[:40]} s")
        worst = max(worst, lag - float(row.get("SQL_Delay") or 0))
    if not channels:
        return Reading(None, f"the lag of {name} is unknown: it no longer replicates")
    return Reading(worst, f"{name} is {worst:.0f} s behind")


def lag_gauges(
    name: str,
    connection: Connection,
    followers: Mapping[tuple[str, int], Callable[[], Connection]],
) -> Gauges:
    """What can be known about lag around the server called ``name``: its own as a replica, and that of its replicas.

    A source does not know how far its replicas are. They are asked themselves where they report their address to the
    source (``report_host``) and ``followers`` has a connection for it: only configured servers, since an address that
    somebody claims for himself is no address to log in at. Raises ServerError when the server cannot be asked at all.
    """
    warnings: list[str] = []
    found: list[Gauge] = []
    with connection.connect() as session:
        dialect = read_dialect(session)
        if _ask(session, dialect.replica_status, warnings, "for its own lag as a replica"):
            found.append(LagGauge(name, connection))
        replicas = _ask(session, dialect.replica_hosts, warnings, "for its replicas")
    for row in replicas:
        gauge = _follower(row, followers)
        if isinstance(gauge, str):
            warnings.append(f"limits.replica_lag: the replica {gauge}")
        else:
            found.append(gauge)
    if not found and not warnings:
        warnings.append("limits.replica_lag: the server is not a replica and has no replicas: nothing is watched")
    return Gauges(tuple(found), tuple(warnings))


def _ask(session: Session, statement: str, warnings: list[str], what: str) -> list[dict[str, Any]]:
    try:
        return session.records(statement)
    except ServerError as error:
        if not is_denied(error):
            raise
        warnings.append(f"limits.replica_lag: the account may not ask {what}: {error.detail}")
        return []


def _follower(row: Mapping[str, Any], followers: Mapping[tuple[str, int], Callable[[], Connection]]) -> LagGauge | str:
    """What watches the lag of this replica, or why nothing can."""
    host, port = str(row.get("Host") or ""), int(row.get("Port") or 0)
    if not host:
        number = row.get("Server_Id", row.get("Server_id"))
        return f"with server id {number} does not report its address (report_host), so its lag is not watched"
    connect = followers.get((host, port))
    if connect is None:
        return f"{host}:{port} is not a server of the configuration, so its lag is not watched"
    try:
        return LagGauge(f"{host}:{port}", connect())
    except BackupdError as error:
        return f"{host}:{port} cannot be queried: {error.message}"


# -- the disk


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Since the machine started: finished requests, milliseconds that they took together; and those on their way."""

    requests: int
    milliseconds: int
    in_flight: int


class DiskGauge:
    """Mean time of a request to one block device since the reading before. Reads ``stats``, as /proc/diskstats."""

    def __init__(
        self, device: tuple[int, int], *, stats: Path = DISKSTATS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device, self._stats, self._clock = device, stats, clock
        self._before = disk_counters(_text(stats), device)
        self._seen = clock()

    def read(self) -> Reading:
        """Mean seconds per request since the reading before; where none was finished, how long the oldest has taken."""
        now, counters = self._clock(), disk_counters(_text(self._stats), self._device)
        before, elapsed = self._before, now - self._seen
        self._before, self._seen = counters, now
        where = f"the disk {self._device[0]}:{self._device[1]}"
        if counters is None or before is None or counters.requests < before.requests:
            return Reading(None, f"the latency of {where} is unknown: the kernel no longer counts it")
        requests = counters.requests - before.requests
        if requests:
            value = max(0, counters.milliseconds - before.milliseconds) / requests / 1000
            return Reading(value, f"{where} takes {value * 1000:.0f} ms for a request")
        if before.in_flight and counters.in_flight:
            return Reading(elapsed, f"{where} has finished no request for {elapsed * 1000:.0f} ms")
        return Reading(0.0, f"{where} is idle")

    def close(self) -> None:
        """Nothing is held."""


def disk_counters(stats: str, device: tuple[int, int]) -> DiskCounters | None:
    """The line of ``device`` (major, minor); None without one.

    Its columns: https://www.kernel.org/doc/Documentation/admin-guide/iostats.rst
    """
    for line in stats.splitlines():
        fields = line.split()
        if len(fields) >= 12 and (fields[0], fields[1]) == (str(device[0]), str(device[1])):
            return DiskCounters(int(fields[3]) + int(fields[7]), int(fields[6]) + int(fields[10]), int(fields[11]))
    return None


def disk_gauges(folder: Path, *, stats: Path = DISKSTATS) -> Gauges:
    """A gauge of the device under ``folder`` (a datadir), where this host counts one."""
    try:
        status = folder.stat()
    except OSError as error:
        return _unwatched(f"{folder} is not on this host, so its disk is not watched: {error.strerror}")
    device = os.major(status.st_dev), os.minor(status.st_dev)
    if disk_counters(_text(stats), device) is None:
        return _unwatched(
            f"{folder} is not on a block device that the kernel counts ({device[0]}:{device[1]}), so it is not watched"
        )
    return Gauges((DiskGauge(device, stats=stats),))


def _unwatched(why: str) -> Gauges:
    return Gauges(warnings=(f"limits.disk_latency: {why}",))


def datadir_of(connection: Connection) -> Path:
    """The server's own words. Raises ServerError."""
    with connection.connect() as session:
        return Path(str(session.scalar("SELECT @@GLOBAL.datadir")))


def _text(stats: Path) -> str:
    try:
        return stats.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


_WAITS = re.compile(r"Waiting for .*(?:lock|flush)", re.IGNORECASE)


class QueryGauge(SessionGauge):
    """Seconds that the oldest statement has been running that is not our account's and waits for no lock; none: 0."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, "whether long statements run")

    def _asked(self, session: Session) -> Reading:
        ours = str(session.scalar("SELECT SUBSTRING_INDEX(USER(), '@', 1)"))
        others = [one for one in running(session, 0) if one.user != ours and not _WAITS.match(one.state)]
        if not others:
            return Reading(0.0, "no other session runs a statement")
        return Reading(float(others[0].seconds), f"a statement of {others[0]}")


def query_gauges(connection: Connection) -> Gauges:
    """Raises ServerError when the server cannot be asked at all."""
    with connection.connect() as session:
        sees_all = read_grants(session).allow("PROCESS")
    lacking = "limits.long_queries: without the privilege PROCESS the account sees no statements but its own"
    return Gauges((QueryGauge(connection),)) if sees_all else Gauges(warnings=(lacking,))


INTERVAL_SECONDS = 2.0
STALE_SECONDS = 60.0
"""A gauge that has not answered for so long says nothing any more."""
RESUME = 0.5
"""The share of a limit below which work goes on: at the limit itself it would start and stop all the time."""
_LEAVE_SECONDS = 5.0


class Judge:
    """Compares readings with one limit (seconds, unless ``show`` writes it otherwise), with hysteresis: ``resume`` is
    the share of it below which it is well again."""

    def __init__(self, limit: float, resume: float = RESUME, show: Callable[[float], str] | None = None) -> None:
        self._limit, self._resume, self._show = limit, resume, show or _limit
        self._over = False

    def judge(self, reading: Reading) -> str:
        """Why to wait; empty when there is no reason."""
        if reading.value is None:
            self._over = True
            return reading.text
        bound = self._limit * self._resume if self._over else self._limit
        was, self._over = self._over, reading.value > bound
        if not self._over:
            return ""
        if was and reading.value <= self._limit:
            return f"{reading.text}, more than half of {self._show(self._limit)}"
        return f"{reading.text} > {self._show(self._limit)}"


def _limit(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"


class PressureWatch:
    """A context manager; ``pressure`` may be asked by any thread. All gauges are read once on entering. ``watched``:
    each with who judges it."""

    def __init__(
        self,
        watched: Sequence[tuple[Gauge, Judge]],
        *,
        interval: float = INTERVAL_SECONDS,
        stale: float = STALE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pairs = watched
        self._interval, self._stale, self._clock = interval, stale, clock
        self._reason = ""
        self._read_at = clock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pressure", daemon=True)

    def __enter__(self) -> Self:
        if self._pairs:
            self._look()
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        if self._pairs:
            # A server that hangs may hold the thread; it is a daemon, so it cannot keep the process.
            self._thread.join(_LEAVE_SECONDS)

    @property
    def pressure(self) -> str:
        """Why to wait now; empty when there is no reason."""
        if not self._pairs:
            return ""
        silent = self._clock() - self._read_at
        return self._reason or (f"the server has not answered for {silent:.0f} s" if silent > self._stale else "")

    def _look(self) -> None:
        reasons = [judge.judge(gauge.read()) for gauge, judge in self._pairs]
        self._reason = "; ".join(reason for reason in reasons if reason)
        self._read_at = self._clock()

    def _run(self) -> None:
        try:
            while not self._end.wait(self._interval):
                self._look()
        finally:
            for gauge, _judge in self._pairs:
                gauge.close()
