"""A member of a group as it is now: which server it is, its role, how far it is behind, and what its binary log holds.
A few questions, each cheap: every run asks them of every member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backupd.engine.server.probe import flavour_of, read_dialect
from backupd.engine.server.replication import read_replicas, unordered
from backupd.engine.server.wsrep import probe_wsrep
from backupd.engine.server_load import lag_of
from backupd.engine.sql.client import Session, is_denied
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.binlog import MariadbGtids, MysqlGtids
from backupd.model.consistency import ComparedServer
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, Position, Role, Version
from backupd.recovery.members import Candidate, Identity, Node

_VARIABLES = (
    "version",
    "version_comment",
    "server_id",
    "server_uuid",
    "server_uid",
    "hostname",
    "datadir",
    "read_only",
    "log_bin",
    "log_slave_updates",
    "log_replica_updates",
)
_OFF = ("OFF", "0", "")


def probe_member(session: Session, name: str) -> Candidate:
    """Ask the server in ``session``, the member ``name``. Raises ServerError, also where the account may not ask
    whether it is a replica: a replica that is taken for something else would count as up to date."""
    variables = session.variables(*_VARIABLES)
    try:
        version = Version.parse(variables.get("version", ""))
    except ValueError as error:
        raise ServerError(f"unsupported server at {session.connection.address}", detail=str(error)) from error
    dialect = dialect_of(flavour_of(variables.get("version", ""), variables.get("version_comment", "")), version)
    channels = _channels(session, dialect)
    lag = lag_of(name, channels)
    return Candidate(
        name,
        data=compared_server(session, dialect),
        identity=Identity(
            variables.get(dialect.uid, ""),
            int(variables.get("server_id", "0")),
            variables.get("hostname", ""),
            variables.get("datadir", ""),
        ),
        role=_role(session, channels),
        stopped=lag.text if channels and lag.value is None else "",
        lag=max(lag.value or 0.0, 0.0),
        unordered=unordered(session, dialect) if channels else "",
        follows=frozenset(int(row.get("Source_Server_Id", row.get("Master_Server_Id")) or 0) for row in channels),
        delay=max((float(row.get("SQL_Delay") or 0) for row in channels), default=0.0),
        read_only=variables.get("read_only", "OFF").upper() not in _OFF,
        logs=variables.get("log_bin", "OFF").upper() not in _OFF,
        log_updates=_says(variables, "log_replica_updates", "log_slave_updates"),
        node=_node(session),
    )


def compared_server(session: Session, dialect: Dialect) -> ComparedServer:
    """Which server this is, with which data. The definition of a system table is written when a data directory is made
    or restored, and by upgrades: a server that is made anew on the same host and port has MariaDB's uuid of the one
    before. Raises ServerError."""
    made = None
    if not dialect.keeps_uuid_in_datadir:
        made = session.scalar(
            "SELECT CREATE_TIME FROM information_schema.TABLES "
            "WHERE TABLE_SCHEMA = 'mysql' AND TABLE_NAME = 'gtid_slave_pos'"
        )
    return ComparedServer(session.variables(dialect.uid).get(dialect.uid, ""), str(made or ""))


def _says(variables: Mapping[str, str], *names: str) -> bool:
    return any(variables.get(name, "OFF").upper() not in _OFF for name in names)


def _channels(session: Session, dialect: Dialect) -> Sequence[Mapping[str, Any]]:
    try:
        return session.records(dialect.replica_status)
    except ServerError as error:
        if not is_denied(error):
            raise
        raise ServerError(
            f"the account may not ask {session.connection.address} whether it is a replica",
            detail=error.detail,
            hint=f"grant {dialect.replica_privilege} ON *.* to it: without that nobody knows how far it is behind",
        ) from error


def _role(session: Session, channels: Sequence[Mapping[str, Any]]) -> Role:
    """A replica may have replicas. Nobody follows a server that is about to become a source: it is one of no others."""
    if channels:
        return Role.REPLICA
    threads = session.records("SHOW PROCESSLIST", shown=True)
    return Role.SOURCE if any(str(row["Command"]).startswith("Binlog Dump") for row in threads) else Role.STANDALONE


def _node(session: Session) -> Node | None:
    state = probe_wsrep(session)
    return Node(state.state, max(state.size - 1, 0), state.desync_count) if state is not None else None


def log_end(session: Session) -> Position | None:
    """Where the server's own binary log ends now; None where it writes none. Raises ServerError, also where the account
    may not ask."""
    dialect = read_dialect(session)
    row = next(iter(session.records(dialect.binlog_status)), None)
    if row is None:
        return None
    return Position(str(row["File"]), int(row["Position"]), str(session.scalar(dialect.executed_gtid) or ""))


def has_received(session: Session, source_id: int, end: Position) -> bool:
    """Has a replica received all of the log of the server ``source_id`` up to ``end``? By either of file and GTIDs: an
    event that is not sent to it, as its own, is in one of them only. Raises ServerError."""
    dialect = read_dialect(session)
    for status in read_replicas(session, dialect):
        if status.source_id != source_id:
            continue
        here, there = status.received, _place(end)
        if there is not None and (place := _place(here)) is not None and place[0] == there[0] and place >= there:
            return True
        if not status.by_gtid:
            continue
        if dialect.flavour is Flavour.MARIADB:
            known, wanted = MariadbGtids.parse(here.gtid).last, MariadbGtids.parse(end.gtid).last
            if known and all(known[domain][1] >= last for domain, (_id, last) in wanted.items() if domain in known):
                return True
        elif MysqlGtids.parse(status.gtids).plus(MysqlGtids.parse(status.retrieved)).covers(MysqlGtids.parse(end.gtid)):
            return True
    return False


def _place(position: Position) -> tuple[str, int, int] | None:
    name, _dot, number = position.file.rpartition(".")
    return (name, int(number), position.pos) if number.isdecimal() else None


def silence_of(session: Session, *, expected: bool) -> float:
    """For how many seconds a replica may have received nothing without noticing that its source is gone: its threads
    run, and it says that it is not behind. MySQL says when the last transaction or heartbeat came; of MariaDB only the
    longest time is known, after which it connects anew (slave_net_timeout).

    ``expected``: something is heard all the time from a source that is there, at least a heartbeat now and then, so
    that a silence that is no longer than the time between two of these says nothing. Raises ServerError."""
    known = session.variables("slave_net_timeout", "replica_net_timeout")
    longest = float(known.get("replica_net_timeout") or known.get("slave_net_timeout") or 0)
    if read_dialect(session).flavour is Flavour.MARIADB:
        return 0.0 if expected else longest
    try:
        rows = session.query(_HEARD)
    except ServerError as error:
        if not is_denied(error):
            raise
        rows = []
    silences = [(float(silent), float(period)) for silent, period in rows if silent is not None]
    if not silences:
        return 0.0 if expected else longest
    return max(0.0 if expected and silent <= period + _LATE else min(silent, longest) for silent, period in silences)


_HEARD = """
SELECT TIMESTAMPDIFF(MICROSECOND, GREATEST(s.LAST_HEARTBEAT_TIMESTAMP, s.QUEUEING_TRANSACTION_START_QUEUE_TIMESTAMP,
       s.LAST_QUEUED_TRANSACTION_END_QUEUE_TIMESTAMP), NOW(6)) / 1000000, c.HEARTBEAT_INTERVAL
FROM performance_schema.replication_connection_status s
JOIN performance_schema.replication_connection_configuration c USING (CHANNEL_NAME)
WHERE s.SERVICE_STATE = 'ON'
"""
_LATE = 5.0
"""Seconds by which a heartbeat may be late."""


def lag_of_member(session: Session) -> float | None:
    """Seconds that a replica is behind its source, a configured delay included; 0 for who replicates nothing, None
    where that is not known. Raises ServerError."""
    channels = session.records(read_dialect(session).replica_status)
    lag = lag_of("", channels)
    if not channels:
        return 0.0
    if lag.value is None or silence_of(session, expected=True):
        return None
    return max(lag.value, 0.0) + max(float(row.get("SQL_Delay") or 0) for row in channels)
