"""The replication applier of a restored copy, on relay logs that are laid out for it.

They end where the replay ends, so the applier needs no UNTIL: it runs, with all its workers, until it has applied all
there is. A copy whose server id occurs in the events would skip those silently and reach the end all the same, which is
why transactions are counted.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from backupd.engine.binlog.walk import Walk
from backupd.engine.relay_logs import CHANNEL, Leg, RelayLog, filter_replication
from backupd.engine.server.launch import LaunchedServer
from backupd.engine.server.replication import Words, set_executed
from backupd.engine.sql.client import Session
from backupd.engine.sql.dialect import dialect_of
from backupd.model.binlog import FIRST_EVENT, MariadbGtids, MysqlGtids, covers, same
from backupd.model.errors import CancelledError, RefusedError, ServerError, ToolError
from backupd.model.server_facts import Flavour, Position, ServerInfo, Version
from backupd.process.output import redact

OF_SOME_TABLES = (
    "restore the whole server beside it (--datadir DIR --start) and copy the tables, or choose another "
    "target (backup:ID needs no replay)"
)
"""What to do when some tables cannot be replayed: there is no other way to narrow a replay down."""
QUIET_SECONDS = 5.0
"""How long an applier that says it has nothing to do may stand somewhere else than at the end."""
_PAUSES = (0.02, 0.15)
_ENDING_SECONDS = 3.0
"""For a server that no longer answers to end."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the applier is. ``error``: its number and text. ``running``: does it? ``idle``: it says that it waits for
    more. ``file``, ``pos``: applied, in the archived files."""

    error: tuple[int, str]
    running: bool
    idle: bool
    file: str
    pos: int
    gtids: str


def other_way(*, narrowed: bool) -> str:
    """The hint where nothing better is known."""
    return OF_SOME_TABLES if narrowed else "replay through the pipe instead (--replay-with pipe)"


_ELSEWHERE = re.compile(r"\b(DATA|INDEX)\s+DIRECTORY\b", re.IGNORECASE)
NO_FOLDER_ELSEWHERE = (
    "the statement creates files outside of the datadir (DATA DIRECTORY), which no replay into a copy allows: restore "
    "to right before the statement (--to before-gtid: or its position), then run it by hand"
)
_ENGINE_FAILED, _ENGINE_SAYS = 1030, "Got error 168"
_UNTOLD = (
    "the storage engine could not create a file, and this server does not report which; most likely "
    f"{NO_FOLDER_ELSEWHERE}"
)
_XAER_NOTA = 1397
_HINTS: Mapping[int, str] = {
    1032: "the copy lacks a row that the binary logs change: backup and logs are of different histories, or the source "
    "changed rows without logging them; try an older backup",
    _XAER_NOTA: "an XA transaction was prepared before the position of the backup and ended after it, so the copy "
    "does not have it: restore a backup from before it was prepared or after it ended; physical backups hold "
    "prepared transactions (--from physical)",
    _ENGINE_FAILED: _UNTOLD,
    1062: "the copy already has a row that the binary logs insert: the replay began too early, or rows were written "
    "without logging them; try an older backup",
    1146: "the copy lacks a table that the logs use, such as a temporary one from before the backup",
}


_OF_HISTORY = frozenset({1032, 1062})
"""Errors whose hints are as likely when only some tables are replayed."""


def hint_of_statement(text: str) -> str:
    """What to do when a statement failed whose text is in ``text``; "" where it says nothing."""
    if _ELSEWHERE.search(text):
        return NO_FOLDER_ELSEWHERE
    return _UNTOLD if _ENGINE_SAYS in text else ""


def _fail(now: Standing, *, narrowed: bool) -> NoReturn:
    code, text = now.error
    hint = _HINTS.get(code, f"the error text is the server's; {other_way(narrowed=narrowed)}")
    if narrowed and code != _XAER_NOTA:
        known = f"{_HINTS[code]}; or " if code in _OF_HISTORY else ""
        hint = f"{known}it needs tables that this replay leaves out: {OF_SOME_TABLES}"
    raise ServerError(
        f"replay stopped at {now.file}:{now.pos}: the server cannot apply the binary logs (error {code})",
        detail=f"{redact(text)}\nthe copy is at {now.file}:{now.pos} {now.gtids}".rstrip(),
        hint=hint_of_statement(text) or hint,
    )


def bytes_before(file: str, pos: int, files: Sequence[tuple[str, int]]) -> int:
    """Bytes of ``files`` (names and sizes) up to ``file:pos``; all of them for a file that comes behind."""
    done = 0
    for name, size in files:
        if name == file:
            return done + min(pos, size)
        done += size
    return done if file else 0


class Applier(ABC):
    """One replay by the copy's own replication: of ``leg``, whose files are the relay ``logs``, onto ``server``;
    ``session``: an open one to it."""

    def __init__(self, server: LaunchedServer, session: Session, logs: Sequence[RelayLog], leg: Leg) -> None:
        self._server, self._session, self._logs, self._leg = server, session, logs, leg
        self._words = Words.of(leg.info.flavour, leg.info.version, CHANNEL)
        self._given = int(str(session.scalar(f"SELECT @@GLOBAL.{self._words.workers}")))

    def prepare(self) -> None:
        """Leave out what is excluded, give the connection ``backupd`` the relay logs, with the filter of the tables. It
        never connects. Raises ServerError, RefusedError."""
        words, word = self._words, self._words.source
        workers = words.serial if self._is_serial else self._given
        self._session.execute(f"SET GLOBAL {words.workers} = %s", workers)
        self._session.execute(
            f"{words.change}{words.named} TO {word}_HOST='127.0.0.1', {word}_PORT=1, {word}_USER='nobody', "
            f"RELAY_LOG_FILE=%s, RELAY_LOG_POS={FIRST_EVENT}{self._options()}{words.channel}",
            self._logs[0].name,
        )
        # The statement above has turned it off: files that are applied would stay.
        self._session.execute("SET GLOBAL relay_log_purge = ON")
        # On MariaDB that of an earlier replay is kept by name.
        filter_replication(self._session, self._leg.info, CHANNEL, self._leg.tables)

    @abstractmethod
    def apply(self, moved: Callable[[Standing], None]) -> None:
        """Run to the end of the served files. Raises ServerError, ToolError, CancelledError."""

    def executed(self) -> str:
        """All that the copy has executed, in the writing of model.gtid."""
        return executed_by(self._session, self._leg.info)

    @abstractmethod
    def applied(self) -> int:
        """Transactions applied, as the server itself counted them."""

    def close(self) -> None:
        """Remove the replication connection, and set the copy's workers back. Raises ServerError."""
        self._words.forget(self._session, CHANNEL)
        self._session.execute(f"SET GLOBAL {self._words.workers} = %s", self._given)

    @property
    @abstractmethod
    def _is_serial(self) -> bool:
        """Must one transaction be applied after the other?"""

    @abstractmethod
    def _options(self) -> str:
        """What the statement that names the relay logs says besides."""

    @abstractmethod
    def _busy(self) -> int:
        """How many of the applier's threads are at work."""

    def _run(self, done: Callable[[Standing], bool], moved: Callable[[Standing], None]) -> Standing:
        """Start the applier, look until it is ``done``, stop it; gives the last look."""
        words = self._words
        self._session.execute(f"START {words.replica}{words.named} SQL_THREAD{words.channel}")
        end = self._wait(done, moved)
        self._session.execute(f"STOP {words.replica}{words.named}{words.channel}")
        return end

    def _wait(self, done: Callable[[Standing], bool], moved: Callable[[Standing], None]) -> Standing:
        pause, longest = _PAUSES
        last: Standing | None = None
        since = time.monotonic()
        cancel, narrowed = self._leg.context.cancel, bool(self._leg.tables)
        while True:
            if cancel.is_set():
                raise CancelledError(
                    "the replay was cancelled", hint="the copy is at a position between start and target"
                )
            now = self._looked()
            if now.error[0]:
                _fail(now, narrowed=narrowed)
            if done(now):
                return now
            if now != last:
                last, since = now, time.monotonic()
                moved(now)
            elif not now.running or (now.idle and time.monotonic() - since > QUIET_SECONDS):
                return now  # it did not come to the end: whoever compares says so
            time.sleep(pause)
            pause = min(pause * 1.3, longest)

    def _looked(self) -> Standing:
        try:
            return self._look()
        except ServerError as error:
            if not self._server.has_ended(_ENDING_SECONDS):
                raise
            raise ToolError(
                "the restored copy ended while logs were replayed onto it",
                detail=self._server.log_tail(),
                hint=f"see its error log above; {other_way(narrowed=bool(self._leg.tables))}",
            ) from error

    def _look(self) -> Standing:
        replica = self._words.replica.capitalize()
        status = self._status()
        file, pos = self._origin(str(status["Relay_Log_File"]), int(str(status["Relay_Log_Pos"])))
        waits = "has read all relay log" in str(status[f"{replica}_SQL_Running_State"])
        return Standing(
            error=self._error(int(str(status["Last_SQL_Errno"])), str(status["Last_SQL_Error"])),
            running=status[f"{replica}_SQL_Running"] != "No",
            idle=waits and not self._busy(),
            file=file,
            pos=pos,
            gtids=self.executed(),
        )

    def _origin(self, name: str, pos: int) -> tuple[str, int]:
        """Which byte of which archived file that is. The server's own relay log, behind them, is empty."""
        log = next((log for log in self._logs if log.name == Path(name).name), None)
        if log is None:
            return self._logs[-1].source.name, self._leg.sizes[-1][1]
        return log.source.name, log.origin_of(pos)

    def _status(self) -> dict[str, object]:
        words = self._words
        return self._session.records(f"SHOW {words.replica}{words.named} STATUS{words.channel}")[0]

    def _error(self, code: int, text: str) -> tuple[int, str]:
        """What the applying thread failed with, by the words of the thread that failed first."""
        return code, text


