"""Hand-overs that are stopped, or whose tables change meanwhile, on real servers."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable

import pytest

from backupd.model.errors import RefusedError
from backupd.model.job import Progress
from backupd.model.table import TableName
from backupd.process.run_context import RunContext
from restore.cutover.cutover import pending, settle
from restore.cutover.plan import Patience
from restore.cutover.table_swap import LostError
from tests.support.restores.handing import (
    ASIDE,
    IMPATIENT,
    ORDERS,
    STAGING,
    Shop,
    killed_at,
    shared,
    until,
)
from tests.support.restores.rolling import Kind, both

BOTH = both()


@pytest.fixture
def shop(kind: Kind) -> Shop:
    return Shop(kind, shared(kind))


@BOTH
def test_settling_takes_back_what_has_not_been_renamed_and_keeps_what_came_since(shop: Shop) -> None:
    goal = shop.goal(ORDERS)
    before = shop.picture()
    assert settle(shop.connection, STAGING, RunContext()) is None
    assert killed_at(shop.connection, [goal])
    assert shop.picture() != before
    found = pending(shop.connection, STAGING)
    assert found is not None
    assert (found.tables, found.renamed) == ((ORDERS,), False)
    shop.server.execute("CREATE TRIGGER shop.later BEFORE DELETE ON shop.orders FOR EACH ROW SET @a = 1")
    assert settle(shop.connection, STAGING, RunContext(), patience=IMPATIENT) is None
    assert shop.triggers(ORDERS) == ["audited", "later", "r`ounded"]
    shop.server.execute("DROP TRIGGER shop.later")
    assert shop.picture() == before
    assert pending(shop.connection, STAGING) is None


@BOTH
def test_settling_finishes_what_has_been_renamed(shop: Shop) -> None:
    goal = shop.goal(ORDERS)
    before = shop.picture()
    assert killed_at(shop.connection, [goal], note="look for rows")
    found = pending(shop.connection, STAGING)
    assert found is not None
    assert found.renamed
    done = settle(shop.connection, STAGING, RunContext(), patience=IMPATIENT)
    assert done is not None
    assert done.tables == ((ORDERS, TableName("shop", "orders" + ASIDE)),)
    assert shop.picture()[str(ORDERS)] == before[str(ORDERS)]
    assert shop.hand(goal) == done


@BOTH
def test_a_restored_table_that_somebody_dropped_is_named_and_nothing_live_is_touched(shop: Shop) -> None:
    goal = shop.goal(ORDERS)
    before = {name: one for name, one in shop.picture().items() if STAGING not in name}
    assert killed_at(shop.connection, [goal])
    [dropped] = [name for name in shop.tables() if name.schema == STAGING or "__new" in name.table]
    shop.server.execute("SET foreign_key_checks = 0", f"DROP TABLE {dropped}")
    with pytest.raises(LostError, match="no live table was replaced") as caught:
        settle(shop.connection, STAGING, RunContext(), patience=IMPATIENT)
    assert dropped.shown in caught.value.message
    assert shop.picture() == before
    assert settle(shop.connection, STAGING, RunContext()) is None


def waiting(shop: Shop, then: Callable[[], None]) -> Callable[[Progress], None]:
    """A report that does ``then`` once, when locks were waited for in vain."""
    over: list[str] = []

    def report(progress: Progress) -> None:
        if progress.note.startswith("waits for") and not over:
            over.append(progress.note)
            assert re.search("is held by connection|open transaction: connection", progress.note)
            then()

    return report


def interrupt_when_it_waits(shop: Shop) -> None:
    """As somebody at the terminal, once the server shows that a lock is waited for."""
    main = threading.main_thread().ident
    assert main is not None
    with shop.connection.connect() as session:
        until(
            lambda: bool(
                session.scalar(
                    "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE LIKE 'Waiting for table%'"
                )
            )
        )
    signal.pthread_kill(main, signal.SIGINT)


@BOTH
class TestWhileItWaits:
    def test_triggers_and_foreign_keys_that_come_are_kept(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS)
        reader = shop.server.connect(autocommit=False)

        def change() -> None:
            reader.close()
            shop.server.execute(
                "CREATE TRIGGER shop.later BEFORE DELETE ON shop.orders FOR EACH ROW SET @a = 1",
                "CREATE TABLE shop.parts (id INT PRIMARY KEY, o INT, CONSTRAINT late FOREIGN KEY (o) REFERENCES "
                "orders (id) ON DELETE CASCADE)",
            )

        with reader.cursor() as cursor:
            cursor.execute("SELECT * FROM shop.orders")
        done = shop.hand(goal, context=RunContext(report=waiting(shop, change)))
        assert shop.keys(TableName("shop", "parts")) == {"late": ORDERS}
        assert "TRIGGER `later`" in done.saved[0].script

    def test_a_live_table_that_is_altered_is_compared_again(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS)
        reader = shop.server.connect(autocommit=False)

        def change() -> None:
            reader.close()
            shop.server.execute("ALTER TABLE shop.orders ADD extra INT")

        with reader.cursor() as cursor:
            cursor.execute("SELECT * FROM shop.orders")
        with pytest.raises(RefusedError, match="changed meanwhile, compare again"):
            shop.hand(goal, context=RunContext(report=waiting(shop, change)))
        assert pending(shop.connection, STAGING) is None
        assert "extra" in shop.created(ORDERS)
        assert not [name for name in shop.tables() if "__" in name.table]

    def test_a_signal_takes_everything_back(self, shop: Shop) -> None:
        goal = shop.goal(ORDERS)
        before = shop.picture()
        reader = shop.server.connect(autocommit=False)
        with reader.cursor() as cursor:
            cursor.execute("SELECT * FROM shop.orders")
        stop = threading.Thread(target=interrupt_when_it_waits, args=(shop,))
        stop.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            shop.hand(goal, patience=Patience(seconds=120, attempts=1))
        stop.join()
        reader.close()
        assert caught.value.__notes__ == ["every table is as it was"]
        assert pending(shop.connection, STAGING) is None
        assert shop.picture() == before
