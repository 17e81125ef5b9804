"""Is the history that a backup was taken from still this server's own?

A server that was restored, or whose binary log was thrown away, may bear the same name, port and identity as before.
An increment on a backup of its other life would mix pages of two histories, and no tool would notice. So the server is
asked for whatever contradicts the position where the earlier backup ended: its log sequence number and its binary log.
The absence of a contradiction proves nothing: a copy that was promoted, a volume that was set back to a snapshot or a
datadir made anew writes its own log past every recorded number. So what is asked for besides is evidence: the binary
log must hold, right before the position where the backup ended, the very bytes that it held then (they hold times to
the second). Without a binary log, or where nobody's changes go into it, nothing can show that.

Measured with MariaDB 10.11.19: ``BINLOG_GTID_POS(file, pos)`` is NULL for a position that is not between two events, or
not there; it needs no privilege. ``server_uid`` is made of a network address and the port, so that a restored server
on the same host has the one of its source.

A server as the source of its binary logs, asked by SQL: which files there are, its position, who it is.

Measured with MariaDB 10.11.19 and MySQL 9.7.4: sizes of SHOW BINARY LOGS include what was written a moment ago, and the
encrypted files of MariaDB are as long as what is read of them. Those of MySQL have 512 bytes in front that no reader
gets (its manual), so a listed size is only an upper bound; the position where the server writes is exact.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from backupd.engine.server.probe import flavour_of, kept_for, position_of, read_dialect
from backupd.engine.server.semi_sync import SemiSync, has_dump, moment, read_semi_sync
from backupd.engine.server.wsrep import is_node, wsrep_status
from backupd.engine.sql.client import Connection, Session, error_code
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.binlog import covers, is_log_name, plus
from backupd.model.errors import MisnamedError, RefusedError, ServerError
from backupd.model.server_facts import Flavour, Position, Role, ServerInfo, Version
from backupd.process.folders import as_its_owner, open_plain

_LSN_VARIABLES = ("Innodb_lsn_current", "Innodb_redo_log_current_lsn")
"""MariaDB and Percona Server; MySQL from 8.0.30 on."""
_LSN_LINE = "Log sequence number"
_CHECKPOINT_VARIABLES = ("Innodb_lsn_last_checkpoint", "Innodb_redo_log_checkpoint_lsn")
_CHECKPOINT_LINE = "Last checkpoint at"
_HEAD, _TAIL = 256, 16 * 1024
_IN_USE = slice(21, 23)
"""Flags of a binary log's first event: they show whether the server still writes to the file."""
_LAYOUT = ("innodb_page_size", "innodb_data_file_path", "innodb_undo_tablespaces")
_KEY_PLUGINS = "encryption plugins"


def current_lsn(session: Session) -> int | None:
    """Up to which log sequence number the server has written; None where the account may not know. Raises
    ServerError."""
    return _number(session, _LSN_VARIABLES, _LSN_LINE)


def last_checkpoint(session: Session) -> int | None:
    """Where a recovery of the server would begin; None where the account may not know. Raises ServerError."""
    return _number(session, _CHECKPOINT_VARIABLES, _CHECKPOINT_LINE)


def _number(session: Session, variables: Sequence[str], line: str) -> int | None:
    if (number := _status(session, variables)) is not None:
        return number
    rows = session.permitted("SHOW ENGINE INNODB STATUS")
    found = re.search(rf"^{line}\s+(\d+)", str(rows[0][2]), re.MULTILINE) if rows else None
    return int(found[1]) if found else None


def _status(session: Session, variables: Sequence[str]) -> int | None:
    """Of the first of ``variables`` that the server has."""
    for name in variables:
        if rows := session.query("SHOW GLOBAL STATUS LIKE %s", name):
            return int(rows[0][1])
    return None