# -- MariaDB

_GROUP_COUNTERS = ("Slave_DDL_Groups", "Slave_Non_Transactional_Groups", "Slave_Transactional_Groups")
_NAMED = 5


class MariadbApplier(Applier):
    """MariaDB, whose events always have a GTID. Excluded transactions are not in the relay logs; afterwards the
    position is set behind them."""

    _applied = 0

    def apply(self, moved: Callable[[Standing], None]) -> None:
        """In one run."""
        found = self._leg.found
        before = self._count()
        if not self._is_at(found.reached):
            self._run(lambda now: self._is_at(found.reached, MariadbGtids.parse(now.gtids)), moved)
        self._applied = self._count() - before
        if self._is_at(found.reached) and not self._is_at(found.end):
            self._session.execute(
                "SET GLOBAL gtid_slave_pos = %s", str(mariadb_position(self._session).plus(found.end))
            )

    def applied(self) -> int:
        """Event groups, by the connection's own counters."""
        return self._applied

    @property
    def _is_serial(self) -> bool:
        # Workers apply domains independently of each other. The source did not: what one domain created is used in
        # another, and only the order of the log is certain to be right. And those that run ahead and try again give
        # other numbers of AUTO_INCREMENT to the triggers of statements: rows that are wrong, and no error.
        return len(self._leg.found.domains) > 1 or self._leg.found.by_statement

    def _options(self) -> str:
        # Without the name of a log of the source, 10.11 crashes at the first event.
        first = self._logs[0].source.name
        return f", MASTER_USE_GTID=no, MASTER_LOG_FILE='{first}', MASTER_LOG_POS={FIRST_EVENT}"

    def _count(self) -> int:
        status = self._status()
        return sum(int(str(status[name])) for name in _GROUP_COUNTERS)

    def _busy(self) -> int:
        return int(
            self._session.scalar(
                "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND = 'Slave_worker' "
                "AND STATE <> 'Waiting for work from SQL thread'"
            )
        )

    def _is_at(self, there: MariadbGtids, now: MariadbGtids | None = None) -> bool:
        """``now``: where the copy is; it is asked where that is not given."""
        last = (now or mariadb_position(self._session)).last
        return all(last.get(domain) == gtid for domain, gtid in there.last.items())


