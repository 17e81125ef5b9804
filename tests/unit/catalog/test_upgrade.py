"""A catalog of an earlier version keeps everything when it is brought up to date."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from alembic import command
from sqlalchemy import text

from backupd.catalog import database as revision
from backupd.catalog import migrations
from backupd.catalog.database import Database
from backupd.catalog.overview import Stock
from backupd.catalog.session import open_catalog
from backupd.catalog.standings import Count
from backupd.model.backup_record import BackupState, Sighting
from backupd.model.job import JobState
from backupd.model.proof import Phase

_BACKUPS = (
    "INSERT INTO backups (id, server, kind, state, started_at, finished_at, bytes_source, bytes_stored, bytes_new,"
    " files, files_linked, position_file, position_pos, position_gtid, flavour, server_version, tool_version, pinned,"
    " warnings) VALUES (:id, 'shop-db1', 'physical-full', 'complete', '2026-11-20 02:00:00.000000',"
    " '2026-11-20 02:10:00.000000', 1000, 500, 500, 10, 0, 'binlog.000001', 4, '0-1-1', 'mariadb', '10.11.19',"
    " '10.11.19', false, '[\"slow\"]')"
)
_COPIES = (
    "INSERT INTO copies (backup_id, destination, state, stored_at)"
    " VALUES (:id, :at, 'complete', '2026-11-20 02:10:00.000000')"
)
_JOBS = (
    "INSERT INTO jobs (id, kind, server, state, started_at, finished_at, message, detail, hint, bytes, phases,"
    " owner) VALUES (:id, 'physical-full', 'shop-db1', :state, '2026-11-20 02:00:00.000000', NULL, '', '', '', 7,"
    " :phases, 'here boot 1 1')"
)


def _first_version(database: Database) -> None:
    """A catalog as the first version left it, with a few rows."""
    with database.write() as connection:
        config = migrations.configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for name in ("b1", "b2"):
            connection.execute(text(_BACKUPS), {"id": name})
            for place in ("local", "offsite"):
                connection.execute(text(_COPIES), {"id": name, "at": place})
        for name, state in (("j1", "succeeded"), ("j2", "running")):
            connection.execute(
                text(_JOBS), {"id": name, "state": state, "phases": '[{"name": "backup", "seconds": 2.0, "bytes": 7}]'}
            )


def test_an_upgrade_of_the_first_version_keeps_backups_copies_and_jobs(url: str) -> None:
    with closing(Database(url)) as database:
        _first_version(database)
    with open_catalog(url) as catalog:
        backups = tuple(catalog.backups.every())
        assert {record.id for record in backups} == {"b1", "b2"}
        for record in backups:
            assert [copy.destination for copy in record.copies] == ["local", "offsite"]
            assert (record.state, record.from_lsn, record.to_lsn, record.reason) == (BackupState.COMPLETE, 0, 0, "")
            assert record.warnings == ("slow",)
            assert (record.table_set, record.tables_missing) == ("", 0)
        jobs = {job.id: job for job in catalog.jobs.list()}
        assert {name: job.state for name, job in jobs.items()} == {"j1": JobState.SUCCEEDED, "j2": JobState.RUNNING}
        assert jobs["j1"].queued_at == jobs["j1"].started_at
        assert (jobs["j1"].attempt, jobs["j1"].token, jobs["j1"].arguments, jobs["j1"].leg) == (1, 0, {}, "")
        assert jobs["j1"].phases == (Phase("backup", 2.0, 7),)
        assert [job.id for job in catalog.jobs.dead(lambda _owner: False, jobs["j1"].queued_at)] == ["j2"]
        assert catalog.integrity() == []


def test_deletions_that_an_earlier_version_began_go_on_as_those_of_this_installation(url: str) -> None:
    with closing(Database(url)) as database:
        _first_version(database)
        with database.write() as connection:
            connection.execute(text("UPDATE copies SET state = 'deleted' WHERE backup_id = 'b2'"))
    now, stored = datetime(2026, 11, 22, tzinfo=UTC), datetime(2026, 11, 21, tzinfo=UTC)
    with open_catalog(url) as catalog:
        copied = {copy.stored_at for copy in catalog.backups.get("b2").copies}
        found = catalog.marks.look("local", {("shop-db1", name): stored for name in ("b1", "b2")}, now)
    assert found["shop-db1", "b1"] == Sighting(now)
    assert {found["shop-db1", "b2"]} == {Sighting(at, ours=True) for at in copied}


def test_going_back_to_the_first_version_keeps_what_it_knew(url: str) -> None:
    with closing(Database(url)) as database:
        _first_version(database)
        with database.write() as connection:
            config = migrations.configuration()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            command.downgrade(config, "0001")
            assert connection.scalar(text("SELECT count(*) FROM copies")) == 4
            assert connection.scalar(text("SELECT count(*) FROM jobs")) == 2
            assert revision.current(connection) == "0001"
    with open_catalog(url) as catalog:
        assert len(catalog.jobs.list()) == 2


def test_an_upgrade_that_is_killed_is_finished_by_the_next_start(url: str, tmp_path: Path) -> None:
    with closing(Database(url)) as database:
        _first_version(database)
    begun = tmp_path / "begun"
    script = (
        "import pathlib, sys, time, alembic.op\n"
        "from backupd.catalog.session import upgrade\n"
        "create = alembic.op.create_index\n"
        "def stops(name, *rest, **more):\n"
        "    create(name, *rest, **more)\n"
        "    if name == 'ix_jobs_group':\n"
        "        pathlib.Path(sys.argv[2]).touch()\n"
        "        time.sleep(600)\n"
        "alembic.op.create_index = stops\n"
        "upgrade(sys.argv[1])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, url, str(begun)]) as process:
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    with closing(Database(url)) as database, database.read() as connection:
        assert revision.current(connection) == "0001", "all of it was undone"
    with open_catalog(url) as catalog:
        assert catalog.glances.stock() == {"local": Stock(2, 1000), "offsite": Stock(2, 1000)}
        assert catalog.standings.count("shop-db1") == Count(1, 0)
        assert catalog.standings.rows() == ({}, {}), "the service makes them, one server after the other"
        assert catalog.integrity() == []
