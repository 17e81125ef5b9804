"""The real service process, without a database server: its beginning, its reloads, its end, and who is on watch."""

from __future__ import annotations

import io
import os
import signal
import socket
import sqlite3
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.context.logging_setup import logging_to
from backupd.app.context.settings import Settings, load_settings
from backupd.app.context.wiring import Wiring, host_identity
from backupd.app.jobs.jobs import queued
from backupd.app.runtime.clock_check import careful
from backupd.app.runtime.service_manager import Leader, SignalRequests, SystemdNotifier, Waker
from backupd.app.schedule.calendar import AlarmClock
from backupd.app.schedule.timetable import Timetable
from backupd.app.service import daemon
from backupd.app.service.worker import Worker
from backupd.catalog.hosts import SERVED
from backupd.model.errors import CatalogError
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.catalog.postgresql import private_postgresql
from tests.support.service.daemon import FAR, HOUR, looking, serving, until
from tests.support.service.house import Office


@pytest.fixture
def office(short_tmp: Path) -> Office:
    office = Office(short_tmp, policies={"gold": FAR})
    office.write()
    return office


def test_it_says_when_it_is_ready_what_comes_next_and_ends_well(office: Office) -> None:
    with serving(office) as service:
        service.ready()
        assert any(note.startswith("STATUS=1 servers; next: 2") for note in service.notes)
        service.process.send_signal(signal.SIGTERM)
        assert service.ends() == 0
        assert service.heard("STOPPING=1")
        assert {line["event"] for line in service.said()} >= {"daemon-started", "daemon-stopped"}
    with looking(office) as catalog:
        assert [event.kind for event in catalog.events.list()] == ["daemon-stopped", "daemon-started"]
        assert set(catalog.schedules.all()) == {
            ("", "challenge"),
            ("db1", "physical.full"),
            ("db1", "physical.incremental"),
        }


def test_a_broken_configuration_is_told_whole_and_the_old_one_stays(office: Office) -> None:
    with serving(office) as service:
        service.ready()
        office.file.write_text(office.file.read_text() + "nonsense: 1\ntimezone: Mars\n")
        service.process.send_signal(signal.SIGHUP)
        service.ready(2)
        assert service.heard("RELOADING=1")
        assert service.heard("MONOTONIC_USEC=")
        (refused,) = [line for line in service.said() if line["event"] == "config-refused"]
        assert "nonsense" in refused["message"]
        assert "Mars" in refused["message"]
        office.write(servers={"db1": "gold", "db2": "gold"})
        service.process.send_signal(signal.SIGHUP)
        service.ready(3)
        with looking(office) as catalog:
            (good,) = catalog.events.list(kind="config-reloaded")
            (bad,) = catalog.events.list(kind="config-refused")
            assert "new: db2" in good.message
            assert "stays active" in bad.message
            assert [
                (entry.actor, entry.via, entry.outcome) for entry in catalog.audit.list(action="config-reloaded")
            ] == [("backupd", "service", "done"), ("backupd", "service", "refused")]
            assert ("db2", "physical.full") in catalog.schedules.all()
        office.file.write_text(office.file.read_text().replace("catalog.db", "other.db"))
        service.process.send_signal(signal.SIGHUP)
        service.ready(4)
        assert "restart it" in service.refused()
        assert not (office.base / "other.db").exists()


