"""Odd places: tables outside the datadir, mount points, replicas; and everything that a restore must refuse."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backupd.model.server_facts import Version
from tests.support.e2e.house import SERVER, House
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.oracle import Sums
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.replica import catch_up, replica_of
from tests.support.servers.server import connect, query
from tests.support.servers.stacks import MYSQL_CLONE, STACKS, Stack, stacks, whole
from tests.support.stores.folders import give_to_database


@contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fingerprint(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Content, inode and time of last change of every file below ``folder``."""
    return Sums(
        {
            path.relative_to(folder).as_posix(): (
                hashlib.sha256(path.read_bytes()).hexdigest(),
                path.stat().st_ino,
                path.stat().st_mtime_ns,
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    )


def test_tables_outside_the_datadir_are_restored_inside_and_the_living_source_is_not_touched(own_house: House) -> None:
    house, server = own_house, own_house.server
    outside = house.base / "outside"
    outside.mkdir()
    give_to_database(outside)
    server.execute(
        "CREATE DATABASE ext",
        f"CREATE TABLE ext.far (id INT PRIMARY KEY, t VARCHAR(100)) ENGINE=InnoDB DATA DIRECTORY='{outside}'",
        "INSERT INTO ext.far SELECT seq, MD5(seq) FROM ext.seq_1_to_5000",
        f"CREATE TABLE ext.parts (id INT PRIMARY KEY) ENGINE=InnoDB PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS "
        f"THAN (10) DATA DIRECTORY='{outside}', PARTITION p1 VALUES LESS THAN MAXVALUE)",
        "INSERT INTO ext.parts SELECT seq FROM ext.seq_1_to_20",
    )
    server.settle()  # what is purged later changes pages of the living source
    server.restart()
    house.backup()
    with server.connect() as connection:
        expected = checksum_everything(connection)
    before = fingerprint(outside)
    assert any(name.endswith(".ibd") for name in before)

    proof = house.ok("test-restore", SERVER)
    assert proof["outcome"] == "proved", proof
    house.restore(house.base / "restored")
    with PrivateServer(datadir=house.base / "restored") as restored:
        restored.execute("UPDATE ext.far SET t = 'changed in the copy'")
        restored.execute("INSERT INTO ext.parts VALUES (0)")
        for path in Path(f"/proc/{restored.pid}/fd").iterdir():
            target = os.path.realpath(path)
            assert not target.startswith(str(outside)), target
        restored.execute("UPDATE ext.far SET t = MD5(id)", "DELETE FROM ext.parts WHERE id = 0")
        with restored.connect() as connection:
            assert checksum_everything(connection) == expected
    assert fingerprint(outside) == before, "a restore touched the living source's files"
    with server.connect() as connection:
        assert checksum_everything(connection) == expected


def test_a_datadir_that_is_a_mount_point_is_filled_in_place(house: House) -> None:
    house.backup()
    with tmpfs(house.base / "disk", "400m") as mount:
        (mount / "lost+found").mkdir()
        house.restore(mount)
        assert os.path.ismount(mount)
        assert (mount / "lost+found").is_dir()
        assert not (mount / ".backupd-restoring").exists()
        with PrivateServer(datadir=mount) as restored, restored.connect() as connection:
            sums = checksum_everything(connection)
        with house.server.connect() as connection:
            assert sums == checksum_everything(connection)


@pytest.mark.parametrize("stack", stacks(*whole(*STACKS)))
def test_a_copy_of_a_replica_connects_nowhere(stack: Stack, short_tmp: Path, keys: Keys) -> None:
    old = stack.version() < Version(8, 0)  # before, what a replica knows of its source is no part of a backup
    where = {"master_info_repository": "TABLE", "relay_log_info_repository": "TABLE"} if old else {}
    with stack.make(tcp=True) as source, replica_of(source, options=where) as replica:
        source.execute(
            "CREATE DATABASE shop", "CREATE TABLE shop.t (id INT PRIMARY KEY)", "INSERT INTO shop.t VALUES (1), (2)"
        )
        catch_up(source, replica)
        replica.create_backup_users()
        (short_tmp / "replica").mkdir()
        give_to_database(short_tmp / "replica")
        house = House(short_tmp / "replica", replica, keys, programs=stack.all_programs())
        if stack is MYSQL_CLONE:
            assert "this server is read_only" in house.fails("check", SERVER).all
            replica.execute("INSTALL PLUGIN clone SONAME 'mysql_clone.so'")
        house.backup()
        replica.stop()
        source.execute("CREATE DATABASE test_tick")

        def dumps() -> int:
            return int(
                source.scalar("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND LIKE 'Binlog%'")
            )

        deadline = time.monotonic() + 300
        while dumps():  # the source notices only later that its replica is gone
            assert time.monotonic() < deadline
            source.execute("CREATE TABLE test_tick.t (id INT)", "DROP TABLE test_tick.t")
            time.sleep(0.1)
        connections = int(source.query("SHOW GLOBAL STATUS LIKE 'Connections'")[0][1])
        outcome = house.ok("restore", SERVER, "--to", "latest", "--datadir", str(house.base / "restored"), "--start")
        try:
            with PrivateServer(binlog=False) as nobody:
                del nobody  # a server's start and stop is time enough for a replica's first connection
            with connect(outcome["started"]["socket"]) as connection:
                assert query(connection, f"SHOW {source.words.replica} STATUS") == []
            assert dumps() == 0
            assert int(source.query("SHOW GLOBAL STATUS LIKE 'Connections'")[0][1]) == connections
        finally:
            end(outcome["started"]["pid"])
        with stack.make(datadir=house.base / "restored", options=where) as real:  # as its own service starts it
            assert real.query(f"SHOW {source.words.replica} STATUS") == []
        assert dumps() == 0
        assert house.ok("test-restore", SERVER)["outcome"] == "proved"
        assert dumps() == 0


def test_encrypted_tables_are_named_by_check_and_carried_as_a_warning(short_tmp: Path, keys: Keys) -> None:
    key_file = short_tmp / "keys.txt"
    key_file.write_text("1;" + "ab" * 32 + "\n")
    give_to_database(key_file)
    key_file.chmod(0o600)
    options = {"plugin_load_add": "file_key_management", "file_key_management_filename": str(key_file)}
    with PrivateServer(options=options) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE vault",
            "CREATE TABLE vault.t (id INT PRIMARY KEY) ENCRYPTED=YES",
            "INSERT INTO vault.t SELECT seq FROM vault.seq_1_to_100",
        )
        house = House(short_tmp, server, keys)
        checked = house.fails("check", SERVER).all
        assert "encrypted" in checked
        assert "encrypts with file_key_management, and the configuration names no key files" in checked
        record = house.backup()
        assert any("encrypted" in text for text in record["warnings"])
        assert f"restore.key_files: [{key_file}]" in house.fails("test-restore", SERVER).all
        house.config.write_text(house.config.read_text().replace("restore: {", f"restore: {{key_files: [{key_file}], "))
        assert "names no key files" not in house.run("check", SERVER).all
        assert house.ok("test-restore", SERVER)["outcome"] == "proved"
        datadir = house.base / "restored"
        outcome = house.ok("restore", SERVER, "--to", "latest", "--datadir", str(datadir), "--start")
        os.kill(outcome["started"]["pid"], 15)
        assert not list(house.base.rglob("backupd-keys*"))


# -- refusals: each before anything is changed, each with the next step


def test_a_datadir_with_files_is_refused(house: House) -> None:
    house.backup()
    target = house.base / "full"
    target.mkdir()
    (target / "precious").write_text("data")
    done = house.fails("restore", SERVER, "--to", "latest", "--datadir", str(target))
    assert "precious" in done.err
    assert [path.name for path in target.iterdir()] == ["precious"]


def test_the_datadir_of_a_running_server_is_refused(house: House) -> None:
    house.backup()
    done = house.fails("restore", SERVER, "--to", "latest", "--datadir", str(house.server.datadir))
    assert str(house.server.pid) in done.err or "running" in done.err
    assert house.server.scalar("SELECT 1") == 1


def test_too_little_disk_is_said_before_the_first_byte(house: House) -> None:
    house.backup()
    with tmpfs(house.base / "disk", "30m") as mount:
        done = house.fails("restore", SERVER, "--to", "latest", "--datadir", str(mount))
        assert "bytes" in done.err or "MiB" in done.err
        assert list(mount.iterdir()) == []


def test_a_server_program_of_another_series_is_refused(house: House) -> None:
    house.backup()
    folder = house.base / "bin"
    folder.mkdir()
    for program in ("mariadbd", "mariadb-backup"):
        path = folder / program
        path.write_text(
            "#!/bin/sh\necho 'mariadbd  Ver 11.4.2-MariaDB for debian-linux-gnu on x86_64' >&2\n"
            "echo 'mariadb-backup based on MariaDB server 11.4.2-MariaDB' >&2\n"
        )
        path.chmod(0o755)
    house.env["PATH"] = f"{folder}:{os.environ['PATH']}"
    done = house.fails("restore", SERVER, "--to", "latest", "--datadir", str(house.base / "restored"), "--start")
    assert "11.4" in done.err
    assert "10.11" in done.err
    assert not (house.base / "restored").exists()


def test_an_unmounted_destination_is_not_mistaken_for_a_new_one(house: House) -> None:
    house.backup()
    house.repository.rename(house.base / "away")
    house.repository.mkdir()
    done = house.fails("backup", SERVER, "--kind", "full")
    assert "mounted" in done.err
    assert list(house.repository.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("2026-01-01T00:00:00Z", "backup:"),
        ("gtid:0-1-999999999", "backup:"),
        ("before-gtid:0-1-5", "backup:"),
        ("binlog.000001:4", "backup:"),
        ("backup:20200101T000000Z-00000000", "no backup"),
    ],
)
def test_a_target_without_a_backup_is_refused_and_the_nearest_are_named(house: House, target: str, word: str) -> None:
    house.backup()
    done = house.fails(
        "restore",
        SERVER,
        "--to",
        target,
        "--datadir",
        str(house.base / "restored"),
        code=2 if target.startswith("backup:") else 1,
    )
    assert word in done.err
    assert not (house.base / "restored").exists()


def test_nonsense_as_a_target_is_wrong_usage(house: House) -> None:
    house.ok("catalog", "upgrade")
    assert "target" in house.fails("plan", SERVER, "--to", "yesterday", code=2).err
