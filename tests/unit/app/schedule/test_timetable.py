"""Policies, a real catalog and a clock that the test moves: what is queued when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.jobs.jobs import repetition
from backupd.app.runtime.clock_check import CAREFUL, ClockWatch, careful, note_step
from backupd.app.schedule import calendar as schedule
from backupd.app.schedule.calendar import Leg
from backupd.app.schedule.timetable import BUSY, NOT_RUNNING, Timetable
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.backup_record import HoldKind
from backupd.model.errors import RefusedError
from backupd.model.event import Severity
from backupd.model.job import JobRecord, JobState
from tests.support.service.house import GOLD, Clock, Office, at

SUNDAY = "2026-11-15T12:00:00+01:00"


@dataclass
class Service:
    """The part of the daemon that keeps the time, with a worker that only notes what it is given."""

    office: Office
    catalog: Catalog
    clock: Clock
    done: list[JobRecord]
    timetable: Timetable

    @classmethod
    def start(cls, office: Office, catalog: Catalog, clock: Clock) -> Service:
        timetable = Timetable(catalog)
        timetable.follow(office.write(), clock())
        service = cls(office, catalog, clock, [], timetable)
        service.look(NOT_RUNNING)
        return service

    def look(self, why: str = BUSY) -> None:
        self.timetable.handle(self.clock(), why)
        while (job := self.catalog.jobs.claim("worker", self.clock())) is not None:
            self.done.append(job)
            self.catalog.jobs.finish(job.id, JobState.SUCCEEDED, self.clock(), token=job.token)

    def run(self, until: datetime, step: timedelta = timedelta(minutes=10)) -> None:
        """Sleep from alarm to alarm, and look now and then besides."""
        while self.clock() < until:
            goal = min((self.clock() + step, until, *(m for m in self.timetable.coming() if m > self.clock())))
            self.clock.sleep(goal - self.clock())
            self.look()

    def ran(self, zone: str = "Europe/Berlin", *, leg: str = "physical") -> list[str]:
        return [
            f"{job.due_at.astimezone(ZoneInfo(zone)):%a %d %H:%M} {job.leg.removeprefix('physical.')}"
            for job in self.done
            if job.due_at is not None and job.leg.startswith(leg)
        ]

    def rows(self, state: JobState) -> list[JobRecord]:
        return [job for job in reversed(self.catalog.jobs.list(state=state)) if job.leg]


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


def test_two_weeks_are_a_full_on_sundays_and_increments_on_the_other_days(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-14T12:00+01:00")))
    service.run(at("2026-11-28T12:00+01:00"))
    assert service.ran() == [
        "Sun 15 02:00 full",
        *(
            f"{day} {number} 02:00 incremental"
            for day, number in zip(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat"), range(16, 22), strict=True)
        ),
        "Sun 22 02:00 full",
        *(
            f"{day} {number} 02:00 incremental"
            for day, number in zip(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat"), range(23, 29), strict=True)
        ),
    ]
    assert all(job.started_at == job.due_at for job in service.done)
    assert service.rows(JobState.MISSED) == service.rows(JobState.SKIPPED) == []
    assert [event for event in catalog.events.list() if event.severity is not Severity.INFO] == []


def test_full_once_and_increments_on_weekdays(office: Office, catalog: Catalog) -> None:
    office.policies["gold"] = GOLD.replace("0 2 * * sun", "0 2 15 11 *").replace("mon-sat", "mon-fri")
    service = Service.start(office, catalog, Clock(at("2026-11-14T12:00+01:00")))
    service.run(at("2026-11-28T12:00+01:00"))
    kinds = [row.rpartition(" ")[2] for row in service.ran()]
    assert kinds == ["full"] + ["incremental"] * 10
    assert not any(row.startswith(("Sat", "Sun")) for row in service.ran()[1:])


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        ("2026-03-28T12:00+01:00", ["Sun 29 03:00", "Mon 30 02:30"]),
        ("2026-10-24T12:00+02:00", ["Sun 25 02:30", "Mon 26 02:30"]),
    ],
)
def test_each_night_has_one_run_whatever_happens_to_summer_time(
    office: Office, catalog: Catalog, begin: str, expected: list[str]
) -> None:
    office.policies["gold"] = GOLD.replace("0 2 * * sun", "30 2 * * *").replace(', incremental: "0 2 * * mon-sat"', "")
    service = Service.start(office, catalog, Clock(at(begin)))
    service.run(at(begin) + timedelta(days=2), timedelta(minutes=5))
    assert service.ran() == [f"{row} full" for row in expected]


def test_leap_day_has_its_run(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2028-02-27T12:00+01:00")))
    service.run(at("2028-03-01T12:00+01:00"))
    assert service.ran() == ["Mon 28 02:00 incremental", "Tue 29 02:00 incremental", "Wed 01 02:00 incremental"]


def test_three_days_of_downtime_cost_one_run_for_each_leg(office: Office, catalog: Catalog) -> None:
    office.policies["gold"] = GOLD + 'verify: {schedule: "0 12 * * *"}\ntest_restore: {schedule: "every 6h"}\n'
    clock = Clock(at("2026-11-16T12:30+01:00"))
    Service.start(office, catalog, clock)
    clock.sleep(timedelta(days=3))
    service = Service.start(office, catalog, clock)
    assert Counter(job.leg for job in service.done) == {
        "physical.incremental": 1,
        "verify": 1,
        "test_restore": 1,
        "challenge": 1,
    }
    missed = {job.leg: job for job in service.rows(JobState.MISSED)}
    assert {job.previous for job in service.done} == {job.id for job in missed.values()}
    assert missed["physical.incremental"].message == (
        "3 runs were missed between 2026-11-17T01:00:00Z and 2026-11-19T01:00:00Z because the service was not running"
    )
    assert missed["test_restore"].message.startswith("12 runs were missed")
    assert {event.kind for event in catalog.events.list()} == {"job-missed"}
    service.look()
    assert len(service.done) == 4


def test_a_missed_full_stands_for_the_missed_increments(office: Office, catalog: Catalog) -> None:
    clock = Clock(at("2026-11-20T12:00+01:00"))
    Service.start(office, catalog, clock)
    clock.sleep(timedelta(days=4))
    service = Service.start(office, catalog, clock)
    assert service.ran() == ["Sun 22 02:00 full"]
    assert {job.leg for job in service.rows(JobState.MISSED)} == {"physical.full", "physical.incremental", "challenge"}


def test_a_new_server_begins_now_and_one_that_comes_back_is_asked_about_the_time_between(
    office: Office, catalog: Catalog
) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    service.run(at("2026-11-17T12:00+01:00"))
    service.timetable.follow(office.write(servers={"db2": "gold"}), service.clock())
    service.look(NOT_RUNNING)
    service.run(at("2026-11-18T12:00+01:00"))
    assert [job.server for job in service.done if job.server] == ["db1", "db2"]
    service.timetable.follow(office.write(servers={"db1": "gold", "db2": "gold"}), service.clock())
    service.look()
    (missed,) = service.rows(JobState.MISSED)
    assert (missed.server, missed.leg) == ("db1", "physical.incremental")
    assert missed.message == "the run due at 2026-11-18T01:00:00Z was missed because it was not configured"
    assert service.done[-1].previous == missed.id
    ended = catalog.events.list(kind="schedule-ended")
    assert {(event.server, event.severity) for event in ended} == {("db1", Severity.WARNING)}
    assert "is no longer configured" in ended[0].message
    assert service.ran()[-1] == "Wed 18 02:00 incremental"


def test_a_cadence_that_changes_first_accounts_for_the_one_before(office: Office, catalog: Catalog) -> None:
    clock = Clock(at("2026-11-16T12:00+01:00"))
    Service.start(office, catalog, clock)
    clock.sleep(timedelta(days=3))
    office.policies["gold"] = GOLD.replace("0 2 * * mon-sat", "0 9 * * *")
    service = Service.start(office, catalog, clock)
    (missed,) = [job for job in service.rows(JobState.MISSED) if job.server]
    assert missed.message == (
        "3 runs were missed between 2026-11-17T01:00:00Z and 2026-11-19T01:00:00Z because the service was not running"
    )
    assert [(job.leg, job.previous) for job in service.done if job.server] == [("physical.incremental", missed.id)]
    service.run(at("2026-11-20T12:00+01:00"))
    assert service.ran()[-1] == "Fri 20 09:00 incremental"


def test_a_schedule_that_is_taken_out_says_so_and_what_it_missed(office: Office, catalog: Catalog) -> None:
    clock = Clock(at("2026-11-16T12:00+01:00"))
    Service.start(office, catalog, clock)
    clock.sleep(timedelta(days=3))
    office.policies["gold"] = GOLD.replace(', incremental: "0 2 * * mon-sat"', "")
    service = Service.start(office, catalog, clock)
    (missed,) = [job for job in service.rows(JobState.MISSED) if job.server]
    assert (missed.leg, missed.due_at) == ("physical.incremental", at("2026-11-19T02:00+01:00"))
    assert [job for job in service.done if job.server] == []
    (ended,) = catalog.events.list(kind="schedule-ended")
    assert "physical.incremental of db1" in ended.message


SETS = """\
logical:
  schedule: "0 4 * * *"
  sets:
    money: {schedule: "every 12h", tables: {include: ["shop.pay_*"]}}
    rare: {schedule: "0 5 * * wed", tables: {include: ["shop.archive"]}}
