"""Times without an offset, in a zone whose clocks are set back and forward."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from backupd.model.errors import UsageError
from backupd.model.local_time import in_both, is_local, read_local

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 11, 22, 20, 15, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("20:30", "2026-11-22T19:30:00"),
        ("8:05", "2026-11-22T07:05:00"),
        ("today 20:30:15", "2026-11-22T19:30:15"),
        ("yesterday 14:00", "2026-11-21T13:00:00"),
        ("Yesterday  14:00", "2026-11-21T13:00:00"),
        ("2026-11-22 20:30", "2026-11-22T19:30:00"),
        ("2026-07-01T20:30:00.250", "2026-07-01T18:30:00.250000"),
        ("2026-10-25 01:59", "2026-10-24T23:59:00"),
        ("2026-10-25 03:00", "2026-10-25T02:00:00"),
        ("2026-03-29 03:00", "2026-03-29T01:00:00"),
    ],
)
def test_a_time_is_that_of_the_zone(text: str, moment: str) -> None:
    assert is_local(text)
    assert read_local(text, BERLIN, NOW) == datetime.fromisoformat(f"{moment}+00:00")


def test_today_is_the_day_that_it_is_there() -> None:
    late = datetime(2026, 11, 22, 23, 30, tzinfo=UTC)
    assert read_local("00:10", BERLIN, late) == datetime(2026, 11, 22, 23, 10, tzinfo=UTC)
    assert read_local("yesterday 00:10", BERLIN, late) == datetime(2026, 11, 21, 23, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "2026-10-25 02:30",
            (
                "2026-10-25 02:30 comes twice in Europe/Berlin: the clocks were set back\n"
                "detail: before the change it is 2026-10-25T00:30:00Z, after it 2026-10-25T01:30:00Z\n"
                "hint: write the one that is meant: 2026-10-25T00:30:00Z or 2026-10-25T01:30:00Z"
            ),
        ),
        (
            "2026-03-29 02:30",
            (
                "2026-03-29 02:30 does not exist in Europe/Berlin: the clocks were set forward\n"
                "detail: before the change it is 2026-03-29T01:30:00Z, after it 2026-03-29T00:30:00Z\n"
                "hint: write the one that is meant: 2026-03-29T01:30:00Z or 2026-03-29T00:30:00Z"
            ),
        ),
        (
            "22:30",
            "22:30 is still to come: it is 2026-11-22 21:15:00 CET now\nhint: for the day before: yesterday 22:30",
        ),
    ],
)
def test_a_time_that_has_two_meanings_or_none_is_refused_with_both(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_local(text, BERLIN, NOW)
    assert str(refused.value) == said


@pytest.mark.parametrize("text", ["24:00", "2026-02-30 10:00", "10:61", "0001-01-01 00:00"])
def test_what_no_clock_shows_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        read_local(text, BERLIN, NOW)


@pytest.mark.parametrize(
    "text",
    ["latest", "2026-11-22T20:30:00Z", "2026-11-22 20:30+01:00", "2026-11-22", "binlog.000042:20", "yesterday", ""],
)
def test_what_meant_something_else_is_no_local_time(text: str) -> None:
    assert not is_local(text)


def test_both_times_are_shown_where_a_zone_is_named() -> None:
    assert in_both("until 2026-11-22T19:30:00.250000Z, then 2026-07-01 18:30:00Z", BERLIN) == (
        "until 2026-11-22T19:30:00.250000Z (2026-11-22 20:30:00 CET), "
        "then 2026-07-01 18:30:00Z (2026-07-01 20:30:00 CEST)"
    )
