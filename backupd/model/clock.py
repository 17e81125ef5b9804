"""Time as a value that is passed in, so that decisions can be tested at any moment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

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
        raise ValueError(f"{text!r} lies outside of the calendar") from None
