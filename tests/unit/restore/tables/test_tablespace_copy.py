"""Tables that go into a server on this host as files, whatever ends an attempt."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.dump.selection import dump_quiet
from backupd.engine.physical import tablespace_transport as tablespace
from backupd.engine.physical.tablespace_transport import remove_strays
from backupd.engine.sql.client import Connection
from backupd.engine.sql.tables import checksum_statement
from backupd.model.table import TableName
from backupd.model.text import new_id
from backupd.process.run_context import RunContext
from restore.cutover.parallel_load import load
from restore.cutover.staging_schema import Journal, drop_staging, staging_names
from restore.planning.table_plan import Source, TableGoal
from restore.tables import restore as tablerestore
from restore.tables.outcome import TablesOutcome, TablesSpec
from restore.tables.tablespace_copy import CopiedTables, TablespaceCopier
from tests.support.dice import SOAK
from tests.support.keys import Keys
from tests.support.oracle import Rows
from tests.support.restores.rolling import MARIADB, MYSQL, Kind
from tests.support.restores.subsets import ChainRepository
from tests.support.restores.taken import now
from tests.support.servers.server import Server, quote_name
from tests.support.stores.folders import short_directory

ODD = "größe 数据-1"
PLAIN, PARTS, NAMED = TableName("shop", "plain"), TableName("shop", "parts"), TableName(ODD, "naïve/tablé $1")
TEXTS, ISAM, PAST, SPARE = (TableName("shop", name) for name in ("texts", "isam", "past", "backupd_partition"))
STAGING = staging_names("carry", ["shop", ODD])
TEN = " UNION ALL ".join(f"SELECT {number} n" for number in range(10))
ROWS = f"(SELECT a.n + 10 * b.n + 100 * c.n n FROM ({TEN}) a, ({TEN}) b, ({TEN}) c) numbers"
TABLES = {
    PLAIN: "(id INT AUTO_INCREMENT PRIMARY KEY, v VARCHAR(200), w INT AS (LENGTH(v)) VIRTUAL, KEY (w), KEY (v))",
    PARTS: "(id INT PRIMARY KEY, v VARCHAR(200)) PARTITION BY RANGE (id) (PARTITION `p é` VALUES LESS THAN (100), "
    "PARTITION p1 VALUES LESS THAN MAXVALUE)",
    NAMED: "(id INT PRIMARY KEY, v VARCHAR(200), p INT, CONSTRAINT f FOREIGN KEY (p) REFERENCES shop.plain (id))",
    TEXTS: "(id INT PRIMARY KEY, v VARCHAR(200), FULLTEXT (v))",
    SPARE: "(id INT PRIMARY KEY, v VARCHAR(200))",
}
FIT = (PLAIN, PARTS, NAMED)


@dataclass
class House:
    """``source``, a repository for backups of it, and ``target`` without a binary log."""

    kind: Kind
    source: Server
    target: Server
    repository: ChainRepository

    @property
    def names(self) -> tuple[TableName, ...]:
        return (*TABLES, *((PAST,) if self.kind.mariadb else ()))

    def sums(self, server: Server, names: Sequence[TableName], *, staged: bool = False) -> list[object]:
        return Rows(checksum(server, TableName(STAGING[name.schema], name.table) if staged else name) for name in names)

    def carry(self, folder: Path, names: Sequence[TableName] = ()) -> CopiedTables:
        copier = TablespaceCopier(at(self.target), STAGING)
        return copier.copy(at(self.source), names or self.names, folder, RunContext())

    def restore(self, restore_id: str) -> TablesOutcome:
        names = (PLAIN, NAMED, TEXTS)
        spec = TablesSpec(
            restore_id=restore_id,
            server="shop",
            target=f"backup:{self.repository.chain[-1]}",
            way=Source.PHYSICAL,
            chain=self.repository.chain,
            replay=None,
            statements=(),
            into="target",
            folder=self.repository.folder / "scratch",
            goals=tuple(TableGoal(name, TableName("back", name.table)) for name in names),
        )
        return tablerestore.execute(
            spec,
            at(self.target),
            self.repository.sources,
            self.repository.context,
        )

    def folders(self) -> set[str]:
        return {path.name for path in self.target.datadir.iterdir() if path.name.startswith("backupd_restore")}


def at(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user="root")


def checksum(server: Server, name: TableName) -> object:
    with at(server).connect() as session:
        return session.query(checksum_statement(session, name))[0][-1]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, id=str(kind), marks=pytest.mark.skipif(bool(why := kind.why_not()), reason=why or "-"))
        for kind in (MARIADB, MYSQL)
    ],
)
def house(request: pytest.FixtureRequest, keys: Keys) -> Iterator[House]:
    kind: Kind = request.param
    with short_directory() as folder, kind.make() as source, kind.make(binlog=False) as target:
        source.create_backup_users()
        source.execute(*(f"CREATE DATABASE {quote_name(schema)}" for schema in STAGING))
        for name, definition in TABLES.items():
            source.execute(
                f"CREATE TABLE {name} {definition}",
                f"INSERT INTO {name} (id, v) SELECT n + 1, REPEAT('x', n % 200) FROM {ROWS}",
            )
        if kind.mariadb:
            source.execute(
                f"CREATE TABLE {PAST} (id INT PRIMARY KEY, v INT) WITH SYSTEM VERSIONING",
                f"INSERT INTO {PAST} VALUES (1, 1)",
                f"UPDATE {PAST} SET v = 2",
            )
            source.settle()
        target.execute("CREATE DATABASE live", *(f"CREATE TABLE live.t{number} (id INT)" for number in range(9)))
        yield House(kind, source, target, ChainRepository(kind, source, keys, folder))


@pytest.fixture
def empty(house: House) -> Iterator[House]:
    yield house
    drop_staging(at(house.target), STAGING.values())
    assert house.folders() == set()


def dying(what: Callable[[], object], owner: object, name: str, *, after: bool = False) -> None:
    """Run ``what`` in a process that is killed when it comes to ``name`` of ``owner``, or has ``after`` done it."""
    pid = os.fork()
    if pid == 0:
        real = getattr(owner, name)

        def killed(*args: Any, **options: Any) -> None:
            if after:
                real(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            setattr(owner, name, killed)
            what()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_what_can_go_goes_as_files_and_the_load_takes_it_as_its_own(empty: House, tmp_path: Path) -> None:
    done = empty.carry(tmp_path)
    assert (done.rows, done.failed) == (dict.fromkeys(FIT, 1000), {})
    assert set(done.unfit) == set(empty.names) - set(FIT)
    assert "full-text" in done.unfit[TEXTS]
    assert TablespaceCopier(at(empty.target), STAGING).holds(done.tables, tmp_path)
    rest = dump_quiet(at(empty.source), sorted(done.unfit), tmp_path, RunContext())
    loaded = load(at(empty.target), tmp_path, [*done.tables, *rest], STAGING, RunContext(workers=4))
    assert (loaded.failed, loaded.warnings) == ({}, ())
    assert set(loaded.rows) == set(empty.names)
    assert empty.sums(empty.target, empty.names, staged=True) == empty.sums(empty.source, empty.names)
    for name in FIT:
        staged = TableName(STAGING[name.schema], name.table)
        assert [row[3] for row in empty.target.query(f"CHECK TABLE {staged}")] == ["OK"]
    create = str(empty.target.query(f"SHOW CREATE TABLE {TableName(STAGING[ODD], NAMED.table)}")[0][1])
    assert "FOREIGN KEY" not in create
    assert (tmp_path / "tables").is_dir()


def test_a_server_with_a_binary_log_gets_no_file_and_nothing_is_made_there(house: House, tmp_path: Path) -> None:
    copier = TablespaceCopier(at(house.source), STAGING)
    done = copier.copy(at(house.target), [TableName("live", "t0")], tmp_path, RunContext())
    assert "binary log" in done.unfit[TableName("live", "t0")]
    assert (done.rows, done.failed, done.remarks) == ({}, {}, ())
    assert not house.source.query("SHOW DATABASES LIKE 'backupd\\_%'")
    assert list(tmp_path.iterdir()) == []


def test_what_fails_on_the_way_is_told_and_left_to_be_loaded(
    empty: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tablespace._Files, "put", full)
    done = empty.carry(tmp_path)
    assert done.rows == {}
    assert set(done.failed) == set(FIT)
    assert "No space left" in done.remarks[0]
    taken = dump_quiet(at(empty.source), FIT, tmp_path, RunContext())
    loaded = load(at(empty.target), tmp_path, taken, STAGING, RunContext(workers=4))
    assert loaded.rows == dict.fromkeys(FIT, 1000)


@pytest.mark.parametrize(
    ("owner", "step", "after"),
    [
        pytest.param(tablespace._Files, "show", False, marks=SOAK),
        (tablespace._Files, "show", True),
        pytest.param(Journal, "set_state", False, marks=SOAK),
    ],
    ids=["copied", "named", "imported"],
)
def test_an_attempt_that_is_killed_is_made_anew_and_never_taken_for_whole(
    empty: House, tmp_path: Path, owner: object, step: str, after: bool
) -> None:
    names = (PLAIN, PARTS)
    dying(lambda: empty.carry(tmp_path, names), owner, step, after=after)
    if step == "show" and not after:  # the number in it may be that of another table: MySQL would not start any more
        folder = empty.target.datadir / STAGING["shop"]
        waiting = list(folder.glob("*.ibd.backupd"))
        assert waiting
        assert [path for path in waiting if path.with_suffix("").exists()] == []
    done = empty.carry(tmp_path, names)
    assert (done.rows, done.failed) == (dict.fromkeys(names, 1000), {})
    assert empty.sums(empty.target, names, staged=True) == empty.sums(empty.source, names)
    dying(lambda: empty.carry(tmp_path, names), owner, step, after=after)
    assert not TablespaceCopier(at(empty.target), STAGING).holds(done.tables, tmp_path)
    if step != "set_state":
        loaded = load(at(empty.target), tmp_path, done.tables, STAGING, RunContext(workers=4))
        assert PLAIN not in loaded.rows
    drop_staging(at(empty.target), STAGING.values())  # the server makes these schemas again
    with at(empty.target).connect() as session:
        session.execute(f"CREATE DATABASE {STAGING['shop']}")
        assert remove_strays(session, STAGING["shop"]) == ()


def test_files_that_are_in_nobodys_way_are_left_alone(empty: House) -> None:
    schema = STAGING["shop"]
    empty.target.execute(f"CREATE DATABASE {schema}", f"CREATE TABLE {schema}.`a-b` (id INT)")
    folder = empty.target.datadir / schema
    there = {path.name for path in folder.iterdir()}
    (folder / "lost.ibd").write_bytes(b"")
    (folder / "lost.txt").write_bytes(b"")
    with at(empty.target).connect() as session:
        assert remove_strays(session, schema) == ()
    assert {path.name for path in folder.iterdir()} == there | {"lost.txt"}
    (folder / "lost.txt").unlink()


@pytest.mark.parametrize("house", [MARIADB], indirect=True, ids=str)
def test_tables_of_a_backup_are_carried_again_when_they_are_lost_before_they_are_handed_over(house: House) -> None:
    house.repository.take()
    restore_id = new_id(now())
    staging = staging_names(restore_id, [PLAIN.schema, NAMED.schema])
    dying(lambda: house.restore(restore_id), tablerestore, "load")
    assert [row[0] for row in house.target.query(f"SHOW TABLES FROM `{staging['shop']}` LIKE 'plain'")] == ["plain"]
    drop_staging(at(house.target), staging.values())
    outcome = house.restore(restore_id)
    assert outcome.is_good
    assert outcome.warnings == ()
    assert {one.goal.source: (one.how, one.rows) for one in outcome.tables} == {
        PLAIN: ("tablespace", 1000),
        NAMED: ("tablespace", 1000),
        TEXTS: ("rows", 1000),
    }
    assert "carried" in {phase.name for phase in outcome.phases}
    for name in (PLAIN, NAMED, TEXTS):
        assert checksum(house.target, TableName("back", name.table)) == checksum(house.source, name)
    assert (
        house.target.scalar(
            "SELECT AUTO_INCREMENT FROM information_schema.TABLES WHERE TABLE_SCHEMA = 'back' AND TABLE_NAME = 'plain'"
        )
        >= 1001
    )
    assert house.folders() == set()
