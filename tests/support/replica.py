"""A second server that follows a first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pymysql

from tests.support.datadir import Options
from tests.support.mariadb import PrivateServer
from tests.support.server import Server


@contextlib.contextmanager
def replica_of(source: Server, *, options: Options | None = None) -> Iterator[PrivateServer]:
    """A running replica of ``source`` (which must have ``tcp=True``), from its first event on, by GTID.

    The source's binary log must reach back to its creation. On return the replica has caught up.
    """
    if source.port is None:
        raise ValueError("the source of a replica needs tcp=True")
    source.query("CREATE OR REPLACE USER repl@'127.0.0.1' IDENTIFIED BY 'Repl-s3cret-77'")
    source.execute("GRANT REPLICATION SLAVE ON *.* TO repl@'127.0.0.1'")
    with PrivateServer(options={"read_only": 1} | dict(options or {}), tcp=True) as replica:
        replica.execute(
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={source.port}, MASTER_USER='repl', "
            "MASTER_PASSWORD='Repl-s3cret-77', MASTER_USE_GTID=slave_pos",
            "START SLAVE",
        )
        catch_up(source, replica)
        yield replica


def catch_up(source: Server, replica: Server, timeout: float = 300.0) -> None:
    """Wait until ``replica`` has applied everything ``source`` has written so far."""
    position = source.scalar("SELECT @@gtid_binlog_pos")
    reached = replica.scalar("SELECT MASTER_GTID_WAIT(%s, %s)", (position, timeout))
    if reached != 0:
        with replica.connect() as connection, connection.cursor(pymysql.cursors.DictCursor) as cursor:
            cursor.execute("SHOW SLAVE STATUS")
            raise AssertionError(f"replica did not reach {position}: {cursor.fetchone()}")
