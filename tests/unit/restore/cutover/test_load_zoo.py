"""Tables of every kind through our own reader into a staging schema: every bit of every row comes back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.insert_files import DumpRequest, DumpTable
from backupd.engine.server.definitions import read_tables, write_definition
from backupd.engine.sql.client import Connection
from backupd.model.table import DumpedTable, Outcome, TableName, data_path, definition_path, quote_name
from backupd.process.run_context import RunContext
from restore.cutover import table_load as tableload
from restore.cutover.parallel_load import load
from tests.support.dice import size
from tests.support.servers import mysql, zoo
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server, query
from tests.support.stores.folders import short_directory

STAGING = {"zoo": "backupd_restore_z1_1"}
BIG = size(20, 100) * 1024 * 1024


@pytest.fixture(params=[PrivateServer, MySQLServer], ids=["mariadb", "mysql"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param is MySQLServer and (why := mysql.why_not()):
        pytest.skip(why)
    with request.param(options={"max_allowed_packet": "1G"}, binlog=False) as made:
        yield made


def dumped(connection: Connection, names: Sequence[TableName], folder: Path) -> list[DumpedTable]:
    """``names`` in the layout of a logical backup, read by our own reader."""
    with connection.connect() as session:
        definitions = read_tables(session, names)
    assert not definitions.failed
    found: dict[TableName, list[int]] = {name: [] for name in names}
    with short_directory() as work:
        request = DumpRequest(connection, tuple(DumpTable(name, "", 0) for name in names), work, threads=2)
        with ExactDump().run(request) as run:
            run.open(30)
            for file in run.files():
                path = folder / data_path(file.table, len(found[file.table]))
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(file.path, path)
                found[file.table].append(file.size)
        assert not {name: reason for name, reason in run.verdicts().items() if reason}
    for name, definition in definitions.tables.items():
        path = folder / definition_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write_definition(definition))
    return [
        DumpedTable(name, Outcome.DUMPED, bytes=sum(sizes), files=len(sizes), tool="backupd")
        for name, sizes in found.items()
    ]


def definition(server: Server, schema: str, table: str) -> list[str]:
    """Without foreign keys; the last line says nothing about a comma behind it."""
    with closing(server.connect()) as connection:
        query(connection, "SET sql_mode = ''")
        text = str(query(connection, f"SHOW CREATE TABLE {quote_name(schema, table)}")[0][1])
    return [line.rstrip(",") for line in text.split("\n") if " FOREIGN KEY (" not in line]


def test_every_kind_of_table_comes_back_to_the_last_bit(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tableload, "DEFER_BYTES", 0)
    names = zoo.build(server, "zoo", big_row=BIG if server.sequences else size(BIG // 8, BIG))
    connection = Connection(socket=str(server.socket), user="root")
    tables = dumped(connection, names, tmp_path)

    loaded = load(connection, tmp_path, tables, STAGING, RunContext(workers=2))

    assert dict(loaded.failed) == {}
    # Values of theirs are what a server makes of impossible ones, and it says so again.
    assert {line.partition(":")[0] for line in loaded.warnings} <= {"zoo.floats", "zoo.doubles", "zoo.choices"}
    assert set(loaded.rows) == set(names)
    assert zoo.checksums(server, STAGING["zoo"], [name.table for name in names]) == zoo.checksums(server, "zoo")
    for name in names:
        assert definition(server, STAGING["zoo"], name.table) == definition(server, "zoo", name.table)
