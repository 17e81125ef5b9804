"""A connection pool to the catalog's database, and what its failures mean.

SQLite is opened in WAL mode with foreign keys on; PostgreSQL through psycopg 3. Every failure of either leaves here
as a CatalogError that names the file or the server.

Its revision is asked here without alembic, the library that changes it: importing that takes as long as many a command.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Executable,
    Integer,
    Select,
    String,
    Table,
    create_engine,
    event,
    func,
    inspect,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidatePoolError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from backupd.catalog.row_mapping import first_record, metadata, put_row, records
from backupd.model.errors import BackupdError, CatalogError

BUSY_SECONDS = 30
"""How long a writer waits for another writer of the same SQLite file."""
HASTE = 0.2
"""The same of one that can as well write later."""
PATIENCE = 30.0
"""Seconds that PostgreSQL may take for one statement; none of ours takes seconds."""

_POSTGRESQL = ("postgres", "postgresql", "postgresql+psycopg")
_REBUILD = (
    "move the file away with its -wal and -shm (keep them) and run `backupd catalog rebuild --from "
    "DESTINATION`: it creates a new catalog from the backups stored there"
)
_ROOM = 64 * 1024
"""Bytes: with less than this left, SQLite cannot even make its -shm file (32 KiB) beside the catalog."""


def catalog_url(text: str) -> URL:
    """The URL as SQLAlchemy wants it: ``sqlite:////var/lib/backupd/catalog.db`` or ``postgresql://host/name``.

    Raises CatalogError for anything else; the message never shows a password.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise CatalogError(
            "the catalog's address is not a URL",
            hint="write sqlite:////var/lib/backupd/catalog.db or postgresql://user@host/name",
        ) from error
    if url.drivername in {"sqlite", "sqlite+pysqlite"}:
        if not url.database or url.database == ":memory:":
            raise CatalogError(
                "an in-memory catalog is not supported",
                hint="name a file: sqlite:////var/lib/backupd/catalog.db (four slashes)",
            )
        return url.set(drivername="sqlite")
    if url.drivername in _POSTGRESQL:
        return url.set(drivername="postgresql+psycopg")
    raise CatalogError(
        f"a catalog cannot be stored in {url.drivername!r}", hint="use sqlite:////PATH or postgresql://USER@HOST/NAME"
    )


def _parsed(text: str) -> Any:
    """As ``json.loads``; most JSON of a catalog is an empty list, and a list of backups has thousands of them."""
    return [] if text == "[]" else json.loads(text)


