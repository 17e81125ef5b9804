"""Foreign keys of real servers, and rows without parents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backupd.engine.server.definitions import read_tables
from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import graph, orphans
from backupd.model.table import TableName
from tests.support.servers.flavours import BOTH, as_service, server_of
from tests.support.servers.server import Server

PARENT, CHILD, OTHER = TableName("shop", "par`ent"), TableName("shop", "child"), TableName("crm", "notes")


@pytest.fixture(scope="module", params=BOTH)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with server_of(request.param) as found:
        found.execute(
            "CREATE DATABASE shop",
            "CREATE DATABASE crm",
            f"CREATE TABLE {PARENT} (a INT, b VARCHAR(20), PRIMARY KEY (a, b), up INT, KEY (up))",
            f"CREATE TABLE {CHILD} (id INT PRIMARY KEY, pa INT, pb VARCHAR(20), CONSTRAINT both_columns FOREIGN KEY "
            f"(pa, pb) REFERENCES {PARENT} (a, b) ON DELETE CASCADE ON UPDATE SET NULL)",
            f"CREATE TABLE {OTHER} (id INT PRIMARY KEY, c INT, boss INT, CONSTRAINT far FOREIGN KEY (c) REFERENCES "
            f"{CHILD} (id), CONSTRAINT own FOREIGN KEY (boss) REFERENCES {OTHER} (id) ON DELETE NO ACTION)",
            f"INSERT INTO {PARENT} VALUES (1, 'x', NULL), (2, 'y', NULL)",
            "SET SESSION foreign_key_checks = 0",
            f"INSERT INTO {CHILD} VALUES (1, 1, 'x'), (2, 1, 'y'), (3, NULL, 'z'), (4, 9, NULL), (5, 2, 'Y'), "
            "(6, 7, '7')",
            f"INSERT INTO {OTHER} VALUES (1, 1, 1), (2, 99, NULL), (3, 99, 5)",
        )
        yield found


@pytest.fixture
def session(server: Server) -> Iterator[Session]:
    with as_service(server).connect() as opened:
        yield opened


def test_the_graph_goes_across_schemas_and_agrees_with_the_definitions(session: Session) -> None:
    keys = graph(session)
    of_child = [key for key in keys if key.child == CHILD]
    assert [(key.name, key.child, key.columns, key.parent, key.parent_columns) for key in of_child] == [
        ("both_columns", CHILD, ("pa", "pb"), PARENT, ("a", "b"))
    ]
    assert (of_child[0].on_delete, of_child[0].on_update) == ("CASCADE", "SET NULL")
    assert [key.name for key in keys if key.parent == CHILD] == ["far"]
    assert [key.name for key in keys if key.acts] == ["both_columns"]
    printed = {
        key.name: key
        for table in read_tables(session, [PARENT, CHILD, OTHER]).tables.values()
        for key in table.foreign_keys
    }
    assert set(printed) == {"both_columns", "far", "own"}
    for key in keys:
        again = printed[key.name]
        assert (again.child, again.columns, again.parent, again.parent_columns, again.acts) == (
            key.child,
            key.columns,
            key.parent,
            key.parent_columns,
            key.acts,
        )


def test_a_clause_makes_the_same_constraint_again(server: Server, session: Session) -> None:
    before = read_tables(session, [CHILD, OTHER]).tables
    server.execute("SET SESSION foreign_key_checks = 0")
    for definition in before.values():
        for key in definition.foreign_keys:
            server.execute(
                f"ALTER TABLE {definition.name} DROP FOREIGN KEY `{key.name}`",
                f"ALTER TABLE {definition.name} ADD {key.clause}",
            )
    after = read_tables(session, [CHILD, OTHER]).tables
    assert {name: one.foreign_keys for name, one in after.items()} == {
        name: one.foreign_keys for name, one in before.items()
    }


def test_orphans_are_counted_as_the_server_would_and_nulls_reference_nothing(server: Server, session: Session) -> None:
    keys = {key.name: key for key in graph(session)}
    found = orphans(session, keys["both_columns"])
    assert (found.rows, sorted(found.sample), found.missing) == (2, [(1, "y"), (7, "7")], False)
    far = orphans(session, keys["far"], sample=1)
    assert (far.rows, far.sample) == (2, ((99,),))
    assert orphans(session, keys["own"]).rows == 1
    server.execute("SET SESSION foreign_key_checks = 0", f"RENAME TABLE {PARENT} TO shop.away")
    try:
        lost = orphans(session, keys["both_columns"])
        assert (lost.rows, lost.missing) == (4, True)
    finally:
        server.execute(f"RENAME TABLE shop.away TO {PARENT}")