"""


def test_each_set_of_tables_runs_at_its_own_times_with_its_name(office: Office, catalog: Catalog) -> None:
    office.write(gold=GOLD + SETS)
    service = Service.start(office, catalog, Clock(at(SUNDAY)))
    service.run(at("2026-11-19T12:00:00+01:00"))
    assert service.ran(leg="logical") == [
        "Sun 15 13:00 logical/money",
        "Mon 16 01:00 logical/money",
        "Mon 16 04:00 logical",
        "Mon 16 13:00 logical/money",
        "Tue 17 01:00 logical/money",
        "Tue 17 04:00 logical",
        "Tue 17 13:00 logical/money",
        "Wed 18 01:00 logical/money",
        "Wed 18 04:00 logical",
        "Wed 18 05:00 logical/rare",
        "Wed 18 13:00 logical/money",
        "Thu 19 01:00 logical/money",
        "Thu 19 04:00 logical",
    ]
    dumps = [job for job in service.done if job.leg.startswith("logical")]
    assert {(job.leg, str(job.kind), job.arguments["set"]) for job in dumps} == {
        ("logical", "logical", ""),
        ("logical/money", "logical", "money"),
        ("logical/rare", "logical", "rare"),
    }


def test_downtime_costs_each_set_one_run_and_a_set_that_is_taken_out_says_so(office: Office, catalog: Catalog) -> None:
    office.write(gold=GOLD + SETS)
    service = Service.start(office, catalog, Clock(at(SUNDAY)))
    clock = Clock(at("2026-11-18T14:00:00+01:00"))
    service = Service.start(office, catalog, clock)
    missed = {job.leg: job.message for job in service.rows(JobState.MISSED)}
    assert missed["logical/money"].startswith("7 runs were missed")
    assert missed["logical"].startswith("3 runs were missed")
    assert sorted(job.leg for job in service.done if job.leg.startswith("logical")) == [
        "logical",
        "logical/money",
        "logical/rare",
    ]
    office.write(gold=GOLD)
    Service.start(office, catalog, Clock(at("2026-11-19T03:00:00+01:00")))
    ended = [event.subject for event in catalog.events.list() if event.kind == "schedule-ended"]
    assert sorted(ended) == ["logical", "logical/money", "logical/rare"]
    assert catalog.jobs.list(state=JobState.MISSED, leg="logical/money", limit=1)[0].message.startswith(
        "the run due at 2026-11-19T00:00:00Z was missed"
    )


def waits(service: Service, clock: Clock, hours: int) -> JobRecord:
    """A run that failed, and its repetition, as the worker's process leaves them."""
    service.timetable.handle(clock(), BUSY)
    job = service.catalog.jobs.claim("worker", clock(), allowed=lambda job, _running: bool(job.server))
    assert job is not None
    wiring = Wiring(load_settings(service.office.file), service.catalog, clock)
    again = replace(repetition(wiring, job, attempt=2, wait=timedelta(hours=hours)), runs_on=job.runs_on)
    service.catalog.jobs.finish(job.id, JobState.FAILED, clock(), token=job.token, then=[again])
    return again