class Database:
    """One catalog's database. Threads may share it.

    ``name`` is how messages call it: a path, or a URL without its password.
    """

    def __init__(self, address: str, *, make: bool = True) -> None:
        """Opens nothing yet, but for SQLite makes the folder (0700) and the file (0600) where they are missing.

        Without ``make``, and once it is open, a file that is missing is an error: it was moved away, and a new
        empty one would hide that.
        """
        self.url = catalog_url(address)
        self.sqlite = self.url.drivername == "sqlite"
        self.name = str(self.url.database) if self.sqlite else self.url.render_as_string(hide_password=True)
        if self.sqlite and make:
            _make_file(Path(self.name))
        try:
            self.engine = self._sqlite_engine() if self.sqlite else self._postgresql_engine()
        except ModuleNotFoundError as error:
            raise CatalogError(
                f"the catalog {self.name} needs the Python package psycopg", hint="pip install 'backupd[postgresql]'"
            ) from error
        # Repeatable read: what several statements of one block ask is of one moment, as in SQLite.
        view = {} if self.sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reading = self.engine.execution_options(backupd_reading=True, **view)
        self._hasty = self.engine.execution_options(backupd_hasty=True)

    def _sqlite_engine(self) -> Engine:
        address = f"{Path(self.name).absolute().as_uri()}?mode=rw"  # rw: SQLite never makes the file
        engine = create_engine(
            self.url,
            hide_parameters=True,
            creator=lambda: sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, check_same_thread=False),
            json_deserializer=_parsed,
        )
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _postgresql_engine(self) -> Engine:
        engine = create_engine(
            self.url,
            hide_parameters=True,
            connect_args={"connect_timeout": 10, "application_name": "backupd", "tcp_user_timeout": 30_000},
        )
        event.listen(engine, "do_connect", _connect_patiently)
        event.listen(engine, "checkin", _note_use)
        event.listen(engine, "checkout", partial(_meet_again, engine.dialect))
        return engine

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view. Raises CatalogError."""
        with self.errors(), self._reading.begin() as connection:
            yield connection

    @contextmanager
    def write(self, *, waits: bool = True) -> Iterator[Connection]:
        """One transaction: committed when the block ends well, undone when it raises. ``waits``: for the other writer
        of an SQLite file, as long as it takes; one that can as well write later does not. Raises CatalogError."""
        with self.errors(), (self.engine if waits else self._hasty).begin() as connection:
            yield connection

    @contextmanager
    def unhurried(self, connection: Connection) -> Iterator[None]:
        """Within the block a statement on ``connection`` may take as long as it takes."""
        if self.sqlite:
            yield
            return
        ours = connection.connection.driver_connection
        setattr(ours, "hurried", False)  # noqa: B010  SQLAlchemy knows the driver's connection as Any or None only
        try:
            yield
        finally:
            setattr(ours, "hurried", True)  # noqa: B010  as above

    def clock(self, connection: Connection, now: datetime) -> datetime:
        """The time that all hosts of this catalog agree on: the server's; for a file, the caller's ``now``."""
        if self.sqlite:
            return now
        moment: datetime = connection.scalar(text("SELECT clock_timestamp()"))
        return moment.astimezone(UTC)

    def stamp(self, now: datetime) -> datetime | ColumnElement[datetime]:
        """The same time, as what a statement writes: it need not be asked for first."""
        return now if self.sqlite else SERVER_TIME

    def close(self) -> None:
        """Close every connection of the pool."""
        self.engine.dispose()

    def integrity(self) -> list[str]:
        """What the database finds wrong, one line each; empty for PostgreSQL, which has other tools for it."""
        if not self.sqlite:
            return []
        with self.read() as connection:
            lines = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check")]
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        return [line for line in lines if line != "ok"] + [
            f"{row[0]} row {row[1]} names a missing {row[2]}" for row in broken
        ]

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What the database raises inside the block leaves it as a CatalogError."""
        try:
            yield
        except BackupdError:
            raise
        except DBAPIError as error:
            raise self._explained(error) from error
        except SQLAlchemyError as error:
            raise CatalogError(f"the catalog {self.name} failed", detail=str(error)) from error

    def _explained(self, error: DBAPIError) -> CatalogError:
        cause = error.orig
        detail = str(cause).strip()
        if isinstance(cause, sqlite3.Error):
            code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_IOERR and _is_full(Path(self.name)):
                code = sqlite3.SQLITE_FULL
            message, hint = _SQLITE.get(code, ("failed", ""))
            if code == sqlite3.SQLITE_CANTOPEN and _is_gone(Path(self.name)):
                message, hint = "is gone", _GONE
            return CatalogError(f"the catalog {self.name} {message}", detail=detail, hint=hint)
        if isinstance(error, OperationalError) or error.connection_invalidated:
            return CatalogError(
                f"the catalog {self.name} cannot be reached",
                detail=detail,
                hint="check that PostgreSQL runs and answers within 30 seconds, and that pg_hba.conf and the passfile "
                "allow this connection",
            )
        return CatalogError(f"the catalog {self.name} refused a statement", detail=detail)


_GONE = (
    "stop the service, restore the file with its -wal and -shm (or mount its file system), and start it again; "
    "if it is lost, `backupd catalog rebuild --from DESTINATION` creates a new one from the backups stored there"
)
_ACCESS = (
    "this user needs read and write access to the file and to its folder, "
    "where SQLite keeps -wal and -shm files beside it"
)

_SQLITE = {
    sqlite3.SQLITE_NOTADB: ("is not a SQLite file, or its first page is damaged", _REBUILD),
    sqlite3.SQLITE_CORRUPT: ("is damaged", _REBUILD),
    sqlite3.SQLITE_READONLY: ("is read-only", _ACCESS),
    sqlite3.SQLITE_CANTOPEN: ("cannot be opened", _ACCESS),
    sqlite3.SQLITE_PERM: ("cannot be opened", _ACCESS),
    sqlite3.SQLITE_FULL: ("cannot grow: its disk is full", "free space on that disk; no record is incomplete"),
    sqlite3.SQLITE_BUSY: (
        "stayed locked",
        f"another process holds a long transaction on it (backupd waits up to {BUSY_SECONDS} s); `fuser FILE` names it",
    ),
    sqlite3.SQLITE_IOERR: ("cannot be read or written", "check the kernel's messages (dmesg) for this disk"),
}


