"""Cron expressions, five fields as in crontab(5) with names for months and days of the week; and blackout windows:
hours of some days of the week in which nothing starts.

Kinds of values that the configuration and the policies share.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import parse_qs, urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)

from backupd.model import table as model_table
from backupd.model.text import is_id, is_name, parse_duration, parse_size, parse_time

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
_WEEKS = timedelta(days=15)
"""Long enough that each day of the week comes twice."""

_ITEM = re.compile(r"(\*|\w+)(?:-(\w+))?(?:/(\d{1,4}))?")


@cache
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
        raise ValueError(f"{text!r} never matches: none of its months has that day")
    values[4] = frozenset(day % 7 for day in weekdays)
    return tuple(values)


def comes_on(text: str, day: date) -> bool:
    """Does the expression name any time of ``day``? Where both days are restricted either suffices (crontab(5))."""
    _minutes, _hours, days, months, weekdays = parse_cron(text)
    _minute, _hour, day_word, _month, weekday_word = text.split()
    by_day, by_weekday = day.day in days, day.isoweekday() % 7 in weekdays
    either = not day_word.startswith("*") and not weekday_word.startswith("*")
    return day.month in months and (by_day or by_weekday if either else by_day and by_weekday)


def times_of_day(text: str) -> tuple[int, ...]:
    """Minutes of the day at which the expression comes, on the days when it does."""
    minutes, hours, *_days = parse_cron(text)
    return tuple(sorted(hour * 60 + minute for hour in hours for minute in minutes))


@cache
def gaps(text: str) -> tuple[timedelta, timedelta]:
    """The shortest and the longest time between two of its moments, by the clock on the wall."""
    times = times_of_day(text)
    found = [timedelta(minutes=after - before) for before, after in pairwise(times)]
    over_night = timedelta(minutes=times[0] - times[-1])
    last: date | None = None
    _minutes, _hours, days, months, _weekdays = parse_cron(text)
    each_week_is_alike = len(days) == max(_LONGEST) and len(months) == len(_MONTHS)
    for number in range((_WEEKS if each_week_is_alike else _YEARS).days):
        day = _ERA + timedelta(days=number)
        if comes_on(text, day):
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


SUFFIX = ".yaml"
"""Of every file that is read."""
BASE = "base"
"""Key of pydantic's validation context: the folder of the file, which relative paths start from."""

_LARGEST = 2**63 - 1
LONGEST = timedelta(days=36525)
"""Of any duration: calendars end, and nobody means it."""
SELDOMEST = timedelta(days=366)
"""Of ``every``: a leg that comes less often than once a year is a mistake."""
KEPT_IN_FILE = (
    "secrets stay out of this file: put it into a file that only the service can read (mode 0600) and name that as {}"
)
"""What to do with a secret, in ``refused``; {} is the field that names a file instead."""


def has_password(text: str) -> bool:
    """Does the URL hold one? Raises ValueError for what is none."""
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError("is not a URL") from None
    return parts.password is not None or "password" in parse_qs(parts.query)


