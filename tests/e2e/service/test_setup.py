"""`backupd setup` on a real server: from nothing to a proved backup, which brings back what was lost."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.restores.test_point_in_time import started
from tests.support.dice import SOAK
from tests.support.e2e.house import BACKUPD, LONGEST
from tests.support.oracle import same
from tests.support.sample import checksum_everything
from tests.support.servers import warm
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer, mysqld, why_not
from tests.support.servers.server import Server
from tests.support.stores.folders import short_directory

_TRUE_ALL_THE_SAME = {"restore keys", "binlog", "alerts"}
"""What `check` warns of behind a setup without mail and before the service runs: the key that opens backups is on this
host, nothing streams yet, nobody is notified."""


@dataclass(frozen=True)
class Host:
    """``base`` stands for the root of the folders of an installation."""

    base: Path
    server: Server
    path: str = ""

    @property
    def options(self) -> list[str]:
        return [
            *("--config", str(self.base / "etc/backupd/backupd.yaml")),
            *("--state", str(self.base / "var/lib/backupd")),
            *("--restores", str(self.base / "srv/restores")),
            *("--destination", str(self.base / "srv/backups/repository")),
            *("--socket", str(self.server.socket)),
        ]

    @property
    def environment(self) -> dict[str, str]:
        (self.base / "run").mkdir(mode=0o711, exist_ok=True)
        return {
            **os.environ,
            "BACKUPD_CONFIG": str(self.base / "etc/backupd/backupd.yaml"),
            "BACKUPD_RUNTIME": str(self.base / "run"),
            "PATH": f"{self.path}{os.environ['PATH']}",
        }

    def run(self, *words: str) -> tuple[int, Any, str]:
        code, out, err = warm.run([BACKUPD, *words, "--json"], self.environment, LONGEST)
        assert "Traceback" not in err, err
        return code, json.loads(out), err

    def ok(self, *words: str) -> Any:
        code, document, err = self.run(*words)
        assert code == 0, f"{document}\n{err}"
        return document


@pytest.fixture
def host() -> Iterator[Host]:
    with short_directory() as base, PrivateServer() as server:
        fill(server)
        yield Host(base, server)


def fill(server: Server) -> None:
    """InnoDB alone: of other engines `check` has something to say."""
    server.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.orders (id INT AUTO_INCREMENT PRIMARY KEY, v VARCHAR(100))",
        "INSERT INTO shop.orders (v) VALUES ('one'), ('two'), ('three')",
        *["INSERT INTO shop.orders (v) SELECT MD5(id) FROM shop.orders"] * 9,
    )


def traced(host: Host, log: Path) -> tuple[int, str, str]:
    """Setup with a record of every program that it starts, and of their arguments. Files take what it says: an agent
    of gpg that ends a little later would hold a pipe open, and so would the tracer, which is none of its parents."""
    watch = ("strace", "-DDD", "-f", "--seccomp-bpf", "-e", "trace=execve", "-e", "signal=none", "-s", "65536", "-o")
    out, err = log.with_name("out"), log.with_name("err")
    with out.open("wb") as to_out, err.open("wb") as to_err:
        code = subprocess.run(
            [*watch, log, BACKUPD, "setup", "--yes", "--server", "shop", *host.options, "--json"],
            env=host.environment,
            stdin=subprocess.DEVNULL,
            stdout=to_out,
            stderr=to_err,
            check=False,
            timeout=LONGEST,
        ).returncode
    return code, out.read_text(), err.read_text()


def test_from_nothing_to_a_proved_backup(host: Host) -> None:
    made = host.ok("setup", "--yes", "--server", "shop", "--mail-to", "dba@example.com", *host.options)
    assert made["proof"] == "proved", made
    _clean(host)
    code, refused, _err = host.run("setup", "--yes", "--server", "shop", *host.options)
    assert code == 2
    blamed = {problem["field"] for problem in refused["error"]["problems"]}
    assert blamed == {"--config", "--server", "--destination", "--admin-file"}, refused


@SOAK
def test_nothing_secret_is_an_argument_and_what_is_lost_comes_back(host: Host, tmp_path: Path) -> None:
    code, out, err = traced(host, tmp_path / "programs")
    assert code == 0, out + err
    option_file = host.base / "etc/backupd/shop.cnf"
    assert option_file.stat().st_mode & 0o777 == 0o600
    (password,) = re.findall(r'^password="(.+)"$', option_file.read_text(), re.MULTILINE)
    programs = (tmp_path / "programs").read_text()
    assert programs.count("execve(") > 10
    assert password not in programs + out + err
    _brings_back(host, json.loads(out))


def _clean(host: Host) -> None:
    found = host.ok("check")
    assert [one for one in found if one["severity"] == "error"] == []
    assert {one["subject"] for one in found if one["severity"] == "warning"} <= _TRUE_ALL_THE_SAME, found


def _brings_back(host: Host, made: dict[str, Any]) -> None:
    with host.server.connect() as connection:
        then = checksum_everything(connection)
        assert len(then) == 1
        host.server.execute("DROP DATABASE shop")
    there = host.base / "srv/restores/shop"
    outcome = host.ok("restore", "shop", "--to", f"backup:{made['backup']}", "--datadir", str(there), "--start")
    with started(outcome) as connection:
        same(checksum_everything(connection), then)


def test_a_server_without_a_binary_log_is_a_decision(short_tmp: Path) -> None:
    with PrivateServer(binlog=False) as server:
        host = Host(short_tmp, server)
        server.execute(
            "CREATE DATABASE shop", "CREATE TABLE shop.t (id INT PRIMARY KEY)", "INSERT INTO shop.t VALUES (1)"
        )
        code, refused, _err = host.run("setup", "--yes", *host.options)
        assert code == 2
        assert [problem["field"] for problem in refused["error"]["problems"]] == ["--without-binlog"]
        planned = host.ok("setup", "--dry-run", "--without-binlog", *host.options)
        assert "    binlog: {stream: false}" in planned["steps"]
        assert sorted(path.name for path in short_tmp.iterdir()) == ["run"]


def test_nobody_to_ask_changes_nothing(short_tmp: Path, shared_server: PrivateServer) -> None:
    host = Host(short_tmp, shared_server)
    code, refused, _err = host.run("setup", *host.options)
    assert (code, "--yes" in refused["error"]["hint"]) == (2, True)
    printed = host.ok("setup", "--print-sql", "--socket", str(shared_server.socket))
    assert printed["statements"][0] == "CREATE USER backupd@localhost IDENTIFIED BY '...'"
    assert sorted(path.name for path in short_tmp.iterdir()) == ["run"]


@SOAK
def test_somebody_at_a_terminal_types_four_lines(host: Host) -> None:
    """What is typed, and nothing else: the name, the folder, no mail, yes."""
    words = [BACKUPD, "setup", *host.options]
    out = type_in(words, host.environment, ["shop", "", "", "y"])
    assert "proved: restored, checked" in out, out
    _clean(host)


def type_in(words: Sequence[str], environment: dict[str, str], answers: Sequence[str]) -> str:
    """What the command wrote to its terminal, at which one line is typed whenever it asks."""
    pid, terminal = pty.fork()
    if not pid:
        os.execve(words[0], list(words), environment)
    out, left, deadline = b"", list(answers), time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            more = os.read(terminal, 65536)
        except OSError:
            break
        out += more
        if left and re.search(rb"(\]|none\)): $", out):
            os.write(terminal, left.pop(0).encode() + b"\n")
            out += b"\n"
    _pid, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, out.decode()
    return out.decode()


@SOAK
def test_a_mysql_server_is_set_up_likewise() -> None:
    if why := why_not():
        pytest.skip(why)
    with short_directory() as base, MySQLServer() as server:
        fill(server)
        host = Host(base, server, f"{Path(mysqld()).parent}:")
        made = host.ok("setup", "--yes", "--server", "shop", *host.options)
        assert made["proof"] == "proved", made
        _clean(host)
        _brings_back(host, made)
