"""JSON that others may have written: read so that nothing in it does more harm than being unreadable."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

NOTE_LIMIT = 1024 * 1024
"""Most bytes of a note at a destination (lease, mark, hold, tombstone); ours have a few hundred."""

DOCUMENT_LIMIT = 256 * 1024 * 1024
"""Most bytes of a clear document that tells what is stored: of a manifest that names more than a million objects."""

_OPENED_FLOOR = 4 * 1024 * 1024
_OPENED_RATIO = 200
"""What describes things holds a digest or two for each, which nothing makes shorter: nine times smaller is usual."""


def opened_limit(stored: int) -> int:
    """Most bytes that a sealed document of ``stored`` bytes may open to: little that is stored never becomes much
    memory."""
    return _OPENED_FLOOR + _OPENED_RATIO * stored


def parsed(raw: bytes | str, *, limit: int | None = None) -> Any:
    """The value that ``raw`` tells. Raises ValueError for whatever is no JSON, has more than ``limit`` bytes, is nested
    too deeply, or has a number without a value."""
    if limit is not None and len(raw) > limit:
        raise ValueError(f"it has more than the {limit} bytes that belong there")
    try:
        return json.loads(raw, parse_float=_finite, parse_constant=_refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no number that can be used")
    return number


def _refused(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
