"""Restored tables take the place of live ones, on real servers."""

from __future__ import annotations

import threading

import pytest

from backupd.model.errors import BusyError, CancelledError, NotFoundError, RefusedError, ServerError, UsageError
from backupd.model.table import TableName, quote_name
from backupd.process.run_context import RunContext
from restore.cutover import cutover as handover
from restore.cutover.cutover import settle
from restore.cutover.plan import Goal, Patience
from restore.planning.table_plan import Triggers
from tests.support.dice import rounds, thrown
from tests.support.restores.handing import (
    ASIDE,
    CUSTOMERS,
    LINES,
    NOTES,
    ORDERS,
    STAGING,
    CountingConnection,
    Shop,
    Writing,
    counted,
    killed_at,
    shared,
    until,
)
from tests.support.restores.rolling import MARIADB, Kind, both

BOTH = both()


@pytest.fixture
def shop(kind: Kind) -> Shop:
    return Shop(kind, shared(kind))


@BOTH
class TestInPlace:
    def test_the_new_table_has_what_the_backup_says_and_the_old_one_is_renamed(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS, rows="(id, customer, total) VALUES (1, 1, 11), (2, 2, 22), (3, 3, 33)")
        before = shop.created(ORDERS)
        shop.server.execute(
            "DELETE FROM shop.orders WHERE id = 3",
            "INSERT INTO shop.orders (id, total) VALUES (77, 5)",
            "DROP TRIGGER shop.audited",
            "CREATE TRIGGER shop.audited AFTER INSERT ON shop.orders FOR EACH ROW SET @x = 1",
        )
        done = shop.hand(goal)
        aside = TableName("shop", "orders" + ASIDE)
        assert done.tables == ((ORDERS, aside),)
        assert shop.server.query("SELECT id, total FROM shop.orders ORDER BY id") == [(1, 11), (2, 22), (3, 33)]
        assert [row[0] for row in shop.server.query(f"SELECT id FROM {aside} ORDER BY id")] == [1, 2, 77]
        assert shop.created(ORDERS) == before.replace("AUTO_INCREMENT=4", "AUTO_INCREMENT=78")
        assert shop.define([ORDERS])[ORDERS].triggers == shop.definitions[ORDERS].triggers
        assert shop.keys(LINES) == {"of_order": ORDERS}
        assert shop.keys(aside) == {}
        assert shop.triggers(aside) == []
        assert "SET @x = 1" in done.saved[0].script
        assert "of_customer" in done.saved[0].script
        assert [name for name in shop.tables() if name.schema == STAGING] == []

    def test_afterwards_triggers_fire_once_and_foreign_keys_hold(self, shop: Shop) -> None:
        shop.hand(shop.goal(ORDERS))
        shop.server.execute(
            "SET foreign_key_checks = 1",
            "DELETE FROM shop.audit",
            "INSERT INTO shop.orders (customer, total) VALUES (1, 6)",
        )
        assert shop.server.query("SELECT o, total FROM shop.audit") == [(4, 7)]
        shop.server.execute("UPDATE shop.orders SET id = 20 WHERE id = 2", "DELETE FROM shop.customers WHERE id = 3")
        assert shop.server.query("SELECT id, o FROM shop.`lines` ORDER BY id") == [(1, 1), (2, 20)]

    def test_several_tables_that_reference_each_other(self, shop: Shop) -> None:
        goals = [shop.goal(name) for name in (LINES, ORDERS, CUSTOMERS)]
        before = shop.picture()
        done = shop.hand(*goals)
        assert done.warnings == ()
        after = shop.picture()
        assert {name: after[name] for name in before if STAGING not in name} == {
            name: before[name] for name in before if STAGING not in name
        }
        assert {aside for _, aside in done.tables} == {
            TableName("shop", f"{name}{ASIDE}") for name in ("lines", "orders", "customers")
        }

    def test_rows_without_parents_are_told_in_both_directions(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS, rows="(id, customer, total) VALUES (1, 99, 11)")
        done = shop.hand(goal)
        assert len(done.orphans) == 2
        text = "\n".join(done.orphans)
        assert "1 rows of shop.orders (customer: 99) reference rows of shop.customers" in text
        assert "2 rows of shop.lines (o: 2, 3) reference rows of shop.orders" in text

    def test_the_live_triggers_can_be_kept_or_none_wanted(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS)
        shop.server.execute("DROP TRIGGER shop.audited")
        shop.hand(goal, triggers=Triggers.LIVE)
        assert shop.triggers(ORDERS) == ["r`ounded"]
        shop.server.execute(f"RENAME TABLE shop.orders{ASIDE} TO shop.earlier")
        shop.hand(shop.goal(ORDERS), triggers=Triggers.NONE)
        assert shop.triggers(ORDERS) == []

    def test_what_the_server_refuses_to_add_is_told_with_its_statement(self, shop: Shop) -> None:
        """The live child references a column that the table of the backup does not have."""
        goal = shop.goal(ORDERS)
        shop.server.execute(
            "ALTER TABLE shop.orders ADD code INT UNIQUE",
            "ALTER TABLE shop.notes ADD code INT",
            "ALTER TABLE shop.notes ADD CONSTRAINT by_code FOREIGN KEY (code) REFERENCES orders (code)",
        )
        done = shop.hand(goal)
        assert shop.keys(NOTES) == {}
        [warning] = done.warnings
        assert "the foreign key by_code of shop.notes is missing" in warning
        assert "ALTER TABLE `shop`.`notes` ADD CONSTRAINT `by_code` FOREIGN KEY (`code`)" in warning

    def test_a_table_that_is_gone_comes_back_and_its_children_hold_to_it(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS)
        shop.server.execute("SET foreign_key_checks = 0", "DROP TABLE shop.orders")
        done = shop.hand(goal, replace=False)
        assert done.tables == ((ORDERS, None),)
        assert shop.keys(LINES) == {"of_order": ORDERS}
        shop.server.execute("SET foreign_key_checks = 1", "DELETE FROM shop.orders WHERE id = 3")
        assert shop.server.query("SELECT id FROM shop.`lines` ORDER BY id") == [(1,), (2,)]

    def test_twice_is_once_and_again_is_again(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS)
        done = shop.hand(goal)
        assert shop.hand(goal) == done
        shop.stage(ORDERS)
        again = shop.hand(goal)
        assert again.tables == ((ORDERS, TableName("shop", f"orders{ASIDE}_2")),)


