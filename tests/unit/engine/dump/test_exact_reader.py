"""Our own reader against real servers: every table of the zoo, and everything that goes wrong meanwhile."""

from __future__ import annotations

import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.insert_files import DumpedFile, DumpRequest, DumpTable
from backupd.engine.server.definition_text import parse_table
from backupd.engine.server.definitions import read_tables
from backupd.engine.sql.client import Connection
from backupd.model.errors import CancelledError, ServerError
from backupd.model.table import TableName
from tests.support.dice import size
from tests.support.servers import zoo
from tests.support.servers.dumps import dump, load, wanted
from tests.support.servers.flavours import BOTH, as_root, as_service, server_of
from tests.support.servers.server import Server
from tests.support.service.processes import until

BIG = size(20, 100) * 1024 * 1024
TRAPS: dict[str, str | int | None] = {
    "sql_mode": "NO_BACKSLASH_ESCAPES,ANSI_QUOTES,PAD_CHAR_TO_FULL_LENGTH",
    "transaction_isolation": "READ-COMMITTED",
    "default_time_zone": "+05:30",
    "max_allowed_packet": BIG * 2,
}
"""Settings that change what sessions of others see."""


@pytest.fixture(scope="module", params=BOTH)
def cage(request: pytest.FixtureRequest) -> Iterator[Server]:
    with server_of(request.param, **TRAPS) as server:
        zoo.build(server, big_row=BIG)
        server.execute("CREATE DATABASE shop")
        yield server


@pytest.fixture
def shop(cage: Server) -> Server:
    """Three tables with a thousand rows each, and what a test did to them is gone."""
    cage.execute("DROP DATABASE shop", "CREATE DATABASE shop")
    for name in ("a", "b", "c"):
        cage.execute(
            f"CREATE TABLE shop.{name} (id INT PRIMARY KEY, v VARCHAR(500))",
            f"INSERT INTO shop.{name} WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE "
            f"i < 1000) SELECT i, REPEAT('{name}', 400) FROM n",
        )
    return cage


def tables_of(*names: str, engine: str = "InnoDB") -> tuple[DumpTable, ...]:
    return wanted([TableName("shop", name) for name in names], engine=engine)


def session_ids(server: Server) -> list[int]:
    return [int(row[0]) for row in server.query("SHOW PROCESSLIST") if row[1] == "backupd"]


def test_every_table_of_the_zoo_comes_back_bit_for_bit(cage: Server, short_tmp: Path) -> None:
    names = zoo.tables(cage)
    with as_root(cage).connect() as session:
        definitions = read_tables(session, names).tables
    reader = ExactDump()
    tables = wanted(names)
    assert {reader.refuses(table, definitions[table.name].columns) for table in tables} == {""}
    cage.execute("SET GLOBAL sql_select_limit = 1")
    try:
        dumped = dump(reader, DumpRequest(as_service(cage), tables, short_tmp, threads=3))
    finally:
        cage.execute("SET GLOBAL sql_select_limit = DEFAULT")
    assert {name: why for name, why in dumped.verdicts.items() if why is not None} == {}
    first = [definitions[name] for name in sorted(names, key=lambda name: not definitions[name].is_sequence)]
    load(cage, "back", dumped, first)
    before, after = zoo.checksums(cage), zoo.checksums(cage, "back")
    assert {name for name in before if before[name] != after[name]} == set()
    assert dumped.rows[TableName("zoo", "huge")] == 3
    assert all(
        line[:1] == b"(" or line[:6] in (b"INSERT", b"/*!401", b"/*!400", b"/*M!10", b"")
        for name, texts in dumped.texts.items()
        if name.table not in ("new\nline", "huge")
        for text in texts
        for line in text.split(b"\n")
    ), "each row has a line of its own"


def test_an_unchanged_table_gives_the_same_files_again(cage: Server, short_tmp: Path) -> None:
    tables = wanted(name for name in zoo.tables(cage) if name.table != "huge")
    request = DumpRequest(as_service(cage), tables, short_tmp, threads=3)
    assert dump(ExactDump(), request).texts == dump(ExactDump(), request).texts


