"""One consistent view of a server, and the place in the binary log that it belongs to.

MariaDB and Percona Server report the binary log position of ``START TRANSACTION WITH CONSISTENT SNAPSHOT`` by
themselves (``binlog_snapshot_file``, ``binlog_snapshot_position``). MySQL does not, and comparing ``gtid_executed``
before and after proves nothing, because the engine commits before the set is updated: there a global read lock is held
for the milliseconds of opening the snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Self

from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.dialect import Dialect
from backupd.engine.sql.tables import TableIds, definitions, settled_definitions, table_ids
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
            self._told = mariadb or bool(self._snapshot_status())
            self.holds_locks = not self._stop_logging()
            self._before = settled_definitions(self.session)
        except BaseException:
            self.session.close()
            raise

    def open(self, position: Position | None = None) -> None:
        """Begin. Takes about a millisecond where the server tells the position. ``position``: the caller keeps commits
        blocked and has read it, and every moment counts: ``moved`` knows nothing then. Raises ServerError."""
        if position is not None:
            self.session.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            self.position = position
            self.session.execute(f"SAVEPOINT {_SAVEPOINT}")
            return
        if self._told:
            self.session.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            self.position = self._told_position()
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
        """Look once; the answer tells of an InnoDB table whether its name now means another one than at the
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

    def _told_position(self) -> Position:
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
    if not rows:
        return Position()
    gtid = str(session.scalar(dialect.executed_gtid) or "").replace("\n", "")
    return Position(file=str(rows[0]["File"]), pos=int(rows[0]["Position"]), gtid=gtid)
