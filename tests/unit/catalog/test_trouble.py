"""What goes wrong with a catalog's database, and what is said then."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import JSON, Column, text
from sqlalchemy.exc import DBAPIError

from backupd.catalog import database as revision
from backupd.catalog import migrations
from backupd.catalog.database import Database
from backupd.catalog.session import Catalog, open_catalog, upgrade
from backupd.catalog.snapshot import every_table
from backupd.catalog.standings import Count
from backupd.model.errors import CatalogError
from backupd.model.job import JobState
from tests.support.catalog import samples
from tests.support.catalog.postgresql import PostgreSQL


def _python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_migrations_make_exactly_the_tables_that_the_code_uses(url: str) -> None:
    upgrade(url)
    with closing(Database(url)) as database, database.read() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": revision.VERSION_TABLE,
                "compare_type": True,
                "compare_server_default": _differs_in_default,
            },
        )
        assert compare_metadata(context, every_table) == []


def _differs_in_default(
    _context: object, _there: object, ours: Column[object], there: str | None, _default: object, rendered: str | None
) -> bool | None:
    """Of JSON, which PostgreSQL does not compare: as text, without its cast. None: as alembic does it."""
    return (there or "").partition("::")[0] != (rendered or "") if isinstance(ours.type, JSON) else None


def test_upgrading_says_from_where_to_where(url: str) -> None:
    assert migrations.head() == revision.WANTED
    assert upgrade(url) == (None, migrations.head())
    assert upgrade(url) == (migrations.head(), migrations.head())


def test_many_processes_may_make_the_same_catalog_at_once(url: str) -> None:
    code = "import sys; from backupd.catalog.session import upgrade; sys.stdin.close(); print(upgrade(sys.argv[1]))"
    processes = [_python(code, url) for _ in range(6)]
    results = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0] * 6, results
    assert sum("(None," in out for out, _err in results) >= 1
    with open_catalog(url) as catalog:
        assert catalog.integrity() == []


def test_threads_of_one_process_may_open_and_write_at_once(url: str) -> None:
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        with open_catalog(url) as catalog:
            for turn in range(5):
                catalog.jobs.add(samples.job(100 * number + turn))
                catalog.jobs.finish(f"job-{100 * number + turn}", JobState.SUCCEEDED, samples.NOON, token=1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    with open_catalog(url) as catalog:
        assert len(catalog.jobs.list(state=JobState.SUCCEEDED)) == 40


def test_two_catalogs_of_one_process_and_a_process_that_leaves_see_the_same_rows(url: str) -> None:
    """SQLite's locks belong to the process: whatever closes the file lets go of all of them, and then whoever leaves
    last takes the log with the newest rows away."""
    look = (
        "import sys; from backupd.catalog.session import open_catalog\n"
        "with open_catalog(sys.argv[1]) as catalog: print(len(tuple(catalog.backups.every())))"
    )
    with open_catalog(url) as first:
        first.backups.add(samples.backup(0))
        with open_catalog(url) as second:
            for number in range(1, 4):
                with _python(look, url) as other:
                    assert other.communicate(timeout=600) == (f"{number}\n", "")
                (first if number % 2 else second).backups.add(samples.backup(number))
            assert len(tuple(first.backups.every())) == len(tuple(second.backups.every())) == 4


def test_a_newer_catalog_is_refused(url: str) -> None:
    upgrade(url)
    database = Database(url)
    with database.write() as connection:
        connection.execute(text(f"UPDATE {revision.VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(CatalogError, match="newer than this program") as caught:
        open_catalog(url)
    assert "9999" in caught.value.detail
    assert "backupd catalog rebuild" in caught.value.hint
    with database.read() as connection:
        assert revision.current(connection) == "9999"
    database.close()


def test_a_database_of_another_program_is_left_alone(url: str) -> None:
    database = Database(url)
    with database.write() as connection:
        connection.execute(text("CREATE TABLE jobs (name TEXT)"))
    with pytest.raises(CatalogError, match="another program"):
        open_catalog(url)
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM jobs")).scalar() == 0
    database.close()


def test_an_upgrade_that_fails_in_the_middle_leaves_nothing(url: str) -> None:
    database = Database(url)

    def upgrade_and_fail() -> None:
        with database.write() as connection:
            config = migrations.configuration()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.execute(text("SELECT * FROM no_such_table"))

    with pytest.raises(CatalogError, match="no_such_table"):
        upgrade_and_fail()
    with database.read() as connection:
        assert revision.current(connection) is None
    database.close()
    assert upgrade(url) == (None, migrations.head())


@pytest.mark.parametrize("when", ["before the first upgrade is committed", "in a transaction"])
def test_a_kill_in_mid_transaction_leaves_a_usable_catalog(url: str, when: str) -> None:
    code = """
