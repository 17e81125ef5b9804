"""Times as people in one time zone write them: ``20:30``, ``yesterday 14:00``, ``2026-11-22 20:30``.

Twice a year a wall clock shows an hour twice, or leaves one out. A time within such an hour is refused with both
moments that it may mean: nobody can tell which one was meant.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo

from backupd.model.errors import UsageError
from backupd.model.text import format_time

_LOCAL = re.compile(
    r"(?:(?P<day>today|yesterday|\d{4}-\d\d-\d\d)[ T]\s*)?(?P<time>\d{1,2}:\d\d(?::\d\d(?:\.\d{1,6})?)?)", re.IGNORECASE
)
_TIME_IN_TEXT = re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?Z")
EXAMPLES = "20:30, yesterday 14:00 or 2026-11-22 20:30"


def is_local(text: str) -> bool:
    """Is it written as a time without an offset?"""
    return _LOCAL.fullmatch(text.strip()) is not None


def read_local(text: str, zone: tzinfo, now: datetime) -> datetime:
    """The moment (UTC) that ``text`` means in ``zone``; without a day, or with ``today``, of the day that it is there.
    Raises UsageError for what is no such time, for a time that has two meanings or none, and for one of today that is
    still to come."""
    written = " ".join(text.split())
    match = _LOCAL.fullmatch(written)
    try:
        if match is None:
            raise ValueError(written)
        wall = datetime.combine(_day(match["day"], now.astimezone(zone).date()), _clock(match["time"]))
        first, second = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    except (ValueError, OverflowError):
        raise UsageError(f"{written!r} is not a time", hint=f"write {EXAMPLES}, or 2026-11-22T19:30:00Z") from None
    if first != second:
        raise _unclear(wall, zone, first, second)
    if not (match["day"] or "")[:1].isdigit() and first > now:
        raise UsageError(
            f"{written} is still to come: it is {with_zone(now, zone)} now",
            hint=f"for the day before: yesterday {match['time']}",
        )
    return first


def _day(text: str | None, today: date) -> date:
    word = (text or "today").lower()
    if word in ("today", "yesterday"):
        return today - timedelta(days=word == "yesterday")
    return date.fromisoformat(word)


def _clock(text: str) -> time:
    return time.fromisoformat(text if text.index(":") == 2 else f"0{text}")


def _unclear(wall: datetime, zone: tzinfo, first: datetime, second: datetime) -> UsageError:
    twice = first < second
    what = "comes twice" if twice else "does not exist"
    moved = "back" if twice else "forward"
    return UsageError(
        f"{wall:%Y-%m-%d %H:%M} {what} in {zone}: the clocks were set {moved}",
        detail=f"before the change it is {format_time(first)}, after it {format_time(second)}",
        hint=f"write the one that is meant: {format_time(first)} or {format_time(second)}",
    )


def with_zone(moment: datetime, zone: tzinfo) -> str:
    """``2026-11-22 20:30:00 CET``."""
    local = moment.astimezone(zone)
    return f"{local:%Y-%m-%d %H:%M:%S} {local.tzname()}"


def in_both(text: str, zone: tzinfo) -> str:
    """``text`` with the time in ``zone`` behind each moment in UTC."""

    def both(found: re.Match[str]) -> str:
        return f"{found[0]} ({with_zone(datetime.fromisoformat(found[0]), zone)})"

    return _TIME_IN_TEXT.sub(both, text)
