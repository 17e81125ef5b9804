"""Every statement that changes definitions, while a physical backup runs: the copy is the server at its position."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e.definitions import ENGINES, Gate, changes, tables
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.oracle import same
from tests.support.sample import checksum_everything, describe_everything
from tests.support.servers.backups import the_tool
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import Server

_MIB = 1024 * 1024


@pytest.fixture
def busy(short_tmp: Path, keys: Keys) -> Iterator[House]:
    """A server whose stream takes a while."""
    with PrivateServer(options={"innodb_flush_log_at_trx_commit": 0, "sync_binlog": 0}) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE a_filler",
            "CREATE TABLE a_filler.f (i INT PRIMARY KEY, t LONGTEXT)",
            "INSERT INTO a_filler.f SELECT seq, REPEAT(UUID(), 20000) FROM a_filler.seq_1_to_12",
        )
        yield House(short_tmp, server, keys, policy_extra="witness: {enabled: false}\n")


def _everything(server: Server) -> dict[str, Any]:
    with server.connect() as connection:
        return {"sums": checksum_everything(connection), "others": describe_everything(connection)}


def _restored(house: House) -> dict[str, Any]:
    house.restore(house.base / "restored")
    with PrivateServer(datadir=house.base / "restored") as copy:
        return _everything(copy)


def test_every_statement_during_a_full_backup(busy: House, short_tmp: Path) -> None:
    """Twice: while the tool reads its first file, and after it has read some tables of InnoDB."""
    gate = Gate(short_tmp / "gate", 2 * _MIB, 14 * _MIB)
    server = busy.server
    schemas = [(f"s{stop}_{engine.lower()}", engine, stop) for stop in (2 * _MIB, 14 * _MIB) for engine in ENGINES]
    for schema, engine, _stop in schemas:
        server.execute(*tables(server, schema, engine))

    def change(now: int) -> None:
        for schema, engine, stop in schemas:
            if stop == now:
                server.execute(*changes(server, schema, engine, exchanges=False))

    done = gate.run(
        busy,
        "backup",
        SERVER,
        "--kind",
        "full",
        "--json",
        at={stop: lambda stop=stop: change(stop) for stop in (2 * _MIB, 14 * _MIB)},  # type: ignore[misc]
    )
    assert done.code == 0, done.all
    assert done.json["tables_missing"] == 0
    for schema, engine, _stop in schemas:
        if engine == "InnoDB":
            server.execute(f"DROP TABLE {schema}.emptyspace")  # has no checksum, here nor there
    expected = _everything(server)
    busy.restore(busy.base / "restored")
    with PrivateServer(datadir=busy.base / "restored") as copy:
        for schema, engine, _stop in schemas:
            if engine == "InnoDB":
                copy.execute(f"DROP TABLE {schema}.emptyspace")
        found = _everything(copy)
    same(found["sums"], expected["sums"])
    same(found["others"], expected["others"])
    assert busy.fsck() == []


def test_aria_tables_that_are_emptied_or_filled_behind_their_copy_are_in_the_backup_as_they_are(
    busy: House, short_tmp: Path
) -> None:
    """The tool's prepare replays the log onto the copy of before: rows of two times."""
    gate = Gate(short_tmp / "gate", 1, after=("emptied.MAD", "filled.MAD", "parted#P#p1.MAD", "untouched.MAD"))
    server = busy.server
    parts = "PARTITION BY RANGE (i) (PARTITION p0 VALUES LESS THAN (10), PARTITION p1 VALUES LESS THAN MAXVALUE)"
    server.execute(
        "CREATE DATABASE d",
        *(f"CREATE TABLE d.{name} (i INT, t VARCHAR(40)) ENGINE=Aria" for name in ("emptied", "filled", "untouched")),
        f"CREATE TABLE d.parted (i INT, t VARCHAR(40)) ENGINE=Aria {parts}",
        *(
            f"INSERT INTO d.{name} SELECT seq, 'before' FROM d.seq_1_to_30"
            for name in ("emptied", "parted", "untouched")
        ),
        "FLUSH TABLES",
    )

    def change() -> None:
        server.execute(
            "TRUNCATE TABLE d.emptied",
            "INSERT INTO d.emptied VALUES (1, 'anew')",
            "INSERT INTO d.filled SELECT seq, 'anew' FROM d.seq_1_to_2000",
            "ALTER TABLE d.parted TRUNCATE PARTITION p1",
            "INSERT INTO d.parted VALUES (20, 'anew')",
            "INSERT INTO d.untouched VALUES (31, 'more')",
        )

    done = gate.run(busy, "backup", SERVER, "--kind", "full", "--json", at={1: change})
    assert done.code == 0, done.all
    assert done.json["tables_missing"] == 0
    expected = _everything(server)
    same(_restored(busy), expected)
    assert busy.fsck() == []


