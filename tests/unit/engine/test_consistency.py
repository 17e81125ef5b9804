"""A replica against its source: pt-table-checksum and our own witness at one GTID, on real servers; and what is made of
their answers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from backupd.engine.binlog.errant_statements import look_for_errant
from backupd.engine.consistency import (
    PROGRAM,
    WITNESS,
    Chunks,
    Compared,
    compare,
    judge,
    missing_privileges,
    whole,
)
from backupd.engine.sql.client import Connection
from backupd.model.errors import RefusedError, ToolError
from backupd.model.table import TableName
from backupd.process.pipeline import Completed, run
from backupd.process.run_context import RunContext
from tests.support.servers import mysql
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.replica import catch_up, replica_of
from tests.support.servers.server import Server

A, B, C = TableName("shop", "a"), TableName("shop", "b"), TableName("shop", "数据")

ALL = ("shop.a", "shop.b", "shop.数据")

needs_tool = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"no {PROGRAM}: scripts/setup --test was not run")
needs_mysql = pytest.mark.skipif(bool(mysql.why_not()), reason=mysql.why_not() or "there is one")


def test_a_table_is_equal_only_where_every_chunk_of_it_was_compared() -> None:
    sums = {A: Chunks(2, 0, 0, 0), B: Chunks(1, 0, 0, 0)}
    found = judge({A, B, C}, {A, B, C}, {A: 2, B: 2}, sums, skipped={}, whole=ALL)
    assert found.equal == (str(A),)
    assert found.unchecked == {
        str(B): "not every chunk of it was compared",
        str(C): f"{PROGRAM} does not read names with such characters",
    }
    assert judge({A}, {A}, {A: 1}, {A: Chunks(1, 0, 1, 0)}, skipped={}, whole=ALL).unchecked, "its sum has not arrived"


def test_differences_are_told_with_their_rows_and_tables_of_one_side_differ() -> None:
    found = judge({A, B}, {A, C}, {A: 3}, {A: Chunks(3, 1, 0, -2)}, skipped={"shop.数据": "x"}, whole=ALL)
    assert found.different == {
        str(A): "1 of 3 chunks differ, 2 rows fewer",
        str(B): "is missing on the replica",
        str(C): "is on the replica only",
    }
    assert not found.unchecked


def test_what_the_tool_said_of_a_table_is_the_reason_for_which_it_is_unchecked() -> None:
    found = judge({A}, {A}, {}, {}, skipped={"shop.a": f"{PROGRAM} left it out: it is oversized"}, whole=())
    assert found.unchecked == {str(A): f"{PROGRAM} left it out: it is oversized"}


def test_a_table_of_which_the_tool_skipped_a_chunk_or_broke_off_is_unchecked() -> None:
    """Such a chunk is on neither side: as many arrived at the replica as the source has."""
    answer = """\
            TS ERRORS  DIFFS     ROWS  DIFF_ROWS  CHUNKS SKIPPED    TIME TABLE
