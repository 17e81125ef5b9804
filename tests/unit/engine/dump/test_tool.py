"""The real mydumper against a real server: what is dumped, and everything that goes wrong meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.engine.dump.insert_files import DumpedFile, DumpRequest, DumpRun
from backupd.engine.dump.mydumper_run import MyDumperRun
from backupd.engine.dump.selection import MyDumper, mydumper_tool
from backupd.engine.server.definitions import TableDefinition, read_tables
from backupd.engine.sql.client import Connection
from backupd.model.errors import CancelledError, ServerError, ToolError
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName
from tests.support.dice import size
from tests.support.servers.dumps import connection_to, dump, load, processes_in, wanted
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.processes import until
from tests.support.stores.folders import runs_as_root, short_directory

CHUNK = 1_000_000
ROWS = 150_000
"""Of the large table: some 30 MB, so that mydumper is in the middle of it when the first of its files comes."""
MANY = size(150, 5000)
LARGE = TableName("shop", "large")
ODD = tuple(
    TableName("shop", name) for name in ("dollar$one", "Orders", "orders", "ORDERS", "a_b", "axb", "we ird", "ő")
)
SMALL = (*ODD, TableName("shop", "empty"), TableName("Other$", "plain"))
READING = "SELECT ID FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT /*!40001%'"
PASSWORD = "p'w \"x#;$ \\é"


@pytest.fixture(scope="module")
def source() -> Iterator[PrivateServer]:
    with PrivateServer(tcp=True, options={"max_connections": 30}) as server:
        server.execute(
            "CREATE DATABASE shop",
            "CREATE DATABASE `Other$`",
            "CREATE TABLE `Other$`.plain (id INT)",
            "INSERT INTO `Other$`.plain VALUES (1)",
            "CREATE TABLE shop.large (id INT PRIMARY KEY, v VARCHAR(300))",
            f"INSERT INTO shop.large SELECT seq, REPEAT(CHAR(65 + seq % 26), 190) FROM mysql.seq_1_to_{ROWS}",
            "CREATE TABLE shop.empty (id INT)",
            "CREATE VIEW shop.seen AS SELECT id FROM shop.large",
            "CREATE USER remote@'%' IDENTIFIED BY 'p''w \"x#;$ \\\\é'",
            "GRANT ALL ON *.* TO remote@'%'",
        )
        for number, name in enumerate(ODD):
            server.execute(f"CREATE TABLE {name} (id INT PRIMARY KEY)", f"INSERT INTO {name} VALUES ({number}), (100)")
        yield server


@pytest.fixture
def place() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture(scope="module")
def tool() -> MyDumper:
    return mydumper_tool(Flavour.MARIADB)


@pytest.fixture
def asked(source: PrivateServer, place: Path) -> DumpRequest:
    return DumpRequest(connection_to(source), wanted((LARGE, *SMALL)), place, threads=2, chunk_bytes=CHUNK)


def _definitions(server: PrivateServer, request: DumpRequest) -> list[TableDefinition]:
    with connection_to(server).connect() as session:
        return list(read_tables(session, [table.name for table in request.tables]).tables.values())


def _rows(server: PrivateServer, schema: str, name: str) -> list[object]:
    return [row[0] for row in server.query(f"SELECT id FROM `{schema}`.`{name}` ORDER BY id")]


def test_names_apart_by_case_patterns_and_dollars_come_back_each_with_its_own_rows(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    request = replace(asked, tables=wanted((*ODD, TableName("shop", "empty"))))
    dumped = dump(tool, request)
    assert dumped.good == {table.name.table for table in request.tables}
    assert set(dumped.texts) == set(ODD), "an empty table has no file, and nothing else was dumped"
    assert set(dumped.rows.values()) == {2}
    load(source, "back", dumped, _definitions(source, request))
    for name in ODD:
        assert _rows(source, "back", name.table) == _rows(source, "shop", name.table)
    source.execute("DROP DATABASE back")


def test_a_large_table_comes_in_files_of_about_the_asked_size_while_mydumper_runs(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    waiting: list[int] = []

    def look(file: DumpedFile) -> None:
        if file.table == LARGE:
            time.sleep(0.05)
            waiting.append(sum(path.stat().st_size for path in file.path.parent.rglob("*.sql")))

    dumped = dump(tool, asked, during=look)
    assert dumped.good == {LARGE.table, *(name.table for name in SMALL)}
    sizes = [len(text) for text in dumped.texts[LARGE]]
    assert len(sizes) >= 4
    assert max(sizes) <= 2.1 * CHUNK
    assert dumped.rows[LARGE] == ROWS
    assert dumped.texts == dump(tool, asked).texts, "the same rows make the same files"
    assert max(waiting) <= sum(sizes)


def test_the_snapshots_are_those_of_the_moment_that_open_returns(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    def change() -> None:
        source.execute("INSERT INTO shop.orders VALUES (7777)", "DELETE FROM shop.large WHERE id <= 1000")

    try:
        dumped = dump(tool, asked, opened=change)
        assert dumped.rows[LARGE] == ROWS
        assert dumped.rows[TableName("shop", "orders")] == 2
    finally:
        source.execute(
            "DELETE FROM shop.orders WHERE id = 7777",
            "INSERT INTO shop.large SELECT seq, REPEAT(CHAR(65 + seq % 26), 190) FROM mysql.seq_1_to_1000",
        )


def test_a_mydumper_that_ended_before_its_words_were_heard_has_made_a_whole_dump(
    tool: MyDumper, asked: DumpRequest
) -> None:
    slow: list[str] = []

    def hear(line: str) -> None:
        if not slow:
            until(lambda: not processes_in(asked.folder))  # all is written, and mydumper gone
        slow.append(line)

    small = replace(asked, tables=wanted(SMALL), on_stderr=hear)
    dumped = dump(tool, small)
    assert dumped.good == {name.table for name in SMALL}
    assert dumped.rows[TableName("shop", "orders")] == 2
    assert slow


def test_a_remote_host_and_a_password_of_all_characters_reach_the_server(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    for host in ("localhost", "127.0.0.1"):
        remote = Connection(host=host, port=source.port or 0, user="remote", password=PASSWORD)
        request = replace(asked, connection=remote, tables=wanted(SMALL), log=asked.folder.parent / f"{host}.log")
        assert dump(tool, request).good == {name.table for name in SMALL}
        assert request.log is not None
        assert PASSWORD not in request.log.read_text()
        request.log.unlink()


def test_a_wrong_password_is_told_with_a_hint_and_no_secret(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    wrong = replace(asked, connection=replace(asked.connection, user="remote", password="geheim"))
    with pytest.raises(ServerError, match="cannot connect"):
        dump(tool, wrong)
    folder = asked.folder / "later"
    folder.mkdir()
    source.create_user("fades", "geheim", ["SELECT"])
    fading = replace(asked.connection, user="fades", password="geheim")
    with tool.run(replace(asked, connection=fading, folder=folder)) as run:
        source.execute("DROP USER fades@localhost")
        with pytest.raises(ToolError, match="exited with 1 before it opened its snapshots") as caught:
            run.open(120)
    assert "Access denied" in caught.value.detail
    assert "wrong user or password" in caught.value.hint
    assert "geheim" not in str(caught.value)


def test_an_option_that_the_program_does_not_know_is_told_with_its_own_words(
    tool: MyDumper, asked: DumpRequest
) -> None:
    asked.folder.joinpath("run").mkdir()
    with (
        MyDumperRun(
            tool.tool,
            lambda _connection: ["--sync-thread-lock-mode=NO_LOCK"],
            {"wait_timeout": "100"},
            replace(asked, folder=asked.folder / "run"),
            whole=True,
        ) as run,
        pytest.raises(ToolError, match="before it opened its snapshots") as caught,
    ):
        run.open(120)
    assert "Unknown option --sync-thread-lock-mode" in caught.value.detail
    assert "check that it is mydumper" in caught.value.hint


def test_a_table_that_is_dropped_meanwhile_fails_alone(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    source.execute(
        "CREATE TABLE shop.fleeting (id INT)",
        "INSERT INTO shop.fleeting VALUES (1)",
        "CREATE TABLE shop.altered (id INT)",
        "INSERT INTO shop.altered VALUES (1)",
    )
    source.execute("CREATE TABLE shop.said (id INT) COMMENT 'VIEW'")
    others = tuple(TableName("shop", name) for name in ("fleeting", "altered", "never", "said"))
    tables = wanted((LARGE, *SMALL, *others))
    with contextlib.closing(source.connect()) as holder, holder.cursor() as cursor:
        cursor.execute("LOCK TABLES shop.fleeting WRITE, shop.altered WRITE")  # else they may be read at once

        def change() -> None:
            cursor.execute("DROP TABLE shop.fleeting")
            cursor.execute("ALTER TABLE shop.altered FORCE")
            cursor.execute("UNLOCK TABLES")

        dumped = dump(tool, replace(asked, tables=tables), opened=change)
    source.execute("DROP TABLE shop.altered, shop.said")
    assert dumped.good - {"altered"} == {LARGE.table, *(name.table for name in SMALL)}
    assert "dropped or renamed" in dumped.why("never")
    assert "does not treat it as a table" in dumped.why("said")
    assert re.search("dropped or renamed|doesn't exist", dumped.why("fleeting"))
    assert "definition has changed" in dumped.why("altered")


def _in_the_middle(
    what: Callable[[DumpRun], None],
    tool: MyDumper,
    asked: DumpRequest,
    tables: tuple[TableName, ...] = (TableName("shop", "a_b"), LARGE),
) -> dict[TableName, str | None]:
    """Do ``what`` when the first file of the large table has come, with one thread: then the table before it is
    complete, and the large one is not."""
    folder = asked.folder / "middle"
    folder.mkdir()
    done = False
    with tool.run(replace(asked, tables=wanted(tables), threads=1, folder=folder)) as run:
        run.open(120)
        for file in run.files():
            if file.table == LARGE and not done:
                run.pause()
                done = True
                what(run)
                run.resume()
            file.path.unlink()
        return dict(run.verdicts())


def test_a_killed_mydumper_leaves_what_was_complete(tool: MyDumper, asked: DumpRequest) -> None:
    def kill(_run: DumpRun) -> None:
        (pid,) = processes_in(asked.folder)
        os.kill(pid, signal.SIGKILL)

    verdicts = _in_the_middle(kill, tool, asked)
    assert verdicts[TableName("shop", "a_b")] is None
    assert "was killed by SIGKILL before it finished" in (verdicts[LARGE] or "")
    assert not processes_in(asked.folder)


def test_a_lost_connection_fails_the_tables_that_were_not_read_to_the_end(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    def cut(_run: DumpRun) -> None:
        for (number,) in source.query(READING):
            source.execute(f"KILL {number}")

    verdicts = _in_the_middle(cut, tool, asked, (TableName("shop", "a_b"), LARGE, TableName("shop", "orders")))
    assert verdicts[TableName("shop", "a_b")] is None
    assert re.search("Could not read data from shop.large: (Lost connection|.*killed)", verdicts[LARGE] or "")
    assert re.search("shop.orders.*(gone away|Lost connection)", verdicts[TableName("shop", "orders")] or "")


def test_a_server_that_dies_is_told_per_table(tool: MyDumper, place: Path) -> None:
    with PrivateServer() as server:
        server.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.a_b (id INT)",
            "INSERT INTO shop.a_b VALUES (1)",
            "CREATE TABLE shop.large (id INT PRIMARY KEY, v VARCHAR(300))",
            f"INSERT INTO shop.large SELECT seq, REPEAT('x', 190) FROM mysql.seq_1_to_{ROWS}",
        )
        request = DumpRequest(connection_to(server), (), place, chunk_bytes=CHUNK)
        verdicts = _in_the_middle(lambda _run: server.kill(), tool, request)
    assert verdicts[TableName("shop", "a_b")] is None
    assert "Could not read data from shop.large" in (verdicts[LARGE] or "")


@pytest.mark.skipif(not runs_as_root(), reason="a small filesystem of its own needs root")
def test_a_full_disk_fails_the_tables_that_did_not_fit_and_says_so(tool: MyDumper, asked: DumpRequest) -> None:
    small = asked.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=True)
    try:
        folder = small / "run"
        folder.mkdir()
        with tool.run(
            replace(
                asked,
                tables=wanted((TableName("shop", "a_b"), LARGE)),
                threads=1,
                folder=folder,
                chunk_bytes=64 * CHUNK,
            )
        ) as run:
            run.open(120)
            got = {file.table for file in run.files()}
            verdicts = run.verdicts()
        assert verdicts[TableName("shop", "a_b")] is None
        assert "No space left on device" in (verdicts[LARGE] or "")
        assert got == {TableName("shop", "a_b")}, "a file that is cut short is not handed over"
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_a_disk_that_is_full_while_files_wait_only_slows_mydumper_down(
    tool: MyDumper, asked: DumpRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(asked.folder)
    monkeypatch.setattr("backupd.engine.dump.mydumper_run.LITTLE_ROOM", 2 * usage.total)
    states: set[str] = set()

    def look(file: DumpedFile) -> None:
        states.update(_state(pid) for pid in processes_in(file.path.parent))

    dumped = dump(tool, asked, during=look)
    assert dumped.rows[LARGE] == ROWS
    assert None in dumped.verdicts.values()
    assert "T" in states


def _state(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def test_a_pause_stops_reading_and_keeps_the_snapshot(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    def rest(run: DumpRun) -> None:
        (pid,) = processes_in(asked.folder)
        until(lambda: _state(pid) == "T")
        source.execute("UPDATE shop.large SET v = 'new' WHERE id = 149999")
        assert len(source.query(READING)) == 1, "its connection waits"

    verdicts = _in_the_middle(rest, tool, asked)
    assert set(verdicts.values()) == {None}
    source.execute("UPDATE shop.large SET v = REPEAT(CHAR(65 + id % 26), 190) WHERE id = 149999")


def test_leaving_early_or_a_wish_to_stop_leaves_no_process_and_no_connection(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    wish = threading.Event()
    for number, cancel in enumerate((None, wish)):
        folder = asked.folder / str(number)
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            run = stack.enter_context(tool.run(replace(asked, folder=folder, cancel=cancel)))
            run.open(120)
            files = run.files()
            given = next(files)
            run.pause()
            assert processes_in(folder)
            if cancel is not None:
                cancel.set()
                with pytest.raises(CancelledError):
                    next(files)
        assert not processes_in(folder)
        assert list(folder.iterdir()) == [given.path], "what was handed over belongs to the caller"
    until(lambda: not _sessions(source))


def _sessions(server: PrivateServer) -> list[object]:
    return list(
        server.query(
            "SELECT ID FROM information_schema.PROCESSLIST WHERE ID <> CONNECTION_ID() AND COMMAND "
            "NOT IN ('Daemon', 'Binlog Dump')"
        )
    )


def test_thousands_of_small_tables_are_all_there_and_nothing_else(
    tool: MyDumper, source: PrivateServer, asked: DumpRequest
) -> None:
    names = tuple(TableName("many", f"Table_{number}$") for number in range(MANY))
    with contextlib.closing(source.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE many")
        cursor.execute("SET SESSION sql_log_bin = 0")
        for name in names:
            cursor.execute(f"CREATE TABLE {name} (id INT) ENGINE=Aria TRANSACTIONAL=0")
            cursor.execute(f"INSERT INTO {name} VALUES (1)")
    try:
        dumped = dump(tool, replace(asked, tables=wanted(names[1:], engine="Aria")))
        assert len(dumped.good) == MANY - 1
        assert set(dumped.texts) == set(names[1:])
        assert set(dumped.rows.values()) == {1}
    finally:
        source.execute("DROP DATABASE many")