def test_one_broken_policy_at_the_start_keeps_only_its_server_from_being_backed_up(office: Office) -> None:
    office.write(servers={"db1": "gold", "db2": "silver"}, silver=FAR)
    silver = office.base / "policies" / "silver.yaml"
    with serving(office) as service:
        service.ready()
    silver.write_text(FAR + "oops: 1\n")
    with serving(office) as service:
        service.ready()
        assert service.heard("STATUS=2 servers, 1 with a broken policy; next: 2")
        (said,) = [line for line in service.said() if line["event"] == "policy-broken"]
        assert "oops" in said["message"]
        with looking(office) as catalog:
            (told,) = catalog.events.list(kind="policy-broken")
            assert (told.severity, told.server, told.subject) == ("error", "db2", "silver")
            assert "oops" in told.detail
            assert catalog.schedules.all()["db2", "physical.full"].cadence, "it goes on where it was"
            assert not catalog.events.list(kind="schedule-ended")
        office.file.write_text(office.file.read_text() + "timezone: Mars\n")
        service.process.send_signal(signal.SIGHUP)
        service.ready(2)
        assert "Mars" in service.refused()
        office.file.write_text(office.file.read_text().replace("Mars", "Europe/Berlin"))
        service.process.send_signal(signal.SIGHUP)  # what was broken before keeps nothing else from being changed
        service.ready(3)
        silver.write_text(FAR)
        service.process.send_signal(signal.SIGHUP)
        service.ready(4)
        with looking(office) as catalog:
            assert len(catalog.events.list(kind="config-reloaded")) == 2
            (mended,) = catalog.events.list(kind="policy-mended")
            assert (mended.server, mended.subject) == ("db2", "silver")
            assert len(catalog.events.list(kind="policy-broken")) == 1
        silver.write_text(FAR + "oops: 1\n")
        service.process.send_signal(signal.SIGHUP)
        service.ready(5)
        assert "oops" in service.refused(), "what is whole is not given up for what is broken"


def test_a_broken_configuration_file_keeps_it_from_starting(office: Office) -> None:
    office.file.write_text(office.file.read_text() + "nonsense: 1\n")
    with serving(office) as service:
        assert service.ends() == 2
        assert "nonsense" in service.log.read_text()


def test_the_heart_beats_only_while_the_catalog_can_be_written_and_every_part_looks(office: Office) -> None:
    settings = load_settings(office.file)
    with looking(office) as catalog, Waker() as waker:
        service = daemon.Daemon(
            Wiring(settings, catalog), daemon.Manner(), SystemdNotifier(), waker, SignalRequests(waker)
        )
        with Leader(service._wiring) as watch, Worker(service._wiring) as worker, AlarmClock(waker.wake) as alarm:
            watch.begin()
            worker.hold(True)
            service._begin()

            def look() -> float:
                service._refreshed = service._written_at = 0.0
                service._round(worker, (), alarm, watch)
                return service._well()

            well = look()
            assert daemon.WRITTEN in catalog.cursors.all()
            with sqlite3.connect(office.base / "catalog.db") as file:
                file.execute("create trigger full before update on cursors begin select raise(abort, 'full'); end")
            assert look() == well, "a look that only reads is none"
            assert look() == well
            with sqlite3.connect(office.base / "catalog.db") as file:
                file.execute("drop trigger full")
            assert look() > well
            service._parts = (worker,)
            until(lambda: service._well() > well, "the worker looks")
        service._well_at = time.monotonic()
        assert service._well() == worker.well_at, "its thread is gone"


@pytest.mark.parametrize("stepped", ["before it begins", "while it begins"])
def test_a_clock_that_is_set_while_the_service_starts_is_noticed_and_nothing_expires_by_it(
    office: Office, monkeypatch: pytest.MonkeyPatch, stepped: str
) -> None:
    ahead = timedelta(0)
    far = timedelta(days=400)

    def step(_wiring: Wiring) -> None:
        nonlocal ahead
        ahead = far

    with looking(office) as catalog, Waker() as waker:
        wiring = Wiring(load_settings(office.file), catalog, lambda: datetime.now(UTC) + ahead)
        service = daemon.Daemon(wiring, daemon.Manner(), SystemdNotifier(), waker, SignalRequests(waker))
        with Leader(wiring) as watch, Worker(wiring) as worker, AlarmClock(waker.wake) as alarm:
            worker.hold(True)
            if stepped == "before it begins":
                step(wiring)
            else:
                monkeypatch.setattr(daemon, "abandon_dead", step)
            watch.begin()
            service._begin()
            with sqlite3.connect(office.base / "catalog.db") as file:
                file.execute("create trigger full before insert on cursors begin select raise(abort, 'full'); end")
            service._round(worker, (), alarm, watch)
            with sqlite3.connect(office.base / "catalog.db") as file:
                file.execute("drop trigger full")
            service._round(worker, (), alarm, watch)
        assert [event.message for event in catalog.events.list(kind="clock-jump")] == [
            "this machine's clock was set forward by 400d"
        ]
        now = wiring.clock()
        assert careful(catalog, now) < now - far + timedelta(minutes=1), "a step is noted though the catalog was full"
        assert not catalog.jobs.list(), "nothing is concluded from it yet"


