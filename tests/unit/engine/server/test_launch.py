"""Servers that we start: fresh ones, copies of replicas, broken ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backupd.engine.empty_system import initialise
from backupd.engine.server.launch import (
    LaunchedServer,
    ServerConfig,
    log_tail,
    not_started,
    option_text,
    options_for_copy,
)
from backupd.engine.server.sandbox import is_available
from backupd.engine.toolset import find_tool
from backupd.model.errors import ServerError, ToolError
from tests.support.servers.backups import children
from tests.support.servers.datadir import initialise as copy_template
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.processes import until

PROGRAM = find_tool(("mariadbd",)).path


def config(place: Path, **changes: object) -> ServerConfig:
    values: dict[str, object] = {
        "program": PROGRAM,
        "datadir": place / "data",
        "directory": place / "run",
        "memory": 64 << 20,
    }
    return ServerConfig(**(values | changes))  # type: ignore[arg-type]  # tests change any field


def test_a_fresh_server_is_made_started_used_and_stopped(short_tmp: Path) -> None:
    initialise(short_tmp / "data")
    with LaunchedServer(config(short_tmp, skip_grants=False)) as server, server.connection.connect() as session:
        assert server.running
        assert server.pid is not None
        assert session.scalar("SELECT CURRENT_USER()") == "root@localhost"
        assert session.query("SELECT schema_name FROM information_schema.schemata WHERE schema_name = 'test'") == []
        session.execute("CREATE DATABASE d")
        session.execute("CREATE TABLE d.t (i INT PRIMARY KEY)")
        place = str(short_tmp)
    assert not server.running
    assert server.pid is None
    until(lambda: children(place) == [])
    assert "Shutdown complete" in log_tail(short_tmp / "run/error.log")
    with LaunchedServer(config(short_tmp)) as again, again.connection.connect() as session:
        assert session.scalar("SELECT COUNT(*) FROM d.t") == 0


def test_it_runs_as_the_database_user_and_listens_on_its_socket_only(short_tmp: Path) -> None:
    copy_template(short_tmp / "data")
    with LaunchedServer(config(short_tmp)) as server:
        status = Path(f"/proc/{server.pid}/status").read_text()
        if os.geteuid() == 0:
            assert f"Uid:\t{(short_tmp / 'data').stat().st_uid}\t" in status
            assert (short_tmp / "data").stat().st_uid != 0
        listening = Path(f"/proc/{server.pid}/net/tcp").read_text().splitlines()[1:]
        if server.sandboxed:
            assert listening == []
        assert (short_tmp / "run/my.cnf").stat().st_mode & 0o777 == 0o600
        assert (short_tmp / "run").stat().st_mode & 0o777 == 0o700
        with server.connection.connect() as session:
            variables = dict(session.query("SHOW GLOBAL VARIABLES"))
    assert variables["skip_networking"] == "ON"
    assert variables["log_bin"] == "OFF"
    assert variables["event_scheduler"] in ("OFF", "DISABLED")
    assert variables["local_infile"] == "OFF"


def test_a_copy_of_a_replica_connects_nowhere_and_runs_no_events(short_tmp: Path) -> None:
    with PrivateServer(tcp=True) as source, PrivateServer(options={"event_scheduler": "ON"}) as replica:
        source.execute(
            "CREATE USER repl@'%' IDENTIFIED BY 'r-s3cret'",
            "GRANT REPLICATION SLAVE ON *.* TO repl@'%'",
            "CREATE DATABASE shop",
            "CREATE TABLE shop.t (i INT PRIMARY KEY)",
        )
        replica.execute(
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={source.port}, MASTER_USER='repl',"
            " MASTER_PASSWORD='r-s3cret', MASTER_CONNECT_RETRY=1, MASTER_USE_GTID=slave_pos",
            "START SLAVE",
        )
        until(lambda: bool(replica.query("SHOW TABLES FROM shop")) if _has(replica, "shop") else False)
        replica.execute(
            "SET SESSION sql_log_bin = 0",
            "CREATE TABLE shop.ticks (at DATETIME(6))",
            "CREATE EVENT shop.tick ON SCHEDULE EVERY 1 SECOND DO INSERT INTO shop.ticks VALUES (NOW(6))",
        )
        until(lambda: replica.scalar("SELECT COUNT(*) FROM shop.ticks") > 0)
        replica.stop()
        shutil.copytree(replica.datadir, short_tmp / "data")
        for path in (short_tmp / "data").rglob("*"):
            shutil.chown(path, "mysql", "mysql")
        shutil.chown(short_tmp / "data", "mysql", "mysql")
        source.execute("INSERT INTO shop.t VALUES (1)")
        served = source.scalar(
            "SELECT VARIABLE_VALUE FROM information_schema.global_status WHERE VARIABLE_NAME = 'Connections'"
        )
        same_relay_log = {"relay_log": "relay"}  # else it could not even try
        with (
            LaunchedServer(config(short_tmp, skip_grants=False, options=same_relay_log)) as copy,
            copy.connection.connect() as session,
        ):
            ticks = session.scalar("SELECT COUNT(*) FROM shop.ticks")
            (status,) = session.records("SHOW SLAVE STATUS")
            assert status["Master_Host"] == "127.0.0.1"
            assert (status["Slave_IO_Running"], status["Slave_SQL_Running"]) == ("No", "No")
            # Even told to, it reaches nobody.
            if copy.sandboxed:
                session.execute("START SLAVE")
                until(lambda: session.records("SHOW SLAVE STATUS")[0]["Last_IO_Errno"] == 2003)
            deadline = time.monotonic() + 1.5  # longer than the event's period
            while time.monotonic() < deadline:
                assert session.scalar("SELECT COUNT(*) FROM shop.ticks") == ticks
                time.sleep(0.1)
            assert session.scalar("SELECT COUNT(*) FROM shop.t") == 0
        after = source.scalar(
            "SELECT VARIABLE_VALUE FROM information_schema.global_status WHERE VARIABLE_NAME = 'Connections'"
        )
        assert after == served


@pytest.mark.skipif(not is_available(), reason="bubblewrap cannot confine anything on this host")
def test_it_cannot_write_or_read_outside_of_its_folders(short_tmp: Path) -> None:
    outside = short_tmp / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    (outside / "file").write_text("text")
    copy_template(short_tmp / "data")
    with LaunchedServer(config(short_tmp)) as server, server.connection.connect() as session:
        session.execute("CREATE DATABASE d")
        assert session.scalar(f"SELECT LOAD_FILE('{outside}/file')") is None
        for statement in (
            f"SELECT 1 INTO OUTFILE '{outside}/x'",
            f"CREATE TABLE d.t (i INT PRIMARY KEY) DATA DIRECTORY='{outside}'",
        ):
            with pytest.raises(ServerError):
                session.execute(statement)
    assert [path.name for path in outside.iterdir()] == ["file"]


def test_killing_us_kills_the_server(short_tmp: Path) -> None:
    copy_template(short_tmp / "data")
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from backupd.engine.server.launch import LaunchedServer, ServerConfig\n"
        f"place = Path({str(short_tmp)!r})\n"
        f"server = LaunchedServer(ServerConfig({PROGRAM!r}, place / 'data', place / 'run', memory=64 << 20)).start()\n"
        "print(server.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        until(lambda: not Path(f"/proc/{pid}").exists() and not children(str(short_tmp / "run")))


def test_a_server_that_does_not_come_up_is_an_error_with_its_own_last_words(short_tmp: Path) -> None:
    copy_template(short_tmp / "data")
    (short_tmp / "data/ibdata1").write_bytes(b"\0" * 16384)
    with pytest.raises(ToolError, match="mariadbd did not start on") as caught, LaunchedServer(config(short_tmp)):
        pass
    assert "ibdata1" in caught.value.detail
    until(lambda: children(str(short_tmp / "run")) == [])


def test_a_server_that_is_too_slow_is_ended(short_tmp: Path) -> None:
    slow = short_tmp / "mariadbd"
    slow.write_text("#!/bin/sh\necho busy with recovery\nexec sleep 1000\n")
    slow.chmod(0o755)
    (short_tmp / "data").mkdir()
    server = LaunchedServer(config(short_tmp, program=str(slow)), start_seconds=3)
    with pytest.raises(ToolError, match=r"did not answer within 3 s") as caught:
        server.start()
    assert "busy with recovery" in caught.value.detail
    assert not server.running


def test_a_crash_is_not_a_clean_stop(short_tmp: Path) -> None:
    copy_template(short_tmp / "data")
    server = LaunchedServer(config(short_tmp)).start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.running)
    server.stop()  # nothing is left to stop
    with LaunchedServer(config(short_tmp)) as recovered:
        assert recovered.running


def test_an_error_inside_the_context_ends_the_server_too(short_tmp: Path) -> None:
    copy_template(short_tmp / "data")
    server = LaunchedServer(config(short_tmp))

    def fail() -> None:
        with server:
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert not server.running
    until(lambda: children(str(short_tmp / "run")) == [])


def test_a_socket_path_that_no_server_could_open_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="longer than 107 bytes"):
        LaunchedServer(config(tmp_path / ("x" * 120)))


def test_the_rule_cannot_be_overridden_and_what_a_copy_needs_is_taken(short_tmp: Path) -> None:
    (short_tmp / "backup-my.cnf").write_text(
        "[mysqld]\ninnodb_page_size=8192\ninnodb_data_file_path=ibdata1:12M;ibdata2:10M:autoextend\n"
        "innodb_undo_directory=/srv/undo\ninnodb_undo_tablespaces=3\ninnodb_log_file_size=1\n"
        "plugin_load=file_key_management\nfile_key_management_filename=/etc/keys\n"
    )
    options = options_for_copy(
        short_tmp,
        {
            "lower_case_table_names": "1",
            "sql_mode": "ANSI",
            "log_bin": "ON",
            "replicate_do_db": "x",
            "wsrep_on": "ON",
            "datadir": "/var/lib/mysql",
            "server_audit_logging": "ON",
        },
    )
    assert options == {
        "innodb_page_size": "8192",
        "innodb_data_file_path": "ibdata1:12M;ibdata2:10M:autoextend",
        "innodb_undo_tablespaces": "3",
        "plugin_load_add": "file_key_management",
        "file_key_management_filename": "/etc/keys",
        "lower_case_table_names": "1",
        "loose_sql_mode": "ANSI",
    }
    text = option_text(
        config(
            short_tmp,
            options={
                **options,
                "event-scheduler": "ON",
                "datadir": "/var/lib/mysql",
                "port": "3306",
                "innodb_undo_directory": "/srv/undo",
            },
        )
    )
    lines = text.splitlines()
    assert f'datadir="{short_tmp}/data"' in lines
    assert 'event_scheduler="OFF"' in lines
    assert 'innodb_undo_directory="./"' in lines
    assert 'innodb_page_size="8192"' in lines
    for forbidden in ("/var/lib/mysql", "3306", "/srv/undo", '"ON"'):
        assert forbidden not in text
    assert options_for_copy(short_tmp / "nowhere", {}) == {}


def test_the_file_systems_lost_and_found_is_no_schema(short_tmp: Path) -> None:
    copy_template(short_tmp / "data")
    (short_tmp / "data/lost+found").mkdir(mode=0o700)
    with LaunchedServer(config(short_tmp)) as server, server.connection.connect() as session:
        assert not [name for (name,) in session.query("SHOW DATABASES") if "lost" in str(name)]


def _has(server: PrivateServer, schema: str) -> bool:
    return bool(server.query("SELECT 1 FROM information_schema.schemata WHERE schema_name = %s", (schema,)))


def test_a_second_server_on_one_data_directory_is_named_as_that(short_tmp: Path) -> None:
    where = config(short_tmp)
    where.directory.mkdir(parents=True, exist_ok=True)
    where.error_log.write_text("[ERROR] InnoDB: Unable to lock ./ibdata1 error: 11\n")
    error = not_started(where, "mariadbd did not start", "see its error log")
    assert error.message == f"another server has the data directory {where.datadir} open"
    where.error_log.write_text("[ERROR] unknown variable\n")
    assert not_started(where, "mariadbd did not start", "see its error log").message == "mariadbd did not start"
