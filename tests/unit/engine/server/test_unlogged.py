"""Sessions that bypass the binary log leave traces."""

from __future__ import annotations

import pytest

from backupd.engine.server.probe import read_dialect, unlogged
from backupd.engine.sql.client import Connection
from backupd.engine.witness import take
from tests.support.servers import mysql
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server, connect, query


def seen(server: Server) -> list[str]:
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    with connection.connect() as session:
        return list(unlogged(session, read_dialect(session)))


@pytest.mark.skipif(bool(mysql.why_not()), reason=mysql.why_not() or "there is one")
def test_mysql_shows_which_accounts_write_past_the_log() -> None:
    with MySQLServer() as server:
        server.create_backup_users()
        assert seen(server) == []
        with connect(server.socket) as session:
            query(session, "SET SESSION sql_log_bin = 0")
            sessions, statements = seen(server)
        assert sessions.startswith("sessions of root have turned the binary log off")
        assert "sql_log_bin was set by 1 statements" in statements
        (left,) = seen(server)  # the session is gone, its statement is remembered
        assert "was set by 1 statements" in left


def test_mariadb_shows_statements_where_its_performance_schema_is_on_and_ours_do_not_count(
    server: PrivateServer,
) -> None:
    assert seen(server) == []  # off, as it is by default: nothing to see
    server.restart(performance_schema="ON")
    take(
        Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD), server="x", max_seconds=10
    )
    assert seen(server) == []
    with connect(server.socket) as session:
        query(session, "SET SQL_LOG_BIN=0")
    (text,) = seen(server)
    assert "sql_log_bin was set by 1 statements (SET `SQL_LOG_BIN`" in text
