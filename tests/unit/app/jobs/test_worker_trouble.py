"""Workers whose machine, catalog or jobs do not behave: no row stays open, and one trouble is not everybody's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.app.context import wiring
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Result, Wiring, owner, owner_state
from backupd.app.jobs import jobs
from backupd.app.jobs.admission import Admission
from backupd.app.jobs.jobs import Pulse, abandon_dead, mark_stopped
from backupd.app.runtime import child_process as offspring
from backupd.app.service import dispatch, worker
from backupd.app.service.dispatch import LONGEST_SILENCE, perform, run_here
from backupd.app.service.worker import Worker
from backupd.catalog import database
from backupd.catalog.session import open_catalog
from backupd.model.errors import BusyError, ConfigurationError
from backupd.model.job import JobKind, JobRecord, JobState, silent
from backupd.model.text import new_id
from backupd.process.command import Command
from tests.support.service.house import GOLD, Office
from tests.support.stores.gate import until

NOW = datetime(2026, 11, 21, 4, 0, tzinfo=UTC)
POLICY = GOLD + "retry: {attempts: 2, pause: 1m}\nlimits: {hang: 1s}\n"


@pytest.fixture
def office(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    return Office(short_tmp, servers=dict.fromkeys(("db1", "db2", "db3"), "gold"))


@pytest.fixture
def place(office: Office) -> Iterator[Wiring]:
    settings = office.write(gold=POLICY)
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


def enqueue(place: Wiring, kind: JobKind = JobKind.FULL, server: str = "db1", **changes: Any) -> JobRecord:
    now = place.clock()
    job = replace(
        JobRecord(id=new_id(now), kind=kind, server=server, state=JobState.QUEUED, queued_at=now, leg="physical.full"),
        **changes,
    )
    place.catalog.jobs.enqueue(job)
    return job


def state(place: Wiring, job: JobRecord) -> JobState:
    return place.catalog.jobs.get(job.id).state


def successor(place: Wiring, job: JobRecord) -> JobRecord:
    (found,) = place.catalog.jobs.list(previous=job.id)
    return found


def instead(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    """Jobs are done by this program."""
    monkeypatch.setattr(offspring, "Command", lambda _argv, env: Command(argv, env=env))


# -- a job without a process


def _refuse(*_args: object, **_more: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _crash(*_args: object, **_more: object) -> None:
    raise RuntimeError("it crashed")


_start = threading.Thread.start


def _no_ear(thread: threading.Thread) -> None:
    if thread.name == "stderr":
        raise RuntimeError("can't start new thread")
    _start(thread)


@pytest.mark.parametrize(
    ("place_of_trouble", "trouble"),
    [("backupd.app.runtime.child_process.os.pipe2", _refuse), ("threading.Thread.start", _no_ear)],
)
def test_a_job_whose_process_cannot_be_started_has_failed_and_is_tried_again(
    place: Wiring, monkeypatch: pytest.MonkeyPatch, place_of_trouble: str, trouble: Any
) -> None:
    instead(monkeypatch, "sleep", "60")
    first, second = enqueue(place), enqueue(place, server="db2")
    one = Worker(place)
    with monkeypatch.context() as broken:
        broken.setattr(place_of_trouble, trouble)
        one.step()
        assert one.running() == 0
    row = place.catalog.jobs.get(first.id)
    assert row.state is JobState.FAILED
    assert "cannot be started" in row.message
    assert successor(place, first).attempt == 2
    assert state(place, second) is JobState.QUEUED, "what this one lacked, the next one would have lacked too"


def test_a_claimed_job_that_was_never_begun_is_ended_at_the_next_look(
    place: Wiring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, cancelled = enqueue(place), enqueue(place, server="db2")
    one, other = Worker(place), Worker(place)
    with monkeypatch.context() as broken:
        broken.setattr(one, "_begin", _crash)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                one.step()
            other._watch()
            if state(place, cancelled) is JobState.QUEUED:
                assert state(place, job) is JobState.RUNNING, "it is another worker's of this process"
                jobs.cancel(place, job.id, "ops")
    assert state(place, job) is JobState.CANCELLED
    one._watch()
    assert state(place, cancelled) is JobState.FAILED
    assert successor(place, cancelled).attempt == 2


# -- one poisoned job


def test_a_job_whose_repetition_cannot_be_told_ends_and_stops_no_other(
    place: Wiring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poisoned, good = enqueue(place), enqueue(place, server="db2")
    for _ in range(2):
        assert place.catalog.jobs.claim("", NOW + timedelta(days=9000)) is not None
    before = jobs.repetition

    def repeat(wiring: Wiring, job: JobRecord, **more: Any) -> JobRecord:
        if job.id == poisoned.id:
            raise OverflowError("date value out of range")
        return before(wiring, job, **more)

    monkeypatch.setattr(jobs, "repetition", repeat)
    assert {job.id for job in abandon_dead(place)} == {poisoned.id, good.id}
    assert state(place, poisoned) is JobState.ABANDONED
    assert successor(place, good).attempt == 2
    (event,) = place.catalog.events.list(kind="job-not-followed")
    assert (event.job_id, "OverflowError" in event.message) == (poisoned.id, True)


# -- the settings in force


def test_jobs_go_by_the_settings_in_force_whatever_the_files_say(office: Office, place: Wiring) -> None:
    with Worker(place) as one:
        office.file.write_text("servers: [")
        job = enqueue(place, JobKind.VERIFY, leg="")
        one.wake()
        until(lambda: state(place, job) not in (JobState.QUEUED, JobState.RUNNING))
        assert state(place, job) is JobState.SUCCEEDED, place.catalog.jobs.get(job.id)
        (before,) = (office.base / "run").rglob("settings-*.json")
        assert before.stat().st_mode & 0o777 == 0o600
        one.reload(replace(place, settings=office.write(extra="concurrency: {jobs: 3}\n")))
        until(lambda: not before.exists())


# -- a stop, or a hold, in the moment of a start


def test_a_job_that_is_being_claimed_counts_as_running_and_none_starts_after_it(
    place: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops the service holds the worker, and asks whether anything runs that should have its grace."""
    instead(monkeypatch, "true")
    first, late = enqueue(place), enqueue(place, server="db2")
    one = Worker(place)
    claim, seen = place.catalog.jobs.claim, []

    def claiming(*args: Any, **more: Any) -> JobRecord | None:
        one.hold(True)
        seen.append(one.running())
        return claim(*args, **more)

    monkeypatch.setattr(place.catalog.jobs, "claim", claiming)
    one.step()
    assert seen == [1]
    assert [running.job.id for running in one._running] == [first.id]
    assert state(place, late) is JobState.QUEUED
    until(lambda: one._running[0].process.ended() is not None)
    one.step()
    assert one.running() == 0


