"""Tables of a logical backup in a private server of their own, rolled forward. The oracle: the source itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.server import definitions as ddl
from backupd.engine.server.definitions import read_schema
from backupd.engine.sql.client import Connection
from backupd.model.binlog import Branch, BranchReason, Ending, ReplayLeg, ReplayMethod, ReplaySpec
from backupd.model.errors import RefusedError
from backupd.model.proof import Phase
from backupd.model.server_facts import Position, ServerInfo
from backupd.model.table import DumpedTable, TableName, triggers_path
from backupd.process.run_context import RunContext, Stopwatch
from backupd.transfer.records.encryption import Sealer, Unsealer
from restore.fetch.sources import Sources
from restore.scratch_server import ScratchSpec, loaded_instance
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys
from tests.support.logs.archived_logs import archive_log
from tests.support.restores.dump_folder import add_from
from tests.support.restores.narrowed import checksums
from tests.support.restores.rolling import Kind, both, here, info_of, logs, place, templates
from tests.support.servers import mysql
from tests.support.servers.server import Server

BOTH = both()
BRANCH = "20261121T080000Z-aaaaaaaa"
SHOP = "sho.p"
ITEMS, CUSTOMERS, ORDERS, LOOSE = (TableName(SHOP, name) for name in ("items", "custo`mers", "orders", "loose"))
SUMS = TableName("sums", "t")
MOVED = TableName("late", "moved")
ALL = (ITEMS, CUSTOMERS, ORDERS, SUMS)

BEFORE = (
    f"CREATE DATABASE `{SHOP}` CHARACTER SET latin1",
    "CREATE DATABASE sums",
    "CREATE DATABASE bare",
    f"CREATE TABLE {CUSTOMERS} (id INT PRIMARY KEY, name VARCHAR(20))",
    (
        f"CREATE TABLE {ITEMS} (id INT AUTO_INCREMENT PRIMARY KEY, customer INT, t TIMESTAMP DEFAULT "
        "CURRENT_TIMESTAMP, "
        f"b BLOB, FOREIGN KEY (customer) REFERENCES {CUSTOMERS} (id) ON DELETE CASCADE)"
    ),
    f"CREATE TABLE {ORDERS} (id INT PRIMARY KEY, n INT) PARTITION BY HASH (id) PARTITIONS 3",
    f"CREATE TABLE {LOOSE} (id INT PRIMARY KEY) ENGINE = MyISAM",
    f"CREATE TABLE {SUMS} (n INT)",
    f"INSERT INTO {SUMS} VALUES (0)",
    f"CREATE FUNCTION `{SHOP}`.twice(n INT) RETURNS INT DETERMINISTIC RETURN 2 * n",
    (
        f"CREATE TRIGGER `{SHOP}`.adds AFTER INSERT ON {ORDERS} FOR EACH ROW BEGIN "
        f"UPDATE {SUMS} SET n = n + twice(NEW.n); END"
    ),
    f"INSERT INTO {CUSTOMERS} VALUES (1, 'ä'), (2, 'b'), (3, 'c')",
    f"INSERT INTO {ITEMS} (customer, b) VALUES (1, x'00ff27'), (2, NULL), (3, 'x')",
    f"INSERT INTO {ORDERS} VALUES (1, 1), (2, 2)",
)
AFTER = (
    "CREATE DATABASE other",
    "CREATE TABLE other.t (i INT)",
    "INSERT INTO other.t VALUES (1)",
    "DROP DATABASE other",
    "CREATE USER nobody@localhost",
    f"GRANT SELECT ON {LOOSE} TO nobody@localhost",
    f"DELETE FROM {CUSTOMERS} WHERE id = 1",
    f"INSERT INTO {ITEMS} (customer) VALUES (2)",
    f"INSERT INTO {ORDERS} VALUES (3, 30)",
    f"INSERT INTO {LOOSE} VALUES (8)",
    "SET SESSION binlog_format = STATEMENT",
    f"INSERT INTO {ORDERS} VALUES (4, 40)",
    f"UPDATE {ORDERS} SET n = n + 1 WHERE id = 1",
    "SET SESSION binlog_format = ROW",
    f"CREATE TABLE `{SHOP}`.`_orders_new` LIKE {ORDERS}",
    f"ALTER TABLE `{SHOP}`.`_orders_new` ADD c VARCHAR(9)",
    f"INSERT INTO `{SHOP}`.`_orders_new` (id, n) SELECT id, n FROM {ORDERS}",
    f"RENAME TABLE {ORDERS} TO `{SHOP}`.`_orders_old`, `{SHOP}`.`_orders_new` TO {ORDERS}",
    f"DROP TABLE `{SHOP}`.`_orders_old`",
    f"CREATE TABLE bare.moved LIKE {CUSTOMERS}",
    "CREATE DATABASE late",
    "INSERT INTO bare.moved VALUES (1, 'x')",
    "RENAME TABLE bare.moved TO late.moved",
    f"ALTER TABLE {ORDERS} TRUNCATE PARTITION p1",
)


class Made:
    """A source, a logical backup of it in a folder, and the logs from there on at a destination."""

    def __init__(self, kind: Kind, source: Server, folder: Path, keys: Keys) -> None:
        self.kind, self.source = kind, source
        source.execute(*BEFORE)
        self.folder, self.start = folder / "backup", place(kind, source)
        self.taken = datetime.now(UTC)
        self.dumped = {name: self._dump(name) for name in (*ALL, LOOSE)}
        self._scripts()
        source.execute(*AFTER)
        what = logs(source, folder / "logs", self.start, here(kind, source))
        self.destination = FilesystemDestination("local", folder / "local")
        self.destination.initialise(self.taken)
        number = int(what.start.file.rpartition(".")[2])
        branch = Branch("db", BRANCH, self.taken, BranchReason.FIRST, "uid", kind.name, "binlog", number)
        (path,) = what.files
        header = archive_log(
            self.destination,
            Sealer((keys.fingerprint,), keys.public_home),
            branch,
            number,
            path.read_bytes(),
            ending=Ending.OPEN,
        )
        stop = replace(what.stop, branch=BRANCH)
        names = (
            *ALL,
            TableName("bare", "moved"),
            MOVED,
            TableName(SHOP, "_orders_new"),
            TableName(SHOP, "_orders_old"),
        )
        self.replay = ReplaySpec(
            (ReplayLeg((header.segment.key,), self.start, stop, what.stop.pos - self.start.pos),),
            ReplayMethod.APPLIER,
            "",
            what.stop.pos - self.start.pos,
            0,
            (source.server_id,),
            tables=tuple(str(name) for name in names),
        )

    def _dump(self, name: TableName) -> DumpedTable:
        found = add_from(self.source, self.folder, name)
        with Connection(socket=str(self.source.socket), user="root").connect() as session:
            triggers = ddl.write_triggers(ddl.read_table(session, name))
        if triggers:
            (self.folder / triggers_path(name)).write_bytes(triggers)
        engine = "MyISAM" if name == LOOSE else "InnoDB"
        return replace(found, engine=engine)

    def _scripts(self) -> None:
        with Connection(socket=str(self.source.socket), user="root").connect() as session:
            for schema in (SHOP, "sums"):
                for path, content in read_schema(session, schema).files().items():
                    (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (self.folder / path).write_bytes(content)

    @property
    def context(self) -> RunContext:
        programs = (
            {}
            if self.kind.mariadb
            else {name: str(mysql.root_programs() / name) for name in ("mysqld", "mysql", "mysqlbinlog")}
        )
        return RunContext(memory=256 << 20, workers=2, templates=templates(), programs=programs)

    def spec(self, path: Path, **changes: Any) -> ScratchSpec:
        spec = ScratchSpec(scratch_id="one", server="db", chain=(), path=path, replay=self.replay)
        return replace(spec, **changes)

    @property
    def backup(self) -> tuple[ServerInfo, datetime, Path]:
        return info_of(self.source), self.taken, self.folder

    def tables(self, *names: TableName) -> Sequence[DumpedTable]:
        return [self.dumped[name] for name in names]


@pytest.fixture(scope="module")
def made_mariadb(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield from _made("mariadb", keys, tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def made_mysql(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield from _made("mysql", keys, tmp_path_factory.mktemp("made"))


def _made(name: str, keys: Keys, folder: Path) -> Iterator[Made]:
    kind = next(one.values[0] for one in BOTH.args[1] if one.id == name)
    with kind.make() as source:
        yield Made(kind, source, folder, keys)


@pytest.fixture
def made(request: pytest.FixtureRequest, kind: Kind) -> Made:
    found = request.getfixturevalue(f"made_{kind}")
    assert isinstance(found, Made)
    return found


@BOTH
def test_tables_of_a_logical_backup_are_rolled_forward_with_their_cascades_and_triggers(
    kind: Kind, made: Made, keys: Keys, short_tmp: Path
) -> None:
    told: list[Phase] = []
    with loaded_instance(
        made.spec(short_tmp),
        *made.backup,
        made.tables(*ALL),
        Sources((), Unsealer(keys.secret_home), [made.destination]),
        replace(made.context, watch=Stopwatch(told.append)),
    ) as copy:
        assert (set(copy.tables), copy.failed) == (set(ALL), {})
        assert copy.roll_forward is not None
        with copy.connection.connect() as session:
            before = [row[0] for row in session.query(f"SHOW TABLES FROM `{SHOP}`")]
        assert before == sorted(name.table for name in ALL[:3])
        rolled = copy.roll_forward(lambda _stop: None)
        assert rolled.transactions > 15
        with copy.connection.connect() as session:
            assert checksums(session.query, (*ALL, MOVED)) == checksums(made.source.query, (*ALL, MOVED))
    assert [phase.name for phase in told] == ["rolled_forward", "started", "restored", "rolled_forward"]
    assert made.source.scalar(f"SELECT n FROM {SUMS}") == 2 * (1 + 2 + 30 + 40)
    assert list(short_tmp.iterdir()) == []


@BOTH
def test_what_cannot_be_rolled_forward_exactly_is_refused_before_anything_is_fetched(
    kind: Kind, made: Made, keys: Keys, short_tmp: Path
) -> None:
    def refused(tables: Sequence[DumpedTable], why: str, names: str) -> None:
        with (
            pytest.raises(RefusedError, match=why) as caught,
            loaded_instance(
                made.spec(short_tmp),
                *made.backup,
                tables,
                Sources((), Unsealer(keys.secret_home), [made.destination]),
                made.context,
            ),
        ):
            pytest.fail("it should not come here")
        assert names in caught.value.detail

    later = replace(made.dumped[SUMS], position=Position(made.start.file, made.start.pos + 100, ""))
    refused([*made.tables(ORDERS), later], "a later position", "sums.t")
    refused(made.tables(LOOSE), "no snapshots", "MyISAM")
    if kind.mariadb:
        refused(made.tables(ITEMS), "without the parent tables", "ON DELETE CASCADE")


@BOTH
def test_without_a_replay_the_tables_are_there_as_the_backup_has_them(
    kind: Kind, made: Made, keys: Keys, short_tmp: Path
) -> None:
    if not kind.mariadb:
        pytest.skip("the same for both")
    lost = replace(made.dumped[SUMS], name=TableName("sums", "nowhere"))
    with loaded_instance(
        made.spec(short_tmp, replay=None),
        *made.backup,
        [*made.tables(ITEMS, LOOSE), lost],
        Sources((), Unsealer(keys.secret_home)),
        made.context,
    ) as copy:
        assert copy.roll_forward is None
        assert list(copy.failed) == [lost.name]
        assert copy.tables == (ITEMS, LOOSE)
        with copy.connection.connect() as session:
            assert session.scalar(f"SELECT COUNT(*) FROM {ITEMS}") == 3
            assert "REFERENCES" not in str(session.query(f"SHOW CREATE TABLE {ITEMS}"))