def refuse_repeated(found: Walk, *, narrowed: bool = False) -> None:
    """Raises RefusedError when GTIDs do not say which transaction is meant. ``narrowed``: are only some tables
    replayed?"""
    if found.twice:
        raise RefusedError(
            "the logs hold a GTID twice: the copy's own applier would begin or end at the wrong one",
            detail=f"{', '.join(found.twice[:_NAMED])}: the source ran with gtid_strict_mode=OFF",
            hint=OF_SOME_TABLES if narrowed else "replay by file and position, without GTIDs: --replay-with pipe",
        )


def mariadb_position(session: Session) -> MariadbGtids:
    """What the copy has executed as a replica. Raises ServerError."""
    return MariadbGtids.parse(str(session.scalar("SELECT @@GLOBAL.gtid_slave_pos") or ""))


def set_mariadb_position(session: Session, found: Walk, state: MariadbGtids) -> None:
    """Say what the copy has executed. What it has of other domains, which the logs do not hold, stays."""
    others = {domain: gtid for domain, gtid in mariadb_position(session).last.items() if domain not in found.end.last}
    session.execute("SET GLOBAL gtid_slave_pos = %s", str(MariadbGtids(others).plus(state)))


# -- MySQL and Percona Server

_FIRST_GTID = "OFF_PERMISSIVE"
_TELLS_APPLYING = _SIDE_BY_SIDE = Version(8, 0)
"""From here on it shows what a worker applies, and transactions are applied side by side."""
_WAITING = ("", "Waiting for an event from Coordinator", "Waiting for master to send event")
"""What threads of the replication of 5.7 that have nothing to do say of themselves."""
_STOPPED_FOR_ANOTHER = 3030
"""Error of a worker that stopped because one before it failed."""


