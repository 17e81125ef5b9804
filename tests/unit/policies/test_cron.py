from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fields import comes_on, gaps, parse_cron, parse_window, times_of_day


@pytest.mark.parametrize(
    ("text", "field", "values"),
    [
        ("0 2 * * sun", 4, {0}),
        ("0 2 * * 7", 4, {0}),
        ("0 2 * * mon-sat", 4, {1, 2, 3, 4, 5, 6}),
        ("0 2 * * sat-sun", 4, {6, 0}),
        ("0 2 * * *", 4, set(range(7))),
        ("*/20 * * * *", 0, {0, 20, 40}),
        ("5/20 * * * *", 0, {5, 25, 45}),
        ("1,3,10-12 * * * *", 0, {1, 3, 10, 11, 12}),
        ("0 0 1 JAN,jul *", 3, {1, 7}),
        ("0 8-18/5 * * *", 1, {8, 13, 18}),
        ("0 0 29 2 *", 2, {29}),
    ],
)
def test_fields_are_read_as_crontab_does(text: str, field: int, values: set[int]) -> None:
    assert parse_cron(text)[field] == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "5 fields"),
        ("0 2 * *", "5 fields"),
        ("@daily", "5 fields"),
        ("0 0 2 * * sun", "5 fields"),
        ("60 * * * *", "'60' is not a minute: 0 to 59"),
        ("0 24 * * *", "not a hour"),
        ("0 0 0 * *", "day of the month"),
        ("0 0 * 13 *", "month"),
        ("0 0 * * 8", "day of the week"),
        ("0 0 * * fri-mon", "two ranges"),
        ("0 0 * * sunday", "sun, mon"),
        ("x * * * *", "'x' is not a minute"),
        ("*/0 * * * *", "step"),
        ("1-2-3 * * * *", "not a minute"),
        ("*-5 * * * *", "not a minute"),
        ("1, * * * *", "not a minute"),
        ("0 0 30 2 *", "never matches"),
        ("0 0 31 4,6 *", "never matches"),
        ("١ * * * *", "not a minute"),
    ],
)
def test_what_is_no_expression_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cron(text)


@given(st.text(alphabet="0123456789*/-, sunmojafeb٣", max_size=30))
def test_any_text_is_an_expression_or_a_value_error(text: str) -> None:
    try:
        fields = parse_cron(text)
    except ValueError:
        return
    assert all(fields)


@pytest.mark.parametrize(
    ("text", "shortest", "longest"),
    [
        ("0 2 * * *", timedelta(days=1), timedelta(days=1)),
        ("0 2 * * sun", timedelta(days=7), timedelta(days=7)),
        ("0 2 * * mon-sat", timedelta(days=1), timedelta(days=2)),
        ("*/5 * * * *", timedelta(minutes=5), timedelta(minutes=5)),
        ("0 8,20 * * mon", timedelta(hours=12), timedelta(days=6, hours=12)),
        ("0 0 1 * *", timedelta(days=28), timedelta(days=31)),
        ("0 0 29 2 *", timedelta(days=1461), timedelta(days=1461)),
        ("0 0 1,15 * fri", timedelta(days=1), timedelta(days=7)),
        ("0 0 31 * *", timedelta(days=31), timedelta(days=61)),
    ],
)
def test_the_time_between_two_runs(text: str, shortest: timedelta, longest: timedelta) -> None:
    assert gaps(text) == (shortest, longest)


@pytest.mark.parametrize(
    ("text", "day", "comes"),
    [
        ("0 0 13 * fri", date(2026, 11, 13), True),
        ("0 0 13 * fri", date(2026, 11, 20), True),
        ("0 0 13 * fri", date(2026, 12, 13), True),
        ("0 0 13 * fri", date(2026, 11, 21), False),
        ("0 0 */2 * sat", date(2026, 11, 21), True),
        ("0 0 */2 * sat", date(2026, 11, 28), False),
        ("0 0 * 11 7", date(2026, 11, 22), True),
        ("0 0 * 12 7", date(2026, 11, 22), False),
    ],
)
def test_either_of_two_restricted_days_suffices(text: str, day: date, *, comes: bool) -> None:
    assert comes_on(text, day) is comes


def test_the_times_of_a_day_are_in_order() -> None:
    assert times_of_day("30,0 20,8 * * *") == (480, 510, 1200, 1230)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("mon-fri 08:00-18:00", [(1, 480), (5, 1079)], [(1, 479), (1, 1080), (0, 600), (6, 600)]),
        ("22:00-04:00", [(0, 1320), (3, 0), (6, 239)], [(0, 240), (0, 1319)]),
        ("sat 22:00-04:00", [(6, 1320), (0, 239)], [(6, 100), (0, 1320), (1, 100)]),
        ("sat,sun 00:00-24:00", [(6, 0), (0, 1439)], [(1, 0), (5, 1439)]),
    ],
)
def test_a_window_holds_its_minutes_and_not_its_end(
    text: str, inside: list[tuple[int, int]], outside: list[tuple[int, int]]
) -> None:
    window = parse_window(text)
    assert [window.holds(*moment) for moment in inside] == [True] * len(inside)
    assert [window.holds(*moment) for moment in outside] == [False] * len(outside)