def test_an_aria_table_that_is_emptied_and_written_to_all_the_time_is_whole_or_named_as_missing(
    busy: House, short_tmp: Path
) -> None:
    gate = Gate(short_tmp / "gate", 1, after=("emptied.MAD",))
    server, over = busy.server, threading.Event()
    server.execute(
        "CREATE DATABASE d",
        "CREATE TABLE d.emptied (i INT, t VARCHAR(40)) ENGINE=Aria",
        "INSERT INTO d.emptied SELECT seq, 'before' FROM d.seq_1_to_30",
        "FLUSH TABLES",
    )

    def write() -> None:
        with server.connect() as connection, connection.cursor() as cursor:
            while not over.is_set():
                cursor.execute("INSERT INTO d.emptied VALUES (1, 'anew')")
                cursor.execute("FLUSH TABLES d.emptied")

    thread = threading.Thread(target=write)

    def change() -> None:
        server.execute("TRUNCATE TABLE d.emptied")
        thread.start()

    try:
        done = gate.run(busy, "backup", SERVER, "--kind", "full", "--json", at={1: change})
    finally:
        over.set()
        thread.join()
    assert done.code == 0, done.all
    busy.restore(busy.base / "restored")
    with PrivateServer(datadir=busy.base / "restored") as copy:
        there = copy.query("SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = 'd'")
        assert bool(there) is (done.json["tables_missing"] == 0)
        assert not there or copy.query("SELECT DISTINCT t FROM d.emptied") == [("anew",)]


def test_tables_that_are_made_again_each_moment_are_in_the_backup(busy: House, short_tmp: Path) -> None:
    """Until it ends, and InnoDB's in a database that is made again. None is ever missing, whatever version it is."""
    server, over = busy.server, threading.Event()
    server.execute("CREATE DATABASE v", "CREATE DATABASE m", "CREATE TABLE v.a (i INT) ENGINE=InnoDB")

    def churn() -> None:
        number = 0
        while not over.is_set():
            number += 1
            for engine in ENGINES:
                server.execute(
                    f"CREATE OR REPLACE TABLE m.r_{engine} (i INT) ENGINE={engine}",
                    f"INSERT INTO m.r_{engine} VALUES ({number})",
                    f"DROP TABLE IF EXISTS m.d_{engine}",
                    f"CREATE TABLE m.d_{engine} (i INT) ENGINE={engine}",
                    f"CREATE TABLE m.t (i INT) ENGINE={engine}",
                    f"DROP TABLE IF EXISTS m.o_{engine}",
                    f"RENAME TABLE m.t TO m.o_{engine}",
                )
            server.execute(
                "DROP DATABASE v",
                "CREATE DATABASE v",
                "CREATE TABLE v.a (i INT) ENGINE=InnoDB",
                f"INSERT INTO v.a VALUES ({number})",
            )
            over.wait(0.3)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        gate = Gate(short_tmp / "gate", 2 * _MIB, 14 * _MIB)
        done = gate.run(
            busy,
            "backup",
            SERVER,
            "--kind",
            "full",
            "--json",
            at={stop: lambda: time.sleep(1) for stop in (2 * _MIB, 14 * _MIB)},
        )
    finally:
        over.set()
        thread.join()
    assert done.code == 0, done.all
    assert done.json["tables_missing"] == 0
    found = _restored(busy)["sums"]
    # A moment between DROP and CREATE has no such table; what was made with CREATE OR REPLACE is always there.
    assert {f"`m`.`r_{engine}`" for engine in ENGINES} <= set(found)


