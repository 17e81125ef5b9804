"""A server as the source of its binary logs, asked by SQL: which files there are, where it stands, who it is.

Measured with MariaDB 10.11.19 and MySQL 9.7.4: sizes of SHOW BINARY LOGS include what was written a moment ago, and the
encrypted files of MariaDB are as long as what is read of them. Those of MySQL have 512 bytes in front that no reader
gets (its manual), so a listed size is only an upper bound; the position where the server writes is exact.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from backupd.engine.server.history import current_lsn
from backupd.engine.server.probe import flavour_of, read_dialect
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.binlog import is_log_name
from backupd.model.errors import MisnamedError, RefusedError, ServerError
from backupd.model.gtid import plus
from backupd.model.server_facts import Flavour, Position, Version

_NO_BINARY_LOG = 1381
_NO_SUCH_FILE = 1220
_ANSWER_SECONDS = 10.0
_NO_ANSWER = (ValueError, LookupError, TypeError, AttributeError, AssertionError, OverflowError, struct.error)
"""What reading an answer ends with that was altered on its way."""
_DURABLE = ("Innodb_lsn_flushed", "Innodb_redo_log_flushed_to_disk_lsn")
"""MariaDB and Percona Server; MySQL from 8.0.30 on."""


class UnloggedError(RefusedError):
    """The server writes no binary log: what it commits now will be in none."""


@dataclass(frozen=True, slots=True)
class ListedLog:
    """A binary log that the server has. ``size``: on its disk, in bytes."""

    name: str
    number: int
    size: int


@dataclass(frozen=True, slots=True)
class SourceState:
    """A server at a moment. ``server_time``: its own clock, read before everything else; ``logs``: oldest first;
    ``position``: where it writes, with what is executed; ``lsn``: how far InnoDB has written, ``durable_lsn``: how far
    its log is on the disk, None where the account may not know; ``gtid_mode``:
    MySQL's own word in lower case, ``on`` for MariaDB. ``marker``: of the restore its datadir came from.
    ``history``: the last GTID of every server in each of MariaDB's domains, what is executed elsewhere."""

    server_time: datetime
    server_uuid: str
    server_id: int
    flavour: Flavour
    version: Version
    gtid_mode: str
    basename: str
    logs: tuple[ListedLog, ...]
    position: Position
    lsn: int | None
    durable_lsn: int | None = None
    history: str = ""
    marker: str = ""

    @property
    def mariadb(self) -> bool:
        """Are its GTIDs those of MariaDB?"""
        return self.flavour is Flavour.MARIADB


@dataclass(frozen=True, slots=True)
class Expiry:
    """When the server removes a log by itself: by age, by their size together; None: never for that reason."""

    age: timedelta | None
    total_bytes: int | None


