"""Hosts with this catalog: their names, which jobs are addressed to, and which service acts.

Who is on watch: of all services that know this catalog, one is the leader, and acts. The others refuse, or stand by.

For SQLite a lock on a file beside the catalog; the kernel drops it when its process dies. For PostgreSQL an advisory
lock of a session kept open for nothing else; the server drops it with the session, and probes the connection, so that
it notices within half a minute when the other host is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from io import TextIOWrapper
from pathlib import Path

from sqlalchemy import Column, Connection, String, Table, delete, func, insert, or_, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from backupd.catalog.database import Database, Rows
from backupd.catalog.jobs import OPEN, readdress
from backupd.catalog.row_mapping import UtcTime, first_record, metadata, records, row_of
from backupd.catalog.tables.jobs import jobs
from backupd.model.document import HIDDEN, Document
from backupd.model.errors import CatalogError, RefusedError, unknown
from backupd.model.job import HOST, JobState

hosts = Table(
    "hosts",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("identity", String(64), nullable=False),
    Column("known_since", UtcTime, nullable=False),
    Column("served_at", UtcTime),
)

_LONGEST = 57
SERVED = timedelta(minutes=5)
"""A host whose service has not reported for longer has none."""


@dataclass(frozen=True, slots=True)
class Host(Document):
    """``identity``: 32 hex digits, drawn once on the machine; ``served_at``: when a service there last reported, by the
    database's clock, None where none ever did."""

    name: str
    identity: str
    known_since: datetime
    served_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class KnownHost(Document):
    """``since``: when it was recorded; ``served_at``: as of ``Host``; ``served``: does a service run there now;
    ``jobs``: how many wait for it or run there."""

    name: str
    identity: str = field(metadata=HIDDEN)
    since: datetime
    served_at: datetime | None
    served: bool
    jobs: int