@BOTH
class TestElsewhere:
    def test_a_copy_beside_holds_nobody_and_has_no_triggers(self, shop: Shop) -> None:
        target = TableName("shop", "orders_restored")
        before = shop.picture()
        done = shop.hand(shop.goal(ORDERS, target), replace=False)
        assert shop.keys(target) == {"orders_restored_ibfk_1": target}
        assert shop.triggers(target) == []
        assert "ALTER TABLE `shop`.`orders_restored` ADD CONSTRAINT `of_customer`" in done.warnings[0]
        assert "audited" in done.warnings[1]
        after = shop.picture()
        assert {name: after[name] for name in before} == before
        shop.server.execute("SET foreign_key_checks = 1")
        with pytest.raises(Exception, match=r"(?i)constraint"):
            shop.server.execute("INSERT INTO shop.orders_restored (total) VALUES (-5)")

    def test_a_missing_schema_is_made_and_the_keys_among_restored_tables_are_its_own(self, shop: Shop) -> None:
        goals = [shop.goal(name, TableName("old shop", name.table)) for name in (CUSTOMERS, ORDERS, LINES)]
        shop.server.execute(f"ALTER DATABASE `{STAGING}` COLLATE latin1_swedish_ci")
        done = shop.hand(*goals, replace=False)
        assert (
            shop.server.scalar(
                "SELECT DEFAULT_COLLATION_NAME FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = 'old shop'"
            )
            == "latin1_swedish_ci"
        )
        old = TableName("old shop", "orders")
        assert shop.keys(old) == {"of_customer": TableName("old shop", "customers"), "orders_ibfk_1": old}
        assert shop.keys(TableName("old shop", "lines")) == {"of_order": old}
        assert shop.triggers(old) == ["audited", "r`ounded"]
        assert done.tables[0] == (TableName("old shop", "customers"), None)


@BOTH
def test_odd_names_are_handed_over(shop: Shop) -> None:
    names = [
        "a.b",
        "it's",
        "tick`ed",
        'quo"ted',
        "per%cent %s",
        "ünïcödé",
        "x" * 64,
        "ж" * 46,
        "new\nline",
        "#sql-like",
        "orders__before_7",
    ]
    goals = []
    for number, name in enumerate(names):
        table = TableName("shop", name)
        shop.server.execute(
            f"CREATE TABLE {table} (id INT AUTO_INCREMENT PRIMARY KEY, n INT)",
            f"CREATE TABLE shop.child{number} (id INT PRIMARY KEY, "
            f"CONSTRAINT {quote_name(name[:60] + ' key')} FOREIGN KEY (id) REFERENCES {table} (id))",
            f"CREATE TRIGGER shop.{quote_name(name)} BEFORE INSERT ON {table} FOR EACH ROW SET NEW.n = 4",
            f"INSERT INTO {table} VALUES (1, 1)",
        )
        shop.definitions |= shop.define([table])
        goals.append(shop.goal(table, rows="VALUES (1, 2)"))
    done = shop.hand(*goals)
    assert done.warnings == ()
    for number, (table, aside) in enumerate(done.tables):
        assert aside is not None
        assert shop.server.query(f"SELECT * FROM {table}") == [(1, 2)]
        assert shop.server.query(f"SELECT * FROM {aside}") == [(1, 4)]
        assert shop.keys(TableName("shop", f"child{number}")) == {table.table[:60] + " key": table}
        assert shop.triggers(table) == [table.table]


