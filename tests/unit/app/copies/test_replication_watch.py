"""The service sees what is lacking, and queues one job at a time for it; copies take no place from other jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.alerts.rules import PROTECTION
from backupd.app.copies import missing_copies
from backupd.app.copies.missing_copies import ReplicaWatch, job_for
from backupd.app.copies.protection import protection_of
from backupd.app.jobs.admission import obstacle
from backupd.catalog.destinations import FAILING
from backupd.model.backup_record import HoldKind
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.catalog.installation import SERVER
from tests.support.service.shop import Shop

Make = Callable[..., Shop]


def queued(one: Shop) -> list[str]:
    return sorted(job.arguments["destination"] for job in one.catalog.jobs.list(SERVER, state=JobState.QUEUED))


def finish(one: Shop) -> None:
    for _ in queued(one):
        job = one.catalog.jobs.claim("me", one.clock(), runs_on=one.wiring.here)
        assert job is not None
        one.catalog.jobs.finish(job.id, JobState.SUCCEEDED, one.clock(), token=job.token)


def look(one: Shop, watch: ReplicaWatch) -> list[str]:
    watch.step(one.wiring, one.clock())
    return queued(one)


def test_a_new_backup_is_copied_and_verified_soon_one_job_for_each_place(shop: Make) -> None:
    one, watch = shop(), ReplicaWatch()
    assert look(one, watch) == ["offsite"], "at the beginning, whatever there is"
    finish(one)
    assert look(one, watch) == []
    one.add(1, days=0.01, destinations=("local",))
    assert look(one, watch) == ["local", "offsite"]
    assert look(one, watch) == ["local", "offsite"], "none twice"
    finish(one)
    assert look(one, watch) == [], "it was seen to"


def test_a_backup_that_comes_while_a_job_runs_gets_a_job_of_its_own_afterwards(shop: Make) -> None:
    one, watch = shop(), ReplicaWatch()
    look(one, watch)
    one.add(1, days=0.01, destinations=("local",))
    assert look(one, watch) == ["local", "offsite"]
    finish(one)
    assert look(one, watch) == ["offsite"]


def test_what_failed_is_tried_again_when_its_time_has_come_and_everything_each_hour(shop: Make) -> None:
    one, watch = shop(), ReplicaWatch()
    name = one.add(1, days=0.01, destinations=("local",))
    look(one, watch)
    finish(one)
    one.catalog.replications.expect("offsite", {name: 5}, one.clock())
    one.catalog.replications.failing(
        name, "offsite", one.clock(), not_before=one.clock() + timedelta(minutes=4), message="gone"
    )
    assert one.catalog.replications.list()[0].state == FAILING
    one.clock.move(minutes=3)
    assert look(one, watch) == []
    one.clock.move(minutes=1)
    assert look(one, watch) == ["offsite"]
    finish(one)
    one.catalog.replications.forget("offsite", [name])
    one.clock.move(minutes=57)
    assert look(one, watch) == ["local"], "an hour after the first look"
    finish(one)
    one.clock.move(minutes=3)
    assert look(one, watch) == ["offsite"]


def test_what_failed_at_one_place_is_tried_again_while_a_job_of_another_goes_on(shop: Make) -> None:
    one = shop(others=("offsite", "tape"))
    watch = ReplicaWatch()
    name = one.add(1, days=0.01, destinations=("local",))
    look(one, watch)
    finish(one)
    one.catalog.jobs.enqueue(job_for(one.wiring, SERVER, "tape"))
    one.add(2, days=0.01, destinations=("local",))
    look(one, watch)  # it is news at both, and the job of tape is not over
    for job in one.catalog.jobs.list(SERVER, state=JobState.QUEUED):
        if job.arguments["destination"] != "tape":
            one.catalog.jobs.finish(job.id, JobState.CANCELLED, one.clock(), token=0)
    one.catalog.replications.expect("offsite", {name: 5}, one.clock())
    one.catalog.replications.failing(
        name, "offsite", one.clock(), not_before=one.clock() + timedelta(minutes=4), message="gone"
    )
    look(one, watch)
    assert "offsite" not in queued(one)
    one.clock.move(minutes=4)
    assert "offsite" in look(one, watch)


def test_a_server_is_looked_at_again_only_when_something_calls_for_it(
    shop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, watch = shop(), ReplicaWatch()
    one.add(1, days=0.01)
    looked: list[str] = []
    monkeypatch.setattr(missing_copies, "look_at_protection", lambda _wiring, _known, name, _now: looked.append(name))

    def looks() -> int:
        looked.clear()
        look(one, watch)
        return len(looked)

    assert looks() == 1, "at the beginning"
    assert looks() == 0, "its jobs wait, and nothing else is to be done"
    finish(one)
    assert looks() == 0
    one.clock.move(minutes=59)
    assert looks() == 0
    one.clock.move(minutes=1)
    assert looks() == 1, "each hour"
    finish(one)
    name = one.add(2, days=0.01)
    assert looks() == 1, "a backup has come"
    one.catalog.backups.mark_copy_verified(name, "local", one.clock())
    assert looks() == 1, "a copy was verified, and jobs of before wait"
    one.catalog.holds.set(SERVER, HoldKind.PAUSE, "moving", "anna", one.clock())
    assert (looks(), looks()) == (1, 0)
    one.catalog.holds.release(SERVER, HoldKind.PAUSE)
    assert looks() == 1
    one.wiring = replace(one.wiring, settings=replace(one.wiring.settings, files={"other": Path("other.yaml")}))
    assert (looks(), looks()) == (1, 0), "other settings"
    one.clock.move(hours=-5)
    assert looks() == 1, "the clock was ahead"


def test_a_backup_that_stays_unprotected_is_reported_when_its_time_is_over(shop: Make) -> None:
    one, watch = shop(), ReplicaWatch()
    name = one.add(1, days=0.01, destinations=("local",))
    ends = one.catalog.backups.get(name).finished_at + protection_of(one.wiring, SERVER).within
    one.clock.move(seconds=(ends - one.clock()).total_seconds() - 60)
    look(one, watch)
    assert one.catalog.events.list(kind=PROTECTION.broken) == ()
    one.clock.move(minutes=2)
    look(one, watch)
    (event,) = one.catalog.events.list(kind=PROTECTION.broken)
    assert name in event.message


def test_nothing_is_expected_any_more_at_a_place_that_the_policy_does_not_name(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=0.01)
    one.catalog.replications.expect("offsite", {name: 5}, one.clock())
    one.catalog.replications.expect("former", {name: 5}, one.clock())
    look(one, ReplicaWatch())
    assert [row.destination for row in one.catalog.replications.list()] == ["offsite"]


def test_a_paused_server_gets_no_job(shop: Make) -> None:
    one = shop()
    one.add(1, days=0.01, destinations=("local",))
    one.catalog.holds.set(SERVER, HoldKind.PAUSE, "moving", "anna", one.clock())
    assert look(one, ReplicaWatch()) == []


def test_a_copy_to_a_slow_place_keeps_no_backup_from_starting(shop: Make) -> None:
    one = shop()
    settings, now = one.wiring.settings, one.clock()
    near, far = job_for(one.wiring, SERVER, "local"), job_for(one.wiring, SERVER, "offsite")
    copies = [replace(far, state=JobState.RUNNING) for _ in range(4)]
    backup = JobRecord("b", JobKind.FULL, SERVER, JobState.QUEUED, now)
    assert obstacle(settings, (), backup, copies) == ""
    assert obstacle(settings, (), near, [replace(backup, state=JobState.RUNNING)]) == ""
    assert "offsite" in obstacle(settings, (), far, copies[:2])
    assert "concurrency.jobs" in obstacle(settings, (), near, copies)
