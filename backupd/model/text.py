"""How times, durations, sizes and ids are written and read."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

Clock = Callable[[], datetime]
"""Gives the present moment as an aware datetime in UTC."""


def format_time(moment: datetime) -> str:
    """RFC 3339 in UTC with microseconds only where there are any: ``2026-11-21T09:41:03.250000Z``."""
    if moment.tzinfo is None:
        raise ValueError("a moment needs a time zone")
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def parse_time(text: str) -> datetime:
    """Read RFC 3339; the offset is required. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: write 2026-11-21T09:41:03Z or +01:00")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{text!r} is outside of the calendar") from None


_SIZES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _SIZES[f"{_letter}ib"] = 1024**_power
    _SIZES[f"{_letter}i"] = 1024**_power
    _SIZES[f"{_letter}b"] = 1000**_power
    _SIZES[_letter] = 1024**_power

_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_DURATION = re.compile(r"(?:\d+\s*(?:ms|[smhdw])\s*)+", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of ``500GiB``, ``1.5 TB``, ``16K`` (K, M, G, T, P alone are powers of 1024). Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    factor = _SIZES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size: write 500GiB, 20MB or 4096")
    return int(float(match.group(1)) * factor)


@lru_cache(maxsize=256)
def parse_duration(text: str) -> timedelta:
    """A duration such as ``50ms``, ``10s``, ``2h``, ``1d12h`` (ms, s, m, h, d, w). Raises ValueError."""
    if not _DURATION.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is not a duration: write 10s, 15m, 2h, 7d or 1d12h")
    pairs = re.findall(r"(\d+)\s*(ms|[smhdw])", text, re.IGNORECASE)
    return timedelta(milliseconds=sum(int(number) * _MILLISECONDS[unit.lower()] for number, unit in pairs))


def format_size(size: float) -> str:
    """``1536`` becomes ``1.5 KiB``; always powers of 1024."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """``3725.4`` becomes ``1h 2m 5s``; under a minute one decimal: ``4.2s``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    days, whole = divmod(whole, 86400)
    hours, whole = divmod(whole, 3600)
    minutes, whole = divmod(whole, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (whole, "s")]
    return " ".join(f"{number}{unit}" for number, unit in parts if number) or "0.0s"


def few(names: Iterable[object], most: int, more: str = "more") -> str:
    """The first ``most`` of them in words: ``a, b, c and 4 more``."""
    listed = list(map(str, names))
    rest = f" and {len(listed) - most} {more}" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BACKUP_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")


def new_id(now: datetime) -> str:
    """``20261121T042512Z-7f3a9c01``: sorts by time, unique by 32 random bits within one second."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def is_id(text: str) -> bool:
    return _BACKUP_ID.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """May ``text`` name a server, destination or policy? It becomes part of paths and keys, so: plain characters."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def progress_text(progress: Mapping[str, Any] | None, span: Callable[[float], str] = format_duration) -> str:
    """The progress in a job's document: ``copy: 1.2 GiB of 2.3 GiB, 120 files, 5.0s left``. ``span``: how seconds are
    written."""
    if not progress:
        return ""
    words = []
    if progress["bytes"] or progress["bytes_total"]:
        total = f" of {format_size(progress['bytes_total'])}" if progress["bytes_total"] else ""
        words.append(format_size(progress["bytes"]) + total)
    if progress["files"]:
        total = f" of {progress['files_total']}" if progress["files_total"] else ""
        words.append(f"{progress['files']}{total} files")
    if progress["seconds_left"] is not None:
        words.append(f"{span(progress['seconds_left'])} left")
    return ": ".join(filter(None, (str(progress["phase"]), ", ".join(words))))