@BOTH
class TestRefusals:
    def test_a_live_table_is_not_replaced_unasked(self, shop: Shop) -> None:
        goals = [shop.goal(ORDERS), shop.goal(LINES)]
        before = shop.picture()
        with pytest.raises(RefusedError, match=r"2 of the tables exist"):
            shop.hand(*goals, replace=False)
        assert shop.picture() == before

    def test_views_system_tables_missing_ones_and_twins_are_refused(self, shop: Shop) -> None:
        shop.server.execute("CREATE VIEW shop.seen AS SELECT 1")
        goal = shop.goal(ORDERS)
        other = Goal(shop.stage(LINES), ORDERS, shop.definitions[LINES])
        for goals, word in (
            ([Goal(goal.staged, TableName("shop", "seen"), goal.definition)], "views"),
            ([Goal(goal.staged, TableName("mysql", "orders"), goal.definition)], "server itself"),
            ([goal, other], "several"),
        ):
            with pytest.raises(RefusedError, match=word):
                shop.hand(*goals)
        with pytest.raises(NotFoundError):
            shop.hand(Goal(TableName(STAGING, "none"), ORDERS, goal.definition))
        with pytest.raises(UsageError):
            shop.hand(goal, aside="; DROP")

    def test_locks_that_cannot_be_had_leave_everything_as_it_was(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS)
        before = shop.picture()
        reader = shop.server.connect(autocommit=False)
        with reader.cursor() as cursor:
            cursor.execute("SELECT * FROM shop.orders")
            with pytest.raises(BusyError, match="every table is as it was") as caught:
                shop.hand(goal, patience=Patience(seconds=1, attempts=1))
        assert "is held by connection" in caught.value.detail or "open transaction" in caught.value.detail
        reader.close()
        assert shop.picture() == before
        assert shop.hand(goal).tables[0][0] == ORDERS

    def test_one_that_was_killed_halfway_can_be_taken_back(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS)
        before = shop.picture()
        cancelled = threading.Event()
        cancelled.set()
        for statements in (40, 55, 70):
            assert killed_at(shop.connection, [goal], statements)
            if str(goal.staged) not in (found := shop.picture()) and str(TableName("shop", "orders" + ASIDE)) in found:
                break  # it was done
            with pytest.raises(CancelledError, match="every table is as it was"):
                shop.hand(goal, context=RunContext(cancel=cancelled))
            assert shop.picture() == before
            assert settle(shop.connection, STAGING, RunContext()) is None
        assert shop.hand(goal).tables[0][0] == ORDERS

    def test_what_can_be_neither_finished_nor_taken_back_is_said(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS)
        assert killed_at(shop.connection, [goal])
        reader = shop.server.connect(autocommit=False)
        with reader.cursor() as cursor:
            cursor.execute("SELECT * FROM shop.orders")
            with pytest.raises(ServerError, match="the cut-over is incomplete, and its rollback failed"):
                shop.hand(goal, patience=Patience(seconds=1, attempts=1))
        reader.close()
        assert shop.hand(goal).tables[0][0] == ORDERS

    def test_two_at_once_are_one_after_the_other(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handover, "DYING", 0)
        goal = shop.goal(ORDERS)
        with shop.connection.connect() as session:
            session.execute("SELECT GET_LOCK(%s, 0)", f"backupd/`{STAGING}`")
            with pytest.raises(BusyError):
                shop.hand(goal)

    def test_one_whose_process_was_killed_is_waited_for_until_the_server_has_noticed(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handover, "DYING", 120)
        goal = shop.goal(ORDERS)
        dying = shop.connection.connect()
        dying.execute("SELECT GET_LOCK(%s, 0)", f"backupd/`{STAGING}`")

        def notice() -> None:
            until(
                lambda: bool(
                    shop.server.query("SELECT ID FROM information_schema.PROCESSLIST WHERE STATE = 'User lock'")
                )
            )
            dying.close()

        server = threading.Thread(target=notice)
        server.start()
        done = shop.hand(goal)
        server.join()
        assert done.tables[0][0] == ORDERS


