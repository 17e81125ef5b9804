"""One consistent view of a server, and the position in the binary log that it belongs to.

MariaDB and Percona Server report the binary log position of ``START TRANSACTION WITH CONSISTENT SNAPSHOT`` by
themselves (``binlog_snapshot_file``, ``binlog_snapshot_position``). MySQL does not, and comparing ``gtid_executed``
before and after proves nothing, because the engine commits before the set is updated: there a global read lock is held
for the milliseconds of opening the snapshot.

What a server holds, by kind and name, with digests of the definitions: so that two servers can be compared.

A digest, 16 hex digits, is of what SHOW CREATE prints, less what differs between a server and its copy though both
mean the same: the next AUTO_INCREMENT, folders of tables, whether an event runs and on which server. Texts are not
kept: they hold connection strings of FEDERATED, CONNECT and SPIDER.

Measured with MariaDB 10.11.19 and 5,000 tables of InnoDB on a loaded machine of 2 cores: see ``list_objects`` and
``digests``.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Self

from backupd.engine.server.definitions import plain_session
from backupd.engine.server.probe import position_of, read_dialect
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.dialect import Dialect
from backupd.engine.sql.tables import SYSTEM_SCHEMAS, TableIds, definitions, settled_definitions, table_ids
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, Position
from backupd.model.table import TableName, quote_name

_SETTINGS = (
    # Definitions are printed in it.
    "SET SESSION sql_mode = '', time_zone = '+00:00'",
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    # A prepared connection idles for as long as a backup runs.
    "SET SESSION wait_timeout = 2147483",
    # A table that somebody rebuilds is left out rather than waited for.
    "SET SESSION lock_wait_timeout = 5",
)
_MARIADB_SETTINGS = (
    "SET SESSION max_statement_time = 0",
    "SET SESSION idle_transaction_timeout = 0",
    "SET SESSION idle_readonly_transaction_timeout = 0",
)
_LOCK_SECONDS = 2
"""How long opening may wait for the global read lock, writers queue behind it meanwhile; and how long it lasts."""

_SAVEPOINT = quote_name("backupd")
_NO_SAVEPOINT = 1305


class Snapshot:
    """Prepared first, opened at the chosen moment, read, closed. A context manager; one thread at a time.

    Metadata locks: a transaction keeps those of every table it has read, so an ALTER TABLE would wait for
    its end. Rolling back to a savepoint gives them back, on MariaDB only while the session writes no binary
    log (measured on 10.11: with sql_log_bin=1 they stay). ``holds_locks`` is True where the account may not
    turn it off (BINLOG ADMIN, SUPER before 10.5).
    """

    def __init__(self, connection: Connection) -> None:
        """Connect and prepare. Raises ServerError."""
        self.session: Session = connection.connect()
        self.position = Position()
        self.opened_at: datetime | None = None
        self._ids: TableIds | None = None
        try:
            self.dialect: Dialect = read_dialect(self.session)
            mariadb = self.dialect.flavour is Flavour.MARIADB
            for statement in (*_SETTINGS, *(_MARIADB_SETTINGS if mariadb else ())):
                self.session.execute(statement)
            self._shows_position = mariadb or bool(self._snapshot_status())
            self.holds_locks = not self._stop_logging()
            self._before = settled_definitions(self.session)
        except BaseException:
            self.session.close()
            raise

    def open(self, position: Position | None = None) -> None:
        """Begin. Takes about a millisecond where the server shows the position. ``position``: the caller keeps commits
        blocked and has read it, and every moment counts: ``moved`` knows nothing then. Raises ServerError."""
        if position is not None:
            self.session.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            self.position = position
            self.session.execute(f"SAVEPOINT {_SAVEPOINT}")
            return
        if self._shows_position:
            self.session.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            self.position = self._shown_position()
        else:
            self.position = self._locked_position()
        self.opened_at = self.session.scalar("SELECT NOW()")
        self.session.execute(f"SAVEPOINT {_SAVEPOINT}")
        self._ids = self._ids_now()

    def release(self) -> bool:
        """Give back the metadata locks of the tables read so far. Raises ServerError.

        False: the snapshot is gone, and what was read since the last release may be newer than it. The
        server rolls back the transaction that it chooses to end a deadlock, ours with DDL for one, and
        CHECKSUM TABLE reports that as a mere warning.
        """
        try:
            self.session.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
        except ServerError as error:
            if error_code(error) != _NO_SAVEPOINT:
                raise
            return False
        return True

    def moved(self) -> Callable[[TableName], bool]:
        """Look once; the answer says of an InnoDB table whether its name now means another one than at the
        snapshot: renamed, swapped, rebuilt.

        Ask before ``release``: until then nobody can rename what was read. Where the account may not look
        (PROCESS), nothing counts as moved. Raises ServerError.
        """
        then = self._ids
        now = None if then is None else self._ids_now()

        def differs(table: TableName) -> bool:
            return then is not None and now is not None and (not then.of(table) or then.of(table) != now.of(table))

        return differs

    def changed(self, table: TableName) -> bool:
        """May ``table`` have been altered since the snapshot? Ask right after reading it, before ``release``.

        InnoDB refuses to read rebuilt tables, but reads an instantly altered one through its new columns
        (measured on 10.11: another checksum, no error). Unchanged means: the columns and the moment of the last
        change are those from before the snapshot, or, on MariaDB, where that moment moves with every ALTER, it
        is older than the snapshot.
        """
        now = definitions(self.session, table).get(table)
        if now is not None and now == self._before.get(table):
            return False
        if self.dialect.flavour is not Flavour.MARIADB or self.opened_at is None:
            return True
        return now is None or now.changed_at is None or now.changed_at > self.opened_at - timedelta(seconds=2)

    def close(self) -> None:
        """End the transaction and the session."""
        with contextlib.suppress(ServerError):  # closing the connection ends the transaction as well
            self.session.execute("ROLLBACK")
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _ids_now(self) -> TableIds | None:
        try:
            return table_ids(self.session, self.dialect.innodb_tables)
        except ServerError as error:
            if not is_denied(error):
                raise
            return None

    def _stop_logging(self) -> bool:
        if self.dialect.flavour is not Flavour.MARIADB:
            return True  # gives the locks back all the same
        try:
            self.session.execute("SET SESSION sql_log_bin = 0")
        except ServerError as error:
            if not is_denied(error):
                raise
            return not self.session.scalar("SELECT @@GLOBAL.log_bin")
        return True

    def _snapshot_status(self) -> dict[str, str]:
        if not self.dialect.snapshot_status:
            return {}
        rows = self.session.query("SHOW STATUS LIKE 'binlog_snapshot%'")
        return {str(name).lower(): str(value) for name, value in rows}

    def _shown_position(self) -> Position:
        status = self._snapshot_status()
        file = status.get("binlog_snapshot_file", "")
        if not file:
            return Position()
        pos = int(status["binlog_snapshot_position"])
        if self.dialect.flavour is Flavour.MARIADB:
            gtid = self.session.scalar("SELECT BINLOG_GTID_POS(%s, %s)", file, pos)
        else:
            gtid = status.get("binlog_snapshot_gtid_executed", "")
        return Position(file=file, pos=pos, gtid=str(gtid or "").replace("\n", ""))

    def _locked_position(self) -> Position:
        with self.session.connection.connect() as locker:
            # The server ends the lock when we do not: we may have been stopped, or the machine under us.
            locker.execute(f"SET SESSION lock_wait_timeout = {_LOCK_SECONDS}, wait_timeout = {_LOCK_SECONDS}")
            locker.execute("FLUSH TABLES WITH READ LOCK")
            self.session.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            position = position_now(locker, self.dialect)
            locker.execute("UNLOCK TABLES")
        return position


def position_now(session: Session, dialect: Dialect) -> Position:
    """Where the server's binary log ends; of one moment only while commits are blocked. Empty without a log. Raises
    ServerError."""
    rows = session.records(dialect.binlog_status)
    return position_of(session, dialect, rows[0] if rows else {})


TABLE, VIEW, SEQUENCE, TRIGGER, EVENT, USER = "table", "view", "sequence", "trigger", "event", "user"
ROUTINES = ("procedure", "function", "package", "package body")

Listing = Mapping[str, frozenset[str]]
"""Kind to names, each quoted with backticks: ```schema`.`name` ``, of a user ```name`.`host` ``. A kind that the
account may not look at is missing."""
Digests = Mapping[str, Mapping[str, str]]
"""Kind to name to digest; "" where only the name is known."""

_OUTSIDE = f"NOT IN ({', '.join(['%s'] * len(SYSTEM_SCHEMAS))})"
_TABLES = f"SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE FROM information_schema.TABLES WHERE TABLE_SCHEMA {_OUTSIDE}"  # noqa: S608 - of constants
_NAMES = {
    TRIGGER: "SELECT TRIGGER_SCHEMA, TRIGGER_NAME FROM information_schema.TRIGGERS WHERE TRIGGER_SCHEMA",
    USER: "SELECT User, Host FROM mysql.user WHERE User",
}
_ROUTINES = f"SELECT ROUTINE_SCHEMA, ROUTINE_NAME, ROUTINE_TYPE FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA {_OUTSIDE}"  # noqa: S608, E501 - of constants
_KINDS = {"BASE TABLE": TABLE, "SYSTEM VERSIONED": TABLE, "VIEW": VIEW, "SEQUENCE": SEQUENCE}
_OLD_EVENT = """
body, definer, execute_at, interval_value, interval_field, starts, ends, on_completion, sql_mode, comment, time_zone,
character_set_client, collation_connection, db_collation
"""
_EVENT = """
EVENT_DEFINITION, DEFINER, EXECUTE_AT, INTERVAL_VALUE, INTERVAL_FIELD, STARTS, ENDS, ON_COMPLETION, SQL_MODE,
EVENT_COMMENT, TIME_ZONE, CHARACTER_SET_CLIENT, COLLATION_CONNECTION, DATABASE_COLLATION
"""
_LEFT_OUT = re.compile(r" ?(?:AUTO_INCREMENT=\d+|(?:DATA|INDEX) DIRECTORY ?= ?'(?:[^'\\]|''|\\.)*')")


def list_objects(session: Session) -> Listing:
    """Everything outside the system schemas, and the accounts. Opens no table: 5,000 of them take about 0.1 s. Raises
    ServerError when the server is gone."""
    found: dict[str, set[str]] = {}
    rows = session.permitted(_TABLES, *SYSTEM_SCHEMAS)
    if rows is not None:
        found |= {TABLE: set(), VIEW: set(), SEQUENCE: set()}
    for schema, name, said in rows or ():
        if str(said) in _KINDS:
            found[_KINDS[str(said)]].add(quote_name(str(schema), str(name)))
    names, _columns, events = _event_columns(session)
    for kind, question in {**_NAMES, EVENT: f"SELECT {names} FROM {events}"}.items():  # noqa: S608 - of constants
        rows = session.permitted(f"{question} {_OUTSIDE}", *SYSTEM_SCHEMAS)
        if rows is not None:
            found[kind] = {quote_name(str(schema), str(name)) for schema, name, *_ in rows}
    rows = session.permitted(_ROUTINES, *SYSTEM_SCHEMAS)
    for schema, name, said in rows or ():
        found.setdefault(str(said).lower(), set()).add(quote_name(str(schema), str(name)))
    if rows is not None:
        for kind in ROUTINES:
            found.setdefault(kind, set())
    return {kind: frozenset(names) for kind, names in found.items()}


def digests(session: Session, listed: Listing, *, seconds: float) -> Digests:
    """Of each object in ``listed``, tables last; "" for one that is gone, locked, may not be read, or was not reached
    within ``seconds``. Raises ServerError when the server is gone."""
    end = time.monotonic() + seconds
    found: dict[str, dict[str, str]] = {}
    with plain_session(session) as own:
        events = _events(own) if listed.get(EVENT) else {}
        for kind in sorted(listed, key=lambda kind: (kind == TABLE, kind)):
            found[kind] = {}
            for name in sorted(listed[kind]):
                if kind in (USER, EVENT):
                    found[kind][name] = events.get(name, "") if kind == EVENT else ""
                else:
                    found[kind][name] = _shown(own, kind, name) if time.monotonic() < end else ""
    return found


def settled(before: Digests, listed: Listing | None, after: Digests) -> Digests:
    """What is known of one moment. ``listed``: at that moment; None where no list is of just that moment, and then only
    what was the same before and after is known. A digest is kept where it is the same before and after."""
    if listed is None:
        return {
            kind: {name: digest for name, digest in names.items() if after[kind].get(name) == digest}
            for kind, names in before.items()
            if kind in after
        }
    return {
        kind: {name: _same(before.get(kind, {}).get(name, ""), after.get(kind, {}).get(name, "")) for name in names}
        for kind, names in listed.items()
    }


def _same(one: str, other: str) -> str:
    return one if one == other else ""


def _shown(session: Session, kind: str, name: str) -> str:
    try:
        rows = session.records(f"SHOW CREATE {kind.upper()} {name}")
    except ServerError:
        session.ping()
        return ""
    if not rows:
        return ""
    record = rows[0]
    text = next((str(value) for key, value in record.items() if _is_text(key) and value is not None), "")
    if not text:
        return ""
    rest = [
        f"{key}={value}"
        for key, value in sorted(record.items())
        if key.lower() in ("sql_mode", "character_set_client", "collation_connection", "database collation")
    ]
    return _digest(_LEFT_OUT.sub("", text) if kind in (TABLE, SEQUENCE) else text, *rest)


def _is_text(column: str) -> bool:
    return column.startswith("Create ") or column == "SQL Original Statement"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _event_columns(session: Session) -> tuple[str, str, str]:
    """What names an event, what defines it, and where the server has both."""
    dialect = read_dialect(session)
    if dialect.has_events_in_table:
        return "db, name", _OLD_EVENT, dialect.events
    return "EVENT_SCHEMA, EVENT_NAME", _EVENT, dialect.events


def _events(session: Session) -> dict[str, str]:
    """Digests by name. Whether an event runs is not part of it: in a copy, and on a replica, it does not."""
    names, columns, events = _event_columns(session)
    question = f"SELECT {names}, {columns} FROM {events} {_OUTSIDE}"  # noqa: S608 - of constants
    rows = session.permitted(question, *SYSTEM_SCHEMAS)
    return {quote_name(str(schema), str(name)): _digest(*map(_as_text, values)) for schema, name, *values in rows or ()}


def _as_text(value: object) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else repr(value)
