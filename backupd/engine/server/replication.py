"""Replication of a server, in the words of both families: set where it begins, start it, look how far it is.

A new replica is told its source and its position while it cannot reach anybody; its first packet to the source is that
of START REPLICA. The password goes over the socket in a statement whose text is never logged or shown here; the server
keeps it where it keeps that of any replica (``master.info``, ``mysql.slave_master_info``).

- MariaDB: ``gtid_slave_pos`` is a table, and that of a restored copy is empty unless the source was a replica.
- MySQL: ``gtid_purged`` says what is on the copy. It is accepted where nothing else is executed, so the copy's own
  record of that is reset first.
- ``Seconds_Behind`` is NULL while a thread does not run, and 0 while the receiver has nothing new: only together with
  the source's own position it says that a replica has caught up.
- A delayed replica is behind on purpose: its receiver is at the source's end, its applier is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backupd.engine.sql.client import Session
from backupd.engine.sql.dialect import Dialect
from backupd.model.document import Document, computed, json_key
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, Position, Version

_LONGEST_DELAY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Words:
    """The statements of a server, which MySQL renamed over the years (8.0.23, 8.0.26, 8.2). ``named`` and ``channel``:
    how a statement says which replication connection it means; ``listed`` and ``name``: the statement that lists all of
    them, and its column with their names; ``workers``: the variable with their number, and ``serial``: its value for
    one transaction after the other."""

    source: str
    replica: str
    change: str
    named: str
    channel: str
    listed: str
    name: str
    workers: str
    serial: int

    @classmethod
    def of(cls, flavour: Flavour, version: Version, connection: str = "") -> Words:
        """``connection``: the replication connection (MySQL: the channel) that is meant."""
        quoted = f" '{connection}'" if connection else ""
        if flavour is Flavour.MARIADB:
            return cls(
                source="MASTER",
                replica="SLAVE",
                change="CHANGE MASTER",
                named=quoted,
                channel="",
                listed="SHOW ALL SLAVES STATUS",
                name="Connection_name",
                workers="slave_parallel_threads",
                serial=0,
            )
        source = "SOURCE" if version >= Version(8, 0, 23) else "MASTER"
        replica = "REPLICA" if version >= Version(8, 0, 26) else "SLAVE"
        return cls(
            source=source,
            replica=replica,
            change="CHANGE REPLICATION SOURCE" if version >= Version(8, 0, 23) else "CHANGE MASTER",
            named="",
            channel=f" FOR CHANNEL{quoted}" if quoted else "",
            listed=f"SHOW {replica} STATUS",
            name="Channel_Name",
            workers=f"{replica.lower()}_parallel_workers",
            serial=1,
        )

    def forget(self, session: Session, connection: str) -> None:
        """Stop and remove this replication connection, where it is. Raises ServerError."""
        for row in session.records(self.listed):
            if row.get(self.name) == connection:
                session.execute(f"STOP {self.replica}{self.named}{self.channel}")
                session.execute(f"RESET {self.replica}{self.named} ALL{self.channel}")


class Receiving(StrEnum):
    """What the thread does that receives the source's log."""

    YES = "yes"
    CONNECTING = "connecting"
    NO = "no"


@dataclass(frozen=True, slots=True)
class ThreadError(Document):
    """What a thread of replication stopped at, or why it cannot connect. ``code`` 0: nothing."""

    code: int = 0
    text: str = ""

    def __bool__(self) -> bool:
        return self.code != 0


@dataclass(frozen=True, slots=True)
class ReplicaStatus(Document):
    """One replication connection of a server. ``connection``: its name, "" for the usual one; ``source_id``: server id
    of the source, 0 before it answered. ``lag``: seconds, None where the server does not say; ``delay``: seconds that
    it is behind on purpose. ``received``, ``applied``: places in the source's log; ``gtids``: what the server has
    executed as a replica (MySQL: all that it has executed); ``retrieved``: GTIDs received. ``by_gtid``: does it ask for
    GTIDs, or for a file and position?"""

    connection: str
    source_host: str
    source_port: int
    source_id: int
    source_uuid: str
    receiving: Receiving
    applying: bool
    lag: float | None
    delay: int
    received: Position
    applied: Position
    gtids: str
    retrieved: str
    by_gtid: bool
    receive_error: ThreadError = field(default_factory=ThreadError)
    apply_error: ThreadError = field(default_factory=ThreadError)
    applier_state: str = field(default="", metadata=json_key(later=True))

    @property
    @computed()
    def is_running(self) -> bool:
        """Do both threads run, and is the source there?"""
        return self.receiving is Receiving.YES and self.applying

    @property
    def is_delayed(self) -> bool:
        """Is it behind the source on purpose?"""
        return self.delay > 0

    @property
    def has_applied_all(self) -> bool:
        """Has it applied all that it has received?"""
        return (self.applied.file, self.applied.pos) == (self.received.file, self.received.pos)

    def __str__(self) -> str:
        """For people: what does not run, and why."""
        for name, error in (("receiver", self.receive_error), ("applier", self.apply_error)):
            if error:
                return f"the {name} reports error {error.code}: {error.text}"
        if not self.applying or self.receiving is Receiving.NO:
            stopped = [
                name
                for name, runs in (("receiver", self.receiving is not Receiving.NO), ("applier", self.applying))
                if not runs
            ]
            return f"replication from {self.source_host}:{self.source_port} is stopped ({' and '.join(stopped)})"
        lag = "an unknown lag" if self.lag is None else f"a lag of {self.lag:.0f} s"
        return f"replicates from {self.source_host}:{self.source_port} with {lag}"


