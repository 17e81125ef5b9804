"""MySQL's applier: by GTID where every transaction of the logs has one, else by file and position.

Excluded transactions are executed empty beforehand: what a server has executed it does not ask for again. Logs in which
GTIDs were switched on or off hold both kinds of transactions; OFF_PERMISSIVE applies both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backupd.engine.binlog.walk import Walk
from backupd.engine.instance.launch import LaunchedServer
from backupd.engine.replay.applier import CHANNEL, Standing, place, wait
from backupd.engine.replay.scratch_source import HOST, USER, LogSource, filter_mysql
from backupd.engine.sql.client import Session
from backupd.model.errors import RefusedError, ServerError
from backupd.model.gtid import MysqlGtids, covers, same
from backupd.model.server_facts import Position, Version
from backupd.model.table import TableName

_FIRST_GTID = "OFF_PERMISSIVE"
_TELLS_APPLYING = _SIDE_BY_SIDE = Version(8, 0)
"""From here on it tells what a worker applies, and transactions are applied side by side."""
_WAITING = ("", "Waiting for an event from Coordinator", "Waiting for master to send event")
"""What threads of the replication of 5.7 that have nothing to do say of themselves."""
_STOPPED_FOR_ANOTHER = 3030
"""Error of a worker that stopped because one before it failed."""


@dataclass(frozen=True, slots=True)
class Words:
    """The statements, which were renamed over the years (8.0.23, 8.0.26, 8.2)."""

    source: str
    replica: str
    change: str
    reset: str
    public_key: bool

    @classmethod
    def of(cls, version: Version) -> Words:
        return cls(
            source="SOURCE" if version >= Version(8, 0, 23) else "MASTER",
            replica="REPLICA" if version >= Version(8, 0, 26) else "SLAVE",
            change="CHANGE REPLICATION SOURCE" if version >= Version(8, 0, 23) else "CHANGE MASTER",
            reset="RESET BINARY LOGS AND GTIDS" if version >= Version(8, 2) else "RESET MASTER",
            public_key=version >= Version(8, 0, 4),
        )


class MysqlApplier:
    """``files``: names and sizes of what is served; ``found``: what they hold from ``start`` on; ``target``: GTIDs at
    their end. ``workers`` 0: as the copy was started. ``tables``: all that is applied, empty for everything."""

    def __init__(
        self,
        server: LaunchedServer,
        session: Session,
        source: LogSource,
        found: Walk,
        version: Version,
        files: Sequence[tuple[str, int]],
        start: Position,
        target: str,
        exclude: Sequence[str],
        workers: int,
        tables: Sequence[TableName] = (),
    ) -> None:
        self._server, self._session, self._source, self._found = server, session, source, found
        self._words, self._version = Words.of(version), version
        self._files, self._start, self._target = files, start, target
        self._exclude, self._tables = exclude, tables
        self._name_of_workers = f"{self._words.replica.lower()}_parallel_workers"
        self._given = int(str(session.scalar(f"SELECT @@GLOBAL.{self._name_of_workers}")))
        # Data that statements change depends on what ran before: one after the other, as they stand in the log. 5.7.13
        # failed in 2 of about 20 replays of its own rows, too, with an error (1032) that the next one did not have.
        one_by_one = found.by_statement or version < _SIDE_BY_SIDE
        self._workers = 1 if one_by_one else workers or self._given
        self._by_gtid = found.is_by_gtid
        self._before = MysqlGtids()
        self._begun = 0

    def prepare(self) -> None:
        self._refuse_hole()
        self._session.execute(f"SET GLOBAL {self._name_of_workers} = %s", self._workers)
        exclude(self._session, self._exclude)
        self._before = executed(self._session)
        self._begun = self._begins()
        word = self._words.source
        options = f", {word}_SSL=0"
        if self._words.public_key:
            options += f", GET_{word}_PUBLIC_KEY=1"
        if self._by_gtid:
            options += f", {word}_AUTO_POSITION=1"
        else:
            options += (
                f", {word}_AUTO_POSITION=0, {word}_LOG_FILE='{self._start.file}', {word}_LOG_POS={self._start.pos}"
            )
        self._session.execute(
            f"{self._words.change} TO {word}_HOST=%s, {word}_PORT=%s, {word}_USER=%s, {word}_PASSWORD=%s{options} "
            f"FOR CHANNEL '{CHANNEL}'",
            HOST,
            self._source.port,
            USER,
            self._source.password,
        )
        filter_mysql(self._session, CHANNEL, self._version, self._tables)

    def apply(self, moved: Callable[[Standing], None], cancel: threading.Event | None) -> None:
        replica = self._words.replica
        self._session.execute(f"START {replica} FOR CHANNEL '{CHANNEL}'")
        end = wait(self._server, self._look, self._done, moved, cancel, narrowed=bool(self._tables))
        self._session.execute(f"STOP {replica} FOR CHANNEL '{CHANNEL}'")
        if not self._done(end):
            raise ServerError(
                "the applier stopped before the end of the logs",
                detail=f"it stands at {end.file}:{end.pos} {end.gtids}\n{self._server.log_tail()}",
            )
        if self._by_gtid and self._tables:
            # MySQL before 8.0 forgets the GTID of a statement that the filter skipped, having no log of its own.
            skipped = MysqlGtids.parse(self._target).minus(executed(self._session))
            exclude(self._session, tuple(skipped.each()))

    def executed(self) -> str:
        return str(executed(self._session))

    def applied(self) -> int:
        """By GTID the difference of the sets. Else the server counts those that begin with a statement of their own
        only, and all are there once these are."""
        if self._by_gtid:
            return executed(self._session).minus(self._before).count
        missing = self._found.begun - (self._begins() - self._begun)
        return self._found.transactions - max(0, missing)

    def close(self) -> None:
        forget(self._session, self._words)
        self._session.execute(f"SET GLOBAL {self._name_of_workers} = %s", self._given)

    def _done(self, now: Standing) -> bool:
        at_the_end = place(now.file, now.pos, self._files) >= sum(size for _name, size in self._files)
        if not self._by_gtid:
            return at_the_end
        skipped = bool(self._tables) and at_the_end and now.idle
        return skipped or covers(now.gtids, self._target, mariadb=False)

    def _refuse_hole(self) -> None:
        """What the first file says was executed before it must be on the copy."""
        with self._source.server.connection.connect() as source:
            before = str(source.scalar("SELECT @@GLOBAL.gtid_purged") or "")
        have = executed(self._session)
        lacking = MysqlGtids.parse(before).minus(have)
        if not lacking.is_empty:
            raise RefusedError(
                f"the logs begin after {lacking}, which the copy has not executed",
                detail=f"the copy has executed {have or 'nothing'}",
                hint="transactions between the two are missing: nothing can be replayed",
            )
        if not self._by_gtid and self._start.file != self._files[0][0]:
            raise RefusedError(
                "logs without GTIDs can be replayed from a place in their first file only",
                detail=f"the start is {self._start.file}:{self._start.pos}, the first file {self._files[0][0]}",
            )

    def _look(self) -> Standing:
        source, replica = self._words.source.capitalize(), self._words.replica.capitalize()
        status = self._session.records(f"SHOW {self._words.replica} STATUS FOR CHANNEL '{CHANNEL}'")[0]
        busy = self._busy()
        code, text = int(status["Last_SQL_Errno"]), str(status["Last_SQL_Error"])
        if code:
            rows = self._session.query(
                "SELECT LAST_ERROR_NUMBER, LAST_ERROR_MESSAGE FROM "
                "performance_schema.replication_applier_status_by_worker "
                "WHERE CHANNEL_NAME = %s AND LAST_ERROR_NUMBER <> 0 "
                "ORDER BY LAST_ERROR_NUMBER = %s, LAST_ERROR_TIMESTAMP LIMIT 1",
                CHANNEL,
                _STOPPED_FOR_ANOTHER,
            )
            if rows:
                code, text = int(rows[0][0]), str(rows[0][1])
        waits = "has read all relay log" in str(status[f"{replica}_SQL_Running_State"])
        return Standing(
            io=(int(status["Last_IO_Errno"]), str(status["Last_IO_Error"])),
            sql=(code, text),
            running=status[f"{replica}_SQL_Running"] != "No",
            idle=waits and not busy,
            file=str(status[f"Relay_{source}_Log_File"]),
            pos=int(status[f"Exec_{source}_Log_Pos"]),
            gtids=str(executed(self._session)),
        )

    def _busy(self) -> int:
        """How many of the applier's threads are at work. 5.7 does not tell which transaction a worker applies, so what
        they wait for has to do."""
        if self._version >= _TELLS_APPLYING:
            return int(
                self._session.scalar(
                    "SELECT COUNT(*) FROM performance_schema.replication_applier_status_by_worker "
                    "WHERE CHANNEL_NAME = %s AND APPLYING_TRANSACTION <> ''",
                    CHANNEL,
                )
            )
        marks = ", ".join(["%s"] * len(_WAITING))
        return int(
            self._session.scalar(
                "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE USER = 'system user' "  # noqa: S608 - marks
                f"AND STATE NOT IN ({marks}) AND LOCATE('has read all relay log', STATE) = 0",
                *_WAITING,
            )
        )

    def _begins(self) -> int:
        """Those of XA transactions are counted apart."""
        return sum(
            int(row[1])
            for row in self._session.query("SHOW GLOBAL STATUS WHERE Variable_name IN ('Com_begin', 'Com_xa_start')")
        )


def executed(session: Session) -> MysqlGtids:
    return MysqlGtids.parse(str(session.scalar("SELECT @@GLOBAL.gtid_executed") or ""))


def start_at(session: Session, gtids: str, words: Words) -> None:
    """Say what the copy has executed: it knows, unless its backup is of a kind that does not keep it."""
    if session.scalar("SELECT @@GLOBAL.gtid_mode") == "OFF":
        session.execute(f"SET GLOBAL gtid_mode = {_FIRST_GTID}")
    if gtids and not same(str(executed(session)), gtids, mariadb=False):
        session.execute(words.reset)
        session.execute("SET GLOBAL gtid_purged = %s", gtids)


def exclude(session: Session, gtids: Sequence[str]) -> None:
    """Execute each as an empty transaction, so that it counts as executed and nobody asks for it."""
    done = executed(session)
    for gtid in gtids:
        if done.covers(MysqlGtids.parse(gtid)):
            raise RefusedError(
                f"{gtid} cannot be left out: the backup holds it already", hint="restore from an older backup"
            )
        session.execute("SET SESSION gtid_next = %s", gtid)
        session.execute("BEGIN")
        session.execute("COMMIT")
        session.execute("SET SESSION gtid_next = AUTOMATIC")


def forget(session: Session, words: Words) -> None:
    """Remove what a replay left on the copy, finished or not. Raises ServerError."""
    for row in session.records(f"SHOW {words.replica} STATUS"):
        if row.get("Channel_Name") == CHANNEL:
            session.execute(f"STOP {words.replica} FOR CHANNEL '{CHANNEL}'")
            session.execute(f"RESET {words.replica} ALL FOR CHANNEL '{CHANNEL}'")
