"""Single tables out of real backups: chains of mariadb-backup, and CLONE."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.engine.physical.tablespace_transport import can_import, export_tables, import_tables
from backupd.engine.sql.client import Connection
from backupd.model.binlog import Branch, BranchReason, Ending, ReplayLeg, ReplayMethod, ReplaySpec
from backupd.model.errors import NotFoundError, RefusedError
from backupd.model.table import TableName, TablePattern
from backupd.process.run_context import RunContext
from backupd.transfer.records.encryption import Sealer
from restore.fetch.sources import Loaded, load_chain
from restore.subset import SubsetCopy, subset_instance, subset_of, tables_in
from tests.support.keys import Keys
from tests.support.logs.archived_logs import archive_log
from tests.support.restores.rolling import MARIADB, MYSQL, Kind, here, logs
from tests.support.restores.subsets import ChainRepository, name, sums
from tests.support.restores.taken import now
from tests.support.servers.server import Server, connect, query
from tests.support.stores.folders import give_to_database, short_directory

ODD = "`größe 数据`.`naïve.tablé $1`"
TEN = " UNION ALL ".join(f"SELECT {number} n" for number in range(10))
ROWS = f"(SELECT a.n + 10 * b.n + 100 * c.n + 1000 * d.n n FROM ({TEN}) a, ({TEN}) b, ({TEN}) c, ({TEN}) d) numbers"
TABLES = (
    "CREATE DATABASE shop",
    "CREATE DATABASE `größe 数据`",
    "CREATE DATABASE other",
    "CREATE DATABASE third",
    "CREATE TABLE shop.regions (id INT PRIMARY KEY, v VARCHAR(200))",
    "CREATE TABLE shop.customers (id INT PRIMARY KEY, r INT, FOREIGN KEY (r) REFERENCES shop.regions (id))",
    (
        "CREATE TABLE shop.orders (id INT PRIMARY KEY, c INT, v VARCHAR(200), "
        "FOREIGN KEY (c) REFERENCES shop.customers (id) ON DELETE CASCADE)"
    ),
    f"CREATE TABLE {ODD} (id INT PRIMARY KEY, o INT, v VARCHAR(300), FOREIGN KEY (o) REFERENCES shop.orders (id))",
    (
        "CREATE TABLE other.parts (id INT PRIMARY KEY, v VARCHAR(200)) PARTITION BY RANGE (id) "
        "(PARTITION `p é` VALUES LESS THAN (100), PARTITION p1 VALUES LESS THAN MAXVALUE)"
    ),
    "CREATE TABLE other.texts (id INT PRIMARY KEY, v VARCHAR(200), FULLTEXT (v))",
    "CREATE TABLE other.x (id INT PRIMARY KEY, v VARCHAR(200))",
    "CREATE TABLE other.y (id INT PRIMARY KEY, v VARCHAR(200))",
    "CREATE VIEW shop.totals AS SELECT c, COUNT(*) FROM shop.orders GROUP BY c",
    "CREATE TRIGGER shop.orders_bi BEFORE INSERT ON shop.orders FOR EACH ROW SET NEW.v = CONCAT(NEW.v, '!')",
    f"INSERT INTO shop.regions SELECT n, REPEAT('r', 100) FROM {ROWS}",
    "INSERT INTO shop.customers SELECT id, id FROM shop.regions",
    "INSERT INTO shop.orders SELECT id, id, REPEAT('o', 150) FROM shop.regions",
    f"INSERT INTO {ODD} SELECT id, id, REPEAT('ö', 200) FROM shop.regions WHERE id < 2000",
    "INSERT INTO other.parts SELECT id, REPEAT('p', 100) FROM shop.regions",
    "INSERT INTO other.texts SELECT id, CONCAT('hello ', id) FROM shop.regions",
    "INSERT INTO other.x SELECT id, REPEAT('x', 100) FROM shop.regions",
    "INSERT INTO other.y SELECT id, REPEAT('y', 100) FROM shop.regions",
)
ONLY_MARIADB = (
    "CREATE TABLE other.aria (id INT PRIMARY KEY) ENGINE=Aria",
    "INSERT INTO other.aria SELECT id FROM shop.regions",
    "CREATE TABLE other.isam (id INT PRIMARY KEY) ENGINE=MyISAM",
    "INSERT INTO other.isam VALUES (1), (2)",
    "CREATE SEQUENCE other.numbers START WITH 7",
    "CREATE TABLE other.during (id INT PRIMARY KEY)",
    "INSERT INTO other.during SELECT id FROM shop.regions",
    "CREATE TABLE other.dropped (id INT PRIMARY KEY)",
    "INSERT INTO other.dropped VALUES (1)",
)
FIRST_INCREMENT = (
    "UPDATE shop.orders SET v = 'one' WHERE id % 2 = 0",
    "RENAME TABLE other.x TO other.tmp, other.y TO other.x, other.tmp TO other.y",
    "UPDATE other.x SET v = '1' WHERE id < 10",
    "CREATE TABLE other.late SELECT * FROM other.parts",
    ("CREATE TABLE other.monthly (id INT PRIMARY KEY) PARTITION BY RANGE (id) (PARTITION p1 VALUES LESS THAN (10))"),
    "INSERT INTO other.monthly VALUES (1)",
    "RENAME TABLE other.leaves TO third.leaves",
    "UPDATE third.leaves SET id = id + 100000",
    "DROP TABLE other.dropped",
    "INSERT INTO other.isam VALUES (3)",
    "DELETE FROM other.aria WHERE id % 2",
)
SECOND_INCREMENT = (
    "UPDATE shop.orders SET v = 'two' WHERE id % 3 = 0",
    "RENAME TABLE other.x TO third.moved",
    "UPDATE third.moved SET v = '2' WHERE id > 9000",
    f"UPDATE {ODD} SET v = 'q' WHERE id < 5",
    "INSERT INTO other.late SELECT id + 100000, v FROM other.late",
    "DO NEXTVAL(other.numbers)",
    "ALTER TABLE other.monthly ADD PARTITION (PARTITION p2 VALUES LESS THAN (20))",
    "INSERT INTO other.monthly VALUES (11)",
)


@contextlib.contextmanager
def unfinished(server: Server) -> Iterator[None]:
    """While the backup is taken, somebody has changed many rows and not committed."""
    with contextlib.closing(connect(server.socket, autocommit=False)) as session:
        query(session, "UPDATE shop.orders SET v = 'never'")
        query(session, "UPDATE other.parts SET v = 'never'")
        query(session, "DELETE FROM other.late") if server.query("SHOW TABLES FROM other LIKE 'late'") else None
        yield
        session.rollback()


def renaming(server: Server) -> Callable[[str], None]:
    """Rename a table when the tool begins to copy it."""
    done: list[str] = []

    def hear(line: str) -> None:
        if "Streaming ./other/during.ibd" in line and not done:
            done.append(line)
            server.execute("RENAME TABLE other.during TO other.after")

    return hear


@pytest.fixture(scope="module")
def mariadb(keys: Keys) -> Iterator[ChainRepository]:
    with short_directory() as folder, short_directory() as elsewhere, MARIADB.make() as server:
        give_to_database(elsewhere)
        server.create_backup_users()
        server.execute(
            *TABLES,
            *ONLY_MARIADB,
            f"CREATE TABLE other.outside (id INT PRIMARY KEY) DATA DIRECTORY = '{elsewhere}'",
            f"CREATE TABLE other.leaves (id INT PRIMARY KEY) DATA DIRECTORY = '{elsewhere}'",
            *(f"INSERT INTO other.{table} SELECT id FROM shop.regions" for table in ("outside", "leaves")),
        )
        repository = ChainRepository(MARIADB, server, keys, folder)
        server.settle()
        for changes in ((), FIRST_INCREMENT, SECOND_INCREMENT):
            server.execute(*changes)
            server.settle()
            with unfinished(server):
                repository.take(renaming(server) if changes is SECOND_INCREMENT else None)
        yield repository


@pytest.fixture(scope="module")
def mysql(keys: Keys) -> Iterator[ChainRepository]:
    if why := MYSQL.why_not():
        pytest.skip(why)
    with short_directory() as folder, MYSQL.make() as server:
        server.create_backup_users()
        server.execute(
            *TABLES,
            "CREATE TABLESPACE many ADD DATAFILE 'many.ibd'",
            "CREATE TABLE other.within (id INT PRIMARY KEY) TABLESPACE many",
            "INSERT INTO other.within VALUES (1), (2)",
        )
        repository = ChainRepository(MYSQL, server, keys, folder)
        with unfinished(server):
            repository.take()
        yield repository


@pytest.fixture(params=["mariadb", "mysql"])
def repository(request: pytest.FixtureRequest) -> ChainRepository:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, ChainRepository)
    return found


def loaded(repository: ChainRepository) -> tuple[Loaded, ...]:
    return load_chain("shop", repository.chain, repository.sources)[0]


def same_as_source(repository: ChainRepository, copy: SubsetCopy) -> None:
    assert copy.unreadable == {}
    for table in copy.tables:
        assert sums(copy.connection, [str(table)]) == sums(repository.server, [str(table)]), table
        with copy.connection.connect() as session:
            assert [row[3] for row in session.query(f"CHECK TABLE {table} EXTENDED") if row[2] == "error"] == []


def names(*texts: str) -> tuple[TableName, ...]:
    return tuple(sorted(name(text) for text in texts))


def test_one_table_comes_alone_and_whole(repository: ChainRepository) -> None:
    with repository.copy("shop.orders") as copy:
        assert copy.tables == names("shop.orders")
        assert copy.sandboxed
        same_as_source(repository, copy)
        assert name("shop.customers") in copy.left_out
        data = {path.relative_to(copy.datadir).as_posix() for path in copy.datadir.rglob("*.ibd")}
        assert {path for path in data if path.startswith(("shop/", "other/", "gr"))} == {"shop/orders.ibd"}
        whole = sum(header.stats.bytes_stored for header in repository.headers)
        planned = subset_of(loaded(repository), lambda table: table == name("shop.orders"))
        assert copy.fetched == sum(part.header.stats.bytes_stored for part in planned) < whole
        datadir = copy.datadir
    assert not datadir.exists()


def test_a_backup_tells_its_tables_by_its_files(repository: ChainRepository) -> None:
    found = tables_in(loaded(repository)[-1])
    here = {
        TableName(str(schema), str(table))
        for schema, table in repository.server.query(
            "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_TYPE NOT LIKE '%VIEW' AND "
            "TABLE_SCHEMA NOT IN ('mysql', 'sys', 'performance_schema', 'information_schema')"
        )
    }
    views = {name("shop.totals")} if repository.kind.mariadb else set()  # since a table was renamed meanwhile
    assert set(found) == (here | views) - {name("other.within")}  # which lies in a tablespace of many


def test_tables_of_every_shape_come_out_of_a_chain(mariadb: ChainRepository) -> None:
    with mariadb.copy(
        ODD,
        "other.parts",
        "other.texts",
        "other.aria",
        "other.isam",
        "other.numbers",
        "other.outside",
        "other.monthly",
        "other.late",
        "other.dropped",
        "other.after",
    ) as copy:
        assert copy.tables == tuple(
            sorted(
                [
                    TableName.parse(ODD),
                    *names(
                        "other.parts",
                        "other.texts",
                        "other.aria",
                        "other.isam",
                        "other.numbers",
                        "other.outside",
                        "other.monthly",
                        "other.late",
                        "other.after",
                    ),
                ]
            )
        )
        same_as_source(mariadb, copy)
        with copy.connection.connect() as session:
            assert session.scalar("SELECT COUNT(*) FROM other.texts WHERE MATCH (v) AGAINST ('777')") == 1
            assert session.scalar("SELECT COUNT(*) FROM other.outside") == 10000


def test_tables_of_every_shape_come_out_of_a_clone(mysql: ChainRepository) -> None:
    with mysql.copy(ODD, "other.parts", "other.texts", "other.within") as copy:
        assert set(copy.tables) == {TableName.parse(ODD), *names("other.parts", "other.texts", "other.within")}
        same_as_source(mysql, copy)
        with copy.connection.connect() as session:
            assert session.scalar("SELECT COUNT(*) FROM other.texts WHERE MATCH (v) AGAINST ('777')") == 1


@pytest.mark.parametrize("table", ["third.moved", "third.leaves"])
def test_a_table_that_had_another_name_when_an_earlier_backup_was_taken_is_whole(
    mariadb: ChainRepository, table: str
) -> None:
    with mariadb.copy(table) as copy:
        assert copy.tables == names(table)
        same_as_source(mariadb, copy)


def test_an_earlier_backup_of_the_chain_has_the_tables_of_its_time(mariadb: ChainRepository) -> None:
    with mariadb.copy("other.dropped", "other.x", length=1) as copy, copy.connection.connect() as session:
        assert copy.tables == names("other.dropped", "other.x")
        assert session.scalar("SELECT COUNT(*) FROM other.x WHERE v LIKE 'xxx%%'") == 10000


def test_a_table_that_is_not_there_is_said_so_with_those_that_are(repository: ChainRepository) -> None:
    with pytest.raises(NotFoundError) as caught, repository.copy("shop.order"):
        pass
    assert "shop.order" in caught.value.message
    assert "shop.orders" in caught.value.detail


def test_what_may_take_no_more_room_is_judged_by_the_part_that_is_fetched(mariadb: ChainRepository) -> None:
    part = subset_of(loaded(mariadb), lambda table: table == name("shop.orders"))
    size = sum(one.header.stats.bytes_source for one in part)

    def attempt(limit: int) -> tuple[TableName, ...]:
        with subset_instance(
            replace(mariadb.spec(), max_bytes=limit),
            [TablePattern("shop.orders")],
            mariadb.sources,
            mariadb.context,
        ) as copy:
            return copy.tables

    with pytest.raises(RefusedError):
        attempt(size // 2)


def replay_of(repository: ChainRepository, folder: Path, tables: tuple[str, ...]) -> ReplaySpec:
    """Of what the source has written since the last backup."""
    start = loaded(repository)[-1].body.facts.position
    found = logs(repository.server, folder, start, here(repository.kind, repository.server))
    number = int(start.file.rpartition(".")[2])
    branch = Branch(
        "shop", "20261121T080000Z-aaaaaaaa", now(), BranchReason.FIRST, "uid", repository.kind.name, "binlog", number
    )
    sealer = Sealer((repository.keys.fingerprint,), repository.keys.public_home)
    (path,) = found.files
    header = archive_log(repository.destination, sealer, branch, number, path.read_bytes(), ending=Ending.OPEN)
    size = found.stop.pos - start.pos
    leg = ReplayLeg((header.segment.key,), start, replace(found.stop, branch=branch.id), size)
    return ReplaySpec(
        (leg,),
        ReplayMethod.APPLIER,
        "",
        size,
        0,
        (repository.server.server_id,),
        tables=tuple(str(name(table)) for table in tables),
    )


def test_a_replay_brings_the_parents_of_foreign_keys_and_forgets_the_children(
    repository: ChainRepository, short_tmp: Path
) -> None:
    repository.server.execute(
        f"DELETE FROM {ODD} WHERE o < 10",
        "DELETE FROM shop.customers WHERE id < 10",
        "INSERT INTO shop.regions VALUES (20000, 'new')",
        "INSERT INTO shop.customers VALUES (20000, 20000)",
        "INSERT INTO shop.orders VALUES (20000, 20000, 'after')",
        "UPDATE other.parts SET v = 'other' WHERE id = 1",
        f"DELETE FROM {ODD}",
        "DELETE FROM shop.orders WHERE id = 500",
    )
    with repository.copy("shop.orders", replay=replay_of(repository, short_tmp / "logs", ("shop.orders",))) as copy:
        assert copy.tables == names("shop.orders")
        assert copy.also == names("shop.customers", "shop.regions")
        assert copy.roll_forward is not None
        copy.roll_forward(lambda _stop: None)
        same_as_source(repository, copy)
        for table in copy.also:
            assert sums(copy.connection, [str(table)]) == sums(repository.server, [str(table)])


def test_a_table_goes_on_as_a_file_into_a_running_server(repository: ChainRepository) -> None:
    kind: Kind = repository.kind
    with repository.copy("other.parts", "other.y") as copy, kind.make(binlog=False) as target:
        assert sums(copy.connection, ["other.y"]) == sums(repository.server, ["other.y"])
        target.execute("CREATE DATABASE staging")
        with copy.connection.connect() as source:
            goals = {table: TableName("staging", table.table) for table in copy.tables}
            for table, staged in goals.items():
                definition = str(source.query(f"SHOW CREATE TABLE {table}")[0][1])
                target.execute("USE staging", definition.replace("%", "%%") if "%" in definition else definition)
                assert staged.table == table.table
            there = Connection(socket=str(target.socket), user="root")
            with there.connect() as session:
                assert can_import(source, session, copy.tables) == {}
            with export_tables(source, copy.tables) as exported:
                done = import_tables(there, [(one, goals[one.name]) for one in exported], RunContext())
        assert done.failed == {}
        assert set(done.rows) == set(goals.values())
        for table, staged in goals.items():
            assert list(sums(target, [str(staged)]).values()) == list(sums(copy.connection, [str(table)]).values())