def read_replicas(session: Session, dialect: Dialect) -> tuple[ReplicaStatus, ...]:
    """Every replication connection of the server; none for one that follows nobody. Raises ServerError, also where the
    account may not ask."""
    rows = session.records(dialect.replica_status)
    executed = "" if dialect.flavour is Flavour.MARIADB or not rows else str(session.scalar(dialect.executed_gtid))
    return tuple(_status(row, dialect.flavour, executed) for row in rows)


def read_replica(session: Session, dialect: Dialect, connection: str = "") -> ReplicaStatus | None:
    """That of one connection, None where there is none of this name. Raises ServerError."""
    return next((one for one in read_replicas(session, dialect) if one.connection == connection), None)


def _status(row: Mapping[str, Any], flavour: Flavour, executed: str) -> ReplicaStatus:
    def value(name: str) -> Any:
        """A column, by its new name or its old one."""
        if name in row:
            return row[name]
        return row.get(name.replace("Source", "Master").replace("Replica", "Slave"))

    def number(name: str) -> int:
        return int(value(name) or 0)

    def text(name: str) -> str:
        return str(value(name) or "").replace("\n", "")

    mariadb = flavour is Flavour.MARIADB
    word = text("Replica_IO_Running").lower()
    lag = value("Seconds_Behind_Source")
    return ReplicaStatus(
        connection=text("Connection_name" if mariadb else "Channel_Name"),
        source_host=text("Source_Host"),
        source_port=number("Source_Port"),
        source_id=number("Source_Server_Id"),
        source_uuid=text("Source_UUID"),
        receiving=Receiving(word) if word in (Receiving.YES, Receiving.NO) else Receiving.CONNECTING,
        applying=text("Replica_SQL_Running").lower() == "yes",
        lag=None if lag is None else float(lag),
        delay=number("SQL_Delay"),
        received=Position(text("Source_Log_File"), number("Read_Source_Log_Pos"), text("Gtid_IO_Pos")),
        applied=Position(text("Relay_Source_Log_File"), number("Exec_Source_Log_Pos")),
        gtids=text("Gtid_Slave_Pos") if mariadb else executed.replace("\n", ""),
        retrieved=text("Gtid_IO_Pos" if mariadb else "Retrieved_Gtid_Set"),
        by_gtid=text("Using_Gtid").lower() not in ("", "no") if mariadb else number("Auto_Position") == 1,
        receive_error=ThreadError(number("Last_IO_Errno"), text("Last_IO_Error")),
        apply_error=ThreadError(number("Last_SQL_Errno"), text("Last_SQL_Error")),
        applier_state=text("Replica_SQL_Running_State"),
    )


@dataclass(frozen=True, slots=True)
class Source:
    """Whom a replica follows, and as which account. ``ssl``: as of ``Connection``; ``encrypted``: must the connection
    be?"""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    ssl: Mapping[str, str] = field(default_factory=dict)
    encrypted: bool = False


_SSL = {"ca": "CA", "capath": "CAPATH", "cert": "CERT", "key": "KEY", "cipher": "CIPHER"}


