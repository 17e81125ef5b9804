"""What would change when a restored table replaced a live one, told by real servers."""

from __future__ import annotations

import threading
from collections import Counter
from fnmatch import fnmatchcase

import pytest

from backupd.engine.server.definitions import read_table
from backupd.engine.sql.client import Connection
from backupd.model.errors import CancelledError
from backupd.model.table import TableName, quote_name
from restore.tables.definition_difference import LIVE_ONLY, RESTORED_ONLY
from restore.tables.row_difference import Pair, TableDifference, difference
from tests.support.dice import rounds, thrown
from tests.support.restores.handing import CountingConnection, counted, shared
from tests.support.restores.rolling import Kind, both
from tests.support.servers.server import Server

BOTH = both()


@pytest.fixture
def server(kind: Kind) -> Server:
    server = shared(kind)
    server.execute(
        "SET foreign_key_checks = 0",
        *(f"DROP DATABASE IF EXISTS {name}" for name in ("st", "shop")),
        "CREATE DATABASE st",
        "CREATE DATABASE shop",
    )
    return server


def compare(server: Server, *tables: str, sample: int = 20) -> tuple[TableDifference, ...]:
    pairs = [Pair(TableName("st", table), TableName("shop", table)) for table in tables]
    return difference(Connection(socket=str(server.socket), user="root"), pairs, threading.Event(), sample=sample)


def make(server: Server, columns: str, staged: str, live: str, *, other_columns: str = "", table: str = "t") -> None:
    name = quote_name(table)
    server.execute(
        f"CREATE TABLE st.{name} ({columns})",
        f"CREATE TABLE shop.{name} ({other_columns or columns})",
        *(f"INSERT INTO {schema}.{name} VALUES {rows}" for schema, rows in (("st", staged), ("shop", live)) if rows),
    )


