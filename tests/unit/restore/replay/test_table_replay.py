"""Replays that are narrowed down to some tables. The oracle: the source itself, stopped at the same place."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pymysql
import pytest

from backupd.model.binlog import ReplayMethod
from backupd.model.errors import RefusedError, ServerError
from backupd.model.table import TableName
from tests.support.dice import rounds, size, thrown
from tests.support.restores.narrowed import SavedTables, base_of, checksums, narrowed_copy, relatives_of, replayed
from tests.support.restores.rolling import MARIADB, Kind, asking, both, here, logs, place_before, roll
from tests.support.servers.server import Server

BOTH = both()
ORDERS = TableName("shop", "orders")
COLUMNS = "id INT PRIMARY KEY AUTO_INCREMENT, n INT, p INT"

BEFORE = (
    "CREATE DATABASE shop",
    "CREATE DATABASE doomed",
    "CREATE DATABASE `odd.shop`",
    "CREATE TABLE shop.orders (id INT PRIMARY KEY, n INT)",
    "CREATE TABLE shop.Orders (id INT PRIMARY KEY)",
    "CREATE TABLE shop.customers (id INT PRIMARY KEY)",
    (
        "CREATE TABLE shop.items (id INT PRIMARY KEY, customer INT, CONSTRAINT c FOREIGN KEY (customer) "
        "REFERENCES shop.customers (id) ON DELETE CASCADE ON UPDATE SET NULL)"
    ),
    "CREATE TABLE shop.counted (id INT PRIMARY KEY, times INT)",
    (
        "CREATE TABLE shop.parts (id INT PRIMARY KEY, n INT) "
        "PARTITION BY RANGE (id) (PARTITION low VALUES LESS THAN (100), PARTITION high VALUES LESS THAN MAXVALUE)"
    ),
    "CREATE TABLE shop.emptied (id INT PRIMARY KEY)",
    "CREATE TABLE doomed.t (id INT PRIMARY KEY)",
    "CREATE TABLE `odd.shop`.`or,d%e_r` (id INT PRIMARY KEY)",
    "CREATE TABLE shop.shorn (id INT PRIMARY KEY)",
    (
        "CREATE TRIGGER shop.counts AFTER INSERT ON shop.orders FOR EACH ROW "
        "UPDATE counted SET times = times + 1 WHERE id = 1"
    ),
    "CREATE PROCEDURE shop.known() SELECT 1",
    "CREATE PROCEDURE doomed.known() SELECT 1",
    "CREATE EVENT doomed.e ON SCHEDULE EVERY 1 DAY DO SELECT 1",
    "CREATE USER early@localhost",
    "INSERT INTO shop.counted VALUES (1, 0)",
    "INSERT INTO shop.orders VALUES (1, 1), (2, 2), (3, 3)",
    "INSERT INTO shop.customers VALUES (1), (2), (3)",
    "INSERT INTO shop.items VALUES (1, 1), (2, 2), (3, 3)",
    "INSERT INTO shop.parts VALUES (1, 1), (200, 2)",
    "INSERT INTO shop.emptied VALUES (1), (2)",
    "INSERT INTO `odd.shop`.`or,d%e_r` VALUES (1)",
    "INSERT INTO doomed.t VALUES (1)",
)
AFTER = (
    # What has to do with none of the tables, and fails where they alone are.
    "CREATE USER late@localhost",
    "GRANT SELECT ON *.* TO late@localhost",
    "GRANT SELECT ON shop.orders TO early@localhost",
    "REVOKE SELECT ON shop.orders FROM early@localhost",
    "GRANT SELECT ON doomed.* TO early@localhost",
    "DROP USER early@localhost",
    "CREATE ROLE writers",
    "GRANT writers TO late@localhost",
    "DROP PROCEDURE shop.known",
    "DROP PROCEDURE doomed.known",
    "DROP EVENT doomed.e",
    "CREATE DATABASE later",
    "CREATE PROCEDURE later.p() BEGIN SELECT 1; SELECT 2; END",
    "CREATE FUNCTION later.f() RETURNS INT DETERMINISTIC RETURN 1",
    "CREATE EVENT later.e ON SCHEDULE EVERY 1 DAY DO SELECT 1",
    "ALTER EVENT later.e DISABLE",
    "CREATE VIEW shop.seen AS SELECT * FROM shop.counted",
    "CREATE TABLE later.t (id INT)",
    "DROP VIEW shop.seen",
    "CREATE VIEW later.seen AS SELECT * FROM shop.orders",
    "CREATE TABLE later.u LIKE shop.orders",
    "CREATE TRIGGER shop.other BEFORE INSERT ON shop.shorn FOR EACH ROW SET @a = 1",
    "DROP TRIGGER shop.other",
    "DROP DATABASE doomed",
    "DROP DATABASE later",
    "ALTER DATABASE `odd.shop` CHARACTER SET latin1",
    "INSERT INTO shop.shorn VALUES (1)",
    "TRUNCATE shop.shorn",
    "DROP TABLE shop.shorn",
    "ANALYZE TABLE shop.orders, shop.items",
    "INSERT INTO shop.Orders VALUES (77)",
    "DROP TABLE shop.Orders",
    # Cascades and triggers.
    "DELETE FROM shop.customers WHERE id = 1",
    "UPDATE shop.customers SET id = 20 WHERE id = 2",
    "INSERT INTO shop.orders VALUES (4, 4), (5, 5)",
    # As tools that change tables do it, and another way round.
    "CREATE TABLE shop._orders_new LIKE shop.orders",
    "ALTER TABLE shop._orders_new ADD COLUMN more INT DEFAULT 7",
    "INSERT INTO shop._orders_new (id, n) SELECT id, n FROM shop.orders",
    "RENAME TABLE shop.orders TO shop._orders_old, shop._orders_new TO shop.orders",
    "DROP TABLE IF EXISTS shop._orders_old",
    "INSERT INTO shop.orders VALUES (6, 6, 6)",
    "DELETE FROM shop.orders WHERE id = 1",
    "CREATE TABLE shop.fresh (id INT PRIMARY KEY)",
    "INSERT INTO shop.fresh VALUES (5)",
    "ALTER TABLE shop.fresh RENAME TO shop.fresher",
    "CREATE TABLE shop.swapped (id INT PRIMARY KEY, n INT)",
    "INSERT INTO shop.swapped VALUES (300, 3)",
    "ALTER TABLE shop.parts EXCHANGE PARTITION high WITH TABLE shop.swapped",
    "TRUNCATE shop.emptied",
    "INSERT INTO shop.emptied VALUES (9)",
    "INSERT INTO `odd.shop`.`or,d%e_r` VALUES (2)",
    "CREATE TABLE shop.born (id INT PRIMARY KEY) AS SELECT id FROM shop.items",
    "DROP TABLE shop.fresher",
)
WANTED = (
    ORDERS,
    TableName("shop", "items"),
    TableName("shop", "parts"),
    TableName("shop", "emptied"),
    TableName("odd.shop", "or,d%e_r"),
    TableName("shop", "born"),
    TableName("shop", "fresher"),
)


@BOTH
def test_tables_come_back_as_the_source_has_them_whatever_happened_around_them(kind: Kind, short_tmp: Path) -> None:
    with kind.make() as source:
        source.execute(*BEFORE)
        base, saved = base_of(kind, source), SavedTables(source)
        with _writing(source):
            source.execute(*AFTER)
            wanted = checksums(source.query, WANTED)
            source.execute("DROP TABLE shop.parts", "DELETE FROM shop.orders")
        stop = place_before(kind, source, "DROP TABLE `shop`.`parts`")
        needed, got, copied = replayed(kind, source, base, saved, WANTED, short_tmp, stop)
        assert copied == wanted
        assert len(copied) == len(WANTED) - 1
        assert needed.gone == {
            TableName("shop", "_orders_new"): ORDERS,
            TableName("shop", "_orders_old"): None,
            TableName("shop", "fresh"): None,
            TableName("shop", "fresher"): None,
            TableName("shop", "Orders"): None,
        }
        others = {name for name in base.tables if name not in needed.tables}
        assert {TableName("shop", "counted"), TableName("doomed", "t")} <= others
        assert {TableName("shop", "customers"), TableName("shop", "Orders")} <= set(needed.tables)
        assert got.transactions > 30
        assert got.events == () == got.warnings


@BOTH
def test_statements_instead_of_rows_bring_along_what_they_read_and_what_their_triggers_write(
    kind: Kind, short_tmp: Path
) -> None:
    # Compressed statements, and logs without GTIDs and checksums, are taken apart in other ways.
    options = (
        {"log_bin_compress": "ON", "log_bin_compress_min_len": "10"}
        if kind.mariadb
        else {"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF", "binlog_checksum": "NONE"}
    )
    with kind.make(options=options) as source:
        source.execute(*BEFORE)
        source.execute(
            "CREATE FUNCTION shop.twice(n INT) RETURNS INT DETERMINISTIC RETURN 2 * n",
            "CREATE TABLE shop.read_from (id INT PRIMARY KEY)",
            "INSERT INTO shop.read_from VALUES (50), (51)",
        )
        base, saved = base_of(kind, source), SavedTables(source)
        source.execute(
            "SET SESSION binlog_format = STATEMENT",
            "INSERT INTO shop.orders VALUES (10, 10), (11, 11)",
            "INSERT INTO shop.read_from VALUES (52)",
            "INSERT INTO shop.customers SELECT id FROM shop.read_from",
            "CREATE TEMPORARY TABLE shop.passing (id INT)",
            "INSERT INTO shop.passing VALUES (60)",
            "INSERT INTO shop.items SELECT id, 3 FROM shop.passing",
            "DROP TEMPORARY TABLE shop.passing",
            "UPDATE shop.items i JOIN shop.customers c ON i.customer = c.id SET i.id = i.id + 1000 WHERE c.id = 3",
            "DELETE FROM shop.emptied WHERE id = 1",
            "CREATE FUNCTION shop.thrice(n INT) RETURNS INT DETERMINISTIC RETURN 3 * n",
            "INSERT INTO shop.emptied VALUES (shop.thrice(7))",
            "SET SESSION binlog_format = ROW",
            "CREATE DATABASE z",
            "USE z",
            "CREATE EVENT e ON SCHEDULE EVERY 1 DAY DO SELECT 1",
            "DROP EVENT e",
            "CREATE PROCEDURE p() BEGIN SELECT 'something that can be compressed, well, can be compressed'; END",
            "DROP PROCEDURE p",
            "ALTER TABLE shop.items ADD COLUMN z INT DEFAULT 4",
            "UPDATE shop.items SET z = 5",
        )
        wanted = (TableName("shop", "counted"), TableName("shop", "items"))
        needed, got, copied = replayed(kind, source, base, saved, wanted, short_tmp)
        assert copied == checksums(source.query, wanted)
        assert source.scalar("SELECT times FROM shop.counted") == 5
        assert {name.table for name in needed.tables} == {
            "counted",
            "items",
            "orders",
            "Orders",
            "customers",
            "read_from",
            "passing",
        }
        assert "triggers" in needed.reasons[ORDERS]
        assert len([line for line in got.warnings if "STATEMENT" in line]) == 1


def test_sequences_and_the_history_of_versioned_tables_are_rolled_forward_too(short_tmp: Path) -> None:
    with MARIADB.make() as source:
        source.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.other (id INT PRIMARY KEY)",
            "CREATE TABLE shop.kept (id INT PRIMARY KEY, n INT) WITH SYSTEM VERSIONING",
        )
        base, saved = base_of(MARIADB, source), SavedTables(source)
        source.execute(
            "CREATE SEQUENCE shop.numbers START 5 NOCACHE",
            "INSERT INTO shop.kept VALUES (1, 1), (2, 2)",
            "UPDATE shop.kept SET n = 9 WHERE id = 1",
            "SET SESSION binlog_format = STATEMENT",
            "DELETE FROM shop.kept WHERE id = 2",
            "INSERT INTO shop.other VALUES (1)",
            "SET SESSION binlog_format = ROW",
            "DO NEXTVAL(shop.numbers), NEXTVAL(shop.numbers)",
            "SET SESSION system_versioning_alter_history = KEEP",
            "ALTER TABLE shop.kept ADD COLUMN more INT",
        )
        wanted = [TableName("shop", "kept"), TableName("shop", "numbers")]
        what = logs(source, short_tmp / "logs", base.start, here(MARIADB, source))
        with narrowed_copy(MARIADB, source, saved, wanted, short_tmp) as (server, info):
            roll(server, info, what, tables=wanted)
            with asking(server) as ask:
                for query in (
                    "SELECT *, ROW_START, ROW_END FROM shop.kept FOR SYSTEM_TIME ALL ORDER BY id, ROW_START",
                    "SELECT next_not_cached_value FROM shop.numbers",
                ):
                    assert [tuple(row) for row in ask(query)] == [tuple(row) for row in source.query(query)]


def test_what_is_missing_stops_the_replay_and_the_pipe_is_refused(short_tmp: Path) -> None:
    with MARIADB.make() as source:
        source.execute(*BEFORE)
        base, saved = base_of(MARIADB, source), SavedTables(source)
        source.execute("CREATE TABLE shop.like_it LIKE shop.emptied", "INSERT INTO shop.like_it VALUES (1)")
        wanted = [TableName("shop", "like_it")]
        what = logs(source, short_tmp / "logs", base.start, here(MARIADB, source))
        assert relatives_of(base, what, wanted).tables == (wanted[0], TableName("shop", "emptied"))
        with narrowed_copy(MARIADB, source, saved, wanted, short_tmp) as (server, info):
            with pytest.raises(RefusedError, match="some tables only"):
                roll(server, info, what, tables=wanted, method=ReplayMethod.PIPE)
            with pytest.raises(ServerError, match="1146") as caught:
                roll(server, info, what, tables=wanted)
            assert "--datadir" in caught.value.hint
            assert "--replay-with" not in caught.value.hint


def test_a_foreign_key_far_behind_in_a_definition_brings_its_parent_along(short_tmp: Path) -> None:
    wide = ", ".join(f"a_rather_long_column_name_{number} INT" for number in range(40))
    far = "/* " + 70_000 * "é" + " */"
    child = TableName("shop", "child")
    with MARIADB.make() as source:
        source.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.parent (id INT PRIMARY KEY)",
            "INSERT INTO shop.parent VALUES (1), (2), (3)",
        )
        base, saved = base_of(MARIADB, source), SavedTables(source)
        for name, comment in (("child", ""), ("grandchild", far)):
            source.execute(
                "SET foreign_key_checks = 0",
                f"CREATE TABLE shop.{name} (id INT PRIMARY KEY, {wide}, {comment} "
                f"CONSTRAINT c_{name} FOREIGN KEY (id) REFERENCES shop.parent (id) ON DELETE CASCADE)",
                f"INSERT INTO shop.{name} (id) SELECT id FROM shop.parent",
            )
        source.execute("SET foreign_key_checks = 1", "DELETE FROM shop.parent WHERE id = 2")
        needed, _got, copied = replayed(MARIADB, source, base, saved, [child], short_tmp)
        assert needed.tables == (child, TableName("shop", "parent"))
        assert needed.inseparable == ()
        assert copied == checksums(source.query, [child])
        what = logs(source, short_tmp / "again", base.start, here(MARIADB, source))
        cut = relatives_of(base, what, [TableName("shop", "grandchild")])
        assert "in part only" in cut.inseparable[0]


@contextlib.contextmanager
def _writing(source: Server) -> Iterator[None]:
    """Somebody goes on writing to other tables."""
    enough, written = threading.Event(), threading.Event()

    def write(number: int) -> None:
        with source.connect() as session, session.cursor() as cursor:
            while not enough.is_set():
                cursor.execute(f"INSERT INTO shop.busy (n) VALUES ({number})")
                cursor.execute("UPDATE shop.counted SET times = times + 0 WHERE id = 2")
                written.set()

    source.execute("CREATE TABLE shop.busy (id INT AUTO_INCREMENT PRIMARY KEY, n INT)")
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = [pool.submit(write, number) for number in range(2)]
        try:
            assert written.wait(120)
            yield
        finally:
            enough.set()
        for future in futures:
            future.result()


class _History:
    """Random statements over a few tables."""

    def __init__(self, dice: random.Random, source: Server, kind: Kind) -> None:
        self._dice, self._source, self._kind = dice, source, kind
        self.names = [f"{schema}.t{number}" for schema in ("a", "b") for number in range(4)]
        self._made = 0

    def begin(self) -> None:
        self._source.execute(
            "CREATE DATABASE a",
            "CREATE DATABASE b",
            "CREATE TABLE a.parent (id INT PRIMARY KEY)",
            f"INSERT INTO a.parent VALUES {', '.join(f'({n})' for n in range(60))}",
        )
        for number, name in enumerate(self.names):
            key = ", FOREIGN KEY (p) REFERENCES a.parent (id) ON DELETE CASCADE" if number % 3 == 0 else ""
            self._source.execute(
                f"CREATE TABLE {name} ({COLUMNS}{key})", f"INSERT INTO {name} (n, p) VALUES (1, 1), (2, 2), (3, 3)"
            )
        for name in self._dice.sample(self.names, 2):
            other = self._other(name)
            self._source.execute(
                f"CREATE TRIGGER {name}_t AFTER INSERT ON {name} FOR EACH ROW "
                f"UPDATE {other} SET n = n + 1 WHERE id % 2 = 0"
            )

    def _other(self, name: str) -> str:
        return self._dice.choice([other for other in self.names if other != name])

    def step(self) -> None:
        """One statement; what the server turns away was no part of the history."""
        dice, name = self._dice, self._dice.choice(self.names)
        other, self._made = self._other(name), self._made + 1
        fresh = f"{dice.choice('ab')}.n{self._made}"
        word = dice.choice(
            ["insert"] * 6
            + [
                "update",
                "delete",
                "cascade",
                "copy",
                "join",
                "rename",
                "swap",
                "drop",
                "like",
                "as",
                "alter",
                "truncate",
                "routine",
                "view",
                "two",
                "both",
            ]
        )
        n = dice.randrange(60)
        statements = {
            "insert": [f"INSERT INTO {name} (n, p) VALUES ({n}, {n})"],
            "update": [f"UPDATE {name} SET n = n + {n} WHERE id % 3 = 1"],
            "delete": [f"DELETE FROM {name} WHERE id % 5 = {n % 5}"],
            "cascade": [f"DELETE FROM a.parent WHERE id = {n}"],
            "copy": [f"INSERT INTO {name} (n, p) SELECT n, p FROM {other} ORDER BY id LIMIT 2"],
            "join": [f"UPDATE {name} x JOIN {other} y ON x.id = y.id SET x.n = y.n"],
            "rename": [f"RENAME TABLE {name} TO {fresh}"],
            "swap": [f"RENAME TABLE {name} TO a.swapping, {other} TO {name}, a.swapping TO {other}"],
            "drop": [f"DROP TABLE {name}"],
            "like": [f"CREATE TABLE {fresh} LIKE {name}", f"INSERT INTO {fresh} (n, p) VALUES (1, 1)"],
            "as": [f"CREATE TABLE {fresh} ({COLUMNS}) AS SELECT n, p FROM {name}"],
            "alter": [f"ALTER TABLE {name} ADD COLUMN c{self._made} INT DEFAULT {n}"],
            "truncate": [f"TRUNCATE {name}"],
            "routine": [f"CREATE PROCEDURE b.p{self._made}() SELECT 1", f"DROP PROCEDURE b.p{self._made}"],
            "view": [f"CREATE VIEW {fresh} AS SELECT * FROM {name}", f"DROP VIEW {fresh}"],
            "two": [f"DROP TABLE IF EXISTS {name}, a.never"],
            "both": [f"DROP TABLE {name}, {other}"],
        }[word]
        try:
            with self._source.connect() as session, session.cursor() as cursor:
                form = "STATEMENT" if dice.random() < 0.5 and word != "as" else "ROW"
                cursor.execute(f"SET SESSION binlog_format = {form}")
                for statement in statements:
                    cursor.execute(statement)
        except pymysql.err.MySQLError:
            return
        if word in ("rename", "like", "as"):
            self.names.append(fresh)
        if word in ("rename", "drop", "two", "both"):
            self.names.remove(name)
        if word == "both":
            self.names.remove(other)
        while len(self.names) < 4:
            self._made += 1
            self._source.execute(f"CREATE TABLE a.m{self._made} ({COLUMNS})")
            self.names.append(f"a.m{self._made}")


@pytest.mark.campaign
@BOTH
def test_any_tables_of_any_history_come_back_as_the_source_has_them(kind: Kind, short_tmp: Path) -> None:
    dice = thrown(f"narrowed-{kind}")
    for number in range(rounds(1)):
        with kind.make() as source:
            history = _History(dice, source, kind)
            history.begin()
            base, saved = base_of(kind, source), SavedTables(source)
            for _step in range(60):
                history.step()
            names = sorted(history.names)
            for turn in range(size(1, 3)):
                wanted = [TableName(*name.split(".")) for name in dice.sample(names, dice.randint(1, 2))]
                place = short_tmp / f"{number}-{turn}"
                needed, _got, copied = replayed(kind, source, base, saved, wanted, place)
                assert copied == checksums(source.query, wanted), (wanted, needed)
                assert len(copied) == len(wanted)