def test_a_repetition_that_waits_longer_than_the_next_run_makes_room_for_it(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    service.clock.sleep(timedelta(hours=14))
    again = waits(service, service.clock, 48)
    service.run(at("2026-11-18T12:00+01:00"))
    row = catalog.jobs.get(again.id)
    (run,) = [job for job in service.done if job.server]
    assert (row.state, row.message) == (JobState.SKIPPED, f"the next run came before it: job {run.id}")
    assert service.ran() == ["Wed 18 02:00 incremental"]
    assert run.previous == again.id


def test_a_repetition_that_starts_in_this_moment_is_not_skipped_and_nothing_is_written(
    office: Office, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    service.clock.sleep(timedelta(hours=14))
    again = waits(service, service.clock, 24)
    service.clock.sleep(timedelta(hours=24))
    before = catalog.schedules.all()
    real = catalog.schedules.settle

    def slowly(*args: Any, **kwargs: Any) -> None:
        assert catalog.jobs.claim("worker", service.clock()) is not None
        real(*args, **kwargs)

    monkeypatch.setattr(catalog.schedules, "settle", slowly)
    with pytest.raises(RefusedError, match="does not wait any more"):
        service.timetable.handle(service.clock(), BUSY)
    monkeypatch.undo()
    assert catalog.schedules.all() == before
    service.timetable.handle(service.clock(), BUSY)
    (skipped,) = service.rows(JobState.SKIPPED)
    assert f"{again.id}) still runs" in skipped.message


def test_a_clock_that_was_years_ahead_does_not_keep_a_repetition_waiting_for_years(
    office: Office, catalog: Catalog
) -> None:
    clock = Clock(at("2031-11-16T12:00+01:00"))
    service = Service.start(office, catalog, clock)
    clock.sleep(timedelta(days=1))
    again = waits(service, clock, 1)
    clock.now = at("2026-11-16T12:00+01:00")
    service.timetable.handle(clock(), BUSY, settled=False)
    assert catalog.jobs.get(again.id).not_before == again.not_before
    service.look()
    assert [job.id for job in service.done if job.server] == [again.id]
    (event,) = catalog.events.list(kind="clock-jump")
    assert "and 2 jobs were queued at 2031-11-17" in event.message  # the look at the keys is one of them
    assert again.id in event.detail
    service.run(at("2026-11-18T12:00+01:00"))
    assert service.ran()[1:] == ["Tue 17 02:00 incremental", "Wed 18 02:00 incremental"]


def test_a_leg_that_cannot_be_computed_is_told_once_and_stops_no_other(
    office: Office, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def due_times(leg: Leg, *args: Any, **kwargs: Any) -> Iterator[datetime]:
        if leg.leg == "verify":
            raise ValueError("year 10240 is out of range")
        return schedule.due_times(leg, *args, **kwargs)

    monkeypatch.setattr("backupd.app.schedule.timetable.due_times", due_times)
    office.policies["gold"] = GOLD + 'verify: {schedule: "0 12 * * *"}\n'
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    for _ in range(3):
        service.run(service.clock() + timedelta(hours=8))
        service.timetable.refresh(service.clock())
    assert service.ran() == ["Tue 17 02:00 incremental"]
    (event,) = catalog.events.list(kind="schedule-broken")
    assert event.message == "the schedule db1/verify cannot be followed: ValueError: year 10240 is out of range"
    monkeypatch.undo()
    service.timetable.refresh(service.clock())
    service.run(service.clock() + timedelta(days=1))
    assert service.ran(leg="verify") != []


def test_a_pause_of_everything_stops_what_concerns_the_installation_too(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    catalog.holds.set("*", HoldKind.PAUSE, "moving", "anna", service.clock())
    service.run(at("2026-11-17T12:00+01:00"))
    assert service.done == []
    assert {job.leg for job in service.rows(JobState.SKIPPED)} == {"physical.incremental", "challenge"}
    assert {event.severity for event in catalog.events.list(kind="job-skipped")} == {Severity.WARNING}


def test_a_running_job_survives_the_removal_of_its_server(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    service.clock.sleep(timedelta(hours=14))
    service.timetable.handle(service.clock(), BUSY)
    running = catalog.jobs.claim("worker", service.clock())
    assert running is not None
    service.timetable.follow(office.write(servers={"db2": "gold"}), service.clock())
    service.look()
    assert catalog.jobs.get(running.id).state is JobState.RUNNING


def test_another_cadence_or_zone_begins_now(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    service.timetable.follow(office.write(gold=GOLD.replace("0 2 * * mon-sat", "0 9 * * *")), service.clock())
    service.look()
    assert service.done == []
    service.timetable.follow(
        office.write(gold=GOLD.replace("0 2 * * mon-sat", "0 9 * * *").replace("Europe/Berlin", "America/New_York")),
        service.clock(),
    )
    service.run(at("2026-11-16T21:00+01:00"))
    assert service.ran("America/New_York") == ["Mon 16 09:00 incremental"]


def test_a_clock_set_back_by_an_hour_runs_nothing_twice(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    service.run(at("2026-11-17T02:30+01:00"))
    service.clock.now -= timedelta(hours=1)
    service.run(at("2026-11-18T12:00+01:00"))
    assert service.ran() == ["Tue 17 02:00 incremental", "Wed 18 02:00 incremental"]
    assert service.rows(JobState.MISSED) == []


def test_a_schedule_dealt_with_years_ahead_goes_on_from_now(office: Office, catalog: Catalog) -> None:
    clock = Clock(at("2030-11-16T12:00+01:00"))
    Service.start(office, catalog, clock)  # the machine came up with a wrong clock
    clock.now = at("2026-11-16T12:00+01:00")
    service = Service.start(office, catalog, clock)
    (event,) = catalog.events.list(kind="clock-jump")
    assert "3 schedules" in event.message
    assert "2030-11-16" in event.message
    service.run(at("2026-11-18T12:00+01:00"))
    assert service.ran() == ["Tue 17 02:00 incremental", "Wed 18 02:00 incremental"]
    assert len(catalog.events.list(kind="clock-jump")) == 1


def test_a_machine_that_comes_up_in_1970_believes_its_schedules_more_than_its_clock(
    office: Office, catalog: Catalog
) -> None:
    clock = Clock(at("2026-11-16T12:00+01:00"))
    service, before = Service.start(office, catalog, clock), catalog.schedules.all()
    clock.now = at("1970-01-01T00:00Z")
    watch = watched(clock)
    service.timetable.handle(clock(), NOT_RUNNING, settled=watch.settled)
    clock.now = at("2026-11-16T12:10+01:00")  # the time service has found somebody to ask
    watch.look()
    assert watch.doubtful
    clock.sleep(timedelta(minutes=5))
    watch.look()
    assert (watch.doubtful, watch.settled) == (False, True)
    service.timetable.handle(clock(), NOT_RUNNING, settled=watch.settled)
    assert catalog.schedules.all() == before
    assert catalog.jobs.list() == ()


def test_a_pause_skips_and_says_so_and_nothing_is_made_up_for_afterwards(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    catalog.holds.set("db1", HoldKind.PAUSE, "moving disks", "anna", service.clock())
    service.run(at("2026-11-17T12:00+01:00"))
    assert service.ran() == []
    (skipped,) = service.rows(JobState.SKIPPED)
    assert "moving disks" in skipped.message
    catalog.holds.release("db1", HoldKind.PAUSE)
    service.run(at("2026-11-18T12:00+01:00"))
    assert service.ran() == ["Wed 18 02:00 incremental"]


def test_a_run_that_takes_too_long_is_not_started_twice(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    service.clock.sleep(timedelta(hours=14))
    service.timetable.handle(service.clock(), BUSY)
    running = catalog.jobs.claim("worker", service.clock())
    assert running is not None
    service.run(at("2026-11-18T12:00+01:00"))
    (skipped,) = service.rows(JobState.SKIPPED)
    assert running.id in skipped.message
    assert [event.kind for event in catalog.events.list()] == ["job-skipped"]


def test_of_two_services_only_one_deals_with_a_due_time(office: Office, catalog: Catalog) -> None:
    clock = Clock(at("2026-11-16T12:00+01:00"))
    one, other = Service.start(office, catalog, clock), Service.start(office, catalog, clock)
    clock.sleep(timedelta(hours=14))
    one.look()
    with pytest.raises(RefusedError, match="changed by another process"):
        other.look()
    other.timetable.refresh(clock())
    other.look()
    assert len(catalog.jobs.list()) == 1


def test_what_is_due_and_its_row_are_written_together_or_not_at_all(office: Office, catalog: Catalog) -> None:
    service = Service.start(office, catalog, Clock(at("2026-11-16T12:00+01:00")))
    before = catalog.schedules.all()
    changed = [row for row in before.values() if row.server]
    broken = JobRecord(id="x", kind="physical-full", server="db1", state=JobState.SUCCEEDED, queued_at=service.clock())
    with pytest.raises(ValueError, match="no job begins"):
        catalog.schedules.settle(
            before,
            [row.__class__(row.server, row.leg, row.cadence, row.since, datetime.now(UTC)) for row in changed],
            jobs=[broken],
        )
    assert catalog.schedules.all() == before


# -- a clock that cannot be believed


def watched(clock: Clock) -> ClockWatch:
    return ClockWatch(clock, clock.running, clock.passing)


def test_time_that_passes_is_no_jump() -> None:
    clock = Clock(at(SUNDAY))
    watch = watched(clock)
    for _ in range(100):
        clock.sleep(timedelta(seconds=5))
        clock.now += timedelta(milliseconds=100)  # a time service is at work
        assert watch.look() is None


def test_a_machine_that_stands_still_while_its_clocks_are_read_has_set_none_of_them() -> None:
    clock = Clock(at(SUNDAY))
    stands = False

    def stopped(after: Callable[[], Any]) -> Callable[[], Any]:
        """Then an hour passes, once."""

        def read() -> Any:
            nonlocal stands
            found = after()
            if stands:
                stands = False
                clock.sleep(timedelta(hours=1))
            return found

        return read

    for watch in (
        ClockWatch(stopped(clock), clock.running, clock.passing),
        ClockWatch(clock, stopped(clock.running), clock.passing),
        ClockWatch(clock, clock.running, stopped(clock.passing)),
    ):
        stands = True
        assert watch.look() is None
        assert not stands
        assert watch.now == clock.now


def test_for_a_day_after_it_was_set_far_ahead_nothing_expires_by_the_clock(catalog: Catalog) -> None:
    then, far, hour = at(SUNDAY), timedelta(days=400), timedelta(hours=1)
    assert careful(catalog, then) == then
    note_step(catalog, then + hour, hour)
    assert careful(catalog, then + hour) == then + hour, "an hour is believed"
    note_step(catalog, then + far, far)
    assert careful(catalog, then + far + hour) == then + hour
    note_step(catalog, then + 2 * far + hour, far)
    assert careful(catalog, then + 2 * far + 2 * hour) == then + 2 * hour, "twice"
    assert careful(catalog, then + hour) == then + hour, "it was set right"
    assert careful(catalog, then + 2 * far + hour + CAREFUL) == then + 2 * far + hour + CAREFUL


def test_a_clock_four_years_ahead_is_not_believed_before_it_has_stood_for_a_while(
    office: Office, catalog: Catalog
) -> None:
    clock = Clock(at("2026-11-16T12:00+01:00"))
    service, watch = Service.start(office, catalog, clock), watched(clock)

    def minute() -> None:
        for _ in range(12):
            clock.sleep(timedelta(seconds=5))
            watch.look()
            if not watch.doubtful:
                service.look()

    clock.now += timedelta(days=4 * 365)
    jump = watch.look()
    assert jump is not None
    assert jump.step == timedelta(days=4 * 365)
    minute()
    clock.now -= timedelta(days=4 * 365)
    assert watch.look() is not None
    assert not watch.doubtful
    minute()
    assert service.done == []
    assert catalog.jobs.list() == ()
    service.run(at("2026-11-17T12:00+01:00"))
    assert service.ran() == ["Tue 17 02:00 incremental"]


def test_a_clock_that_stays_where_it_was_set_is_believed_after_five_minutes() -> None:
    clock = Clock(at(SUNDAY))
    watch = watched(clock)
    clock.now += timedelta(days=30)
    watch.look()
    doubts = []
    for _ in range(65):
        clock.sleep(timedelta(seconds=5))
        watch.look()
        doubts.append(watch.doubtful)
    assert doubts[:59] == [True] * 59
    assert not doubts[-1]


def test_sleep_is_told_from_a_clock_that_was_set() -> None:
    clock = Clock(at(SUNDAY))
    watch = watched(clock)
    clock.sleep(timedelta(hours=9))
    clock.asleep += 9 * 3600
    jump = watch.look()
    assert jump is not None
    assert (jump.step, jump.slept) == (timedelta(0), timedelta(hours=9))
    assert not watch.doubtful
    clock.now -= timedelta(hours=1)
    back = watch.look()
    assert back is not None
    assert back.step == -timedelta(hours=1)
    assert not watch.doubtful