@BOTH
class TestWithAKey:
    def test_missing_added_and_changed_rows_are_counted_and_sampled(self, server: Server) -> None:
        make(
            server,
            "a INT, b VARCHAR(9), v INT, PRIMARY KEY (b, a)",
            "(1, 'x', 1), (2, 'x', 2), (3, 'x', 3), (4, 'y', NULL), (5, 'y', 5)",
            "(2, 'x', 2), (3, 'x', 4), (4, 'y', 0), (5, 'y', 5), (6, 'z', 6)",
        )
        [told] = compare(server, "t")
        assert not told.why_not
        assert (told.staged_rows, told.live_rows, told.missing, told.added, told.changed) == (5, 5, 1, 1, 2)
        assert told.keys.columns == ("b", "a")
        assert (told.keys.missing, told.keys.added) == ((("x", 1),), (("z", 6),))
        assert sorted(told.keys.changed) == [("x", 3), ("y", 4)]
        assert not told.same

    def test_equal_tables_are_the_same_and_samples_have_a_limit(self, server: Server) -> None:
        numbers = ", ".join(f"({number})" for number in range(50))
        make(server, "id INT PRIMARY KEY", numbers, numbers)
        assert compare(server, "t")[0].same
        server.execute("DELETE FROM shop.t")
        [told] = compare(server, "t", sample=3)
        assert told.missing == 50
        assert len(told.keys.missing) == 3

    def test_what_a_collation_calls_equal_is_a_change(self, server: Server) -> None:
        make(
            server,
            "id VARCHAR(9) COLLATE utf8mb4_general_ci PRIMARY KEY, t VARCHAR(9) COLLATE utf8mb4_general_ci",
            "('a', 'x'), ('b', 'x'), ('c', 'x'), ('d', 'é')",
            "('A', 'x'), ('b', 'X'), ('c', 'x '), ('d', 'é')",
        )
        [told] = compare(server, "t")
        assert not told.why_not
        assert (told.missing, told.added, told.changed) == (0, 0, 3)

    def test_values_that_print_the_same_or_not_at_all(self, server: Server, kind: Kind) -> None:
        columns = (
            "id INT PRIMARY KEY, f FLOAT, d DOUBLE, b BINARY(4), v VARBINARY(9), bits BIT(9), g GEOMETRY, "
            "j JSON, e ENUM('x', 'y'), day DATE, n DECIMAL(20, 5), l LONGBLOB"
        )
        row = (
            "16777217, 1e300, 'a', x'00ff', b'101', ST_GeomFromText('POINT(1 2)'), '{\"a\": 1}', 'x', "
            "'2020-01-01', 1.5, REPEAT(x'00', 70000)"
        )
        make(server, columns, "", "")
        changes = [
            "f = 16777219",
            "d = 1.0000000000000001e300 * 1.0000000000000002",
            "b = 'a '",
            "v = x'00ff00'",
            "bits = b'111'",
            "g = ST_GeomFromText('POINT(1 3)')",
            "j = '{\"a\": [1]}'",
            "e = 'y'",
            "day = '2020-01-02'",
            "n = 1.50001",
            "l = CONCAT(REPEAT(x'00', 69999), x'01')",
            "l = NULL",
            "f = NULL",
        ]
        for number in range(len(changes) + 1):
            server.execute(f"INSERT INTO st.t VALUES ({number}, {row})", f"INSERT INTO shop.t VALUES ({number}, {row})")
        assert compare(server, "t")[0].same
        for number, change in enumerate(changes, 1):
            server.execute(f"UPDATE shop.t SET {change} WHERE id = {number}")
        [told] = compare(server, "t")
        assert not told.why_not
        assert sorted(key for (key,) in told.keys.changed) == list(range(1, len(changes) + 1))

    def test_zero_dates_and_nulls(self, server: Server) -> None:
        server.execute("SET SESSION sql_mode = ''")
        make(
            server,
            "id INT PRIMARY KEY, d DATE, t TIMESTAMP NULL, s DATETIME(6)",
            "(1, '0000-00-00', NULL, NULL), (2, NULL, '2020-01-01', '2020-02-00'), (3, NULL, NULL, NULL)",
            "(1, '0000-00-00', NULL, NULL), (2, NULL, '2020-01-01', '2020-02-00'), (3, '0000-00-00', NULL, NULL)",
        )
        [told] = compare(server, "t")
        assert not told.why_not
        assert told.keys.changed == ((3,),)

    def test_other_character_sets_hold_the_same_text(self, server: Server) -> None:
        make(
            server,
            "id VARCHAR(9) CHARACTER SET latin1 PRIMARY KEY, t TEXT CHARACTER SET latin1, v INT",
            "('é', 'ü', 1), ('b', 'ß', 1), ('c', 'c', 1)",
            "('é', 'ü', 1), ('b', 'ß', 2), ('d', 'c', 1)",
            other_columns="id VARCHAR(9) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY, "
            "t TEXT CHARACTER SET utf16, v INT",
        )
        [told] = compare(server, "t")
        assert not told.why_not
        assert (told.keys.missing, told.keys.added, told.keys.changed) == ((("c",),), (("d",),), (("b",),))
        assert told.columns_differ == (
            "id was varchar(9) latin1_swedish_ci, now varchar(9) utf8mb4_bin",
            "t was text latin1_swedish_ci, now text utf16_general_ci",
        )

    def test_a_definition_that_changed_since_compares_what_both_have(self, server: Server) -> None:
        make(
            server,
            "id INT PRIMARY KEY, gone INT, n INT, g INT AS (n + 1)",
            "(1, 1, 1, DEFAULT), (2, 2, 2, DEFAULT)",
            "('new', '1', 1, DEFAULT), ('new', '2x', 2, DEFAULT)",
            other_columns="fresh VARCHAR(9), n VARCHAR(9), id BIGINT PRIMARY KEY, g INT AS (id * 2) STORED",
        )
        [told] = compare(server, "t")
        assert not told.why_not
        assert (told.comparable, told.missing, told.added, told.keys.changed) == (True, 0, 0, ((2,),))
        text = "; ".join(told.columns_differ)
        assert "gone is only in the backup" in text
        assert "fresh is only in the live table" in text
        assert "n was int" in text

    def test_a_unique_key_serves_where_the_primary_one_changed(self, server: Server) -> None:
        make(
            server,
            "id INT PRIMARY KEY, code INT NOT NULL UNIQUE, v INT",
            "(1, 10, 1), (2, 20, 2)",
            "(10, 1), (20, 3)",
            other_columns="code INT NOT NULL PRIMARY KEY, v INT",
        )
        [told] = compare(server, "t")
        assert not told.why_not
        assert (told.keys.columns, told.keys.changed) == (("code",), ((20,),))

    def test_odd_names(self, server: Server) -> None:
        make(server, "`i``d.%s` INT PRIMARY KEY, `it's` INT", "(1, 1), (2, 2)", "(2, 3)", table="a.`b %d'")
        [told] = compare(server, "a.`b %d'")
        assert (told.keys.columns, told.keys.missing, told.keys.changed) == (("i`d.%s",), ((1,),), ((2,),))


