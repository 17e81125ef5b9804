"""The probe on real servers."""

from __future__ import annotations

import pytest

from backupd.engine.server.probe import examine, flavour_of, probe
from backupd.engine.sql.client import Connection
from backupd.engine.sql.dialect import dialect_of
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, Position, Role, ServerInfo, Version
from tests.support.servers.mariadb import (
    BACKUP_PASSWORD,
    BACKUP_USER,
    SERVICE_PASSWORD,
    SERVICE_USER,
    PrivateServer,
)
from tests.support.servers.replica import replica_of


def _service(server: PrivateServer) -> Connection:
    return Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)


def test_a_probe_tells_what_the_server_is(shared_server: PrivateServer) -> None:
    for number, command in shared_server.query("SELECT ID, COMMAND FROM information_schema.PROCESSLIST"):
        if command == "Binlog Dump":  # of another test's stream: a quiet server does not notice that it has ended
            shared_server.execute(f"KILL {number}")
    info = probe(_service(shared_server))
    assert info.flavour is Flavour.MARIADB
    assert info.version.series == "10.11"
    assert info.datadir.rstrip("/") == str(shared_server.datadir)
    assert info.server_id == shared_server.server_id
    assert info.server_uuid
    assert info.role is Role.STANDALONE
    assert info.log_bin
    assert not info.read_only
    assert info.gtid_mode == "strict"
    assert info.engines["InnoDB"] > 5
    assert info.engines["Aria"] == info.engines["MyISAM"] == 1
    assert info.tables == sum(info.engines.values())
    assert info.variables["innodb_page_size"] == "16384"
    assert info.encrypted == ()
    assert info.external == ()
    assert info.plugins == ()
    assert ServerInfo.from_json(info.as_json()) == info


def test_the_position_is_that_of_the_binary_log(shared_server: PrivateServer) -> None:
    file, pos = shared_server.query("SHOW MASTER STATUS")[0][:2]
    gtid = shared_server.scalar("SELECT @@GLOBAL.gtid_binlog_pos")
    assert probe(_service(shared_server)).position == Position(file, pos, gtid)


def test_the_size_is_what_a_backup_will_read(shared_server: PrivateServer) -> None:
    on_disk = sum(
        path.stat().st_blocks * 512
        for path in shared_server.datadir.rglob("*")
        if path.suffix in (".ibd", ".MYD", ".MYI", ".MAD", ".MAI") or path.name.startswith(("ibdata", "undo"))
    )
    assert probe(_service(shared_server)).data_bytes == pytest.approx(on_disk, rel=0.2)


def test_the_privileges_of_the_backup_tool_are_enough(shared_server: PrivateServer) -> None:
    info = probe(Connection(socket=str(shared_server.socket), user=BACKUP_USER, password=BACKUP_PASSWORD))
    assert info.position.file
    assert info.data_bytes > 1_000_000


def test_an_account_without_privileges_is_refused_or_told_what_it_may_not_ask(server: PrivateServer) -> None:
    server.create_user("nobody", "x", [])
    connection = Connection(socket=str(server.socket), user="nobody", password="x")
    with pytest.raises(ServerError, match="privilege"):
        probe(connection)
    with connection.connect() as session:
        probed = examine(session, tolerant=True)
    assert probed.info.version.series == "10.11"
    assert any("BINLOG MONITOR" in sentence for sentence in probed.denied)
    assert any("PROCESS" in sentence for sentence in probed.denied)


def test_a_replica_and_its_source_know_their_roles() -> None:
    with PrivateServer(tcp=True) as source:
        source.create_backup_users()
        with replica_of(source, options={"log_slave_updates": 0}) as replica:
            assert probe(_service(source)).role is Role.SOURCE
            with _service(replica).connect() as session:
                probed = examine(session)
            assert probed.info.role is Role.REPLICA
            assert probed.info.sources == (str(source.server_id),), "MariaDB names its source by number"
            assert probe(_service(source)).sources == ()
            assert probed.info.read_only
            assert any("log_slave_updates" in sentence for sentence in probed.warnings)
            # The tool's account may not ask for the replica's status; the running threads tell.
            tool = Connection(socket=str(replica.socket), user=BACKUP_USER, password=BACKUP_PASSWORD)
            assert probe(tool).role is Role.REPLICA


def test_a_server_without_a_binary_log_has_no_position() -> None:
    with PrivateServer(binlog=False) as server:
        server.create_backup_users()
        with _service(server).connect() as session:
            probed = examine(session)
    assert probed.info.position == Position()
    assert not probed.info.log_bin
    assert any("log_bin is off" in sentence for sentence in probed.warnings)


def test_flavours_are_told_apart() -> None:
    assert flavour_of("10.11.19-MariaDB-0+deb12u1-log", "Debian 12") is Flavour.MARIADB
    assert flavour_of("8.0.36-28", "Percona Server (GPL), Release 28") is Flavour.PERCONA
    assert flavour_of("9.7.0", "MySQL Community Server - GPL") is Flavour.MYSQL


@pytest.mark.parametrize(
    ("version", "binlog", "replica"),
    [
        ("5.7.44", "SHOW MASTER STATUS", "SHOW SLAVE STATUS"),
        ("8.0.22", "SHOW MASTER STATUS", "SHOW REPLICA STATUS"),
        ("8.4.0", "SHOW BINARY LOG STATUS", "SHOW REPLICA STATUS"),
        ("9.7.0", "SHOW BINARY LOG STATUS", "SHOW REPLICA STATUS"),
    ],
)
def test_mysql_is_asked_in_the_words_of_its_version(version: str, binlog: str, replica: str) -> None:
    dialect = dialect_of(Flavour.MYSQL, Version.parse(version))
    assert (dialect.binlog_status, dialect.replica_status) == (binlog, replica)
    assert "@@GLOBAL.gtid_executed" in dialect.executed_gtid
    assert dialect.limited("SELECT 1", 5) == "SELECT 1"


def test_old_mariadb_is_asked_for_its_old_privileges() -> None:
    assert dialect_of(Flavour.MARIADB, Version(10, 4)).monitor_privilege == "REPLICATION CLIENT"
    assert dialect_of(Flavour.MARIADB, Version(11, 8)).monitor_privilege == "BINLOG MONITOR"
