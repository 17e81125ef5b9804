"""A second server that follows a first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import pymysql

from backupd.model.server_facts import Version
from tests.support.servers.datadir import Options
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server

S = TypeVar("S", bound=Server)


@contextlib.contextmanager
def replica_of(source: S, *, options: Options | None = None) -> Iterator[S]:
    """A running replica of ``source`` (which must have ``tcp=True``), from its first event on, by GTID.

    The source's binary log must reach back to its creation. On return the replica has caught up.
    """
    if source.port is None:
        raise ValueError("the source of a replica needs tcp=True")
    with source.another(options={"read_only": 1} | dict(options or {}), tcp=True) as replica:
        follow(source, replica)
        yield replica


def follow(source: Server, replica: Server) -> None:
    """``replica`` follows ``source`` from what it has on, by GTID. On return it has caught up."""
    words, how = source.words, "MASTER_USE_GTID=slave_pos"
    if isinstance(source, MySQLServer):
        how = f"{words.source}_AUTO_POSITION=1, {words.source}_SSL=0"
        how += f", GET_{words.source}_PUBLIC_KEY=1" if source.version >= Version(8, 0) else ""
    source.execute(
        "CREATE USER IF NOT EXISTS repl@'127.0.0.1' IDENTIFIED BY 'Repl-s3cret-77'",
        "GRANT REPLICATION SLAVE ON *.* TO repl@'127.0.0.1'",
    )
    replica.execute(
        f"{words.change} {words.source}_HOST='127.0.0.1', {words.source}_PORT={source.port}, "
        f"{words.source}_USER='repl', {words.source}_PASSWORD='Repl-s3cret-77', {how}",
        f"START {words.replica}",
    )
    catch_up(source, replica)


def follow_by_position(source: Server, replica: Server) -> None:
    """``replica`` follows ``source`` from its first binary log on, by file and byte. On return it has caught up."""
    words, (file, *_rest) = source.words, source.query("SHOW BINARY LOGS")[0]
    mariadb = not isinstance(source, MySQLServer)
    how = "MASTER_USE_GTID=no" if mariadb else f"{words.source}_SSL=0, GET_{words.source}_PUBLIC_KEY=1"
    replica.execute(
        f"{words.change} {words.source}_HOST='127.0.0.1', {words.source}_PORT={source.port}, "
        f"{words.source}_USER='repl', {words.source}_PASSWORD='Repl-s3cret-77', "
        f"{words.source}_LOG_FILE='{file}', {words.source}_LOG_POS=4, {how}",
        f"START {words.replica}",
    )
    current, position, *_more = source.query("SHOW MASTER STATUS" if mariadb else "SHOW BINARY LOG STATUS")[0]
    waited = replica.scalar(f"SELECT {words.source}_POS_WAIT(%s, %s, 300)", (current, position))
    if waited is None or int(waited) < 0:
        raise AssertionError(f"replica did not reach {current}:{position}")


def catch_up(source: Server, replica: Server, timeout: float = 300.0) -> None:
    """Wait until ``replica`` has applied everything ``source`` has written so far."""
    position = source.scalar(f"SELECT {source.words.executed}")
    wait = "WAIT_FOR_EXECUTED_GTID_SET" if isinstance(source, MySQLServer) else "MASTER_GTID_WAIT"
    if replica.scalar(f"SELECT {wait}(%s, %s)", (position, timeout)) != 0:
        with replica.connect() as connection, connection.cursor(pymysql.cursors.DictCursor) as cursor:
            cursor.execute(f"SHOW {source.words.replica} STATUS")
            raise AssertionError(f"replica did not reach {position}: {cursor.fetchone()}")


def part(replica: Server) -> None:
    """It follows no more."""
    replica.execute(f"STOP {replica.words.replica}", f"RESET {replica.words.replica} ALL")