@BOTH
class TestWithoutAKey:
    def test_equal_rows_are_counted(self, server: Server) -> None:
        make(
            server,
            "a INT, b VARCHAR(9), f FLOAT, UNIQUE (a)",
            "(NULL, 'x', 1), (NULL, 'x', 1), (NULL, NULL, 16777217), (1, 'y', NULL)",
            "(NULL, 'x', 1), (NULL, '', 16777217), (1, 'y', NULL), (2, 'y', NULL)",
        )
        [told] = compare(server, "t")
        assert not told.why_not
        assert (told.staged_rows, told.live_rows, told.missing, told.added, told.changed) == (4, 4, 2, 2, 0)
        assert told.keys.missing == ()

    def test_values_do_not_run_into_their_neighbours(self, server: Server) -> None:
        make(server, "a VARCHAR(9), b VARCHAR(9)", "('ab', 'c'), (NULL, '-')", "('a', 'bc'), ('-', NULL)")
        assert compare(server, "t")[0].missing == 2


@BOTH
class TestWhatCannotBeCompared:
    def test_one_does_not_keep_the_others_from_being_compared(self, server: Server) -> None:
        make(server, "id INT PRIMARY KEY", "(1)", "(1)")
        make(server, "id INT PRIMARY KEY", "(1)", "(1)", table="other", other_columns="code INT")
        server.execute("CREATE TABLE st.gone (id INT)")
        first, gone, other = compare(server, "t", "gone", "other")
        assert first.same
        assert (gone.comparable, gone.why_not) == (False, "there is no table shop.gone")
        assert "no common column" in other.why_not

    def test_cancelled_it_ends_soon(self, server: Server) -> None:
        make(server, "id INT", "(1), (2), (3), (4), (5), (6), (7), (8)", "")
        server.execute(*("INSERT INTO st.t SELECT a.id FROM st.t a, st.t b LIMIT 100000" for _ in range(4)))
        cancel = threading.Event()
        cancel.set()
        pairs = [Pair(TableName("st", "t"), TableName("shop", "t"))] * 50
        counted()
        with pytest.raises(CancelledError):
            difference(CountingConnection(socket=str(server.socket), user="root"), pairs, cancel)
        assert counted() < len(pairs)


