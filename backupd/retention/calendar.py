"""Hours, days, weeks, months and years as the people of a time zone count them."""

from __future__ import annotations

from datetime import datetime, tzinfo
from enum import StrEnum


class Period(StrEnum):
    """The rules that keep the last backup of each; the names are those of the policy."""

    HOURLY = "hourly"
    DAILY = "daily"
    WEEKLY = "weekly"
    MONTHLY = "monthly"
    YEARLY = "yearly"


UNITS = {
    Period.HOURLY: "hour",
    Period.DAILY: "day",
    Period.WEEKLY: "week",
    Period.MONTHLY: "month",
    Period.YEARLY: "year",
}
"""What one bucket of each is called."""


def bucket(period: Period, moment: datetime, zone: tzinfo) -> str:
    """The one ``moment`` (aware) falls into, as people write it: ``2026-11-21``, ``2026-W47``, ``2026-11``."""
    return bucket_of_local(period, moment.astimezone(zone))


def bucket_of_local(period: Period, local: datetime) -> str:
    """The same for a moment that is given in the zone already.

    Weeks are those of ISO 8601: they begin on Monday, and the first days of January may belong to the last week of the
    year before. An hour carries its distance from UTC, because the night in which clocks go back has one hour twice.
    """
    if period is Period.HOURLY:
        return f"{local.year:04}-{local.month:02}-{local.day:02} {local.hour:02}:00 {local:%z}"
    if period is Period.DAILY:
        return f"{local.year:04}-{local.month:02}-{local.day:02}"
    if period is Period.WEEKLY:
        year, week, _day = local.isocalendar()
        return f"{year:04}-W{week:02}"
    if period is Period.MONTHLY:
        return f"{local.year:04}-{local.month:02}"
    return f"{local.year:04}"
