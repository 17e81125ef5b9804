"""What runs for long, on real servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pymysql
import pytest

from backupd.engine.server_load import Gauge, Reading, changing, query_gauges, running
from backupd.engine.sql.client import Connection, Session
from backupd.model.table import TableName
from tests.support.servers.flavours import BOTH, as_root, as_service, server_of
from tests.support.servers.server import Server, query


@pytest.fixture(scope="module", params=BOTH)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with server_of(request.param) as found:
        found.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.orders (id INT PRIMARY KEY, v INT)",
            "INSERT INTO shop.orders VALUES (1, 1), (2, 2)",
        )
        yield found


@contextmanager
def busy(server: Server, statement: str, seen: Callable[[], bool]) -> Iterator[None]:
    """``statement`` runs meanwhile, from when ``seen`` says so; at the end it is killed and gone from the server list,
    which it leaves a moment after its client has lost the connection."""
    with closing(server.connect()) as connection:

        def run() -> None:
            try:
                query(connection, statement)
            except pymysql.err.Error:
                return  # killed

        ((number,),) = query(connection, "SELECT CONNECTION_ID()")
        thread = threading.Thread(target=run)
        thread.start()
        try:
            while not seen():
                assert thread.is_alive()
                thread.join(0.02)
            yield
        finally:
            server.execute(f"KILL {number}")
            thread.join()
            while number in {row[0] for row in server.query("SHOW PROCESSLIST")}:
                time.sleep(0.02)


@contextmanager
def gauge_of(connection: Connection) -> Iterator[Gauge]:
    (gauge,) = query_gauges(connection).found
    with closing(gauge):
        yield gauge


@pytest.fixture
def session(server: Server) -> Iterator[Session]:
    with as_service(server).connect() as opened:
        yield opened


def test_a_long_statement_is_told_with_who_runs_it_and_short_ones_are_not(server: Server, session: Session) -> None:
    statement = "SELECT SLEEP(60), 'x', v FROM shop.orders WHERE v = 1"
    with busy(server, statement, lambda: any(one.seconds >= 1 for one in running(session, 0))):
        (one,) = running(session, 1)
        assert (one.user, one.host) == ("root", "localhost")
        assert one.statement.startswith("SELECT SLEEP(60), 'x', v FROM shop.orders")
        assert str(one).startswith(f"root@localhost (connection {one.id}) since {one.seconds} s: SELECT SLEEP(60)")
        assert running(session, 3600) == ()
        # A backup steps back for a statement of somebody else, and not for one of its own account.
        with gauge_of(as_service(server)) as gauge:
            reading = gauge.read()
            assert reading.value is not None
            assert reading.value >= 1
            assert reading.text.startswith(f"a statement of root@localhost (connection {one.id}) since")
        with gauge_of(as_root(server)) as gauge:
            assert gauge.read() == Reading(0.0, "no other session runs a statement")
    assert running(session, 0) == ()


def test_who_only_sleeps_or_waits_for_a_named_lock_holds_up_nobody(server: Server, session: Session) -> None:
    def sleeps() -> bool:
        return any(
            "SLEEP" in str(row[7]) and row[4] == "Query"
            for row in server.query("SHOW FULL PROCESSLIST")
            if "PROCESSLIST" not in str(row[7])
        )

    with busy(server, "SELECT SLEEP(60)", sleeps):
        assert running(session, 0) == ()


def test_the_gauge_waits_for_nothing_that_waits_for_the_backup_itself(server: Server, session: Session) -> None:
    with gauge_of(as_service(server)) as gauge, closing(server.connect()) as snapshot:
        query(snapshot, "BEGIN")
        query(snapshot, "SELECT * FROM shop.orders")
        with busy(
            server,
            "ALTER TABLE shop.orders ADD COLUMN x INT, ALGORITHM=COPY",
            lambda: any("metadata lock" in one.state for one in running(session, 0)),
        ):
            assert gauge.read() == Reading(0.0, "no other session runs a statement")
            query(snapshot, "ROLLBACK")


def test_a_statement_that_rebuilds_a_table_is_told_with_the_table(server: Server, session: Session) -> None:
    with closing(server.connect()) as reader:
        query(reader, "BEGIN")
        query(reader, "SELECT * FROM shop.orders")
        with busy(server, "ALTER TABLE shop.orders ADD COLUMN w INT, ALGORITHM=COPY", lambda: bool(changing(session))):
            (one,) = changing(session)
            assert one.tables == (TableName("shop", "orders"),)
            assert one.by.statement.startswith("ALTER TABLE shop.orders")
            query(reader, "ROLLBACK")