# -- a process that stands still


def test_a_process_that_stands_still_is_ended_and_counts_as_hanging(
    place: Wiring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instead(monkeypatch, "sh", "-c", "kill -STOP $$")
    monkeypatch.setattr(worker, "STILL", timedelta(milliseconds=300))
    job = enqueue(place)
    with Worker(place, grace=0.3):
        until(lambda: state(place, job) not in (JobState.QUEUED, JobState.RUNNING))
    row = place.catalog.jobs.get(job.id)
    assert (row.state, row.cancel_by) == (JobState.FAILED, "the hang watch")
    assert "job-hanging" in {event.kind for event in place.catalog.events.list()}
    assert successor(place, job).attempt == 2


def test_kinds_that_report_no_progress_are_watched_too(place: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[timedelta] = []

    class Watched(Pulse):
        def __init__(self, *args: Any, hang: timedelta, **more: Any) -> None:
            seen.append(hang)
            super().__init__(*args, hang=hang, **more)

    monkeypatch.setattr(dispatch, "Pulse", Watched)
    for kind, server in ((JobKind.RETENTION, "db1"), (JobKind.VERIFY, ""), (JobKind.FULL, "db1")):
        run_here(place, kind, server, lambda _run: Result(), report=silent)
    assert seen == [LONGEST_SILENCE, LONGEST_SILENCE, timedelta(seconds=1)]


def test_whoever_waits_for_a_removal_gives_up_and_names_its_holder(
    place: Wiring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wiring, "REMOVAL_SECONDS", 0.3)
    monkeypatch.setattr(wiring, "_LOOK_SECONDS", 0.01)
    with place.removing() as held:
        assert held
        with place.removing(wait=False) as second:
            assert not second
        with pytest.raises(BusyError, match="another process has held the removal lock") as caught, place.removing():
            pytest.fail("two at once")
    assert f"process {os.getpid()}" in caught.value.detail
    assert caught.value.retryable
    with (place.settings.spool / "locks" / "removal").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# -- a stop while the catalog does not answer


def test_a_stop_while_the_catalog_is_locked_ends_and_the_job_is_queued_again_later(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, "sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
    monkeypatch.setattr(worker, "GRACE", 0.3)
    monkeypatch.setattr(database, "BUSY_SECONDS", 600)
    settings = office.write(gold=POLICY.replace("attempts: 2", "attempts: 1"))
    with open_catalog(settings.catalog) as catalog:
        place = Wiring(settings, catalog)
        job = enqueue(place)
        one = Worker(place, grace=0.3)
        with one:
            until(lambda: bool(one._running))
            pid = one._running[0].process.child.pid
            lock = sqlite3.connect(office.base / "catalog.db", timeout=60, isolation_level=None)
            lock.execute("BEGIN EXCLUSIVE")
            began = time.monotonic()
            assert not one.stop()
            assert time.monotonic() - began < 300, "it waits for the grace, not for the catalog"
            until(lambda: not Path(f"/proc/{pid}/cwd").exists())
        lock.execute("ROLLBACK")
        lock.close()
        one._thread.join()
    with open_catalog(settings.catalog) as catalog:
        place = Wiring(settings, catalog)
        if state(place, job) is JobState.RUNNING:
            place.catalog.jobs.adopt(job.id, 1, "", place.clock())  # as after the end of this process
            abandon_dead(place)
        assert state(place, job) is JobState.CANCELLED
        assert successor(place, job).attempt == 1


def test_what_the_stop_had_to_kill_without_a_word_is_queued_again_at_the_next_start(place: Wiring) -> None:
    job = enqueue(place, attempt=2)
    assert place.catalog.jobs.claim("", place.clock()) is not None
    mark_stopped(place, job)
    abandon_dead(place)
    assert state(place, job) is JobState.CANCELLED
    assert successor(place, job).attempt == 2
    assert list((place.settings.spool / "stopped").iterdir()) == []


def test_what_killed_processes_left_is_removed_before_any_job_runs(office: Office, place: Wiring) -> None:
    left = office.base / "run" / "4711-abcdef"
    left.mkdir(parents=True)
    (left / ".lock").touch()
    (left / "o1.cnf").write_text("[client]\n")
    with Worker(place):
        until(lambda: not left.exists())


def test_retention_of_a_server_that_is_gone_does_not_succeed(place: Wiring) -> None:
    job = JobRecord(id=new_id(NOW), kind=JobKind.RETENTION, server="gone", state=JobState.RUNNING, queued_at=NOW)
    problem = perform(place, JobRun(job)).problem
    assert problem is not None
    assert "gone is not configured" in problem.message


# -- turns


def test_younger_jobs_do_not_take_what_an_older_one_waits_for(office: Office) -> None:
    for name, places in (("both", "[local, second]"), ("second", "[second]")):
        office.policies[name] = GOLD.replace("[local]", places)
    office.servers = {"a1": "gold", "a2": "gold", "a3": "gold", "b1": "second", "b2": "second", "c": "both"}
    with contextlib.suppress(ConfigurationError):  # the other destination follows
        office.write(gold=GOLD)
    text = office.file.read_text().replace(
        "destinations:\n", f"destinations:\n  second: {{type: filesystem, path: {office.base}/second}}\n"
    )
    office.file.write_text(text + "concurrency: {jobs: 9, per_destination: 2}\n")
    allowed = Admission(load_settings(office.file), ()).allows

    def job(server: str) -> JobRecord:
        return JobRecord(
            id=server,
            kind=JobKind.FULL,
            server=server,
            state=JobState.QUEUED,
            queued_at=NOW + timedelta(seconds=server not in ("a1", "a2", "b1", "c")),
        )

    running = [job("a1"), job("a2"), job("b1")]
    assert not allowed(job("c"), running), "local is full"
    assert not allowed(job("b2"), running), "the place left at second is c's"
    assert not allowed(job("a3"), running[1:]), "the place at local that became free is c's"
    assert allowed(job("c"), running[1:])
    assert allowed(job("b2"), running[:2]), "nobody older waits any more"


def test_an_owner_s_worker_is_part_of_its_name_and_lives_with_its_process() -> None:
    assert owner(3) != owner(4)
    assert owner_state(owner(3)) is True
