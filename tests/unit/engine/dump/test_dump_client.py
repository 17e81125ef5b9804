"""mariadb-dump and mysqldump against real servers: what is dumped, and everything that goes wrong meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.engine.dump import dump_client as dumpclient
from backupd.engine.dump.contract import DumpedFile, DumpRequest, DumpTable
from backupd.engine.dump.dump_client import ClientDump, Splitter, client_dump_tool
from backupd.engine.schema.definitions import read_tables
from backupd.model.errors import CancelledError, ToolError
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName
from tests.support.dice import thrown
from tests.support.servers import mysql, zoo
from tests.support.servers.dumps import dump, load, wanted
from tests.support.servers.flavours import BOTH, as_root, as_service, server_of
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server

REFUSED = {
    Flavour.MARIADB: {
        "floats",
        "hidden",
        "choices",
        "numbers",
        "around",
        "versioned",
        "versioned_told",
        "versioned_parts",
    },
    Flavour.MYSQL: {"floats", "hidden", "choices", "doubles", "made", "generated_key"},
}
"""Apart from those with odd names."""


@pytest.fixture(scope="module", params=BOTH)
def cage(request: pytest.FixtureRequest) -> Iterator[tuple[ClientDump, Server]]:
    with server_of(request.param, sql_mode="NO_BACKSLASH_ESCAPES", transaction_isolation="READ-COMMITTED") as server:
        zoo.build(server)
        server.execute("CREATE DATABASE shop")
        paths = {} if request.param is Flavour.MARIADB else {"mysqldump": str(mysql.root_programs() / "mysqldump")}
        yield client_dump_tool(request.param, paths=paths), server


@pytest.fixture
def shop(cage: tuple[ClientDump, Server]) -> tuple[ClientDump, Server]:
    """Tables of 1,000 and ``large`` of 30,000 rows, some 12 MB; what a test did to them is gone."""
    server = cage[1]
    limit = "max_recursive_iterations" if server.sequences else "cte_max_recursion_depth"
    server.execute("DROP DATABASE shop", "CREATE DATABASE shop", f"SET SESSION {limit} = 100000")
    for name, rows in (("a", 1000), ("b", 1000), ("large", 30000)):
        server.execute(
            f"CREATE TABLE shop.{name} (id INT PRIMARY KEY, v VARCHAR(500))",
            f"INSERT INTO shop.{name} WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE "
            f"i < {rows}) SELECT i, REPEAT('{name[0]}', 400) FROM n",
        )
    return cage


def tables_of(*names: str) -> tuple[DumpTable, ...]:
    return wanted([TableName("shop", name) for name in names])


def test_every_table_that_is_not_refused_comes_back_bit_for_bit(
    cage: tuple[ClientDump, Server], short_tmp: Path
) -> None:
    tool, server = cage
    with as_root(server).connect() as session:
        definitions = read_tables(session, zoo.tables(server)).tables
    tables = wanted(definitions)
    refused = {table.name.table for table in tables if tool.refuses(table, definitions[table.name].columns)}
    flavour = Flavour.MARIADB if server.sequences else Flavour.MYSQL
    assert refused - {*zoo.ODD_NAMES, *zoo.TWINS} == REFUSED[flavour]
    taken = tuple(table for table in tables if table.name.table not in refused)
    dumped = dump(tool, DumpRequest(as_service(server), taken, short_tmp))
    assert dumped.good == {table.name.table for table in taken}, dumped.verdicts
    load(server, "back", dumped, [definitions[table.name] for table in taken])
    names = [table.name.table for table in taken]
    before, after = zoo.checksums(server, "zoo", names), zoo.checksums(server, "back", names)
    assert {name for name in names if before[name] != after[name]} == set()


def test_only_the_tables_that_were_asked_for_are_written(shop: tuple[ClientDump, Server], short_tmp: Path) -> None:
    tool, server = shop
    taken = (*tables_of("a"), *wanted([TableName("zoo", "twin"), TableName("zoo", "bits")]))
    dumped = dump(tool, DumpRequest(as_service(server), taken, short_tmp))
    assert set(dumped.texts) == {table.name for table in taken}
    assert set(dumped.verdicts.values()) == {None}
    number = (*zoo.ODD_NAMES, *zoo.TWINS).index("twin")
    assert f"name {number}'".encode() in dumped.texts[TableName("zoo", "twin")][0]


def test_it_reads_what_was_there_when_it_was_opened_and_cuts_files(
    shop: tuple[ClientDump, Server], short_tmp: Path
) -> None:
    tool, server = shop
    dumped = dump(
        tool,
        DumpRequest(as_service(server), tables_of("a", "large"), short_tmp, chunk_bytes=2_000_000),
        opened=lambda: server.execute("DELETE FROM shop.large", "INSERT INTO shop.a VALUES (9999, 'late')"),
    )
    assert dumped.good == {"a", "large"}
    assert dumped.rows == {TableName("shop", "a"): 1000, TableName("shop", "large"): 30000}
    assert len(dumped.texts[TableName("shop", "large")]) > 3


def test_a_crashed_or_dropped_table_is_named_and_stops_nothing(
    shop: tuple[ClientDump, Server], short_tmp: Path
) -> None:
    tool, server = shop
    server.execute(
        "CREATE TABLE shop.isam (id INT PRIMARY KEY, v VARCHAR(100)) ENGINE = MyISAM",
        "INSERT INTO shop.isam SELECT id, 'v' FROM shop.a",
        "FLUSH TABLES",
    )
    with (server.datadir / "shop/isam.MYD").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff" * 3000)
    server.execute("DROP TABLE shop.b")
    dumped = dump(tool, DumpRequest(as_service(server), tables_of("a", "b", "isam", "large"), short_tmp))
    assert dumped.good == {"a", "large"}
    assert "isam" in dumped.why("isam")
    assert "did not write all" in dumped.why("b")


@pytest.mark.parametrize("killed", ["the tool", "its connection"])
def test_what_is_killed_leaves_a_reason_for_each_table_that_is_not_complete(
    shop: tuple[ClientDump, Server], short_tmp: Path, killed: str
) -> None:
    tool, server = shop
    begun = threading.Event()

    def hear(line: str) -> None:
        if "table large" in line:
            begun.set()

    request = DumpRequest(
        as_service(server), tables_of("a", "b", "large"), short_tmp, chunk_bytes=200_000, on_stderr=hear
    )
    with tool.run(request) as run:
        run.pause()  # else it would be over before it can be killed
        run.open(120)
        assert begun.wait(120)
        if killed == "the tool":
            for number in our_dumps():
                with contextlib.suppress(ProcessLookupError):  # gone with its sandbox
                    os.kill(number, signal.SIGKILL)
        else:
            server.execute(*(f"KILL {row[0]}" for row in server.query("SHOW PROCESSLIST") if row[1] == SERVICE_USER))
        run.resume()
        complete = {file.table.table for file in run.files()}
        reasons = {name.table: why for name, why in run.verdicts().items()}
    assert reasons["a"] is None
    assert "a" in complete
    assert reasons["large"]
    assert our_dumps() == []


def test_a_pause_is_longer_than_the_server_waits_for_a_reader(
    shop: tuple[ClientDump, Server], short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, server = shop
    monkeypatch.setattr(dumpclient, "_SIP_SECONDS", 0.3)
    server.execute("SET GLOBAL net_write_timeout = 3")
    try:
        with tool.run(DumpRequest(as_service(server), tables_of("large"), short_tmp)) as run:
            run.pause()
            run.open(120)
            timer = threading.Timer(6.5, run.resume)
            timer.start()
            assert sum(file.rows or 0 for file in run.files()) == 30000
            timer.join()
            assert list(run.verdicts().values()) == [None]
    finally:
        server.execute("SET GLOBAL net_write_timeout = DEFAULT")


def test_cancelling_leaves_no_process(shop: tuple[ClientDump, Server], short_tmp: Path) -> None:
    tool, server = shop
    cancel = threading.Event()
    request = DumpRequest(as_service(server), tables_of("large"), short_tmp, chunk_bytes=100_000, cancel=cancel)
    with pytest.raises(CancelledError):
        dump(tool, request, during=lambda _file: cancel.set())
    assert our_dumps() == []


def test_a_wrong_password_is_told_before_anything_is_dumped_and_never_shown(
    shop: tuple[ClientDump, Server], short_tmp: Path
) -> None:
    tool, server = shop
    request = DumpRequest(as_service(server), tables_of("a"), short_tmp)
    with tool.run(request) as run:
        server.query("ALTER USER backupd@localhost IDENTIFIED BY 'another'")
        try:
            with pytest.raises(ToolError, match=r"exit") as caught:
                run.open(120)
        finally:
            server.query("ALTER USER backupd@localhost IDENTIFIED BY %s", (SERVICE_PASSWORD,))
    assert "Access denied" in caught.value.detail
    assert SERVICE_PASSWORD not in str(caught.value)


def test_a_servers_limit_of_rows_ends_it_before_it_begins(shop: tuple[ClientDump, Server], short_tmp: Path) -> None:
    tool, server = shop
    server.execute("SET GLOBAL sql_select_limit = 10")
    try:
        with (
            pytest.raises(ToolError, match="no more than 10 rows"),
            tool.run(DumpRequest(as_service(server), tables_of("a"), short_tmp)),
        ):
            pass
    finally:
        server.execute("SET GLOBAL sql_select_limit = DEFAULT")


PRINTED = (
    b"-- Some dump\nSET x;\n\n--\n-- Current Database: `s``1`\n--\n\nUSE `s``1`;\n\n"
    b"--\n-- Dumping data for table `t`\n--\n\n"
    b"INSERT INTO `t` (`a`, `b) VALUES (`) VALUES (1,'-- Dumping data for table `u`');\n"
    b"INSERT INTO `t` (`a`, `b) VALUES (`) VALUES (2,'\\nINSERT INTO `t`');\n\n"
    b"--\n-- Dumping data for table `empty`\n--\n\n\n--\n-- Current Database: `s2`\n--\n\n"
    b"-- Dumping data for table `t`\n--\n"
    b"INSERT INTO `t` (`a`) VALUES (3);\nINSERT INTO `t` (`a`) VALUES (4);\n-- Dump completed\n"
)
ONE, EMPTY, TWO = TableName("s`1", "t"), TableName("s`1", "empty"), TableName("s2", "t")


def test_the_output_is_taken_apart_wherever_it_is_cut(short_tmp: Path) -> None:
    dice = thrown("splitter")
    for number in range(20):
        folder = short_tmp / str(number)
        folder.mkdir()
        files: list[DumpedFile] = []
        left = PRINTED
        with Splitter([ONE, EMPTY, TWO], folder, 10_000) as splitter:
            while left:
                size = dice.randint(1, 60)
                files += splitter.feed(left[:size])
                left = left[size:]
            files += splitter.finish()
        assert splitter.complete == {ONE, EMPTY, TWO}
        texts = {file.table: file.path.read_bytes() for file in files}
        assert texts[ONE].endswith(
            b"INSERT INTO `t` (`a`, `b) VALUES (`) VALUES\n"
            b"(1,'-- Dumping data for table `u`'),\n(2,'\\nINSERT INTO `t`');\n"
        )
        assert texts[TWO].endswith(b"INSERT INTO `t` (`a`) VALUES\n(3),\n(4);\n")
        assert EMPTY not in texts


def test_an_output_that_ends_early_leaves_its_last_table_incomplete(short_tmp: Path) -> None:
    with Splitter([ONE, EMPTY, TWO], short_tmp, 10_000) as splitter:
        assert [file.table for file in splitter.feed(PRINTED[: PRINTED.index(b"(4)")])] == [ONE]
    assert splitter.complete == {ONE, EMPTY}
    assert [path.name[:6] for path in short_tmp.iterdir()] == ["000000"]


def our_dumps() -> list[int]:
    """The dump programs that this process started."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                words = (place / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"--databases" in words and f"/{os.getpid()}-".encode() in words:
                found.append(int(place.name))
    return found