class Hosts(Rows):
    """Hosts, by name and by identity."""

    def join(self, name: str, identity: str, now: datetime, *, named: bool, leads: bool = False) -> str:
        """Record this machine; gives the name that it has in the catalog.

        ``named``: the configuration gives the name; without, a host keeps the one that it had at first, because a
        container has a new host name after each start. ``leads``: its service is the one that acts, so that it takes
        the name, and the jobs that wait for its former one, whoever had it. A command does neither while a service
        serves that name: of a pair of hosts with one configured name it uses the name, and a machine that is only
        called like another one gets another name.
        """
        recorded = select(hosts).where(hosts.c.identity == identity)
        mine = self._record(Host, recorded)
        if mine is not None and (mine.name == name or not named):
            return mine.name
        with self._database.write() as connection:
            if not self._database.sqlite:  # two threads of a service that begins may come here at once
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _NAMING})
            mine = first_record(connection, Host, recorded)
            if mine is not None and (mine.name == name or not named):
                return mine.name
            clock = self._database.clock(connection, now)
            other = first_record(connection, Host, select(hosts).where(hosts.c.name == name))
            if not leads and mine is not None and _is_served(mine, clock):
                return mine.name  # its service renames it when it reads its configuration
            if not leads and other is not None and other.identity != identity and _is_served(other, clock):
                if named:
                    return name
                name = f"{name[:_LONGEST]}-{identity[:6]}"
            connection.execute(delete(hosts).where(or_(hosts.c.name == name, hosts.c.identity == identity)))
            connection.execute(insert(hosts).values(row_of(hosts, Host(name, identity, now))))
            if mine is not None:
                readdress(connection, f"{HOST}{mine.name}", f"{HOST}{name}")
        return name

    def serves(self, name: str, now: datetime) -> None:
        """The service of this host reports."""
        with self._database.write() as connection:
            clock = self._database.clock(connection, now)
            connection.execute(update(hosts).where(hosts.c.name == name).values(served_at=clock))

    def stops(self, name: str) -> None:
        """The service of this host has ended: nobody serves it from now on."""
        self._do(update(hosts).where(hosts.c.name == name).values(served_at=None))

    def served(self, now: datetime) -> frozenset[str]:
        """Names of the hosts on which a service runs, as far as the catalog knows."""
        with self._database.read() as connection:
            clock = self._database.clock(connection, now)
            return frozenset(one.name for one in records(connection, Host, select(hosts)) if _is_served(one, clock))

    def take_over(self, name: str, now: datetime) -> tuple[str, ...]:
        """Queued jobs that wait for a host on which no service runs any more wait for ``name``; gives what they were
        addressed to."""
        served = {f"{HOST}{one}" for one in (name, *self.served(now))}
        with self._database.write() as connection:
            queued = select(jobs.c.runs_on).where(jobs.c.state == str(JobState.QUEUED)).distinct()
            found = sorted(set(connection.scalars(queued)) - served)
            for before in found:
                readdress(connection, before, f"{HOST}{name}")
        return tuple(found)

    def all(self, now: datetime) -> tuple[KnownHost, ...]:
        """Every host, by name."""
        with self._database.read() as connection:
            clock = self._database.clock(connection, now)
            found = records(connection, Host, select(hosts).order_by(hosts.c.name))
            return tuple(
                KnownHost(
                    one.name,
                    one.identity,
                    one.known_since,
                    one.served_at,
                    _is_served(one, clock),
                    _open_jobs(connection, one.name),
                )
                for one in found
            )

    def forget(self, name: str, now: datetime) -> None:
        """Forget a host that is no more. Raises NotFoundError, and RefusedError where a service runs there or jobs wait
        for it."""
        with self._database.write() as connection:
            found = first_record(connection, Host, select(hosts).where(hosts.c.name == name))
            if found is None:
                raise unknown("host", name, lists="hosts")
            if _is_served(found, self._database.clock(connection, now)):
                raise RefusedError(
                    f"a service runs on host {name}",
                    hint=f"stop it there first; one that was killed counts for {SERVED.seconds // 60} minutes more",
                )
            if waiting := _open_jobs(connection, name):
                raise RefusedError(
                    f"{waiting} jobs wait for host {name} or run there",
                    hint="the service that runs takes over those that are queued; `backupd jobs` lists them, `backupd "
                    "jobs cancel ID` ends one",
                )
            connection.execute(delete(hosts).where(hosts.c.name == name))


def _open_jobs(connection: Connection, host: str) -> int:
    """How many jobs that are not over are addressed to this host."""
    here = jobs.c.runs_on == f"{HOST}{host}", jobs.c.state.in_([str(state) for state in OPEN])
    return connection.execute(select(func.count()).where(*here)).scalar_one()


def _is_served(host: Host, clock: datetime) -> bool:
    """Has its service reported? A time ahead of ours was written by a clock that was wrong."""
    return host.served_at is not None and abs(clock - host.served_at) < SERVED


_TRY = text("SELECT pg_try_advisory_lock(:key)")
_NOTICED_WITHIN = 5.0
"""Seconds that a terminated session of ours may take to end."""
_KEY = 0x6261636B757064
"""The letters ``backupd``."""
_NAMING = 0x6261636B757068
"""Key of the advisory lock under which hosts are named: the letters ``backuph``."""


