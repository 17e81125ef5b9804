"""A backup host that has nothing of the database host but a port: what every output says there is true."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from backupd.app.alerting.service import report_now
from tests.support import sample
from tests.support.e2e.archived import wired
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import serving, until
from tests.support.keys import Keys
from tests.support.servers.mariadb import SERVICE_PRIVILEGES, PrivateServer
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER
from tests.support.service.mail_server import MailBox, mail_server
from tests.support.service.serving import free_port

POLICY = """\
logical: {schedule: "0 1 * * *", tables: {include: ["*.*"]}}
binlog: {checkpoint: 1s}
destinations: {required: [local]}
objectives: {rpo: 1m}
timing: {jitter: 30m}
retention: {local: {recovery_window: 14d}}
"""
"""That of docs/installing.md, with one destination."""


@pytest.fixture
def house(short_tmp: Path, keys: Keys) -> Iterator[House]:
    """Its commands run without the server's folder and the physical tool, and on a host of another name."""
    with PrivateServer(tcp=True) as server:
        server.execute(
            f"CREATE USER {SERVICE_USER}@'127.0.0.1' IDENTIFIED BY '{SERVICE_PASSWORD}'",
            f"GRANT {', '.join(SERVICE_PRIVILEGES)} ON *.* TO {SERVICE_USER}@'127.0.0.1'",
        )
        sample.create(server)
        house = House(short_tmp, server, keys)
        (house.base / "policies" / "gold.yaml").write_text(POLICY)
        client = house.base / "client.cnf"
        client.touch(0o600)
        client.write_text(f"[client]\nuser={SERVICE_USER}\npassword={SERVICE_PASSWORD}\n")
        house.config.write_text(
            re.sub(
                rf"{SERVER}: {{.*}}",
                f"{SERVER}: {{host: 127.0.0.1, port: {server.port}, defaults_file: {client}, policy: gold}}",
                house.config.read_text(),
            )
        )
        tools = filter(None, map(shutil.which, ("mariadb-backup", "mariabackup")))
        hidden = [f"mount --bind /dev/null {path}" for path in tools]
        house.under = (
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            " && ".join(("hostname backup1", f"mount -t tmpfs none {server.base}", *hidden, 'exec "$@"')),
            "sh",
        )
        yield house


def test_what_is_said_where_only_a_port_of_the_database_host_is_reached_is_true(house: House) -> None:
    box, port = MailBox(port=free_port()), free_port()
    house.config.write_text(
        house.config.read_text().replace(
            "api: {enabled: false}\n",
            f"api: {{listen: '127.0.0.1:{port}'}}\nalerts:\n  email: {{smtp: {box.url}, "
            "from: backupd@example.com, to: [dba@example.com]}\n",
        )
    )
    with mail_server(box, port=box.port), serving(house, under=house.under) as service:
        refused = house.fails("backup", SERVER).all
        assert "a physical backup reads the server's files, so it must run on the database host" in refused
        assert f"take a dump from here: backupd backup {SERVER} --kind logical" in refused
        assert "nothing of shop-db1 is recoverable" in house.run("timeline", SERVER).out
        assert house.ok("backup", SERVER, "--kind", "logical")["state"] == "complete"
        house.server.execute(
            "CREATE DATABASE late", "CREATE TABLE late.t (a INT PRIMARY KEY)", "INSERT INTO late.t VALUES (7)"
        )
        written = datetime.now(UTC).isoformat()
        until(lambda: str(house.ok("timeline", SERVER)["latest"]) > written, lambda: "the archive of the row")

        checked = house.run("check", SERVER)
        assert checked.code == 0, checked.all
        assert not re.search("physical backup|datadir|mariadb-backup", checked.all), checked.all
        assert "the binary log is received up to its end" in checked.out
        told = house.run("timeline", SERVER).out
        assert "tables of shop-db1 are recoverable up to" in told
        assert "the whole server is not recoverable" in told
        assert "objectives.rpo is 1m: kept" in told
        for command in (["plan"], ["test-restore"], ["restore", "--datadir", str(house.base / "whole")]):
            whole = house.fails(command[0], SERVER, *command[1:], "--to", "latest").all
            assert "cannot be restored as a whole: it has dumps only" in whole
            assert "--kind full" not in whole
        house.ok("restore", SERVER, "--to", "latest", "--tables", "late.*", "--sql", str(house.base / "sql"))
        assert any("(7)" in path.read_text() for path in (house.base / "sql").rglob("*.sql")), "from the stream"

        secret = house.ok("token", "create", "--name", "eyes", "--role", "viewer")["token"]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", follow_redirects=True, timeout=60) as web:
            assert web.post("/login", data={"token": secret, "next": "/"}).status_code == 200
            page = re.sub(r"<[^>]*>", " ", web.get(f"/servers/{SERVER}").text)
            overview = web.get("/").text
            metrics = web.get("/metrics").text
        assert "Tables recoverable up to" in page
        assert "the server as a whole is not: dumps restore tables" in page
        assert "tables only" in overview
        assert "--kind full" not in page + overview
        assert f'backupd_server_recoverable{{server="{SERVER}"}} 0' in metrics
        assert f'backupd_server_tables_recoverable{{server="{SERVER}"}} 1' in metrics
        assert house.ok("alerts") == []
        assert service.stop() == 0
    assert box.subjects() == [], "nothing here is wrong"
    with wired(house) as wiring:
        letter = report_now(wiring, datetime.now(UTC))
    assert "tables only" in str(letter)
    assert "--kind full" not in str(letter)