class BinlogSource:
    """One server, asked again and again. ``marker``: gives the id of the restore that a local datadir (its path) came
    from, "" for none. All methods raise ServerError; ``look`` UnloggedError where no binary log is written,
    and MisnamedError for a name that none has."""

    def __init__(self, connection: Connection, *, marker: Callable[[str], str] = lambda _datadir: "") -> None:
        self.connection = replace(connection, answer_timeout=connection.answer_timeout or _ANSWER_SECONDS)
        self._marker = marker

    @property
    def address(self) -> str:
        """For people, as of Connection."""
        return self.connection.address

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session]:
        """An answer that was altered on its way may be no answer at all."""
        try:
            with self.connection.connect() as session:
                yield session
        except _NO_ANSWER as error:
            raise ServerError(
                f"what {self.address} answers makes no sense",
                detail=f"{type(error).__name__}: {error}",
                hint="is that a database server, and the network to it sound? It is asked again",
            ) from error

    def look(self, *, files: bool = True) -> SourceState:
        """Everything at once. Without ``files`` no logs are listed: with thousands of them that takes a server time."""
        with self._session() as session:
            # The clock first: what is true of this moment is true of the position that is read after it.
            server_time = _moment(session.scalar("SELECT UTC_TIMESTAMP(6)"))
            variables = _variables(session)
            flavour = flavour_of(variables.get("version", ""), variables.get("version_comment", ""))
            version = Version.parse(variables["version"])
            dialect = dialect_of(flavour, version)
            position = _position(session, dialect)
            return SourceState(
                server_time=server_time,
                server_uuid=variables.get(dialect.uid, ""),
                server_id=int(variables.get("server_id", "0")),
                flavour=flavour,
                version=version,
                gtid_mode="on" if flavour is Flavour.MARIADB else variables.get("gtid_mode", "OFF").lower(),
                basename=position.file.rpartition(".")[0],
                logs=_logs(session) if files else (),
                position=position,
                lsn=current_lsn(session),
                durable_lsn=_durable_lsn(session),
                history=_history(session, flavour, position),
                marker=self._marker(variables.get("datadir", "")),
            )

    def previous_gtids(self, name: str) -> str | None:
        """Everything that was executed before the file ``name``; None where it is not there, or says nothing.

        It tells what older files held. What came with the data of a MySQL server that was made from a backup is in no
        file, but in gtid_purged, with what files held that are gone: all of it was executed before every file there is.
        """
        with self._session() as session:
            told = _previous_gtids(session, name)
            purged = session.records("SHOW GLOBAL VARIABLES LIKE 'gtid_purged'") if told is not None else []
            return plus(told or "", re.sub(r"\s+", "", str(purged[0]["Value"])), mariadb=False) if purged else told

    def expiry(self) -> Expiry:
        """What makes the server remove logs by itself."""
        with self._session() as session:
            return _expiry(
                {
                    str(name).lower(): str(value)
                    for name, value in session.query(
                        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('binlog_expire_logs_seconds', "
                        "'expire_logs_days',"
                        " 'binlog_expire_logs_auto_purge', 'max_binlog_total_size', 'binlog_space_limit')"
                    )
                }
            )

    def connected_ids(self) -> frozenset[int]:
        """Server ids of the replicas that are connected now, and the server's own."""
        with self._session() as session:
            dialect = read_dialect(session)
            taken = {int(session.scalar("SELECT @@GLOBAL.server_id"))}
            try:
                taken |= {int(row[0]) for row in session.query(dialect.replica_hosts)}
            except ServerError as error:
                if not is_denied(error):
                    raise
            return frozenset(taken)


def _variables(session: Session) -> dict[str, str]:
    return {
        str(name).lower(): str(value)
        for name, value in session.query(
            "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'version_comment', 'server_id', 'server_uuid',"
            " 'server_uid', 'gtid_mode', 'datadir')"
        )
    }


def _moment(value: datetime | str) -> datetime:
    naive = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return naive.replace(tzinfo=UTC)


def _position(session: Session, dialect: Dialect) -> Position:
    rows = session.records(dialect.binlog_status)
    if not rows:
        raise _no_binary_log(session.connection.address)
    gtid = str(session.scalar(dialect.executed_gtid) or "").replace("\n", "")
    return Position(_checked(str(rows[0]["File"]), session), int(rows[0]["Position"]), gtid)


def _history(session: Session, flavour: Flavour, position: Position) -> str:
    if flavour is not Flavour.MARIADB:
        return position.gtid
    return str(session.scalar("SELECT @@GLOBAL.gtid_binlog_state") or "")


def _durable_lsn(session: Session) -> int | None:
    for name in _DURABLE:
        rows = session.query("SHOW GLOBAL STATUS LIKE %s", name)
        if rows:
            return int(rows[0][1])
    return None


def _logs(session: Session) -> tuple[ListedLog, ...]:
    try:
        rows = session.records("SHOW BINARY LOGS")
    except ServerError as error:
        if error_code(error) == _NO_BINARY_LOG:
            raise _no_binary_log(session.connection.address) from error
        raise
    found = []
    for row in rows:
        name = _checked(str(row["Log_name"]), session)
        found.append(ListedLog(name, int(name.rpartition(".")[2]), int(row["File_size"])))
    return tuple(found)


def _checked(name: str, session: Session) -> str:
    """A name becomes an argument and a file's: raises MisnamedError for what is no binary log's."""
    if not is_log_name(name):
        raise MisnamedError(name, session.connection.address)
    return name


def _no_binary_log(address: str) -> UnloggedError:
    return UnloggedError(
        f"the server at {address} writes no binary log, so there is nothing to stream",
        hint="set log_bin in the server's configuration and restart it, or take `binlog` out of the"
        " policy; what it commits meanwhile cannot be recovered before the next full backup",
    )


def _previous_gtids(session: Session, name: str) -> str | None:
    try:
        rows = session.records("SHOW BINLOG EVENTS IN %s LIMIT 5", name)
    except ServerError as error:
        if error_code(error) == _NO_SUCH_FILE:
            return None
        raise
    for row in rows:
        kind, info = str(row["Event_type"]), str(row["Info"])
        if kind == "Previous_gtids":
            return re.sub(r"\s+", "", info)
        if kind == "Gtid_list":
            return re.sub(r"\s+", "", info).strip("[]")
    return None


def _expiry(variables: dict[str, str]) -> Expiry:
    seconds = int(variables.get("binlog_expire_logs_seconds", "0"))
    if not seconds:
        seconds = round(float(variables.get("expire_logs_days", "0")) * 86400)
    if variables.get("binlog_expire_logs_auto_purge", "ON").upper() in ("OFF", "0"):
        seconds = 0
    total = max(int(variables.get(name, "0") or "0") for name in ("max_binlog_total_size", "binlog_space_limit"))
    return Expiry(timedelta(seconds=seconds) if seconds else None, total or None)
