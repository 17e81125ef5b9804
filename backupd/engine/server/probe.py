"""What is this server? One look, everything that later work has to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backupd.engine.server.census import take_census
from backupd.engine.sql.client import Connection, Session, is_denied
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, Position, Role, ServerInfo, Version

_KEPT = """
aria_block_size aria_encrypt_tables aria_log_dir_path basedir binlog_checksum binlog_do_db
binlog_expire_logs_auto_purge binlog_expire_logs_seconds binlog_format binlog_ignore_db binlog_row_image
character_set_server character_set_system collation_server datadir default_storage_engine default_tmp_storage_engine
encrypt_binlog event_scheduler expire_logs_days explicit_defaults_for_timestamp ft_max_word_len
ft_min_word_len gtid_domain_id gtid_mode gtid_slave_pos gtid_strict_mode hostname
innodb_buffer_pool_size innodb_checksum_algorithm innodb_compression_algorithm innodb_data_file_path
innodb_data_home_dir innodb_default_row_format innodb_directories innodb_encrypt_log
innodb_encrypt_tables innodb_file_per_table innodb_flush_log_at_trx_commit innodb_ft_max_token_size
innodb_ft_min_token_size innodb_log_block_size innodb_log_file_size innodb_log_files_in_group
innodb_log_group_home_dir innodb_page_size innodb_redo_log_capacity innodb_strict_mode
innodb_undo_directory innodb_undo_tablespaces log_bin log_bin_basename log_bin_index log_error
log_replica_updates log_slave_updates lower_case_file_system lower_case_table_names max_allowed_packet
old_mode open_files_limit performance_schema pid_file plugin_dir port read_only relay_log_basename
secure_file_priv server_id server_uid server_uuid socket sql_mode super_read_only sync_binlog
system_time_zone table_definition_cache thread_stack time_zone tmpdir transaction_isolation tx_isolation
version version_comment version_compile_os wsrep_on
"""
KEPT_VARIABLES = frozenset(_KEPT.split())
"""What a started copy needs, what the plan must remap, and what the census judges."""


_REPLICA_THREADS = frozenset({"Slave_IO", "Slave_SQL", "Slave_worker", "Connect"})


@dataclass(frozen=True, slots=True)
class Probed:
    """A server and its census. ``denied``: questions that the account may not ask, with the server's own
    words.
    """

    info: ServerInfo
    warnings: tuple[str, ...]
    denied: tuple[str, ...] = ()


def probe(connection: Connection) -> ServerInfo:
    """Look at the server. Raises ServerError: it cannot be reached, or the account lacks a privilege
    (named).
    """
    with connection.connect() as session:
        return examine(session).info


def examine(session: Session, *, tolerant: bool = False) -> Probed:
    """``probe`` and census on an open session. With ``tolerant``, what the account may not ask is left out
    and listed in ``denied``; otherwise it raises ServerError."""
    # No path may hold a NUL, and no server has one in a variable.
    variables = {
        str(name).lower(): str(value).replace("\0", "\ufffd")
        for name, value in session.query("SHOW GLOBAL VARIABLES", shown=True)
    }
    flavour = flavour_of(variables.get("version", ""), variables.get("version_comment", ""))
    try:
        version = Version.parse(variables.get("version", ""))
    except ValueError as error:
        raise ServerError(
            f"what answers at {session.connection.address} is no server that is known here",
            detail=f"its version: {error}",
        ) from error
    dialect = dialect_of(flavour, version)
    denied: list[str] = []
    log = next(iter(_records(session, dialect.binlog_status, denied, tolerant=tolerant)), {})
    # Variables on new MariaDB only; the log's status tells them everywhere.
    variables |= {
        "binlog_do_db": str(log.get("Binlog_Do_DB") or ""),
        "binlog_ignore_db": str(log.get("Binlog_Ignore_DB") or ""),
    }
    role = _role(session, dialect, denied)
    census = take_census(session, dialect, variables, replica=role is Role.REPLICA, denied=denied if tolerant else None)
    info = ServerInfo(
        flavour=flavour,
        version=version,
        version_text=f"{variables['version']} {variables.get('version_comment', '')}".strip(),
        datadir=variables.get("datadir", ""),
        hostname=variables.get("hostname", ""),
        server_id=int(variables.get("server_id", "0")),
        server_uuid=variables.get(dialect.uid, ""),
        role=role,
        read_only=_is_on(variables.get("read_only", "OFF")),
        log_bin=_is_on(variables.get("log_bin", "OFF")),
        position=_position(session, dialect, log),
        gtid_mode=_gtid_mode(flavour, variables),
        engines=census.engines,
        data_bytes=census.data_bytes,
        tables=census.tables,
        encrypted=census.encrypted,
        external=census.external,
        plugins=_plugins(session),
        variables={name: value for name, value in variables.items() if name in KEPT_VARIABLES},
    )
    return Probed(info, census.warnings, tuple(denied))


def flavour_of(version: str, comment: str) -> Flavour:
    """From ``@@version`` and ``@@version_comment``."""
    if "mariadb" in (version + comment).lower():
        return Flavour.MARIADB
    return Flavour.PERCONA if "percona" in comment.lower() else Flavour.MYSQL


def _is_on(value: str) -> bool:
    # MariaDB 12 and super_read_only know more words than ON; every one but these restricts something.
    return value.upper() not in ("OFF", "0", "")


def _records(session: Session, sql: str, denied: list[str], *, tolerant: bool) -> list[dict[str, object]]:
    try:
        return session.records(sql)
    except ServerError as error:
        if not tolerant or not is_denied(error):
            raise
        denied.append(error.detail)
        return []


def _position(session: Session, dialect: Dialect, log: Mapping[str, object]) -> Position:
    if not log:
        return Position()
    gtid = str(session.scalar(dialect.executed_gtid) or "").replace("\n", "")
    return Position(file=str(log["File"]), pos=int(str(log["Position"])), gtid=gtid)


def _role(session: Session, dialect: Dialect, denied: list[str]) -> Role:
    """Without the right to ask, a replica is known by its running threads, which PROCESS shows."""
    try:
        if session.records(dialect.replica_status):
            return Role.REPLICA
    except ServerError as error:
        if not is_denied(error):
            raise
        denied.append(error.detail)
    threads = session.records("SHOW PROCESSLIST", shown=True)
    if any(row["User"] == "system user" and row["Command"] in _REPLICA_THREADS for row in threads):
        return Role.REPLICA
    dumps = [row for row in threads if str(row["Command"]).startswith("Binlog Dump")]
    return Role.SOURCE if dumps else Role.STANDALONE


def _gtid_mode(flavour: Flavour, variables: Mapping[str, str]) -> str:
    """MySQL's own word, or for MariaDB, whose events always carry a GTID: ``strict`` or ``on``."""
    if flavour is Flavour.MARIADB:
        return "strict" if _is_on(variables.get("gtid_strict_mode", "OFF")) else "on"
    return variables.get("gtid_mode", "OFF").lower()


def _plugins(session: Session) -> tuple[str, ...]:
    """Plugins that came from a library, as ``plugin_load`` takes them: ``name=library``."""
    rows = session.query(
        "SELECT PLUGIN_NAME, PLUGIN_LIBRARY FROM information_schema.PLUGINS "
        "WHERE PLUGIN_LIBRARY IS NOT NULL AND PLUGIN_STATUS = 'ACTIVE'"
    )
    return tuple(sorted(f"{name}={library}" for name, library in rows))


def read_dialect(session: Session) -> Dialect:
    """The dialect of an open session's server, for work that needs no whole probe."""
    version, comment = session.query("SELECT @@GLOBAL.version, @@GLOBAL.version_comment")[0]
    return dialect_of(flavour_of(str(version), str(comment)), Version.parse(str(version)))