@BOTH
class TestDefinitions:
    COLUMNS = "id INT AUTO_INCREMENT PRIMARY KEY, v INT, w VARCHAR(20), d DOUBLE"

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ("ADD UNIQUE KEY uw (w)", f"{LIVE_ONLY}UNIQUE KEY `uw` (`w`)"),
            ("DROP PRIMARY KEY, MODIFY id INT NOT NULL", f"{RESTORED_ONLY}PRIMARY KEY (`id`)"),
            ("ALTER v SET DEFAULT 5", "column `v` was int* DEFAULT NULL, now int* DEFAULT *5*"),
            ("MODIFY w VARCHAR(20) NOT NULL", "column `w` was varchar(20) *, now varchar(20) *NOT NULL"),
            ("MODIFY w VARCHAR(20) COMMENT 'a, (b'", "column `w` was *, now * COMMENT 'a, (b'"),
            ("MODIFY d DOUBLE FIRST", "the columns stand in another order"),
            ("COMMENT = 'it''s; new'", f"{LIVE_ONLY}COMMENT 'it''s; new'"),
            ("ENGINE = MyISAM", "ENGINE was InnoDB, now MyISAM"),
            ("PARTITION BY HASH (id) PARTITIONS 2", f"{LIVE_ONLY}PARTITION BY HASH ( *id* ) PARTITIONS 2"),
            ("ADD CONSTRAINT c1 CHECK (v > 0)", f"{LIVE_ONLY}CHECK (*v* > 0*)"),
            ("AUTO_INCREMENT = 500", None),
        ],
    )
    def test_the_same_rows_in_another_table_are_not_equal(self, server: Server, change: str, told: str | None) -> None:
        make(server, self.COLUMNS, "(1, 1, 'a', 1), (2, 2, 'b', 2)", "(1, 1, 'a', 1), (2, 2, 'b', 2)")
        server.execute(f"ALTER TABLE shop.t {change}")
        [found] = compare(server, "t")
        assert (found.comparable, found.missing, found.added, found.changed) == (True, 0, 0, 0)
        assert found.same is (told is None)
        lines = found.definition_differs
        assert any(fnmatchcase(line, told) for line in lines) if told else not lines, lines

    def test_foreign_keys_and_triggers_are_those_of_the_backup(self, server: Server) -> None:
        make(server, "id INT PRIMARY KEY", "(1)", "(1)", table="p")
        keys = "id INT PRIMARY KEY, p INT, KEY (p), CONSTRAINT {} FOREIGN KEY (p) REFERENCES {}p (id)"
        server.execute(
            "SET foreign_key_checks = 0",
            "DROP DATABASE IF EXISTS old",
            "CREATE DATABASE old",
            "CREATE TABLE old.p (id INT PRIMARY KEY)",
            f"CREATE TABLE old.t ({keys.format('a', 'old.')})",
            f"CREATE TABLE shop.t ({keys.format('b', 'shop.')})",
            "CREATE TABLE st.t (id INT PRIMARY KEY, p INT, KEY (p))",
            *(
                f"CREATE TRIGGER {schema}.g BEFORE INSERT ON {schema}.t FOR EACH ROW SET NEW.p = {value}"
                for schema, value in (("old", 1), ("shop", 1))
            ),
        )
        connection = Connection(socket=str(server.socket), user="root")

        def found() -> TableDifference:
            with connection.connect() as session:
                definition = read_table(session, TableName("old", "t"))
            return difference(
                connection, [Pair(TableName("st", "t"), TableName("shop", "t"), definition)], threading.Event()
            )[0]

        assert found().same
        server.execute(
            "DROP TRIGGER shop.g",
            "ALTER TABLE shop.t DROP FOREIGN KEY b",
            "CREATE TRIGGER shop.g BEFORE INSERT ON shop.t FOR EACH ROW SET NEW.p = 2",
            "CREATE TRIGGER shop.h BEFORE DELETE ON shop.t FOR EACH ROW SET @x = 1",
            "ALTER TABLE shop.t ADD FOREIGN KEY (p) REFERENCES shop.p (id) ON DELETE CASCADE",
        )
        told = found()
        assert not told.same
        assert f"{LIVE_ONLY}trigger `h`" in told.definition_differs
        assert any("SET NEW.p = 1, now " in line and line.endswith("SET NEW.p = 2") for line in told.definition_differs)
        assert f"{LIVE_ONLY}FOREIGN KEY (`p`) REFERENCES `p` (`id`) ON DELETE CASCADE" in told.definition_differs
        assert f"{RESTORED_ONLY}FOREIGN KEY (`p`) REFERENCES `p` (`id`)" in told.definition_differs
        server.execute("DROP DATABASE old")

    def test_a_view_in_its_place_is_told_to_be_one(self, server: Server) -> None:
        server.execute("CREATE TABLE st.t (id INT PRIMARY KEY)", "CREATE VIEW shop.t AS SELECT 1 AS id")
        [found] = compare(server, "t")
        assert not found.comparable
        assert "a view has this name" in found.why_not

    def test_of_a_versioned_table_only_present_rows_are_compared_and_that_is_said(
        self, server: Server, kind: Kind
    ) -> None:
        if not kind.mariadb:
            pytest.skip("MariaDB only")
        server.execute(
            *(
                f"CREATE TABLE {schema}.t (id INT PRIMARY KEY, v INT) WITH SYSTEM VERSIONING"
                for schema in ("st", "shop")
            ),
            "INSERT INTO st.t VALUES (1, 1)",
            "INSERT INTO shop.t VALUES (1, 2)",
            "UPDATE shop.t SET v = 1",
        )
        [found] = compare(server, "t")
        assert found.same
        assert found.remarks == ("only present rows are compared, not their history",)


