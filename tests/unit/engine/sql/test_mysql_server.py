"""Probe, census, privileges, witness and launching on a real MySQL server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.engine.empty_system import initialise
from backupd.engine.server.accounts import needs, read_grants
from backupd.engine.server.launch import LaunchedServer, ServerConfig, log_tail, options_for_copy
from backupd.engine.server.probe import examine, probe
from backupd.engine.server.snapshot import Snapshot
from backupd.engine.sql.client import Connection
from backupd.engine.sql.dialect import dialect_of
from backupd.engine.sql.tables import list_tables
from backupd.engine.witness import checksums, object_counts, take
from backupd.model.server_facts import Flavour, Role, Version
from backupd.model.table import TableName
from backupd.process.run_context import RunContext
from restore.datadir.checks import PASSED, check_tables
from restore.datadir.start import forget_replication
from tests.support.servers import mysql
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(bool(mysql.why_not()), reason=mysql.why_not() or "there is one")

DATA = (
    "CREATE DATABASE shop",
    "CREATE TABLE shop.orders (id INT PRIMARY KEY, v VARCHAR(50)) ENGINE=InnoDB",
    "INSERT INTO shop.orders VALUES (1, 'a'), (2, 'b')",
    "CREATE TABLE shop.`od d.näme` (id INT PRIMARY KEY) ENGINE=InnoDB",
    "CREATE TABLE shop.parted (id INT PRIMARY KEY) ENGINE=InnoDB PARTITION BY HASH (id) PARTITIONS 2",
    "CREATE TABLE shop.notes (id INT) ENGINE=MyISAM",
    "CREATE VIEW shop.all_orders AS SELECT id FROM shop.orders",
    "CREATE TRIGGER shop.t BEFORE INSERT ON shop.orders FOR EACH ROW SET NEW.v = UPPER(NEW.v)",
    "CREATE EVENT shop.e ON SCHEDULE EVERY 1 DAY DO DELETE FROM shop.orders",
    "CREATE PROCEDURE shop.p() SELECT 1",
)


@pytest.fixture(scope="module")
def source() -> Iterator[MySQLServer]:
    with MySQLServer() as server:
        server.create_backup_users()
        server.execute(*DATA)
        yield server


@pytest.fixture(scope="module")
def service(source: MySQLServer) -> Connection:
    return Connection(socket=str(source.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)


def test_a_probe_with_the_granted_privileges_alone_sees_everything(source: MySQLServer, service: Connection) -> None:
    with service.connect() as session:
        probed = examine(session)
    info = probed.info
    assert not probed.denied
    assert (info.flavour, info.version) == (source.flavour, source.version)
    assert info.role is Role.STANDALONE
    assert info.server_uuid == source.scalar("SELECT @@server_uuid")
    (log,) = source.query(dialect_of(info.flavour, info.version).binlog_status)
    assert (info.position.file, info.position.pos) == log[:2]
    assert info.position.gtid == str(source.scalar("SELECT @@GLOBAL.gtid_executed")).replace("\n", "")
    assert info.gtid_mode == "on"
    assert info.engines == {"InnoDB": 3, "MyISAM": 1}
    assert info.data_bytes > 0
    assert not info.external
    assert info.variables["datadir"].rstrip("/") == str(source.datadir)
    assert not [warning for warning in probed.warnings if "engine" in warning]


def test_limits_that_a_server_has_for_its_applications_keep_nobody_from_a_probe(
    source: MySQLServer, service: Connection
) -> None:
    limits = {"max_join_size": 10}
    if source.version >= Version(5, 7, 8):
        limits["max_execution_time"] = 1
    source.execute(*(f"SET GLOBAL {name} = {value}" for name, value in limits.items()))
    try:
        with service.connect() as session:
            assert examine(session).info.tables
            assert session.scalar("SELECT SLEEP(0.1)") == 0  # one that was ended gives 1
    finally:
        source.execute(*(f"SET GLOBAL {name} = DEFAULT" for name in limits))


def test_the_privileges_that_are_asked_for_are_those_that_are_found(source: MySQLServer, service: Connection) -> None:
    wanted = needs(dialect_of(source.flavour, source.version))
    with service.connect() as session:
        grants = read_grants(session)
    assert all(grants.allow(need.privilege) for need in wanted)
    assert not grants.allow("SUPER")
    for need in wanted:
        source.execute(f"REVOKE {need.privilege} ON *.* FROM {SERVICE_USER}@localhost")
        try:
            with service.connect() as session:
                assert not read_grants(session).allow(need.privilege)
        finally:
            source.execute(f"GRANT {need.privilege} ON *.* TO {SERVICE_USER}@localhost")


def test_a_role_counts_once_it_is_active(source: MySQLServer) -> None:
    if not source.roles:
        pytest.skip(f"{source.version} has no roles")
    source.create_user("held", "x", ())
    source.execute(
        "CREATE ROLE keeper", "GRANT RELOAD, BACKUP_ADMIN ON *.* TO keeper", "GRANT keeper TO held@localhost"
    )
    connection = Connection(socket=str(source.socket), user="held", password="x")
    with connection.connect() as session:
        assert not read_grants(session).allow("RELOAD")
    source.execute("SET DEFAULT ROLE keeper TO held@localhost")
    with connection.connect() as session:
        assert read_grants(session).allow("RELOAD")
        assert read_grants(session).allow("BACKUP_ADMIN")
    source.execute("DROP USER held@localhost", "DROP ROLE keeper")


def test_a_witness_is_of_its_position_and_keeps_to_it(source: MySQLServer, service: Connection) -> None:
    witness = take(service, server="shop", max_seconds=60)
    (log,) = source.query(dialect_of(source.flavour, source.version).binlog_status)
    assert (witness.position.file, witness.position.pos) == log[:2]
    # Of MyISAM only because the binary log shows that nothing was written.
    assert set(witness.checksums) == {"`shop`.`orders`", "`shop`.`od d.näme`", "`shop`.`parted`", "`shop`.`notes`"}
    assert witness.checksums["`shop`.`notes`"] == source.query("CHECKSUM TABLE shop.notes EXTENDED")[0][1]
    counted = {kind: witness.objects[kind] for kind in ("views", "triggers", "routines", "events")}
    assert counted == {"views": 1, "triggers": 1, "routines": 1, "events": 1}
    with Snapshot(service) as snapshot:
        snapshot.open()
        source.execute("UPDATE shop.orders SET v = 'changed'")
        seen = checksums(snapshot.session, [TableName("shop", "orders")]).values
        assert seen == {"`shop`.`orders`": witness.checksums["`shop`.`orders`"]}
        assert snapshot.release()
    with service.connect() as session:
        assert checksums(session, [TableName("shop", "orders")]).values != seen


def test_a_table_that_changed_its_name_counts_as_moved(source: MySQLServer, service: Connection) -> None:
    source.execute("CREATE TABLE shop.a (i INT) ENGINE=InnoDB", "CREATE TABLE shop.b (i INT) ENGINE=InnoDB")
    a, b, odd, orders = (TableName("shop", name) for name in ("a", "b", "od d.näme", "orders"))
    with Snapshot(service) as snapshot:
        snapshot.open()
        assert not any(map(snapshot.moved(), (a, b, odd, orders)))
        source.execute("RENAME TABLE shop.a TO shop.c, shop.b TO shop.a")
        assert [snapshot.moved()(table) for table in (a, b, odd, orders)] == [True, True, False, False]
        source.execute("ALTER TABLE shop.`od d.näme` ENGINE=InnoDB")
        assert [snapshot.moved()(table) for table in (odd, orders)] == [True, False]
    source.execute("DROP TABLE shop.a", "DROP TABLE shop.c")


def test_an_opened_snapshot_does_not_wait_long_for_a_lock(source: MySQLServer, service: Connection) -> None:
    with source.connect(autocommit=False) as connection, connection.cursor() as cursor:
        cursor.execute("LOCK TABLES shop.orders WRITE")
        with pytest.raises(Exception, match=r"refused a statement"), Snapshot(service) as snapshot:
            snapshot.open()


def test_a_launched_copy_is_deaf_and_mute_and_forgets_its_replication(source: MySQLServer) -> None:
    source.stop()
    with short_directory() as base:
        copy = base / "data"
        shutil.copytree(source.datadir, copy, ignore=shutil.ignore_patterns("auto.cnf", "*.pem"))
        source.start()
        for path in (copy, *copy.rglob("*")):
            shutil.chown(path, "mysql", "mysql")
        info = probe(Connection(socket=str(source.socket), user="root"))
        config = ServerConfig(
            source.program(), copy, base / "run", options=options_for_copy(copy, info.variables), memory=64 << 20
        )
        with LaunchedServer(config) as server, server.connection.connect() as session:
            assert server.pid is not None
            asked = session.query("SELECT @@skip_networking, @@log_bin, @@server_id = %s", source.server_id)[0]
            assert asked == (1, 0, 0)
            assert str(session.scalar("SELECT @@event_scheduler")) in ("OFF", "DISABLED")
            word = "REPLICATION SOURCE TO SOURCE" if info.version >= Version(8, 0, 23) else "MASTER TO MASTER"
            session.execute(f"CHANGE {word}_HOST='192.0.2.1'")
            dialect = dialect_of(info.flavour, info.version)
            (row,) = session.records(dialect.replica_status)
            assert "No" in (row.get("Replica_IO_Running"), row.get("Slave_IO_Running"))
            forget_replication(server.connection, info)
            assert not session.records(dialect.replica_status)
            assert object_counts(session)["events"] == 1
            assert check_tables(server.connection, RunContext(workers=2)).outcome == PASSED
        assert "ignore_db_dirs" not in log_tail(config.error_log, 1000)
        assert not list(copy.glob("*.pem"))


def test_a_system_is_made_from_nothing() -> None:
    if mysql.release_of(mysql.mysqld())[1] < Version(5, 7):
        pytest.skip("before 5.7 a server could not initialise itself")
    with short_directory() as base:
        initialise(base / "data", program=mysql.mysqld())
        with LaunchedServer(ServerConfig(mysql.mysqld(), base / "data", base / "run", memory=64 << 20)) as server:
            with server.connection.connect() as session:
                assert not [table for table in list_tables(session) if not table.is_system]
                flavour = probe(server.connection).flavour
                assert flavour in (Flavour.MYSQL, Flavour.PERCONA)


def test_programs_that_were_unpacked_somewhere_are_told_where_their_files_are(tmp_path: Path) -> None:
    from backupd.engine.server.sandbox import program_folders, server_options

    program = tmp_path / "server" / "bin" / "mysqld"
    messages = tmp_path / "server" / "share" / "english"
    for folder in (program.parent, messages, tmp_path / "server" / "data"):
        folder.mkdir(parents=True)
    program.touch()
    assert server_options(str(program)) == {}
    (messages / "errmsg.sys").touch()
    assert server_options(str(program)) == {
        "basedir": str(tmp_path / "server"),
        "lc_messages_dir": str(tmp_path / "server" / "share"),
    }
    assert program_folders(program) == [tmp_path / "server" / "bin", tmp_path / "server" / "share"]
    assert server_options("mysqld") == server_options("/usr/sbin/mysqld") == {}
    assert program_folders(Path("/usr/sbin/mysqld")) == []