def test_a_long_row_takes_little_more_memory_than_itself(cage: Server, short_tmp: Path) -> None:
    request = DumpRequest(as_service(cage), wanted([TableName("zoo", "huge")]), short_tmp)
    tracemalloc.start()
    try:
        with ExactDump().run(request) as run:
            run.open(120)
            files = list(run.files())
            assert set(run.verdicts().values()) == {None}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert BIG < sum(file.size for file in files) < 1.1 * BIG
    assert peak < 1.5 * BIG


def test_all_sessions_read_what_was_there_when_they_were_opened(shop: Server, short_tmp: Path) -> None:
    def change() -> None:
        shop.execute("INSERT INTO shop.a VALUES (5000, 'late')", "DELETE FROM shop.b", "UPDATE shop.c SET v = 'x'")

    dumped = dump(
        ExactDump(), DumpRequest(as_service(shop), tables_of("a", "b", "c"), short_tmp, threads=3), opened=change
    )
    assert dumped.good == {"a", "b", "c"}
    assert set(dumped.rows.values()) == {1000}
    assert b"late" not in b"".join(dumped.texts[TableName("shop", "a")])
    assert b"'x'" not in b"".join(dumped.texts[TableName("shop", "c")])


def test_large_tables_are_cut_into_files_that_hold_each_row_once(shop: Server, short_tmp: Path) -> None:
    shop.execute(
        "INSERT INTO shop.a SELECT id + 10000, REPEAT(v, 1) FROM shop.a",
        "INSERT INTO shop.a SELECT id + 20000, v FROM shop.a",
        "INSERT INTO shop.a SELECT id + 40000, v FROM shop.a",
    )
    dumped = dump(ExactDump(), DumpRequest(as_service(shop), tables_of("a"), short_tmp, chunk_bytes=1_000_000))
    texts = dumped.texts[TableName("shop", "a")]
    assert len(texts) > 2
    rows = [line.split(b",")[0] for text in texts for line in text.split(b"\n") if line[:1] == b"("]
    assert len(rows) == len(set(rows)) == dumped.rows[TableName("shop", "a")] == 8000


def test_tables_that_are_dropped_or_altered_meanwhile_are_named_and_stop_nothing(shop: Server, short_tmp: Path) -> None:
    def change() -> None:
        shop.execute("DROP TABLE shop.a", "ALTER TABLE shop.b ADD COLUMN w INT DEFAULT 7")

    dumped = dump(
        ExactDump(), DumpRequest(as_service(shop), tables_of("a", "b", "c"), short_tmp, threads=2), opened=change
    )
    assert dumped.good == {"c"}
    assert "doesn't exist" in dumped.why("a")
    assert "definition" in dumped.why("b").lower()
    assert dumped.rows[TableName("shop", "c")] == 1000


def test_a_crashed_table_is_named_with_the_servers_words(shop: Server, short_tmp: Path) -> None:
    shop.execute(
        "CREATE TABLE shop.isam (id INT PRIMARY KEY, v VARCHAR(100)) ENGINE = MyISAM",
        "INSERT INTO shop.isam SELECT id, 'v' FROM shop.a",
        "FLUSH TABLES",
    )
    data = shop.datadir / "shop/isam.MYD"
    with data.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff" * 3000)
    dumped = dump(ExactDump(), DumpRequest(as_service(shop), tables_of("isam", "a"), short_tmp, threads=1))
    assert dumped.good == {"a"}
    assert "isam" in dumped.why("isam")


def test_what_one_lost_session_did_not_read_another_one_reads(shop: Server, short_tmp: Path) -> None:
    dumped = dump(
        ExactDump(),
        DumpRequest(as_service(shop), tables_of("a", "b", "c"), short_tmp, threads=2),
        opened=lambda: shop.execute(f"KILL {session_ids(shop)[0]}"),
    )
    assert len(dumped.good) == 2
    assert [why for why in dumped.verdicts.values() if why is not None]


def test_when_every_session_is_lost_each_table_has_a_reason(shop: Server, short_tmp: Path) -> None:
    def end() -> None:
        for number in session_ids(shop):
            shop.execute(f"KILL {number}")

    request = DumpRequest(as_service(shop), tables_of("a", "b", "c"), short_tmp, threads=2)
    dumped = dump(ExactDump(), request, opened=end)
    assert dumped.good == set()
    assert all(dumped.verdicts.values())


