"""A replica against its source: pt-table-checksum and our own witness at one GTID, on real servers; and what is made of
their answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from backupd.engine.binlog.errant_statements import look_for_errant
from backupd.engine.consistency import (
    PROGRAM,
    WITNESS,
    Chunks,
    Compared,
    compare,
    judge,
)
from backupd.engine.sql.client import Connection
from backupd.model.table import TableName
from backupd.process.run_context import RunContext
from tests.support.servers import mysql
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.replica import catch_up, replica_of
from tests.support.servers.server import Server

A, B, C = TableName("shop", "a"), TableName("shop", "b"), TableName("shop", "数据")

needs_tool = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"no {PROGRAM}: scripts/setup --test was not run")
needs_mysql = pytest.mark.skipif(bool(mysql.why_not()), reason=mysql.why_not() or "there is one")


def test_a_table_is_equal_only_where_every_chunk_of_it_was_compared() -> None:
    found = judge({A, B, C}, {A, B, C}, {A: 2, B: 2}, {A: Chunks(2, 0, 0, 0), B: Chunks(1, 0, 0, 0)}, skipped={})
    assert found.equal == (str(A),)
    assert found.unchecked == {
        str(B): "not every chunk of it was compared",
        str(C): f"{PROGRAM} does not read names with such characters",
    }
    assert judge({A}, {A}, {A: 1}, {A: Chunks(1, 0, 1, 0)}, skipped={}).unchecked, "its sum has not arrived"


def test_differences_are_told_with_their_rows_and_tables_of_one_side_differ() -> None:
    found = judge({A, B}, {A, C}, {A: 3}, {A: Chunks(3, 1, 0, -2)}, skipped={"shop.数据": "x"})
    assert found.different == {
        str(A): "1 of 3 chunks differ, 2 rows fewer",
        str(B): "is missing on the replica",
        str(C): "is on the replica only",
    }
    assert not found.unchecked


def test_what_the_tool_said_of_a_table_is_the_reason_for_which_it_is_unchecked() -> None:
    found = judge({A}, {A}, {}, {}, skipped={"shop.a": f"{PROGRAM} left it out: it is oversized"})
    assert found.unchecked == {str(A): f"{PROGRAM} left it out: it is oversized"}


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
