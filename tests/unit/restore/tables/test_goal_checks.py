"""What is said of a server before it gets tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from backupd.engine.server.definitions import understand
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import RefusedError
from backupd.model.table import TableName
from restore.cutover.keys_and_triggers import TableInventory
from restore.cutover.plan import refuse_unfit
from restore.tables.outcome import refuse_old, remarks_on, unknown_to
from tests.support.restores.handing import shared
from tests.support.restores.rolling import Kind, both
from tests.support.servers.server import Server

BOTH = both()
VIEW, FREE = TableName("shop", "v"), TableName("shop", "free")


@pytest.fixture
def server(kind: Kind) -> Server:
    server = shared(kind)
    server.execute(
        "SET foreign_key_checks = 0",
        "DROP DATABASE IF EXISTS shop",
        "CREATE DATABASE shop",
        "CREATE VIEW shop.v AS SELECT 1 AS one",
    )
    return server


def connection(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user="root")


@BOTH
def test_names_of_views_and_of_the_servers_own_schemas_are_refused(server: Server) -> None:
    with connection(server).connect() as session:
        inventory = TableInventory.look(session, ["shop"])
    refuse_unfit(inventory, [FREE])
    with pytest.raises(RefusedError, match=r"views of these names: shop\.v"):
        refuse_unfit(inventory, [FREE, VIEW])
    for schema in ("mysql", "sys", "information_schema", "PERFORMANCE_SCHEMA"):
        with pytest.raises(RefusedError, match="tables of the server itself"):
            refuse_unfit(inventory, [TableName(schema, "t")])


@BOTH
def test_a_server_that_is_read_only_is_remarked_on(server: Server) -> None:
    with connection(server).connect() as session:
        assert list(remarks_on(session, "db1")) == []
        session.execute("SET GLOBAL read_only = 1")
        try:
            [remark] = remarks_on(session, "db1")
        finally:
            session.execute("SET GLOBAL read_only = 0")
    assert "db1 is read_only" in remark


@BOTH
def test_a_server_that_replicates_is_remarked_on(server: Server, kind: Kind) -> None:
    begin = (
        "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = 1, MASTER_USER = 'nobody'",
        "START SLAVE",
        "STOP SLAVE",
        "RESET SLAVE ALL",
    )
    if not kind.mariadb:
        begin = (
            "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_PORT = 1, SOURCE_USER = 'nobody'",
            "START REPLICA",
            "STOP REPLICA",
            "RESET REPLICA ALL",
        )
    server.execute(*begin[:2])
    try:
        with connection(server).connect() as session:
            [remark] = remarks_on(session, "db1")
    finally:
        server.execute(*begin[2:])
    assert "db1 replicates from another server" in remark


@BOTH
def test_tables_of_unknown_engines_and_collations_are_named(server: Server, kind: Kind) -> None:
    definition = "CREATE TABLE `{0}` (\n  `a` varchar(9) COLLATE {2} DEFAULT NULL\n) ENGINE={1} COMMENT='COLLATE odd'"
    strange = "utf8mb4_0900_bin" if kind.mariadb else "utf8mb4_nopad_bin"
    made = [
        understand(TableName("shop", name), definition.format(name, *rest))
        for name, *rest in (
            ("good", "InnoDB", "latin1_bin"),
            ("engine", "Tokudb", "latin1_bin"),
            ("collation", "InnoDB", strange),
        )
    ]
    with connection(server).connect() as session:
        unknown = unknown_to(session, made)
        assert session.scalar("SELECT 1") == 1
    assert set(unknown) == {TableName("shop", "engine"), TableName("shop", "collation")}
    assert "no engine Tokudb" in unknown[TableName("shop", "engine")]
    assert f"does not know the collation {strange}" in unknown[TableName("shop", "collation")]


@dataclass
class Answering:
    """A session of a server that says this of its version."""

    version: str
    comment: str = "MySQL Community Server (GPL)"

    def query(self, _statement: str) -> list[tuple[Any, ...]]:
        return [(self.version, self.comment)]


@pytest.mark.parametrize("version", ["5.5.62", "5.6.24-log", "5.7.5"])
def test_tables_are_not_put_into_a_server_that_is_too_old(version: str) -> None:
    with pytest.raises(
        RefusedError,
        match=r"db56 is mysql 5.* tables can be restored only into 5\.7\.6 and "
        "later",
    ) as caught:
        refuse_old(cast(Session, Answering(version)), "db56")
    assert "--sql FOLDER" in caught.value.hint


@pytest.mark.parametrize(
    ("version", "comment"), [("5.7.6", "MySQL"), ("8.4.1", "MySQL"), ("5.5.68-MariaDB", "MariaDB Server")]
)
def test_tables_are_put_into_all_others(version: str, comment: str) -> None:
    refuse_old(cast(Session, Answering(version, comment)), "db")
