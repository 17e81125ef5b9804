"""Buckets at the places where calendars are odd."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from backupd.app.retention.rules import Period, bucket

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("period", "moment", "label"),
    [
        (Period.HOURLY, datetime(2026, 11, 21, 12, 59, tzinfo=UTC), "2026-11-21 13:00 +0100"),
        (Period.DAILY, datetime(2026, 11, 21, 23, 30, tzinfo=UTC), "2026-11-22"),
        (Period.WEEKLY, datetime(2027, 1, 3, 12, 0, tzinfo=UTC), "2026-W53"),
        (Period.WEEKLY, datetime(2024, 12, 30, 12, 0, tzinfo=UTC), "2025-W01"),
        (Period.WEEKLY, datetime(2026, 11, 22, 23, 30, tzinfo=UTC), "2026-W48"),
        (Period.MONTHLY, datetime(2028, 2, 29, 12, 0, tzinfo=UTC), "2028-02"),
        (Period.YEARLY, datetime(2026, 12, 31, 23, 30, tzinfo=UTC), "2027"),
    ],
)
def test_a_moment_falls_into_the_bucket_of_its_zone(period: Period, moment: datetime, label: str) -> None:
    assert bucket(period, moment.astimezone(BERLIN)) == label


def test_the_night_in_which_clocks_go_back_has_25_hours_and_one_day() -> None:
    start = datetime(2026, 10, 24, 22, 0, tzinfo=UTC)  # midnight in Berlin
    moments = [start + timedelta(hours=hour) for hour in range(25)]
    assert len({bucket(Period.HOURLY, moment.astimezone(BERLIN)) for moment in moments}) == 25
    assert {bucket(Period.DAILY, moment.astimezone(BERLIN)) for moment in moments} == {"2026-10-25"}


def test_the_night_in_which_clocks_go_forward_has_23_hours_and_one_day() -> None:
    start = datetime(2026, 3, 28, 23, 0, tzinfo=UTC)
    labels = [bucket(Period.HOURLY, (start + timedelta(hours=hour)).astimezone(BERLIN)) for hour in range(23)]
    assert len(set(labels)) == 23
    assert not any(" 02:00" in label for label in labels)
    assert {bucket(Period.DAILY, (start + timedelta(hours=hour)).astimezone(BERLIN)) for hour in range(23)} == {
        "2026-03-29"
    }


def test_hours_of_zones_off_by_half_an_hour_begin_at_their_own_hour() -> None:
    zone = ZoneInfo("Asia/Kolkata")
    assert bucket(Period.HOURLY, datetime(2026, 1, 1, 0, 29, tzinfo=UTC).astimezone(zone)) == "2026-01-01 05:00 +0530"
    assert bucket(Period.HOURLY, datetime(2026, 1, 1, 0, 30, tzinfo=UTC).astimezone(zone)) == "2026-01-01 06:00 +0530"