def test_cancelling_leaves_no_session_and_no_file(shop: Server, short_tmp: Path) -> None:
    cancel = threading.Event()

    def during(_file: DumpedFile) -> None:
        cancel.set()

    with pytest.raises(CancelledError):
        dump(
            ExactDump(),
            DumpRequest(as_service(shop), tables_of("a", "b", "c"), short_tmp, cancel=cancel, threads=1),
            during=during,
        )
    until(lambda: session_ids(shop) == [])


def test_files_that_cannot_be_written_are_told_per_table(shop: Server, short_tmp: Path) -> None:
    folder = short_tmp / "rows"
    folder.mkdir()
    with ExactDump().run(DumpRequest(as_service(shop), tables_of("a", "b"), folder, threads=2)) as run:
        run.open(120)
        shutil.rmtree(folder)
        assert list(run.files()) == []
        assert all("cannot be written" in str(why) for why in run.verdicts().values())


def test_a_pause_holds_the_rows_back_and_loses_none(shop: Server, short_tmp: Path) -> None:
    with ExactDump().run(DumpRequest(as_service(shop), tables_of("a"), short_tmp)) as run:
        run.open(120)
        run.pause()
        timer = threading.Timer(0.3, run.resume)
        timer.start()
        assert sum(file.rows or 0 for file in run.files()) == 1000
        timer.join()
        assert list(run.verdicts().values()) == [None]


UNKNOWN = "CREATE TABLE `t` (\n  `a` int(11) DEFAULT NULL,\n  `x` xmltype DEFAULT NULL\n) ENGINE=InnoDB"
PRECISE = (
    "CREATE TABLE `t` (\n  `a` int(11) DEFAULT NULL,\n"
    "  `s` bigint(20) unsigned GENERATED ALWAYS AS ROW START,\n"
    "  `e` bigint(20) unsigned GENERATED ALWAYS AS ROW END,\n"
    "  PERIOD FOR SYSTEM_TIME (`s`, `e`)\n) ENGINE=InnoDB WITH SYSTEM VERSIONING"
)


@pytest.mark.parametrize(("create", "words"), [(UNKNOWN, "x (xmltype)"), (PRECISE, "transaction ids")])
def test_what_cannot_be_written_back_is_refused(create: str, words: str) -> None:
    name = TableName("shop", "t")
    assert words in ExactDump().refuses(DumpTable(name, "InnoDB", 0), parse_table(name, create).columns)


def test_the_zoo_tells_the_smallest_changes_apart(cage: Server) -> None:
    changes = {
        "floats": "f = 16777218 WHERE f = 16777216",
        "bits": "e = e ^ 1 WHERE id = 2",
        "bytes": "lb = CONCAT(SUBSTRING(lb, 2), 'x') WHERE id = 1",
        "moments": "ts6 = NULL WHERE id = 2",
        "shapes": "g = ST_GeomFromText('POINT(1 2)', 3857) WHERE id = 1",
        "choices": "e = '' WHERE e + 0 = 0",
    }
    before = zoo.checksums(cage, names=changes)
    with cage.connect(autocommit=False) as connection, connection.cursor() as cursor:
        for name, change in changes.items():
            cursor.execute(f"CREATE TABLE shop.z_{name} LIKE zoo.{name}")
            cursor.execute(f"INSERT INTO shop.z_{name} SELECT * FROM zoo.{name}")
            cursor.execute("SET sql_mode = ''")
            assert cursor.execute(f"UPDATE shop.z_{name} SET {change}"), name
        connection.commit()
    after = zoo.checksums(cage, "shop", [f"z_{name}" for name in changes])
    assert [name for name in changes if before[name] == after[f"z_{name}"]] == []


def test_connections_that_cannot_be_opened_are_told_on_entering(shop: Server, short_tmp: Path) -> None:
    wrong = Connection(socket=str(shop.socket), user="backupd", password="wrong")
    with pytest.raises(ServerError), ExactDump().run(DumpRequest(wrong, tables_of("a"), short_tmp)):
        pass
