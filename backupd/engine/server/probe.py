"""The census of one server: what it holds that a backup could miss, and what makes a recovery silently
incomplete.

A physical tool copies InnoDB and the files it knows by their endings. Everything else, whatever lives outside the
datadir, and settings that leave holes in the binary log are found here and reported.

Three of these have functions of their own. ``recovery_risks``: settings. ``unlogged``: sessions that turned the binary
log off for themselves (sql_log_bin = 0). MySQL shows it for every session that is connected. MariaDB does not; where
its performance schema is on, statements that touched the variable since the server's start are seen, of whatever
session. Without the performance schema nothing is seen, and nothing is reported.

``prepared_xa``: XA transactions that wait for their coordinator, through a restart and on a restored copy. Their rows
are in no snapshot, yet the binary log holds them before the position of the snapshot; behind it is their XA COMMIT
alone. So what was read in the snapshot cannot be rolled forward over that.

What is this server? One look, everything that later work has to know.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from backupd.engine.server.wsrep import is_node
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.engine.sql.tables import Table, list_tables
from backupd.model.errors import ServerError
from backupd.model.server_facts import ExternalPath, Flavour, Position, Role, ServerInfo, Version
from backupd.model.table import quote_name
from backupd.model.text import few
from backupd.process.folders import read_plain


def recovery_risks(variables: Mapping[str, str], flavour: Flavour, *, replica: bool = False) -> tuple[str, ...]:
    """One sentence per risk. ``variables``: the server's global variables, as text, names in lower case;
    ``replica``: does it follow another server?"""
    log_bin = variables.get("log_bin", "").upper()
    if log_bin in ("OFF", "0"):
        missing = (
            "the server writes no binary log (log_bin is off): only the times of backups can be recovered, and each "
            "is taken in full, because nothing shows that an increment belongs to the same history"
        )
        return (missing, *_crash_risks(variables))
    return (*_log_risks(variables, flavour, replica), *_crash_risks(variables))


def _log_risks(variables: Mapping[str, str], flavour: Flavour, replica: bool) -> Iterator[str]:
    def value(name: str) -> str:
        return variables.get(name, "").upper()

    if value("sync_binlog") not in ("1", ""):
        yield (
            f"sync_binlog is {value('sync_binlog')}, not 1: a crash of the host loses the end of the binary "
            "log, and the server then continues on another branch of history"
        )
    for name in ("binlog_do_db", "binlog_ignore_db"):
        if variables.get(name):
            yield f"{name} is set ({variables[name]}): the binary log lacks the changes of other schemas"
    if value("binlog_format") in ("STATEMENT", "MIXED"):
        yield (
            f"binlog_format is {value('binlog_format')}: a replay of statements may change other rows, for example "
            "with a temporary table that was open at the backup's position; ROW is exact"
        )
    if value("binlog_checksum") == "NONE":
        yield "binlog_checksum is NONE: damage of the binary log is found only when it is replayed"
    if value("binlog_row_image") in ("MINIMAL", "NOBLOB"):
        yield f"binlog_row_image is {value('binlog_row_image')}: changes cannot be searched or undone in full"
    if replica and "OFF" in (value("log_slave_updates"), value("log_replica_updates")):
        yield ("log_slave_updates is off: what this replica replicates is not in its own binary log")
    if flavour is not Flavour.MARIADB and value("gtid_mode") in ("OFF", "OFF_PERMISSIVE", "ON_PERMISSIVE"):
        yield f"gtid_mode is {value('gtid_mode')}: positions are file and offset, valid on this server only"


def kept_for(variables: Mapping[str, str]) -> timedelta | None:
    """After which time the server removes a binary log by itself; None: never. ``variables`` as above."""
    if variables.get("binlog_expire_logs_auto_purge", "").upper() in ("OFF", "0"):
        return None
    seconds = float(variables.get("binlog_expire_logs_seconds") or 0)
    if not seconds:
        seconds = float(variables.get("expire_logs_days") or 0) * 86_400
    return timedelta(seconds=seconds) if seconds else None


def _crash_risks(variables: Mapping[str, str]) -> Iterator[str]:
    flush = variables.get("innodb_flush_log_at_trx_commit", "1")
    if flush != "1":
        yield f"innodb_flush_log_at_trx_commit is {flush}, not 1: a crash loses committed transactions"


_REFUSED = (1401, 1064)
"""How MySQL 8 refuses who has not XA_RECOVER_ADMIN; and a server to which these words mean nothing."""


def prepared_xa(session: Session, dialect: Dialect) -> tuple[str, ...]:
    """In the words of XA statements (``X'6731',X'',1``). Raises ServerError, also when the account may not ask (MySQL
    wants XA_RECOVER_ADMIN)."""
    rows = session.query(dialect.xa_recover)
    if dialect.flavour is Flavour.MARIADB:
        return tuple(str(row[3]) for row in rows)
    names = []
    for number, first, _second, data in rows:
        name = str(data).removeprefix("0x")
        names.append(f"X'{name[: 2 * int(first)]}',X'{name[2 * int(first) :]}',{number}")
    return tuple(names)


def visible_xa(session: Session, dialect: Dialect) -> tuple[str, ...]:
    """The same; none where the account may not ask. Raises ServerError."""
    try:
        return prepared_xa(session, dialect)
    except ServerError as error:
        if not is_denied(error) and error_code(error) not in _REFUSED:
            raise
        return ()


def not_a_base(prepared: Collection[str]) -> str:
    """What they mean for a dump, as a sentence."""
    return (
        f"{len(prepared)} XA transactions were prepared when the snapshots were taken, so that this backup cannot "
        f"be rolled forward: {'; '.join(prepared)}"
    )


_COPIED = {
    Flavour.MARIADB: frozenset({"InnoDB", "MyISAM", "Aria", "MRG_MyISAM", "CSV", "ARCHIVE", "ROCKSDB"}),
    Flavour.MYSQL: frozenset({"InnoDB", "MyISAM", "MRG_MYISAM", "CSV", "ARCHIVE"}),
    Flavour.PERCONA: frozenset({"InnoDB", "MyISAM", "MRG_MYISAM", "CSV", "ARCHIVE"}),
}
"""Engines whose files the physical tool takes and that a restored server opens (mariadb-backup: its list of file
endings; XtraBackup: its manual, which names ROCKSDB from 8.0.6 on: nobody has restored one here, so it does not count).
"""
ROCKSDB = "ROCKSDB"

CLONE = "clone"
"""The tool that copies InnoDB only."""
_NO_DATA = frozenset({"BLACKHOLE", "SEQUENCE", "PERFORMANCE_SCHEMA"})
_ELSEWHERE = frozenset({"FEDERATED", "SPIDER", "CONNECT", "S3", "SPHINX", "NDBCLUSTER", "ColumnStore"})

_TEMPORARY = frozenset({"innodb_temporary", "innodb_temp"})
_LINKED_FILES = ("MYD", "MYI", "MAD", "MAI")
_LONGEST_LINK = 4096
_SHOWN = 10


def uncovered(engines: Iterable[str], flavour: Flavour, tool: str = "") -> frozenset[str]:
    """Those of ``engines`` whose rows are on this server and in no physical backup by ``tool`` (its name; "": the one
    of the flavour)."""
    copied = frozenset({"InnoDB"}) if tool == CLONE else _COPIED[flavour]
    kept = copied | _NO_DATA | _ELSEWHERE | {"MRG_MyISAM", "MRG_MYISAM", "MEMORY", ""}
    return frozenset(engine for engine in engines if engine not in kept)


def is_copied(engine: str, flavour: Flavour, tool: str) -> bool:
    """Does a physical backup by ``tool`` (its name) hold the files of tables of ``engine``?"""
    return engine == "InnoDB" if tool == CLONE else not uncovered([engine], flavour, tool)


def has_rocksdb(session: Session) -> bool:
    """Is that engine loaded, with tables or without? Raises ServerError."""
    return bool(
        session.scalar(
            "SELECT COUNT(*) FROM information_schema.ENGINES WHERE ENGINE = 'ROCKSDB' AND SUPPORT IN ('YES', 'DEFAULT')"
        )
    )


@dataclass(frozen=True, slots=True)
class Census:
    """``engines``: number of user tables per engine; ``data_bytes``: what a physical backup will read,
    estimated from allocated file sizes and the engines' own figures; ``warnings``: sentences for people.
    ``datadir_is_mount`` and ``datadir_readable`` are None when this process runs on another host."""

    engines: Mapping[str, int]
    tables: int
    data_bytes: int
    external: tuple[ExternalPath, ...]
    encrypted: tuple[str, ...]
    warnings: tuple[str, ...]


def take_census(
    session: Session,
    dialect: Dialect,
    variables: Mapping[str, str],
    *,
    replica: bool = False,
    denied: list[str] | None = None,
) -> Census:
    """Count and list. ``variables``: the server's global variables; ``replica``: does it follow another?

    With ``denied`` given, a question that the account may not ask is noted there instead of raising
    ServerError. The datadir is looked into when this process can: symlinks are invisible to SQL.
    """
    tables = list_tables(session)
    user_tables = [table for table in tables if not table.is_system]
    spaces = [
        (str(name), str(path), int(str(size or 0)))
        for name, path, size in _ask(session.query, dialect.tablespaces, denied)
        if name not in _TEMPORARY
    ]
    encrypted = _encrypted(_ask(session.query, dialect.encrypted, denied), variables)
    external = external_paths(spaces, tables, variables)
    sized = any(size for _, _, size in spaces)
    not_innodb = sum(table.size for table in tables if table.engine != "InnoDB" or not sized)
    return Census(
        engines=dict(Counter(table.engine for table in user_tables if table.engine)),
        tables=len(user_tables),
        data_bytes=not_innodb + sum(size for _, _, size in spaces),
        external=external,
        encrypted=encrypted,
        warnings=(
            *_engine_warnings(user_tables, dialect.flavour),
            *_name_warnings(session, user_tables, variables),
            *_encryption_warnings(encrypted),
            *_xa_warnings(session, dialect),
            *recovery_risks(variables, dialect.flavour, replica=replica),
        ),
    )


def external_paths(
    spaces: Iterable[tuple[str, str, int]], tables: Iterable[Table], variables: Mapping[str, str]
) -> tuple[ExternalPath, ...]:
    """Everything outside the datadir, by kind and name. ``spaces``: (name, path, bytes) of each tablespace.

    Names of tables are in the server's file name encoding (``shop/orders``, ``shop/gr@1r@1iße``), as InnoDB
    has them.
    """
    datadir = Path(variables.get("datadir", "/"))
    found: dict[tuple[str, str], ExternalPath] = {}

    def add(kind: str, name: str, path: str) -> None:
        external = Path(os.path.normpath(datadir / path))
        if path and not external.is_relative_to(os.path.normpath(datadir)):
            found.setdefault((kind, str(external)), ExternalPath(kind, name, str(external)))

    for name, path, _ in spaces:
        kind = "undo" if name.startswith(("innodb_undo", "undo")) else "tablespace"
        add("system" if name == "innodb_system" else kind, name, path)
    for path in system_files(variables):
        add("system", "innodb_system", path)
    add("undo", "innodb_undo_directory", variables.get("innodb_undo_directory", ""))
    add("redo", "innodb_log_group_home_dir", variables.get("innodb_log_group_home_dir", ""))
    add("redo", "aria_log_dir_path", variables.get("aria_log_dir_path", ""))
    for name in ("log_bin_basename", "relay_log_basename"):
        add("binlog", name, variables.get(name, ""))
    links = _links(datadir)
    for entry in links or ():
        found.setdefault((entry.kind, entry.path), entry)
    for table in tables if links is None else ():
        for path in _directories(table.options):
            if table.engine != "InnoDB":
                add("tablespace", f"{table.name.schema}/{table.name.table}", path)
    return tuple(sorted(found.values(), key=lambda entry: (entry.kind, entry.name, entry.path)))


def system_files(variables: Mapping[str, str]) -> list[str]:
    """The files of the system tablespace as written in the configuration, joined with their home folder."""
    home = variables.get("innodb_data_home_dir", "")
    files = [part.split(":")[0].strip() for part in variables.get("innodb_data_file_path", "").split(";")]
    return [os.path.join(home, name) for name in files if name]  # noqa: PTH118 - keeps a relative path relative


_Row = TypeVar("_Row")


def _ask(ask: Callable[[str], list[_Row]], sql: str, denied: list[str] | None) -> list[_Row]:
    """What ``ask`` answers; where the account may not ask, that goes to ``denied``, unless that is None. Raises
    ServerError."""
    try:
        return ask(sql)
    except ServerError as error:
        if denied is None or not is_denied(error):
            raise
        denied.append(error.detail)
        return []


def _encrypted(rows: Sequence[tuple[object, ...]], variables: Mapping[str, str]) -> tuple[str, ...]:
    names = [str(row[0]) for row in rows if row[0]]
    for variable in ("innodb_encrypt_log", "aria_encrypt_tables", "encrypt_binlog"):
        if variables.get(variable, "").upper() in ("ON", "1"):
            names.append(variable)
    return tuple(sorted(names))


def _directories(options: str) -> Iterator[str]:
    for word in ("DATA DIRECTORY='", "INDEX DIRECTORY='"):
        _, found, rest = options.partition(word)
        if found:
            yield rest.partition("'")[0]


def _links(datadir: Path) -> list[ExternalPath] | None:
    """Symlinked schemas, symlinked table files and .isl files; None when the datadir is out of reach."""
    try:
        schemas = sorted(os.scandir(datadir), key=lambda entry: entry.name)
    except OSError:
        return None
    found: list[ExternalPath] = []
    for schema in schemas:
        if schema.is_symlink() and schema.is_dir():
            found.append(ExternalPath("schema", schema.name, os.path.realpath(schema.path)))
        elif schema.is_dir():
            with contextlib.suppress(OSError):  # dropped since
                found += _linked_tables(schema.name, sorted(os.scandir(schema.path), key=lambda e: e.name))
    return found


def _linked_tables(schema: str, files: Iterable[os.DirEntry[str]]) -> Iterator[ExternalPath]:
    for file in files:
        name, _, ending = file.name.rpartition(".")
        if ending in _LINKED_FILES and file.is_symlink():
            yield ExternalPath("tablespace", f"{schema}/{name}", os.path.realpath(file.path))
        elif ending == "isl":
            with contextlib.suppress(OSError):  # dropped since, or not ours to read: SQL knows it too
                yield ExternalPath("tablespace", f"{schema}/{name}", linked_tablespace(Path(file.path)))


def linked_tablespace(path: Path) -> str:
    """Where the tablespace is of which the server wrote the file ``path`` (``.isl``). Raises OSError, also where
    something else than a file was put in its place."""
    return os.fsdecode(read_plain(path, _LONGEST_LINK)).strip("\r\n\0 ")


def _engine_warnings(tables: Sequence[Table], flavour: Flavour) -> Iterator[str]:
    by_engine: dict[str, list[str]] = defaultdict(list)
    for table in tables:
        by_engine[table.engine].append(str(table.name))
    missing = uncovered(by_engine, flavour)
    for engine, names in sorted(by_engine.items()):
        shown = few(names, _SHOWN)
        if engine == "MEMORY":
            yield f"MEMORY tables are restored empty, as after any restart of the server: {shown}"
        elif engine in _ELSEWHERE:
            yield f"{engine} keeps its data elsewhere; only the definition is in the backup: {shown}"
        elif not engine:
            yield f"the server cannot open these tables, so their data may be missing or damaged: {shown}"
        elif engine in missing:
            yield f"the physical backup does not cover engine {engine}; take logical backups of: {shown}"


def _name_warnings(session: Session, tables: Sequence[Table], variables: Mapping[str, str]) -> Iterator[str]:
    if variables.get("lower_case_table_names", "0") != "0":
        return
    groups: dict[tuple[str, str], set[str]] = defaultdict(set)
    for table in tables:
        groups[(table.name.schema.lower(), table.name.table.lower())].add(str(table.name))
    for (schema,) in session.query("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA"):
        groups[(schema.lower(), "")].add(quote_name(schema))
    for names in sorted(sorted(group) for group in groups.values() if len(group) > 1):
        yield (f"names that differ only by case, so a restore needs lower_case_table_names=0: {', '.join(names)}")


def _encryption_warnings(encrypted: Sequence[str]) -> Iterator[str]:
    if encrypted:
        shown = ", ".join(encrypted[:_SHOWN]) + (" ..." if len(encrypted) > _SHOWN else "")
        yield (f"encrypted by the server, so the backup is useless without the key files of its key plugin: {shown}")


def _xa_warnings(session: Session, dialect: Dialect) -> Iterator[str]:
    if prepared := visible_xa(session, dialect):
        yield (
            f"{len(prepared)} prepared XA transactions wait for their coordinator; they survive backup and "
            "restore and hold their locks until XA COMMIT or XA ROLLBACK"
        )


_SESSIONS = """
SELECT DISTINCT t.PROCESSLIST_USER FROM performance_schema.variables_by_thread v
JOIN performance_schema.threads t ON t.THREAD_ID = v.THREAD_ID
WHERE v.VARIABLE_NAME = 'sql_log_bin' AND v.VARIABLE_VALUE IN ('OFF', '0') AND t.TYPE = 'FOREGROUND'
AND t.PROCESSLIST_USER IS NOT NULL AND t.PROCESSLIST_USER <> 'event_scheduler' AND t.PROCESSLIST_ID <> CONNECTION_ID()
"""
_STATEMENTS = """
SELECT DIGEST_TEXT, SUM(COUNT_STAR), MIN(FIRST_SEEN), MAX(LAST_SEEN)
FROM performance_schema.events_statements_summary_by_digest WHERE DIGEST_TEXT LIKE 'SET %sql_log_bin%'
GROUP BY DIGEST_TEXT
"""
_OURS = "SET SESSION `sql_log_bin` = ?"
"""As the snapshot of a witness says it, on MariaDB; written by somebody else it is not distinguished."""
_UNKNOWN = (1109, 1142, 1146)
"""No such table, or not for this account."""


def unlogged(session: Session, dialect: Dialect) -> Iterator[str]:
    """One sentence for each trace that the server shows. Raises ServerError when it went away."""
    mariadb = dialect.flavour is Flavour.MARIADB
    users = [] if mariadb else sorted(str(row[0]) for row in session.permitted(_SESSIONS, also=_UNKNOWN) or ())
    if users:
        yield (
            f"sessions of {', '.join(users)} have turned the binary log off for themselves (sql_log_bin = 0): their "
            "changes are in no replay"
        )
    for text, count, first, last in session.permitted(_STATEMENTS, also=_UNKNOWN) or ():
        said = str(text).strip()
        if not mariadb or said != _OURS:
            yield (
                f"sql_log_bin was set by {count} statements ({said}), first at {first:%Y-%m-%d %H:%M:%S}, last at "
                f"{last:%Y-%m-%d %H:%M:%S} of the server's clock: changes of a session while it is 0 are in no replay"
            )


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
            f"unsupported server at {session.connection.address}",
            detail=f"its version: {error}",
        ) from error
    dialect = dialect_of(flavour, version)
    denied: list[str] = []
    log = next(iter(_ask(session.records, dialect.binlog_status, denied if tolerant else None)), {})
    # Variables on new MariaDB only; the log's status shows them everywhere.
    variables |= {
        "binlog_do_db": str(log.get("Binlog_Do_DB") or ""),
        "binlog_ignore_db": str(log.get("Binlog_Ignore_DB") or ""),
    }
    channels = _ask(session.records, dialect.replica_status, denied)
    role = Role.REPLICA if channels else _role(session, variables)
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
        position=position_of(session, dialect, log),
        gtid_mode=_gtid_mode(flavour, variables),
        engines=census.engines,
        data_bytes=census.data_bytes,
        tables=census.tables,
        encrypted=census.encrypted,
        external=census.external,
        plugins=_plugins(session),
        variables={name: value for name, value in variables.items() if name in KEPT_VARIABLES},
        sources=sources_of(channels),
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


def position_of(session: Session, dialect: Dialect, log: Mapping[str, object]) -> Position:
    """The position in the binary log that ``log`` (a row of ``binlog_status``) holds, with all that is executed. Raises
    ServerError."""
    if not log:
        return Position()
    gtid = str(session.scalar(dialect.executed_gtid) or "").replace("\n", "")
    return Position(file=str(log["File"]), pos=int(str(log["Position"])), gtid=gtid)


def sources_of(channels: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The servers that the rows of ``replica_status`` name, as of ``ServerInfo``; none for one that never answered."""
    found = set()
    for row in channels:
        uuid, number = (row.get(f"Source_{name}", row.get(f"Master_{name}")) for name in ("UUID", "Server_Id"))
        found.add(str(uuid or number or ""))
    return tuple(sorted(found - {""}))


def _role(session: Session, variables: Mapping[str, str]) -> Role:
    """Without the right to ask, a replica is known by its running threads, which PROCESS shows."""
    threads = session.records("SHOW PROCESSLIST", shown=True)
    if any(row["User"] == "system user" and row["Command"] in _REPLICA_THREADS for row in threads):
        return Role.REPLICA
    if is_node(variables):
        return Role.NODE
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