def log_digest(info: ServerInfo, position: Position) -> str:
    """SHA-256 of the binary log right before ``position``, and of the file's beginning. Raises OSError when it cannot
    be read, ValueError when it does not go so far."""
    path = Path(info.variables.get("log_bin_basename", "")).parent / position.file
    with as_its_owner(Path(info.datadir)):
        opened = open_plain(path, follow=True)
    with open(opened, "rb") as file:  # noqa: PTH123 - a descriptor has no path
        head = bytearray(file.read(min(_HEAD, position.pos)))
        begin = max(position.pos - _TAIL, len(head))
        file.seek(begin)
        tail = file.read(max(position.pos - begin, 0))
    if len(head) + len(tail) < min(position.pos, len(head) + _TAIL):
        raise ValueError(f"{path} ends before {position.pos}")
    head[_IN_USE] = bytes(len(head[_IN_USE]))
    return hashlib.sha256(head + tail).hexdigest()


def gtid_at(session: Session, position: Position) -> str:
    """What a MariaDB server had executed at a position of its binary log; "" where it does not say. Raises
    ServerError."""
    return str(session.scalar("SELECT BINLOG_GTID_POS(%s, %s)", position.file, position.pos) or "")


def mute(info: ServerInfo) -> str:
    """Why the binary log of this server could not show that its history is still the same; "" when it could."""
    if not info.log_bin:
        return "without a binary log (log_bin) nothing shows that the server's history is still the same"
    updates = [info.variables[name] for name in ("log_slave_updates", "log_replica_updates") if name in info.variables]
    if info.role is Role.REPLICA and "ON" not in updates:
        return "a replica without log_slave_updates cannot show that its history is still the same"
    return ""


def keyed(digest: str, key: bytes) -> str:
    """What is stored of ``digest``: which key, and HMAC-SHA-256 with it. Who reads the store and holds a copy of the
    log cannot tell by it that they belong together."""
    return f"{_keyed(b'', key)[:8]}:{_keyed(digest.encode(), key)}"


def _keyed(content: bytes, key: bytes) -> str:
    return hmac.new(key, b"binary log" + content, hashlib.sha256).hexdigest()


def missing_evidence(info: ServerInfo, position: Position, stored: str, key: bytes) -> str:
    """Why it is not shown that the server is of the history in which ``position`` had the digest of which ``stored`` is
    the ``keyed`` form, or itself (in backups of earlier versions); "" when it is."""
    silent = mute(info)
    if silent:
        return silent
    if not stored:
        return "the binary log could not be read at the backup, so nothing shows that the server's history is the same"
    known, colon, _ = stored.partition(":")
    try:
        digest = log_digest(info, position)
        if stored == (keyed(digest, key) if colon else digest):
            return ""
    except OSError as error:
        return (
            f"the binary log {position.file} cannot be read ({error.strerror}), so nothing shows that the server's"
            " history is still the same"
        )
    except ValueError as error:
        return f"the binary log was reset: {error}"
    return (
        f"before {position.file}:{position.pos} the binary log holds other events than at the backup"
        if not colon or keyed("", key).startswith(f"{known}:")
        else "another identity key was used at the backup, so nothing shows that the server's history is still the same"
    )


def layout_of(info: ServerInfo) -> dict[str, str]:
    """Digests of what decides which files the tool finds and whether it can read them: no increment may follow where it
    changed (measured: prepare fails on an ``ibdata2`` or an encrypted page that the full backup knew nothing of)."""
    # Key plugins have it in their names: file_key_management, keyring_file, hashicorp_key_management ...
    plugins = [plugin.partition("=")[0] for plugin in info.plugins if "key" in plugin.lower()]
    values = {name: info.variables.get(name, "") for name in _LAYOUT} | {_KEY_PLUGINS: ",".join(sorted(plugins))}
    return {name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in values.items()}


def contradiction(session: Session, info: ServerInfo, position: Position, lsn: int) -> str:
    """What speaks against the server having been at ``position`` and ``lsn`` earlier; "" when nothing does.

    Raises ServerError.
    """
    now = current_lsn(session)
    if now is not None and now < lsn:
        return f"the server's log sequence number is {now}, before the backup's {lsn}: it was restored or created again"
    return _of_log(session, info, position) or _of_gtids(session, info, position)


