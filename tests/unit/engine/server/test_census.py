"""The census on real servers: what a backup could miss."""

from __future__ import annotations

from pathlib import Path

from backupd.engine.server.probe import Census, examine, external_paths, read_dialect, recovery_risks, take_census
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import ExternalPath, Flavour
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer
from tests.support.stores.folders import give_to_database


def _census(server: PrivateServer) -> Census:
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    with connection.connect() as session:
        variables = {str(n): str(v) for n, v in session.query("SHOW GLOBAL VARIABLES")}
        return take_census(session, read_dialect(session), variables)


def _place(path: Path) -> Path:
    path.mkdir(parents=True)
    give_to_database(path)
    return path


def test_everything_outside_the_datadir_is_found(short_tmp: Path) -> None:
    undo, redo, elsewhere, system = (_place(short_tmp / name) for name in ("undo", "redo", "elsewhere", "system"))
    options: dict[str, str | int | None] = {
        "innodb_undo_directory": str(undo),
        "innodb_undo_tablespaces": 2,
        "innodb_log_group_home_dir": str(redo),
        "innodb_data_home_dir": str(system),
        "log_bin": str(elsewhere / "bin"),
        "symbolic_links": 1,
    }
    with PrivateServer(options=options) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop",
            f"CREATE TABLE shop.`or ders` (id INT PRIMARY KEY) DATA DIRECTORY='{elsewhere}'",
            f"CREATE TABLE shop.parts (id INT PRIMARY KEY) PARTITION BY HASH(id) "
            f"(PARTITION p0 DATA DIRECTORY='{elsewhere}', PARTITION p1)",
            f"CREATE TABLE shop.old (id INT) ENGINE=MyISAM DATA DIRECTORY='{elsewhere}' INDEX DIRECTORY='{system}'",
        )
        outside = _place(short_tmp / "linked")
        (server.datadir / "linked").symlink_to(outside)
        server.execute("CREATE TABLE linked.t (id INT PRIMARY KEY)")
        census = _census(server)
    assert set(census.external) >= {
        ExternalPath("system", "innodb_system", f"{system}/ibdata1"),
        ExternalPath("undo", "innodb_undo001", f"{undo}/undo001"),
        ExternalPath("undo", "innodb_undo_directory", str(undo)),
        ExternalPath("redo", "innodb_log_group_home_dir", str(redo)),
        ExternalPath("tablespace", "shop/or@0020ders", f"{elsewhere}/shop/or@0020ders.ibd"),
        ExternalPath("tablespace", "shop/parts#P#p0", f"{elsewhere}/shop/parts#P#p0.ibd"),
        ExternalPath("tablespace", "shop/old", f"{elsewhere}/old.MYD"),
        ExternalPath("tablespace", "shop/old", f"{system}/old.MYI"),
        ExternalPath("schema", "linked", str(outside)),
        ExternalPath("binlog", "log_bin_basename", f"{elsewhere}/bin"),
    }
    assert not [entry for entry in census.external if entry.path.startswith(str(server.datadir))]


def test_a_plain_server_has_nothing_outside(shared_server: PrivateServer) -> None:
    assert _census(shared_server).external == ()


def test_paths_of_a_server_elsewhere_come_from_sql_alone() -> None:
    variables = {
        "datadir": "/nowhere/data/",
        "innodb_data_file_path": "ibdata1:12M;/disk2/ibdata2:12M:autoextend",
        "aria_log_dir_path": "/nowhere/aria",
    }
    spaces = [("shop/a", "./shop/a.ibd", 1), ("shop/b", "/disk3/shop/b.ibd", 1), ("ts1", "../ts1.ibd", 1)]
    assert external_paths(spaces, [], variables) == (
        ExternalPath("redo", "aria_log_dir_path", "/nowhere/aria"),
        ExternalPath("system", "innodb_system", "/disk2/ibdata2"),
        ExternalPath("tablespace", "shop/b", "/disk3/shop/b.ibd"),
        ExternalPath("tablespace", "ts1", "/nowhere/ts1.ibd"),
    )