def set_source(
    session: Session, dialect: Dialect, source: Source, position: Position, *, by_gtid: bool, delay: int = 0
) -> None:
    """Remove what the server replicates from, and point it at ``source``, from ``position`` on; nothing is started.

    ``by_gtid``: from the GTIDs of ``position``, else from its file and byte. ``delay``: seconds that it stays behind.
    Raises ServerError."""
    mariadb = dialect.flavour is Flavour.MARIADB
    words = Words.of(dialect.flavour, dialect.version)
    dialect.remove_replication(session)
    set_executed(session, dialect, position.gtid)
    word = words.source
    options: dict[str, str | int] = {
        f"{word}_HOST": source.host,
        f"{word}_PORT": source.port,
        f"{word}_USER": source.user,
        f"{word}_PASSWORD": source.password,
        f"{word}_CONNECT_RETRY": 10,
    }
    if delay:
        options[f"{word}_DELAY"] = min(delay, _LONGEST_DELAY)
    options |= _encryption(dialect, source, word)
    said = [f"{name} = %s" for name in options]
    if by_gtid:
        said.append("MASTER_USE_GTID = slave_pos" if mariadb else f"{word}_AUTO_POSITION = 1")
    else:
        said += [f"{word}_LOG_FILE = %s", f"{word}_LOG_POS = %s"]
        options |= {"file": position.file, "pos": position.pos}
        if mariadb:
            said.append("MASTER_USE_GTID = no")
    _execute(session, source, f"{words.change} TO {', '.join(said)}", *options.values())


def _encryption(dialect: Dialect, source: Source, word: str) -> dict[str, str | int]:
    mariadb = dialect.flavour is Flavour.MARIADB
    found: dict[str, str | int] = {f"{word}_SSL": int(source.encrypted or bool(source.ssl))}
    found |= {f"{word}_SSL_{_SSL[name]}": value for name, value in source.ssl.items() if name in _SSL}
    if mariadb or "verify-server-cert" in source.ssl:
        found[f"{word}_SSL_VERIFY_SERVER_CERT"] = int("verify-server-cert" in source.ssl)
    if not mariadb and dialect.version >= Version(8, 0, 4) and not found[f"{word}_SSL"]:
        found[f"GET_{word}_PUBLIC_KEY"] = 1  # else passwords of MySQL 8 cannot be given over a plain connection
    return found


def _execute(session: Session, source: Source, statement: str, *arguments: str | int) -> None:
    """The server repeats a part of a statement that it does not understand."""
    try:
        session.execute(statement, *arguments)
    except ServerError as error:
        if source.password:
            error.detail = error.detail.replace(source.password, "***")
        raise


def set_executed(session: Session, dialect: Dialect, gtids: str) -> None:
    """Say what the copy holds: ``gtids``, all of it and nothing else. It writes no binary log. Raises ServerError."""
    if dialect.flavour is Flavour.MARIADB:
        session.execute("SET GLOBAL gtid_slave_pos = %s", gtids)
        return
    if str(session.scalar(dialect.executed_gtid) or "") or gtids:
        session.execute("RESET BINARY LOGS AND GTIDS" if dialect.version >= Version(8, 2) else "RESET MASTER")
    if gtids:
        session.execute("SET GLOBAL gtid_purged = %s", gtids)


def set_account(session: Session, dialect: Dialect, source: Source) -> None:
    """As whom a stopped replica connects; its position stays. Raises ServerError."""
    words = Words.of(dialect.flavour, dialect.version)
    said = f"{words.change} TO {words.source}_USER = %s, {words.source}_PASSWORD = %s"
    _execute(session, source, said, source.user, source.password)


def start_replica(session: Session, dialect: Dialect) -> None:
    """The first packet to the source. Raises ServerError."""
    session.execute(f"START {Words.of(dialect.flavour, dialect.version).replica}")


def stop_replica(session: Session, dialect: Dialect) -> None:
    """Both threads; harmless where none runs. Raises ServerError."""
    session.execute(f"STOP {Words.of(dialect.flavour, dialect.version).replica}")


def unordered(session: Session, dialect: Dialect) -> str:
    """Why what a replica has applied is no single position of its source's log, "" where it is one: several workers of
    MySQL that do not keep the order of commits leave holes, which only GTIDs show. MariaDB's keep the order of each
    domain, and without GTIDs that of all. Raises ServerError."""
    words = Words.of(dialect.flavour, dialect.version)
    if words.serial == 0:
        return ""
    order = f"{words.workers.partition('_')[0]}_preserve_commit_order"
    known = session.variables(words.workers, order, "gtid_mode")
    if int(known.get(words.workers) or 0) < 2 or known.get(order, "ON").upper() in ("ON", "1"):
        return ""
    if known.get("gtid_mode", "OFF").upper() == "ON":
        return ""
    return (
        f"it applies with {known[words.workers]} workers in any order ({order} is OFF) and without GTIDs, so that what "
        "it holds is no single position of its source's binary log"
    )
