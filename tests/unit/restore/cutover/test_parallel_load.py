"""Rows of a logical backup into staging schemas, on real servers of both flavours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from backupd.engine.sql.client import Connection
from backupd.model.errors import BusyError, CancelledError, RefusedError, UsageError
from backupd.model.job import Progress
from backupd.model.table import DumpedTable, Outcome, TableName, data_path, definition_path, quote_name
from backupd.process.run_context import RunContext
from restore.cutover import staging_schema as loadjournal
from restore.cutover import table_load as tableload
from restore.cutover.parallel_load import load
from restore.cutover.staging_schema import Journal, drop_staging, staging_names, stagings
from tests.support.restores.dump_folder import add_from, add_table
from tests.support.servers import mysql
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server

ORDERS, LINES = TableName("shop", "orders"), TableName("shop", "lines")
STAGING = {"shop": "backupd_restore_x1_1", "my.shop": "backupd_restore_x1_2"}
NUMBERS = "CREATE TABLE `{}` (\n  `id` int NOT NULL,\n  `t` longblob,\n  PRIMARY KEY (`id`)\n) ENGINE={}"


def _started(make: type[Server]) -> Iterator[Server]:
    with make(options={"max_allowed_packet": "16M"}) as server:
        server.execute("CREATE DATABASE shop CHARACTER SET utf8mb4", "CREATE DATABASE `my.shop` CHARACTER SET utf8mb4")
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[Server]:
    yield from _started(PrivateServer)


@pytest.fixture(scope="module")
def mysqld() -> Iterator[Server]:
    if why := mysql.why_not():
        pytest.skip(why)
    yield from _started(MySQLServer)


@pytest.fixture(params=["mariadb", "mysqld"])
def target(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with the empty schemas shop and my.shop, and no staging schema."""
    server: Server = request.getfixturevalue(request.param)
    yield server
    drop_staging(at(server), STAGING.values())
    for schema in ("shop", "my.shop"):
        server.execute(f"DROP DATABASE {quote_name(schema)}", f"CREATE DATABASE {quote_name(schema)} CHARSET utf8mb4")


def at(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user="root")


def staged(name: TableName) -> str:
    return quote_name(STAGING[name.schema], name.table)


def numbers(
    folder: Path, table: str = "numbers", *, rows: int = 50, files: int = 1, engine: str = "InnoDB", size: int = 10
) -> DumpedTable:
    name = TableName("shop", table)
    values = [(n, bytes([65 + n % 26]) * size) for n in range(rows)]
    return add_table(folder, name, NUMBERS.format(table, engine), values, files=files, batch=10, engine=engine)


def count(server: Server, name: TableName) -> int:
    return int(server.scalar(f"SELECT COUNT(*) FROM {staged(name)}"))


def test_tables_come_back_with_their_keys_and_without_what_reaches_other_tables(
    target: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tableload, "DEFER_BYTES", 0)
    odd = TableName("my.shop", "we ird/..;'\n`x`")
    target.execute(
        f"CREATE TABLE {ORDERS} (id int unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY, note varchar(80) NOT NULL, price "
        "decimal(9,2), day date NOT NULL DEFAULT '2020-01-01', UNIQUE KEY note (note), KEY `by;``day` (day, id), "
        "FULLTEXT KEY words (note), CHECK (price > -1)) AUTO_INCREMENT = 500 COMMENT = 'it''s; FOREIGN KEY (`x`)'",
        f"CREATE TABLE {LINES} (id bigint NOT NULL, n int NOT NULL AUTO_INCREMENT, order_id int unsigned, PRIMARY KEY "
        f"(id), KEY (n), KEY (order_id), CONSTRAINT fk FOREIGN KEY (order_id) REFERENCES {ORDERS} (id))",
        f"CREATE TRIGGER shop.stamp BEFORE INSERT ON {LINES} FOR EACH ROW SET NEW.n = 7",
        f"CREATE TABLE {odd} (`a;\nb` int, `c,d` text)",
        f"INSERT INTO {ORDERS} (note, price) VALUES " + ",".join(f"('order {n}', {n}.25)" for n in range(300)),
        f"INSERT INTO {LINES} VALUES " + ",".join(f"({n}, 1, {n + 500})" for n in range(1, 200)),
        f"UPDATE {LINES} SET n = id + 5",
        f"INSERT INTO {odd} VALUES (1, ';\\nINSERT INTO `x`'), (1, ';\\nINSERT INTO `x`'), (NULL, '')",
    )
    tables = [add_from(target, tmp_path, name, files=files) for name, files in ((ORDERS, 3), (LINES, 1), (odd, 2))]
    seen: list[Progress] = []

    loaded = load(at(target), tmp_path, tables, STAGING, RunContext(workers=3, report=seen.append))

    assert (loaded.failed, loaded.warnings) == ({}, ())
    assert loaded.rows == {ORDERS: 300, LINES: 199, odd: 3}
    size = sum(table.bytes for table in tables)
    assert (seen[-1].bytes_done, seen[-1].bytes_total, seen[-1].files_done) == (size, size, 3)
    for name in (ORDERS, LINES, odd):
        assert sorted(map(repr, target.query(f"SELECT * FROM {staged(name)}"))) == sorted(
            map(repr, target.query(f"SELECT * FROM {name}"))
        )
        create = str(target.query(f"SHOW CREATE TABLE {name}")[0][1])
        without = "\n".join(line for line in create.splitlines() if not line.startswith("  CONSTRAINT `fk`"))
        assert str(target.query(f"SHOW CREATE TABLE {staged(name)}")[0][1]).replace(",\n)", "\n)") == without.replace(
            ",\n)", "\n)"
        )
    assert target.scalar("SELECT COUNT(*) FROM information_schema.TRIGGERS WHERE TRIGGER_SCHEMA LIKE 'backupd%'") == 0


