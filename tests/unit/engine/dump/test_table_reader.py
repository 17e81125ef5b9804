"""Tables of a quiet server into a folder in the layout of a logical backup, and back by hand."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from backupd.engine.dump import selection as tableread
from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.insert_files import DumpTable
from backupd.engine.dump.selection import dump_quiet, dump_tools, route
from backupd.engine.server.definitions import read_tables
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.dialect import dialect_of
from backupd.model.errors import CancelledError
from backupd.model.server_facts import Flavour, Version
from backupd.model.table import Outcome, TableName, data_path, definition_path, triggers_path
from backupd.process.run_context import RunContext
from tests.support.servers import mysql, zoo
from tests.support.servers.dumps import HEAD
from tests.support.servers.flavours import BOTH, as_root, server_of
from tests.support.servers.server import Server


@pytest.fixture(scope="module", params=BOTH)
def cage(request: pytest.FixtureRequest) -> Iterator[Server]:
    with server_of(request.param) as server:
        zoo.build(server)
        yield server


def joined(folder: Path, paths: Iterable[str]) -> bytes:
    return b"\n".join((folder / path).read_bytes() for path in paths if (folder / path).exists())


def test_the_whole_zoo_can_be_loaded_by_hand_from_the_folder(
    cage: Server, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tableread, "_LITTLE", 0)
    names = zoo.tables(cage)
    taken = dump_quiet(as_root(cage), names, short_tmp, RunContext())
    assert {table.name.shown: table.reason for table in taken if table.outcome is not Outcome.DUMPED} == {}
    assert [table.name for table in taken] == list(names)
    assert len({table.tool for table in taken}) > 1, "each by the fastest tool that brings it back"
    cage.execute("CREATE DATABASE back")
    client = "mariadb" if cage.sequences else str(mysql.root_programs() / "mysql")
    first = sorted(taken, key=lambda table: table.name.table not in ("numbers", "around"))
    files = [data_path(table.name, number) for table in taken for number in range(table.files)]
    for text in (
        joined(short_tmp, [definition_path(table.name) for table in first]),
        *(HEAD + (short_tmp / path).read_bytes() for path in files),
        joined(short_tmp, [triggers_path(table.name) for table in taken]),
    ):
        done = subprocess.run(
            [client, f"--defaults-file={cage.client_file()}", "back"], input=text, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr[-300:]
    before, after = zoo.checksums(cage), zoo.checksums(cage, "back")
    assert {name for name in before if before[name] != after[name]} == set()
    counts = {table.name.table: table.rows for table in taken}
    assert (counts["integers"], counts["empty_one"], counts["no_key"]) == (4, 0, 5)


def test_a_table_that_is_not_there_or_crashed_is_named_and_leaves_no_rows(cage: Server, short_tmp: Path) -> None:
    cage.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.isam (id INT PRIMARY KEY, v VARCHAR(100)) ENGINE = MyISAM",
        f"INSERT INTO shop.isam VALUES {', '.join(f'({number}, REPEAT(0x76, 50))' for number in range(2000))}",
        "FLUSH TABLES",
    )
    with (cage.datadir / "shop/isam.MYD").open("r+b") as file:
        file.seek(60000)
        file.write(b"\xff" * 3000)
    names = [TableName("shop", "isam"), TableName("shop", "gone"), TableName("zoo", "bits")]
    taken = dump_quiet(as_root(cage), names, short_tmp, RunContext())
    cage.execute("DROP DATABASE shop")
    assert [table.outcome for table in taken] == [Outcome.FAILED, Outcome.FAILED, Outcome.DUMPED]
    assert "isam" in taken[0].reason
    assert taken[1].reason == "there is no such table"
    assert (taken[0].files, taken[0].bytes, taken[0].rows) == (0, 0, None)
    assert not (short_tmp / data_path(names[0], 0)).exists()
    assert sorted(path.name for path in short_tmp.iterdir()) == ["tables"]


def test_what_a_faster_tool_could_not_do_our_own_reader_does(
    cage: Server, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tableread, "_LITTLE", 0)
    liar = short_tmp / "liar"
    liar.write_text(
        "#!/bin/sh\ncase $* in\n*version*) echo 'mydumper 0.10.1, built against MySQL 8';;\n*) exit 3;;\nesac\n"
    )
    liar.chmod(0o755)
    folder = short_tmp / "rows"
    folder.mkdir()
    taken = dump_quiet(as_root(cage), [TableName("zoo", "bits")], folder, RunContext(programs={"mydumper": str(liar)}))
    assert [(table.outcome, table.tool, table.rows) for table in taken] == [(Outcome.DUMPED, "backupd", 5)]


def test_cancelling_leaves_nothing_running(cage: Server, short_tmp: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        dump_quiet(as_root(cage), zoo.tables(cage), short_tmp, RunContext(cancel=cancel))


def test_each_table_goes_to_the_first_tool_that_brings_it_back(cage: Server) -> None:
    with as_root(cage).connect() as session:
        definitions = read_tables(session, zoo.tables(cage)).tables
        tools, missing = dump_tools(read_dialect(session))
    assert [tool.tool.name for tool in tools] == ["mydumper", "backupd"]
    assert missing == ()
    ways = {
        way.table.name.table: way
        for way in route(
            [(DumpTable(name, "InnoDB", 0), definition.columns) for name, definition in definitions.items()], tools
        )
    }
    assert (ways["bits"].tool, ways["bits"].reason) == (tools[0], "")
    assert ways["floats"].tool == ExactDump()
    assert "rounds its column" in ways["floats"].reason


def test_without_any_program_our_own_reader_is_left() -> None:
    tools, missing = dump_tools(dialect_of(Flavour.MYSQL, Version(9, 7)), paths={"mydumper": "/nowhere/mydumper"})
    assert tools == (ExactDump(),)
    assert len(missing) == 1
    assert "mydumper" in missing[0]