class Watch:
    """At most one process holds it. Not for use by several threads at once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._file: TextIOWrapper | None = None
        self._session: Connection | None = None
        self._backend: tuple[int, datetime] | None = None

    def take(self, name: str) -> bool:
        """Try to go on watch as ``name``. Raises CatalogError."""
        return self._take_file(name) if self._database.sqlite else self._take_session()

    def holder(self) -> str:
        """Who has it, in words; empty when that is unknown."""
        if self._database.sqlite:
            try:
                return self._path().read_text().strip()
            except (OSError, UnicodeDecodeError):
                return ""
        with self._database.read() as connection:
            row = connection.execute(
                text(
                    "SELECT coalesce(host(a.client_addr), 'the host of the catalog'), a.backend_start "
                    "FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND l.granted "
                    "AND l.classid = :high AND l.objid = :low AND l.database = "
                    "(SELECT oid FROM pg_database WHERE datname = current_database())"
                ),
                {"high": _KEY >> 32, "low": _KEY & 0xFFFFFFFF},
            ).first()
        return f"on {row[0]} since {row[1]:%Y-%m-%d %H:%M:%S %Z}" if row else ""

    def is_held(self) -> bool | None:
        """Is anybody on watch, this process or another one? Asks without getting in the way of one that begins; None
        where that cannot be seen. Raises CatalogError."""
        if not self._database.sqlite:
            return bool(self.holder())
        try:
            status = self._path().stat()
            locks = Path("/proc/locks").read_text(encoding="ascii")
        except FileNotFoundError:
            return False  # nobody ever was
        except OSError:
            return None
        return any(_is_lock_of(line.split(), status) for line in locks.splitlines())

    def held(self) -> bool:
        """Is it still ours? False once the session with PostgreSQL was cut: another service may have it now."""
        if self._database.sqlite:
            return self._file is not None
        if self._session is None:
            return False
        try:
            return bool(
                self._session.scalar(
                    text(
                        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = "
                        "pg_backend_pid() "
                        "AND classid = :high AND objid = :low"
                    ),
                    {"high": _KEY >> 32, "low": _KEY & 0xFFFFFFFF},
                )
            )
        except SQLAlchemyError:
            return False  # the session is cut; the caller acts on that

    def leave(self) -> None:
        """Go off watch; nothing happens to one that is not held."""
        if self._file is not None:
            self._file.close()
            self._file = None
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(SQLAlchemyError):  # a broken session has lost the lock
                session.scalar(text("SELECT pg_advisory_unlock(:key)"), {"key": _KEY})
            session.invalidate()
            session.close()

    def _path(self) -> Path:
        return Path(f"{self._database.name}-service")

    def _take_file(self, name: str) -> bool:
        try:
            file = self._path().open("a+")
        except OSError as error:
            raise CatalogError(
                f"the lock {self._path()} cannot be opened: {error.strerror or error}",
                hint="the service needs write access to the folder of the catalog",
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        file.truncate(0)
        file.write(name + "\n")
        file.flush()
        self._file = file
        return True

    def _take_session(self) -> bool:
        self.leave()
        with self._database.errors():
            session = self._database.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            try:
                for setting in ("tcp_keepalives_idle = 10", "tcp_keepalives_interval = 5", "tcp_keepalives_count = 3"):
                    session.execute(text(f"SET {setting}"))
                until = time.monotonic() + (_NOTICED_WITHIN if self._end_former(session) else 0.0)
                while not (ours := bool(session.scalar(_TRY, {"key": _KEY}))) and time.monotonic() < until:
                    time.sleep(0.05)
                if ours:
                    self._session = session
                    pid, since = session.execute(
                        text("SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()")
                    ).one()
                    self._backend = pid, since
                    return True
            except BaseException:
                session.close()
                raise
            session.close()
            return False

    def _end_former(self, session: Connection) -> bool:
        """A session of ours that was cut holds the lock until the server has noticed that it is dead: end it. Was there
        one?"""
        if self._backend is None:
            return False
        pid, since = self._backend
        self._backend = None
        return bool(
            session.scalar(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = :pid AND backend_start = :since"
                ),
                {"pid": pid, "since": since},
            )
        )


def _is_lock_of(line: Sequence[str], status: os.stat_result) -> bool:
    """Is this line of /proc/locks (proc_locks(5)) a lock that somebody has on that file? File systems with devices of
    their own making (major number 0: btrfs, overlays) are named otherwise there, so of them the inode alone counts."""
    if "FLOCK" not in line or "->" in line:
        return False
    device, _colon, inode = next(field for field in line if field.count(":") == 2).rpartition(":")
    major, minor = (int(number, 16) for number in device.split(":"))
    here = (os.major(status.st_dev), os.minor(status.st_dev))
    return int(inode) == status.st_ino and ((major, minor) == here or major == 0 or here[0] == 0)
