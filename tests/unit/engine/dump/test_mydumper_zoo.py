"""What the real mydumper dumps comes back bit for bit; what would not is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.engine.dump.insert_files import DumpRequest, DumpTable
from backupd.engine.dump.selection import mydumper_tool
from backupd.engine.server.definitions import read_tables
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName
from tests.support.servers import mysql, zoo
from tests.support.servers.dumps import connection_to, dump, load, wanted
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer, root_programs
from tests.support.servers.server import Server

REFUSED = {
    Flavour.MARIADB: {
        "floats",
        "hidden",
        "addresses",
        "numbers",
        "around",
        "versioned",
        "versioned_told",
        "versioned_parts",
        "choices",
    },
    Flavour.MYSQL: {"floats", "hidden", "generated_key", "stamped", "choices", "doubles", "made"},
}
"""Apart from those with odd names."""


@pytest.fixture(scope="module", params=[Flavour.MARIADB, Flavour.MYSQL])
def cage(request: pytest.FixtureRequest) -> Iterator[tuple[Flavour, Server]]:
    if request.param is Flavour.MYSQL and mysql.why_no_root():
        pytest.skip(mysql.why_no_root())
    options = {"sql_mode": "NO_BACKSLASH_ESCAPES", "transaction_isolation": "READ-COMMITTED"}
    server = (
        PrivateServer(options=options, binlog=False)
        if request.param is Flavour.MARIADB
        else MySQLServer(mysqld_path=str(root_programs() / "mysqld"), options=options, tcp=True, binlog=False)
    )
    with server:
        server.execute("SET SESSION sql_mode = ''")
        zoo.build(server)
        server.execute(
            "CREATE TABLE zoo.stamped (id int PRIMARY KEY, at timestamp NOT NULL DEFAULT "
            "CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP)",
            "INSERT INTO zoo.stamped VALUES (1, '2001-02-03 04:05:06')",
        )
        yield request.param, server


def test_every_table_that_is_not_refused_comes_back_bit_for_bit(cage: tuple[Flavour, Server], short_tmp: Path) -> None:
    flavour, server = cage
    connection = connection_to(server)
    with connection.connect() as session:
        definitions = read_tables(session, zoo.tables(server)).tables
    tool = mydumper_tool(flavour)
    tables = [DumpTable(name, definition.engine, 0) for name, definition in definitions.items()]
    refused = {
        table.name.table: why for table in tables if (why := tool.refuses(table, definitions[table.name].columns))
    }
    taken = tuple(table for table in tables if table.name.table not in refused)
    assert {name for name in refused if name not in (*zoo.ODD_NAMES, *zoo.TWINS)} == REFUSED[flavour]
    server.execute("SET GLOBAL sql_select_limit = 1")
    dumped = dump(tool, DumpRequest(connection, taken, short_tmp, threads=2))
    server.execute("SET GLOBAL sql_select_limit = DEFAULT")
    assert dumped.good == {table.name.table for table in taken}, dumped.verdicts
    back = [definitions[table.name] for table in taken]
    load(server, "back", dumped, back)
    names = [table.name.table for table in taken]
    before, after = zoo.checksums(server, "zoo", names), zoo.checksums(server, "back", names)
    assert {name for name in names if before[name] != after[name]} == set()


def test_an_account_that_must_use_tls_is_served_over_tcp(cage: tuple[Flavour, Server], short_tmp: Path) -> None:
    flavour, server = cage
    if flavour is not Flavour.MYSQL:
        pytest.skip("only MySQL makes itself certificates")
    server.execute("CREATE USER tls@'%' IDENTIFIED BY 'geheim' REQUIRE SSL", "GRANT ALL ON *.* TO tls@'%'")
    remote = Connection(
        host="127.0.0.1",
        port=server.port or 0,
        user="tls",
        password="geheim",
        ssl={"ca": str(server.datadir / "ca.pem")},
    )
    table = TableName("zoo", "no_key")
    dumped = dump(mydumper_tool(flavour), DumpRequest(remote, wanted([table]), short_tmp))
    assert dumped.verdicts == {table: None}
    assert dumped.rows == {table: 5}
