"""What tests compare data with. A comparison that fails here is never repeated: it fails the whole run at once.

The functions ``same``, ``nothing_lost``, ``unaltered`` and ``not_proved`` raise ``DataDiffersError``. What the shared
helpers read from a server or a repository has one of the types below, which are otherwise what their base type is:
pytest's ``assert`` with ``==`` (or ``in``) over a value of such a type, alone or inside tuples, lists and dicts, raises
it too (``judge``, called by tests/support/verdicts.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

_SHOWN = 40
"""How many differences a message names."""
_ROWS = re.compile(r"\s*(?:CHECKSUM\s+TABLE|SELECT\b.*?\bFROM)\s+`?([\w$]+)", re.IGNORECASE | re.DOTALL)
_OF_THE_SERVER = frozenset({"information_schema", "performance_schema", "mysql", "sys"})


class DataDiffersError(AssertionError):
    """Checksums differ, a row or transaction is lost, something is proved that is not there, a stored object is another
    one than before."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        for listener in _listeners:
            listener()


_listeners: list[Callable[[], None]] = []


def when_data_differs(call: Callable[[], None]) -> None:
    """Call it at the moment a ``DataDiffersError`` is made, which may be before the test removes its folders."""
    _listeners.append(call)


# --- what is data


class Sums(dict[K, V]):
    """Checksums by table, or definitions by object."""


class Total(int):
    """A number that was read out of tables: a checksum, a sum, a count of rows."""


class Rows(list[T]):
    """Rows of tables."""


class Stored(dict[str, str]):
    """SHA-256 of stored objects by key."""


class Proved(str):
    """The outcome "proved", as a command of backupd told it."""

    __slots__ = ()


_DATA = (Sums, Total, Rows, Stored, Proved)


def reads_rows(statement: str) -> bool:
    """Does an SQL statement read tables that are not the server's own?"""
    found = _ROWS.match(statement)
    return found is not None and found[1].lower() not in _OF_THE_SERVER


def stored(folder: Path, *, besides: Collection[str] = ()) -> Stored:
    """Every file beneath ``folder`` by its path there, but for those whose first folder or name is in ``besides``."""
    return Stored(
        {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.relative_to(folder).parts[0] not in besides
        }
    )


def judged(document: dict[str, Any]) -> dict[str, Any]:
    """An object hook for ``json.loads``: ``outcome: proved`` becomes a ``Proved``."""
    if document.get("outcome") == "proved":
        document["outcome"] = Proved("proved")
    return document


# --- comparing


def same(found: Any, expected: Any, what: str = "") -> None:
    """Raise ``DataDiffersError`` unless both are equal. ``what``: what was compared."""
    if found != expected:
        raise DataDiffersError("\n".join([f"data differs{f': {what}' if what else ''}", *differences(found, expected)]))


def nothing_lost(found: Iterable[Any], expected: Iterable[Any], what: str = "") -> None:
    """Raise ``DataDiffersError`` when something of ``expected`` (rows, transactions, names) is not in ``found``."""
    there = list(found)
    lost = [one for one in expected if one not in there]
    if lost:
        shown = [f"  lost: {one!r}" for one in lost[:_SHOWN]]
        raise DataDiffersError("\n".join([f"{len(lost)} lost{f': {what}' if what else ''}", *shown]))


def unaltered(folder: Path, before: Mapping[str, str], *, gone: Collection[str] = ()) -> None:
    """Raise ``DataDiffersError`` when a stored file of ``before`` (see ``stored``) has other bytes now, or is not there
    although it is not among ``gone``. New files are welcome."""
    now = stored(folder)
    wrong = [
        f"  {key}: {'altered' if key in now else 'gone'}"
        for key, digest in before.items()
        if now.get(key) != digest and not (key in gone and key not in now)
    ]
    if wrong:
        raise DataDiffersError(
            "\n".join([f"{len(wrong)} stored objects of {folder} are not what they were", *wrong[:_SHOWN]])
        )


def not_proved(proof: Mapping[str, Any], why: str) -> None:
    """Raise ``DataDiffersError`` when a test restore says "proved" where something is missing: ``why``."""
    if proof.get("outcome") == "proved":
        raise DataDiffersError(f"proved, although {why}: {dict(proof)}")


def judge(operator: str, left: object, right: object) -> None:
    """A comparison of an ``assert`` has failed: raise ``DataDiffersError`` when it was one of data."""
    if operator in ("==", "in") and (_is_data(left) or _is_data(right)):
        raise DataDiffersError("\n".join([f"data differs ({operator})", *differences(left, right)]))


def differences(found: object, expected: object, where: str = "") -> list[str]:
    """What differs, a line each."""
    at = f"  {where}: " if where else "  "
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        lines = [
            line
            for key, value in found.items()
            if key in expected and value != expected[key]
            for line in differences(value, expected[key], f"{where}[{key!r}]")
        ]
        lines += [f"{at}[{key!r}] is too much" for key in found if key not in expected]
        lines += [f"{at}[{key!r}] is missing" for key in expected if key not in found]
    elif (
        isinstance(found, Sequence)
        and isinstance(expected, Sequence)
        and len(found) == len(expected)
        and not isinstance(found, str | bytes)
        and not isinstance(expected, str | bytes)
    ):
        lines = [
            line
            for number, (one, other) in enumerate(zip(found, expected, strict=True))
            if one != other
            for line in differences(one, other, f"{where}[{number}]")
        ]
    else:
        lines = [f"{at}found {_short(found)}, expected {_short(expected)}"]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"  ... and {len(lines) - _SHOWN} more"]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 2000 else f"{text[:2000]}... ({len(text)} characters)"


def _is_data(value: object) -> bool:
    if isinstance(value, _DATA):
        return True
    if isinstance(value, tuple | list):
        return any(_is_data(one) for one in value)
    return isinstance(value, dict) and any(_is_data(one) for one in value.values())