def _of_log(session: Session, info: ServerInfo, position: Position) -> str:
    """Is the position in the binary log there, or purged, or contradicted?"""
    base, number = _split(position.file)
    if not base or not info.log_bin:
        return ""
    rows = session.permitted("SHOW BINARY LOGS")
    if rows is None:
        return ""
    sizes = {str(row[0]): int(row[1]) for row in rows}
    if position.file in sizes:
        return _of_place(session, info, position, size=sizes[position.file])
    numbers = [found for name in sizes for stem, found in [_split(name)] if stem == base]
    if numbers and max(numbers) < number:
        return f"the server's binary log has not reached {position.file}: it was reset"
    return ""


def _of_place(session: Session, info: ServerInfo, position: Position, *, size: int) -> str:
    where = f"{position.file}:{position.pos}"
    if size < position.pos:
        return f"the server's binary log {position.file} has {size} bytes, the backup ended at {where}: it was reset"
    if info.flavour is not Flavour.MARIADB or info.role is Role.REPLICA or not position.gtid:
        return ""  # a replica's own log may know other GTIDs than those that it has reached
    found = session.scalar("SELECT BINLOG_GTID_POS(%s, %s)", position.file, position.pos)
    if found is not None and _members(position.gtid) - _replicated(session) <= _members(str(found)):
        return ""
    contradiction = "no event begins" if found is None else f"is GTID {str(found)[:200] or '(none)'}"
    return f"at {where} of the server's binary log {contradiction}, the backup ended there at {position.gtid[:200]}"


def _of_gtids(session: Session, info: ServerInfo, position: Position) -> str:
    if not position.gtid or not info.position.gtid:
        return ""
    behind = f"the server is at GTID {info.position.gtid[:200]}, the backup ended at {position.gtid[:200]}"
    if info.flavour is not Flavour.MARIADB:
        contained = session.scalar("SELECT GTID_SUBSET(%s, %s)", position.gtid, info.position.gtid)
        return "" if contained else behind
    if info.role is Role.REPLICA:
        return ""
    reached = dict(map(_domain, [*_members(info.position.gtid), *_replicated(session)]))
    lost = any(reached.get(domain, 0) < sequence for domain, sequence in map(_domain, _members(position.gtid)))
    return behind if lost else ""


def _replicated(session: Session) -> frozenset[str]:
    """What a MariaDB server that was a replica once got from its source, and need not have in its own log."""
    return _members(str(session.scalar("SELECT @@GLOBAL.gtid_slave_pos") or ""))


def _split(file: str) -> tuple[str, int]:
    """(base name, number) of a binary log file; ("", 0) for anything else."""
    base, _, number = file.rpartition(".")
    return (base, int(number)) if base and number.isdecimal() else ("", 0)


def _members(gtid: str) -> frozenset[str]:
    return frozenset(member.strip() for member in gtid.split(",") if member.strip())


def _domain(member: str) -> tuple[str, int]:
    """Domain and sequence of one MariaDB GTID."""
    fields = member.split("-")
    return fields[0], int(fields[2]) if len(fields) == 3 and fields[2].isdecimal() else 0