@BOTH
@pytest.mark.campaign
def test_killed_between_any_two_statements_the_next_call_ends_it(shop: Shop) -> None:
    def goals() -> list[Goal]:
        rows = "(id, customer, total) VALUES (1, 1, 11), (2, 2, 22), (3, 3, 33)"
        return [shop.goal(ORDERS, rows=rows), shop.goal(CUSTOMERS)]

    dice = thrown("killed")
    wanted = goals()
    counting = CountingConnection(socket=shop.connection.socket, user="root")
    shop.hand(*wanted, connection=counting)
    expected = shop.picture()
    total = counted()
    for statements in dice.sample(range(total), rounds(3)):
        shop = Shop(shop.kind, shop.server)
        wanted = goals()
        killed = killed_at(shop.connection, wanted, statements)
        assert killed or statements > total * 3 // 4, statements  # how often it asks for a lock depends on the load
        assert {ORDERS, CUSTOMERS, LINES} <= set(shop.tables())
        if killed:
            shop.hand(*wanted)
        assert shop.picture() == expected, statements
        assert settle(shop.connection, STAGING, RunContext()) is None


@BOTH
def test_writers_lose_nothing_and_see_no_table_without_its_triggers(shop: Shop) -> None:
    goal = shop.goal(ORDERS)
    shop.server.execute("DELETE FROM shop.audit")
    with Writing(shop) as writing:
        writing.wait_for_more()
        done = shop.hand(goal, patience=Patience(seconds=5, attempts=20, pause=0.1))
        writing.wait_for_more()
    assert done.orphans == ()
    aside = done.tables[0][1]
    orders = [row[0] for name in (ORDERS, aside) for row in shop.server.query(f"SELECT id FROM {name} WHERE id > 3")]
    assert len(orders) == len(set(orders))
    assert set(orders) >= writing.orders
    assert {row[0] for row in shop.server.query("SELECT id FROM shop.`lines`")} >= writing.lines
    assert {row[0] for row in shop.server.query("SELECT id FROM shop.notes")} >= writing.notes
    assert {row[0] for row in shop.server.query("SELECT o FROM shop.audit")} >= writing.orders
    assert shop.server.scalar("SELECT COUNT(*) FROM shop.orders WHERE id > 3") > 0


@pytest.mark.parametrize("kind", [MARIADB], ids=str)
def test_a_sequence_goes_on_behind_both(shop: Shop) -> None:
    shop.server.execute(
        "CREATE SEQUENCE shop.numbers START WITH 1 CACHE 10",
        f"CREATE SEQUENCE {STAGING}.numbers",
        "SELECT NEXTVAL(shop.numbers)",
    )
    name = TableName("shop", "numbers")
    shop.definitions |= shop.define([name])
    done = shop.hand(Goal(TableName(STAGING, "numbers"), name, shop.definitions[name]))
    assert done.tables == ((name, TableName("shop", "numbers" + ASIDE)),)
    assert shop.server.scalar("SELECT NEXTVAL(shop.numbers)") == 11


@pytest.mark.parametrize("kind", [MARIADB], ids=str)
def test_a_versioned_table_keeps_its_history(shop: Shop) -> None:
    name = TableName("shop", "versions")
    shop.server.execute(
        "CREATE TABLE shop.versions (id INT AUTO_INCREMENT PRIMARY KEY, customer INT, KEY (customer), "
        "CONSTRAINT v FOREIGN KEY (customer) REFERENCES customers (id)) WITH SYSTEM VERSIONING",
        "INSERT INTO shop.versions VALUES (1, 1), (7, 1)",
    )
    shop.definitions |= shop.define([name])
    goal = shop.goal(name, rows="VALUES (1, 1)")
    shop.server.execute(f"UPDATE {goal.staged} SET customer = 2")
    shop.hand(goal)
    assert shop.server.scalar("SELECT COUNT(*) FROM shop.versions FOR SYSTEM_TIME ALL") == 2
    assert shop.keys(name) == {"v": CUSTOMERS}


@BOTH
def test_a_present_table_that_cannot_be_opened_is_replaced(shop: Shop) -> None:
    """Its file is gone: that is what it is restored for."""
    name = TableName("shop", "broken")
    shop.server.execute(
        "CREATE TABLE shop.broken (id INT PRIMARY KEY) ENGINE = MyISAM", "INSERT INTO shop.broken VALUES (1)"
    )
    shop.definitions |= shop.define([name])
    goal = shop.goal(name)
    shop.server.execute("FLUSH TABLES shop.broken")
    (shop.server.datadir / "shop" / "broken.MYI").write_bytes(b"")
    done = shop.hand(goal)
    assert shop.server.query("SELECT id FROM shop.broken") == [(1,)]
    assert done.tables[0][1] == TableName("shop", "broken" + ASIDE)
