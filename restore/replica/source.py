"""The source that a new replica is to follow: what it is, and from which position the copy can follow it.

Everything that rules it out is found before a byte is moved: the source has purged what the copy needs, its history is
another one than the backup's, GTIDs are on at one of the two only, the server id is taken, or a proxy answers instead
of a server. A proxy that passes bytes on shows by its backends: the server's own port and identity are compared over
several connections.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from backupd.engine.consistency import sees_all
from backupd.engine.receiver.dump_trial import try_dump
from backupd.engine.server.accounts import read_grants
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Connection, Session
from backupd.model.binlog import Branch, MariadbGtids, MysqlGtids, covers
from backupd.model.document import Document, json_key
from backupd.model.errors import RefusedError, ServerError
from backupd.model.server_facts import Flavour, Position, Version
from backupd.model.text import few, format_time
from backupd.recovery.runs import Histories, file_position

_LOOKS = 3
"""Connections over which the server has to be the same one."""
_LOWEST_ID, _HIGHEST_ID = 2**30, 2**31 - 1
_SHOWN = 5
_CLOCKS = timedelta(seconds=2)
"""By how much two clocks may differ whose difference was measured: events have whole seconds."""
_ON, _OFF = "on", "off"


@dataclass(frozen=True, slots=True)
class SourceFacts(Document):
    """A server that a replica is to follow. ``uuid``: its server_uuid or server_uid; ``gtid_mode``: MySQL's word, for
    MariaDB ``on``; ``executed``, ``purged``: GTIDs; ``oldest``: its oldest binary log, "" where the account may not
    ask. ``server_ids``: its own, of its replicas, and of what it has executed. ``encrypted``: was it asked over TLS?
    ``is_readable``: may the account read every table? ``clock_ahead``: seconds that its clock is ahead of this one."""

    address: str
    flavour: Flavour
    version: Version
    uuid: str
    server_id: int
    hostname: str
    port: int
    log_bin: bool
    gtid_mode: str
    executed: str = ""
    purged: str = ""
    oldest: str = ""
    log: Position = field(default_factory=Position)
    datadir: str = ""
    server_ids: tuple[int, ...] = ()
    encrypted: bool = field(default=False, metadata=json_key(later=True))
    is_readable: bool = field(default=False, metadata=json_key(later=True))
    clock_ahead: float = field(default=0.0, metadata=json_key(later=True))

    @property
    def is_mariadb(self) -> bool:
        return self.flavour is Flavour.MARIADB


def read_source(connection: Connection) -> SourceFacts:
    """Look at the source over several connections. Raises ServerError; RefusedError where they do not lead to one and
    the same server, or to a proxy."""
    found = [_look(connection) for _ in range(_LOOKS)]
    first = found[0]
    for other in found[1:]:
        if (other.uuid, other.hostname, other.server_id) != (first.uuid, first.hostname, first.server_id):
            raise RefusedError(
                f"{connection.address} leads to several servers: a proxy or a load balancer is between",
                detail=f"{_identity(first)} and {_identity(other)}",
                hint="name the source itself: a replica must not follow one server now and another one later",
            )
    return first


def _look(connection: Connection) -> SourceFacts:
    with connection.connect() as session:
        dialect = read_dialect(session)
        mariadb = dialect.flavour is Flavour.MARIADB
        version = str(session.scalar("SELECT @@GLOBAL.version"))
        _refuse_proxy(session, version)
        values = session.variables(
            "server_id", "hostname", "port", "log_bin", "gtid_mode", "gtid_purged", "datadir", dialect.uid
        )
        executed = str(session.scalar(dialect.executed_gtid) or "").replace("\n", "")
        port = int(values.get("port") or 0)
        if not connection.socket and port != connection.port:
            raise RefusedError(
                f"{connection.address} is not the address of the server behind it, which listens on port {port}",
                detail=f"the server says that it is {values.get('hostname')}:{port}",
                hint="name the source itself, not a proxy or a forwarded port",
            )
        logs = session.permitted("SHOW BINARY LOGS", also=(1381,)) or []
        status = next(iter(session.permitted(dialect.binlog_status) or ()), None)
        replicas = session.permitted(dialect.replica_hosts) or []
        ids = {int(values.get("server_id") or 0), *(int(row[0]) for row in replicas)}
        if mariadb:
            state = str(session.scalar("SELECT @@GLOBAL.gtid_binlog_state") or "")
            ids |= {int(one.split("-")[1]) for one in state.split(",") if one.count("-") == 2}
        cipher = session.query("SHOW STATUS LIKE 'Ssl_cipher'")
        return SourceFacts(
            address=connection.address,
            flavour=dialect.flavour,
            version=dialect.version,
            uuid=values.get(dialect.uid, ""),
            server_id=int(values.get("server_id") or 0),
            hostname=values.get("hostname", ""),
            port=port,
            log_bin=values.get("log_bin", "").upper() in ("ON", "1"),
            gtid_mode=_ON if mariadb else values.get("gtid_mode", _OFF).lower(),
            executed=executed,
            purged="" if mariadb else values.get("gtid_purged", "").replace("\n", ""),
            oldest=str(logs[0][0]) if logs else "",
            log=Position(str(status[0]), int(status[1]), executed) if status else Position(),
            datadir=values.get("datadir", ""),
            server_ids=tuple(sorted(ids - {0})),
            encrypted=bool(cipher and cipher[0][1]),
            is_readable=sees_all(read_grants(session)),
            clock_ahead=float(session.scalar("SELECT UNIX_TIMESTAMP(SYSDATE(6))")) - time.time(),
        )


def _refuse_proxy(session: Session, version: str) -> None:
    greeting = session.greeting.removeprefix("5.5.5-")
    told = f"its greeting says {greeting}, the server behind it {version}"
    if session.thread_id != int(session.scalar("SELECT CONNECTION_ID()")):
        told = "the connection has another number at the server than at this end"
    elif greeting.partition("-")[0] == version.partition("-")[0]:
        return
    raise RefusedError(
        f"a proxy answers at {session.connection.address}, not the source itself",
        detail=told,
        hint="name the source itself: a replica behind a proxy may be given another server at any time",
    )


def _identity(facts: SourceFacts) -> str:
    return f"{facts.hostname} ({facts.uuid or 'no uuid'}, server_id {facts.server_id})"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a copy will be once it is restored, and before it replicates. ``position``: of the backed-up server;
    ``upstream``: of the source that this one followed at that very moment, None where it followed none or logs are
    replayed onto the copy. ``is_own``: is the source the backed-up server itself? ``label``: for messages.
    ``taken_at``: when both servers were there, None where logs are replayed onto the copy."""

    label: str
    flavour: str
    position: Position
    is_own: bool
    upstream: Position | None = None
    taken_at: datetime | None = None

    @property
    def is_mariadb(self) -> bool:
        return self.flavour == Flavour.MARIADB


