"""The calendar, against an oracle that walks through every minute of the clock on the wall."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.app.schedule.calendar import AlarmClock, Leg, due_times, last_due, next_runs, start_of
from backupd.model.job import JobKind

MINUTE = timedelta(minutes=1)
CHANGES = [  # a zone and a moment shortly before its clocks are changed
    ("Europe/Berlin", "2026-03-28T12:00+01:00"),
    ("Europe/Berlin", "2026-10-24T12:00+02:00"),
    ("Australia/Lord_Howe", "2026-10-03T12:00+10:30"),
    ("Australia/Lord_Howe", "2026-04-04T12:00+11:00"),
    ("America/Sao_Paulo", "2018-11-03T12:00-03:00"),
    ("America/Sao_Paulo", "2019-02-16T12:00-02:00"),
    ("America/New_York", "2026-03-07T12:00-05:00"),
    ("America/New_York", "2026-10-31T12:00-04:00"),
    ("Pacific/Apia", "2011-12-28T12:00-10:00"),
    ("Asia/Kathmandu", "2026-02-27T12:00+05:45"),
    ("Africa/Casablanca", "2026-02-14T12:00+01:00"),
    ("UTC", "2028-02-28T00:00+00:00"),
    ("UTC", "2026-12-30T00:00+00:00"),
]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def shown(cadence: str, zone: str, after: str, count: int) -> list[str]:
    """Due times as clocks there show them, with the offset."""
    return [
        due.astimezone(ZoneInfo(zone)).strftime("%a %d %b %H:%M %z")
        for due in next_runs(cadence, zone, at(after), count=count)
    ]


# -- the oracle


def fits(cadence: str, wall: datetime) -> bool:
    """crontab(5), read literally."""
    minute, hour, day, month, weekday = cadence.split()
    by_day = one_of(day, wall.day, 1)
    by_weekday = one_of(weekday, wall.isoweekday() % 7, 0) or one_of(weekday, wall.isoweekday(), 0)
    days = by_day or by_weekday if day[0] != "*" and weekday[0] != "*" else by_day and by_weekday
    return one_of(minute, wall.minute, 0) and one_of(hour, wall.hour, 0) and one_of(month, wall.month, 1) and days


def one_of(field: str, value: int, low: int) -> bool:
    for item in field.split(","):
        span, _, step = item.partition("/")
        first, _, last = span.partition("-")
        begin = low if first == "*" else int(first)
        end = int(last) if last else (10**6 if first == "*" or step else begin)
        if begin <= value <= end and (value - begin) % int(step or 1) == 0:
            return True
    return False


def oracle(cadence: str, zone: str, after: datetime, until: datetime) -> list[datetime]:
    """Walk minute by minute. Whatever the clock on the wall reaches or passes for the first time is due then."""
    there = ZoneInfo(zone)
    moment = after.replace(second=0, microsecond=0) - timedelta(hours=3)
    reached = moment.astimezone(there).replace(tzinfo=None)
    found = []
    while moment < until:
        moment += MINUTE
        wall = moment.astimezone(there).replace(tzinfo=None)
        due = False
        while reached < wall:
            reached += MINUTE
            due = fits(cadence, reached) or due
        if due and after < moment <= until:
            found.append(moment)
    return found


@st.composite
def cadences(draw: st.DrawFn) -> str:
    def values(low: int, high: int, likely: list[str]) -> str:
        number = st.integers(low, high)
        return draw(
            st.sampled_from(likely)
            | number.map(str)
            | st.builds("{},{}".format, number, number)
            | st.builds(lambda a, b: f"{min(a, b)}-{max(a, b)}", number, number)
        )

    return " ".join(
        (
            values(0, 59, ["0", "30", "*/20", "45"]),
            values(0, 23, ["*", "*", "0", "1", "2", "2", "3", "*/6"]),
            values(1, 28, ["*", "*", "29", "31", "*/2"]),
            draw(st.sampled_from(["*", "*", "*", "1-6", "*/2"])),
            values(0, 7, ["*", "*", "0", "1-5", "*/2"]),
        )
    )


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cadence=cadences(),
    change=st.sampled_from(CHANGES),
    shift=st.integers(0, 2000),
    seconds=st.sampled_from([0, 0, 1, 59]),
)
def test_due_times_are_those_of_somebody_who_watches_the_clock_on_the_wall(
    cadence: str, change: tuple[str, str], shift: int, seconds: int
) -> None:
    zone, begin = change
    after = at(begin) + timedelta(minutes=shift, seconds=seconds)
    until = after + timedelta(days=2)
    assert list(next_runs(cadence, zone, after, until=until)) == oracle(cadence, zone, after, until)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cadence=cadences() | st.sampled_from(["every 1m", "every 7h", "every 90d"]),
    change=st.sampled_from(CHANGES),
    seconds=st.integers(0, 300_000),
)
def test_asking_again_from_any_due_time_goes_on_with_the_next(
    cadence: str, change: tuple[str, str], seconds: int
) -> None:
    zone, begin = change
    after = at(begin) + timedelta(seconds=seconds)
    runs = list(next_runs(cadence, zone, after, count=6))
    for due, following in pairwise(runs):
        assert next(next_runs(cadence, zone, due, count=1)) == following
        assert next(next_runs(cadence, zone, following - timedelta(microseconds=1), count=1)) == following


# -- in words


def test_a_time_that_spring_swallows_comes_right_after_the_gap() -> None:
    assert shown("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00+01:00", 2) == [
        "Sun 29 Mar 03:00 +0200",
        "Mon 30 Mar 02:30 +0200",
    ]
    assert shown("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00+10:30", 1) == ["Sun 04 Oct 02:30 +1100"]
    assert shown("0 0 * * *", "America/Sao_Paulo", "2018-11-03T12:00-03:00", 1) == ["Sun 04 Nov 01:00 -0200"]


def test_several_times_of_one_gap_come_once() -> None:
    assert shown("*/15 2,3 * * sun", "Europe/Berlin", "2026-03-28T12:00+01:00", 2) == [
        "Sun 29 Mar 03:00 +0200",
        "Sun 29 Mar 03:15 +0200",
    ]


def test_a_day_that_a_zone_leaves_out_is_made_up_for_when_the_next_begins() -> None:
    assert shown("0 2 * * *", "Pacific/Apia", "2011-12-29T12:00-10:00", 2) == [
        "Sat 31 Dec 00:00 +1400",
        "Sat 31 Dec 02:00 +1400",
    ]


def test_a_time_that_autumn_repeats_comes_the_first_time_only() -> None:
    assert shown("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00+02:00", 2) == [
        "Sun 25 Oct 02:30 +0200",
        "Mon 26 Oct 02:30 +0100",
    ]
    assert shown("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00+11:00", 1) == ["Sun 05 Apr 01:45 +1100"]


def test_asked_within_the_repeated_hour_nothing_of_it_is_due_again() -> None:
    assert shown("*/30 2 * * *", "Europe/Berlin", "2026-10-25T02:10+01:00", 1) == ["Mon 26 Oct 02:00 +0100"]


def test_leap_day_and_ends_of_months_come_when_there_are_any() -> None:
    assert shown("0 3 29 2 *", "UTC", "2026-01-01T00:00Z", 2) == ["Tue 29 Feb 03:00 +0000", "Sun 29 Feb 03:00 +0000"]
    assert [due.year for due in next_runs("0 3 29 2 *", "UTC", at("2096-03-01T00:00Z"), count=1)] == [2104]
    assert shown("0 3 31 * *", "UTC", "2026-02-01T00:00Z", 3) == [
        "Tue 31 Mar 03:00 +0000",
        "Sun 31 May 03:00 +0000",
        "Fri 31 Jul 03:00 +0000",
    ]


def test_weekdays_are_counted_from_sunday_and_seven_is_sunday_too() -> None:
    for cadence in ("0 2 * * 0", "0 2 * * 7", "0 2 * * sun"):
        assert shown(cadence, "UTC", "2026-11-21T00:00Z", 1) == ["Sun 22 Nov 02:00 +0000"]
    assert shown("0 2 * * 1-5", "UTC", "2026-11-21T00:00Z", 1) == ["Mon 23 Nov 02:00 +0000"]


def test_day_of_the_month_or_weekday_suffices_where_both_are_given() -> None:
    assert shown("0 0 13 * fri", "UTC", "2026-11-07T00:00Z", 3) == [
        "Fri 13 Nov 00:00 +0000",
        "Fri 20 Nov 00:00 +0000",
        "Fri 27 Nov 00:00 +0000",
    ]
    assert shown("0 0 1 * mon", "UTC", "2026-11-24T00:00Z", 3) == [
        "Mon 30 Nov 00:00 +0000",
        "Tue 01 Dec 00:00 +0000",
        "Mon 07 Dec 00:00 +0000",
    ]


def test_intervals_count_from_a_fixed_moment_so_that_a_restart_shifts_nothing() -> None:
    first = list(next_runs("every 7h", "Europe/Berlin", at("2026-03-28T12:00Z"), count=10))
    assert {later - earlier for earlier, later in pairwise(first)} == {timedelta(hours=7)}
    for due in first[1:]:
        assert next(next_runs("every 7h", "UTC", due - timedelta(hours=1), count=1)) == due
    assert shown("every 6h", "UTC", "2026-11-21T01:23:45Z", 2) == ["Sat 21 Nov 06:00 +0000", "Sat 21 Nov 12:00 +0000"]


def test_a_day_that_never_comes_ends_the_calendar_instead_of_searching_for_ever() -> None:
    assert list(next_runs("0 0 31 2 */2", "UTC", at("2026-01-01T00:00Z"), count=1)) == []


# -- legs


def leg(cadence: str = "0 2 * * *", **more: object) -> Leg:
    return Leg(
        **{
            "server": "db1",
            "leg": "physical.full",
            "cadence": cadence,
            "kind": JobKind.FULL,  # type: ignore[arg-type]  # fields by name
            "zone": "Europe/Berlin",
            **more,
        }
    )


def test_an_increment_is_not_due_when_a_full_backup_is() -> None:
    increments = leg("0 2 * * *", leg="physical.incremental", kind=JobKind.INCREMENTAL, besides="0 2 * * sun")
    days = [
        f"{due.astimezone(ZoneInfo('Europe/Berlin')):%a}"
        for due in due_times(increments, at("2026-11-15T12:00Z"), count=7)
    ]
    assert days == ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Mon"]


def test_jitter_is_always_the_same_for_one_leg_and_differs_between_servers() -> None:
    due = at("2026-11-21T01:00Z")
    starts = {start_of(leg(server=f"db{number}", jitter=timedelta(minutes=10)), due) for number in range(50)}
    assert len(starts) > 40
    assert due <= min(starts) <= max(starts) <= due + timedelta(minutes=10)
    one = leg(jitter=timedelta(minutes=10))
    assert start_of(one, due) == start_of(one, due)
    assert start_of(one, due + timedelta(days=1)) == start_of(one, due) + timedelta(days=1)


def test_a_run_due_in_a_blackout_starts_at_its_end() -> None:
    closed = leg(blackout=("mon-fri 08:00-18:00", "22:00-04:00"))

    def start(text: str) -> str:
        return start_of(closed, at(text)).astimezone(ZoneInfo("Europe/Berlin")).strftime("%a %H:%M")

    assert start("2026-11-20T09:00+01:00") == "Fri 18:00"
    assert start("2026-11-20T18:00+01:00") == "Fri 18:00"
    assert start("2026-11-21T09:00+01:00") == "Sat 09:00"
    assert start("2026-11-21T23:30+01:00") == "Sun 04:00"
    assert start("2026-11-22T03:59+01:00") == "Sun 04:00"


def test_jitter_does_not_lead_into_a_blackout() -> None:
    narrow = leg(blackout=("01:59-05:00", "05:00-05:05"), jitter=timedelta(minutes=2), zone="UTC")
    start = start_of(narrow, at("2026-11-21T01:58Z"))
    assert start in (at("2026-11-21T01:58Z"), at("2026-11-21T05:05Z"))
    assert all(start_of(narrow, at("2026-11-21T01:58Z") + number * MINUTE) >= start for number in range(300))


@pytest.mark.parametrize("window", ["02:00-02:30", "sun 01:30-02:15", "00:00-02:59"])
def test_a_blackout_ends_once_in_a_repeated_hour_and_starts_never_go_back(window: str) -> None:
    closed = leg(blackout=(window,))
    moments = [at("2026-10-24T23:00+02:00") + number * MINUTE for number in range(0, 420, 5)]
    starts = [start_of(closed, moment) for moment in moments]
    assert all(start >= moment for start, moment in zip(starts, moments, strict=True))
    assert starts == sorted(starts)


def test_blackouts_that_fill_the_week_do_not_search_for_ever() -> None:
    due = at("2026-11-21T01:58Z")
    assert start_of(leg(blackout=("00:00-24:00",)), due) > due + timedelta(days=7)


def test_the_newest_due_time_is_found_over_any_distance() -> None:
    often, seldom = leg("* * * * *"), leg("0 3 29 2 *")
    now = at("2026-11-21T12:00:30Z")
    assert last_due(often, at("2020-01-01T00:00Z"), now) == at("2026-11-21T12:00Z")
    assert last_due(often, at("2026-11-21T12:00Z"), now) is None
    assert last_due(seldom, at("2020-01-01T00:00Z"), now) == at("2024-02-29T03:00+01:00")
    assert last_due(leg(jitter=timedelta(hours=3)), at("2026-11-20T00:00Z"), at("2026-11-21T01:00:00Z")) == at(
        "2026-11-20T01:00Z"
    )


# -- the alarm clock


@pytest.fixture
def rung() -> Iterator[tuple[AlarmClock, threading.Semaphore]]:
    bells = threading.Semaphore(0)
    with AlarmClock(bells.release) as alarm:
        yield alarm, bells


def test_the_alarm_rings_for_what_is_set_and_for_what_is_past(rung: tuple[AlarmClock, threading.Semaphore]) -> None:
    alarm, bells = rung
    now = datetime.now(UTC)
    alarm.set(frozenset({now - timedelta(hours=3), now + timedelta(milliseconds=150), now + timedelta(hours=1)}))
    assert bells.acquire(timeout=240)
    assert bells.acquire(timeout=240)
    assert not bells.acquire(timeout=0.05)


def test_an_alarm_that_was_replaced_does_not_ring(rung: tuple[AlarmClock, threading.Semaphore]) -> None:
    alarm, bells = rung
    in_time = False
    while not in_time:
        due = datetime.now(UTC) + timedelta(milliseconds=200)
        alarm.set(frozenset({due}))
        alarm.set(frozenset({due + timedelta(hours=1)}))
        in_time = datetime.now(UTC) < due  # else this machine was too slow: it may ring
        rang = bells.acquire(timeout=0.4)
    assert not rang
