"""Making a restored copy a replica that has not begun: in a sandbox without network, so that nobody hears of it.

Its old replication is forgotten, its events are disabled as on any replica, its position is set, and its source is
named. An identity of its own comes first: MySQL keeps ``server_uuid`` in a file, and settings that were persisted on
the backed-up server (its ``server_id``, its group) in another one.

A copy of a member of a group (Group Replication, InnoDB Cluster) is no member: the credentials of the group's channels
and the metadata schema of InnoDB Cluster are removed, and it does not start the group at boot. To join the group again
is the group's own work (clone, ``addInstance``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backupd.engine.event_states import disable_elsewhere
from backupd.engine.server.launch import LaunchedServer, Options, ServerConfig
from backupd.engine.server.replication import Source, set_source
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.document import Document
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Flavour, Position, ServerInfo
from restore.replica.source import (
    ReplicaStart,
    Restored,
    SourceFacts,
    choose_start,
    read_source,
    refuse_not_sent,
    refuse_other_source,
)

RELAY_LOG = "replica-relay-bin"
"""Relay logs are found by name: the service has to be given the same one."""
_UUID_FILE = "auto.cnf"
_PERSISTED = "mysqld-auto.cnf"
_PERSISTED_ASIDE = f"{_PERSISTED}.restored"
_GROUP_SCHEMA = "mysql_innodb_cluster_metadata"
_GROUP_CHANNELS = "group\\_replication\\_%"


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A replica that a restored copy becomes. ``source``: whom it is told to follow, and as whom; ``connection``: how
    the source is looked at; ``account``: the same account, for asking as the replica will. ``restored``: what the copy
    is, but for its position; ``server_id``: of the replica; ``delay``: seconds that it stays behind."""

    source: Source
    connection: Connection
    account: Connection
    restored: Restored
    server_id: int
    delay: int = 0

    def at(self, position: Position) -> tuple[SourceFacts, ReplicaStart]:
        """The source as it is now, and where a copy at ``position`` begins. Raises RefusedError, ServerError."""
        facts = read_source(self.connection)
        start = choose_start(replace(self.restored, position=position), facts)
        refuse_not_sent(self.account, start, facts, self.server_id, self.restored.taken_at)
        return facts, start


@dataclass(frozen=True, slots=True)
class ReplicaState(Document):
    """What is remembered of a replica from attempt to attempt. ``following``: has it been let loose, so that it is
    wherever it is by now? ``events``: those that were disabled; ``uuid``: its own."""

    server_id: int
    source: str
    start: ReplicaStart
    gtid_mode: str
    following: bool = False
    uuid: str = ""
    events: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def replica_options(info: ServerInfo, server_id: int, gtid_mode: str) -> dict[str, str]:
    """What the service of the replica has to be started with, too."""
    found = {"server_id": str(server_id), "read_only": "ON", "relay_log": RELAY_LOG}
    if info.flavour is not Flavour.MARIADB:
        found["gtid_mode"] = gtid_mode.upper()
        if gtid_mode != "off":
            found["enforce_gtid_consistency"] = "ON"
    return found


def replica_config(config: ServerConfig, info: ServerInfo, server_id: int, gtid_mode: str) -> ServerConfig:
    """``config`` of a server on the copy, with an account of ours until it is handed over."""
    options: Options = {
        **config.options,
        **replica_options(info, server_id, gtid_mode),
        "loose_persisted_globals_load": "OFF",
    }
    return replace(config, skip_grants=False, own_account=True, server_id=server_id, options=options)


def own_identity(datadir: Path) -> tuple[str, ...]:
    """Remove by what the copy would be taken for the backed-up server; gives what is to be said of it."""
    (datadir / _UUID_FILE).unlink(missing_ok=True)
    persisted = datadir / _PERSISTED
    if not persisted.is_file() or persisted.is_symlink():
        return ()
    persisted.rename(datadir / _PERSISTED_ASIDE)
    return (
        (
            "settings that were persisted on the backed-up server (SET PERSIST) do not apply to the replica: they are "
            f"in {datadir / _PERSISTED_ASIDE}"
        ),
    )


def set_up(config: ServerConfig, info: ServerInfo, spec: ReplicaSpec, position: Position) -> ReplicaState:
    """Make the copy of ``config``, which is at ``position``, a replica that has not begun. ``info``: of the backed-up
    server. May be repeated until replication has begun. Raises RefusedError, ServerError, ToolError."""
    facts, start = spec.at(position)
    refuse_other_source(spec.restored, start, facts, info.sources)
    notes = list(own_identity(config.datadir))
    dialect = dialect_of(info.flavour, info.version)
    launched = LaunchedServer(replica_config(config, info, spec.server_id, facts.gtid_mode))
    with launched as server, server.connection.connect() as session:
        session.execute("SET SESSION sql_log_bin = 0")
        notes += _leave_group(session, dialect)
        set_source(session, dialect, spec.source, start.position, by_gtid=start.by_gtid, delay=spec.delay)
        events = disable_elsewhere(session, facts.server_id)
        uuid = str(session.variables(dialect.uid).get(dialect.uid, ""))
        if uuid and uuid in (facts.uuid, info.server_uuid) and dialect.keeps_uuid_in_datadir:
            raise RefusedError(
                f"the copy has the server_uuid of another server: {uuid}",
                hint=f"remove {config.datadir / _UUID_FILE} and repeat the command",
            )
    return ReplicaState(
        spec.server_id,
        f"{spec.source.host}:{spec.source.port}",
        start,
        facts.gtid_mode,
        uuid=uuid,
        events=events,
        notes=tuple(notes),
    )


def _leave_group(session: Session, dialect: Dialect) -> list[str]:
    """Remove what makes the copy of a member look like one. Raises ServerError."""
    if dialect.flavour is Flavour.MARIADB:
        return []
    found = []
    channels = session.query(
        "SELECT DISTINCT Channel_name FROM mysql.slave_master_info WHERE Channel_name LIKE %s", _GROUP_CHANNELS
    )
    for (name,) in channels:
        session.execute("DELETE FROM mysql.slave_master_info WHERE Channel_name = %s", name)
        session.execute("DELETE FROM mysql.slave_relay_log_info WHERE Channel_name = %s", name)
        session.execute("DELETE FROM mysql.slave_worker_info WHERE Channel_name = %s", name)
    has_schema = bool(session.query("SHOW SCHEMAS LIKE %s", _GROUP_SCHEMA.replace("_", "\\_")))
    if has_schema:
        session.execute(f"DROP SCHEMA `{_GROUP_SCHEMA}`")
    if channels or has_schema:
        found.append(
            "the backup is of a member of a group: the copy is none, its channels' credentials"
            + (f" and the schema {_GROUP_SCHEMA}" if has_schema else "")
            + " were removed; to make it a member, let the group add it (clone, addInstance)"
        )
    return found


def state_of(document: Mapping[str, Any]) -> ReplicaState | None:
    """What an earlier attempt remembered; None for nothing."""
    return ReplicaState.from_json(document) if document else None