_NO_BINARY_LOG = 1381
_NO_SUCH_FILE = (1220, 29)
"""It is not listed, or not on the server's disk."""
_NO_SUCH_THREAD = 1094
_ANSWER_SECONDS = 10.0
_ENCRYPTION_HEADER = 512
"""Bytes in front of an encrypted file of MySQL."""
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
    its log is on the disk, None where the account may not know. ``marker``: of the restore its datadir came from.
    ``history``: the last GTID of every server in each of MariaDB's domains, what is executed elsewhere.
    ``semi_sync``: where it was asked for, read last. ``cluster``: the uuid of the Galera cluster that it is a node of,
    "" for none; ``cluster_gtids``: do its nodes give a transaction the same GTID (wsrep_gtid_mode)? ``logs_cluster``:
    does it log what other nodes wrote (log_slave_updates)?"""

    server_time: datetime
    server_uuid: str
    server_id: int
    flavour: Flavour
    version: Version
    basename: str
    logs: tuple[ListedLog, ...]
    position: Position
    lsn: int | None
    durable_lsn: int | None = None
    history: str = ""
    marker: str = ""
    semi_sync: SemiSync | None = None
    cluster: str = ""
    cluster_gtids: bool = False
    logs_cluster: bool = True

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
    from, "" for none; ``semi_sync``: a look asks for that, too. All methods raise ServerError; ``look`` UnloggedError
    where no binary log is written, and MisnamedError for a name that none has."""

    def __init__(
        self,
        connection: Connection,
        *,
        marker: Callable[[str], str] = lambda _datadir: "",
        semi_sync: bool = False,
    ) -> None:
        self.connection = replace(connection, answer_timeout=connection.answer_timeout or _ANSWER_SECONDS)
        self._marker = marker
        self._semi_sync = semi_sync

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
                f"unexpected response from {self.address}",
                detail=f"{type(error).__name__}: {error}",
                hint="check that it is a database server and that the network is stable; backupd asks it again",
            ) from error

    def look(self, *, files: bool = True, dump: int = 0) -> SourceState:
        """Everything at once. Without ``files`` no logs are listed: with thousands of them that takes a server time.
        ``dump``: as of ``read_semi_sync``."""
        with self._session() as session:
            # The clock first: what is true of this moment is true of the position that is read after it.
            server_time = moment(session.scalar("SELECT UTC_TIMESTAMP(6)"))
            variables = session.variables(
                "version",
                "version_comment",
                "server_id",
                "server_uuid",
                "server_uid",
                "datadir",
                "wsrep_on",
                "wsrep_provider",
                "wsrep_gtid_mode",
                "log_slave_updates",
            )
            flavour = flavour_of(variables.get("version", ""), variables.get("version_comment", ""))
            version = Version.parse(variables["version"])
            dialect = dialect_of(flavour, version)
            position = _position(session, dialect)
            basename, logs = position.file.rpartition(".")[0], _logs(session) if files else ()
            cluster = wsrep_status(session).get("wsrep_cluster_state_uuid", "") if is_node(variables) else ""
            if cluster:  # an SST by rsync leaves the donor's file in the list
                logs = tuple(log for log in logs if log.name.rpartition(".")[0] == basename)
            return SourceState(
                server_time=server_time,
                server_uuid=variables.get(dialect.uid, ""),
                server_id=int(variables.get("server_id", "0")),
                flavour=flavour,
                version=version,
                basename=basename,
                logs=logs,
                position=position,
                lsn=current_lsn(session),
                durable_lsn=_status(session, _DURABLE),
                history=_history(session, flavour, position),
                marker=self._marker(variables.get("datadir", "")),
                semi_sync=read_semi_sync(session, dump) if self._semi_sync else None,
                cluster=cluster,
                cluster_gtids=variables.get("wsrep_gtid_mode", "").upper() in ("ON", "1"),
                logs_cluster=variables.get("log_slave_updates", "ON").upper() in ("ON", "1"),
            )

    def look_again(self, known: SourceState) -> SourceState | None:
        """The server as it is, but for its files and where it writes, which are those of ``known``: it does not tell
        them while one commit waits for an acknowledgement and others are to be written. None where the log need not be
        the one of before: it is another server, or its log is called otherwise, or lacks what was executed, or has no
        GTIDs to show that."""
        with self._session() as session:
            server_time = moment(session.scalar("SELECT UTC_TIMESTAMP(6)"))
            variables = session.variables(
                "version", "version_comment", "server_id", "server_uuid", "server_uid", "datadir", "log_bin_basename"
            )
            flavour = flavour_of(variables.get("version", ""), variables.get("version_comment", ""))
            dialect = dialect_of(flavour, Version.parse(variables["version"]))
            gtid = str(session.scalar(dialect.executed_gtid) or "").replace("\n", "")
            now = replace(
                known,
                server_time=server_time,
                server_uuid=variables.get(dialect.uid, ""),
                server_id=int(variables.get("server_id", "0")),
                flavour=flavour,
                version=Version.parse(variables["version"]),
                basename=Path(variables.get("log_bin_basename", "")).name,
                position=replace(known.position, gtid=gtid),
                lsn=current_lsn(session),
                durable_lsn=_status(session, _DURABLE),
                marker=self._marker(variables.get("datadir", "")),
            )
        before = known.position.gtid
        same = replace(
            now,
            server_time=known.server_time,
            position=known.position,
            lsn=known.lsn,
            durable_lsn=known.durable_lsn,
        )
        return now if same == known and before and covers(gtid, before, mariadb=known.mariadb) else None

    def started(self) -> datetime:
        """When the server was started, by its own clock and to the second: two answers of one life may be a second
        apart."""
        with self._session() as session:
            now = moment(session.scalar("SELECT UTC_TIMESTAMP()"))
            return now - timedelta(seconds=_status(session, ("Uptime",)) or 0)

    def size_of(self, name: str) -> int:
        """Bytes that a reader gets of the file ``name`` by now, at least; 0 where it is not there."""
        with self._session() as session:
            for row in session.records("SHOW BINARY LOGS"):
                if row["Log_name"] == name:
                    return int(row["File_size"]) - (_ENCRYPTION_HEADER if row.get("Encrypted") == "Yes" else 0)
        return 0

    def previous_gtids(self, name: str) -> str | None:
        """Everything that was executed before the file ``name``; None where it is not there, or says nothing.

        It holds what older files held. What came with the data of a MySQL server that was made from a backup is in no
        file, but in gtid_purged, with what files held that are gone: all of it was executed before every file there is.
        """
        with self._session() as session:
            gtids = gtids_before(session, name)
            purged = session.variables("gtid_purged").get("gtid_purged") if gtids is not None else None
            return gtids if purged is None else plus(gtids or "", re.sub(r"\s+", "", purged), mariadb=False)

    def end_dump(self, thread_id: int) -> None:
        """End a dump of this account, as MariaDB's own replica does: a server keeps one whose receiver is gone until it
        cannot write any more (net_write_timeout), and counts it. Nothing where the server has it no more."""
        with self._session() as session:
            if has_dump(session, thread_id):
                session.permitted("KILL %s", thread_id, also=(_NO_SUCH_THREAD,))

    def expiry(self) -> Expiry:
        """What makes the server remove logs by itself."""
        with self._session() as session:
            variables = session.variables(
                "binlog_expire_logs_seconds",
                "expire_logs_days",
                "binlog_expire_logs_auto_purge",
                "max_binlog_total_size",
                "binlog_space_limit",
            )
            sizes = (variables.get(name) for name in ("max_binlog_total_size", "binlog_space_limit"))
            return Expiry(kept_for(variables), max(int(size or 0) for size in sizes) or None)

    def connected_ids(self) -> frozenset[int]:
        """Server ids of the replicas that are connected now, and the server's own."""
        with self._session() as session:
            dialect = read_dialect(session)
            taken = {int(session.scalar("SELECT @@GLOBAL.server_id"))}
            return frozenset(taken | {int(row[0]) for row in session.permitted(dialect.replica_hosts) or ()})


