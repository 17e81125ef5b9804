"""Limits of a policy on real backups of a real server: what the throttle counted, pauses, and giving up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pymysql
import pytest

from backupd.app.backups.limits import PressureThrottle, throttled
from backupd.app.backups.physical import take_backup
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Wiring
from backupd.backup.physical import Speeds
from backupd.catalog.session import open_catalog, upgrade
from backupd.engine.server_load import PressureWatch
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.errors import CancelledError, ServerError
from backupd.model.job import JobKind, JobRecord, JobState, Progress, Report, silent
from backupd.model.text import new_id
from backupd.process.throttle import TokenBucket
from tests.support import sample
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.replica import catch_up, replica_of
from tests.support.servers.server import query
from tests.support.stores.folders import short_directory

MIB = 1024 * 1024


@contextmanager
def wired(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wiring]:
    monkeypatch.setenv("BACKUPD_RUNTIME", str(house.base / "run"))
    settings = load_settings(house.config)
    upgrade(settings.catalog)
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


def running(report: Report = silent) -> JobRun:
    now = datetime.now(UTC)
    return JobRun(JobRecord(new_id(now), str(JobKind.FULL), SERVER, JobState.RUNNING, now), report)


def take(wiring: Wiring, run: JobRun) -> BackupRecord:
    return take_backup(wiring, SERVER, BackupKind.PHYSICAL_FULL, run).record


def nothing_left(house: House) -> bool:
    return (
        house.objects() == []
        and not list((house.repository / "servers").rglob("*.json"))
        and not list((house.repository / "intents").rglob("*.json"))
    )


def findings(house: House) -> list[dict[str, Any]]:
    """What is wrong with what a backup stored. RECOVER.md is written after the job, which there is none of here."""
    return [one for one in house.fsck() if one["invariant"] != "recover-text-current"]


def test_every_byte_of_a_backup_passes_the_read_limit_and_every_stored_one_that_of_its_destination(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rates are high, so that the test is not slow: what is asked is that the buckets saw every byte."""
    house.policy_extra = "limits: {read: 200MiB, send: 100MiB}\nwitness: {enabled: false}\n"
    house.write()
    buckets: list[TokenBucket] = []

    class Noted(TokenBucket):
        def __init__(self, rate: float, *, cancel: threading.Event | None = None) -> None:
            super().__init__(rate, cancel=cancel)
            buckets.append(self)

    monkeypatch.setattr("backupd.app.backups.limits.TokenBucket", Noted)
    seen: list[Speeds] = []

    def judged(speeds: Speeds, *, seconds: float, prepare_seconds: float, limits: Mapping[str, int]) -> tuple[str, ...]:
        assert not limits
        seen.append(speeds)
        return (f"judged after {seconds > 0} {prepare_seconds > 0}",)

    monkeypatch.setattr("backupd.app.backups.physical.slow_destinations", judged)
    with wired(house, monkeypatch) as wiring:
        record = take(wiring, running())
    read, sent = buckets
    assert read.taken >= record.stats.bytes_source
    assert read.taken < record.stats.bytes_source * 1.1
    assert sent.taken == record.stats.bytes_new == sum(path.stat().st_size for path in house.objects())
    assert findings(house) == []
    # What the rule about slow destinations is asked with, and where its answer goes.
    assert (seen[0].size, seen[0].new) == (record.stats.bytes_source, record.stats.bytes_new)
    assert [(load.destination, load.bytes) for load in seen[0].loads] == [("local", record.stats.bytes_new)]
    assert min(seen[0].source_seconds, seen[0].redo, seen[0].loads[0].seconds) > 0
    assert record.warnings[-1] == "judged after True True"


def test_a_stop_in_the_middle_of_a_slow_backup_ends_it_and_leaves_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.policy_extra = "limits: {read: 64KiB}\nwitness: {enabled: false}\n"
    house.write()

    def stop(progress: Progress) -> None:
        if progress.phase == "copy" and progress.bytes_done:
            run.cancel.set()

    run = running(stop)
    with wired(house, monkeypatch) as wiring, pytest.raises(CancelledError):
        take(wiring, run)
    assert nothing_left(house)


@pytest.fixture
def pair(keys: Keys) -> Iterator[tuple[House, PrivateServer, PrivateServer]]:
    """A house for a replica, with the replica and its source."""
    with short_directory() as base, PrivateServer(tcp=True) as source:
        source.create_backup_users()
        sample.create(source)
        with replica_of(source) as replica:
            yield House(base, replica, keys), source, replica