def test_every_byte_comes_back(target: Server, tmp_path: Path) -> None:
    values = [bytes(range(256)), bytes(range(255, -1, -1)) * 3000, b"", b";\n", b"\\", b"'", b"\\';\n", b"\xff", None]
    name = TableName("shop", "bytes")
    table = add_table(tmp_path, name, NUMBERS.format("bytes", "InnoDB"), enumerate(values), batch=4)
    loaded = load(at(target), tmp_path, [table], STAGING, RunContext(workers=4))
    assert (loaded.failed, loaded.warnings) == ({}, ())
    assert [row[0] for row in target.query(f"SELECT t FROM {staged(name)} ORDER BY id")] == values


def test_what_cannot_be_loaded_is_named_and_left_out_and_the_rest_is_there(target: Server, tmp_path: Path) -> None:
    good = numbers(tmp_path, "good")
    names = ("twice", "short", "fewer", "foreign", "drops", "cut", "engine")
    tables = {name: numbers(tmp_path, name) for name in names}

    def data(name: str) -> Path:
        return tmp_path / data_path(tables[name].name, 0)

    data("twice").write_bytes(data("twice").read_bytes() + b"INSERT INTO `twice` VALUES\n(7,'again');\n")
    data("short").unlink()
    tables["fewer"] = DumpedTable(tables["fewer"].name, Outcome.DUMPED, rows=51, files=1)
    data("foreign").write_bytes(data("twice").read_bytes())
    data("drops").write_bytes(b"DROP TABLE `good`;\n")
    data("cut").write_bytes(data("cut").read_bytes()[:-30])
    engine = tmp_path / definition_path(tables["engine"].name)
    engine.write_text(engine.read_text().replace("InnoDB", "NoSuchOne"))
    gone = DumpedTable(TableName("shop", "gone"), Outcome.FAILED, reason="it is marked as crashed")

    loaded = load(at(target), tmp_path, [good, *tables.values(), gone], STAGING, RunContext(workers=2))

    assert loaded.rows == {good.name: 50}
    reasons = {name.table: reason for name, reason in loaded.failed.items()}
    assert "Duplicate entry '7'" in reasons["twice"]
    assert "0 files with its rows are there, the backup has 1" in reasons["short"]
    assert reasons["fewer"] == "50 rows were loaded, the backup has 51"
    assert "rows of another table" in reasons["foreign"]
    assert "no INSERT into its table" in reasons["drops"]
    assert "ends within a statement" in reasons["cut"]
    assert "Unknown storage engine 'NoSuchOne'" in reasons["engine"]
    assert "it is marked as crashed" in reasons["gone"]
    assert target.query(
        "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s ORDER BY 1", (STAGING["shop"],)
    ) == [("backupd_load",), ("good",)]


