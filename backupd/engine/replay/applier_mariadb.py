"""MariaDB's applier: by GTID always, because its events always have one.

Excluded transactions: the replay goes on until just before one (``UNTIL master_gtid_pos``, the state at that place),
the position in its domain is set behind it, and on it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from backupd.engine.binlog.walk import Walk
from backupd.engine.instance.launch import LaunchedServer
from backupd.engine.replay.applier import CHANNEL, OF_SOME_TABLES, Standing, wait
from backupd.engine.replay.scratch_source import HOST, USER, LogSource, filter_mariadb
from backupd.engine.sql.client import Session
from backupd.model.errors import RefusedError, ServerError
from backupd.model.gtid import MariadbGtids
from backupd.model.table import TableName

_COUNTS = ("Slave_DDL_Groups", "Slave_Non_Transactional_Groups", "Slave_Transactional_Groups")
_NAMED = 5


class MariadbApplier:
    """``found``: what the served files hold from the start on. ``workers`` 0: as the copy was started. ``tables``: all
    that is applied, empty for everything."""

    def __init__(
        self,
        server: LaunchedServer,
        session: Session,
        source: LogSource,
        found: Walk,
        exclude: Sequence[str],
        workers: int,
        tables: Sequence[TableName] = (),
    ) -> None:
        self._server, self._session, self._source, self._found = server, session, source, found
        self._exclude, self._tables = exclude, tables
        # Workers apply domains independently of each other. The source did not: what one domain created is used in
        # another, and only the order of the log is certain to be right. And those that run ahead and try again give
        # other numbers of AUTO_INCREMENT to the triggers of statements: rows that are wrong, and no error.
        serial = len(found.domains) > 1 or found.by_statement
        self._threads = int(str(session.scalar("SELECT @@GLOBAL.slave_parallel_threads")))
        self._workers = 0 if serial else workers or self._threads
        self._applied = 0

    def prepare(self) -> None:
        self._session.execute("SET GLOBAL slave_parallel_threads = %s", self._workers)
        self._session.execute(
            f"CHANGE MASTER '{CHANNEL}' TO MASTER_HOST=%s, MASTER_PORT=%s, MASTER_USER=%s, MASTER_PASSWORD=%s, "
            "MASTER_USE_GTID=slave_pos, MASTER_SSL=0",
            HOST,
            self._source.port,
            USER,
            self._source.password,
        )
        filter_mariadb(self._session, CHANNEL, self._tables)  # that of an earlier replay is kept by name

    def apply(self, moved: Callable[[Standing], None], cancel: threading.Event | None) -> None:
        for gtid in sorted(self._exclude, key=list(self._found.before).index):
            before = self._found.before[gtid]
            if not self._is_at(self._position(), before):
                self._run(f" UNTIL master_gtid_pos='{before}'", lambda now: not now.running, moved, cancel)
            if not self._is_at(self._position(), before):
                raise ServerError(
                    f"the replay did not stop before {gtid}", detail=f"it stands at {self._position()}, not {before}"
                )
            self._session.execute(
                "SET GLOBAL gtid_slave_pos = %s", str(self._position().plus(MariadbGtids.parse(gtid)))
            )
        if not self._is_at(self._position(), self._found.end):
            # No UNTIL: the files end here.
            self._run("", lambda now: self._is_at(MariadbGtids.parse(now.gtids), self._found.end), moved, cancel)

    def executed(self) -> str:
        return str(self._position())

    def applied(self) -> int:
        return self._applied

    def close(self) -> None:
        forget(self._session)
        self._session.execute("SET GLOBAL slave_parallel_threads = %s", self._threads)

    def _run(
        self,
        until: str,
        done: Callable[[Standing], bool],
        moved: Callable[[Standing], None],
        cancel: threading.Event | None,
    ) -> None:
        before = self._count()
        self._session.execute(f"START SLAVE '{CHANNEL}'{until}")
        wait(self._server, self._look, done, moved, cancel, narrowed=bool(self._tables))
        self._session.execute(f"STOP SLAVE '{CHANNEL}'")
        self._applied += self._count() - before

    def _status(self) -> dict[str, object]:
        return self._session.records(f"SHOW SLAVE '{CHANNEL}' STATUS")[0]

    def _count(self) -> int:
        status = self._status()
        return sum(int(str(status[name])) for name in _COUNTS)

    def _look(self) -> Standing:
        status = self._status()
        busy = self._session.scalar(
            "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND = 'Slave_worker' "
            "AND STATE <> 'Waiting for work from SQL thread'"
        )
        waits = str(status["Slave_SQL_Running_State"]).startswith("Slave has read all relay log")
        return Standing(
            io=(int(str(status["Last_IO_Errno"])), str(status["Last_IO_Error"])),
            sql=(int(str(status["Last_SQL_Errno"])), str(status["Last_SQL_Error"])),
            running=status["Slave_SQL_Running"] != "No",
            idle=waits and not busy,
            file=str(status["Relay_Master_Log_File"]),
            pos=int(str(status["Exec_Master_Log_Pos"])),
            gtids=str(self._position()),
        )

    def _position(self) -> MariadbGtids:
        return position(self._session)

    @staticmethod
    def _is_at(now: MariadbGtids, there: MariadbGtids) -> bool:
        return all(now.last.get(domain) == gtid for domain, gtid in there.last.items())


def refuse_repeated(found: Walk, *, narrowed: bool = False) -> None:
    """Raises RefusedError when GTIDs do not tell which transaction is meant. ``narrowed``: are only some tables
    replayed?"""
    if found.twice:
        raise RefusedError(
            "the logs hold a GTID twice: the copy's own applier would begin or end at the wrong one",
            detail=f"{', '.join(found.twice[:_NAMED])}: the source ran with gtid_strict_mode=OFF",
            hint=OF_SOME_TABLES
            if narrowed
            else "replay by file and position, which does not ask for GTIDs: --replay-with pipe",
        )


def position(session: Session) -> MariadbGtids:
    return MariadbGtids.parse(str(session.scalar("SELECT @@GLOBAL.gtid_slave_pos") or ""))


def set_position(session: Session, found: Walk, state: MariadbGtids) -> None:
    """Say what the copy has executed. What it has of other domains, which the logs do not hold, stays."""
    others = {domain: gtid for domain, gtid in position(session).last.items() if domain not in found.end.last}
    session.execute("SET GLOBAL gtid_slave_pos = %s", str(MariadbGtids(others).plus(state)))


def forget(session: Session) -> None:
    """Remove what a replay left on the copy, finished or not. Raises ServerError."""
    for row in session.records("SHOW ALL SLAVES STATUS"):
        if row["Connection_name"] == CHANNEL:
            session.execute(f"STOP SLAVE '{CHANNEL}'")
            session.execute(f"RESET SLAVE '{CHANNEL}' ALL")
