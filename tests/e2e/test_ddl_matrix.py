"""Every statement that changes definitions, while a physical backup runs: the copy is the server at its position."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.mariabackup import MariaBackup
from tests.e2e.house import SERVER, Done, House
from tests.engine.backups import the_tool
from tests.support.keys import Keys
from tests.support.mariadb import PrivateServer
from tests.support.oracle import same
from tests.support.sample import checksum_everything, describe_everything
from tests.support.server import Server

_MIB = 1024 * 1024
_GATE = """\
import pathlib, sys, time
folder, stops, words = pathlib.Path(sys.argv[1]), [int(stop) for stop in sys.argv[2].split()], sys.argv[3:]
waits = [word.encode() for word in words]
done, last = 0, b""
while block := sys.stdin.buffer.read1(65536):
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    done += len(block)
    last = last[-100:] + block
    waits = [word for word in waits if word not in last]
    while stops and done >= stops[0] and not waits:
        (folder / f"at-{stops[0]}").touch()
        while (folder / f"at-{stops[0]}").exists():
            time.sleep(0.01)
        stops.pop(0)
"""
ENGINES = ("MyISAM", "Aria", "InnoDB")


class Gate:
    """A mariadb-backup whose stream stands still after so many bytes (``stops``), and not before the
    names ``after`` went by, until it is let through."""

    def __init__(self, base: Path, *stops: int, after: tuple[str, ...] = ()) -> None:
        self._base, self._stops, self._after = base, stops, after
        base.mkdir()
        (base / "gate.py").write_text(_GATE)
        self.tool = base / "mariadb-backup"
        self.write(the_tool())

    def write(self, tool: MariaBackup) -> None:
        stops = f"'{' '.join(map(str, self._stops))}' {' '.join(self._after)}"
        self.tool.write_text(
            "#!/bin/bash\nset -o pipefail\n"
            f'case "$*" in *--stream*) {tool.tool.path} "$@" |'
            f' {sys.executable} {self._base}/gate.py {self._base} {stops};; *) exec {tool.tool.path} "$@";; esac\n')
        self.tool.chmod(0o755)

    def run(self, house: House, *args: str, at: dict[int, Callable[[], None]]) -> Done:
        """``backupd ARGS``; when the first run of the tool has given so many bytes, call what belongs to them."""
        waiting = dict(at)
        house.programs = {"mariadb-backup": str(self.tool)}
        house.write()
        with house.popen(*args) as process:
            answer: list[tuple[str, str]] = []
            reader = threading.Thread(target=lambda: answer.append(process.communicate()))
            reader.start()
            while reader.is_alive():
                for stop in self._stops:
                    mark = self._base / f"at-{stop}"
                    if mark.exists():
                        waiting.pop(stop, lambda: None)()
                        mark.unlink()
                time.sleep(0.01)
            reader.join()
        house.programs = {}
        house.write()
        return Done(process.returncode, *answer[0])


def _tables(schema: str, engine: str) -> Iterator[str]:
    """What there is before."""
    yield f"CREATE DATABASE {schema} CHARACTER SET utf8mb4"
    yield f"CREATE DATABASE {schema}_other"
    for name in ("dropped", "made_again", "replaced", "swap1", "swap2", "cycle1", "cycle2", "cycle3", "moved",
                 "emptied", "converted",
                 "rebuilt", "instant", "indexed", "pattern", "old", "handed", "hand", "renamed", "optimised",
                 "`größe 1`"):
        yield f"CREATE TABLE {schema}.{name} (i INT, t VARCHAR(40)) ENGINE={engine}"
        yield f"INSERT INTO {schema}.{name} SELECT seq, '{name.strip('`')} of {engine}' FROM {schema}.seq_1_to_30"
    for name in ("parted", "merged", "traded"):
        yield (f"CREATE TABLE {schema}.{name} (i INT, t VARCHAR(40)) ENGINE={engine} PARTITION BY RANGE (i) ("
               "PARTITION p0 VALUES LESS THAN (10), PARTITION p1 VALUES LESS THAN (20), "
               "PARTITION p2 VALUES LESS THAN MAXVALUE)")
        yield f"INSERT INTO {schema}.{name} SELECT seq, '{name}' FROM {schema}.seq_1_to_30"
    yield f"CREATE TABLE {schema}.trade (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}.trade VALUES (12, 'of trade')"
    yield f"CREATE VIEW {schema}.seen AS SELECT i FROM {schema}.pattern"
    yield f"CREATE SEQUENCE {schema}.numbers ENGINE={engine}"
    yield f"CREATE DATABASE {schema}_again"
    yield f"CREATE TABLE {schema}_again.a (i INT) ENGINE={engine}"
    yield f"CREATE VIEW {schema}_again.v AS SELECT i FROM {schema}_again.a"
    yield f"CREATE TABLE {schema}_again.gone (i INT) ENGINE={engine}"
    yield f"CREATE DATABASE {schema}_gone"
    yield f"CREATE TABLE {schema}_gone.a (i INT) ENGINE={engine}"


def _changes(schema: str, engine: str) -> Iterator[str]:
    """Every statement once."""
    other = {"MyISAM": "InnoDB", "Aria": "MyISAM", "InnoDB": "Aria"}[engine]
    row = f"VALUES (1, 'anew, {engine}')"
    yield f"DROP TABLE {schema}.dropped"
    yield f"DROP TABLE {schema}.made_again"
    yield f"CREATE TABLE {schema}.made_again (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}.made_again {row}"
    yield f"CREATE OR REPLACE TABLE {schema}.replaced (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}.replaced {row}"
    yield f"RENAME TABLE {schema}.swap1 TO {schema}.t, {schema}.swap2 TO {schema}.swap1, {schema}.t TO {schema}.swap2"
    yield (f"RENAME TABLE {schema}.cycle1 TO {schema}.t, {schema}.cycle2 TO {schema}.cycle1, "
           f"{schema}.cycle3 TO {schema}.cycle2, {schema}.t TO {schema}.cycle3")
    yield f"RENAME TABLE {schema}.moved TO {schema}_other.moved"
    yield f"TRUNCATE TABLE {schema}.emptied"
    yield f"INSERT INTO {schema}.emptied {row}"
    yield f"ALTER TABLE {schema}.converted ENGINE={other}"
    yield f"ALTER TABLE {schema}.rebuilt MODIFY t VARCHAR(60), FORCE"
    yield f"ALTER TABLE {schema}.instant ADD COLUMN z INT DEFAULT 7"
    yield f"ALTER TABLE {schema}.instant RENAME COLUMN t TO u"
    yield f"CREATE INDEX it ON {schema}.indexed (t)"
    yield f"DROP INDEX it ON {schema}.indexed"
    yield f"CREATE TABLE {schema}.alike LIKE {schema}.pattern"
    yield f"CREATE TABLE {schema}.chosen ENGINE={engine} SELECT * FROM {schema}.pattern WHERE i < 9"
    yield f"CREATE TABLE {schema}._new (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}._new {row}"
    yield f"RENAME TABLE {schema}.old TO {schema}._old, {schema}._new TO {schema}.old"
    yield f"RENAME TABLE {schema}.handed TO {schema}._handed, {schema}.hand TO {schema}.handed"
    yield f"RENAME TABLE {schema}.renamed TO {schema}.renamed_1"
    yield f"ALTER TABLE {schema}.renamed_1 ADD COLUMN z INT DEFAULT 3 FIRST, FORCE"
    yield f"DROP TABLE {schema}._old"
    yield f"OPTIMIZE TABLE {schema}.optimised"
    yield f"RENAME TABLE {schema}.`größe 1` TO {schema}.`größe.2`"
    if engine != "Aria":  # of which the tool fails, and is run again
        yield (f"ALTER TABLE {schema}.parted REORGANIZE PARTITION p2 INTO"
               " (PARTITION p2 VALUES LESS THAN (25), PARTITION p3 VALUES LESS THAN MAXVALUE)")
        yield f"ALTER TABLE {schema}.merged DROP PARTITION p1"
    yield f"ALTER TABLE {schema}.parted TRUNCATE PARTITION p0"
    yield f"ALTER TABLE {schema}.traded EXCHANGE PARTITION p1 WITH TABLE {schema}.trade"
    yield f"CREATE OR REPLACE VIEW {schema}.seen AS SELECT t FROM {schema}.pattern"
    yield f"CREATE VIEW {schema}.also_seen AS SELECT i, t FROM {schema}.pattern"
    yield f"CREATE TRIGGER {schema}.told BEFORE INSERT ON {schema}.pattern FOR EACH ROW SET NEW.t = 'told'"
    yield f"CREATE OR REPLACE SEQUENCE {schema}.numbers START WITH 100 ENGINE={engine}"
    yield f"CREATE SEQUENCE {schema}.more_numbers ENGINE={engine}"
    yield (f"CREATE TABLE {schema}.versions (i INT) ENGINE={engine} WITH SYSTEM VERSIONING")
    yield f"INSERT INTO {schema}.versions VALUES (1), (2)"
    yield f"DELETE FROM {schema}.versions WHERE i = 1"
    yield f"DROP DATABASE {schema}_gone"
    yield f"DROP DATABASE {schema}_again"
    yield f"CREATE DATABASE {schema}_again"
    yield f"CREATE TABLE {schema}_again.a (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}_again.a {row}"
    yield f"CREATE VIEW {schema}_again.v AS SELECT t FROM {schema}_again.a"
    yield f"CREATE TRIGGER {schema}_again.told BEFORE INSERT ON {schema}_again.a FOR EACH ROW SET NEW.t = 'told'"
    yield f"CREATE DATABASE {schema}_new"
    yield f"CREATE TABLE {schema}_new.a (i INT, t VARCHAR(40)) ENGINE={engine}"
    yield f"INSERT INTO {schema}_new.a {row}"
    if engine == "InnoDB":
        yield f"CREATE TABLE {schema}.words (i INT PRIMARY KEY, t TEXT, FULLTEXT (t)) ENGINE=InnoDB"
        yield f"INSERT INTO {schema}.words VALUES (1, 'full of text')"
        yield f"CREATE TABLE {schema}_again.words (i INT PRIMARY KEY, t TEXT, FULLTEXT (t)) ENGINE=InnoDB"
        yield f"INSERT INTO {schema}_again.words VALUES (1, 'full of text')"
        yield f"CREATE TABLE {schema}.emptyspace (i INT) ENGINE=InnoDB"
        yield f"ALTER TABLE {schema}.emptyspace DISCARD TABLESPACE"


@pytest.fixture
def busy(short_tmp: Path, keys: Keys) -> Iterator[House]:
    """A server whose stream takes a while."""
    with PrivateServer(options={"innodb_flush_log_at_trx_commit": 0, "sync_binlog": 0}) as server:
        server.create_backup_users()
        server.execute("CREATE DATABASE a_filler", "CREATE TABLE a_filler.f (i INT PRIMARY KEY, t LONGTEXT)",
                       "INSERT INTO a_filler.f SELECT seq, REPEAT(UUID(), 20000) FROM a_filler.seq_1_to_12")
        yield House(short_tmp, server, keys, policy_extra="witness: {enabled: false}\n")


def _everything(server: Server) -> dict[str, Any]:
    with server.connect() as connection:
        return {"sums": checksum_everything(connection), "others": describe_everything(connection)}


def _restored(house: House) -> dict[str, Any]:
    house.restore(house.base / "restored")
    with PrivateServer(datadir=house.base / "restored") as copy:
        return _everything(copy)


def test_every_statement_during_a_full_backup(busy: House, short_tmp: Path) -> None:
    """Twice: while the tool reads its first file, and after it has read some tables of InnoDB."""
    gate = Gate(short_tmp / "gate", 2 * _MIB, 14 * _MIB)
    server = busy.server
    schemas = [(f"s{stop}_{engine.lower()}", engine, stop) for stop in (2 * _MIB, 14 * _MIB) for engine in ENGINES]
    for schema, engine, _stop in schemas:
        server.execute(*_tables(schema, engine))

    def change(now: int) -> None:
        for schema, engine, stop in schemas:
            if stop == now:
                server.execute(*_changes(schema, engine))

    done = gate.run(busy, "backup", SERVER, "--kind", "full", "--json",
                    at={stop: lambda stop=stop: change(stop) for stop in (2 * _MIB, 14 * _MIB)})  # type: ignore[misc]
    assert done.code == 0, done.all
    assert done.json["tables_missing"] == 0
    for schema, engine, _stop in schemas:
        if engine == "InnoDB":
            server.execute(f"DROP TABLE {schema}.emptyspace")  # has no checksum, here nor there
    expected = _everything(server)
    busy.restore(busy.base / "restored")
    with PrivateServer(datadir=busy.base / "restored") as copy:
        for schema, engine, _stop in schemas:
            if engine == "InnoDB":
                copy.execute(f"DROP TABLE {schema}.emptyspace")
        found = _everything(copy)
    same(found["sums"], expected["sums"])
    same(found["others"], expected["others"])
    assert busy.fsck() == []


def test_tables_that_are_made_again_each_moment_are_in_the_backup(busy: House, short_tmp: Path) -> None:
    """Until it ends, and InnoDB's in a database that is made again. None is ever missing, whatever version it is."""
    server, over = busy.server, threading.Event()
    server.execute("CREATE DATABASE v", "CREATE DATABASE m", "CREATE TABLE v.a (i INT) ENGINE=InnoDB")

    def churn() -> None:
        number = 0
        while not over.is_set():
            number += 1
            for engine in ENGINES:
                server.execute(f"CREATE OR REPLACE TABLE m.r_{engine} (i INT) ENGINE={engine}",
                               f"INSERT INTO m.r_{engine} VALUES ({number})", f"DROP TABLE IF EXISTS m.d_{engine}",
                               f"CREATE TABLE m.d_{engine} (i INT) ENGINE={engine}",
                               f"CREATE TABLE m.t (i INT) ENGINE={engine}", f"DROP TABLE IF EXISTS m.o_{engine}",
                               f"RENAME TABLE m.t TO m.o_{engine}")
            server.execute("DROP DATABASE v", "CREATE DATABASE v", "CREATE TABLE v.a (i INT) ENGINE=InnoDB",
                           f"INSERT INTO v.a VALUES ({number})")
            over.wait(0.3)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        gate = Gate(short_tmp / "gate", 2 * _MIB, 14 * _MIB)
        done = gate.run(busy, "backup", SERVER, "--kind", "full", "--json",
                        at={stop: lambda: time.sleep(1) for stop in (2 * _MIB, 14 * _MIB)})
    finally:
        over.set()
        thread.join()
    assert done.code == 0, done.all
    assert done.json["tables_missing"] == 0
    found = _restored(busy)["sums"]
    # A moment between DROP and CREATE has no such table; what was made with CREATE OR REPLACE is always there.
    assert {f"`m`.`r_{engine}`" for engine in ENGINES} <= set(found)


