"""Logical backups of a real server: what is in them, and that trouble of a table stays that table's."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pymysql
import pytest

from backupd.backup.logical import LogicalOutcome, execute
from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.insert_files import DumpedFile
from backupd.engine.dump.selection import mydumper_tool
from backupd.model.errors import CancelledError, RefusedError, ToolError
from backupd.model.job import Progress
from backupd.model.server_facts import Flavour
from backupd.model.table import Outcome
from backupd.process.command import family
from backupd.process.run_context import RunContext
from tests.support import sample
from tests.support.restores.dumped import DumpRepository, now, paths_of, table
from tests.support.restores.meddling import Meddled
from tests.support.servers import new_mydumper as newmydumper
from tests.support.servers.server import Server, query


def some_tables(server: Server, *names: str, rows: int = 200) -> None:
    server.execute("CREATE DATABASE IF NOT EXISTS shop")
    for name in names:
        server.execute(
            f"CREATE TABLE shop.{name} (id INT PRIMARY KEY, v VARCHAR(100))",
            f"INSERT INTO shop.{name} SELECT seq, REPEAT('x', 50) FROM shop.seq_1_to_{rows}",
        )


def test_every_table_and_object_is_there_and_an_unchanged_server_costs_nothing_more(repository: DumpRepository) -> None:
    sample.create(repository.server)
    first = repository.dump()
    body = repository.body(first)
    rows = {one.name: one.rows for one in first.dump.dumped}
    assert not first.dump.failed
    for schema, name in repository.server.query(
        "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_TYPE = 'BASE TABLE' AND "
        "TABLE_SCHEMA NOT IN ('mysql', 'sys', 'performance_schema')"
    ):
        counted = repository.server.scalar(f"SELECT COUNT(*) FROM `{schema}`.`{name}`")
        assert rows[next(one for one in rows if (one.schema, one.table) == (schema, name))] == counted
    paths = {entry.path for entry in body.entries}
    assert {
        "schemas/shop/create.sql",
        "schemas/shop/views.sql",
        "schemas/shop/routines.sql",
        "tables/shop/orders/definition.sql",
        "tables/shop/orders/data-00000.sql",
    } <= paths
    assert any(path.endswith("triggers.sql") for path in paths)
    assert first.facts.position == body.facts.position
    assert first.facts.position.gtid == repository.server.scalar("SELECT @@gtid_binlog_pos")
    assert 0 < first.dump.blocked < 1
    assert body.facts.dump == first.dump
    assert repository.left_in_spool() == []

    again = repository.dump()
    assert again.header.stats.bytes_new == 0
    assert again.header.objects == first.header.objects


def bring_back(repository: DumpRepository, outcome: LogicalOutcome) -> None:
    """Drop what the backup holds, and do what its runbook says."""
    for schema in {one.name.schema for one in outcome.dump.tables}:
        repository.server.execute(f"DROP DATABASE `{schema}`")
    repository.do_by_hand(outcome, f"mariadb --defaults-file={repository.server.client_file()}")


def test_by_hand_the_runbook_brings_every_table_back(repository: DumpRepository) -> None:
    sample.create(repository.server)
    repository.server.execute(
        "CREATE TABLE shop.`odd. na/me$%` (id INT PRIMARY KEY, f FLOAT, b BLOB)",
        "INSERT INTO shop.`odd. na/me$%` VALUES (1, 16777217, x'000A0D1A5C27'), (2, 123456.789, NULL)",
    )
    with repository.server.connect() as connection:
        before = sample.checksum_everything(connection)
        described = sample.describe_everything(connection)
    outcome = repository.dump()
    book = repository.runbook(outcome)
    names = [name for one in outcome.dump.tables for name in (one.name.schema, one.name.table) if len(name) > 4]
    assert not [name for name in names if f"/{name}" in book or f"`{name}`" in book]
    bring_back(repository, outcome)
    with repository.server.connect() as connection:
        assert sample.checksum_everything(connection) == before
        assert sample.describe_everything(connection) == described


def test_a_crashed_table_is_named_and_the_others_are_there(repository: DumpRepository) -> None:
    some_tables(repository.server, *(f"good_{number}" for number in range(9)))
    repository.server.execute(
        "CREATE TABLE shop.ledger (id INT PRIMARY KEY, v VARCHAR(50)) ENGINE=MyISAM",
        "INSERT INTO shop.ledger SELECT seq, REPEAT('v', 40) FROM shop.seq_1_to_2000",
        "FLUSH TABLES",
    )
    data = repository.server.datadir / "shop/ledger.MYD"
    data.write_bytes(data.read_bytes()[:1000])
    outcome = repository.dump()
    ledger = table(outcome, "shop.ledger")
    assert ledger.outcome is Outcome.FAILED
    assert ledger.reason
    assert outcome.header.tables_missing == 1
    assert len(outcome.dump.dumped) == 9
    assert not paths_of(repository.body(outcome), "shop.ledger")


def test_a_damaged_table_is_repaired_first_where_the_policy_wants_that(repository: DumpRepository) -> None:
    repository.server.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.ledger (id INT PRIMARY KEY) ENGINE=MyISAM",
        "INSERT INTO shop.ledger SELECT seq FROM shop.seq_1_to_500",
        "FLUSH TABLES",
        "GRANT INSERT ON shop.* TO backupd@localhost",
    )
    data = repository.server.datadir / "shop/ledger.MYD"
    data.write_bytes(data.read_bytes()[:700])
    outcome = repository.dump(repair=True)
    assert table(outcome, "shop.ledger").rows == repository.server.scalar("SELECT COUNT(*) FROM shop.ledger") > 0
    assert any("shop.ledger" in warning and "repaired" in warning for warning in outcome.facts.warnings)


def test_writers_wait_for_the_snapshots_only_and_not_for_the_rows(repository: DumpRepository) -> None:
    sample.create(repository.server)
    repository.server.execute("CREATE TABLE shop.beats (id INT AUTO_INCREMENT PRIMARY KEY, at DOUBLE)")
    stop, rows = threading.Event(), 0

    def write() -> None:
        nonlocal rows
        with repository.server.connect() as connection:
            while not stop.is_set():
                query(connection, "INSERT INTO shop.beats (at) VALUES (RAND())")
                rows += 1

    def go_on() -> None:
        """A row that was begun after now is committed."""
        at = rows
        while rows < at + 2:
            assert writer.is_alive()
            time.sleep(0.001)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        outcome = repository.dump(tools=[Meddled(mydumper_tool(Flavour.MARIADB), before=go_on), ExactDump()])
    finally:
        stop.set()
        writer.join()
    beats = table(outcome, "shop.beats")
    assert beats.outcome is Outcome.DUMPED
    written = repository.server.scalar("SELECT COUNT(*) FROM shop.beats")
    assert beats.rows is not None
    assert 0 < beats.rows < written
    assert outcome.dump.blocked > 0
    assert not any("max_lock" in warning for warning in outcome.facts.warnings)
    # What the position says is what was dumped: each row is one transaction of the log.
    file, pos = outcome.facts.position.file, outcome.facts.position.pos
    events = repository.server.query(f"SHOW BINLOG EVENTS IN '{file}' FROM {pos}")
    assert sum(1 for event in events if event[2].startswith("Write_rows")) == written - beats.rows


def test_a_table_that_is_dropped_while_the_dump_runs_is_named(repository: DumpRepository) -> None:
    some_tables(repository.server, "kept", "gone")
    tool = Meddled(ExactDump(), before=lambda: repository.server.execute("DROP TABLE shop.gone"))
    outcome = repository.dump(tools=[tool])
    assert table(outcome, "shop.gone").outcome is Outcome.FAILED
    assert "dropped" in table(outcome, "shop.gone").reason
    assert table(outcome, "shop.kept").rows == 200


def test_a_table_that_is_altered_while_the_dump_runs_is_dumped_again_with_a_place_of_its_own(
    repository: DumpRepository,
) -> None:
    some_tables(repository.server, "kept", "wider")
    tool = Meddled(
        ExactDump(),
        before=lambda: repository.server.execute(
            "ALTER TABLE shop.wider ADD COLUMN more INT DEFAULT 7, ALGORITHM=INSTANT"
        ),
    )
    outcome = repository.dump(tools=[tool])
    wider = table(outcome, "shop.wider")
    assert (wider.outcome, wider.rows) == (Outcome.DUMPED, 200)
    assert wider.position is not None
    assert wider.position != outcome.facts.position
    assert table(outcome, "shop.kept").position is None
    assert len(tool.runs) == 2
    paths = paths_of(repository.body(outcome), "shop.wider")
    assert sorted(path.rpartition("/")[2] for path in paths) == ["data-00000.sql", "definition.sql"]
    assert "`more`" in repository.content(outcome, "tables/shop/wider/definition.sql")


def test_a_table_that_takes_the_name_of_another_one_is_dumped_again(repository: DumpRepository) -> None:
    some_tables(repository.server, "orders", "kept")
    repository.server.execute(
        "CREATE TABLE shop._orders_new LIKE shop.orders",
        "INSERT INTO shop._orders_new SELECT * FROM shop.orders LIMIT 10",
    )

    def swap() -> None:
        repository.server.execute(
            "INSERT IGNORE INTO shop._orders_new SELECT * FROM shop.orders",
            "RENAME TABLE shop.orders TO shop._orders_old, shop._orders_new TO shop.orders",
            "DROP TABLE shop._orders_old",
        )

    outcome = repository.dump(tools=[Meddled(ExactDump(), before=swap)])
    orders = table(outcome, "shop.orders")
    assert (orders.outcome, orders.rows) == (Outcome.DUMPED, 200)
    assert orders.position is not None


def test_a_table_that_only_got_another_name_while_the_dump_runs_is_not_missing(repository: DumpRepository) -> None:
    some_tables(repository.server, "orders", "orders_new", "kept", "gone")

    def swap() -> None:
        repository.server.execute(
            "RENAME TABLE shop.orders TO shop.orders_old, shop.orders_new TO shop.orders", "DROP TABLE shop.gone"
        )

    outcome = repository.dump(tools=[Meddled(ExactDump(), before=swap)])
    assert [one.name.table for one in outcome.dump.dumped] == ["kept", "orders", "orders_old"]
    new = table(outcome, "shop.orders_new")
    assert new.outcome is Outcome.SKIPPED
    assert "renamed to shop.orders while the backup ran" in new.reason
    assert [one.name.table for one in outcome.dump.failed] == ["gone"]


def test_a_table_that_is_made_while_the_dump_runs_is_in_it(repository: DumpRepository) -> None:
    some_tables(repository.server, "kept")
    outcome = repository.dump(
        tools=[Meddled(ExactDump(), before=lambda: some_tables(repository.server, "late", rows=5))]
    )
    late = table(outcome, "shop.late")
    assert (late.outcome, late.rows) == (Outcome.DUMPED, 5)
    assert late.position is not None


def test_rows_that_a_tool_loses_without_a_word_are_missed(repository: DumpRepository) -> None:
    some_tables(repository.server, "kept", "short")

    def shorten(files: Iterator[DumpedFile]) -> Iterator[DumpedFile]:
        for file in files:
            if file.table.table == "short":
                file.path.write_bytes(b"\n".join(file.path.read_bytes().split(b"\n")[:-3]) + b";\n")
                yield DumpedFile(file.table, file.path, file.path.stat().st_size)
            else:
                yield file

    outcome = repository.dump(tools=[Meddled(ExactDump(), files=shorten)])
    short = table(outcome, "shop.short")
    assert (short.outcome, short.rows) == (Outcome.DUMPED, 200)
    assert "where the snapshot holds 200" in short.note


def test_what_a_killed_mydumper_left_undone_is_done_by_the_next_tool(repository: DumpRepository) -> None:
    some_tables(repository.server, "a", "b", "c", rows=60000)

    def kill() -> None:
        (mine,) = [pid for pid in family(os.getpid()) if Path(f"/proc/{pid}/comm").read_text() == "mydumper\n"]
        os.killpg(os.getpgid(mine), signal.SIGKILL)  # its sandbox, too, which stands still and would tell nobody

    mydumper = Meddled(mydumper_tool(Flavour.MARIADB), opened=lambda run: run.pause(), before=kill)
    outcome = repository.dump(tools=[mydumper, ExactDump()])
    assert [one.outcome for one in outcome.dump.tables] == [Outcome.DUMPED] * 3
    assert [one.rows for one in outcome.dump.tables] == [60000] * 3
    assert any(one.tool == ExactDump().tool.name for one in outcome.dump.tables)


def test_the_rows_of_a_new_mydumper_are_taken_as_they_are_and_come_back(repository: DumpRepository) -> None:
    some_tables(repository.server, "a", "b")
    repository.server.execute(
        "CREATE TABLE shop.empty (id INT PRIMARY KEY)",
        "CREATE TABLE shop.isam ENGINE=MyISAM AS SELECT * FROM shop.a",
        "CREATE TABLE shop.odd (id INT PRIMARY KEY, v VARCHAR(40), n DECIMAL(9,2), t TIMESTAMP NULL)",
        "INSERT INTO shop.odd VALUES (0, UNHEX('225C270A28310D3B0A2C28'), -1.5, NOW()), (1, NULL, NULL, NULL), "
        "(2, '', 0, NULL)",
        "CREATE TABLE shop.long (id INT PRIMARY KEY, v LONGTEXT)",
        "INSERT INTO shop.long SELECT seq, REPEAT('line\n,(', IF(seq = 30, 200000, 20000)) FROM shop.seq_1_to_30",
    )
    names = ("a", "b", "empty", "isam", "long", "odd")
    sums = f"CHECKSUM TABLE {', '.join(f'shop.{name}' for name in names)}"
    before = repository.server.query(sums)
    new = mydumper_tool(Flavour.MARIADB, paths={"mydumper": str(newmydumper.make(repository.base / "tool"))})
    outcome = repository.dump(tools=[new, ExactDump()], count_rows=False, chunk_bytes=1 << 20)
    rows = dict(zip(names, (200, 200, 0, 200, 30, 3), strict=True))
    assert {one.name.table: one.rows for one in outcome.dump.tables} == rows
    assert {(one.outcome, one.tool) for one in outcome.dump.tables} == {(Outcome.DUMPED, "mydumper")}
    assert not any("again" in one.note for one in outcome.dump.tables)
    assert table(outcome, "shop.long").files > 2
    bring_back(repository, outcome)
    assert repository.server.query(sums) == before


def test_a_snapshot_that_a_new_mydumper_lost_makes_none_of_its_tables_good(repository: DumpRepository) -> None:
    some_tables(repository.server, "a", "b", "c")
    program = newmydumper.make(repository.base / "tool", newmydumper.Knobs(loses="shop.b"))
    new = mydumper_tool(Flavour.MARIADB, paths={"mydumper": str(program)})
    outcome = repository.dump(tools=[new, ExactDump()], count_rows=False)
    assert [one.rows for one in outcome.dump.tables] == [200] * 3
    assert {one.tool for one in outcome.dump.tables} == {ExactDump().tool.name}
    assert "Could not read data from shop.b" in table(outcome, "shop.b").note
    assert "of a later moment" in table(outcome, "shop.c").note


def test_lost_connections_cost_another_pass(repository: DumpRepository) -> None:
    some_tables(repository.server, "a", "b")

    def cut() -> None:
        for (number,) in repository.server.query(
            "SELECT id FROM information_schema.processlist WHERE user = 'backupd'"
        ):
            try:
                repository.server.execute(f"KILL {number}")
            except pymysql.err.Error as error:
                if error.args[0] != 1094:  # it was closed, and is gone by now
                    raise

    outcome = repository.dump(tools=[Meddled(ExactDump(), before=cut)])
    assert [(one.outcome, one.rows) for one in outcome.dump.tables] == [(Outcome.DUMPED, 200)] * 2


def test_a_full_disk_under_the_spool_is_told_of_each_table(repository: DumpRepository) -> None:
    some_tables(repository.server, "small")
    repository.server.execute(
        "CREATE TABLE shop.big (id INT PRIMARY KEY, v LONGTEXT)",
        "INSERT INTO shop.big SELECT seq, REPEAT('x', 1000000) FROM shop.seq_1_to_12",
    )
    spec = repository.spec(tools=[ExactDump()])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(spec.folder)], check=True)
    try:
        outcome = execute(spec, RunContext(now))
    finally:
        subprocess.run(["umount", "-l", str(spec.folder)], check=True)
    big = table(outcome, "shop.big")
    assert big.outcome is Outcome.FAILED
    assert "No space left" in big.reason
    assert table(outcome, "shop.small").outcome is Outcome.DUMPED
    used = {entry for one in repository.body(outcome).entries for entry in one.objects}
    assert repository.objects() == used


def test_nothing_is_left_where_no_table_could_be_dumped(repository: DumpRepository) -> None:
    some_tables(repository.server, "a")
    tool = Meddled(ExactDump(), before=lambda: repository.server.execute("DROP TABLE shop.a"))
    with pytest.raises(ToolError, match="none of 1 tables") as caught:
        repository.dump("shop.a", tools=[tool])
    assert "shop.a: it was dropped" in caught.value.detail
    assert repository.objects() == set()
    assert not list((repository.base / "repository/servers").rglob("manifest.json"))


def test_a_selection_without_tables_is_refused(repository: DumpRepository) -> None:
    with pytest.raises(RefusedError, match="no table to dump") as caught:
        repository.dump("shop.nothing")
    assert "shop.nothing" in caught.value.detail


def test_tables_without_rows_of_their_own_come_with_their_definition(repository: DumpRepository) -> None:
    some_tables(repository.server, "a")
    repository.server.execute(
        "CREATE TABLE shop.real (id INT) ENGINE=MyISAM",
        "CREATE TABLE shop.void (id INT) ENGINE=MERGE UNION=(shop.real)",
    )
    outcome = repository.dump()
    void = table(outcome, "shop.void")
    assert (void.outcome, void.files) == (Outcome.DUMPED, 0)
    assert "definition only" in void.note
    assert [path.rpartition("/")[2] for path in paths_of(repository.body(outcome), "shop.void")] == ["definition.sql"]


def test_a_dump_that_is_cancelled_leaves_nothing(repository: DumpRepository) -> None:
    some_tables(repository.server, "a", rows=20000)
    cancel = threading.Event()

    def stop(progress: Progress) -> None:
        if progress.phase == "dump":
            cancel.set()

    with pytest.raises(CancelledError):
        execute(repository.spec(chunk_bytes=1024 * 1024), RunContext(now, report=stop, cancel=cancel))
    assert repository.objects() == set()
    assert not repository.left_in_spool()
