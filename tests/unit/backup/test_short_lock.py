"""The moment in which nobody commits: all snapshots are of the same moment, and it never lasts longer than it may."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pymysql
import pytest
from pymysql.connections import Connection as RawConnection

from backupd.backup.dump_locks import BlockedCommits, ClearWay, NotOpenedError
from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.server.snapshot import Snapshot
from backupd.engine.sql.client import Connection
from backupd.model.errors import BusyError
from backupd.model.job import Progress
from backupd.model.table import Outcome
from backupd.process.run_context import RunContext
from tests.support.keys import Keys
from tests.support.restores.dumped import DumpRepository, table
from tests.support.restores.meddling import Meddled
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer, why_not
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server, query


@pytest.fixture(scope="module", params=["mariadb", "mysql"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "mysql" and why_not():
        pytest.skip(why_not())
    with PrivateServer() if request.param == "mariadb" else MySQLServer() as private:
        private.create_backup_users()
        private.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.beats (id INT AUTO_INCREMENT PRIMARY KEY, v INT)",
            "INSERT INTO shop.beats (v) VALUES (1)",
        )
        yield private


def connection_of(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)


class Beating:
    """Somebody who commits one row after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rows = 0

    def _run(self) -> None:
        with self._server.connect() as connection:
            while not self._stop.is_set():
                query(connection, "INSERT INTO shop.beats (v) VALUES (1)")
                self.rows += 1

    def goes_on(self) -> None:
        """Wait for a row that was begun after now. It never comes while something keeps commits waiting."""
        at = self.rows
        while self.rows < at + 2:
            assert self._thread.is_alive()
            time.sleep(0.001)

    def __enter__(self) -> Beating:
        self._thread.start()
        while not self.rows:
            time.sleep(0.001)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def reading(server: Server) -> Iterator[None]:
    """A SELECT that takes its time."""

    def read(connection: RawConnection[Any]) -> None:
        with suppress(pymysql.err.OperationalError):
            query(connection, "SELECT SLEEP(3600) FROM shop.beats LIMIT 1")

    with server.connect() as connection:
        number = query(connection, "SELECT CONNECTION_ID()")[0][0]
        thread = threading.Thread(target=read, args=[connection])
        thread.start()
        while not server.query("SELECT 1 FROM information_schema.processlist WHERE info LIKE 'SELECT SLEEP%%'", ()):
            time.sleep(0.01)
        try:
            yield
        finally:
            server.execute(f"KILL QUERY {number}")
            thread.join()


def test_snapshots_of_different_sessions_hold_the_same_rows(server: Server) -> None:
    connection = connection_of(server)
    with Beating(server) as beating, Snapshot(connection) as one, Snapshot(connection) as other:
        with BlockedCommits(connection, max_seconds=60.0) as moment:
            one.open(moment.position)
            time.sleep(0.05)
            other.open(moment.position)
        at = beating.rows
        while beating.rows == at:
            time.sleep(0.001)
        counts = [snapshot.session.scalar("SELECT COUNT(*) FROM shop.beats") for snapshot in (one, other)]
    assert counts[0] == counts[1]
    assert moment.position.file
    assert moment.position.gtid
    assert 0.05 <= moment.seconds < 60.0
    assert counts[0] < server.scalar("SELECT COUNT(*) FROM shop.beats")


def test_the_moment_ends_by_force_and_that_is_told(server: Server) -> None:
    with Beating(server) as beating, pytest.raises(NotOpenedError) as caught:
        with BlockedCommits(connection_of(server), max_seconds=0.4):
            at = beating.rows
            while beating.rows < at + 5:  # for ever, were it not ended
                time.sleep(0.01)
    assert "SHOW PROCESSLIST" in caught.value.hint