@dataclass(frozen=True, slots=True)
class ReplicaStart(Document):
    """Where replication begins: behind the GTIDs of ``position``, or at its file and byte. ``reason``: why there."""

    position: Position
    by_gtid: bool
    reason: str

    def __str__(self) -> str:
        return self.position.gtid if self.by_gtid else f"{self.position.file}:{self.position.pos}"


def choose_start(restored: Restored, source: SourceFacts) -> ReplicaStart:
    """Raises RefusedError where the copy cannot follow the source."""
    if restored.is_mariadb != source.is_mariadb:
        raise RefusedError(
            f"{restored.label} is of {restored.flavour}, and {source.address} runs {source.flavour} {source.version}",
            hint="name a source of the same kind",
        )
    if not source.log_bin:
        raise RefusedError(
            f"{source.address} writes no binary log, so nothing can replicate from it", hint="set log_bin there"
        )
    if not source.is_mariadb:
        _refuse_other_gtid_mode(restored, source)
        if source.gtid_mode == _ON:
            _refuse_other_history(restored, source)
            return ReplicaStart(restored.position, True, "by GTID, with auto position")
    position = restored.position
    if not restored.is_own and restored.upstream is not None:
        position = restored.upstream
    if source.is_mariadb and position.gtid:
        return ReplicaStart(position, True, "by GTID, from gtid_slave_pos")
    if position.file and (restored.is_own or restored.upstream is not None):
        whose = "the backed-up server" if restored.is_own else "the source that the backed-up server followed"
        return ReplicaStart(position, False, f"by file and position of {whose}")
    raise RefusedError(
        f"{restored.label} holds no position in the binary log of {source.address}",
        detail="without GTIDs a position is of one server only, and binary logs that are replayed move on by those of "
        "the backed-up server alone",
        hint="replicate from the backed-up server, or restore the backup as it is (--to backup:ID)",
    )


