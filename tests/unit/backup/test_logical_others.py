"""Logical backups among others: what the account may not see, who locks tables, who waits, what is prepared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pymysql
import pytest

from backupd.backup.dump_locks import ClearWay, WaitWatch
from backupd.backup.logical import execute
from backupd.backup.preflight import examine_sight
from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.server.accounts import read_grants
from backupd.engine.server.probe import probe
from backupd.engine.server_load import changing
from backupd.engine.sql.client import Connection
from backupd.engine.sql.tables import LockedTableError, hurry, list_tables
from backupd.model.errors import BusyError
from backupd.model.job import Progress
from backupd.model.table import PREPARED_XA, Outcome, TableName, TablePattern
from backupd.process.run_context import RunContext
from policies.policy import Logical
from tests.support.restores.dumped import DumpRepository, now, table
from tests.support.servers.server import Server, query


def a_shop(server: Server) -> None:
    server.execute("CREATE DATABASE shop", "CREATE TABLE shop.a (id INT PRIMARY KEY)", "INSERT INTO shop.a VALUES (1)")


def until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def under_way(server: Server, statement: str) -> Iterator[int]:
    """``statement`` runs meanwhile; gives its connection. Killed in the end."""
    with server.connect() as connection:
        ((number,),) = query(connection, "SELECT CONNECTION_ID()")

        def run() -> None:
            with suppress(pymysql.err.Error):
                query(connection, statement)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            until(lambda: any(row[0] == number and row[7] for row in server.query("SHOW FULL PROCESSLIST")))
            yield int(number)
        finally:
            with suppress(pymysql.err.Error):  # it has ended
                server.execute(f"KILL QUERY {number}")
            thread.join()


def test_what_the_account_may_not_see_is_said_in_the_backup_and_by_check(repository: DumpRepository) -> None:
    a_shop(repository.server)
    repository.server.execute(
        "CREATE DATABASE secret",
        "CREATE TABLE secret.b (id INT)",
        "CREATE PROCEDURE shop.pp() SELECT 1",
        "CREATE VIEW shop.vv AS SELECT 1",
        "CREATE USER poor@localhost IDENTIFIED BY 'p'",
        "GRANT RELOAD, PROCESS, BINLOG MONITOR, SLAVE MONITOR ON *.* TO poor@localhost",
        "GRANT SELECT, SHOW VIEW, TRIGGER, EVENT, LOCK TABLES ON shop.* TO poor@localhost",
    )
    repository.connection = Connection(socket=str(repository.server.socket), user="poor", password="p")
    outcome = repository.dump(include=(TablePattern("*.*"),), tools=[ExactDump()])
    assert table(outcome, "shop.a").outcome is Outcome.DUMPED
    warnings = [text for text in outcome.facts.warnings if "poor@localhost" in text]
    assert len(warnings) == 2, warnings
    assert "no SELECT privilege on *.*, and *.* asks for more than the schemas that it may read (shop)" in warnings[0]
    assert warnings[1].startswith("schema shop: poor@localhost has no privilege that shows those of others")
    assert "routines hidden from it are missing" in warnings[1]
    with repository.connection.connect() as session:

        def checked(*include: str) -> list[str]:
            leg = Logical.model_validate({"schedule": "every 24h", "tables": {"include": include}})
            return [
                one.message for one in examine_sight(session, probe(repository.connection), read_grants(session), leg)
            ]

        assert ["*.* asks for more" in text for text in checked("*.*")] == [True, False]
        assert checked("shop.*")[0].endswith("routines of shop may be missing in them")
        assert checked("shop.a") == []


def test_a_table_that_is_being_filled_ends_the_dump_with_the_statement(repository: DumpRepository) -> None:
    a_shop(repository.server)
    spec = repository.spec("*.*", long_queries=1.0, tools=[ExactDump()])
    with under_way(repository.server, "CREATE TABLE shop.l AS SELECT SLEEP(3600) FROM shop.a"):
        with repository.connection.connect() as session:
            until(lambda: any(one.by.seconds >= 1 for one in changing(session)))
            with pytest.raises(BusyError) as caught:  # which it would not be after that hour
                execute(spec, RunContext(now))
            assert "CREATE TABLE shop.l AS SELECT" in caught.value.detail
            hurry(session)
            with pytest.raises(LockedTableError):
                list_tables(session, strict=True)
    assert repository.left_in_spool() == []


def test_a_table_that_is_locked_for_a_while_is_waited_for(repository: DumpRepository) -> None:
    a_shop(repository.server)
    said: list[str] = []

    def report(progress: Progress) -> None:
        said.append(progress.note)
        repository.server.execute(f"KILL QUERY {number}")

    with repository.connection.connect() as session:
        hurry(session)
        with under_way(repository.server, "CREATE TABLE shop.l AS SELECT SLEEP(3600) FROM shop.a") as number:
            way = ClearWay(repository.connection, 60, 0, RunContext(report=report))
            found = way.listed(lambda: list_tables(session, strict=True))
    assert TableName("shop", "a") in [one.name for one in found]
    assert "CREATE TABLE shop.l" in said[0]


def test_who_waits_for_a_table_of_the_dump_is_told_while_waiting_and_afterwards(repository: DumpRepository) -> None:
    a_shop(repository.server)
    said: list[str] = []
    with repository.server.connect() as reader:
        query(reader, "BEGIN")
        query(reader, "SELECT * FROM shop.a")
        with (
            WaitWatch(repository.connection, [TableName("shop", "a")], bound=0.3, report=said.append) as watch,
            under_way(repository.server, "ALTER TABLE shop.a ADD COLUMN v INT"),
        ):
            until(lambda: bool(said))
            query(reader, "ROLLBACK")
            until(lambda: said[-1] == "")
    assert "root@localhost" in said[0]
    assert "ALTER TABLE shop.a ADD COLUMN v INT waits for the metadata lock of a table of this dump" in said[0]
    (words,) = watch.warnings
    assert "ALTER TABLE shop.a ADD COLUMN v INT waited for" in words


def test_prepared_transactions_are_named_since_the_dump_cannot_be_rolled_forward(repository: DumpRepository) -> None:
    a_shop(repository.server)
    with repository.server.connect() as other:
        for statement in ("XA START 'g1'", "INSERT INTO shop.a VALUES (100)", "XA END 'g1'", "XA PREPARE 'g1'"):
            query(other, statement)
        outcome = repository.dump(tools=[ExactDump()])
        query(other, "XA ROLLBACK 'g1'")
    assert table(outcome, "shop.a").rows == 1
    assert outcome.dump.settings[PREPARED_XA] == "'g1'"
    assert any(text.startswith("1 XA transactions were prepared") for text in outcome.facts.warnings)
    assert PREPARED_XA not in repository.dump(tools=[ExactDump()]).dump.settings