def test_a_row_that_the_server_takes_no_packet_for_is_told_with_the_cure(target: Server, tmp_path: Path) -> None:
    name = TableName("shop", "large")
    large = add_table(tmp_path, name, NUMBERS.format("large", "InnoDB"), [(1, b"x" * 5_000_000)])
    target.execute("SET GLOBAL max_allowed_packet = 1048576")
    try:
        loaded = load(at(target), tmp_path, [large, numbers(tmp_path)], STAGING, RunContext(workers=4))
        assert "SET GLOBAL max_allowed_packet = 8388608" in loaded.failed[name]
        assert len(loaded.rows) == 1
        target.execute("SET GLOBAL max_allowed_packet = 8388608")
        assert load(at(target), tmp_path, [large, numbers(tmp_path)], STAGING, RunContext(workers=4)).failed == {}
    finally:
        target.execute("SET GLOBAL max_allowed_packet = 16777216")


@pytest.mark.parametrize("engine", ["InnoDB", "MyISAM"])
def test_a_load_that_was_cancelled_goes_on_and_no_row_comes_twice(
    target: Server, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tableload, "COMMIT_BYTES", 4096)
    table = numbers(tmp_path, rows=2000, files=3, size=20, engine=engine)
    cancel = Event()

    def report(progress: Progress) -> None:
        if progress.bytes_done > table.bytes // 2:
            cancel.set()

    with pytest.raises(CancelledError, match="cancelled"):
        load(at(target), tmp_path, [table], STAGING, RunContext(workers=2, report=report, cancel=cancel))
    there = count(target, table.name)
    assert 0 < there < 2000
    loaded = load(at(target), tmp_path, [table], STAGING, RunContext(workers=2))
    assert loaded.rows == {table.name: 2000}
    assert target.scalar(f"SELECT COUNT(DISTINCT id) FROM {staged(table.name)}") == 2000
    assert load(at(target), tmp_path, [table], STAGING, RunContext(workers=4)).rows == {table.name: 2000}


def test_a_table_whose_files_have_changed_is_loaded_anew(
    target: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tableload, "COMMIT_BYTES", 4096)
    table = numbers(tmp_path, rows=2000)
    cancel = Event()
    with pytest.raises(CancelledError):
        load(
            at(target),
            tmp_path,
            [table],
            STAGING,
            RunContext(
                workers=4,
                cancel=cancel,
                report=lambda progress: cancel.set() if progress.bytes_done > table.bytes // 2 else None,
            ),
        )
    path = tmp_path / data_path(table.name, 0)
    path.write_bytes(path.read_bytes().replace(b"'AAAAAAAAAA'", b"'aaaaaaaaaa'"))
    assert load(at(target), tmp_path, [table], STAGING, RunContext(workers=4)).rows == {table.name: 2000}
    assert target.scalar(f"SELECT COUNT(*) FROM {staged(table.name)} WHERE t = 'AAAAAAAAAA'") == 0


def test_two_loads_into_the_same_schema_do_not_mix(
    target: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loadjournal, "DYING", 0)
    table = numbers(tmp_path)
    with at(target).connect() as session:
        Journal(STAGING["shop"]).claim(session, 4)
        assert not [one for one in stagings(at(target)) if one.active]
        with pytest.raises(BusyError, match="right now"):
            load(at(target), tmp_path, [table], STAGING, RunContext(workers=4))


def test_nothing_is_loaded_into_a_schema_that_holds_other_tables(target: Server, tmp_path: Path) -> None:
    target.execute("CREATE TABLE shop.precious (a int)")
    with pytest.raises(RefusedError, match="not empty"):
        load(at(target), tmp_path, [numbers(tmp_path)], {"shop": "shop"}, RunContext(workers=4))
    with pytest.raises(RefusedError, match="not empty"):
        load(
            at(target),
            tmp_path,
            [numbers(tmp_path)],
            {"my.shop": STAGING["my.shop"], "shop": "shop"},
            RunContext(workers=4),
        )
    with pytest.raises(UsageError, match="shop"):
        load(at(target), tmp_path, [numbers(tmp_path)], {}, RunContext(workers=4))
    assert target.scalar("SELECT COUNT(*) FROM shop.precious") == 0