def _refuse_other_gtid_mode(restored: Restored, source: SourceFacts) -> None:
    has, needs = bool(restored.position.gtid), source.gtid_mode
    if (needs == _ON and not has) or (needs == _OFF and has):
        raise RefusedError(
            f"gtid_mode is {needs.upper()} at {source.address}, and {restored.label} "
            + ("has GTIDs" if has else "has no GTIDs"),
            detail=f"its position is {restored.position.gtid or f'{restored.position.file}:{restored.position.pos}'}",
            hint="take a backup under the present gtid_mode, and restore that",
        )


def _refuse_other_history(restored: Restored, source: SourceFacts) -> None:
    have, there = MysqlGtids.parse(restored.position.gtid), MysqlGtids.parse(source.executed)
    if not (strange := have.minus(there)).is_empty:
        raise RefusedError(
            f"{restored.label} holds transactions that {source.address} never executed: they are of another branch",
            detail=_some(strange),
            hint="replicate from the server that executed them, or restore to a moment before them",
        )
    if not (lost := MysqlGtids.parse(source.purged).minus(have)).is_empty:
        raise RefusedError(
            f"{source.address} has purged binary logs that the copy needs",
            detail=f"the copy is at {have}; purged behind that: {_some(lost)}"
            + (f"; its oldest binary log is {source.oldest}" if source.oldest else ""),
            hint="restore to latest, which replays archived binary logs, or take a new backup",
        )


def refuse_other_branch(
    histories: Histories, branch: Branch | None, restored: Restored, start: ReplicaStart, source: SourceFacts
) -> None:
    """The history of the backed-up server itself may have forked behind the copy, and file names or GTIDs of MariaDB
    may be the same on both sides. ``branch``: of the copy's position, None where that is not certain. Raises
    RefusedError. Pure."""
    present = histories.current
    if not restored.is_own or (start.by_gtid and not source.is_mariadb) or branch is None or present is None:
        return
    if present.server_uuid and source.uuid and present.server_uuid != source.uuid:
        return  # the log that is archived is another member's
    line = histories.descent(present)
    if branch in line and _leads_on(start, line[line.index(branch) + 1 :]):
        return
    raise RefusedError(
        f"{restored.label} is of another history than {source.address} has now, which is branch {present.id} "
        f"({present.reason}) since {format_time(present.noticed_at)}",
        detail=f"the copy is at {start} of branch {branch.id}",
        hint=f"take a full backup now, and restore that: backupd backup {present.server} --kind full",
    )


def _leads_on(start: ReplicaStart, later: Sequence[Branch]) -> bool:
    """Is ``start`` in front of the fork with which the first of ``later`` began, and does it mean the same there?"""
    if not later:
        return True
    fork = later[0].fork
    if fork is None:
        return False
    if start.by_gtid and fork.gtid:
        return covers(fork.gtid, start.position.gtid, mariadb=True)
    here, there = file_position(start.position), file_position(fork)
    is_before = here is not None and there is not None and here <= there
    return is_before and (start.by_gtid or all(one.names_go_on for one in later))