import sys, time
from backupd.catalog.database import Database
from backupd.catalog import migrations
from backupd.catalog.session import open_catalog
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from alembic import command
from tests.support.catalog import samples
url, when = sys.argv[1:]
if when == "in a transaction":
    with open_catalog(url) as catalog:
        catalog.backups.add(samples.backup(1))
database = Database(url)
with database.write() as connection:
    if when == "in a transaction":
        connection.execute(text("DELETE FROM backups"))
    else:
        config = migrations.configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    print("now", flush=True)
    time.sleep(600)
"""
    process = _python(code, url, when)
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n", process.communicate()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    with open_catalog(url) as catalog:
        assert len(tuple(catalog.backups.every())) == (1 if when == "in a transaction" else 0)
        catalog.backups.add(samples.backup(2))
        assert catalog.integrity() == []


def test_the_folder_and_the_file_are_private_and_made_where_missing(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with open_catalog(f"sqlite:///{tmp_path}/var/lib/catalog.db") as catalog:
            catalog.backups.add(samples.backup())
            modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*")}
    finally:
        os.umask(old)
    assert modes == {
        "var": "0o700",
        "lib": "0o700",
        "catalog.db": "0o600",
        "catalog.db-wal": "0o600",
        "catalog.db-shm": "0o600",
    }


def test_a_file_that_is_no_database_is_named_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(b"this was never a database " * 100)
    with pytest.raises(CatalogError, match="is not a SQLite file") as caught:
        open_catalog(f"sqlite:///{path}")
    assert str(path) in caught.value.message
    assert "backupd catalog rebuild" in caught.value.hint
    assert path.read_bytes().startswith(b"this was never")


def test_a_damaged_page_is_named_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    with open_catalog(f"sqlite:///{path}") as catalog:
        for number in range(200):
            catalog.backups.add(samples.backup(number))
    content = bytearray(path.read_bytes())
    for page in range(2 * 4096, len(content), 4096):
        content[page : page + 64] = b"\xa5" * 64
    path.write_bytes(content)
    with pytest.raises(CatalogError, match="is damaged") as caught, open_catalog(f"sqlite:///{path}") as catalog:
        tuple(catalog.backups.every())
    assert str(path) in caught.value.message
    assert "backupd catalog rebuild" in caught.value.hint


def test_damage_inside_rows_is_seen_by_the_integrity_check(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    open_catalog(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO copies VALUES ('gone', 'local', 'complete', '2026-01-01 00:00:00.0', NULL)")
    connection.close()
    with open_catalog(f"sqlite:///{path}") as catalog:
        assert catalog.integrity() == ["copies row 1 names a missing backups"]


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="is a folder"):
        open_catalog(f"sqlite:///{tmp_path}")


def test_a_path_through_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CatalogError, match="cannot be created or opened"):
        open_catalog(f"sqlite:///{tmp_path}/file/catalog.db")


def test_a_catalog_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    open_catalog(f"sqlite:///{path}").close()
    database = Database(f"sqlite:///{path}")
    with database.read() as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")  # what the file system would say: root may write anyway
    with pytest.raises(CatalogError, match="is read-only") as caught:
        Catalog(database).backups.add(samples.backup())
    database.close()
    assert str(path) in caught.value.message
    assert "write access" in caught.value.hint


def test_somebody_without_rights_is_told_so(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.fail("run as root: this test becomes nobody to lose its rights")
    path = tmp_path / "catalog.db"
    open_catalog(f"sqlite:///{path}").close()
    code = (
        "import os, sys; from backupd.catalog.session import open_catalog\n"
        "os.chdir(sys.argv[1]); os.setgid(65534); os.setuid(65534)\n"
        "open_catalog('sqlite:///catalog.db')"
    )
    process = _python(code, str(tmp_path))
    _out, err = process.communicate(timeout=600)
    assert "catalog catalog.db cannot be created or opened" in err
    assert "Permission denied" in err


def test_a_locked_file_is_named_and_the_wait_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backupd.catalog.database.BUSY_SECONDS", 0.2)
    url = f"sqlite:///{tmp_path}/catalog.db"
    with open_catalog(url) as catalog, open_catalog(url) as other:
        with sqlite3.connect(tmp_path / "catalog.db", isolation_level=None) as holder:
            holder.execute("BEGIN IMMEDIATE")
            with pytest.raises(CatalogError, match="stayed locked"):
                catalog.backups.add(samples.backup())
            assert tuple(other.backups.every()) == ()
            holder.execute("ROLLBACK")
        holder.close()
        catalog.backups.add(samples.backup())


def test_who_reads_does_not_wait_for_a_writer_to_keep_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backupd.catalog.database.BUSY_SECONDS", 600)
    file = tmp_path / "catalog.db"
    with (
        open_catalog(f"sqlite:///{file}") as catalog,
        closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as holder,
    ):
        keep = partial(catalog.standings.keep, "shop", Count(1, 0), "basis", samples.NOON, "{}")
        holder.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        with pytest.raises(CatalogError, match="stayed locked"):
            keep()
        assert time.monotonic() - begun < 300
        threading.Timer(1.0, partial(holder.execute, "ROLLBACK")).start()
        catalog.backups.add(samples.backup())  # what cannot be found again waits on the same connection
        keep()
        assert catalog.standings.documents() == {"shop": "{}"}


def test_a_full_disk_is_named_and_nothing_is_half_recorded(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/catalog.db")
    migrations.bring_up_to_date(database, every_table.tables)
    with database.read() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")  # never below the present size
    catalog = Catalog(database)

    def fill() -> None:
        for number in range(10_000):
            catalog.backups.add(samples.backup(number))

    with pytest.raises(CatalogError, match="disk is full"):
        fill()
    assert catalog.integrity() == []
    database.close()


@pytest.mark.parametrize(("free", "said"), [(0, "its disk is full"), (10**6, "cannot be read or written")])
def test_an_error_of_the_disk_is_called_full_only_when_it_is(
    free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(f"sqlite:///{tmp_path}/catalog.db")
    real = os.statvfs(tmp_path)
    answer = os.statvfs_result((real.f_bsize, 4096, real.f_blocks, free, free, real.f_files, 1000, 1000, 0, 255))
    monkeypatch.setattr("backupd.catalog.database.os.statvfs", lambda _path: answer)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    with pytest.raises(CatalogError, match=said), database.read():
        raise DBAPIError("SELECT 1", None, error)
    database.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("/var/lib/catalog.db", "not a URL"),
        ("sqlite://", "not supported"),
        ("sqlite:///:memory:", "not supported"),
        ("mysql://root:geheim@localhost/x", "cannot be stored in"),
        ("", "not a URL"),
        ("postgresql://u:geheim@h:port/x", "not a URL"),
    ],
)
def test_an_address_that_cannot_be_a_catalog_is_refused_without_its_password(address: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message) as caught:
        open_catalog(address)
    assert "geheim" not in str(caught.value)


def test_postgresql_out_of_reach_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="cannot be reached") as caught:
        open_catalog(f"postgresql://me:geheim@/shop?host={tmp_path}")
    assert "geheim" not in str(caught.value)
    assert "me:***@" in caught.value.message


def test_a_postgresql_that_hangs_is_given_up_and_met_again(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Database(postgresql.create("hanging"))) as database:
        with database.read() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
        monkeypatch.setattr(revision, "PATIENCE", 1.5)
        with pytest.raises(CatalogError, match="cannot be reached"), database.read() as connection:
            connection.execute(text("SELECT pg_sleep(600)"))
        with database.read() as connection, database.unhurried(connection):
            connection.execute(text("SELECT pg_sleep(2)"))


class _Waits:
    """A connection that waits until it is shut, or was closed just before that."""

    def __init__(self, *, closed: bool = False) -> None:
        self.ended = threading.Event()
        self._closed = closed

    def shut(self) -> None:
        self.ended.set()
        if self._closed:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))


def test_a_connection_that_cannot_be_shut_or_a_thread_that_cannot_be_started_leaves_no_wait_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(revision, "PATIENCE", 0.05)
    monkeypatch.setattr(revision, "_LOOK", 0.1)
    watchdog, gone, other = revision._Watchdog(), _Waits(closed=True), _Waits()

    def over(one: _Waits) -> AbstractContextManager[None]:
        return watchdog.over(cast(revision._Patient, one))

    with over(gone), over(other):
        assert gone.ended.wait(300)
        assert other.ended.wait(300)
    watchdog, unwatched = revision._Watchdog(), _Waits()
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", _no_more_threads)
        with over(unwatched):
            pass
    last = _Waits()
    with over(last):
        assert last.ended.wait(300)
    assert not unwatched.ended.is_set(), "its wait was over"


def _no_more_threads(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_restarted_postgresql_is_met_without_an_error(postgresql: PostgreSQL) -> None:
    with open_catalog(postgresql.create("restarted")) as catalog:
        catalog.backups.add(samples.backup(1))
        postgresql.stop("fast")
        postgresql.start()
        catalog.backups.add(samples.backup(2))
        assert len(tuple(catalog.backups.every())) == 2


def test_a_statement_costs_neither_a_thread_nor_a_question_whether_the_connection_works(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def counting(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    with closing(Database(postgresql.create("cheap"))) as database:
        with database.read() as connection:
            ours = connection.scalar(text("SELECT pg_backend_pid()"))
        monkeypatch.setattr(threading.Thread, "start", counting)
        pings = _pings(database, monkeypatch)
        for _ in range(20):
            with database.write() as connection:
                assert connection.scalar(text("SELECT pg_backend_pid()")) == ours
        assert len(started) <= 1
        assert pings == []
        monkeypatch.setattr(revision, "_RESTED", 0.0)
        with database.read() as connection:
            assert connection.scalar(text("SELECT pg_backend_pid()")) == ours
        assert pings == [True]


def test_a_connection_that_was_just_used_and_was_closed_by_the_server_is_replaced_at_once(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Database(postgresql.create("closed"))) as database:
        monkeypatch.setattr(revision, "_RESTED", 3600.0)
        with database.read() as connection:
            ours = connection.scalar(text("SELECT pg_backend_pid()"))
        with closing(Database(postgresql.create("other"))) as other, other.write() as connection:
            assert connection.scalar(text(f"SELECT pg_terminate_backend({ours}, 5000)"))
        with database.write() as connection:
            assert connection.scalar(text("SELECT pg_backend_pid()")) != ours


def _pings(database: Database, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every question whether a connection works, from now on."""
    asked: list[bool] = []
    ping = database.engine.dialect.do_ping

    def noting(connection: object) -> bool:
        asked.append(True)
        return ping(connection)  # type: ignore[arg-type]  # it is handed on

    monkeypatch.setattr(database.engine.dialect, "do_ping", noting)
    return asked


def test_a_catalog_that_was_moved_away_is_missed_and_no_empty_one_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "catalog #1 (old).db"
    for opened in (open_catalog, upgrade):
        with pytest.raises(CatalogError, match="is gone") as told:
            opened(f"sqlite:///{path}", make=False)
        assert "catalog rebuild" in told.value.hint
    with open_catalog(f"sqlite:///{path}") as catalog:
        assert path.exists()
    path.rename(tmp_path / "kept.db")
    with pytest.raises(CatalogError, match="is gone"):
        catalog.holds.all()  # the next connection of one that was opened before
    assert not path.exists()