def test_innodb_tables_that_swap_names_during_an_increment_make_it_a_full_backup(busy: House, short_tmp: Path) -> None:
    server = busy.server
    server.execute(
        "CREATE DATABASE m",
        "CREATE TABLE m.a (i INT) ENGINE=InnoDB",
        "CREATE TABLE m.b LIKE m.a",
        "INSERT INTO m.a VALUES (1)",
        "INSERT INTO m.b VALUES (2)",
        "CREATE TABLE m.x LIKE m.a",
        "CREATE TABLE m.p (i INT) ENGINE=InnoDB PARTITION BY RANGE (i) (PARTITION p0 VALUES LESS THAN (9))",
        "INSERT INTO m.x VALUES (3)",
        "INSERT INTO m.p VALUES (4)",
    )
    server.settle()  # or the tool takes them for tables that were made meanwhile
    server.restart()
    busy.backup()
    server.execute("UPDATE a_filler.f SET t = REVERSE(t)")
    gate = Gate(short_tmp / "gate", 65536, after=("m/a.ibd.delta", "m/b.ibd.delta"))
    done = gate.run(
        busy,
        "backup",
        SERVER,
        "--kind",
        "incremental",
        "--json",
        at={
            65536: lambda: server.execute(
                "RENAME TABLE m.a TO m.t, m.b TO m.a, m.t TO m.b",
                "ALTER TABLE m.p EXCHANGE PARTITION p0 WITH TABLE m.x",
            )
        },
    )
    assert done.code == 0, done.all
    assert done.json["kind"] == "physical-full"
    assert "exchanged their names" in done.json["reason"]
    assert "m.a, m.b, m.p, m.x" in done.json["reason"]
    expected = _everything(server)["sums"]
    same(_restored(busy)["sums"], expected)


def test_a_table_that_left_its_name_to_a_new_one_keeps_its_rows_in_an_increment(busy: House, short_tmp: Path) -> None:
    """The daily turn of a log: RENAME log TO old, CREATE log. The new one is made while the increment is taken, and the
    tool's prepare would remove the file that the old one has in the backup before."""
    server = busy.server
    names = ("before", "during", "gone", "parted")
    for name in names:
        parts = "PARTITION BY HASH (i) PARTITIONS 2" if name == "parted" else ""
        server.execute(
            f"CREATE TABLE a_filler.{name} (i INT PRIMARY KEY, t VARCHAR(900)) {parts}",
            f"INSERT INTO a_filler.{name} SELECT seq, REPEAT(MD5(seq), 20) FROM a_filler.seq_1_to_500",
        )
    server.settle()  # or the tool takes them for tables that were made meanwhile
    server.restart()
    busy.backup()
    server.execute("UPDATE a_filler.f SET t = REVERSE(t)")
    turn = {
        name: (
            f"RENAME TABLE a_filler.{name} TO a_filler.{name}_old",
            f"CREATE TABLE a_filler.{name} LIKE a_filler.{name}_old",
            f"INSERT INTO a_filler.{name} VALUES (1, 'new')",
        )
        for name in names
    }
    server.execute(*(turn[name][0] for name in names if name != "during"))
    gate = Gate(short_tmp / "gate", 65536)
    done = gate.run(
        busy,
        "backup",
        SERVER,
        "--kind",
        "incremental",
        "--json",
        at={
            65536: lambda: server.execute(
                turn["during"][0],
                *(statement for name in names for statement in turn[name][1:]),
                "DROP TABLE a_filler.gone",
            )
        },
    )
    assert done.code == 0, done.all
    expected = _everything(server)["sums"]
    same(_restored(busy)["sums"], expected)
    runbook = (busy.manifest(done.json["id"]).parent / "RUNBOOK.md").read_text()
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", runbook, re.MULTILINE | re.DOTALL))
    by_hand = subprocess.run(
        ["sh", "-c", script],
        cwd="/",
        text=True,
        check=False,
        capture_output=True,
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "REPOSITORY": str(busy.repository),
            "LC_ALL": "C.UTF-8",
            "DATADIR": str(short_tmp / "by-hand"),
            "GNUPGHOME": str(busy.keys.secret_home),
            "HOME": "/nonexistent",
        },
    )
    assert by_hand.returncode == 0, by_hand.stdout + by_hand.stderr
    with PrivateServer(datadir=short_tmp / "by-hand") as copy:
        same(_everything(copy)["sums"], expected)


