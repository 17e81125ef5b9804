"""What becomes of due times that have passed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.app.schedule import timetable as missed
from backupd.app.schedule.calendar import Leg, due_times, start_of
from backupd.app.schedule.timetable import (
    BUSY,
    NOT_RUNNING,
    TOLERANCE,
    Action,
    Outcome,
    Standing,
    absorb,
    conclude,
    given_up,
    records,
)
from backupd.model.event import Severity
from backupd.model.job import JobKind, JobRecord, JobState

NIGHT = "0 2 * * *"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def full(
    cadence: str = NIGHT,
    *,
    server: str = "db1",
    jitter: str = "",
    blackout: tuple[str, ...] = (),
    catch_up: bool = True,
) -> Leg:
    minutes = timedelta(minutes=int(jitter.removesuffix("m") or 0))
    return Leg(server, "physical.full", cadence, JobKind.FULL, "UTC", minutes, blackout, catch_up)


def increments(cadence: str = NIGHT, server: str = "db1") -> Leg:
    return Leg(server, "physical.incremental", cadence, JobKind.INCREMENTAL, "UTC")


def open_job(state: JobState = JobState.RUNNING) -> JobRecord:
    return JobRecord(
        id="20261120T020000Z-00000001",
        kind="physical-full",
        server="db1",
        state=state,
        queued_at=at("2026-11-20T02:00Z"),
        leg="physical.full",
    )


def account(
    leg: Leg,
    handled: datetime,
    now: datetime,
    *,
    why: str,
    open_job: JobRecord | None = None,
    waiting: tuple[str, ...] = (),
    paused: str | None = None,
) -> tuple[Action, ...]:
    return missed.account(leg, handled, now, Standing(why, open_job, waiting, paused))


def told(actions: tuple[Action, ...]) -> list[tuple[str, str]]:
    return [(str(action.outcome), action.due.strftime("%d %H:%M")) for action in actions]


def test_a_run_whose_time_has_just_come_starts() -> None:
    found = account(full(), at("2026-11-20T02:00Z"), at("2026-11-21T02:00:00.3Z"), why=BUSY)
    assert told(found) == [("start", "21 02:00")]


def test_before_its_time_nothing_happens() -> None:
    assert account(full(), at("2026-11-20T02:00Z"), at("2026-11-21T01:59:59Z"), why=BUSY) == ()


def test_a_restart_of_a_minute_costs_nothing() -> None:
    found = account(full(), at("2026-11-20T02:00Z"), at("2026-11-21T02:04Z"), why=NOT_RUNNING)
    assert told(found) == [("start", "21 02:00")]


def test_three_days_of_downtime_are_one_missed_row_and_one_run() -> None:
    found = account(full(), at("2026-11-17T02:00Z"), at("2026-11-20T12:00Z"), why=NOT_RUNNING)
    assert told(found) == [("missed", "20 02:00"), ("catch-up", "20 02:00")]
    assert found[0].message == (
        "3 runs were missed between 2026-11-18T02:00:00Z and 2026-11-20T02:00:00Z because the service was not running"
    )


def test_the_last_of_several_starts_on_time_and_the_others_are_missed() -> None:
    found = account(full("0 * * * *"), at("2026-11-20T02:00Z"), at("2026-11-20T06:01Z"), why=NOT_RUNNING)
    assert told(found) == [("missed", "20 05:00"), ("start", "20 06:00")]


def test_without_catch_up_it_is_only_said() -> None:
    found = account(full(catch_up=False), at("2026-11-17T02:00Z"), at("2026-11-20T12:00Z"), why=NOT_RUNNING)
    assert told(found) == [("missed", "20 02:00")]
    assert "by hand" in found[0].hint


def test_jitter_widens_the_tolerance() -> None:
    leg = full(jitter="60m")
    due = at("2026-11-21T02:00Z")
    start = start_of(leg, due)
    assert start > due
    assert account(leg, at("2026-11-20T02:00Z"), start - timedelta(seconds=1), why=BUSY) == ()
    assert told(account(leg, at("2026-11-20T02:00Z"), start + TOLERANCE, why=BUSY)) == [("start", "21 02:00")]
    assert told(account(leg, at("2026-11-20T02:00Z"), start + TOLERANCE * 2, why=BUSY))[0][0] == "missed"


def test_a_run_is_skipped_while_the_one_before_it_goes_on() -> None:
    found = account(full(), at("2026-11-20T02:00Z"), at("2026-11-21T02:00Z"), why=BUSY, open_job=open_job())
    assert told(found) == [("skipped", "21 02:00")]
    assert "still runs" in found[0].message
    assert "20261120T020000Z-00000001" in found[0].message
    waiting = account(
        full(), at("2026-11-20T02:00Z"), at("2026-11-21T02:00Z"), why=BUSY, open_job=open_job(JobState.QUEUED)
    )
    assert "still waits" in waiting[0].message


def test_what_was_missed_is_not_made_up_for_beside_a_run_that_waits_already() -> None:
    found = account(
        full(), at("2026-11-17T02:00Z"), at("2026-11-20T12:00Z"), why=NOT_RUNNING, open_job=open_job(JobState.QUEUED)
    )
    assert told(found) == [("missed", "20 02:00")]


def test_a_run_that_is_due_takes_the_place_of_repetitions_that_wait() -> None:
    now = at("2026-11-21T02:00Z")
    found = account(full(), at("2026-11-20T02:00Z"), now, why=BUSY, waiting=("one", "two"))
    assert told(found) == [("start", "21 02:00")]
    made = records(found, now, lambda _now: "three")
    assert made.skipped == dict.fromkeys(("one", "two"), "the next run came before it: job three")
    assert made.jobs[0].previous == "one"
    late = account(full(), at("2026-11-17T02:00Z"), at("2026-11-20T12:00Z"), why=NOT_RUNNING, waiting=("one",))
    assert told(late) == [("missed", "20 02:00"), ("catch-up", "20 02:00")]
    assert late[-1].replaces == ("one",)
    running = account(full(), at("2026-11-20T02:00Z"), now, why=BUSY, open_job=open_job(), waiting=("one",))
    assert records(running, now).skipped == {}


def test_an_increment_that_a_full_backup_stands_for_takes_no_place() -> None:
    now = at("2026-11-21T02:00Z")
    actions = [
        action
        for leg in (full(), increments())
        for action in account(leg, at("2026-11-20T02:00Z"), now, why=BUSY, waiting=(leg.leg,))
    ]
    assert list(records(absorb(actions), now).skipped) == ["physical.full"]


def test_a_schedule_that_ends_starts_what_is_due_and_would_have_started_later() -> None:
    leg = full("0 * * * *", blackout=("08:00-12:00",))
    now = at("2026-11-20T10:30Z")
    found = conclude(leg, at("2026-11-20T07:00Z"), now, Standing(BUSY))
    assert told(found) == [("start", "20 10:00")]
    assert found[0].not_before == at("2026-11-20T12:00Z")
    late = conclude(leg, at("2026-11-19T07:00Z"), now, Standing(BUSY))
    assert told(late)[-1] == ("skipped", "20 10:00")
    assert sum(action.outcome in missed.STARTING for action in late) == 1
    assert told(conclude(leg, at("2026-11-20T07:00Z"), now, Standing(BUSY, paused="x"))) == [("skipped", "20 10:00")]
    assert told(conclude(leg, at("2026-11-20T07:00Z"), now, Standing(BUSY, open_job()))) == [("skipped", "20 10:00")]
    assert conclude(leg, at("2026-11-20T10:00Z"), now, Standing(BUSY)) == ()


def test_of_a_schedule_that_is_gone_it_is_only_said_what_it_missed() -> None:
    assert told(given_up(full(), at("2026-11-17T02:00Z"), at("2026-11-20T12:00Z"), BUSY)) == [("missed", "20 02:00")]
    assert given_up(full(), at("2026-11-20T02:00Z"), at("2026-11-20T12:00Z"), BUSY) == ()
    (many,) = given_up(full("* * * * *"), at("2020-11-17T02:00Z"), at("2026-11-20T12:00Z"), BUSY)
    assert many.due == at("2026-11-20T12:00Z")


def test_nothing_of_a_paused_server_starts_or_is_made_up_for() -> None:
    on_time = account(full(), at("2026-11-20T02:00Z"), at("2026-11-21T02:00Z"), why=BUSY, paused="moving disks")
    assert told(on_time) == [("skipped", "21 02:00")]
    assert [event.severity for event in records(on_time, at("2026-11-21T02:00Z")).events] == [Severity.WARNING]
    assert "moving disks" in on_time[0].message
    late = account(full(), at("2026-11-17T02:00Z"), at("2026-11-20T12:00Z"), why=NOT_RUNNING, paused="moving disks")
    assert told(late) == [("skipped", "20 02:00")]


def test_a_blackout_defers_and_several_deferred_runs_are_one() -> None:
    leg = full("0 * * * *", blackout=("08:00-12:00",))
    handled = at("2026-11-20T07:00Z")
    assert account(leg, handled, at("2026-11-20T11:59Z"), why=BUSY) == ()
    found = account(leg, handled, at("2026-11-20T12:00Z"), why=BUSY)
    assert told(found) == [("skipped", "20 11:00"), ("start", "20 12:00")]
    assert "4 runs did not start" in found[0].message
    assert "blackout" in found[0].message


def test_a_run_made_up_for_waits_for_the_end_of_a_blackout() -> None:
    leg = full(blackout=("08:00-18:00",))
    found = account(leg, at("2026-11-17T02:00Z"), at("2026-11-20T12:00Z"), why=NOT_RUNNING)
    assert found[-1].outcome is Outcome.CATCH_UP
    assert found[-1].not_before == at("2026-11-20T18:00Z")


def test_years_of_minutes_are_accounted_for_without_counting_them_all() -> None:
    found = account(full("* * * * *"), at("2020-11-17T02:00Z"), at("2026-11-20T12:30:10Z"), why=NOT_RUNNING)
    assert told(found) == [("missed", "20 12:29"), ("start", "20 12:30")]
    assert found[0].message.startswith("more than 1,000 runs were missed between 2020-11-17T02:01:00Z and 2026-11-20T1")


def test_a_full_backup_made_up_for_stands_for_missed_increments_of_its_server_only() -> None:
    now = at("2026-11-20T12:00Z")
    actions = [
        action
        for leg in (full(), increments("0 5 * * *"), increments("0 5 * * *", server="db2"))
        for action in account(leg, at("2026-11-17T06:00Z"), now, why=NOT_RUNNING)
    ]
    kept = absorb(actions)
    assert [(str(action.outcome), action.leg.server, action.leg.leg) for action in kept] == [
        ("missed", "db1", "physical.full"),
        ("catch-up", "db1", "physical.full"),
        ("missed", "db1", "physical.incremental"),
        ("missed", "db2", "physical.incremental"),
        ("catch-up", "db2", "physical.incremental"),
    ]
    assert "replaces it" in kept[2].hint


def test_an_increment_does_not_start_beside_a_full_backup_that_starts_now() -> None:
    now = at("2026-11-20T05:01Z")
    kept = absorb(
        (
            *account(full(), at("2026-11-17T06:00Z"), now, why=NOT_RUNNING),
            *account(increments("0 5 * * *"), at("2026-11-19T06:00Z"), now, why=NOT_RUNNING),
        )
    )
    assert told(kept) == [("missed", "20 02:00"), ("catch-up", "20 02:00"), ("skipped", "20 05:00")]


def test_rows_say_what_was_due_and_what_makes_up_for_it() -> None:
    now = at("2026-11-20T12:00Z")
    numbers = count(1)
    made = records(account(full(), at("2026-11-17T02:00Z"), now, why=NOT_RUNNING), now, lambda _now: str(next(numbers)))
    row, made_up = made.jobs
    assert (row.state, row.due_at, row.finished_at) == (JobState.MISSED, at("2026-11-20T02:00Z"), now)
    assert (made_up.state, made_up.due_at, made_up.previous) == (JobState.QUEUED, row.due_at, row.id)
    (event,) = made.events
    assert (event.kind, event.severity, event.server, event.subject, event.job_id) == (
        "job-missed",
        Severity.WARNING,
        "db1",
        "physical.full",
        row.id,
    )


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cadence=st.sampled_from(["* * * * *", "*/7 * * * *", "0 * * * *", "30 2 * * 1-5", "every 5h", "0 0 29 2 *"]),
    gap=st.integers(0, 2500),
    seconds=st.integers(0, 59),
    jitter=st.sampled_from(["", "3m", "90m"]),
    blackout=st.sampled_from([(), ("08:00-18:00",), ("sat,sun 00:00-24:00", "22:00-02:00")]),
    paused=st.sampled_from([None, None, "why"]),
    busy=st.booleans(),
    catch_up=st.booleans(),
)
def test_everything_due_is_accounted_for_once_and_at_most_one_run_starts(
    cadence: str,
    gap: int,
    seconds: int,
    jitter: str,
    blackout: tuple[str, ...],
    paused: str | None,
    busy: bool,
    catch_up: bool,
) -> None:
    leg = full(cadence, jitter=jitter, blackout=blackout, catch_up=catch_up)
    handled = at("2028-02-10T11:00Z")
    now = handled + timedelta(minutes=gap * (1 if "*" in cadence[:3] else 15), seconds=seconds)
    found = account(leg, handled, now, why=NOT_RUNNING, open_job=open_job() if busy else None, paused=paused)
    begun = [due for due in due_times(leg, handled, until=now) if start_of(leg, due) <= now]
    if not begun:
        assert found == ()
        return
    assert found[-1].due == begun[-1]
    assert [action.due for action in found] == sorted(action.due for action in found)
    starting = [action for action in found if action.outcome in {Outcome.START, Outcome.CATCH_UP}]
    assert len(starting) <= (0 if busy or paused else 1)
    assert account(leg, found[-1].due, now, why=NOT_RUNNING) == ()
    for action in starting:
        begin = max(now, action.not_before or now)
        assert start_of(full(blackout=blackout), begin) == begin or action.outcome is Outcome.START
