"""CLONE on a real server: copies under load, refusals, kills; nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.engine.physical import clone
from backupd.engine.physical.capture import CaptureRequest, Data, End, FileEvent, Hole, ingest
from backupd.engine.physical.clone import BACKUP_TYPE, Clone
from backupd.engine.server import clone_plugin
from backupd.engine.server.launch import LaunchedServer, ServerConfig, options_for_copy
from backupd.engine.sql.client import Connection
from backupd.engine.toolset import find_tool
from backupd.engine.witness import LockWindowWitness, same_moment
from backupd.model.errors import (
    BackupdError,
    CancelledError,
    RefusedError,
    ServerError,
    TablesChangedError,
    ToolError,
)
from backupd.model.server_facts import Receipts
from backupd.process.folders import remove_dead
from tests.support.logs.stream import Extraction, Folder
from tests.support.servers import mysql
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, connect
from tests.support.service.processes import until
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(bool(mysql.why_no_root()), reason=mysql.why_no_root() or "there is one")

PROGRAM = str(mysql.root_programs() / "mysqld")
ROWS = "SELECT 1 n UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture(scope="module")
def source() -> Iterator[MySQLServer]:
    with MySQLServer(mysqld_path=PROGRAM) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop",
            "CREATE DATABASE `leer é`",
            "CREATE TABLE shop.orders (id INT PRIMARY KEY AUTO_INCREMENT, v VARCHAR(200))",
            f"INSERT INTO shop.orders (v) SELECT REPEAT('x', 150) FROM ({ROWS}) a, ({ROWS}) b, ({ROWS}) c",
            "CREATE TABLE shop.`näme 表` (id INT PRIMARY KEY) PARTITION BY HASH (id) PARTITIONS 2",
            "INSERT INTO shop.`näme 表` VALUES (1), (2), (3)",
        )
        yield server


@pytest.fixture
def spool(place: Path) -> Iterator[Path]:
    yield place / "spool" / "clone"
    shutil.rmtree(place / "spool", ignore_errors=True)


def the_tool() -> Clone:
    return Clone(replace(find_tool(("mysqld",), paths={"mysqld": PROGRAM}), name="clone"))


def service(server: MySQLServer) -> Connection:
    return Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)


def take(
    server: MySQLServer,
    spool: Path,
    target: Path,
    *,
    hear: Callable[[str], None] | None = None,
    on_event: Callable[[FileEvent], None] = lambda _event: None,
) -> Receipts:
    shutil.rmtree(target, ignore_errors=True)
    extraction = Extraction(target)
    with the_tool().capture(CaptureRequest(service(server), target, spool=spool, on_stderr=hear)) as capture:
        for event in capture.events():
            extraction.take(event)
            on_event(event)
        return capture.receipts()


def tables(connection_of: MySQLServer | LaunchedServer) -> list[tuple[object, ...]]:
    path = connection_of.socket if isinstance(connection_of, MySQLServer) else connection_of.config.socket
    with connect(path) as connection, connection.cursor() as cursor:
        cursor.execute("CHECKSUM TABLE shop.orders, shop.`näme 表`")
        return list(cursor.fetchall())


@contextlib.contextmanager
def started(base: Path, run: Path) -> Iterator[LaunchedServer]:
    for path in (base, *base.rglob("*")):
        shutil.chown(path, "mysql", "mysql")
    config = ServerConfig(PROGRAM, base, run, options=options_for_copy(base, {}), memory=64 << 20)
    with LaunchedServer(config) as server:
        yield server


@pytest.fixture(scope="module")
def taken(source: MySQLServer, place: Path) -> tuple[Path, Receipts]:
    """Shared: copy the folder before changing it."""
    return place / "taken", take(source, place / "spool" / "shared", place / "taken")


def test_a_clone_starts_as_the_server_at_its_recorded_position(
    source: MySQLServer, taken: tuple[Path, Receipts], place: Path
) -> None:
    base, receipts = taken
    (status,) = source.query("SHOW BINARY LOG STATUS")
    assert (receipts.position.file, receipts.position.pos) == status[:2]
    assert receipts.position.gtid == str(status[4]).replace("\n", "")
    assert (receipts.backup_type, receipts.from_lsn) == (BACKUP_TYPE, 0)
    names = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()}
    assert {"ibdata1", "mysql.ibd", "shop/orders.ibd", "backup-my.cnf"} <= names
    assert "leer@0020@0ha/db.opt" in names or any(name.startswith("leer") for name in names)
    assert not any(
        name.startswith(("#clone", "auto.cnf", "#innodb_temp", "ibtmp")) or name.endswith((".pem", "_tmp"))
        for name in names
    )
    the_tool().verify_prepared(base, receipts, ())
    assert the_tool().prepare(base, memory=0) == ()
    assert (base / "performance_schema").is_dir()
    copy = Path(shutil.copytree(base, place / "copy"))
    with started(copy, place / "run") as server:
        assert tables(server) == tables(source)
        with connect(server.config.socket) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE `leer é`.t (i INT)")
            cursor.execute("DROP DATABASE `leer é`")
            cursor.execute("SELECT @@server_uuid")
            assert cursor.fetchone() != source.query("SELECT @@server_uuid")[0]
    shutil.rmtree(copy)


def test_under_writers_the_witness_has_the_position_of_the_clone(source: MySQLServer, spool: Path, place: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        with source.connect() as connection, connection.cursor() as cursor:
            while not stop.is_set():
                cursor.execute("INSERT INTO shop.orders (v) VALUES (REPEAT('y', 150))")

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        with LockWindowWitness(service(source), server="shop") as witness:
            receipts = take(source, spool, place / "busy", hear=witness.on_stderr)
            seen = witness.collect(max_seconds=60)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert seen is not None, witness.problem
    assert same_moment(seen.position, receipts.position)
    with started(place / "busy", place / "run-busy") as server:
        sums = {str(name): value for name, value in tables(server)}
    assert sums["shop.orders"] == seen.checksums["`shop`.`orders`"]
    shutil.rmtree(place / "busy")


def test_a_lock_that_cannot_be_had_costs_the_witness_and_not_the_backup(
    source: MySQLServer, spool: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone_plugin, "WAIT_SECONDS", 1)
    lines: list[str] = []
    with source.connect(autocommit=False) as connection, connection.cursor() as cursor:
        cursor.execute("LOCK TABLES shop.orders WRITE")
        take(source, spool, place / "x", hear=lines.append)
    assert any(line.startswith("commits were not blocked") for line in lines), lines
    assert clone_plugin.ANNOUNCEMENT not in lines
    shutil.rmtree(place / "x")


def test_the_plugin_is_unloaded_again_and_stays_where_it_was_loaded(
    source: MySQLServer, spool: Path, place: Path
) -> None:
    loaded = "SELECT COUNT(*) FROM information_schema.PLUGINS WHERE PLUGIN_NAME = 'clone'"
    assert source.scalar(loaded) == 0
    source.execute("INSTALL PLUGIN clone SONAME 'mysql_clone.so'")
    try:
        take(source, spool, place / "x")
        assert source.scalar(loaded) == 1
    finally:
        source.execute("UNINSTALL PLUGIN clone")
        shutil.rmtree(place / "x", ignore_errors=True)


def test_a_server_that_is_read_only_is_cloned_once_its_plugin_is_loaded_and_refused_with_how_before(
    source: MySQLServer, spool: Path, place: Path
) -> None:
    for variable in ("read_only", "super_read_only"):
        source.execute(f"SET GLOBAL {variable} = ON")
        try:
            error = refused(source, spool=spool)
            assert "this server is read_only" in error.message
            assert "INSTALL PLUGIN clone SONAME 'mysql_clone.so'" in error.hint
        finally:
            source.execute("SET GLOBAL read_only = OFF")
    source.execute("INSTALL PLUGIN clone SONAME 'mysql_clone.so'", "SET GLOBAL super_read_only = ON")
    try:
        take(source, spool, place / "x")
    finally:
        source.execute("SET GLOBAL read_only = OFF", "UNINSTALL PLUGIN clone")
        shutil.rmtree(place / "x", ignore_errors=True)


def refused(
    server: MySQLServer,
    kind: type[BackupdError] = RefusedError,
    *,
    user: str = SERVICE_USER,
    password: str = SERVICE_PASSWORD,
    **others: object,
) -> BackupdError:
    connection = Connection(socket=str(server.socket), user=user, password=password)
    request = replace(CaptureRequest(connection, Path("/nonexistent")), **others)  # type: ignore[arg-type]  # by name
    with pytest.raises(kind) as caught, the_tool().capture(request):
        pass
    return caught.value


def test_what_cannot_work_is_refused_before_anything_is_copied(
    source: MySQLServer, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "incremental" in refused(source, incremental_lsn=5, spool=spool).message
    assert "folder" in refused(source, spool=None).message
    source.create_user("poor", "x", ("SELECT", "PROCESS", "RELOAD", "REPLICATION CLIENT", "BACKUP_ADMIN"))
    error = refused(source, user="poor", password="x", spool=spool)
    assert "plugin" in error.message
    assert "GRANT INSERT, DELETE ON mysql.plugin TO 'poor'@'localhost'" in error.hint
    room = os.statvfs("/")
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result((*room[:4], 1000, *room[5:])))
    assert "not enough space" in refused(source, spool=spool).message
    assert not list(spool.iterdir())


def test_tables_outside_the_datadir_are_refused_by_name(place: Path, spool: Path) -> None:
    outside = place / "outside"
    outside.mkdir()
    shutil.chown(outside, "mysql", "mysql")
    with MySQLServer(mysqld_path=PROGRAM, options={"innodb_directories": str(outside)}) as server:
        server.create_backup_users()
        server.execute("CREATE DATABASE shop", f"CREATE TABLE shop.far (i INT) DATA DIRECTORY='{outside}'")
        error = refused(server, spool=spool)
        assert "shop/far" in error.detail
        assert not list(spool.parent.glob("*/*"))


def test_a_program_of_another_release_does_not_start_a_clone(source: MySQLServer, spool: Path) -> None:
    tool = the_tool().tool
    other = Clone(replace(tool, version=replace(tool.version, patch=99)))
    with (
        pytest.raises(ToolError, match=r"can be started by"),
        other.capture(CaptureRequest(service(source), spool, spool=spool)),
    ):
        pass


@pytest.mark.parametrize("moment", ["cloning", "starting"])
def test_cancelling_ends_the_statement_and_leaves_nothing(source: MySQLServer, spool: Path, moment: str) -> None:
    cancel = threading.Event()

    def hear(line: str) -> None:
        if line.startswith(moment):
            cancel.set()

    request = CaptureRequest(service(source), spool, spool=spool, on_stderr=hear, cancel=cancel)
    with pytest.raises(CancelledError), the_tool().capture(request) as capture:
        list(capture.events())
    assert not list(spool.iterdir())
    until(lambda: not [row for row in source.query("SHOW PROCESSLIST") if "CLONE" in str(row[7])])


def test_a_server_that_dies_while_it_clones_leaves_nothing(place: Path, spool: Path) -> None:
    with MySQLServer(mysqld_path=PROGRAM) as server:
        server.create_backup_users()
        request = CaptureRequest(
            service(server),
            spool,
            spool=spool,
            on_stderr=lambda line: server.kill() if line.startswith("cloning") else None,
        )
        with pytest.raises((ToolError, ServerError)), the_tool().capture(request) as capture:
            list(capture.events())
    assert not list(spool.iterdir())


def test_what_a_killed_run_left_is_removed_and_what_somebody_holds_is_not(
    source: MySQLServer, spool: Path, place: Path
) -> None:
    dead = spool / "clone-0badcafe"
    (dead / "data").mkdir(parents=True)
    (dead / "data" / "ibdata1").write_bytes(b"x")
    (spool / "mine").mkdir()

    def look(event: FileEvent) -> None:
        if isinstance(event, End) and event.path == "ibdata1":
            assert not dead.exists()
            (other,) = spool.glob("clone-*")
            assert remove_dead(spool, "clone-") == ()
            assert other.stat().st_mode & 0o777 == 0o700

    take(source, spool, place / "x", on_event=look)
    assert [path.name for path in spool.iterdir()] == ["mine"]
    shutil.rmtree(place / "x")


@pytest.mark.parametrize("damage", ["system", "redo", "no redo", "no system"])
def test_files_of_another_moment_are_noticed_before_a_server_is_started(
    taken: tuple[Path, Receipts], place: Path, damage: str
) -> None:
    base = Path(shutil.copytree(taken[0], place / "damaged"))
    (redo,) = base.glob("#innodb_redo/#ib_redo*")
    victim = redo if "redo" in damage else base / "ibdata1"
    if damage.startswith("no"):
        victim.unlink()
    else:
        content = bytearray(victim.read_bytes())
        for place_of_lsn in (26,) if damage == "system" else (520, 1544):
            content[place_of_lsn + 7] ^= 1
        victim.write_bytes(content)
    try:
        with pytest.raises(ToolError):
            the_tool().verify_prepared(base, taken[1], ())
    finally:
        shutil.rmtree(base)


def test_a_clone_that_could_not_follow_a_rename_is_taken_again() -> None:
    """As MySQL 9.7.4 says it, at a moment that nobody can choose: see tests/e2e/backups/test_ddl_soak.py."""
    told = ServerError(
        "the server refused a statement",
        detail="Error on rename of '/spool/data/shop/moved.ibd' to "
        "'/spool/data/other/moved.ibd.#clone_ddl' (errno: 2 - No such file or directory) (error 1025)",
    )
    assert isinstance(clone._clone_error(told, Path("/spool/data"), 0), TablesChangedError)
    assert isinstance(clone._clone_error(ServerError("no"), Path("/spool/data"), 0), ToolError)


def test_the_room_for_a_clone_is_told_though_a_schema_is_dropped_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kept", "dropped"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "t.ibd").write_bytes(b"x" * 4096)
    walk = os.walk

    def dropping(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walk(top):
            yield found
            shutil.rmtree(tmp_path / "data" / "dropped", ignore_errors=True)

    monkeypatch.setattr(os, "walk", dropping)
    assert clone._refuse_no_room(tmp_path / "data", tmp_path) == 4096


def test_increments_of_a_clone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no increments"):
        the_tool().prepare(tmp_path, [tmp_path], memory=0)


# --- reading a folder


def test_files_are_read_with_their_holes_and_removed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "empty").mkdir()
    with (tmp_path / "a" / "sparse").open("wb") as file:
        file.write(b"x" * 65536)
        file.truncate(40 << 20)
        file.seek(20 << 20)
        file.write(b"y" * 65536)
    (tmp_path / "zero").touch()
    (tmp_path / "big").write_bytes(os.urandom(9 << 20))
    wanted = {
        "big": (tmp_path / "big").read_bytes(),
        "a/sparse": (tmp_path / "a" / "sparse").read_bytes(),
        "zero": b"",
        "empty/db.opt": b"",
    }
    folder = Folder()
    for event in ingest(tmp_path, lambda path: path.name != "none", owner=os.geteuid()):
        if isinstance(event, Data):
            assert len(event.payload) <= 4 << 20
        folder.take(event)
    assert folder.files == wanted
    assert sum(length for _offset, length in folder.holes["a/sparse"]) > 39 << 20
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "foreign"])
def test_what_is_no_plain_file_of_the_server_is_not_read(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    base = tmp_path / "base"
    base.mkdir()
    if kind == "link":
        (base / "x.ibd").symlink_to(secret)
    elif kind == "second name":
        (base / "x.ibd").hardlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(base / "x.ibd")
    else:
        (base / "x.ibd").write_text("mine")
    owner = os.geteuid() + (kind == "foreign")
    with pytest.raises(ToolError):
        for event in ingest(base, lambda _path: True, owner=owner):
            assert not isinstance(event, Data | Hole)
    assert secret.read_text() == "password"
