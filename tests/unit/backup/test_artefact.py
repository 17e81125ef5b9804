"""The artefact of real servers."""

from __future__ import annotations

import dataclasses
import io
import json
import socket
import tarfile
from pathlib import Path

import pytest

from backupd.backup.host_configuration import Artefact, Mount, collect, describe_mounts, mount_of, read_mounts
from backupd.engine.server.probe import probe
from backupd.engine.sql.client import Connection, Session
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer
from tests.support.servers.mysql import MySQLServer, why_not


def read(artefact: Artefact) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(artefact.content)) as tar:
        return {member.name: file.read().decode() for member in tar if (file := tar.extractfile(member)) is not None}


def service(server: PrivateServer | MySQLServer) -> Connection:
    return Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)


def test_a_local_server_gives_its_option_file_settings_accounts_and_host(
    shared_server: PrivateServer, tmp_path: Path
) -> None:
    connection = service(shared_server)
    info = probe(connection)
    (tmp_path / "script").write_text("#!/bin/sh\n")
    first = collect(connection, info, (tmp_path, tmp_path / "gone"))
    found = read(first)
    assert first.warnings == (f"configuration: {tmp_path}/gone is not kept: No such file or directory",)
    assert found[f"host/files{shared_server.option_path}"] == shared_server.option_path.read_text()
    assert "host/files/etc/mysql/my.cnf" not in found, "the server was started with --defaults-file"
    assert found[f"host/files{tmp_path}/script"] == "#!/bin/sh\n"
    assert "innodb_buffer_pool_size = 134217728\n" in found["server/variables.txt"]
    assert "Aria\t" in found["server/plugins.txt"]
    assert "CREATE USER IF NOT EXISTS `backupd`@`localhost`" in found["server/accounts.sql"]
    assert json.loads(found["server/status.json"])["server_id"] == shared_server.server_id
    assert str(shared_server.datadir) in found["host/mounts.txt"]
    assert "innodb_doublewrite = ON" in found["host/mounts.txt"]
    assert f"--defaults-file={shared_server.option_path}" in found["host/os.txt"]
    assert "Max open files" in found["host/os.txt"]
    assert "mariadb-server" in found["host/packages.txt"]
    assert f"{tmp_path}/gone" in found["NOTES.txt"]
    assert collect(connection, info, (tmp_path, tmp_path / "gone")).content == first.content


def test_a_server_elsewhere_gives_what_sql_tells_and_says_so(shared_server: PrivateServer) -> None:
    class Elsewhere(Connection):
        """A connection that does not go through a socket, as far as anybody can tell."""

        def connect(self) -> Session:
            session = service(shared_server).connect()
            session.connection = Connection(host="db9", port=3306)
            return session

    info = dataclasses.replace(probe(service(shared_server)), hostname="db9")
    artefact = collect(Elsewhere(host="db9"), info, (Path("/etc/fstab"),))
    found = read(artefact)
    assert {name.split("/")[0] for name in found} == {"server", "README.txt", "NOTES.txt"}
    assert "server/accounts.sql" in found
    assert artefact.warnings == ("configuration: /etc/fstab is not kept: the server runs on another host, db9",)


def test_an_account_that_may_ask_nothing_costs_warnings_and_never_the_backup(server: PrivateServer) -> None:
    info = probe(service(server))
    server.execute("CREATE USER poor@localhost IDENTIFIED BY 'p'")
    artefact = collect(Connection(socket=str(server.socket), user="poor", password="p"), info)
    assert any("users and grants cannot be read" in warning for warning in artefact.warnings)
    assert "server/variables.txt" in read(artefact)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_mysql_server_gives_its_persisted_settings_too() -> None:
    with MySQLServer() as server:
        server.create_backup_users()
        server.execute("SET GLOBAL max_connections = 77")
        if server.roles:
            server.execute("SET PERSIST max_connections = 77")
        connection = service(server)
        artefact = collect(connection, probe(connection))
        assert artefact.warnings == ()
        found = read(artefact)
        assert f"host/files{server.option_path}" in found
        if server.roles:
            assert "77" in found[f"host/files{server.datadir}/mysqld-auto.cnf"]
        assert "`backupd`@`localhost`" in found["server/accounts.sql"]


_MOUNTINFO = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
30 22 0:40 / /srv/my\040sql rw,noatime - zfs tank/my\040sql rw,xattr
31 22 0:41 / /srv/mysql2 rw - xfs /dev/sdb rw
"""


def test_the_mount_of_a_path_is_the_longest_that_holds_it() -> None:
    mounts = read_mounts(_MOUNTINFO)
    assert mount_of("/srv/my sql/data", mounts) == Mount("/srv/my sql", "zfs", "tank/my sql", "rw,noatime,xattr")
    found = mount_of("/srv/mysql", mounts)
    assert found is not None
    assert found.kind == "ext4"


def test_no_doublewrite_buffer_is_a_warning_where_half_pages_can_be_written(shared_server: PrivateServer) -> None:
    info = probe(service(shared_server))
    assert info.hostname == socket.gethostname()
    document, warning = describe_mounts(info, {"innodb_doublewrite": "OFF"})
    assert "remove the option before the first start" in document
    assert "power failure" in warning
    assert describe_mounts(info, {"innodb_doublewrite": "ON"})[1] == ""