11-29T00:20:00      0      0        3          0       4       0   0.268 shop.a
11-29T00:20:01      0      0        3          0       4       1   0.268 shop.b
11-29T00:20:02      1      0        3          0       4       0   0.268 shop.c d
11-29T00:20:03      0      1      300         -3       4       0   0.268 shop.größe
"""
    assert whole(answer.encode()) == whole(answer.encode("latin-1")) == {"shop.a", "shop.größe"}
    every = {A: Chunks(4, 0, 0, 0), B: Chunks(3, 0, 0, 0)}
    found = judge({A, B}, {A, B}, {A: 4, B: 3}, every, skipped={}, whole=whole(answer.encode()))
    assert (found.equal, found.unchecked) == ((str(A),), {str(B): "not every chunk of it was compared"})


def root(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user="root")


def stock(server: Server) -> None:
    server.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.orders (id INT PRIMARY KEY, v VARCHAR(50)) ENGINE=InnoDB",
        "INSERT INTO shop.orders VALUES (1, 'a'), (2, 'b'), (3, 'c')",
        "CREATE TABLE shop.`größe` (id INT PRIMARY KEY) ENGINE=InnoDB",
        "CREATE TABLE shop.`数据` (id INT PRIMARY KEY) ENGINE=InnoDB",
        "CREATE TABLE shop.`it's` (id INT PRIMARY KEY) ENGINE=InnoDB",
        "CREATE TABLE shop.quiet (id INT PRIMARY KEY) ENGINE=InnoDB",
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[PrivateServer, PrivateServer]]:
    with PrivateServer(tcp=True) as source:
        stock(source)
        with replica_of(source) as replica:
            yield source, replica


def unlogged(server: Server, *statements: str) -> None:
    with server.connect() as session, session.cursor() as cursor:
        for statement in ("SET SESSION sql_log_bin = 0", *statements):
            cursor.execute(statement)


def compared(source: Server, replica: Server) -> Compared:
    return compare(root(source), root(replica), RunContext(), seconds=120)


@needs_tool
def test_a_row_that_was_changed_on_a_replica_of_mariadb_is_found_and_so_is_its_repair(
    pair: tuple[PrivateServer, PrivateServer],
) -> None:
    source, replica = pair
    clean = compared(source, replica)
    assert (clean.equal, clean.different) == (("`shop`.`größe`", "`shop`.`orders`", "`shop`.`quiet`"), {})
    assert list(clean.unchecked) == ["`shop`.`it's`", "`shop`.`数据`"], "the tool leaves such names out"
    assert "has problems on these replicas: Error checking table" in clean.unchecked["`shop`.`it's`"]
    unlogged(replica, "UPDATE shop.orders SET v = 'other' WHERE id = 2")
    differs = compared(source, replica)
    assert list(differs.different) == ["`shop`.`orders`"]
    assert "1 of 1 chunks differ" in differs.different["`shop`.`orders`"]
    source.execute("UPDATE shop.orders SET v = 'z' WHERE id = 2")
    unlogged(replica, "UPDATE shop.orders SET v = 'z' WHERE id = 2")
    catch_up(source, replica)
    assert compared(source, replica).different == {}


@needs_tool
def test_nobody_else_is_asked_and_nothing_is_written_on_a_source_that_is_a_replica(
    pair: tuple[PrivateServer, PrivateServer],
) -> None:
    source, replica = pair
    source.execute(
        "CREATE DATABASE IF NOT EXISTS percona",
        "CREATE TABLE IF NOT EXISTS percona.backupd_members "
        "(id INT NOT NULL PRIMARY KEY, parent_id INT, dsn VARCHAR(255) NOT NULL) ENGINE=InnoDB",
        "REPLACE INTO percona.backupd_members VALUES (2, NULL, 'h=127.0.0.1,P=1')",
    )
    assert compared(source, replica).equal
    assert source.scalar("SELECT GROUP_CONCAT(id) FROM percona.backupd_members") == "1"
    before = replica.scalar("SELECT @@GLOBAL.gtid_binlog_state")
    with pytest.raises(RefusedError, match="itself a replica"):
        compared(replica, source)
    assert replica.scalar("SELECT @@GLOBAL.gtid_binlog_state") == before


@needs_tool
def test_a_table_that_took_the_name_of_one_that_was_compared_is_unchecked(
    pair: tuple[PrivateServer, PrivateServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, replica = pair
    source.execute("CREATE TABLE shop.new (id INT PRIMARY KEY, v VARCHAR(90))", "INSERT INTO shop.new VALUES (1, 'n')")
    catch_up(source, replica)

    def swapped(*args: Any, **options: Any) -> Completed:
        done = run(*args, **options)
        source.execute("RENAME TABLE shop.orders TO shop.old, shop.new TO shop.orders")
        catch_up(source, replica)
        return done

    with monkeypatch.context() as patch:
        patch.setattr("backupd.engine.consistency.run", swapped)
        found = compared(source, replica)
    assert found.unchecked["`shop`.`orders`"] == "it was made, altered or replaced meanwhile"
    assert "`shop`.`orders`" not in found.equal
    source.execute("DROP TABLE shop.orders", "RENAME TABLE shop.old TO shop.orders")
    catch_up(source, replica)


@needs_tool
def test_an_account_that_does_not_see_every_table_compares_nothing(pair: tuple[PrivateServer, PrivateServer]) -> None:
    source, replica = pair
    source.execute("CREATE OR REPLACE USER few@localhost", "GRANT SELECT ON shop.orders TO few@localhost")
    few = Connection(socket=str(source.socket), user="few")
    with pytest.raises(RefusedError, match=r"may not read every table \(SELECT ON"):
        compare(few, root(replica), RunContext(), seconds=120)
    with few.connect() as there, root(replica).connect() as here:
        lacks, none = missing_privileges(there, here)
    assert none == []
    assert {"SELECT ON *.*", "PROCESS ON *.*", "BINLOG ADMIN ON *.*", "INSERT ON percona.*"} <= set(lacks)
    source.execute("DROP USER few@localhost")
    catch_up(source, replica)


def test_an_errant_transaction_of_mariadb_is_named_with_its_statement_and_gone_as_advised(
    pair: tuple[PrivateServer, PrivateServer],
) -> None:
    source, replica = pair
    assert not look_for_errant(root(replica), [root(source)]).found
    replica.execute("CREATE TABLE shop.mine (id INT PRIMARY KEY)", "INSERT INTO shop.mine VALUES (7)")
    source.execute("INSERT INTO shop.quiet VALUES (4)")
    found = look_for_errant(root(replica), [root(source)])
    assert len(found.found) == 1
    assert found.found[0].own
    assert found.found[0].origin.endswith(f"-{replica.server_id}")
    assert [one.lines[0] for one in found.statements] == [
        "CREATE TABLE shop.mine (id INT PRIMARY KEY)",
        "INSERT INTO shop.mine VALUES (7)",
    ]
    assert "RESET MASTER" in found.hint
    replica.execute("DROP TABLE shop.mine", "STOP SLAVE", "RESET MASTER", "START SLAVE")
    catch_up(source, replica)
    assert not look_for_errant(root(replica), [root(source)]).found


@pytest.fixture(scope="module")
def mysql_pair() -> Iterator[tuple[MySQLServer, MySQLServer]]:
    with MySQLServer(tcp=True) as source:
        stock(source)
        with replica_of(source) as replica:
            yield source, replica


@needs_mysql
def test_where_the_tool_does_not_run_both_are_compared_at_one_gtid_and_replication_goes_on(
    mysql_pair: tuple[MySQLServer, MySQLServer],
) -> None:
    source, replica = mysql_pair
    clean = compared(source, replica)
    assert clean.tool == WITNESS
    assert len(clean.equal) == 5
    assert (clean.different, clean.unchecked) == ({}, {})
    unlogged(replica, "UPDATE shop.orders SET v = 'other' WHERE id = 2")
    source.execute("INSERT INTO shop.quiet VALUES (1)")
    assert list(compared(source, replica).different) == ["`shop`.`orders`"]
    source.execute("INSERT INTO shop.quiet VALUES (2)")
    catch_up(source, replica)
    assert replica.scalar("SELECT COUNT(*) FROM shop.quiet") == 2


@needs_mysql
def test_a_replica_that_somebody_stopped_stays_stopped_and_is_not_noted_as_paused(
    mysql_pair: tuple[MySQLServer, MySQLServer],
) -> None:
    source, replica = mysql_pair
    notes: list[str] = []

    @contextlib.contextmanager
    def pausing() -> Iterator[None]:
        notes.append("paused")
        yield
        notes.append("runs")

    def paused() -> Compared:
        return compare(root(source), root(replica), RunContext(), seconds=120, pausing=pausing)

    replica.execute("STOP REPLICA SQL_THREAD")
    try:
        with pytest.raises(RefusedError, match="its replication does not run"):
            paused()
        assert notes == []
    finally:
        replica.execute("START REPLICA SQL_THREAD")
    catch_up(source, replica)
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_args: object) -> None:
            raise ToolError("the comparison failed")

        patch.setattr("backupd.engine.consistency._Applier.go_on_until", fail)
        with pytest.raises(ToolError):
            paused()
    assert notes == ["paused", "runs"], "it was paused, and runs again: nobody has to start it"


@needs_mysql
def test_an_errant_transaction_of_mysql_is_named_with_its_statement_and_gone_once_it_is_injected(
    mysql_pair: tuple[MySQLServer, MySQLServer],
) -> None:
    source, replica = mysql_pair
    assert not look_for_errant(root(replica), [root(source)]).found
    replica.execute("INSERT INTO shop.quiet VALUES (77)", "DELETE FROM shop.quiet WHERE id = 77")
    found = look_for_errant(root(replica), [root(source)])
    assert [(one.first, one.last, one.own) for one in found.found] == [(1, 2, True)]
    assert [one.lines for one in found.statements] == [
        ("rows: insert into shop.quiet",),
        ("rows: delete from shop.quiet",),
    ]
    advised = found.hint[found.hint.index("SET GTID_NEXT") :]
    source.execute(*filter(None, map(str.strip, advised.split(";"))))
    catch_up(source, replica)
    assert not look_for_errant(root(replica), [root(source)]).found
