"""Replication in the words of both families: what a server shows of it, and statements with a secret in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from backupd.engine.member_probe import compared_server, has_received, log_end, silence_of
from backupd.engine.server.probe import read_dialect
from backupd.engine.server.replication import (
    Receiving,
    ReplicaStatus,
    Source,
    Words,
    read_replica,
    read_replicas,
    set_account,
    set_source,
    start_replica,
    stop_replica,
    unordered,
)
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, Position, Version
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.replica import catch_up, part, replica_of
from tests.support.servers.server import Server

MARIADB, MYSQL = dialect_of(Flavour.MARIADB, Version(10, 11)), dialect_of(Flavour.MYSQL, Version(9, 7))
OLD = dialect_of(Flavour.MYSQL, Version(5, 7, 44))
PASSWORD = "Repl-s3cret-77"
MARIADB_ROW = {
    "Connection_name": "",
    "Master_Host": "db1",
    "Master_Port": 3306,
    "Master_Log_File": "bin.000007",
    "Read_Master_Log_Pos": 900,
    "Relay_Master_Log_File": "bin.000006",
    "Exec_Master_Log_Pos": 300,
    "Slave_IO_Running": "Connecting",
    "Slave_SQL_Running": "Yes",
    "Seconds_Behind_Master": None,
    "Last_IO_Errno": 2003,
    "Last_IO_Error": "error connecting to master",
    "Last_SQL_Errno": 0,
    "Last_SQL_Error": "",
    "Master_Server_Id": 7,
    "Using_Gtid": "Slave_Pos",
    "Gtid_IO_Pos": "0-7-12",
    "Gtid_Slave_Pos": "0-7-10",
    "SQL_Delay": 3600,
}


class Rows:
    """Answers with rows that a server gave."""

    def __init__(self, *rows: dict[str, Any], executed: str = "") -> None:
        self._rows, self._executed = list(rows), executed

    def records(self, _sql: str) -> list[dict[str, Any]]:
        return self._rows

    def scalar(self, _sql: str) -> str:
        return self._executed


def read(dialect: Dialect, rows: Rows) -> tuple[ReplicaStatus, ...]:
    return read_replicas(rows, dialect)  # type: ignore[arg-type]  # it asks for no more than these two


def test_the_status_of_mariadb_is_read_by_its_old_words() -> None:
    (status,) = read(MARIADB, Rows(MARIADB_ROW))
    assert (status.source_host, status.source_port, status.source_id) == ("db1", 3306, 7)
    assert (status.receiving, status.applying, status.is_running) == (Receiving.CONNECTING, True, False)
    assert (status.received.file, status.received.pos) == ("bin.000007", 900)
    assert (status.applied.file, status.applied.pos) == ("bin.000006", 300)
    assert (status.gtids, status.retrieved, status.by_gtid) == ("0-7-10", "0-7-12", True)
    assert (status.lag, status.delay, status.is_delayed) == (None, 3600, True)
    assert not status.has_applied_all
    assert str(status) == "the receiver reports error 2003: error connecting to master"
    assert ReplicaStatus.from_json(status.as_json()) == status


def test_the_status_of_mysql_is_read_by_its_new_words() -> None:
    uuid = "0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a"
    row = {
        name.replace("Master", "Source").replace("Slave", "Replica"): value for name, value in MARIADB_ROW.items()
    } | {
        "Channel_Name": "",
        "Replica_IO_Running": "Yes",
        "Seconds_Behind_Source": 4,
        "Last_IO_Errno": 0,
        "Source_UUID": uuid,
        "Auto_Position": 1,
        "Retrieved_Gtid_Set": f"{uuid}:8-9",
        "Exec_Source_Log_Pos": 900,
        "Relay_Source_Log_File": "bin.000007",
    }
    (status,) = read(MYSQL, Rows(row, executed=f"{uuid}:1-8,\n{uuid[:-1]}b:1"))
    assert status.is_running
    assert status.source_uuid == uuid
    assert (status.gtids, status.retrieved) == (f"{uuid}:1-8,{uuid[:-1]}b:1", f"{uuid}:8-9")
    assert (status.lag, status.by_gtid, status.has_applied_all) == (4.0, True, True)
    assert str(status) == "replicates from db1:3306 with a lag of 4 s"
    assert read(MYSQL, Rows()) == ()


def test_a_stopped_thread_is_named() -> None:
    (status,) = read(MARIADB, Rows({**MARIADB_ROW, "Last_IO_Errno": 0, "Slave_IO_Running": "No"}))
    assert str(status) == "replication from db1:3306 is stopped (receiver)"


def test_mysql_learned_new_words_over_the_years() -> None:
    old, middle, new = (
        Words.of(Flavour.MYSQL, version) for version in (Version(5, 7), Version(8, 0, 25), Version(9, 7))
    )
    assert (old.change, old.source, old.replica) == ("CHANGE MASTER", "MASTER", "SLAVE")
    assert (middle.change, middle.source, middle.replica) == ("CHANGE REPLICATION SOURCE", "SOURCE", "SLAVE")
    assert new.listed == "SHOW REPLICA STATUS"
    assert Words.of(Flavour.MYSQL, Version(9, 7), "one").channel == " FOR CHANNEL 'one'"
    assert Words.of(Flavour.MARIADB, Version(10, 11), "one").named == " 'one'"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    with PrivateServer(tcp=True) as source:
        source.execute("CREATE DATABASE shop", "CREATE TABLE shop.orders (id INT PRIMARY KEY)")
        with replica_of(source) as replica:
            yield source, replica


def connected(server: Server) -> AbstractContextManager[Session]:
    return Connection(socket=str(server.socket), user="root").connect()


def test_what_a_replica_has_received_is_compared_with_where_the_log_of_its_source_ends(
    pair: tuple[Server, Server],
) -> None:
    source, replica = pair
    catch_up(source, replica)
    with connected(source) as there, connected(replica) as here:
        number, end = source.server_id, log_end(there)
        assert end is not None
        assert end.gtid
        assert has_received(here, number, end)
        assert has_received(here, number, replace(end, file="other-bin.000099")), "by its GTIDs"
        assert has_received(here, number, replace(end, gtid="")), "by file and position"
        later = replace(end, pos=end.pos + 1, gtid=re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), end.gtid))
        assert not has_received(here, number, later)
        assert not has_received(here, number + 1, end), "it follows no such server"
        assert unordered(here, read_dialect(here)) == ""
        assert silence_of(here, expected=False) == float(str(replica.scalar("SELECT @@slave_net_timeout")))
        assert silence_of(here, expected=True) == 0.0
        one = compared_server(here, read_dialect(here))
        assert one == compared_server(here, read_dialect(here))
        assert one.made, "MariaDB's uuid is that of host and port"
        assert one.uuid
        assert one != compared_server(there, read_dialect(there))


class Variables:
    def __init__(self, **values: str) -> None:
        self._values = values

    def variables(self, *names: str) -> dict[str, str]:
        return {name: self._values[name] for name in names if name in self._values}


@pytest.mark.parametrize(
    ("dialect", "values", "is_unordered"),
    [
        (MYSQL, {"replica_parallel_workers": "4", "replica_preserve_commit_order": "OFF", "gtid_mode": "OFF"}, True),
        (MYSQL, {"replica_parallel_workers": "4", "replica_preserve_commit_order": "OFF", "gtid_mode": "ON"}, False),
        (MYSQL, {"replica_parallel_workers": "4", "replica_preserve_commit_order": "ON", "gtid_mode": "OFF"}, False),
        (MYSQL, {"replica_parallel_workers": "1", "replica_preserve_commit_order": "OFF", "gtid_mode": "OFF"}, False),
        (OLD, {"slave_parallel_workers": "8", "slave_preserve_commit_order": "OFF"}, True),
        (MARIADB, {"slave_parallel_threads": "8"}, False),
    ],
)
def test_workers_without_order_and_without_gtids_leave_no_single_position(
    dialect: Dialect, values: dict[str, str], is_unordered: bool
) -> None:
    why = unordered(Variables(**values), dialect)  # type: ignore[arg-type]  # it asks for variables only
    assert bool(why) is is_unordered
    assert not why or "preserve_commit_order is OFF" in why


def test_a_replica_is_pointed_at_its_source_and_started(pair: tuple[Server, Server]) -> None:
    source, replica = pair
    begin = str(replica.scalar("SELECT @@GLOBAL.gtid_slave_pos"))
    source.execute("INSERT INTO shop.orders VALUES (1)")
    catch_up(source, replica)
    part(replica)
    replica.execute("DELETE FROM shop.orders")
    here = Source("127.0.0.1", source.port or 0, "repl", "wrong")
    with Connection(socket=str(replica.socket), user="root").connect() as session:
        dialect = read_dialect(session)
        session.execute("SET GLOBAL gtid_strict_mode = OFF")
        set_source(session, dialect, here, Position(gtid=begin), by_gtid=True, delay=0)
        set_account(session, dialect, Source(here.host, here.port, here.user, PASSWORD))
        assert read_replica(session, dialect, "other") is None
        start_replica(session, dialect)
        session.query("SELECT MASTER_GTID_WAIT(%s, 60)", str(source.scalar("SELECT @@gtid_binlog_pos")))
        status = read_replica(session, dialect)
        assert status is not None
        assert status.by_gtid
        assert replica.query("SELECT id FROM shop.orders") == [(1,)]
        stop_replica(session, dialect)


def test_a_refused_statement_shows_no_password(pair: tuple[Server, Server]) -> None:
    _source, replica = pair
    where = Source("127.0.0.1", 3306, "repl", PASSWORD)
    with Connection(socket=str(replica.socket), user="root").connect() as session:
        with pytest.raises(ServerError) as refused:
            set_account(session, MYSQL, where)  # words that it does not know: it repeats what follows them
    assert "syntax" in refused.value.detail
    assert PASSWORD not in str(refused.value) + refused.value.detail
    assert PASSWORD not in repr(where)
