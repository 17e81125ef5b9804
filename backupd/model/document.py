"""JSON that others may have written: read so that nothing in it does more harm than being unreadable."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, NoReturn, get_args, get_type_hints

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


_PLAIN = frozenset({str, int, bool, float, type(None)})
_MOST = 2**63
"""Larger numbers are in no catalog."""


def check_fields(made: object) -> None:
    """Raises ValueError where a plain field of a dataclass that was made of a document holds what is of another type,
    or what cannot be stored: a text that is none, or a number that is too large."""
    kind: Any = type(made)
    for name, kinds in _plain_fields(kind).items():
        value = getattr(made, name)
        if type(value) not in kinds or (isinstance(value, int) and not -_MOST <= value < _MOST):
            raise ValueError(f"its {name} is {str(value)[:120]!r}")
        if isinstance(value, str):
            value.encode()  # its own error is a ValueError


@cache
def _plain_fields(kind: Any) -> Mapping[str, frozenset[type]]:
    found = {}
    for name, hint in get_type_hints(kind).items():
        kinds = frozenset(get_args(hint) if isinstance(hint, UnionType) else (hint,))
        if kinds <= _PLAIN:
            found[name] = kinds
    return found
