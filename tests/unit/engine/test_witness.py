"""Witnesses: what they hold, what they leave out, and whose moment they show."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pymysql
import pytest

from backupd.engine import witness as module
from backupd.engine.server.snapshot import Snapshot
from backupd.engine.sql.client import Connection
from backupd.engine.witness import (
    LockWindowWitness,
    checksums,
    object_counts,
    same_moment,
    take,
)
from backupd.model.errors import ServerError
from backupd.model.job import Progress
from backupd.model.proof import Witness
from backupd.model.server_facts import Position
from backupd.model.table import TableName
from tests.support import sample
from tests.support.dice import rounds
from tests.support.load import Writers
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_PRIVILEGES, SERVICE_USER, PrivateServer
from tests.support.servers.replica import replica_of

PASSWORD = "Witness-s3cret-1"


def _witness_user(server: PrivateServer) -> Connection:
    server.create_user("witness", PASSWORD, [*SERVICE_PRIVILEGES, "BINLOG ADMIN"])
    return Connection(socket=str(server.socket), user="witness", password=PASSWORD)


def _service(server: PrivateServer) -> Connection:
    return Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)


def _root(server: PrivateServer) -> Connection:
    return Connection(socket=str(server.socket), user="root")


def _checksums_now(server: PrivateServer, witness: Witness) -> dict[str, int]:
    with _root(server).connect() as session:
        answer = checksums(session, [TableName.parse(name) for name in witness.checksums])
    assert not answer.failed
    return answer.values


@pytest.fixture
def stocked(server: PrivateServer) -> PrivateServer:
    sample.create(server)
    return server


def test_a_witness_holds_every_table_of_a_quiet_server(shared_server: PrivateServer) -> None:
    witness = take(_service(shared_server), server="shop-db1", max_seconds=60)
    names = {
        str(TableName(schema, table))
        for schema, table in shared_server.query(
            "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES "
            "WHERE TABLE_TYPE = 'BASE TABLE' "
            "AND TABLE_SCHEMA NOT IN ('mysql', 'sys', 'information_schema', 'performance_schema')"
        )
    }
    assert set(witness.checksums) == names
    assert "`größe 数据`.`naïve.tablé $1`" in names
    assert witness.checksums == _checksums_now(shared_server, witness)
    assert witness.uncovered == {}, "nothing was written meanwhile, so that tables without snapshots could be read"
    assert witness.definitions is not None
    assert witness.definitions["table"].keys() == names
    assert all(witness.definitions["table"].values())
    file, pos = shared_server.query("SHOW MASTER STATUS")[0][:2]
    gtid = shared_server.scalar("SELECT @@GLOBAL.gtid_binlog_pos")
    assert witness.position == Position(file, pos, gtid)
    assert Witness.from_json(witness.as_json()) == replace(witness, seconds=round(witness.seconds, 3))


def test_objects_are_counted(shared_server: PrivateServer) -> None:
    with _service(shared_server).connect() as session:
        counts = object_counts(session)
    users = shared_server.scalar("SELECT COUNT(*) FROM mysql.global_priv")
    assert counts == {"views": 1, "triggers": 1, "routines": 2, "events": 2, "users": users}


def test_a_witness_under_load_is_what_a_replica_holds_at_its_gtid() -> None:
    with PrivateServer(tcp=True) as source:
        source.create_backup_users()
        sample.create(source)
        with replica_of(source) as replica:
            replica.execute("STOP SLAVE")
            with Writers(source) as writers:
                while writers.transactions < 50:
                    pass
                witness = take(_service(source), server="s", max_seconds=60)
                assert writers.transactions > 50
            replica.execute(f"START SLAVE UNTIL master_gtid_pos = '{witness.position.gtid}'")
            assert replica.scalar("SELECT MASTER_GTID_WAIT(%s, 60)", (witness.position.gtid,)) == 0
            assert _checksums_now(replica, witness) == witness.checksums
            assert _checksums_now(source, witness) != witness.checksums


def test_definitions_that_change_meanwhile_leave_a_table_out(server: PrivateServer) -> None:
    connection = _witness_user(server)
    tables = ["aa_first", "added", "copied", "created", "dropped", "plain", "removed", "renamed", "truncated"]
    server.execute("CREATE DATABASE d", "USE d", "CREATE SEQUENCE d.numbers")
    for table in tables:
        server.execute(
            f"CREATE TABLE d.{table} (id INT PRIMARY KEY, v VARCHAR(20))",
            f"INSERT INTO d.{table} SELECT seq, seq FROM seq_1_to_100",
        )
    done: list[str] = []

    def alter_once(progress: Progress) -> None:
        if not done:
            done.append(progress.note)
            server.execute(
                "ALTER TABLE d.added ADD COLUMN z INT DEFAULT 5, ALGORITHM=INSTANT",
                "ALTER TABLE d.removed DROP COLUMN v, ALGORITHM=INSTANT",
                "ALTER TABLE d.copied ADD COLUMN z INT DEFAULT 5, ALGORITHM=COPY",
                "DROP TABLE d.dropped",
                "RENAME TABLE d.renamed TO d.other",
                "TRUNCATE d.truncated",
                "DROP TABLE d.created",
                "CREATE TABLE d.created (id INT PRIMARY KEY, v VARCHAR(20))",
                "UPDATE d.plain SET v = 'changed'",
                "CREATE VIEW d.seen AS SELECT 1",
            )

    witness = take(connection, server="s", max_seconds=60, report=alter_once)
    assert done == ["`d`.`aa_first`"]
    assert set(witness.checksums) == {"`d`.`aa_first`", "`d`.`plain`"}
    assert witness.checksums["`d`.`plain`"] == witness.checksums["`d`.`aa_first`"]
    assert witness.uncovered["`d`.`added`"] == "its definition changed after the snapshot"
    assert witness.uncovered["`d`.`removed`"] == "its definition changed after the snapshot"
    assert witness.uncovered["`d`.`dropped`"] == "dropped or renamed since"
    assert witness.uncovered["`d`.`renamed`"] == "dropped or renamed since"
    assert "insufficient history" in witness.uncovered["`d`.`truncated`"]
    assert "sequence" in witness.uncovered["`d`.`numbers`"]
    assert "views" not in witness.objects
    assert "users" in witness.objects


def test_virtual_columns_do_not_make_a_checksum_depend_on_who_asks(server: PrivateServer) -> None:
    connection = _witness_user(server)
    server.execute(
        "CREATE DATABASE w",
        "USE w",
        "CREATE TABLE w.gen (id INT PRIMARY KEY, a INT, v INT AS (a*2) VIRTUAL, p INT AS (a*3) PERSISTENT, KEY(v))",
        "INSERT INTO w.gen (id, a) SELECT seq, seq FROM seq_1_to_500",
        "CREATE TABLE w.kinds (`i``d` INT, n VARCHAR(20), b BLOB, t TIMESTAMP(3) NULL, f BIT(9), d DOUBLE,"
        " v INT AS (`i``d`+1) VIRTUAL)",
        "INSERT INTO w.kinds (`i``d`, n, b, t, f, d)"
        " VALUES (1, NULL, x'00ff', '2026-01-01 10:00:00.123', b'101', 0.1), (1, '', '', NULL, NULL, NULL)",
        "CREATE TABLE w.none (id INT, v INT AS (id) VIRTUAL)",
    )
    names = [TableName("w", "gen"), TableName("w", "kinds"), TableName("w", "none")]
    witness = take(connection, server="s", max_seconds=60)
    assert not witness.uncovered
    assert witness.checksums["`w`.`none`"] == 0
    for question in ("DO 0", "SELECT SUM(v) FROM w.gen", "SELECT * FROM w.gen FORCE INDEX (v) WHERE v > 10"):
        with _root(server).connect() as session:
            session.execute("SET time_zone = '+07:00', sql_mode = 'ANSI_QUOTES', NAMES latin1")
            session.query(question)
            for _ in range(3):
                assert checksums(session, names).values == witness.checksums
    for change in ("a = a + 1 WHERE id = 7", "a = NULL WHERE id = 8"):
        before = _checksums_now(server, witness)
        server.execute(f"UPDATE w.gen SET {change}")
        assert _checksums_now(server, witness)["`w`.`gen`"] != before["`w`.`gen`"]
    server.execute("UPDATE w.kinds SET n = '' WHERE n IS NULL")
    assert _checksums_now(server, witness)["`w`.`kinds`"] != witness.checksums["`w`.`kinds`"]


def test_tables_renamed_or_swapped_after_the_snapshot_are_left_out(server: PrivateServer) -> None:
    connection = _witness_user(server)
    server.execute("CREATE DATABASE d", "USE d")
    tables = ("aa_first", "one", "two", "old", "`pa.rt`", "plain", "`naïve $1`")
    for number, table in enumerate(tables):
        parts = " PARTITION BY HASH(id) PARTITIONS 2" if "pa.rt" in table else ""
        server.execute(f"CREATE TABLE d.{table} (id INT PRIMARY KEY){parts}")
        server.execute(f"INSERT INTO d.{table} VALUES ({number})")
    with LockWindowWitness(connection, server="s") as window:
        window.on_stderr("Acquired locks for BACKUP STAGE BLOCK_COMMIT")
        window._thread.join()
        server.execute(
            "RENAME TABLE d.one TO d.x, d.two TO d.one, d.x TO d.two",
            "RENAME TABLE d.old TO d.new",
            "RENAME TABLE d.`pa.rt` TO d.`mo.ved`",
        )
        witness = window.collect(max_seconds=60)
    assert witness is not None
    assert set(witness.checksums) == {"`d`.`aa_first`", "`d`.`plain`", "`d`.`naïve $1`"}
    assert witness.uncovered == dict.fromkeys(
        ("`d`.`one`", "`d`.`two`", "`d`.`new`", "`d`.`mo.ved`"), "renamed or rebuilt after the snapshot"
    )


def test_a_table_swapped_between_the_look_and_its_reading_is_left_out(server: PrivateServer) -> None:
    connection = _witness_user(server)
    server.execute("CREATE DATABASE d", "USE d")
    for number, table in enumerate(("one", "two")):
        server.execute(f"CREATE TABLE d.{table} (id INT PRIMARY KEY)", f"INSERT INTO d.{table} VALUES ({number})")

    def swap(progress: Progress) -> None:
        if progress.note == "`d`.`one`":
            server.execute("RENAME TABLE d.one TO d.x, d.two TO d.one, d.x TO d.two")

    witness = take(connection, server="s", max_seconds=60, report=swap)
    assert not witness.checksums
    assert set(witness.uncovered.values()) == {"renamed or rebuilt after the snapshot"}


def test_a_table_that_was_read_cannot_be_renamed_before_its_identity_is_looked_at(server: PrivateServer) -> None:
    connection = _witness_user(server)
    server.execute("CREATE DATABASE d", "CREATE TABLE d.t (id INT PRIMARY KEY)", "SET lock_wait_timeout = 1")
    with Snapshot(connection) as snapshot:
        snapshot.open()
        assert checksums(snapshot.session, [TableName("d", "t")]).values
        with pytest.raises(pymysql.err.OperationalError, match="1205"):
            server.execute("RENAME TABLE d.t TO d.u")
        assert snapshot.release()
        server.execute("RENAME TABLE d.t TO d.u")


def test_a_deadlock_with_a_rename_costs_what_was_not_secured_and_not_the_witness(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = _witness_user(server)
    server.execute("CREATE DATABASE d", "USE d")
    # Read in the order of sizes: a, y, x, z. RENAME locks by name: x, then y.
    for table, rows in (("a", 1), ("y", 2), ("x", 5_000), ("z", 50_000)):
        server.execute(
            f"CREATE TABLE d.{table} (id INT PRIMARY KEY, v CHAR(200))",
            f"INSERT INTO d.{table} SELECT seq, 'v' FROM seq_1_to_{rows}",
            f"ANALYZE TABLE d.{table}",
        )

    def rename() -> None:
        with _root(server).connect() as session:
            session.execute("RENAME TABLE d.x TO d.x2, d.y TO d.y2")

    ddl = threading.Thread(target=rename)

    def cross(progress: Progress) -> None:
        # Locks are given back after each table until y, then kept.
        monkeypatch.setattr(module, "_RELEASE_AFTER", 0.0 if progress.note == "`d`.`a`" else 60.0)
        monkeypatch.setattr(module, "_LOOKS_SHARE", 1e-9)
        if progress.note == "`d`.`x`":
            ddl.start()
            waiting = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE LIKE '%metadata lock%'"
            while not server.scalar(waiting):
                assert ddl.is_alive()

    with LockWindowWitness(connection, server="s", report=cross) as window:
        window.on_stderr("Acquired locks for BACKUP STAGE BLOCK_COMMIT")
        window._thread.join()
        server.execute("UPDATE d.z SET v = 'newer than the snapshot'")
        witness = window.collect(max_seconds=60)
    ddl.join()
    assert window.problem == ""
    assert witness is not None
    assert set(witness.checksums) == {"`d`.`a`"}
    assert "Deadlock" in witness.uncovered["`d`.`x`"]
    assert "ended the snapshot" in witness.uncovered["`d`.`y`"]
    assert "ended the snapshot" in witness.uncovered["`d`.`z`"]


def test_a_table_altered_before_the_snapshot_opens_is_covered_once_that_is_certain(
    server: PrivateServer,
) -> None:
    connection = _witness_user(server)
    server.execute("CREATE DATABASE d", "CREATE TABLE d.t (id INT PRIMARY KEY)", "INSERT INTO d.t VALUES (1)")
    with Snapshot(connection) as snapshot:
        server.execute("ALTER TABLE d.t ADD COLUMN z INT DEFAULT 5")
        snapshot.open()
        snapshot.session.query("SELECT * FROM d.t")
        assert snapshot.changed(TableName("d", "t"))
        # Two seconds on the server's clock later nothing but an older ALTER explains its CREATE_TIME.
        snapshot.opened_at = server.scalar(
            "SELECT CREATE_TIME + INTERVAL 3 SECOND FROM information_schema.TABLES "
            "WHERE TABLE_SCHEMA = 'd' AND TABLE_NAME = 't'"
        )
        assert not snapshot.changed(TableName("d", "t"))


def test_an_alter_does_not_wait_for_a_table_that_was_read(server: PrivateServer) -> None:
    connection = _witness_user(server)
    server.execute("CREATE DATABASE d", "CREATE TABLE d.t (id INT PRIMARY KEY)", "SET lock_wait_timeout = 1")
    with Snapshot(connection) as snapshot:
        assert not snapshot.holds_locks
        snapshot.open()
        assert checksums(snapshot.session, [TableName("d", "t")]).values
        snapshot.release()
        server.execute("ALTER TABLE d.t ADD COLUMN z INT")


def test_without_binlog_admin_the_witness_knows_that_it_holds_locks(stocked: PrivateServer) -> None:
    stocked.create_user("plain", "x", ["SELECT", "PROCESS"])
    connection = Connection(socket=str(stocked.socket), user="plain", password="x")
    with Snapshot(connection) as snapshot:
        assert snapshot.holds_locks
    assert take(connection, server="s", max_seconds=60).checksums


def test_tables_beyond_the_budget_are_uncovered(shared_server: PrivateServer) -> None:
    witness = take(_service(shared_server), server="s", max_seconds=0)
    assert not witness.checksums
    assert "not reached within 0 seconds" in witness.uncovered["`shop`.`orders`"]


def test_only_wanted_tables_are_read(shared_server: PrivateServer) -> None:
    witness = take(_service(shared_server), server="s", max_seconds=60, include=lambda table: table.schema == "bank")
    assert set(witness.checksums) == {"`bank`.`accounts`", "`bank`.`transfers`"}
    assert not witness.uncovered


def test_a_missing_table_has_no_checksum_and_says_why(shared_server: PrivateServer) -> None:
    with _service(shared_server).connect() as session:
        answer = checksums(session, [TableName("shop", "no`ne"), TableName("bank", "accounts")])
    assert answer.failed == {"`shop`.`no``ne`": "dropped or renamed since"}
    assert set(answer.values) == {"`bank`.`accounts`"}


def test_a_short_lock_gives_the_same_position_where_the_server_does_not_tell_it(
    stocked: PrivateServer,
) -> None:
    with Writers(stocked) as writers:
        for _ in range(5):
            with Snapshot(_root(stocked)) as snapshot:
                snapshot._shows_position = False
                before = writers.transactions
                snapshot.open()
                assert snapshot.position == snapshot._shown_position()
                while writers.transactions == before:
                    pass


def test_names_of_tables_survive_their_text() -> None:
    name = TableName("a`.`b", "c`")
    assert TableName.parse(str(name)) == name
    with pytest.raises(ValueError, match="not a quoted"):
        TableName.parse("shop.orders")


def _backup(server: PrivateServer, target: Path, witness: LockWindowWitness) -> Position:
    """Run the tool as a capture does, each line to the witness; returns the position that it recorded."""
    argv = [
        "mariadb-backup", "--no-defaults", "--backup", f"--target-dir={target}", "--user=root",
        f"--socket={server.socket}", f"--datadir={server.datadir}",
    ]  # fmt: skip
    position = Position()
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            witness.on_stderr(line)
            found = re.search(r"filename '(.*)', position '(\d+)', GTID of the last change '(.*)'", line)
            if found:
                position = Position(found[1], int(found[2]), found[3])
    assert process.returncode == 0
    return position


def test_a_lock_window_witness_is_the_backup_itself(stocked: PrivateServer, short_tmp: Path) -> None:
    target = short_tmp / "copy"
    with Writers(stocked) as writers, LockWindowWitness(_service(stocked), server="s") as window:
        while writers.transactions < 20:
            pass
        recorded = _backup(stocked, target, window)
        after = writers.transactions
        while writers.transactions < after + 20:
            pass
        witness = window.collect(max_seconds=60)
    assert window.problem == ""
    assert witness is not None
    assert witness.position == recorded
    assert witness.objects["triggers"] == 1
    subprocess.run(["mariadb-backup", "--prepare", f"--target-dir={target}"], check=True, capture_output=True)
    shutil.chown(target, "mysql", "mysql")
    for path in target.rglob("*"):
        shutil.chown(path, "mysql", "mysql")
    with PrivateServer(datadir=target) as restored:
        assert _checksums_now(restored, witness) == witness.checksums
    assert _checksums_now(stocked, witness) != witness.checksums


@pytest.mark.campaign
def test_the_window_is_hit_under_four_writers_time_after_time(stocked: PrivateServer, short_tmp: Path) -> None:
    hits, tries = 0, rounds(3)
    with Writers(stocked) as writers:
        for number in range(tries):
            with LockWindowWitness(_service(stocked), server="s") as window:
                recorded = _backup(stocked, short_tmp / str(number), window)
                witness = window.collect(max_seconds=0)
            assert witness is not None
            hits += same_moment(witness.position, recorded)
        assert writers.transactions > 100
    assert hits == tries


def test_a_tool_that_never_locks_leaves_no_witness_but_a_reason(shared_server: PrivateServer) -> None:
    with LockWindowWitness(_service(shared_server), server="s") as window:
        window.on_stderr("[00] 2026-11-21 04:41:56 Starting BACKUP STAGE BLOCK_COMMIT")
        assert window.collect(max_seconds=10) is None
        assert window.position is None
    assert "did not report that it blocked commits" in window.problem


def test_a_witness_that_cannot_be_prepared_does_not_disturb_the_backup(short_tmp: Path) -> None:
    with LockWindowWitness(Connection(socket=str(short_tmp / "none")), server="s") as window:
        window.on_stderr("Acquired locks for BACKUP STAGE BLOCK_COMMIT")
        assert window.collect(max_seconds=10) is None
    assert "cannot connect" in window.problem


def test_a_server_that_dies_under_a_prepared_witness_leaves_a_reason() -> None:
    with PrivateServer() as server:
        server.create_backup_users()
        with LockWindowWitness(_service(server), server="s") as window:
            server.kill()
            window.on_stderr("Acquired locks for BACKUP STAGE BLOCK_COMMIT")
            assert window.collect(max_seconds=10) is None
        assert window.problem
        with pytest.raises(ServerError):
            take(_service(server), server="s", max_seconds=10)


def test_moments_are_the_same_by_place_not_by_the_order_of_domains() -> None:
    one = Position("bin.1", 5, "0-1-2,1-1-3")
    assert same_moment(one, Position("bin.1", 5, "1-1-3,0-1-2"))
    assert not same_moment(one, Position("bin.1", 6, one.gtid))
    assert not same_moment(Position(), Position())