def test_a_clock_that_is_set_while_the_service_looks_at_other_things_starts_nothing(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.write(gold=FAR)
    ahead = timedelta(0)

    def step(_wiring: Wiring) -> None:
        nonlocal ahead
        ahead = timedelta(days=400)

    monkeypatch.setattr(daemon, "resume_paused", step)
    with looking(office) as catalog, Waker() as waker:
        wiring = Wiring(load_settings(office.file), catalog, lambda: datetime.now(UTC) + ahead)
        service = daemon.Daemon(wiring, daemon.Manner(), SystemdNotifier(), waker, SignalRequests(waker))
        with Leader(wiring) as watch, Worker(wiring) as worker, AlarmClock(waker.wake) as alarm:
            watch.begin()
            service._begin()
            for _ in range(2):
                assert not catalog.events.list(kind="clock-jump")
                service._refreshed = float("-inf")
                service._round(worker, (), alarm, watch)
                assert not catalog.jobs.list()
        assert catalog.events.list(kind="clock-jump")


def test_a_due_time_passed_in_its_absence_becomes_one_job_which_is_run(office: Office) -> None:
    with looking(office) as catalog:
        with serving(office) as service:
            service.ready()
            service.process.send_signal(signal.SIGINT)
            assert service.ends() == 0
        rows = catalog.schedules.all()
        row = rows["db1", "physical.full"]
        past = datetime.now(UTC) - timedelta(days=15)
        catalog.schedules.settle(rows, [type(row)(row.server, row.leg, row.cadence, past, past)])
        with serving(office) as service:
            service.ready()
            until(lambda: bool(catalog.jobs.list(state=JobState.FAILED)), "the job failed: there is no such server")
        (missed,) = catalog.jobs.list(state=JobState.MISSED)
        assert "2 runs were missed" in missed.message or "3 runs were missed" in missed.message
        failed = catalog.jobs.list(state=JobState.FAILED)[-1]
        assert (failed.leg, failed.previous, failed.due_at) == ("physical.full", missed.id, missed.due_at)


def test_a_second_service_refuses_and_names_the_first(office: Office) -> None:
    with serving(office) as first:
        first.ready()
        with serving(office) as second:
            assert second.ends() == 1
            said = second.log.read_text()
            assert "another backupd service is running" in said
            assert f"process {first.process.pid} on {socket.gethostname()}" in said
            assert "--standby" in said
        elsewhere = office.base / "elsewhere.yaml"
        elsewhere.write_text(office.file.read_text().replace("/spool", "/spool2"))
        with serving(office, config=elsewhere) as third:
            assert third.ends() == 1
            assert "running on the catalog" in third.log.read_text()


def test_one_that_stands_by_takes_over_when_the_first_is_killed_with_the_files_as_they_are_then(office: Office) -> None:
    with serving(office) as first:
        first.ready()
        with serving(office, "--standby") as second:
            second.ready()
            assert second.heard("STATUS=standing by")
            office.write(
                servers={"db1": "gold", "db2": "gold"}, gold=FAR.replace(f"0 {HOUR} * * sun", f"30 {HOUR} * * sun")
            )
            first.process.kill()
            until(lambda: any(line["event"] == "daemon-started" for line in second.said()), "it has taken over")
            second.ready(3)
            with looking(office) as catalog:
                assert catalog.schedules.all()["db2", "physical.full"].cadence.startswith(f"30 {HOUR} * * sun")
                (told,) = catalog.events.list(kind="config-reloaded")
                assert told.message.endswith("2 servers; new: db2; other policies: gold; other settings: servers")
            second.process.send_signal(signal.SIGTERM)
            assert second.ends() == 0


def test_one_that_stands_by_can_be_stopped(office: Office) -> None:
    with serving(office) as first:
        first.ready()
        with serving(office, "--standby") as second:
            second.ready()
            second.process.send_signal(signal.SIGTERM)
            assert second.ends() == 0
        assert first.process.poll() is None


def test_a_reload_that_is_asked_for_while_it_starts_does_not_end_it(office: Office) -> None:
    with serving(office) as service:
        status = Path(f"/proc/{service.process.pid}/status")
        asked = 0
        while not service.heard("READY=1"):
            ignored, caught = (
                int(line.split()[1], 16)
                for line in status.read_text().splitlines()
                if line.startswith(("SigIgn", "SigCgt"))
            )
            if (ignored | caught) & 1 << signal.SIGHUP - 1:  # the interpreter itself has started
                service.process.send_signal(signal.SIGHUP)
                asked += 1
            assert service.process.poll() is None, service.log.read_text()
            time.sleep(0.002)
        assert asked > 2


def test_a_file_that_brings_about_what_nobody_foresaw_is_refused_and_the_service_goes_on(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def load(path: Path, *, strict: bool, whole: bool = True) -> Settings:
        nonlocal read
        read += 1
        os.kill(os.getpid(), signal.SIGHUP if read == 1 else signal.SIGTERM)  # handled from the very beginning
        if read == 2:
            raise ValueError("year 10240 is out of range")
        return load_settings(path, strict=strict, whole=whole)

    monkeypatch.setattr(daemon, "load_settings", load)
    monkeypatch.setenv("BACKUPD_RUNTIME", str(office.base / "run"))
    said = io.StringIO()
    with logging_to(said):
        assert daemon.serve(office.file, daemon.Manner(grace=0)) == 0
    assert read == 2
    assert "Traceback" in said.getvalue()
    with looking(office) as catalog:
        (event,) = catalog.events.list(kind="config-refused")
        assert "internal error: ValueError: year 10240 is out of range; the previous one stays active" in event.message
        assert catalog.events.list()[0].kind == "daemon-stopped"


def test_a_reload_that_the_catalog_refuses_renames_no_host(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[list[str]] = []
    follow, fails = Timetable.follow, iter((False, True, False))
    office.write(extra="host: main\n", gold=FAR)

    def load(path: Path, *, strict: bool, whole: bool = True) -> Settings:
        with looking(office) as catalog:
            names.append([host.name for host in catalog.hosts.all(datetime.now(UTC))])
        office.write(extra=f"host: main{len(names)}\n" if len(names) > 1 else "host: main\n", gold=FAR)
        os.kill(os.getpid(), signal.SIGHUP if len(names) < 3 else signal.SIGTERM)
        return load_settings(path, strict=strict, whole=whole)

    def followed(timetable: Timetable, settings: Settings, now: datetime, why: str = "") -> tuple[JobRecord, ...]:
        if next(fails):
            raise CatalogError("the disk of the catalog is full")
        return follow(timetable, settings, now, why)

    monkeypatch.setattr(daemon, "load_settings", load)
    monkeypatch.setattr(Timetable, "follow", followed)
    monkeypatch.setenv("BACKUPD_RUNTIME", str(office.base / "run"))
    assert daemon.serve(office.file, daemon.Manner(grace=0)) == 0
    assert names == [[], ["main"], ["main"]]
    with looking(office) as catalog:
        (refused,) = catalog.events.list(kind="config-refused")
        assert "the disk of the catalog is full; the previous one stays active" in refused.message
        ((name, served),) = [(host.name, host.served_at) for host in catalog.hosts.all(datetime.now(UTC))]
        assert (name, served) == ("main3", None), "nobody serves it any more"


def test_a_reload_ends_no_service_whose_spool_does_not_tell_which_host_it_is(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Settings] = []
    office.write(extra="host: main\n", gold=FAR)

    def load(path: Path, *, strict: bool, whole: bool = True) -> Settings:
        if loads:
            (office.base / "spool" / "host.id").write_text("")
            office.write(extra="host: other\n", gold=FAR)
        os.kill(os.getpid(), signal.SIGTERM if loads else signal.SIGHUP)
        loads.append(load_settings(path, strict=strict, whole=whole))
        return loads[-1]

    monkeypatch.setattr(daemon, "load_settings", load)
    monkeypatch.setenv("BACKUPD_RUNTIME", str(office.base / "run"))
    assert daemon.serve(office.file, daemon.Manner(grace=0)) == 0
    with looking(office) as catalog:
        assert [event.kind for event in catalog.events.list(limit=2)] == ["daemon-stopped", "config-reloaded"]


def test_on_postgresql_the_place_is_held_by_a_session_and_taken_over_after_a_kill(office: Office) -> None:
    with private_postgresql() as server:
        office.catalog = server.create("watched")
        office.write()
        elsewhere = office.base / "elsewhere.yaml"
        elsewhere.write_text(office.file.read_text().replace("/spool", "/spool2"))
        with serving(office) as first:
            first.ready()
            with serving(office, config=elsewhere) as refused:
                assert refused.ends() == 1
                assert "running on the catalog" in refused.log.read_text()
                assert "since 2" in refused.log.read_text()
            with serving(office, "--standby", config=elsewhere) as second:
                second.ready()
                assert second.heard("STATUS=standing by")
                first.process.kill()
                second.ready(2)
                with serving(office, "--standby") as third:
                    third.ready()
                    server.stop("fast")
                    until(lambda: any(line["event"] == "daemon-trouble" for line in third.said()), "it noticed")
                    server.start()
                    second.process.kill()
                    until(lambda: any(line["event"] == "daemon-started" for line in third.said()), "it has taken over")
                    trouble = [line for line in third.said() if line["event"] == "daemon-trouble"]
                    assert len(trouble) == len({line["message"] for line in trouble})


def test_the_second_of_a_pair_with_one_name_does_at_once_what_waits_for_the_killed_first(office: Office) -> None:
    with private_postgresql() as server:
        office.catalog = server.create("paired")
        office.write(extra="host: pair\n")
        elsewhere = office.base / "elsewhere.yaml"
        elsewhere.write_text(office.file.read_text().replace("/spool", "/spool2"))
        with ExitStack() as stack:
            first = stack.enter_context(serving(office))
            first.ready()
            second = stack.enter_context(serving(office, "--standby", config=elsewhere))
            second.ready()
            catalog = stack.enter_context(looking(office))
            assert second.heard("STATUS=standing by")
            first.process.kill()
            first.process.wait()
            wiring = Wiring(load_settings(office.file), catalog)
            job = queued(wiring, JobKind.RETENTION, "db1")
            assert job.runs_on == "host:pair"
            catalog.jobs.enqueue(job)
            killed = time.monotonic()
            until(lambda: catalog.jobs.get(job.id).finished_at is not None, f"done\n{second.log.read_text()}")
            assert time.monotonic() - killed < SERVED.total_seconds() / 2, "before the first one is given up"
            done = catalog.jobs.get(job.id)
            assert (done.state, done.runs_on) == (JobState.SUCCEEDED, "host:pair")
            ((name, identity, served),) = [
                (one.name, one.identity, one.served) for one in catalog.hosts.all(datetime.now(UTC))
            ]
            assert (name, identity, served) == ("pair", host_identity(office.base / "spool2"), True)
            assert not any(line["event"] == "jobs-moved" for line in second.said())