class MysqlApplier(Applier):
    """MySQL: by GTID where every transaction of the logs has one, else by file and position. Excluded transactions are
    executed empty beforehand: what a server has executed it does not ask for again. Logs in which GTIDs were switched
    on or off hold both kinds of transactions; OFF_PERMISSIVE applies both."""

    _before = MysqlGtids()
    _begun = 0

    def prepare(self) -> None:
        """Also compares what the logs begin after with what the copy has executed."""
        self._refuse_hole()
        exclude_mysql(self._session, self._leg.exclude)
        self._before = mysql_executed(self._session)
        self._begun = self._begins()
        super().prepare()

    def apply(self, moved: Callable[[Standing], None]) -> None:
        """In one run. Raises ServerError also where it stopped before the end."""
        end = self._run(self._done, moved)
        if not self._done(end):
            raise ServerError(
                "the applier stopped before the end of the logs",
                detail=f"the copy is at {end.file}:{end.pos} {end.gtids}\n{self._server.log_tail()}",
            )
        if self._by_gtid and self._leg.tables:
            # MySQL before 8.0 forgets the GTID of a statement that the filter skipped, having no log of its own.
            skipped = MysqlGtids.parse(self._leg.stop.gtids).minus(mysql_executed(self._session))
            exclude_mysql(self._session, tuple(skipped.each()))

    def applied(self) -> int:
        """By GTID the difference of the sets. Else the server counts those that begin with a statement of their own
        only, and all are there once these are."""
        if self._by_gtid:
            return mysql_executed(self._session).minus(self._before).count
        missing = self._leg.found.begun - (self._begins() - self._begun)
        return self._leg.found.transactions - max(0, missing)

    @property
    def _by_gtid(self) -> bool:
        return self._leg.found.is_by_gtid

    @property
    def _is_serial(self) -> bool:
        # Data that statements change depends on what ran before: one after the other, as they stand in the log. 5.7.13
        # failed in 2 of about 20 replays of its own rows, too, with an error (1032) that the next one did not have.
        return self._leg.found.by_statement or self._leg.info.version < _SIDE_BY_SIDE

    def _options(self) -> str:
        return ""

    def _done(self, now: Standing) -> bool:
        sizes = self._leg.sizes
        at_the_end = bytes_before(now.file, now.pos, sizes) >= sum(size for _name, size in sizes)
        if not self._by_gtid:
            return at_the_end
        skipped = bool(self._leg.tables) and at_the_end and now.idle
        return skipped or covers(now.gtids, self._leg.stop.gtids, mariadb=False)

    def _refuse_hole(self) -> None:
        """What the first file says was executed before it must be on the copy."""
        have = mysql_executed(self._session)
        lacking = self._leg.found.known.minus(have)
        if not lacking.is_empty:
            raise RefusedError(
                f"the logs begin after {lacking}, which the copy has not executed",
                detail=f"the copy has executed {have or 'nothing'}",
                hint="transactions between the two are missing: nothing can be replayed",
            )
        start, first = self._leg.start, self._leg.files[0].name
        if not self._by_gtid and start.file != first:
            raise RefusedError(
                "logs without GTIDs can be replayed only from a position in their first file",
                detail=f"the start is {start.file}:{start.pos}, the first file {first}",
            )

    def _error(self, code: int, text: str) -> tuple[int, str]:
        rows = code and self._session.query(
            "SELECT LAST_ERROR_NUMBER, LAST_ERROR_MESSAGE FROM "
            "performance_schema.replication_applier_status_by_worker "
            "WHERE CHANNEL_NAME = %s AND LAST_ERROR_NUMBER <> 0 "
            "ORDER BY LAST_ERROR_NUMBER = %s, LAST_ERROR_TIMESTAMP LIMIT 1",
            CHANNEL,
            _STOPPED_FOR_ANOTHER,
        )
        return (int(rows[0][0]), str(rows[0][1])) if rows else (code, text)

    def _busy(self) -> int:
        """5.7 does not show which transaction a worker applies, so what they wait for has to do."""
        if self._leg.info.version >= _TELLS_APPLYING:
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


