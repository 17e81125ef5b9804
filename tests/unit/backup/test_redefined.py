"""Tables and schemas that are changed around the moment of the snapshot: the definitions fit the rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pymysql

from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.insert_files import DumpRequest, DumpRun
from backupd.engine.server.snapshot import Snapshot
from backupd.model.table import Outcome, TableName
from tests.support.restores.dumped import DumpRepository, table
from tests.support.restores.meddling import Meddled
from tests.support.servers.server import Server, query

_SAME_AGAIN = "ALTER TABLE shop.wide DROP COLUMN flag, ADD COLUMN flag INT DEFAULT 0, ALGORITHM=INSTANT"


@dataclass(eq=False)
class Early(Meddled):
    """``first`` is called once, after the definitions were read and before any snapshot is open."""

    first: Callable[[], None] = field(kw_only=True)

    def run(self, request: DumpRequest) -> DumpRun:
        if not self.runs:
            self.first()
        return super().run(request)


def flagged(server: Server) -> None:
    server.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.wide (id INT PRIMARY KEY, flag INT DEFAULT 0)",
        "INSERT INTO shop.wide VALUES (1, 11), (2, 12)",
    )


def test_a_column_that_is_dropped_and_added_again_in_one_statement_is_noticed(repository: DumpRepository) -> None:
    flagged(repository.server)
    outcome = repository.dump(tools=[Meddled(ExactDump(), before=lambda: repository.server.execute(_SAME_AGAIN))])
    wide = table(outcome, "shop.wide")
    assert wide.outcome is Outcome.DUMPED
    assert "definition was changed" in wide.note


def test_a_snapshot_tells_that_a_column_was_dropped_and_added_again(repository: DumpRepository) -> None:
    flagged(repository.server)
    name = TableName("shop", "wide")
    with Snapshot(repository.connection) as snapshot:
        snapshot.open()
        repository.server.execute(_SAME_AGAIN)
        assert snapshot.session.query("SELECT flag FROM shop.wide") == [(0,), (0,)]
        assert snapshot.changed(name)


def test_what_is_changed_between_the_definitions_and_the_snapshot_is_read_again(repository: DumpRepository) -> None:
    server = repository.server
    server.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.kept (id INT PRIMARY KEY AUTO_INCREMENT)",
        "CREATE TABLE shop.loose (id INT PRIMARY KEY, a INT, UNIQUE KEY once (a), CHECK (a < 1000))",
        "INSERT INTO shop.loose VALUES (1, 1)",
    )

    def change() -> None:
        server.execute(
            "ALTER TABLE shop.loose DROP INDEX once, DROP CONSTRAINT CONSTRAINT_1",
            "INSERT INTO shop.loose VALUES (2, 1), (3, 5000)",
            "INSERT INTO shop.kept VALUES (7)",
            "CREATE TRIGGER shop.fired BEFORE INSERT ON shop.loose FOR EACH ROW SET NEW.a = 0",
            "CREATE VIEW shop.seen AS SELECT * FROM shop.loose",
            "CREATE PROCEDURE shop.called() SELECT 1",
        )

    outcome = repository.dump(tools=[Early(ExactDump(), first=change)])
    loose, kept = table(outcome, "shop.loose"), table(outcome, "shop.kept")
    assert (loose.outcome, loose.rows) == (Outcome.DUMPED, 3)
    definition = repository.content(outcome, "tables/shop/loose/definition.sql")
    assert "once" not in definition
    assert "CHECK" not in definition
    assert "fired" in repository.content(outcome, "tables/shop/loose/triggers.sql")
    assert "seen" in repository.content(outcome, "schemas/shop/views.sql")
    assert "called" in repository.content(outcome, "schemas/shop/routines.sql")
    assert (kept.position, kept.rows) == (None, 1)  # the next number alone is no change
    assert "AUTO_INCREMENT=8" in repository.content(outcome, "tables/shop/kept/definition.sql")


@contextmanager
def altering(server: Server) -> Iterator[Callable[[], None]]:
    """What begins an ALTER TABLE that does not end; it is over afterwards."""
    threads: list[threading.Thread] = []

    def alter() -> None:
        with server.connect() as connection, suppress(pymysql.err.Error):
            query(connection, "ALTER TABLE shop.held ADD COLUMN more INT")

    def begin() -> None:
        query(holder, "BEGIN")
        query(holder, "SELECT * FROM shop.held")
        threads.append(threading.Thread(target=alter))
        threads[0].start()
        while not server.query("SELECT 1 FROM information_schema.processlist WHERE info LIKE 'ALTER%' AND time >= 1"):
            threads[0].join(0.05)

    with server.connect() as holder:
        yield begin
    for thread in threads:
        thread.join()


def test_tables_that_cannot_be_dumped_again_cost_nothing_but_themselves(repository: DumpRepository) -> None:
    repository.server.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.held (id INT)",
        "CREATE TABLE shop.good (id INT PRIMARY KEY)",
        "INSERT INTO shop.good VALUES (1)",
        "CREATE TABLE shop.moved (id INT PRIMARY KEY)",
    )
    with altering(repository.server) as begin:

        def trouble() -> None:
            repository.server.execute("ALTER TABLE shop.moved ADD COLUMN more INT", "CREATE TABLE shop.late (id INT)")
            begin()

        outcome = repository.dump(
            "shop.good", "shop.moved", "shop.late", long_queries=1.0, tools=[Meddled(ExactDump(), before=trouble)]
        )
    assert (table(outcome, "shop.good").outcome, table(outcome, "shop.good").rows) == (Outcome.DUMPED, 1)
    for name, why in (("shop.moved", "definition was changed"), ("shop.late", "created while the backup ran")):
        assert table(outcome, name).outcome is Outcome.FAILED
        assert why in table(outcome, name).reason
        assert "ALTER TABLE shop.held" in table(outcome, name).reason
    assert {one.path.split("/")[2] for one in repository.body(outcome).entries if one.path.startswith("tables")} == {
        "good"
    }