def test_a_backup_whose_tool_fails_over_a_dropped_partition_is_taken_again(busy: House, short_tmp: Path) -> None:
    """As it does at a moment that nobody can choose: between its list of Aria's tables and the first byte of one."""
    tool = short_tmp / "mariadb-backup"
    tool.write_text(
        f'#!/bin/bash\ncase "$*" in *--version*) [ -w {short_tmp} ] || exit 3;; esac\n'  # it is for no sandbox
        f'case "$*" in *--stream*) if [ ! -e {short_tmp}/failed ]; then touch {short_tmp}/failed\n'
        "echo \"mariadb-backup: Can't find file: './m/p#P#p0.MAI' (errno: 2 No such file or directory)\" >&2\n"
        f'exit 1; fi;; esac\nexec {the_tool().tool.path} "$@"\n'
    )
    tool.chmod(0o755)
    short_tmp.chmod(0o777)
    busy.programs = {"mariadb-backup": str(tool)}
    busy.write()
    record = busy.backup()
    assert [warning for warning in record["warnings"] if "was taken again" in warning]
    assert busy.fsck() == []


def test_a_backup_beside_an_exchange_of_partitions_is_taken_again(busy: House, short_tmp: Path) -> None:
    """Behind which the tool looks for no change of tables that it has copied."""
    server = busy.server
    server.execute(
        "CREATE DATABASE m",
        *(
            statement
            for engine in ("Aria", "InnoDB")
            for statement in (
                f"CREATE TABLE m.x_{engine} (i INT) ENGINE={engine}",
                f"INSERT INTO m.x_{engine} VALUES (1)",
                f"CREATE TABLE m.t_{engine} (i INT) ENGINE={engine}",
                f"CREATE TABLE m.p_{engine} LIKE m.t_{engine}",
                f"ALTER TABLE m.p_{engine} PARTITION BY RANGE (i) (PARTITION p0 VALUES LESS THAN (9))",
            )
        ),
    )
    gate = Gate(short_tmp / "gate", 65536, after=("m/x_Aria.MAD",))
    done = gate.run(
        busy,
        "backup",
        SERVER,
        "--kind",
        "full",
        "--json",
        at={
            65536: lambda: server.execute(
                "ALTER TABLE m.p_InnoDB EXCHANGE PARTITION p0 WITH TABLE m.t_InnoDB",
                "DROP TABLE m.x_Aria",
                "CREATE TABLE m.x_Aria (i INT) ENGINE=Aria",
                "INSERT INTO m.x_Aria VALUES (2), (3)",
            )
        },
    )
    assert done.code == 0, done.all
    assert "m.x_Aria may have their earlier definition in it" in done.all
    same(_restored(busy)["sums"], _everything(server)["sums"])