class Section(BaseModel):
    """A mapping in a file. A name that the schema does not know is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    refused: ClassVar[Mapping[str, str]] = {}
    """Names that people write here with good reason, and what to write instead."""


def section(description: str) -> Any:
    """A field for a section; where it is not written, one with its defaults."""
    return Field(default_factory=dict, validate_default=True, description=description)


def optional(**rules: Any) -> Any:
    """A field that may be left out, and is None then; ``rules``: as of ``Field``."""
    return Field(None, **rules)


def written(default: Any, **rules: Any) -> Any:
    """A field whose default is given as it would be written in the file, and is the example unless another one is
    given; ``rules``: as of ``Field``."""
    return Field(default, validate_default=True, **{"examples": [default], **rules})


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("is not a size: write 500GiB, 20MB or 4096")  # noqa: TRY004  pydantic collects ValueError only
    try:
        size = value if isinstance(value, int) else parse_size(value)
    except OverflowError:
        size = _LARGEST + 1
    if not 0 < size <= _LARGEST:
        raise ValueError("must be more than 0 and less than 8 EiB")
    return size


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise ValueError("is not a duration: write 10s, 15m, 2h, 7d or 1d12h")  # noqa: TRY004  pydantic collects ValueError only
    try:
        duration = parse_duration(value)
    except OverflowError:
        raise ValueError(f"{_short(value)} is too long a time") from None
    except ValueError:
        if re.search(r"\d{1000}", value):  # more digits than Python reads
            raise ValueError(f"{_short(value)} is too long a time") from None
        raise
    if not duration:
        raise ValueError("must be longer than 0s")
    if duration > LONGEST:
        raise ValueError(f"{_short(value)} is too long a time: at most {LONGEST.days}d, a hundred years")
    return duration


def _as_written(parse: Callable[[str], object]) -> AfterValidator:
    """Text that ``parse`` takes, as it is written."""

    def checked(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(checked)


_EVERY = re.compile(r"every\s+(\S+)")


def every(text: str) -> timedelta | None:
    """The interval of ``every 6h``; None for anything else. Raises ValueError for a bad duration."""
    found = _EVERY.fullmatch(text.strip())
    if found is None:
        return None
    interval = _duration(found[1])
    if interval < timedelta(minutes=1):
        raise ValueError(f"{text!r} is too often: at least every 1m")
    if interval > SELDOMEST:
        raise ValueError(f"{text!r} is too seldom: at most every {SELDOMEST.days}d")
    return interval


def _cadence(value: str) -> None:
    if every(value) is None:
        parse_cron(value)


def _timezone(value: str) -> None:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{value!r} is not a time zone: write UTC or a name as in Europe/Berlin") from None


_GTID = re.compile(r"(?:before-)?gtid:[0-9a-fA-F][\w:,\s-]*")
_PLACE = re.compile(r"[^\s/\\:@]+\.\d{1,10}:\d{1,19}")


def _target(value: str) -> None:
    goal, at, branch = value.rpartition("@")
    goal = goal if at else value
    if not (
        goal in ("latest", "random")
        or _GTID.fullmatch(goal)
        or _PLACE.fullmatch(goal)
        or (goal.startswith("backup:") and is_id(goal.removeprefix("backup:")))
        or _is_time(goal)
    ) or (at and (not is_name(branch) or goal == "random")):
        raise ValueError(
            f"{value!r} is not a target: write latest, random, backup:ID, a time such as "
            "2026-11-21T09:41:03Z, gtid:..., before-gtid:... or FILE:POS"
        )


def _is_time(text: str) -> bool:
    try:
        parse_time(text)
    except ValueError:
        return False
    return True


def _percent(value: Any) -> float:
    if isinstance(value, float):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value) if isinstance(value, str) else None
    if match is None or not 0 < float(match[1]) <= 100:
        raise ValueError("is not a share: write 10%")
    return float(match[1]) / 100


def _name(value: str) -> None:
    if not is_name(value):
        raise ValueError("is not a name: letters, digits, '.', '_' and '-', at most 63, the first a letter or digit")


@lru_cache(maxsize=1024)
def local_path(text: str, base: Path | None) -> Path:
    """An absolute path; a relative one starts at ``base``. Raises ValueError."""
    if not text or "\x00" in text:
        raise ValueError("is not a path")
    if text.startswith("~"):
        raise ValueError("'~' is not expanded: write the path out")
    if not text.startswith("/"):
        if base is None:
            raise ValueError("must be an absolute path")
        text = str(base / text)
    return Path(os.path.normpath(text))


def _local_path(value: Any, info: ValidationInfo) -> Path:
    if not isinstance(value, (str, Path)):
        raise ValueError("is not a path: it must be text")  # noqa: TRY004  pydantic collects ValueError only
    context = info.context
    return local_path(str(value), context.get(BASE) if isinstance(context, dict) else None)


def _table_pattern(value: str) -> str:
    return model_table.TablePattern.parse(value).text


Size = Annotated[int, BeforeValidator(_size), WithJsonSchema({"type": ["string", "integer"], "format": "size"})]
"""Bytes."""
Duration = Annotated[timedelta, BeforeValidator(_duration), WithJsonSchema({"type": "string", "format": "duration"})]
Cron = Annotated[str, _as_written(parse_cron), WithJsonSchema({"type": "string", "format": "cron expression"})]
Cadence = Annotated[
    str, _as_written(_cadence), WithJsonSchema({"type": "string", "format": "cron expression or interval"})
]
"""Five cron fields, or ``every 6h``."""
Window = Annotated[str, _as_written(parse_window), WithJsonSchema({"type": "string", "format": "time window"})]
TimeZone = Annotated[str, _as_written(_timezone), WithJsonSchema({"type": "string", "format": "time zone"})]
Target = Annotated[str, _as_written(_target), WithJsonSchema({"type": "string", "format": "target"})]
"""Where a restore goes to, or ``random``: drawn anew for each test restore."""
Percent = Annotated[float, BeforeValidator(_percent), WithJsonSchema({"type": "string", "format": "percentage"})]
"""0 to 1 after reading."""
Name = Annotated[str, _as_written(_name), WithJsonSchema({"type": "string", "format": "name"})]
LocalPath = Annotated[Path, BeforeValidator(_local_path), WithJsonSchema({"type": "string", "format": "path"})]
"""Absolute after reading."""
TablePattern = Annotated[str, AfterValidator(_table_pattern), WithJsonSchema({"type": "string", "format": "pattern"})]
Words = Annotated[str, StringConstraints(min_length=1, max_length=4000, pattern=r"\S")]
"""Text that is not empty."""