def test_a_load_that_was_killed_before_its_first_entry_goes_on(target: Server, tmp_path: Path) -> None:
    with at(target).connect() as session:
        session.execute(f"CREATE DATABASE {quote_name(STAGING['shop'])}")
        Journal(STAGING["shop"]).create(session)
    target.execute(f"CREATE TABLE {quote_name(STAGING['shop'], 'precious')} (a int)")
    with pytest.raises(RefusedError, match="not empty") as refused:
        load(at(target), tmp_path, [numbers(tmp_path)], STAGING, RunContext(workers=4))
    assert refused.value.detail == "it holds precious"
    target.execute(f"DROP TABLE {quote_name(STAGING['shop'], 'precious')}")
    assert load(at(target), tmp_path, [numbers(tmp_path)], STAGING, RunContext(workers=4)).rows == {
        TableName("shop", "numbers"): 50
    }


def test_staging_schemas_are_listed_and_dropped_and_nothing_else_is(target: Server, tmp_path: Path) -> None:
    names = staging_names("2KX9", ["shop", "my.shop"])
    load(at(target), tmp_path, [numbers(tmp_path)], names, RunContext(workers=4))
    found = stagings(at(target))
    assert [(one.restore_id, one.schemas, one.tables, one.active) for one in found] == [
        ("2kx9", ("backupd_restore_2kx9_1", "backupd_restore_2kx9_2"), 1, False)
    ]
    assert found[0].begun is not None
    with pytest.raises(RefusedError, match="shop"):
        drop_staging(at(target), [*names.values(), "shop"])
    with closing(target.connect()) as other, other.cursor() as cursor:
        cursor.execute("SELECT 1")
        drop_staging(at(target), [*names.values(), "backupd_restore_2kx9_7"])
    assert stagings(at(target)) == ()
    assert target.scalar("SELECT COUNT(*) FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = 'shop'") == 1


def test_what_the_server_makes_of_a_value_is_told(target: Server, tmp_path: Path) -> None:
    name = TableName("shop", "small")
    create = "CREATE TABLE `small` (\n  `a` tinyint DEFAULT NULL\n) ENGINE=InnoDB"
    table = add_table(tmp_path, name, create, [(1,), (300,)])
    loaded = load(at(target), tmp_path, [table], STAGING, RunContext(workers=4))
    assert len(loaded.warnings) == 1
    assert "shop.small" in loaded.warnings[0]
    assert "Out of range value" in loaded.warnings[0]


def test_places_on_the_disks_of_the_source_are_not_taken_over(target: Server, tmp_path: Path) -> None:
    name = TableName("shop", "outside")
    create = (
        "CREATE TABLE `outside` (\n  `id` int NOT NULL COMMENT 'DATA DIRECTORY=''/x''',\n  PRIMARY KEY (`id`)\n) "
        "ENGINE=InnoDB DATA DIRECTORY='/nowhere/'"
    )
    loaded = load(at(target), tmp_path, [add_table(tmp_path, name, create, [(1,)])], STAGING, RunContext(workers=4))
    assert (loaded.rows, loaded.failed) == ({name: 1}, {})
    assert "DIRECTORY=''/x''" in str(target.query(f"SHOW CREATE TABLE {staged(name)}")[0][1])


def test_an_account_that_may_only_reach_staging_schemas_is_enough(target: Server, tmp_path: Path) -> None:
    target.create_user("loader", "Pa55-word", ())
    target.execute(
        "GRANT CREATE, DROP, ALTER, INDEX, SELECT, INSERT, UPDATE, DELETE ON `backupd\\_restore\\_%`.* "
        "TO loader@localhost"
    )
    tables = [numbers(tmp_path, files=2), numbers(tmp_path, "aside", engine="MyISAM")]
    if target.sequences:
        create = "CREATE TABLE `past` (\n  `a` int DEFAULT NULL\n) ENGINE=InnoDB WITH SYSTEM VERSIONING"
        moments = ("2020-01-01 00:00:00.5", "2021-01-01 00:00:00")
        tables.append(
            add_table(
                tmp_path, TableName("shop", "past"), create, [(1, *moments)], columns=("a", "row_start", "row_end")
            )
        )
    connection = Connection(socket=str(target.socket), user="loader", password="Pa55-word")
    loaded = load(connection, tmp_path, tables, STAGING, RunContext(workers=2))
    assert (loaded.failed, loaded.warnings) == ({}, ())
    if target.sequences:
        past = staged(TableName("shop", "past"))
        assert target.query(f"SELECT a, CAST(row_start AS CHAR) FROM {past} FOR SYSTEM_TIME ALL")[0][0] == 1
        assert target.query(f"SELECT a FROM {past}") == []
    drop_staging(connection, STAGING.values())
