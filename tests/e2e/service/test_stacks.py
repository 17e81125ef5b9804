"""The main job on every kind of server and tool: one suite, the stacks of tests/support/servers/stacks.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest

from backupd.model.server_facts import Version
from tests.support import sample
from tests.support.e2e.house import LONGEST, SERVER, House
from tests.support.keys import Keys
from tests.support.load import Writers, bank_total
from tests.support.oracle import stored, unaltered
from tests.support.sample import ACCOUNT_BALANCE, ACCOUNTS, checksum_everything, describe_everything
from tests.support.servers.server import Server, connect
from tests.support.servers.stacks import MARIADB, MYSQL_XTRABACKUP, STACKS, Stack, binlogs, stacks
from tests.support.stores.folders import give_to_database, short_directory


@pytest.fixture(scope="module", params=stacks(*STACKS))
def stack(request: pytest.FixtureRequest) -> Stack:
    chosen: Stack = request.param
    return chosen


@pytest.fixture(scope="module")
def source(stack: Stack) -> Iterator[Server]:
    with stack.make() as server:
        server.create_backup_users()
        sample.create(server)
        yield server


@pytest.fixture(scope="module")
def stacked(stack: Stack, source: Server, keys: Keys) -> Iterator[House]:
    """One house per stack: its tests leave what they need for themselves only."""
    with short_directory() as base:
        yield House(base, source, keys, programs=stack.programs())


def everything(server: Server) -> tuple[dict[str, int], dict[str, list[str]]]:
    with server.connect() as connection:
        return checksum_everything(connection), describe_everything(connection)


def test_check_finds_the_tool_and_every_privilege(stack: Stack, stacked: House) -> None:
    done = stacked.run("check", SERVER)
    assert done.code == 0, done.all
    assert f"{stack.tool} " in done.all
    assert "has every privilege" in done.all


def test_a_backup_under_load_and_the_binary_log_from_its_position_make_the_source(
    stack: Stack, stacked: House, source: Server
) -> None:
    with Writers(source, 3) as writers:
        record = stacked.backup()
        assert writers.transactions > 0
    target = stacked.base / "restored"
    outcome = stacked.ok("restore", SERVER, "--to", f"backup:{record['id']}", "--datadir", str(target), "--start")
    started = outcome["started"]
    try:
        with connect(started["socket"]) as connection:
            assert bank_total(connection) == ACCOUNTS * ACCOUNT_BALANCE
        _replay(stack, source, record["position"], started["socket"])
        with connect(started["socket"]) as connection:
            assert (checksum_everything(connection), describe_everything(connection)) == everything(source)
    finally:
        os.kill(started["pid"], signal.SIGKILL)


def _replay(stack: Stack, source: Server, position: dict[str, Any], socket: str) -> None:
    printer, client = stack.replay()
    files = [str(path) for path in binlogs(source, position["file"])]
    printed = subprocess.run(
        [printer, "--no-defaults", *stack.skip_gtids, f"--start-position={position['pos']}", *files],
        check=True,
        capture_output=True,
    )
    # What the writers did after the backup: without it, the comparison would say less.
    assert len(printed.stdout) > 1000
    subprocess.run(
        [client, "--no-defaults", "--binary-mode", f"--socket={socket}", "-uroot"],
        input=printed.stdout,
        check=True,
        capture_output=True,
    )


def test_a_test_restore_proves_the_backup_against_its_witness(stacked: House) -> None:
    record = stacked.backup()
    assert not any("were not compared" in text for text in record["warnings"]), record["warnings"]
    proof = stacked.ok("test-restore", SERVER)
    assert proof["backup"] == record["id"]
    assert proof["outcome"] == "proved", json.dumps(proof, indent=1)
    assert proof["tables_compared"] >= 10
    assert not list((stacked.base / "scratch").glob("*/"))


@pytest.mark.skipif(os.geteuid() != 0, reason="the runbook is for root")
def test_the_runbook_followed_word_for_word_gives_the_same_data(stack: Stack, stacked: House, source: Server) -> None:
    record = stacked.backup()
    runbook = stacked.manifest(record["id"]).with_name("RUNBOOK.md").read_text()
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", runbook, re.MULTILINE | re.DOTALL))
    datadir = stacked.base / "by-hand"
    environment = {
        "PATH": stack.path(),
        "LC_ALL": "C.UTF-8",
        "HOME": "/nonexistent",
        "REPOSITORY": str(stacked.repository),
        "DATADIR": str(datadir),
        "GNUPGHOME": str(stacked.keys.secret_home),
    }
    done = subprocess.run(["sh", "-c", script], env=environment, cwd="/", text=True, check=False, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with stack.make(datadir=datadir) as restored:
        assert everything(restored) == everything(source)


def test_each_increment_of_a_chain_is_the_source_as_it_was_then(
    stack: Stack, stacked: House, source: Server, short_tmp: Path
) -> None:
    stacked.backup()
    source.execute(
        "CREATE TABLE shop.rising (id INT PRIMARY KEY, t VARCHAR(100)) ENGINE=InnoDB",
        "CREATE TABLE shop.falling (id INT PRIMARY KEY) ENGINE=InnoDB",
        "INSERT INTO shop.rising VALUES (1, 'one'), (2, 'two')",
    )
    changes = (
        (
            "UPDATE shop.rising SET t = 'eins' WHERE id = 1",
            "INSERT INTO shop.falling VALUES (1)",
            "UPDATE bank.accounts SET balance = balance + 1 WHERE id < 100",
        ),
        (
            "ALTER TABLE shop.rising ADD COLUMN more INT DEFAULT 5",
            "DROP TABLE shop.falling",
            "INSERT INTO shop.rising VALUES (3, 'three', 6)",
        ),
        ("UPDATE bank.accounts SET balance = balance - 1 WHERE id < 100", "DROP TABLE shop.rising"),
    )
    wanted = []
    for statements in changes if stack.increments else changes[:1]:
        source.execute(*statements)
        record = stacked.ok("backup", SERVER, "--kind", "incremental")
        wanted.append((record, everything(source)[0]))
        if not stack.increments:
            assert (record["kind"], bool(record["reason"])) == ("physical-full", True)
    if stack.increments:
        assert [record["kind"] for record, _sums in wanted] == ["physical-incremental"] * 3, [
            record["reason"] for record, _sums in wanted
        ]
    for record, expected in wanted[1:2] if stack.increments else []:
        stacked.restore(short_tmp / record["id"], to=f"backup:{record['id']}")
        with stack.make(datadir=short_tmp / record["id"]) as restored:
            assert everything(restored)[0] == expected
    source.execute("DROP TABLE IF EXISTS shop.rising")


def test_what_its_release_does_not_support_is_refused_by_name_and_nothing_else_is(
    stack: Stack, stacked: House, short_tmp: Path
) -> None:
    stacked.backup()
    release = stack.refused()
    if not release:
        assert stacked.run("plan", SERVER, "--to", "latest").code == 0
        assert stacked.ok("plan", SERVER, "--to", "latest", "--tables", "shop.orders")["way"] == "physical"
        return
    assert release in stacked.run("check", SERVER).all
    assert release in stacked.run("timeline", SERVER).all
    stacked.refuses(
        release, "restore", SERVER, "--to", "latest", "--tables", "shop.orders", "--into", SERVER, "--as", "again"
    )


def ended(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def open_files(process: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(path.readlink()))
    return found


@pytest.mark.parametrize(
    "one", stacks(MARIADB, MYSQL_XTRABACKUP)
)  # CLONE refuses: tests/unit/engine/physical/test_capture.py
def test_tables_with_a_data_directory_come_back_beside_the_new_one_and_the_sources_stay_as_they_are(
    one: Stack, short_tmp: Path, keys: Keys
) -> None:
    outside = short_tmp / "outside"
    outside.mkdir()
    give_to_database(outside)
    known = {"innodb_directories": str(outside)} if not one.mariadb and one.version() >= Version(8, 0) else {}
    with one.make(options=known) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE ext",
            f"CREATE TABLE ext.far (id INT PRIMARY KEY, t VARCHAR(100)) ENGINE=InnoDB DATA DIRECTORY='{outside}'",
            "INSERT INTO ext.far VALUES (1, 'one'), (2, 'two')",
        )
        server.restart()  # its files are as they stay
        house = House(short_tmp, server, keys, programs=one.programs())
        house.backup()
        before, expected = stored(outside), everything(server)[0]
        assert any(name.endswith(".ibd") for name in before)
        assert house.ok("test-restore", SERVER)["outcome"] == "proved"
        if one.mariadb or one.version() >= Version(8, 0):
            house.restore(short_tmp / "d")
        else:  # it would see the source's files and its own, and open neither
            done = house.ok("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "d"), "--start")
            assert any("error 1812" in text for text in done["warnings"])
            os.kill(done["started"]["pid"], signal.SIGTERM)
            while not ended(done["started"]["pid"]):
                time.sleep(0.1)
        unaltered(outside, before)
        if not one.mariadb and one.version() < Version(8, 0):
            # InnoDB opens no tablespace that it finds where its dictionary says, too: as on another host.
            outside.rename(short_tmp / "elsewhere")
        with one.make(datadir=short_tmp / "d", options=dict.fromkeys(known, "")) as restored:
            assert everything(restored)[0] == expected
            assert not any(str(outside) in name for name in open_files(restored.pid))


@pytest.mark.parametrize("one", stacks(MYSQL_XTRABACKUP))
def test_without_a_sandbox_neither_proof_nor_restored_server_touches_the_sources_files_elsewhere(
    one: Stack, short_tmp: Path, keys: Keys
) -> None:
    outside, programs = short_tmp / "outside", short_tmp / "programs"
    outside.mkdir()
    programs.mkdir()
    give_to_database(outside)
    (programs / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (programs / "bwrap").chmod(0o755)
    with one.make() as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE ext",
            f"CREATE TABLE ext.far (id INT PRIMARY KEY) ENGINE=InnoDB DATA DIRECTORY='{outside}'",
            "INSERT INTO ext.far VALUES (1), (2)",
        )
        server.restart()  # its files are as they stay
        house = House(short_tmp, server, keys, programs=one.programs())
        house.backup()
        house.env["PATH"] = f"{programs}:{os.environ['PATH']}"
        before = stored(outside)
        house.run("test-restore", SERVER)  # which opens neither file, and says so
        unaltered(outside, before)
        done = house.run("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "d"), "--start", "--json")
        started = json.loads(done.out)["started"]
        try:
            with connect(started["socket"]) as connection, connection.cursor() as cursor:
                cursor.execute("DROP TABLE IF EXISTS ext.far")
        finally:
            os.kill(started["pid"], signal.SIGKILL)
        unaltered(outside, before)
        assert server.query("SELECT id FROM ext.far") == [(1,), (2,)]


@pytest.mark.parametrize("one", stacks(MYSQL_XTRABACKUP))  # MariaDB's: tests/e2e/stores/test_places.py
def test_tables_that_the_server_encrypts_are_named_and_proved_or_refused(
    one: Stack, short_tmp: Path, keys: Keys
) -> None:
    plugin = {"early_plugin_load": "keyring_file.so", "keyring_file_data": str(short_tmp / "keyring")}
    if one.version() < Version(5, 7, 11):
        with one.make() as server:
            with pytest.raises(pymysql.err.Error):  # the release encrypts nothing
                server.execute("CREATE DATABASE vault", "CREATE TABLE vault.t (id INT PRIMARY KEY) ENCRYPTION='Y'")
        return
    with one.make(options=plugin) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE vault",
            "CREATE TABLE vault.t (id INT PRIMARY KEY) ENGINE=InnoDB ENCRYPTION='Y'",
            "INSERT INTO vault.t VALUES (1)",
        )
        house = House(short_tmp, server, keys, programs=one.programs())
        assert "vault" in house.run("check", SERVER).all
        done = house.run("backup", SERVER, "--kind", "full")
        assert "encrypt" in done.all or "keyring" in done.all, done.all
        if done.code == 0:
            assert house.ok("test-restore", SERVER)["outcome"] == "proved"
        else:
            assert house.backups() == []


def test_a_damaged_object_is_found_and_never_restored(stacked: House) -> None:
    record = stacked.backup()
    named = stacked.manifest(record["id"]).read_text()
    victim = max((path for path in stacked.objects() if path.name in named), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    try:
        found = stacked.fails("verify")
        assert victim.name in found.all
        target = stacked.base / "never"
        refused = stacked.fails("restore", SERVER, "--to", f"backup:{record['id']}", "--datadir", str(target))
        assert victim.name in refused.all
        assert not target.exists() or not (target / "ibdata1").exists()
    finally:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    assert stacked.run("verify").code == 0


def _intents(house: House) -> set[str]:
    return {path.name for path in (house.repository / "intents").glob("*")}


@contextlib.contextmanager
def _fresh(stacked: House, keys: Keys) -> Iterator[House]:
    """Another repository for the same server."""
    with short_directory() as base:
        yield House(base, stacked.server, keys, programs=stacked.programs)


def test_a_killed_service_and_a_killed_server_leave_nothing_that_looks_like_a_backup(
    stacked: House, source: Server, keys: Keys
) -> None:
    with _fresh(stacked, keys) as house:
        house.kill_when(lambda: bool(_intents(house)), "backup", SERVER, "--kind", "full")
        dead = _intents(house)
        with house.popen("backup", SERVER, "--kind", "full") as process:
            deadline = time.monotonic() + LONGEST
            while not _intents(house) - dead:
                assert process.poll() is None, "it ended before the server could be killed"
                assert time.monotonic() < deadline
                time.sleep(0.002)
            source.kill()
            out, err = process.communicate(timeout=LONGEST)
        try:
            assert process.returncode == 1, out + err
            assert "Traceback" not in err
            assert not list(house.repository.glob("servers/*/*/manifest.json"))
            assert not house.backups()
        finally:
            source.start()
        house.backup()
        assert not house.fsck()
        assert not list((house.base / "spool" / "clone").glob("*"))


def test_what_is_not_the_servers_own_is_refused(stack: Stack, stacked: House, short_tmp: Path) -> None:
    stacked.backup()
    full = short_tmp / "full"
    full.mkdir()
    (full / "mine").write_text("precious")
    assert "not empty" in stacked.fails("restore", SERVER, "--to", "latest", "--datadir", str(full)).all
    other = short_tmp / "mysqld"
    other.write_text("#!/bin/sh\necho 'mysqld  Ver 4.1.22 for Linux on x86_64 (MySQL Community Server)'\n")
    other.chmod(0o755)
    stacked.programs = {**stack.programs(), "mysqld": str(other), "mariadbd": str(other)}
    stacked.write()
    try:
        done = stacked.run("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "x"))
        assert done.code != 0
        assert "must not be started on files of" in done.all
        assert not (short_tmp / "x").exists()
    finally:
        stacked.programs = stack.programs()
        stacked.write()


def test_one_table_comes_out_of_a_schema_with_a_fulltext_index_elsewhere(
    stack: Stack, stacked: House, source: Server
) -> None:
    source.execute(
        "CREATE DATABASE words",
        "CREATE TABLE words.plain (id INT PRIMARY KEY, v VARCHAR(20)) ENGINE=InnoDB",
        "INSERT INTO words.plain VALUES (1, 'one'), (2, 'two')",
        "CREATE TABLE words.texts (id INT PRIMARY KEY, v VARCHAR(200), FULLTEXT (v)) ENGINE=InnoDB",
        "INSERT INTO words.texts VALUES (1, 'quick brown fox'), (2, 'lazy dog')",
    )
    try:
        record = stacked.backup()
        for table, rows in (("plain", "(1,'one'),(2,'two')"), ("texts", "(1,'quick brown fox'),(2,'lazy dog')")):
            folder = stacked.base / f"words-{table}"
            stacked.ok(
                "restore",
                SERVER,
                "--to",
                f"backup:{record['id']}",
                "--tables",
                f"words.{table}",
                "--from",
                "physical",
                "--sql",
                str(folder),
            )
            text = "".join(path.read_text() for path in sorted(folder.rglob("*.sql")))
            assert rows in text.replace(", ", ",").replace(" (", "(").replace("\n", "").replace('"', "'"), text
    finally:
        source.execute("DROP DATABASE words")
