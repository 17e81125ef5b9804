from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from backupd.engine.client import Connection
from backupd.engine.history import contradiction, current_lsn
from backupd.engine.probe import probe
from backupd.model.server import Position
from tests.support.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateServer]:
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute("CREATE DATABASE d", "CREATE TABLE d.t (id INT PRIMARY KEY)", "INSERT INTO d.t VALUES (1)")
        yield server


def asked(server: PrivateServer, position: Position, lsn: int = 1) -> str:
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    with connection.connect() as session:
        return contradiction(session, probe(connection), position, lsn)


def here(server: PrivateServer) -> Position:
    return probe(Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)).position


def test_a_server_that_only_went_on_contradicts_nothing(server: PrivateServer) -> None:
    before = here(server)
    assert before.gtid
    assert asked(server, before) == ""
    server.execute("INSERT INTO d.t VALUES (2)", "FLUSH BINARY LOGS", "INSERT INTO d.t VALUES (3)")
    assert asked(server, before) == ""
    server.execute(f"PURGE BINARY LOGS TO '{here(server).file}'")
    assert asked(server, before) == ""
    assert asked(server, Position()) == ""
    assert asked(server, replace(before, file="other.000001")) == ""


def test_a_log_sequence_number_that_was_not_reached_is_a_contradiction(server: PrivateServer) -> None:
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    with connection.connect() as session:
        now = current_lsn(session)
    assert now is not None
    assert asked(server, here(server), now) == ""
    assert f"before the backup's {now + 10**6}" in asked(server, here(server), now + 10**6)


def test_a_binary_log_that_began_again_is_a_contradiction_even_when_it_is_longer_now(server: PrivateServer) -> None:
    server.execute("FLUSH BINARY LOGS", "INSERT INTO d.t VALUES (10)", "FLUSH BINARY LOGS", "RESET MASTER",
                   "INSERT INTO d.t VALUES (11)", "INSERT INTO d.t VALUES (12)")
    before = here(server)
    assert "has not come to" in asked(server, replace(before, file=before.file[:-1] + "9"))
    assert "ended at" in asked(server, replace(before, pos=before.pos + 100_000))
    server.execute("RESET MASTER", *(f"INSERT INTO d.t VALUES ({number})" for number in range(100, 120)))
    assert here(server).pos > before.pos
    told = asked(server, before)
    assert "the backup ended there at" in told, told
    domain, _, sequence = before.gtid.split("-")
    assert "the server is at GTID" in asked(server, Position("other.000001", 4, f"{domain}-1-{int(sequence) + 999}"))


def test_what_came_by_replication_once_needs_not_be_in_the_servers_own_log(server: PrivateServer) -> None:
    server.execute("INSERT INTO d.t VALUES (500)")
    before = here(server)
    other = replace(before, gtid=f"{before.gtid},7-77-700")
    assert "the backup ended there at" in asked(server, other)
    server.execute(f"SET GLOBAL gtid_slave_pos = '{other.gtid}'")
    assert asked(server, other) == ""
