"""What servers of both families say of their binary logs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from backupd.engine.server.binary_logs import BinlogSource, Expiry
from backupd.engine.sql.client import Connection
from backupd.model.errors import RefusedError, ServerError
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer, why_not
from tests.support.servers.server import Server

FLAVOURS = ["mariadb", pytest.param("mysql", marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))]


@pytest.fixture(scope="module", params=FLAVOURS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with PrivateServer() if request.param == "mariadb" else MySQLServer() as running:
        mariadb = isinstance(running, PrivateServer)
        running.execute("CREATE DATABASE shop", "CREATE TABLE shop.t (id INT PRIMARY KEY)", "FLUSH BINARY LOGS")
        running.create_user("s", "p", ["REPLICATION SLAVE", "BINLOG MONITOR" if mariadb else "REPLICATION CLIENT"])
        running.execute("INSERT INTO shop.t VALUES (1)")
        yield running


def source_of(server: Server) -> BinlogSource:
    return BinlogSource(
        Connection(socket=str(server.socket), user="s", password="p"), marker=lambda datadir: f"restored:{datadir}"
    )


def test_one_look_tells_who_it_is_and_where_it_stands(server: Server) -> None:
    before = datetime.now(UTC)
    source = source_of(server)
    state = source.look()
    mariadb = isinstance(server, PrivateServer)
    row = server.query("SHOW MASTER STATUS" if mariadb else "SHOW BINARY LOG STATUS")[0]
    assert (state.position.file, state.position.pos) == (row[0], row[1])
    assert before - timedelta(seconds=1) < state.server_time < datetime.now(UTC) + timedelta(seconds=1)
    assert [log.number for log in state.logs] == [1, 2]
    assert state.logs[-1].size == state.position.pos
    assert (state.basename, state.mariadb, state.server_id) == ("binlog", mariadb, server.server_id)
    assert state.server_uuid == server.scalar("SELECT @@server_uid" if mariadb else "SELECT @@server_uuid")
    assert state.position.gtid
    assert state.history == state.position.gtid
    assert state.lsn is not None
    assert state.durable_lsn is not None
    # InnoDB writes by itself between the two questions of one look: what was durable was written before the next look.
    assert 0 < state.durable_lsn <= (source.look().lsn or 0)
    assert state.marker == f"restored:{server.scalar('SELECT @@datadir')}"


def test_a_file_tells_what_was_executed_before_it(server: Server) -> None:
    source = source_of(server)
    assert source.previous_gtids("binlog.000001") == ""
    before = source.previous_gtids("binlog.000002")
    assert before
    assert before != source.look().position.gtid
    assert source.previous_gtids("binlog.000099") is None


def test_a_server_without_a_binary_log_is_refused_in_words() -> None:
    with PrivateServer(binlog=False) as silent:
        source = BinlogSource(Connection(socket=str(silent.socket), user="root"))
        with pytest.raises(RefusedError, match="writes no binary log") as refused:
            source.look()
        assert "log_bin" in refused.value.hint


def test_what_makes_the_server_remove_logs_is_known(server: Server) -> None:
    source = source_of(server)
    before = server.scalar("SELECT @@GLOBAL.binlog_expire_logs_seconds")
    try:
        server.execute("SET GLOBAL binlog_expire_logs_seconds = 86400")
        assert source.expiry() == Expiry(timedelta(days=1), None)
        server.execute("SET GLOBAL binlog_expire_logs_seconds = 0")
        assert source.expiry() == Expiry(None, None)
    finally:
        server.execute(f"SET GLOBAL binlog_expire_logs_seconds = {before}")


def test_its_own_server_id_is_taken(server: Server) -> None:
    assert server.server_id in source_of(server).connected_ids()


def test_a_wrong_password_is_told_without_it(server: Server) -> None:
    source = BinlogSource(Connection(socket=str(server.socket), user="s", password="hidden-word"))
    with pytest.raises(ServerError) as refused:
        source.look()
    assert "hidden-word" not in str(refused.value)