def test_a_long_statement_is_waited_for_where_the_lock_would_wait_for_it(server: Server) -> None:
    connection = connection_of(server)
    told: list[Progress] = []

    def clear() -> None:
        ClearWay(connection, 60, 0.0, RunContext(report=told.append)).clear()

    with reading(server), Beating(server) as beating:
        if server.sequences:
            clear()
            with BlockedCommits(connection, max_seconds=60.0):
                """MariaDB's stages do not wait for it."""
        else:
            eventually(lambda: _refused(clear))
            with pytest.raises(BusyError, match="statements would block the locks that open the snapshots") as caught:
                clear()
            assert "FROM shop.beats" in caught.value.detail
        beating.goes_on()
    eventually(lambda: not _refused(clear))  # a statement that was killed leaves the list a moment later


def test_tables_of_either_flavour_are_dumped_while_somebody_writes(server: Server, short_tmp: Path, keys: Keys) -> None:
    with Beating(server) as beating:
        repository = DumpRepository(short_tmp, server, keys)
        first, *others = repository.spec("shop.*").tools
        outcome = repository.dump("shop.*", tools=[Meddled(first, before=beating.goes_on), *others])
    beats = table(outcome, "shop.beats")
    assert beats.outcome is Outcome.DUMPED, beats.reason
    assert beats.rows is not None
    assert 0 < beats.rows < server.scalar("SELECT COUNT(*) FROM shop.beats")
    assert outcome.facts.position.gtid


_BLOCKING = """
import sys
from backupd.backup.dump_locks import BlockedCommits, NotOpenedError
from backupd.engine.sql.client import Connection
try:
    with BlockedCommits(Connection(socket=sys.argv[1], user=sys.argv[2], password=sys.argv[3]), max_seconds=3.0):
        print("blocked", flush=True)
        sys.stdin.read()
except NotOpenedError as error:
    print(error.message)
"""


def test_commits_go_on_when_whoever_blocks_them_is_stopped(server: Server) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _BLOCKING, str(server.socket), SERVICE_USER, SERVICE_PASSWORD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as blocking:
        assert blocking.stdout is not None
        assert blocking.stdout.readline() == "blocked\n"
        blocking.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            with server.connect() as connection:
                query(connection, "SET SESSION lock_wait_timeout = 600")
                query(connection, "INSERT INTO shop.beats (v) VALUES (1)")
            waited = time.monotonic() - began
        finally:
            blocking.send_signal(signal.SIGCONT)
        told, _ = blocking.communicate(timeout=300)
    assert waited < 300.0
    assert "could not be opened while commits were blocked" in told


def test_commits_that_were_blocked_for_longer_than_allowed_are_told_of(
    server: Server, short_tmp: Path, keys: Keys
) -> None:
    tool = Meddled(ExactDump(), opened=lambda _run: time.sleep(0.8))
    outcome = DumpRepository(short_tmp, server, keys).dump("shop.beats", tools=[tool], max_lock=0.5)
    assert table(outcome, "shop.beats").outcome is Outcome.DUMPED
    assert outcome.dump.blocked >= 0.8
    assert any("logical.max_lock allows (0.5 s)" in warning for warning in outcome.facts.warnings)


def test_a_primary_key_that_the_server_made_is_a_column_like_others(
    server: Server, short_tmp: Path, keys: Keys
) -> None:
    if server.sequences:
        pytest.skip("MariaDB makes none")
    with server.connect() as connection:
        query(connection, "SET SESSION sql_generate_invisible_primary_key = ON")
        query(connection, "CREATE TABLE shop.keyless (v INT)")
    server.execute(
        "INSERT INTO shop.keyless (v) VALUES (1), (2), (3)",
        "DELETE FROM shop.keyless WHERE v = 2",
        "SET GLOBAL show_gipk_in_create_table_and_information_schema = OFF",
    )
    repository = DumpRepository(short_tmp, server, keys)
    try:
        outcome = repository.dump("shop.keyless", tools=[ExactDump()])
    finally:
        server.execute("SET GLOBAL show_gipk_in_create_table_and_information_schema = ON")
    assert "`my_row_id`" in repository.content(outcome, "tables/shop/keyless/definition.sql")
    assert "(1,1),\n(3,3);" in repository.content(outcome, "tables/shop/keyless/data-00000.sql")


def _refused(what: Callable[[], None]) -> bool:
    try:
        what()
    except BusyError:
        return True
    return False


def eventually(what: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)