def test_a_backup_of_a_replica_that_stands_still_waits_and_goes_on_when_it_runs_again(
    pair: tuple[House, PrivateServer, PrivateServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    house, source, replica = pair
    house.policy_extra = "limits: {replica_lag: 60s}\nwitness: {enabled: false}\n"
    house.write()
    replica.execute("STOP SLAVE SQL_THREAD")
    notes: list[str] = []

    def heal(progress: Progress) -> None:
        if progress.phase == "paused":
            if not notes:
                replica.execute("START SLAVE SQL_THREAD")
            notes.append(progress.note)

    run = running(heal)
    with wired(house, monkeypatch) as wiring:
        record = take(wiring, run)
        events = wiring.catalog.events.list()
    assert notes
    assert "replication is stopped" in notes[0]
    assert [warning for warning in record.warnings if warning.startswith("limits: the backup paused once")]
    paused = [event for event in events if event.kind == "limits-paused"]
    assert [(event.server, event.job_id) for event in paused] == [(SERVER, run.job.id)]
    assert "Slave_SQL_Running No" in paused[0].message
    catch_up(source, replica)
    assert findings(house) == []


def test_a_backup_that_had_to_pause_too_long_gives_up_and_leaves_nothing(
    pair: tuple[House, PrivateServer, PrivateServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    house, _source, replica = pair
    house.policy_extra = "limits: {replica_lag: 60s, max_pause: 1s}\nwitness: {enabled: false}\n"
    house.write()
    replica.execute("STOP SLAVE SQL_THREAD")
    with wired(house, monkeypatch) as wiring:
        with pytest.raises(ServerError, match="of pauses: the lag of shop-db1 is unknown: replication is stopped"):
            take(wiring, running())
        assert tuple(wiring.catalog.backups.every()) == ()
    assert nothing_left(house)


def test_a_dump_pauses_while_somebody_s_statement_runs_for_too_long_and_goes_on_when_it_has_ended(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.policy_extra = "limits: {long_queries: 500ms}\n"
    house.write()
    monkeypatch.setattr("backupd.app.backups.limits.PressureWatch", partial(PressureWatch, interval=0.05))
    monkeypatch.setattr("backupd.app.backups.limits._TICK_SECONDS", 0.05)
    notes: list[str] = []
    with closing(house.server.connect()) as other:
        ((number,),) = query(other, "SELECT CONNECTION_ID()")

        def end(progress: Progress) -> None:
            if progress.phase == "paused":
                notes.append(progress.note)
                with suppress(pymysql.err.Error):  # it was gone already
                    house.server.execute(f"KILL QUERY {number}")

        def run() -> None:
            with suppress(pymysql.err.Error):  # killed
                query(other, "SELECT SLEEP(600), id FROM shop.orders")

        statement = threading.Thread(target=run)
        statement.start()
        while not house.server.query(
            "SELECT 1 FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT SLEEP(600)%' AND TIME >= 1"
        ):
            assert statement.is_alive()
            statement.join(0.05)
        with wired(house, monkeypatch) as wiring:
            record = take_backup(wiring, SERVER, BackupKind.LOGICAL, running(end)).record
        statement.join()
    assert f"a statement of root@localhost (connection {number}) since" in notes[0]
    assert [warning for warning in record.warnings if warning.startswith("limits: the backup paused once")]
    assert record.tables_missing == 0


def test_a_server_without_limits_is_watched_by_nobody(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with wired(house, monkeypatch) as wiring:
        server = wiring.settings.server(SERVER)
        before = threading.active_count()
        with throttled(wiring, server, server.connection(), running()) as brake:
            assert isinstance(brake, PressureThrottle)
            assert threading.active_count() == before
            brake.take(2**40)
        assert brake.warnings == ()


def test_a_limit_that_cannot_be_watched_is_said_in_the_backup_s_record(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.policy_extra = "limits: {replica_lag: 60s, disk_latency: 30s}\n"
    house.write()
    with wired(house, monkeypatch) as wiring:
        server = wiring.settings.server(SERVER)
        with throttled(wiring, server, server.connection(), running()) as brake:
            brake.take(1)
    assert any("limits.replica_lag: the account may not ask" in warning for warning in brake.warnings)
