"""Blackout windows: hours of some days of the week in which nothing starts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from policies.cron import parse_cron

DAY_MINUTES = 24 * 60

_DAY = r"(?:sun|mon|tue|wed|thu|fri|sat)"
_DAYS = rf"\*|{_DAY}(?:-{_DAY})?(?:,{_DAY}(?:-{_DAY})?)*"
_WINDOW = re.compile(rf"(?:({_DAYS}) )?([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")


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