@BOTH
@pytest.mark.parametrize("key", ["id INT PRIMARY KEY", "id INT"])
@pytest.mark.parametrize(
    ("staged", "live", "value", "other"),
    [
        ("BIGINT", "DOUBLE", "9007199254740993", "9007199254740993"),
        ("DECIMAL(20, 2)", "DOUBLE", "12345678901234567.89", "12345678901234567.89"),
        ("FLOAT", "BIGINT", "16777216", "16777200"),
    ],
)
def test_values_of_other_types_are_not_called_equal_when_they_are_not(
    server: Server, key: str, staged: str, live: str, value: str, other: str
) -> None:
    make(
        server, f"{key}, v {staged}", f"(1, {value}), (2, 1)", f"(1, {other}), (2, 1)", other_columns=f"{key}, v {live}"
    )
    [found] = compare(server, "t")
    assert (found.missing or found.changed) >= 1
    assert not found.same
    assert "v is compared as text" in found.remarks[0]


@BOTH
def test_a_key_of_another_type_does_not_bring_rows_together(server: Server) -> None:
    make(
        server,
        "id BIGINT PRIMARY KEY",
        "(9007199254740993)",
        "(9007199254740992)",
        other_columns="id DOUBLE PRIMARY KEY",
    )
    [found] = compare(server, "t")
    assert (found.missing, found.added, found.same) == (1, 1, False)


@BOTH
@pytest.mark.parametrize("key", ["id INT PRIMARY KEY", "id INT"])
def test_negative_zero_is_not_zero_where_the_server_tells_them_apart(server: Server, key: str) -> None:
    make(
        server, f"{key}, d DOUBLE, f FLOAT", "(1, 0, 1), (2, 1, 0), (3, 0, 0)", "(1, '-0', 1), (2, 1, '-0'), (3, 0, 0)"
    )
    [found] = compare(server, "t")
    apart = server.scalar("SELECT CONVERT(d USING binary) FROM shop.t WHERE id = 1") == b"-0"
    assert (found.missing or found.changed) == (2 if apart else 0)


@BOTH
@pytest.mark.campaign
def test_any_two_tables_are_compared_as_a_program_would(server: Server) -> None:
    dice = thrown("difference")
    for _ in range(rounds(3)):
        server.execute("DROP TABLE IF EXISTS st.t, shop.t")
        key = dice.choice(["PRIMARY KEY (k)", "UNIQUE (k)", "KEY (v)"])

        def row() -> tuple[int, str | None]:
            return dice.randrange(40), dice.choice([None, "", "a", "A", "a ", "b"])

        staged, live = ([row() for _ in range(dice.randrange(60))] for _ in range(2))
        if key != "KEY (v)":
            staged, live = list(dict(staged).items()), list(dict(live).items())
        text = [", ".join(f"({k}, {'NULL' if v is None else repr(v)})" for k, v in rows) for rows in (staged, live)]
        make(server, f"k INT NOT NULL, v VARCHAR(9), {key}", *text)
        [told] = compare(server, "t", sample=1000)
        if key == "KEY (v)":
            one, other = Counter(staged), Counter(live)
            expected = ((one - other).total(), (other - one).total(), 0)
        else:
            old, new = dict(staged), dict(live)
            expected = (
                len(old.keys() - new.keys()),
                len(new.keys() - old.keys()),
                sum(old[k] != new[k] for k in old.keys() & new.keys()),
            )
            assert {k for (k,) in told.keys.changed} == {k for k in old.keys() & new.keys() if old[k] != new[k]}
        assert (told.missing, told.added, told.changed) == expected
