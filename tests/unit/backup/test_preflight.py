"""Preflight: everything wrong at once, never an exception."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import pytest

from backupd.backup.finding import Finding, Severity
from backupd.backup.preflight import PreflightSpec, preflight
from backupd.backup.server_checks import Streaming, examine_binary_log, examine_coverage, examine_location
from backupd.engine.physical.mariabackup_xtrabackup import MariaBackup
from backupd.engine.server.accounts import needs, parse_grants, read_grants
from backupd.engine.server.probe import probe, read_dialect
from backupd.engine.sql.client import Connection
from backupd.engine.sql.dialect import dialect_of
from backupd.engine.sql.tables import Table
from backupd.model.errors import DestinationError
from backupd.model.server_facts import Flavour, ServerInfo, Version
from backupd.model.table import TableName
from policies.policy import Logical
from storage.destination import Destination, ObjectInfo, Space
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys, copy_public, make_home, make_key, stop_agent
from tests.support.servers import new_mydumper as newmydumper
from tests.support.servers.mariadb import (
    BACKUP_PASSWORD,
    BACKUP_USER,
    SERVICE_PASSWORD,
    SERVICE_PRIVILEGES,
    SERVICE_USER,
    PrivateServer,
)
from tests.support.stores.memory import MemoryDestination

GIB = 1024**3


class FullDestination(MemoryDestination):
    """A real destination that says how full it is (a full disk cannot be had at will)."""

    def __init__(self, name: str, space: Space) -> None:
        super().__init__(name)
        self._space = space

    def space(self) -> Space | None:
        return self._space


class BrokenDestination(MemoryDestination):
    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        raise DestinationError(f"destination {self.name}: {key} cannot be written", detail="Read-only file system")


@pytest.fixture
def spec(shared_server: PrivateServer, keys: Keys, short_tmp: Path) -> PreflightSpec:
    """A healthy installation."""
    connection = Connection(socket=str(shared_server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    destination = FilesystemDestination("local", short_tmp / "repository")
    return PreflightSpec(
        server="shop-db1",
        connection=connection,
        destinations=(destination,),
        new_destinations=frozenset({"local"}),
        gnupg_home=keys.public_home,
        recipients=(keys.user_id,),
        spool=short_tmp / "spool",
        secret_files=(shared_server.client_file(SERVICE_USER, SERVICE_PASSWORD),),
    )


def _of(findings: Sequence[Finding], severity: Severity) -> str:
    return "\n".join(f"{f.subject}: {f.message}" for f in findings if f.severity is severity)


def _now() -> datetime:
    return datetime.now(UTC)


def _errors(spec: PreflightSpec) -> str:
    return _of(preflight(spec, now=_now()), Severity.ERROR)


def _warnings(spec: PreflightSpec) -> str:
    return _of(preflight(spec, now=_now()), Severity.WARNING)


def test_a_healthy_installation_has_no_errors(spec: PreflightSpec, shared_server: PrivateServer) -> None:
    findings = preflight(spec, now=_now())
    assert _of(findings, Severity.ERROR) == ""
    fine = _of(findings, Severity.OK)
    for subject in ("server", "tool", "datadir", "keys", "destination local", "spool"):
        assert f"{subject}: " in fine
    assert str(shared_server.datadir) in fine
    assert any("1 of MyISAM" in one.message and "ENGINE=InnoDB" in one.hint for one in findings)
    assert findings[0].as_json().keys() == {"severity", "subject", "message", "hint"}


def test_everything_wrong_is_told_at_once(spec: PreflightSpec, short_tmp: Path) -> None:
    (short_tmp / "file").touch()
    bad = replace(
        spec,
        connection=Connection(socket=str(short_tmp / "no.sock"), user="x"),
        destinations=(BrokenDestination("usb"), FilesystemDestination("gone", short_tmp / "gone")),
        recipients=("nobody@example.com", "0xDEADBEEF"),
        spool=short_tmp / "file" / "spool",
        secret_files=(short_tmp / "none.cnf",),
    )
    text = _errors(bad)
    assert "no.sock" in text
    assert "destination usb" in text
    assert "Read-only file system" in text
    assert "destination gone: it held backups, and is now empty or missing" in text
    assert any("restore repository.json" in one.hint for one in preflight(bad, now=_now()))
    assert "no public key for nobody@example.com" in text
    assert "short key id" in text
    assert "spool: " in text
    assert "none.cnf cannot be read" in text
    assert all(f.hint for f in preflight(bad, now=_now()) if f.subject in ("server", "spool"))


def test_each_missing_privilege_is_named_with_the_statement_that_gives_it(
    server: PrivateServer, spec: PreflightSpec
) -> None:
    server.create_user("poor", "x", ["LOCK TABLES"])
    connection = Connection(socket=str(server.socket), user="poor", password="x")
    findings = preflight(replace(spec, connection=connection), now=_now())
    errors = _of(findings, Severity.ERROR)
    for privilege in ("RELOAD", "PROCESS", "BINLOG MONITOR"):
        assert f"poor@localhost lacks {privilege} on *.*" in errors
    assert "LOCK TABLES" not in errors
    warnings = _of(findings, Severity.WARNING)
    for privilege in ("SELECT", "SHOW VIEW", "TRIGGER", "EVENT", "BINLOG ADMIN", "SLAVE MONITOR"):
        assert f"poor@localhost lacks {privilege} on *.*" in warnings
    hints = [f.hint for f in findings if f.subject == "privileges" and "RELOAD" in f.message]
    assert hints == ["GRANT RELOAD ON *.* TO 'poor'@'localhost'"]
    for finding in findings:
        if finding.subject == "privileges" and finding.severity is not Severity.OK:
            server.execute(finding.hint)
    assert "lacks" not in str(preflight(replace(spec, connection=connection), now=_now()))


def test_privileges_of_an_active_role_count_and_those_of_another_do_not(server: PrivateServer) -> None:
    server.create_user("worker", "x", [])
    server.execute(
        "CREATE ROLE backups",
        f"GRANT {', '.join([*SERVICE_PRIVILEGES, 'BINLOG ADMIN'])} ON *.* TO backups",
        "GRANT backups TO worker@localhost",
    )
    connection = Connection(socket=str(server.socket), user="worker", password="x")
    with connection.connect() as session:
        grants = read_grants(session)
        assert not grants.allow("RELOAD")
        assert grants.roles == ("`backups`",)
    server.execute("SET DEFAULT ROLE backups FOR worker@localhost")
    with connection.connect() as session:
        grants = read_grants(session)
        assert [need for need in needs(read_dialect(session)) if not grants.allow(need.privilege)] == []


def test_the_tool_account_may_back_up_but_not_witness(spec: PreflightSpec, shared_server: PrivateServer) -> None:
    connection = Connection(socket=str(shared_server.socket), user=BACKUP_USER, password=BACKUP_PASSWORD)
    bad = replace(spec, connection=connection)
    assert _errors(bad) == ""
    assert "lacks SELECT" in _warnings(bad)


def test_grants_are_read_in_every_flavours_words() -> None:
    lines = [
        "GRANT USAGE ON *.* TO `b`@`%` IDENTIFIED BY PASSWORD '*14C12EB4A9ED140666EDFEB32522E66C11EBC0AE'",
        "GRANT SELECT, RELOAD, REPLICATION CLIENT ON *.* TO `b`@`%` WITH GRANT OPTION",
        "GRANT BACKUP_ADMIN,XA_RECOVER_ADMIN ON *.* TO `b`@`%`",
        "GRANT TRIGGER ON `shop`.* TO `b`@`%`",
        "GRANT SELECT (`a`) ON `d`.`t` TO `b`@`%`",
        "GRANT EXECUTE ON PROCEDURE `bank`.`move` TO `b`@`%`",
        "GRANT PROXY ON ``@`` TO `b`@`%`",
        "GRANT `r1`@`%`,`r2`@`%` TO `b`@`%`",
        "SET DEFAULT ROLE `r1` FOR `b`@`%`",
    ]
    grants = parse_grants("b@%", lines)
    for privilege in ("SELECT", "RELOAD", "BINLOG MONITOR", "REPLICATION CLIENT", "BACKUP_ADMIN"):
        assert grants.allow(privilege)
    assert not grants.allow("TRIGGER")
    assert not grants.allow("EXECUTE")
    assert grants.roles == ("`r1`@`%`", "`r2`@`%`")
    assert parse_grants("r@%", ["GRANT ALL PRIVILEGES ON *.* TO `r`@`%`"]).allow("ANYTHING")
    mysql = {need.privilege for need in needs(dialect_of(Flavour.MYSQL, Version(8, 4))) if need.required}
    assert mysql == {"RELOAD", "PROCESS", "LOCK TABLES", "REPLICATION CLIENT", "BACKUP_ADMIN"}


def test_what_lacks_is_said_to_whom_it_lacks(spec: PreflightSpec, server: PrivateServer) -> None:
    server.create_user("little", "x", ["SELECT"])
    dumps = replace(
        spec,
        connection=Connection(socket=str(server.socket), user="little", password="x"),
        physical=False,
        logical=Logical.model_validate({"schedule": "every 24h"}),
    )
    told = [found.message for found in preflight(dumps, now=_now()) if found.subject == "privileges"]
    assert (
        "little@localhost lacks RELOAD on *.*: a dump cannot block commits for the moment in which it begins, so "
        "every dump fails"
    ) in told
    assert not [text for text in told if "physical" in text or "LOCK TABLES" in text]
    mariadb = dialect_of(Flavour.MARIADB, Version(10, 11))
    (need,) = set(needs(mariadb, rocksdb=True)) - set(needs(mariadb))
    assert (need.privilege, need.required) == ("SUPER", True)
    assert needs(mariadb, rocksdb=True, physical=False) == needs(mariadb, physical=False)
    assert (
        str(hint_of("Access denied; you need (at least one of) the SUPER privilege(s) for this operation"))
        == "grant the account the missing privileges; `backupd check` lists them"
    )


def test_tables_of_myrocks_are_said_to_be_in_no_proof() -> None:
    tables = [Table(TableName("shop", "r"), "BASE TABLE", "ROCKSDB", 1, "")]
    (finding,) = examine_coverage(tables, Flavour.MARIADB, "mariadb-backup", None)
    assert finding.severity is Severity.WARNING
    assert "come back only with a restore of the whole server" in finding.message
    assert "shop.r" in finding.message
    (finding,) = examine_coverage(tables, Flavour.PERCONA, "xtrabackup", None)
    assert "are in no backup, as physical backups leave that engine out: shop.r" in finding.message


def hint_of(text: str) -> str:
    return next(hint for mark, hint in MariaBackup.hints.items() if mark in text)


def test_a_tool_of_another_series_or_none_is_an_error(spec: PreflightSpec, short_tmp: Path) -> None:
    old = short_tmp / "mariadb-backup"
    old.write_text("#!/bin/sh\necho 'mariadb-backup based on MariaDB server 10.6.18-MariaDB Linux (x86_64)' >&2\n")
    old.chmod(0o755)
    assert "10.6.18 cannot back up" in _errors(replace(spec, programs={"mariadb-backup": str(old)}))
    gone = {"mariadb-backup": str(short_tmp / "none")}
    assert "tool: " in _errors(replace(spec, programs=gone))


def test_the_program_that_will_dump_tables_is_named_and_why_it_is_not_a_faster_one(
    spec: PreflightSpec, short_tmp: Path
) -> None:
    logical = replace(spec, logical=Logical.model_validate({"schedule": "every 24h"}), gnupg_home=short_tmp)
    assert "dump tool: " not in _of(preflight(spec, now=_now()), Severity.OK)
    assert "dump tool: mydumper 0." in _of(preflight(logical, now=_now()), Severity.OK)
    real = shutil.which("mydumper")
    lost = short_tmp / "mydumper"
    lost.write_text(
        f'#!/bin/sh\ntest "$1" = --version && exec {real} --version\n'
        "echo '** (mydumper:1): CRITICAL **: Error connecting to database: Unknown system variable' >&2\n"
        "exit 1\n"
    )
    lost.chmod(0o755)
    (finding,) = (
        found
        for found in preflight(replace(logical, programs={"mydumper": str(lost)}), now=_now())
        if found.subject == "dump tool"
    )
    assert finding.severity is Severity.WARNING
    assert "cannot dump from this server, and backupd dumps the tables instead" in finding.message
    assert "Unknown system variable" in finding.message
    strange = newmydumper.make(short_tmp / "tool", newmydumper.Knobs(version="0.12.7-3"))
    (finding,) = (
        found
        for found in preflight(replace(logical, programs={"mydumper": str(strange)}), now=_now())
        if found.subject == "dump tool"
    )
    assert finding.severity is Severity.WARNING
    assert "mydumper 0.12.7 is not supported" in finding.message
    assert "backupd dumps the tables instead" in finding.message
    gone = {"mydumper": str(short_tmp / "none")}
    assert _warnings(replace(logical, programs=gone)).count("backupd dumps the tables instead") == 1


def test_keys_that_expired_or_will_soon_are_told(spec: PreflightSpec, short_tmp: Path) -> None:
    secret, home = make_home(short_tmp / "s"), make_home(short_tmp / "p")
    try:
        for user, expires in (("soon@example.com", "3"), ("old@example.com", "seconds=1")):
            make_key(secret, user, expires=expires)
            copy_public(secret, home, user)
        later = _now() + timedelta(hours=1)
        findings = preflight(
            replace(spec, gnupg_home=home, recipients=("soon@example.com", "old@example.com")), now=later
        )
    finally:
        stop_agent(secret)
        stop_agent(home)
    assert "has expired" in _of(findings, Severity.ERROR)
    assert "expires on" in _of(findings, Severity.WARNING)


def test_a_decryption_key_on_this_machine_is_said_aloud(spec: PreflightSpec, keys: Keys) -> None:
    text = _warnings(replace(spec, gnupg_home=keys.secret_home))
    assert f"keys: the decryption key {keys.fingerprint} is in {keys.secret_home}" in text
    text = _warnings(replace(spec, restore_gnupg_home=keys.secret_home))
    assert f"restore keys: the decryption key {keys.fingerprint} is also on this host" in text
    text = _warnings(replace(spec, restore_gnupg_home=make_home(spec.spool.parent / "empty")))
    assert "nothing can be restored on this machine" in text
    text = _warnings(replace(spec, restore_gnupg_home=spec.gnupg_home))
    assert f"restore keys: {spec.gnupg_home} holds no decryption key of the recipients" in text


def test_whether_restored_copies_can_be_started_here_is_told_where_restores_are_configured(
    spec: PreflightSpec, keys: Keys, short_tmp: Path
) -> None:
    assert "restores: " not in str(preflight(spec, now=_now()))
    here = replace(spec, restore_gnupg_home=keys.secret_home)
    assert "restores: mariadbd 10.11." in _of(preflight(here, now=_now()), Severity.OK)
    strange = short_tmp / "strange"
    strange.write_text("#!/bin/sh\necho 'mysqld  Ver 9.7.4 for Linux on x86_64 (MySQL Community Server - GPL)'\n")
    strange.chmod(0o755)
    (finding,) = (
        found
        for found in preflight(replace(here, programs={"mariadbd": str(strange)}), now=_now())
        if found.subject == "restores"
    )
    assert finding.severity is Severity.WARNING
    assert finding.message.startswith("no restored copy can be started on this machine: mariadbd 9.7.4 must not be")
    assert "`programs: {mariadbd: " in finding.hint


def _binlog(spec: PreflightSpec, info: ServerInfo, fulls: timedelta | None = None) -> list[Finding]:
    with spec.connection.connect() as session:
        return list(examine_binary_log(session, info, Streaming(fulls)))


def test_a_stream_needs_a_binary_log_and_the_right_to_read_it(spec: PreflightSpec) -> None:
    streamed = preflight(replace(spec, streaming=Streaming()), now=_now())
    # The warning is of its tables in Aria.
    assert [f.severity for f in streamed if f.subject == "binlog"] == [Severity.WARNING, Severity.OK]
    assert _of(streamed, Severity.ERROR) == ""
    gone = {"mariadb-binlog": "/no/such/program"}
    assert "/no/such/program" in _errors(replace(spec, streaming=Streaming(), programs=gone))
    poor = replace(spec, connection=replace(spec.connection, user=BACKUP_USER, password=BACKUP_PASSWORD))
    assert "lacks REPLICATION SLAVE on *.*: the binary log cannot be streamed" in _errors(
        replace(poor, streaming=Streaming())
    )
    assert "REPLICATION SLAVE" not in _errors(poor)
    (found,) = _binlog(spec, replace(probe(spec.connection), log_bin=False))
    assert (found.severity, "log_bin is off" in found.message) == (Severity.ERROR, True)


def test_a_log_that_is_kept_for_too_short_a_time_and_tables_without_transactions_are_told(spec: PreflightSpec) -> None:
    info = probe(spec.connection)
    assert info.variables["binlog_expire_logs_seconds"] == "0"

    def kept(seconds: int, **engines: int) -> ServerInfo:
        return replace(info, variables={**info.variables, "binlog_expire_logs_seconds": str(seconds)}, engines=engines)

    _tool, short = _binlog(spec, kept(3600), timedelta(days=7))
    assert "after 1h: a stream that is interrupted for longer leaves a gap" in short.message
    _tool, apart = _binlog(spec, kept(2 * 86_400), timedelta(days=7))
    assert "full backups are up to 7d apart" in apart.message
    assert [f.severity for f in _binlog(spec, kept(8 * 86_400, InnoDB=3, BLACKHOLE=1), timedelta(days=7))] == [
        Severity.OK
    ]
    never = replace(kept(3600), variables={**kept(3600).variables, "binlog_expire_logs_auto_purge": "OFF"})
    assert [f.severity for f in _binlog(spec, never)] == [Severity.OK]
    _tool, engines = _binlog(spec, kept(0, InnoDB=3, MyISAM=2), timedelta(days=7))
    assert "(2 of MyISAM)" in engines.message


def test_no_recipient_and_no_destination_are_errors(spec: PreflightSpec) -> None:
    text = _errors(replace(spec, recipients=(), destinations=()))
    assert "no recipient is configured" in text
    assert "no destination is configured" in text


def _with_space(spec: PreflightSpec, space: Space, expected: int | None = None) -> list[Finding]:
    destination: Destination = FullDestination("disk", space)
    changed = replace(spec, destinations=(destination,), expected_new_bytes=expected)
    return [f for f in preflight(changed, now=_now()) if f.subject == "destination disk"]


def test_a_destination_that_is_full_or_nearly_so_is_told(spec: PreflightSpec) -> None:
    full = _with_space(spec, Space(total=100 * GIB, free=1000))
    assert [f.severity for f in full] == [Severity.ERROR]
    assert "of 100.0 GiB are free" in full[0].message
    nearly = _with_space(spec, Space(total=100 * GIB, free=10 * GIB), expected=8 * GIB)
    assert [f.severity for f in nearly] == [Severity.WARNING]
    assert "the next backup may need 8.0 GiB" in nearly[0].message
    inodes = _with_space(spec, Space(total=100 * GIB, free=90 * GIB, free_inodes=12))
    assert [f.severity for f in inodes] == [Severity.ERROR]
    assert [f.severity for f in _with_space(spec, Space(100 * GIB, 90 * GIB))] == [Severity.OK]


def test_a_check_leaves_nothing_at_the_destination(spec: PreflightSpec) -> None:
    memory = MemoryDestination("memory")
    preflight(replace(spec, destinations=(memory,)), now=_now())
    assert list(memory.list("")) == []


def test_a_password_file_open_to_others_is_told(spec: PreflightSpec, short_tmp: Path) -> None:
    path = short_tmp / "password"
    path.write_text("x")
    path.chmod(0o640)
    assert f"{path} holds a password and is open to others (mode 0640)" in _warnings(
        replace(spec, secret_files=(path,))
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to fail as")
def test_a_datadir_that_cannot_be_read_is_an_error(shared_server: PrivateServer) -> None:
    connection = Connection(socket=str(shared_server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    nobody = pwd.getpwnam("nobody").pw_uid
    with connection.connect() as session:
        info = probe(connection)
        os.seteuid(nobody)
        try:
            findings = list(examine_location(session, info))
        finally:
            os.seteuid(0)
        assert "cannot be" in _of(findings, Severity.ERROR)
        missing = list(examine_location(session, replace(info, datadir="/no/such/place")))
        assert "/no/such/place is not on this host" in _of(missing, Severity.ERROR)


def test_a_folder_of_another_server_at_the_same_path_is_noticed(shared_server: PrivateServer, short_tmp: Path) -> None:
    connection = Connection(socket=str(shared_server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    other = short_tmp / "data"
    other.mkdir()
    (other / "ibdata1").touch()
    with connection.connect() as session:
        findings = list(examine_location(session, replace(probe(connection), datadir=str(other))))
    assert "does not work in" in _of(findings, Severity.ERROR)


def test_a_server_on_another_host_is_an_error() -> None:
    with PrivateServer(tcp=True) as server:
        server.query("CREATE USER far@'127.0.0.1' IDENTIFIED BY 'x'")
        server.execute("GRANT ALL ON *.* TO far@'127.0.0.1'")
        assert server.port
        connection = Connection(host="127.0.0.1", port=server.port, user="far", password="x")
        info = probe(connection)
        with connection.connect() as session:
            assert _of(list(examine_location(session, info)), Severity.ERROR) == ""
            findings = list(examine_location(session, replace(info, hostname="db9")))
        assert "the server says it runs on db9" in _of(findings, Severity.ERROR)
        with _forwarded(server.port) as port:
            through = replace(connection, port=port)
            with through.connect() as session:
                findings = list(examine_location(session, info))
        assert f"connected to port {port}, but the server listens on {server.port}" in _of(findings, Severity.WARNING)
        with connection.connect() as session:
            proxied = replace(info, version_text="8.0.11 (ProxySQL)")
            assert "this is proxysql, a proxy" in _of(list(examine_location(session, proxied)), Severity.ERROR)


@contextmanager
def _forwarded(port: int) -> Iterator[int]:
    """A forwarder of one TCP connection, as a proxy that understands nothing."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # whoever has said all hangs up as it likes
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as upstream:
            back = threading.Thread(target=pump, args=(upstream, client))
            back.start()
            pump(client, upstream)
            back.join()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        thread.join()
        listener.close()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs to mount a tmpfs")
def test_a_datadir_that_is_a_mount_point_is_mentioned(short_tmp: Path) -> None:
    datadir = short_tmp / "data"
    datadir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m,mode=0755", "tmpfs", str(datadir)], check=True)
    try:
        with PrivateServer(datadir=datadir / "inner") as server:
            info = replace(probe(Connection(socket=str(server.socket), user="root")), datadir=str(datadir))
            with Connection(socket=str(server.socket), user="root").connect() as session:
                findings = list(examine_location(session, info))
        assert "is a mount point" in _of(findings, Severity.OK)
    finally:
        subprocess.run(["umount", "-l", str(datadir)], check=True)
