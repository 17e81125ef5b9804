from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.engine.server.binary_logs import (
    contradiction,
    current_lsn,
    keyed,
    last_checkpoint,
    log_digest,
    missing_evidence,
    mute,
)
from backupd.engine.server.probe import probe
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Position, Role
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer


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
        now, checkpoint = current_lsn(session), last_checkpoint(session)
    assert now is not None
    assert checkpoint is not None
    assert 0 < checkpoint <= now
    assert asked(server, here(server), now) == ""
    assert f"before the backup's {now + 10**6}" in asked(server, here(server), now + 10**6)


def test_a_binary_log_that_began_again_is_a_contradiction_even_when_it_is_longer_now(server: PrivateServer) -> None:
    server.execute(
        "FLUSH BINARY LOGS",
        "INSERT INTO d.t VALUES (10)",
        "FLUSH BINARY LOGS",
        "RESET MASTER",
        "INSERT INTO d.t VALUES (11)",
        "INSERT INTO d.t VALUES (12)",
    )
    before = here(server)
    assert "has not reached" in asked(server, replace(before, file=before.file[:-1] + "9"))
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


def test_the_binary_log_before_a_position_stays_what_it_was_until_it_is_of_another_life(
    server: PrivateServer, short_tmp: Path
) -> None:
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    server.execute("FLUSH BINARY LOGS", "INSERT INTO d.t VALUES (900)")
    info, before = probe(connection), here(server)
    plain = log_digest(info, before)
    digest = keyed(plain, b"key")
    assert plain not in digest
    assert missing_evidence(info, before, digest, b"key") == ""
    assert missing_evidence(info, before, plain, b"key") == "", "backups of earlier versions have it as it is"
    assert "another identity key" in missing_evidence(info, before, digest, b"other")
    server.execute("INSERT INTO d.t VALUES (901)", "FLUSH BINARY LOGS", "INSERT INTO d.t VALUES (902)")
    assert missing_evidence(info, before, digest, b"key") == "", "that it is closed now is no difference"
    original = server.datadir / before.file
    content = bytearray(original.read_bytes())
    elsewhere = replace(info, variables={**info.variables, "log_bin_basename": str(short_tmp / "binlog")})
    for place, same in ((before.pos, True), (before.pos - 1, False), (4 + 1, False)):
        (short_tmp / before.file).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert (missing_evidence(elsewhere, before, digest, b"key") == "") is same, place
    (short_tmp / before.file).write_bytes(content[: before.pos - 1])
    assert "was reset" in missing_evidence(elsewhere, before, digest, b"key")
    server.execute(f"PURGE BINARY LOGS TO '{here(server).file}'")
    assert "cannot be read (No such file" in missing_evidence(info, before, digest, b"key")
    assert "could not be read at the backup" in missing_evidence(info, before, "", b"key")


def test_a_log_that_nothing_goes_into_is_no_evidence(server: PrivateServer) -> None:
    info = probe(Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD))
    assert mute(info) == ""
    assert "without a binary log" in mute(replace(info, log_bin=False))
    replica = replace(info, role=Role.REPLICA)
    assert mute(replica) == ""
    assert "log_slave_updates" in mute(replace(replica, variables={**info.variables, "log_slave_updates": "OFF"}))
