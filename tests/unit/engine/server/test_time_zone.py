"""The time zone of a copy, found by what its source said of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from backupd.engine.server.launch import HERE, global_zone, zone_of

WINTER, SUMMER = datetime(2026, 1, 20, tzinfo=UTC), datetime(2026, 7, 20, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def host_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield monkeypatch
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("said", "at", "hours"),
    [
        ("EDT", SUMMER, -4),
        ("EST", WINTER, -5),
        ("CEST", SUMMER, 2),
        ("CEST", WINTER, 1),
        ("+0530", WINTER, 5.5),
        ("GMT", WINTER, 0),
    ],
)
def test_a_zone_that_fits_in_effect_is_found(said: str, at: datetime, hours: float, host_zone: object) -> None:
    zone = zone_of({"system_time_zone": said, "time_zone": "SYSTEM"}, at, at + DAY)
    assert zone.doubt == ""
    assert at.astimezone(ZoneInfo(zone.name)).utcoffset() == timedelta(hours=hours)


def test_utc_is_utc_and_the_hosts_own_zone_is_left_alone(host_zone: object) -> None:
    assert zone_of({"system_time_zone": "UTC"}, WINTER, SUMMER).name == "UTC"
    assert zone_of({"system_time_zone": "JST"}, WINTER, SUMMER) == HERE


@pytest.mark.parametrize(
    ("said", "at", "told"),
    [
        ("CST", WINTER, "may be"),
        ("EST", SUMMER, "may be"),
        ("XYZ", WINTER, "no zone of that name"),
        ("", WINTER, "does not record"),
    ],
)
def test_what_is_ambiguous_or_unknown_is_replayed_in_utc_and_told(
    said: str, at: datetime, told: str, host_zone: object
) -> None:
    zone = zone_of({"system_time_zone": said, "time_zone": "SYSTEM"}, at, at + DAY)
    assert (zone.name, told in zone.doubt) == ("UTC", True)
    # Its sessions did not begin with that zone.
    assert zone_of({"system_time_zone": said, "time_zone": "+01:00"}, at, at + DAY).doubt == ""


def test_zones_that_differ_only_at_one_end_of_the_replay_are_ambiguous(host_zone: object) -> None:
    assert zone_of({"system_time_zone": "EST"}, WINTER, SUMMER).doubt


def test_a_zone_of_sessions_is_one_that_is_not_the_systems() -> None:
    assert [global_zone(each) for each in ({}, {"time_zone": "SYSTEM"}, {"time_zone": "+01:00"})] == ["", "", "+01:00"]