class _Watchdog:
    """Shuts connections to PostgreSQL that have waited for an answer for too long, from one thread for all of them: a
    thread for each wait would cost more than the statement. It ends when nothing waits any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[_Patient, float] = {}
        self._used = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, connection: _Patient) -> Iterator[None]:
        """Shut ``connection`` when the block takes longer than PATIENCE, but never once it is over."""
        try:
            with self._lock:
                self._waiting[connection], self._used = time.monotonic() + PATIENCE, True
                # A process that was forked has none of its threads.
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._look, name="catalog-watchdog", daemon=True)
                    with suppress(RuntimeError):  # no further thread may be started: the next wait tries again
                        self._thread.start()
            yield
        finally:
            with self._lock:
                self._waiting.pop(connection, None)

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK)
            with self._lock:
                now = time.monotonic()
                for one in [one for one, until in self._waiting.items() if now >= until]:
                    del self._waiting[one]
                    with suppress(Exception):  # it was closed in this moment; the others are watched on
                        one.shut()
                if not self._used and not self._waiting:
                    self._thread = None
                    return
                self._used = False


_LOOK = 1.0
"""Seconds between looks at what waits."""
_watchdog = _Watchdog()


class _Patient:
    """A connection to PostgreSQL that waits a limited time for an answer; ``hurried`` False: as long as it takes.

    A server that hangs (its disk is dead, its processes are stopped) keeps its sockets open and acknowledges every
    packet, so no timeout of TCP, and none that the server watches, ends the waiting. Here the socket is shut
    after the time, and the waiting ends as with any server that went away.
    """

    hurried = True
    pgconn: Any

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """All that waits for the server passes here."""
        wait: Any = super().wait  # type: ignore[misc]  # psycopg's, which is imported only where it is needed
        if not self.hurried:
            return wait(*arguments, **options)
        with _watchdog.over(self):
            return wait(*arguments, **options)

    def shut(self) -> None:
        """End whatever waits on it."""
        with socket.socket(fileno=os.dup(self.pgconn.socket)) as ours:
            ours.shutdown(socket.SHUT_RDWR)


_RESTED = 10.0
"""A connection to PostgreSQL that was not used for so many seconds is asked whether it works before it is used; of any
other its socket says whether the server has closed it."""


def _note_use(_connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.info["used"] = time.monotonic()


def _meet_again(dialect: Dialect, connection: Any, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection) -> None:
    """A PostgreSQL that was restarted must not fail the first record after it. Raises InvalidatePoolError, upon which
    the pool connects anew."""
    used = record.info.get("used")
    if used is None or (time.monotonic() - used < _RESTED and not _has_news(connection)):
        return
    try:
        dialect.do_ping(connection)
    except dialect.loaded_dbapi.Error as error:
        raise InvalidatePoolError from error


def _has_news(connection: Any) -> bool:
    """Is there something to read that nobody has asked for, such as the end?"""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))


def _connect_patiently(
    _dialect: object,
    _record: object,
    arguments: Sequence[Any],
    options: dict[str, Any],
) -> DBAPIConnection:
    import psycopg

    patient: Any = type("PatientConnection", (_Patient, psycopg.Connection), {})
    return cast("DBAPIConnection", patient.connect(*arguments, **options))


def _is_full(path: Path) -> bool:
    """Has the file system of ``path`` no room left? False where that cannot be asked."""
    try:
        found = os.statvfs(path.parent)
    except OSError:
        return False
    free = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return free * found.f_frsize < _ROOM or (found.f_files > 0 and found.f_ffree == 0)


def is_file(path: Path) -> bool:
    """Is anything there but an empty file? Also where that cannot be asked: opening it says why."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _is_gone(path: Path) -> bool:
    """Was it moved away? Not where that cannot be asked."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _make_file(path: Path) -> None:
    try:
        missing = [folder for folder in path.absolute().parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
        # SQLite would create the file by the umask; its -wal and -shm files take over the mode of this one. One that is
        # there must not be opened here: closing it would end the locks of this process's other connections (fcntl(2)),
        # and the next process to leave would take the -wal away under them (sqlite.org, "How To Corrupt", 2.2).
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise CatalogError(
            f"the catalog {path} cannot be created or opened",
            detail=str(error),
            hint="run as the user that owns the catalog, or correct its folder's permissions",
        ) from error
    if path.is_dir():
        raise CatalogError(f"the catalog {path} is a folder", hint="name a file inside it")


def _prepare_sqlite(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    # Python's sqlite3 would begin transactions late and only for some statements, so that a read followed
    # by a write fails at once with "database is locked". None leaves BEGIN to us (_begin_sqlite).
    connection.isolation_level = None
    cursor = connection.cursor()
    _switch_to_wal(cursor)
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _switch_to_wal(cursor: DBAPICursor) -> None:
    # The mode is a property of the file, set once. While two processes set it at the same moment SQLite says "locked"
    # at once, without the waiting that it does for transactions.
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("backupd_hasty", False):
        connection.exec_driver_sql("BEGIN" if options.get("backupd_reading", False) else "BEGIN IMMEDIATE")
        return
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {HASTE * 1000:.0f}")
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")


VERSION_TABLE = "backupd_version"
"""Not alembic's usual name: a PostgreSQL database may be shared with another program that uses alembic."""
identity = Table(
    "identity",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("id", String(12), nullable=False),
)
"""One row: which catalog this is, among all that its installation ever had."""
WANTED = "0020"
"""The form that this program knows: the newest of ``alembic/versions``."""