def mysql_executed(session: Session) -> MysqlGtids:
    """``gtid_executed`` of the server. Raises ServerError."""
    return MysqlGtids.parse(str(session.scalar("SELECT @@GLOBAL.gtid_executed") or ""))


def exclude_mysql(session: Session, gtids: Sequence[str]) -> None:
    """Execute each as an empty transaction, so that it counts as executed and nobody asks for it."""
    done = mysql_executed(session)
    for gtid in gtids:
        if done.covers(MysqlGtids.parse(gtid)):
            raise RefusedError(
                f"{gtid} cannot be left out: the backup holds it already", hint="restore from an older backup"
            )
        session.execute("SET SESSION gtid_next = %s", gtid)
        session.execute("BEGIN")
        session.execute("COMMIT")
        session.execute("SET SESSION gtid_next = AUTOMATIC")


# -- both


def executed_by(session: Session, info: ServerInfo) -> str:
    """All that the copy has executed: of MariaDB the last GTID of each domain, of MySQL the set of GTIDs, empty without
    any. Raises ServerError."""
    return str(mariadb_position(session) if info.flavour is Flavour.MARIADB else mysql_executed(session))


def applier_for(server: LaunchedServer, session: Session, logs: Sequence[RelayLog], leg: Leg) -> Applier:
    """The applier of such a server, for the copy ``server`` with the open ``session``. Raises ServerError."""
    applier = MariadbApplier if leg.mariadb else MysqlApplier
    return applier(server, session, logs, leg)


def set_start(session: Session, info: ServerInfo, found: Walk, start: Position) -> str:
    """Say what the copy has executed, and gives that, as GTIDs: it knows, unless its backup is of a kind that does not
    keep it. What an earlier replay left on the copy is removed. Raises ServerError."""
    Words.of(info.flavour, info.version, CHANNEL).forget(session, CHANNEL)
    if info.flavour is Flavour.MARIADB:
        set_mariadb_position(session, found, found.start)
        return executed_by(session, info)
    if session.scalar("SELECT @@GLOBAL.gtid_mode") == "OFF":
        session.execute(f"SET GLOBAL gtid_mode = {_FIRST_GTID}")
    if start.gtid and not same(executed_by(session, info), start.gtid, mariadb=False):
        set_executed(session, dialect_of(info.flavour, info.version), start.gtid)
    return executed_by(session, info)