def _position(session: Session, dialect: Dialect) -> Position:
    rows = session.records(dialect.binlog_status)
    if not rows:
        raise _no_binary_log(session.connection.address)
    _checked(str(rows[0]["File"]), session)
    return position_of(session, dialect, rows[0])


def _history(session: Session, flavour: Flavour, position: Position) -> str:
    if flavour is not Flavour.MARIADB:
        return position.gtid
    return str(session.scalar("SELECT @@GLOBAL.gtid_binlog_state") or "")


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
        hint="set log_bin in the server's configuration and restart it, or remove `binlog` from the policy; its "
        "commits meanwhile cannot be recovered until the next full backup",
    )


def gtids_before(session: Session, name: str) -> str | None:
    """Everything that was executed before the file ``name``, by its own word; None where it is not there, or says
    nothing. Raises ServerError."""
    try:
        rows = session.records("SHOW BINLOG EVENTS IN %s LIMIT 5", name)
    except ServerError as error:
        if error_code(error) in _NO_SUCH_FILE:
            return None
        raise
    for row in rows:
        kind, info = str(row["Event_type"]), str(row["Info"])
        if kind == "Previous_gtids":
            return re.sub(r"\s+", "", info)
        if kind == "Gtid_list":
            return re.sub(r"\s+", "", info).strip("[]")
    return None
