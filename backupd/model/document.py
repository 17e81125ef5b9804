"""JSON documents: how a record becomes one and is read back, and reading what others may have written, so that nothing
in it does more harm than being unreadable."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, fields
from datetime import date, datetime, timedelta
from enum import Enum
from functools import cache
from operator import attrgetter, methodcaller
from pathlib import PurePath
from types import UnionType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar, get_args, get_origin, get_type_hints

from backupd.model.text import format_time, parse_time

NOTE_LIMIT = 1024 * 1024
"""Most bytes of a note at a destination (lease, mark, hold, tombstone); ours have a few hundred."""

DOCUMENT_LIMIT = 256 * 1024 * 1024
"""Most bytes of a clear document that shows what is stored: of a manifest that names more than a million objects."""

_OPENED_FLOOR = 4 * 1024 * 1024
_OPENED_RATIO = 200
"""What describes things holds a digest or two for each, which nothing makes shorter: nine times smaller is usual."""


def opened_limit(stored: int) -> int:
    """Most bytes that a sealed document of ``stored`` bytes may open to: little that is stored never becomes much
    memory."""
    return _OPENED_FLOOR + _OPENED_RATIO * stored


def parsed(raw: bytes | str, *, limit: int | None = None) -> Any:
    """The value that ``raw`` holds. Raises ValueError for whatever is no JSON, has more than ``limit`` bytes, is nested
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


Made = TypeVar("Made")


def made_of(made: type[Made], record: object, /, **others: Any) -> Made:
    """A dataclass out of those attributes of ``record`` that are called as its fields, and of ``others``, which come
    first. Raises TypeError where a field without a default is in neither."""
    kind: Any = made
    same = {name: getattr(record, name) for name in _names(kind) if name not in others and hasattr(record, name)}
    return made(**same, **others)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@dataclass(frozen=True, slots=True)
class Key:
    """How a field or a property of a ``Document`` is written. ``name``: where the key differs from its own;
    ``or_null``: null for whatever is empty; ``digits``: decimals of a number; ``inline``: the keys of the value are
    keys of this document; ``later``: documents of earlier versions lack it, which means the default; ``after``: the key
    that it follows where that is not the one of the attribute before it, "" for the first one."""

    name: str = ""
    or_null: bool = False
    digits: int | None = None
    inline: bool = False
    later: bool = False
    after: str | None = None


_METADATA = "key"
_SIMPLE = Key()
HIDDEN: Mapping[str, Key | None] = {_METADATA: None}
"""The metadata of a field that is not in the document."""


def json_key(name: str = "", **how: Any) -> Mapping[str, Key]:
    """The metadata of a field: see ``Key``."""
    return {_METADATA: Key(name, **how)}


Getter = TypeVar("Getter", bound=Callable[..., Any])


def computed(name: str = "", **how: Any) -> Callable[[Getter], Getter]:
    """Below ``@property``: it is in the document, too, behind the fields where nothing else is said: see ``Key``."""

    def marked(getter: Getter) -> Getter:
        vars(getter)[_METADATA] = Key(name, **how)
        return getter

    return marked


class Entry(NamedTuple):
    """A key of a document, and the attribute that it is made of."""

    name: str
    attribute: str
    key: Key


class Document:
    """A dataclass that is the declaration of its JSON document: a key for each field, in their order. What is not
    written under its own name, or not as it is, says so in the field's metadata (``json_key``, ``HIDDEN``); a property
    that is in it, too, is ``computed``."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        """Moments as RFC 3339 in UTC, spans in seconds, enumerations by value, paths as text, records as documents."""
        kind: Any = type(self)
        document: dict[str, Any] = {}
        for name, attribute, how in entries(kind):
            value = getattr(self, attribute)
            if (write := _WRITERS[type(value)]) is not None:
                value = write(value)
            if how is _SIMPLE:
                document[name] = value
            elif how.inline:
                document |= value
            elif how.or_null:
                document[name] = value or None
            else:
                document[name] = value if how.digits is None or value is None else round(value, how.digits)
        return document

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Reads what ``as_json`` wrote. Raises KeyError, ValueError, TypeError for anything else."""
        kind: Any = cls
        return cls(
            **{
                attribute: _value(name, read, data if how.inline else data[name])
                for (name, attribute, how), read in _readers(kind)
                if not how.later or name in data
            }
        )


@cache
def entries(kind: Any) -> tuple[Entry, ...]:
    """The keys of the documents of a class, in their order."""
    attributes = {field.name: field.metadata.get(_METADATA, _SIMPLE) for field in fields(kind)}
    for name, value in vars(kind).items():
        if isinstance(value, property):
            attributes[name] = vars(value.fget).get(_METADATA)
    shown = [Entry(how.name or name, name, how) for name, how in attributes.items() if how is not None]
    found = [one for one in shown if one.key.after is None]
    for one in shown:
        if one.key.after is not None:
            found.insert(["", *(other.name for other in found)].index(one.key.after), one)
    return tuple(found)


Write = Callable[[Any], Any]


def _plain(value: Any) -> Any:
    write = _WRITERS[type(value)]
    return value if write is None else write(value)


def _list(value: Iterable[Any]) -> list[Any]:
    return [_plain(one) for one in value]


class _Writers(dict[type, Write | None]):
    """By class, what writes its values; None where they are JSON as they are."""

    def __missing__(self, kind: type) -> Write | None:
        found = next((write for base, write in _WRITTEN if issubclass(kind, base)), None)
        if hasattr(kind, "as_json"):
            found = methodcaller("as_json")
        self[kind] = found
        return found


_WRITTEN: tuple[tuple[type, Write], ...] = (
    (Enum, attrgetter("value")),
    (datetime, format_time),
    (date, date.isoformat),
    (timedelta, timedelta.total_seconds),
    (PurePath, str),
    (Mapping, lambda value: {name: _plain(one) for name, one in value.items()}),
    (Set, lambda value: sorted(_list(value))),
    (tuple, _list),
    (list, _list),
)
_WRITERS = _Writers()


@cache
def _readers(kind: Any) -> tuple[tuple[Entry, Callable[[Any], Any]], ...]:
    hints, known = get_type_hints(kind), {field.name for field in fields(kind)}
    return tuple((one, _reader(hints[one.attribute])) for one in entries(kind) if one.attribute in known)


def _reader(hint: Any) -> Callable[[Any], Any]:
    """What reads a value of this type out of JSON."""
    parts = get_args(hint)
    if get_origin(hint) is UnionType:
        (read,) = (_reader(part) for part in parts if part is not type(None))
        return lambda value: None if value is None else read(value)
    if get_origin(hint) is tuple:
        one = _reader(parts[0])
        return lambda value: tuple(one(item) for item in value)
    if get_origin(hint) is Mapping:
        name, item = map(_reader, parts)
        return lambda value: {name(key): item(one) for key, one in value.items()}
    return _READ.get(hint) or getattr(hint, "from_json", hint)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:120]!r} is not text")  # noqa: TRY004  a damaged document is known by it
    return value


_READ: Mapping[Any, Callable[[Any], Any]] = {
    datetime: parse_time,
    timedelta: lambda value: timedelta(seconds=value),
    str: _text,
    Any: lambda value: value,
}


def _value(name: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its {name} is not valid: {error}") from error
