"""Definitions read from real servers of both flavours, and made again from what was written."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from backupd.engine.server.definitions import (
    SchemaScripts,
    read_definition,
    read_schema,
    read_table,
    read_tables,
    statements,
    write_definition,
    write_triggers,
)
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import NotFoundError
from backupd.model.table import TableName, quote_name
from tests.support.servers import zoo
from tests.support.servers.flavours import BOTH, as_root, as_service, server_of
from tests.support.servers.mysql import root_programs
from tests.support.servers.server import Server, query

MODE = "ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT"
SHOP = (
    "CREATE DATABASE shop CHARACTER SET latin1",
    (
        "CREATE TABLE shop.orders (id INT PRIMARY KEY, v VARCHAR(90) CHARACTER SET utf8mb4, "
        "at TIMESTAMP DEFAULT '2020-01-01 12:00:00')"
    ),
    "CREATE VIEW shop.z_first AS SELECT id, v FROM shop.orders",
    "CREATE VIEW shop.m_second AS SELECT id FROM shop.z_first",
    "CREATE VIEW shop.a_third AS SELECT m_second.id FROM shop.m_second JOIN shop.z_first USING (id)",
    "CREATE VIEW shop.broken AS SELECT v FROM shop.orders",
    f"SET SESSION sql_mode = '{MODE}'",
    (
        'CREATE TRIGGER shop."late one" BEFORE INSERT ON shop.orders FOR EACH ROW '
        "SET NEW.v = NEW.v || '\\' || ';' || '//'"
    ),
    (
        'CREATE TRIGGER shop.early BEFORE INSERT ON shop.orders FOR EACH ROW PRECEDES "late one" '
        "SET NEW.v = CONCAT(NEW.v, '🦆')"
    ),
    "SET SESSION sql_mode = DEFAULT, character_set_client = latin1, collation_connection = latin1_german1_ci",
    "CREATE FUNCTION shop.twice(x VARCHAR(20)) RETURNS VARCHAR(40) DETERMINISTIC RETURN CONCAT(x, '//', x)",
    "CREATE PROCEDURE shop.p()\nBEGIN\n  DECLARE y VARCHAR(9);\n  SELECT ';', twice('a');\nEND",
    "SET NAMES utf8mb4, time_zone = '+05:00'",
    "CREATE EVENT shop.e ON SCHEDULE EVERY 1 DAY STARTS '2031-01-01 10:00:00' DO DELETE FROM orders",
    "SET time_zone = '+00:00'",
    "ALTER DATABASE shop CHARACTER SET utf8mb4",
)


@pytest.fixture(scope="module", params=BOTH)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    # The server's own settings must not show in what is read.
    options = {"sql_mode": "ANSI_QUOTES,NO_BACKSLASH_ESCAPES", "default_time_zone": "+03:00"}
    with server_of(request.param, **options) as found:
        with closing(found.connect()) as connection:
            query(connection, "SET SESSION sql_mode = 'STRICT_TRANS_TABLES', time_zone = '+00:00'")
            for statement in SHOP:
                query(connection, statement.replace("sql_mode = DEFAULT", "sql_mode = 'STRICT_TRANS_TABLES'"))
        found.execute("SET SESSION sql_mode = ''")
        zoo.build(found)
        yield found


@pytest.fixture
def session(server: Server) -> Iterator[Session]:
    with as_service(server).connect() as opened:
        yield opened


def _run(server: Server, schema: str, texts: list[str]) -> None:
    """Run statements as root in one session with this schema."""
    with as_root(server).connect() as session:
        session.execute(f"USE {quote_name(schema)}")
        for text in texts:
            session.execute(text)


def _client(server: Server, schema: str, script: bytes) -> None:
    mariadb = server.sequences
    program = "mariadb" if mariadb else str(root_programs() / "mysql")
    subprocess.run([program, f"--defaults-file={server.client_file()}", "--comments", schema], input=script, check=True)


def test_what_is_read_from_the_text_is_what_the_information_schema_says(server: Server, session: Session) -> None:
    found = read_tables(session, zoo.tables(server))
    assert not found.failed
    keys: dict[tuple[str, str], list[str]] = {}
    for table, key, column in server.query(
        "SELECT TABLE_NAME, INDEX_NAME, COLUMN_NAME FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = 'zoo' "
        "ORDER BY TABLE_NAME, INDEX_NAME, SEQ_IN_INDEX"
    ):
        keys.setdefault((str(table), str(key)), []).append(str(column))
    told: dict[str, list[tuple[str, str, bool, bool, bool]]] = {}
    for table, column, kind, extra, nullable in server.query(
        "SELECT TABLE_NAME, COLUMN_NAME, DATA_TYPE, EXTRA, IS_NULLABLE FROM information_schema.COLUMNS "
        "WHERE TABLE_SCHEMA = 'zoo' ORDER BY TABLE_NAME, ORDINAL_POSITION"
    ):
        words = str(extra).upper()
        made = "GENERATED" in words.replace("DEFAULT_GENERATED", "")
        told.setdefault(str(table), []).append(
            (str(column), str(kind), made or "ROW " in words, "INVISIBLE" in words, nullable == "YES")
        )
    for name, definition in found.tables.items():
        if definition.is_sequence:
            continue
        columns = definition.columns
        assert [
            (column.name, column.kind, column.generated, column.invisible, column.nullable) for column in columns.all
        ] == told[name.table], name
        assert columns.primary_key == tuple(keys.get((name.table, "PRIMARY"), ())), name
    children = found.tables[TableName("zoo", "children")]
    assert [(key.name, key.parent, key.on_delete) for key in children.foreign_keys] == [
        ("kin", TableName("zoo", "parents"), "CASCADE")
    ]


def test_a_written_definition_is_read_back_and_makes_the_very_same_table(server: Server, session: Session) -> None:
    found = read_tables(session, zoo.tables(server)).tables
    server.execute("CREATE DATABASE again CHARACTER SET latin1", "CREATE DATABASE again_by_client")
    script = b"".join(write_definition(one) for one in found.values())
    for name, definition in found.items():
        assert read_definition(name, write_definition(definition), write_triggers(definition)) == definition
    # References to parents by name only are resolved in the new schema.
    _client(server, "again", script)
    made = read_tables(session, [TableName("again", name.table) for name in found])
    assert not made.failed
    assert {name.table: one.create for name, one in made.tables.items()} == {
        name.table: one.create for name, one in found.items()
    }


def test_triggers_come_back_in_order_in_another_schema_with_mode_and_every_letter(
    server: Server, session: Session
) -> None:
    orders = read_table(session, TableName("shop", "orders"))
    assert "DEFAULT '2020-01-01 12:00:00'" in orders.create  # in UTC, whatever the server's zone
    for schema in ("elsewhere", "by_client"):
        server.execute(f"CREATE DATABASE {schema} CHARACTER SET latin1")
        if schema == "elsewhere":
            _run(server, schema, [orders.create, *statements(orders.triggers)])
        else:
            _client(server, schema, write_definition(orders) + write_triggers(orders))
        server.execute(f"INSERT INTO {schema}.orders (id, v) VALUES (1, 'x')")
        assert server.scalar(f"SELECT v FROM {schema}.orders") == "x🦆\\;//"
        again = read_table(session, TableName(schema, "orders"))
        ours = [text for text in statements(again.triggers) if text.startswith("CREATE")]
        assert ours == [text for text in statements(orders.triggers) if text.startswith("CREATE")]
        assert all(mode in again.triggers for mode in MODE.split(","))


def test_a_schema_comes_back_under_another_name_with_views_on_views_routines_and_events(
    server: Server, session: Session
) -> None:
    scripts = read_schema(session, "shop")
    assert scripts.unread == ()
    orders = read_table(session, TableName("shop", "orders"))
    for schema in ("twin", "client_twin"):
        server.execute(f"CREATE DATABASE {schema} CHARACTER SET utf8mb4")
        _run(server, schema, [orders.create])
        for text in (scripts.routines, scripts.views, scripts.events):
            if schema == "twin":
                _run(server, schema, list(statements(text)))
            else:
                _client(server, schema, text.encode())
        twin = read_schema(session, schema)
        assert _same(twin) == _same(scripts)
        assert server.scalar(f"SELECT {schema}.twice('ab')") == "ab//ab"
        assert server.query(f"SELECT * FROM {schema}.a_third") == []
    assert "SESSION time_zone = '+05:00'" in scripts.events
    assert "STARTS '2031-01-01 10:00:00'" in scripts.events
    assert set(scripts.files()) == {f"schemas/shop/{name}.sql" for name in ("create", "views", "routines", "events")}


def _same(scripts: SchemaScripts) -> tuple[str, str, str]:
    return scripts.views, scripts.routines, scripts.events


def test_the_schema_itself_is_made_by_its_script(server: Server, session: Session) -> None:
    server.execute("CREATE DATABASE `we ``ird` CHARACTER SET ucs2 COLLATE ucs2_bin")
    text = read_schema(session, "we `ird", objects=False)
    assert (text.views, text.routines, text.events) == ("", "", "")
    server.execute("DROP DATABASE `we ``ird`")
    _client(server, "mysql", text.files()["schemas/we%20%60ird/create.sql"])
    assert (
        server.scalar("SELECT DEFAULT_COLLATION_NAME FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = 'we `ird'")
        == "ucs2_bin"
    )


def test_a_view_that_works_no_more_is_named_and_keeps_nothing_from_loading(server: Server, session: Session) -> None:
    server.execute(
        "CREATE DATABASE half",
        "CREATE TABLE half.t (a INT, b INT)",
        "CREATE VIEW half.good AS SELECT a FROM half.t",
        "CREATE VIEW half.bad AS SELECT b FROM half.t",
        "CREATE VIEW half.worse AS SELECT * FROM half.bad",
        "ALTER TABLE half.t DROP COLUMN b",
    )
    scripts = read_schema(session, "half")
    assert len(scripts.unread) == 2
    assert all("does not work" in text for text in scripts.unread)
    server.execute("CREATE DATABASE half_again", "CREATE TABLE half_again.t (a INT)")
    _client(server, "half_again", scripts.views.encode())
    views = server.query("SELECT TABLE_NAME FROM information_schema.VIEWS WHERE TABLE_SCHEMA = 'half_again'")
    assert views == [("good",)]
    assert "-- CREATE ALGORITHM" in scripts.views


def test_what_the_account_may_not_read_is_named(server: Server) -> None:
    server.execute("CREATE USER poor@localhost IDENTIFIED BY 'p'", "GRANT SELECT ON shop.* TO poor@localhost")
    poor = Connection(socket=str(server.socket), user="poor", password="p")
    with poor.connect() as session:
        scripts = read_schema(session, "shop")
        names = (("shop", "orders"), ("zoo", "moments"), ("shop", "no"))
        found = read_tables(session, [TableName(*name) for name in names])
        with pytest.raises(NotFoundError, match=r"the definition of zoo\.moments cannot be read"):
            read_table(session, TableName("zoo", "moments"))
        with pytest.raises(NotFoundError, match="there is no schema 'nowhere'"):
            read_schema(session, "nowhere")
    assert [text.partition(":")[0] for text in scripts.unread[:3]] == [
        f"poor@localhost has no {privilege} privilege on *.*, nor on this schema"
        for privilege in ("SHOW VIEW", "TRIGGER", "EVENT")
    ]
    assert any(text.startswith("view `") for text in scripts.unread)
    assert set(found.tables) == {TableName("shop", "orders")}
    assert "denied" in found.failed[TableName("zoo", "moments")]
    assert "doesn't exist" in found.failed[TableName("shop", "no")]


def test_a_table_that_somebody_rebuilds_does_not_keep_the_others_waiting(
    server: Server, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backupd.engine.server.definitions.LOCK_SECONDS", 1)
    server.execute("CREATE DATABASE held", "CREATE TABLE held.busy (a INT)", "CREATE TABLE held.free (a INT)")
    with closing(server.connect()) as reader, closing(server.connect()) as dropper:
        query(reader, "BEGIN")
        query(reader, "SELECT * FROM held.busy")
        waiting = threading.Thread(target=query, args=(dropper, "DROP TABLE held.busy"))
        waiting.start()
        while not server.query("SHOW FULL PROCESSLIST") or not any(
            "metadata lock" in str(row[6]) for row in server.query("SHOW FULL PROCESSLIST")
        ):
            waiting.join(0.02)
        found = read_tables(session, [TableName("held", "busy"), TableName("held", "free")])
        query(reader, "ROLLBACK")
        waiting.join()
    # A pending DROP has the exclusive lock in line, so nobody new gets in before it, or the definition is still there.
    assert TableName("held", "free") in found.tables
    assert TableName("held", "busy") in {*found.failed, *found.tables}


def test_packages_of_mariadb_come_back(server: Server, session: Session) -> None:
    if not server.sequences:
        pytest.skip("only MariaDB has packages")
    with closing(server.connect()) as connection:
        query(connection, "CREATE DATABASE oracle")
        query(connection, "USE oracle")
        query(connection, "SET SESSION sql_mode = ORACLE")
        query(connection, "CREATE PACKAGE pack AS FUNCTION f RETURN INT; END")
        query(connection, "CREATE PACKAGE BODY pack AS FUNCTION f RETURN INT AS BEGIN RETURN 42; END; END")
    scripts = read_schema(session, "oracle")
    server.execute("CREATE DATABASE oracle_again")
    _client(server, "oracle_again", scripts.routines.encode())
    assert server.scalar("SELECT oracle_again.`pack`.f()") == 42


def test_a_schema_whose_name_holds_line_ends_is_made_again_by_its_script(server: Server, session: Session) -> None:
    name = "line\nend`s;\nname"
    server.execute(f"CREATE DATABASE {quote_name(name)}")
    try:
        script = read_schema(session, name, objects=False).create
    finally:
        server.execute(f"DROP DATABASE {quote_name(name)}")
    _run(server, "shop", list(statements(script)))
    assert server.query(f"SHOW DATABASES LIKE '{name}'") != []
    server.execute(f"DROP DATABASE {quote_name(name)}")
