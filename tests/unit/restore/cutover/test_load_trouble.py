"""A load that is killed, whose server dies, or for which there is no room: nothing is there twice, nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.engine.sql.client import Connection
from backupd.model.errors import ServerError
from backupd.model.job import Progress
from backupd.model.table import DumpedTable, TableName, quote_name
from backupd.process.run_context import RunContext
from restore.cutover import table_load as tableload
from restore.cutover.parallel_load import load
from restore.cutover.staging_schema import drop_staging
from tests.support.dice import rounds, thrown
from tests.support.restores.dump_folder import add_table
from tests.support.restores.load_victim import STAGING
from tests.support.servers import mysql
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server

CREATE = (
    "CREATE TABLE `{}` (\n  `id` int NOT NULL,\n  `k` int NOT NULL,\n  `t` varchar(100) NOT NULL,\n"
    "  PRIMARY KEY (`id`),\n  UNIQUE KEY `u` (`t`,`id`),\n  KEY `k` (`k`)\n) ENGINE={}"
)


@pytest.fixture(scope="module", params=[PrivateServer, MySQLServer], ids=["mariadb", "mysql"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param is MySQLServer and (why := mysql.why_not()):
        pytest.skip(why)
    with request.param() as made:
        yield made


def three_tables(folder: Path) -> list[DumpedTable]:
    """One in several files, one without transactions, one without a key that rows could be told apart by."""

    def rows(number: int) -> list[tuple[int, int, bytes]]:
        return [(n, n % 7, b"%d" % (n * 7919) * 5) for n in range(number)]

    keyless = "CREATE TABLE `keyless` (\n  `id` int,\n  `k` int,\n  `t` varchar(100)\n) ENGINE=InnoDB"
    return [
        add_table(folder, TableName("shop", "many"), CREATE.format("many", "InnoDB"), rows(9000), files=4),
        add_table(folder, TableName("shop", "isam"), CREATE.format("isam", "MyISAM"), rows(4000), files=2),
        add_table(folder, TableName("shop", "keyless"), keyless, rows(5000) + rows(2000), files=2),
    ]


def at(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user="root")


def assert_complete(server: Server, tables: list[DumpedTable]) -> None:
    for table in tables:
        name = quote_name(STAGING["shop"], table.name.table)
        assert server.scalar(f"SELECT COUNT(*) FROM {name}") == table.rows
    keyless = quote_name(STAGING["shop"], "keyless")
    assert server.query(
        f"SELECT n, COUNT(*) FROM (SELECT COUNT(*) n FROM {keyless} GROUP BY id) x GROUP BY n ORDER BY n"
    ) == [(1, 3000), (2, 2000)]
    checked = server.query(f"CHECK TABLE {keyless}, {quote_name(STAGING['shop'], 'many')}")
    assert [row[3] for row in checked] == ["OK", "OK"]


@pytest.mark.campaign
def test_a_load_that_is_killed_goes_on_and_no_row_is_there_twice(server: Server, tmp_path: Path) -> None:
    tables = three_tables(tmp_path)
    listed = tmp_path / "tables.json"
    listed.write_text(json.dumps([table.as_json() for table in tables]))
    dice = thrown("killed load")
    for _ in range(rounds(1)):
        for share in sorted(dice.sample(range(5, 100), 2)):
            enough = sum(table.bytes for table in tables) * share // 100
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "tests.support.restores.load_victim",
                    str(server.socket),
                    str(tmp_path),
                    str(listed),
                    str(enough),
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == -9, done.stderr
        loaded = load(at(server), tmp_path, tables, STAGING, RunContext(workers=3))
        assert (loaded.failed, loaded.warnings) == ({}, ())
        assert_complete(server, tables)
        drop_staging(at(server), STAGING.values())


def test_a_server_that_dies_under_a_load_loses_nothing_of_what_it_had(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tableload, "COMMIT_BYTES", 64 * 1024)
    tables = three_tables(tmp_path)
    half = sum(table.bytes for table in tables) // 2
    killed: list[int] = []

    def report(progress: Progress) -> None:
        if progress.bytes_done > half and not killed:
            killed.append(progress.bytes_done)
            server.kill()

    with pytest.raises(ServerError) as caught:
        load(at(server), tmp_path, tables, STAGING, RunContext(workers=2, report=report))
    assert caught.value.retryable
    assert killed
    server.start()
    seen: list[Progress] = []
    loaded = load(at(server), tmp_path, tables, STAGING, RunContext(workers=2, report=seen.append))
    assert loaded.failed == {}
    assert_complete(server, tables)
    drop_staging(at(server), STAGING.values())


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server with room for a few megabytes (the one tablespace whose size can be bounded without a file system of its
    own), to which ``T`` and ``t`` are the same name."""
    with PrivateServer(
        options={
            "innodb_file_per_table": 0,
            "innodb_data_file_path": "ibdata1:12M:autoextend:max:20M",
            "lower_case_table_names": 1,
        },
        binlog=False,
    ) as full:
        yield full


@pytest.fixture
def cramped(small: Server) -> Iterator[Server]:
    yield small
    drop_staging(at(small), STAGING.values())


def test_a_full_disk_ends_the_load_and_it_goes_on_when_there_is_room(cramped: Server, tmp_path: Path) -> None:
    name = TableName("shop", "many")
    rows = [(n, n, b"x" * 100) for n in range(60000)]
    table = add_table(tmp_path, name, CREATE.format("many", "InnoDB"), rows, files=2, batch=1000)
    with pytest.raises(ServerError, match=r"no room for shop\.many") as caught:
        load(at(cramped), tmp_path, [table], STAGING, RunContext(workers=2))
    assert "continues where it stopped" in caught.value.hint
    cramped.execute("SET GLOBAL innodb_file_per_table = 1", f"ALTER TABLE {STAGING['shop']}.many FORCE")
    assert load(at(cramped), tmp_path, [table], STAGING, RunContext(workers=2)).rows == {name: 60000}


def test_of_names_that_are_the_same_to_the_server_only_one_is_loaded(cramped: Server, tmp_path: Path) -> None:
    tables = [
        add_table(tmp_path, TableName("shop", name), CREATE.format(name, "InnoDB"), [(1, 1, name.encode())])
        for name in ("twin", "Twin")
    ]
    loaded = load(at(cramped), tmp_path, tables, STAGING, RunContext(workers=4))
    assert loaded.rows == {TableName("shop", "twin"): 1}
    assert "does not distinguish its name from shop.twin" in loaded.failed[TableName("shop", "Twin")]
    assert cramped.scalar(f"SELECT t FROM {STAGING['shop']}.twin") == "twin"


def test_a_definition_that_only_a_lax_server_takes_is_taken_and_told(cramped: Server, tmp_path: Path) -> None:
    name = TableName("shop", "lax")
    create = "CREATE TABLE `lax` (\n  `a` int\n) ENGINE=InnoDB KEY_BLOCK_SIZE=3"
    loaded = load(at(cramped), tmp_path, [add_table(tmp_path, name, create, [(1,)])], STAGING, RunContext(workers=4))
    assert loaded.rows == {name: 1}
    assert "shop.lax: the server accepted its definition with a warning" in loaded.warnings[0]