def test_engines_case_and_settings_are_said_aloud(server: PrivateServer) -> None:
    server.execute(
        "INSTALL SONAME 'ha_federatedx'",
        "CREATE DATABASE shop",
        "CREATE DATABASE Shop",
        "CREATE TABLE shop.Orders (id INT PRIMARY KEY)",
        "CREATE TABLE shop.orders (id INT PRIMARY KEY)",
        "CREATE TABLE shop.fleeting (id INT) ENGINE=MEMORY",
        f"CREATE SERVER itself FOREIGN DATA WRAPPER mysql OPTIONS (HOST 'localhost', USER 'root', "
        f"DATABASE 'shop', SOCKET '{server.socket}')",
        "CREATE TABLE shop.far (id INT PRIMARY KEY) ENGINE=FEDERATED CONNECTION='itself/orders'",
        "SET GLOBAL sync_binlog = 0",
        "SET GLOBAL innodb_flush_log_at_trx_commit = 2",
        "SET GLOBAL binlog_format = 'MIXED'",
        "XA START 'left'",
        "INSERT INTO shop.orders VALUES (1)",
        "XA END 'left'",
        "XA PREPARE 'left'",
    )
    try:
        census = _census(server)
    finally:
        server.execute("XA ROLLBACK 'left'")
    text = "\n".join(census.warnings)
    assert "FEDERATED keeps its data elsewhere" in text
    assert "`shop`.`far`" in text
    assert "MEMORY tables are restored empty" in text
    assert "`shop`.`Orders`, `shop`.`orders`" in text
    assert "`Shop`, `shop`" in text
    assert "sync_binlog is 0" in text
    assert "innodb_flush_log_at_trx_commit is 2" in text
    assert "binlog_format is MIXED" in text
    assert "1 prepared XA transactions" in text
    assert census.engines == {"InnoDB": 2, "MEMORY": 1, "FEDERATED": 1}


def test_encrypted_tablespaces_are_named(short_tmp: Path) -> None:
    key_file = short_tmp / "keys.txt"
    key_file.write_text("1;a7addd9adea9978fda19f21e6be987880e68ac92632ca052e5bb42b1a506939a\n")
    options: dict[str, str | int | None] = {
        "plugin_load_add": "file_key_management",
        "file_key_management_filename": str(key_file),
        "innodb_encrypt_log": "ON",
    }
    with PrivateServer(options=options) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.secret (id INT PRIMARY KEY) ENCRYPTED=YES",
            "CREATE TABLE shop.open (id INT PRIMARY KEY)",
        )
        connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
        with connection.connect() as session:
            probed = examine(session)
    assert probed.info.encrypted == ("innodb_encrypt_log", "shop/secret")
    assert any("key files" in sentence for sentence in probed.warnings)
    assert "file_key_management=file_key_management.so" in probed.info.plugins


def test_binlog_filters_are_risks() -> None:
    with PrivateServer(options={"binlog_ignore_db": "audit", "binlog_row_image": "MINIMAL"}) as server:
        server.create_backup_users()
        connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
        with connection.connect() as session:
            text = "\n".join(examine(session).warnings)
    assert "binlog_ignore_db is set (audit)" in text
    assert "binlog_row_image is MINIMAL" in text


def test_safe_settings_are_no_risk() -> None:
    safe = {
        "log_bin": "ON",
        "sync_binlog": "1",
        "binlog_format": "ROW",
        "binlog_row_image": "FULL",
        "innodb_flush_log_at_trx_commit": "1",
        "log_slave_updates": "OFF",
        "gtid_mode": "ON",
    }
    assert recovery_risks(safe, Flavour.MYSQL) == ()
    assert recovery_risks(safe, Flavour.MYSQL, replica=True)
    assert recovery_risks(safe | {"gtid_mode": "OFF"}, Flavour.MYSQL)