def current(connection: Connection) -> str | None:
    """The revision of a catalog's tables; None before the first upgrade."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608  a constant
    return None if found is None else str(found)


SERVER_TIME: ColumnElement[datetime] = func.clock_timestamp()
"""On PostgreSQL."""
R = TypeVar("R")


class Rows:
    """What one aggregate has in the catalog. Every method is one transaction and raises CatalogError when the database
    fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def _records(self, kind: Callable[..., R], query: Select[Any]) -> tuple[R, ...]:
        with self._database.read() as connection:
            return records(connection, kind, query)

    def _record(self, kind: Callable[..., R], query: Select[Any]) -> R | None:
        with self._database.read() as connection:
            return first_record(connection, kind, query)

    def _rows(self, query: Select[Any]) -> Sequence[Any]:
        """Its rows as they are."""
        with self._database.read() as connection:
            return connection.execute(query).all()

    def _scalars(self, query: Select[Any]) -> Sequence[Any]:
        """The first column of its rows."""
        with self._database.read() as connection:
            return connection.scalars(query).all()

    def _scalar(self, query: Select[Any]) -> Any:
        """The first column of its first row; None where it has none."""
        with self._database.read() as connection:
            return connection.scalar(query)

    def _do(self, statement: Executable, values: Sequence[Mapping[str, Any]] | None = None) -> int:
        """In one transaction, once for each of ``values``; gives how many rows it changed."""
        with self._database.write() as connection:
            return connection.execute(statement, values).rowcount

    def _put(self, table: Table, values: Mapping[str, Any]) -> None:
        """Insert a row; one that has the same key gives way."""
        with self._database.write() as connection:
            put_row(connection, table, values)


class Changes:
    """For one thread at a time; holds one connection until it is closed. SQLite shows such a connection when another
    one has committed, without reading a row (https://www.sqlite.org/pragma.html#pragma_data_version);
    PostgreSQL has nothing like it."""

    def __init__(self, database: Database) -> None:
        self._file = Path(database.name) if database.sqlite else None
        self._connection: sqlite3.Connection | None = None

    def version(self) -> int | None:
        """Another number than before when something was written; None where that is unknown."""
        if self._file is None:
            return None
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(
                    f"{self._file.absolute().as_uri()}?mode=ro",
                    uri=True,
                    timeout=0,
                    isolation_level=None,
                    check_same_thread=False,
                )
            row = self._connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            self.close()  # whoever reads the catalog says what is wrong with it
            return None
        return int(row[0])

    def close(self) -> None:
        """Close its connection; ``version`` opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
