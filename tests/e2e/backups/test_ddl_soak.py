"""The statements of test_ddl_matrix.py while increments, clones, XtraBackup's backups and dumps are taken: what comes
back is the server at the position, or the backup says that it is not whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pymysql
import pytest
from pymysql.constants import ER

from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive
from tests.support.e2e.definitions import ENGINES, Gate, changes, tables
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.oracle import nothing_lost, same
from tests.support.sample import checksum_everything, describe_everything, spoken
from tests.support.servers.server import Server, quote_name
from tests.support.servers.stacks import MARIADB, MYSQL_CLONE, MYSQL_XTRABACKUP, STACKS, Stack, stacks, whole
from tests.support.stores.folders import give_to_database

pytestmark = [SOAK, pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")]
_MIB = 1024 * 1024
STOPS = (2 * _MIB, 14 * _MIB)
_STANDSTILL = """\
import os, pathlib, signal, sys, time
mark, pid, word = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
mark.with_name("listens").touch()
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
    if word in line and not mark.with_name("over").exists():
        os.kill(pid, signal.SIGSTOP)
        mark.touch()
        while mark.exists():
            time.sleep(0.01)
        mark.with_name("over").touch()
        os.kill(pid, signal.SIGCONT)
"""


def everything(server: Server) -> dict[str, Any]:
    with server.connect() as connection:
        return {"sums": checksum_everything(connection), "others": describe_everything(connection)}


@pytest.fixture
def busy(stack: Stack, short_tmp: Path, keys: Keys) -> Iterator[House]:
    """A server whose files take a while."""
    with stack.make(options={"innodb_flush_log_at_trx_commit": 0, "sync_binlog": 0}) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE a_filler",
            "USE a_filler",
            "CREATE TABLE a_filler.f (i INT PRIMARY KEY, t LONGTEXT)",
            *spoken(server, "INSERT INTO a_filler.f SELECT seq, REPEAT(UUID(), 20000) FROM seq_1_to_30"),
        )
        yield House(short_tmp, server, keys, programs=stack.all_programs(), policy_extra="witness: {enabled: false}\n")


class Import:
    """A tablespace of another table of ``schema`` that a table of it is going to take."""

    def __init__(self, server: Server, schema: str, folder: Path) -> None:
        self._server, self._schema, self._folder = server, schema, folder / f"{schema}-exported"
        self._folder.mkdir()
        server.execute(
            f"CREATE TABLE {schema}.exported (i INT PRIMARY KEY, t VARCHAR(40)) ENGINE=InnoDB",
            f"CREATE TABLE {schema}.imported LIKE {schema}.exported",
            f"INSERT INTO {schema}.exported VALUES (1, 'one'), (2, 'two')",
            f"INSERT INTO {schema}.imported VALUES (3, 'three')",
            f"FLUSH TABLES {schema}.exported FOR EXPORT",
        )
        for suffix in ("ibd", "cfg"):
            shutil.copy(server.datadir / schema / f"exported.{suffix}", self._folder / f"imported.{suffix}")
        server.execute("UNLOCK TABLES")

    def run(self) -> None:
        self._server.execute(f"ALTER TABLE {self._schema}.imported DISCARD TABLESPACE")
        for path in self._folder.iterdir():
            give_to_database(Path(shutil.copy(path, self._server.datadir / self._schema)))
        self._server.execute(f"ALTER TABLE {self._schema}.imported IMPORT TABLESPACE")


def gate_for(stack: Stack, base: Path, *stops: int) -> Gate:
    if stack.mariadb:
        return Gate(base, *stops)
    return Gate(base, *stops, program="xtrabackup", path=stack.programs()["xtrabackup"])


def engines(stack: Stack) -> tuple[str, ...]:
    return ENGINES if stack.mariadb else ("InnoDB",) if stack is MYSQL_CLONE else ("MyISAM", "InnoDB")


def compared(stack: Stack, house: House, name: str, expected: dict[str, Any]) -> None:
    """The newest backup, restored, is the server as it was ``expected``."""
    target = house.base / name
    house.restore(target, to=f"backup:{house.backups()[0]['id']}")
    with stack.make(datadir=target) as copy:
        for (schema,) in copy.query("SELECT table_schema FROM information_schema.tables WHERE table_name='emptyspace'"):
            copy.execute(f"DROP TABLE {schema}.emptyspace")  # has no checksum, here nor there
        found = everything(copy)
    same(found["sums"], expected["sums"])
    same(found["others"], expected["others"])


def without_emptyspace(server: Server) -> dict[str, Any]:
    for (schema,) in server.query("SELECT table_schema FROM information_schema.tables WHERE table_name = 'emptyspace'"):
        server.execute(f"DROP TABLE {schema}.emptyspace")
    return everything(server)


@pytest.mark.parametrize("stack", stacks(MARIADB, MYSQL_XTRABACKUP))
def test_every_statement_between_and_during_increments(stack: Stack, busy: House, short_tmp: Path) -> None:
    server = busy.server
    schemas = [(f"s{when}_{engine.lower()}", engine, when) for when in (0, *STOPS) for engine in engines(stack)]
    for schema, engine, _when in schemas:
        server.execute(*tables(server, schema, engine))
    if stack.mariadb:
        server.settle()  # or the tool takes them for tables that were made meanwhile
    server.restart()
    busy.backup()

    def change(now: int) -> None:
        for schema, engine, when in schemas:
            if when == now:
                between = now == 0
                server.execute(
                    *changes(
                        server,
                        schema,
                        engine,
                        swaps=between,
                        discards=False,
                        exchanges=between,
                        rebuilds=between or stack.mariadb,
                    )
                )  # of which XtraBackup fails

    change(0)
    server.execute("UPDATE a_filler.f SET t = REVERSE(t)")
    done = gate_for(stack, short_tmp / "gate", *STOPS).run(
        busy,
        "backup",
        SERVER,
        "--kind",
        "incremental",
        "--json",
        at={stop: lambda stop=stop: change(stop) for stop in STOPS},  # type: ignore[misc]
    )
    assert done.code == 0, done.all
    assert (done.json["kind"], done.json["tables_missing"]) == ("physical-incremental", 0), done.all
    expected = without_emptyspace(server)
    compared(stack, busy, "first", expected)
    server.execute("INSERT INTO s0_innodb.alike VALUES (1, 'afterwards')")
    expected = everything(server)
    assert busy.ok("backup", SERVER, "--kind", "incremental")["kind"] == "physical-incremental"
    compared(stack, busy, "second", expected)
    assert busy.fsck() == []


@pytest.mark.parametrize("kind", ["full", "incremental"])
@pytest.mark.parametrize("stack", stacks(MARIADB, MYSQL_XTRABACKUP))
def test_a_tablespace_imported_meanwhile_is_in_the_backup_or_fails_it_by_name(
    stack: Stack, busy: House, short_tmp: Path, kind: str
) -> None:
    server = busy.server
    schemas = [f"s{when}" for when in (0, *STOPS)]
    for schema in schemas:
        server.execute(f"CREATE DATABASE {schema}")
    imports = {schema: Import(server, schema, short_tmp) for schema in schemas}
    if stack.mariadb:
        server.settle()
    server.restart()
    busy.backup()
    imports["s0"].run()
    server.execute("UPDATE a_filler.f SET t = REVERSE(t)")
    done = gate_for(stack, short_tmp / "gate", *STOPS).run(
        busy, "backup", SERVER, "--kind", kind, "--json", at={stop: imports[f"s{stop}"].run for stop in STOPS}
    )
    expected = everything(server)
    if not stack.mariadb:
        assert done.code == 0, done.all
        names = ", ".join(sorted(f"s{stop}.imported" for stop in STOPS))
        assert f"imported or discarded while the backup ran: {names}" in done.all
    if done.code == 0:
        assert done.json["tables_missing"] == 0
        compared(stack, busy, "first", expected)
    else:
        assert "imported" in done.json["error"]["message"], done.all
        assert len(busy.backups()) == 1
    if stack.mariadb:
        server.settle()
    server.restart()
    assert busy.ok("backup", SERVER, "--kind", kind)["tables_missing"] == 0
    compared(stack, busy, "second", expected)


@pytest.mark.parametrize("stack", stacks(MYSQL_CLONE))
def test_every_statement_during_a_clone_and_the_log_from_its_position_make_the_server(
    stack: Stack, busy: House, short_tmp: Path
) -> None:
    """A clone cannot be stopped, so the statements go on from before it until after it."""
    server = busy.server
    schemas = [f"s{number}" for number in range(12)]
    for schema in schemas:
        server.execute(*tables(server, schema, "InnoDB"))
    over = threading.Event()
    during: list[str] = []

    def change() -> None:
        with server.connect() as connection:
            for schema in schemas:
                for statement in changes(server, schema, "InnoDB", discards=False):
                    with connection.cursor() as cursor:
                        cursor.execute(statement)
                        cursor.execute("SELECT COUNT(*) FROM information_schema.processlist WHERE info LIKE 'CLONE %'")
                        if cursor.fetchone() == (1,):
                            during.append(statement)
                if over.is_set():
                    return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        record = busy.backup()
    finally:
        over.set()
        thread.join()
    assert len(during) > 10, "hardly a statement ran while the server was cloned"
    Archive(busy, server).take()
    expected = everything(server)
    busy.restore(short_tmp / "latest")
    with stack.make(datadir=short_tmp / "latest") as copy:
        same(everything(copy), expected)
    proof = busy.ok("test-restore", SERVER, "--to", f"backup:{record['id']}")
    assert proof["outcome"] == "restored", proof


def while_dumped(server: Server, statements: Sequence[str]) -> list[str]:
    """Execute ``statements``, but for those that wait for a lock that mydumper keeps until it ends, as views and (from
    MySQL 8 on) databases that it has looked at, and what cannot be done without these; gives them."""
    left: list[str] = []
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION lock_wait_timeout = 2")
        for statement in statements:
            try:
                cursor.execute(statement)
            except pymysql.err.MySQLError as error:
                if error.args[0] != ER.LOCK_WAIT_TIMEOUT and not left:
                    raise
                left.append(statement)
    return left


@pytest.mark.parametrize("stack", stacks(*whole(*STACKS)))
def test_every_statement_during_a_dump(stack: Stack, busy: House, short_tmp: Path) -> None:
    """While mydumper stands still with its snapshots, at the largest table: it has read some of the others."""
    server, house = busy.server, busy
    for engine in engines(stack):
        server.execute(*tables(server, engine.lower(), engine))
    before = everything(server)["sums"]
    folder = short_tmp / "standstill"
    folder.mkdir()
    folder.chmod(0o777)  # what waits is not root, and in no sandbox: there it could not say so
    mark, tool = folder / "stands", folder / "mydumper"
    (folder / "standstill.py").write_text(_STANDSTILL)
    real, python = shutil.which("mydumper"), shutil.which("python3", path="/usr/bin") or sys.executable
    tool.write_text(
        f'#!/bin/bash\ncase "$*" in *--version*) [ -w {folder} ] || exit 3;; *--outputdir=*)\n'
        f"exec > >(exec {python} {folder}/standstill.py {mark} $$ '`a_filler`.`f`') 2>&1\n"
        f'while [ ! -e {mark.with_name("listens")} ]; do sleep 0.01; done;; esac\nexec {real} "$@"\n'
    )
    tool.chmod(0o755)
    house.programs = {**house.programs, "mydumper": str(tool)}
    house.policy_extra += 'logical: {schedule: "0 4 * * *", max_lock: 30s}\n'
    house.write()
    with house.popen("backup", SERVER, "--kind", "logical", "--json") as process:
        while not mark.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        for engine in engines(stack):
            statements = changes(server, engine.lower(), engine, discards=False)
            assert len(while_dumped(server, statements)) < len(statements) / 3
        mark.unlink()
        out, err = process.communicate()
    after = everything(server)["sums"]
    record = json.loads(out)
    missing = [text.partition(" is missing: ")[0] for text in record["warnings"] if " is missing: " in text]
    assert (process.returncode, record["tables_missing"]) == (int(bool(missing)), len(missing)), out + err
    assert not {quote_name(*name.split(".", 1)) for name in missing} & set(after), "it is there, and was not taken"
    sql = short_tmp / "sql"
    done = house.run("restore", SERVER, "--to", f"backup:{record['id']}", "--tables", "*.*", "--sql", str(sql))
    assert done.code == process.returncode, done.all
    assert (sql / "load.sh").is_file(), done.all
    with stack.make() as other:
        loaded = subprocess.run(
            ["sh", str(sql / "load.sh"), f"--defaults-file={other.client_file()}"],
            check=False,
            env={**os.environ, "CLIENT": str(stack.replay()[1])},
            capture_output=True,
            text=True,
        )
        assert loaded.returncode == 0, loaded.stderr
        found = everything(other)["sums"]
    nothing_lost(found, after, "tables that there were at the end")
    same({name: value for name, value in found.items() if name in after}, after)
    gone = {name: value for name, value in found.items() if name not in after}
    same(gone, {name: before.get(name) for name in gone}, "tables that were dropped meanwhile")