def refuse_other_source(
    restored: Restored, start: ReplicaStart, source: SourceFacts, followed: Collection[str]
) -> None:
    """A file and a byte are a place of one server only, and other servers may have the same. ``followed``: whom the
    backed-up server followed (see ``ServerInfo.sources``), nothing where that was not recorded. Raises RefusedError."""
    known = {source.uuid, str(source.server_id)}
    if start.by_gtid or restored.is_own or not followed or known & set(followed):
        return
    raise RefusedError(
        f"{source.address} is not the server that the backed-up one followed, and {start} is a place in the binary log "
        "of that",
        detail=f"{_identity(source)}; it followed {', '.join(sorted(followed))}",
        hint="replicate from that server, or from the backed-up one",
    )


def _some(gtids: MysqlGtids) -> str:
    text = str(gtids)
    return text if len(text) <= 300 else f"{few(text.split(','), _SHOWN)} ({gtids.count} transactions)"


def refuse_not_sent(
    account: Connection, start: ReplicaStart, source: SourceFacts, server_id: int, taken_at: datetime | None = None
) -> None:
    """Ask the source for what follows ``start``, as the replica will. ``taken_at``: when the source was there, where
    that is known. Raises RefusedError where it does not send it, does not let the account in, or has another history;
    ServerError where it cannot be reached."""
    try:
        with account.connect() as session:
            _refuse_proxy(session, str(session.scalar("SELECT @@GLOBAL.version")))
            if not source.is_mariadb and start.by_gtid:
                session.query(read_dialect(session).replica_hosts)  # wants what a dump wants
                return
        tried = try_dump(account, start.position, server_id, by_gtid=start.by_gtid)
    except ServerError as error:
        raise RefusedError(
            f"the replication account {account.user!r} cannot replicate from {account.address}",
            detail=": ".join(filter(None, (error.message, error.detail))),
            hint="replication_defaults_file names the account; it needs REPLICATION SLAVE and may come from this host",
        ) from error
    if tried.refused:
        raise RefusedError(
            f"{source.address} does not send its binary log from {start} on: it was purged, or it is another history",
            detail=f"{tried.refused}"
            + (f"; its oldest binary log is {source.oldest}" if source.oldest else "")
            + (f"; it is at {source.executed}" if source.executed else ""),
            hint="restore to latest, which replays archived binary logs, or take a new backup",
        )
    if not start.by_gtid and taken_at is not None and tried.begun:
        refuse_later_file(start, source, tried.begun, taken_at)


def refuse_later_file(start: ReplicaStart, source: SourceFacts, begun: int, taken_at: datetime) -> None:
    """A file that was begun (``begun``: seconds of the source's clock) after the source was at ``start`` has the name
    of that one, and is of another history. Raises RefusedError. Pure."""
    file_begun = datetime.fromtimestamp(begun, UTC) - timedelta(seconds=source.clock_ahead)
    if file_begun <= taken_at + _CLOCKS:
        return
    raise RefusedError(
        f"{start} is of another history than {source.address} has now: its file {start.position.file} was begun at "
        f"{format_time(file_begun)}, and the copy is of {format_time(taken_at)}",
        detail=f"{_identity(source)}: its binary logs were reset, or it is another server"
        + (f"; its oldest binary log is {source.oldest}" if source.oldest else ""),
        hint="take a new backup, and restore that",
    )


def choose_server_id(wanted: int, taken: Collection[int], datadir: str, hostname: str) -> int:
    """The server id of the replica in ``datadir``: ``wanted``, or one that is always the same for this folder. Raises
    RefusedError where it is taken."""
    if wanted:
        if wanted in taken:
            raise RefusedError(
                f"server_id {wanted} is taken: it is that of the source, of one of its replicas, or of events",
                detail=f"taken: {few([str(one) for one in sorted(taken)], _SHOWN)}",
                hint="give another --server-id, or none: backupd then chooses one that is free",
            )
        return wanted
    span = _HIGHEST_ID - _LOWEST_ID
    number = int.from_bytes(hashlib.sha256(f"{hostname}\0{datadir}".encode()).digest()[:8], "big")
    while (found := _LOWEST_ID + number % span) in taken:
        number += 1
    return found


def server_ids_of(gtids: str, *, mariadb: bool) -> Iterable[int]:
    """The servers that a position names. MySQL's name none by number."""
    return [server for server, _sequence in MariadbGtids.parse(gtids).last.values()] if mariadb else []
