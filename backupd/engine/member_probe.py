"""A member of a group as it is now: which server it is, its role, how far it is behind, and what its binary log holds.
A few questions, each cheap: every run asks them of every member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backupd.engine.server.probe import flavour_of, read_dialect
from backupd.engine.server.wsrep import probe_wsrep
from backupd.engine.server_load import lag_of
from backupd.engine.sql.client import Session, is_denied
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.errors import ServerError
from backupd.model.server_facts import Role, Version
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
        identity=Identity(
            variables.get(dialect.uid, ""),
            int(variables.get("server_id", "0")),
            variables.get("hostname", ""),
            variables.get("datadir", ""),
        ),
        role=_role(session, channels),
        stopped=lag.text if channels and lag.value is None else "",
        lag=max(lag.value or 0.0, 0.0),
        follows=frozenset(int(row.get("Source_Server_Id", row.get("Master_Server_Id")) or 0) for row in channels),
        delay=max((float(row.get("SQL_Delay") or 0) for row in channels), default=0.0),
        read_only=variables.get("read_only", "OFF").upper() not in _OFF,
        logs=variables.get("log_bin", "OFF").upper() not in _OFF,
        log_updates=_says(variables, "log_replica_updates", "log_slave_updates"),
        node=_node(session),
    )


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


def lag_of_member(session: Session) -> float | None:
    """Seconds that a replica is behind its source, a configured delay included; 0 for who replicates nothing, None
    where that is not known. Raises ServerError."""
    channels = session.records(read_dialect(session).replica_status)
    lag = lag_of("", channels)
    if not channels:
        return 0.0
    if lag.value is None:
        return None
    return max(lag.value, 0.0) + max(float(row.get("SQL_Delay") or 0) for row in channels)