def test_innodb_tables_that_swap_names_during_an_increment_make_it_a_full_backup(busy: House, short_tmp: Path) -> None:
    server = busy.server
    server.execute("CREATE DATABASE m", "CREATE TABLE m.a (i INT) ENGINE=InnoDB", "CREATE TABLE m.b LIKE m.a",
                   "INSERT INTO m.a VALUES (1)", "INSERT INTO m.b VALUES (2)")
    server.settle()  # or the tool takes them for tables that were made meanwhile
    server.restart()
    busy.backup()
    server.execute("UPDATE a_filler.f SET t = REVERSE(t)")
    gate = Gate(short_tmp / "gate", 65536, after=("m/a.ibd.delta", "m/b.ibd.delta"))
    done = gate.run(busy, "backup", SERVER, "--kind", "incremental", "--json",
                    at={65536: lambda: server.execute("RENAME TABLE m.a TO m.t, m.b TO m.a, m.t TO m.b")})
    assert done.code == 0, done.all
    assert done.json["kind"] == "physical-full"
    assert "took each other's names" in done.json["reason"]
    assert "m.a, m.b" in done.json["reason"]
    expected = _everything(server)["sums"]
    same(_restored(busy)["sums"], expected)


def test_a_backup_whose_tool_fails_over_a_dropped_partition_is_taken_again(busy: House, short_tmp: Path) -> None:
    """As it does at a moment that nobody can choose: between its list of Aria's tables and the first byte of one."""
    tool = short_tmp / "mariadb-backup"
    tool.write_text(
        "#!/bin/bash\n"
        f'case "$*" in *--stream*) if [ ! -e {short_tmp}/failed ]; then touch {short_tmp}/failed\n'
        "echo \"mariadb-backup: Can't find file: './m/p#P#p0.MAI' (errno: 2 No such file or directory)\" >&2\n"
        f'exit 1; fi;; esac\nexec {the_tool().tool.path} "$@"\n')
    tool.chmod(0o755)
    busy.programs = {"mariadb-backup": str(tool)}
    busy.write()
    record = busy.backup()
    assert [warning for warning in record["warnings"] if "was taken again" in warning]
    assert busy.fsck() == []
