"""Cron expressions, five fields as in crontab(5) with names for months and days of the week; and blackout windows:
hours of some days of the week in which nothing starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import pairwise

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_FIELDS: Sequence[tuple[str, int, int, Sequence[str]]] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 7, _DAYS),
)

_ERA = date(2000, 1, 1)
_YEARS = timedelta(days=8 * 366)
"""Long enough that a leap day comes twice."""

_ITEM = re.compile(r"(\*|\w+)(?:-(\w+))?(?:/(\d{1,4}))?")


def parse_cron(text: str) -> tuple[frozenset[int], ...]:
    """The values of each field: minutes, hours, days, months, days of the week (0 is Sunday).

    Raises ValueError saying which field is wrong, also for a day that never comes (30 February).
    """
    words = text.split()
    if len(words) != len(_FIELDS):
        raise ValueError(
            f'{text!r} is not a cron expression: it needs 5 fields, minute hour day month weekday, as in "0 2 * * sun"'
        )
    values = [_field(word, *rule) for word, rule in zip(words, _FIELDS, strict=True)]
    days, months, weekdays = values[2], values[3], values[4]
    if words[4] == "*" and not any(min(days) <= _LONGEST[month - 1] for month in months):
        raise ValueError(f"{text!r} never comes: none of its months has so many days")
    values[4] = frozenset(day % 7 for day in weekdays)
    return tuple(values)


def comes_on(text: str, day: date) -> bool:
    """Does the expression name any time of ``day``? Where both days are restricted either suffices (crontab(5))."""
    _minutes, _hours, days, months, weekdays = parse_cron(text)
    return _comes(text, days, months, weekdays, day)


def _comes(text: str, days: frozenset[int], months: frozenset[int], weekdays: frozenset[int], day: date) -> bool:
    _minute, _hour, day_word, _month, weekday_word = text.split()
    by_day, by_weekday = day.day in days, day.isoweekday() % 7 in weekdays
    either = not day_word.startswith("*") and not weekday_word.startswith("*")
    return day.month in months and (by_day or by_weekday if either else by_day and by_weekday)


def times_of_day(text: str) -> tuple[int, ...]:
    """Minutes of the day at which the expression comes, on the days when it does."""
    minutes, hours, *_days = parse_cron(text)
    return tuple(sorted(hour * 60 + minute for hour in hours for minute in minutes))


def gaps(text: str) -> tuple[timedelta, timedelta]:
    """The shortest and the longest time between two of its moments, by the clock on the wall."""
    _minutes, _hours, days, months, weekdays = parse_cron(text)
    times = times_of_day(text)
    found = [timedelta(minutes=after - before) for before, after in pairwise(times)]
    over_night = timedelta(minutes=times[0] - times[-1])
    last: date | None = None
    for number in range(_YEARS.days):
        day = _ERA + timedelta(days=number)
        if _comes(text, days, months, weekdays, day):
            if last is not None:
                found.append(day - last + over_night)
            last = day
    return (min(found), max(found)) if found else (_YEARS, _YEARS)


def _field(word: str, name: str, low: int, high: int, names: Sequence[str]) -> frozenset[int]:
    found: set[int] = set()
    for item in word.split(","):
        match = _ITEM.fullmatch(item)
        if match is None or (match[1] == "*" and match[2]):
            raise ValueError(f"{item!r} is not a {name}")
        step = int(match[3] or 1)
        if step < 1:
            raise ValueError(f"{item!r}: a step must be 1 or more")
        if match[1] == "*":
            start, end = low, 6 if names is _DAYS else high
        else:
            start = _value(match[1], name, low, high, names)
            end = _value(match[2], name, low, high, names) if match[2] else high if match[3] else start
            if names is _DAYS and match[2] and end == 0 < start:
                end = 7
        if end < start:
            raise ValueError(f"{item!r}: the {name} {match[2]} comes before {match[1]}; write two ranges with a comma")
        found.update(range(start, end + 1, step))
    return frozenset(found)


def _value(word: str, name: str, low: int, high: int, names: Sequence[str]) -> int:
    if word.lower() in names:
        return low + names.index(word.lower())
    if not word.isascii() or not word.isdigit() or not low <= int(word) <= high:
        known = f" or {', '.join(names)}" if names else ""
        raise ValueError(f"{word!r} is not a {name}: {low} to {high}{known}")
    return int(word)


DAY_MINUTES = 24 * 60

_DAY = r"(?:sun|mon|tue|wed|thu|fri|sat)"
_DAY_RANGES = rf"\*|{_DAY}(?:-{_DAY})?(?:,{_DAY}(?:-{_DAY})?)*"
_WINDOW = re.compile(rf"(?:({_DAY_RANGES}) )?([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class WindowTimes:
    """On each of ``days`` (0 is Sunday) it begins at minute ``start`` of the day and lasts ``minutes`` (1 to 1440),
    into the next day where that is after midnight."""

    days: frozenset[int]
    start: int
    minutes: int

    def holds(self, weekday: int, minute: int) -> bool:
        """Is minute ``minute`` of a ``weekday`` (0 is Sunday) inside? The end is not."""
        end = self.start + self.minutes
        return (weekday in self.days and self.start <= minute < end) or (
            (weekday - 1) % 7 in self.days and minute < end - DAY_MINUTES
        )


def parse_window(text: str) -> WindowTimes:
    """The times of ``mon-fri 08:00-18:00``, ``22:00-04:00`` or ``sat,sun 00:00-24:00``. Raises ValueError."""
    match = _WINDOW.fullmatch(text)
    if match is None or (match[4] == "24" and match[5] != "00"):
        raise ValueError(f"{text!r} is not a window: write HH:MM-HH:MM or days before it, as in mon-fri 08:00-18:00")
    start, end = int(match[2]) * 60 + int(match[3]), int(match[4]) * 60 + int(match[5])
    if start == end:
        raise ValueError(f"{text!r} is empty: its two times are the same; a whole day is 00:00-24:00")
    # Days of the week are written as in cron expressions, so they are read as those.
    days = parse_cron(f"0 0 * * {match[1] or '*'}")[4]
    return WindowTimes(days, start, (end - start) % DAY_MINUTES or DAY_MINUTES)
