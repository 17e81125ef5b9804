"""What the catalog's tables are made of: column types, and columns that several of them have.

Each table is declared beside what reads and writes it. Besides, only ``alembic/versions`` knows columns.

Long lists, page by page: newest first, each page with the cursor of the next one.

A cursor names the last row that was given by its moment and its id, so rows that come and go meanwhile neither repeat
nor hide others, and the row may be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    MetaData,
    Select,
    Table,
    Text,
    TypeDecorator,
    bindparam,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.engine import RowMapping

from backupd.model.errors import UsageError
from backupd.model.proof import Phase
from backupd.model.text import format_time, parse_time


class UtcTime(TypeDecorator[datetime]):
    """Aware datetimes in, aware datetimes in UTC out, microseconds kept.

    SQLite has no zones: there the column holds the UTC clock as text, which sorts by time. PostgreSQL returns
    ``timestamptz`` in the zone of the session, so it is brought back to UTC.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Raises ValueError for a moment without a time zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a moment needs a time zone")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """An aware datetime in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


def written_out(text: str) -> str:
    """``text`` with everything written out that a database refuses."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


class FreeText(TypeDecorator[str]):
    """Text of programs and file names, which may hold what a database refuses.

    PostgreSQL stores no NUL, and neither database stores the lone surrogates by which Python carries bytes that are
    not UTF-8: both are written out (``\\x00``, ``\\udcff``) instead of failing the record of a failure.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002  the signature is SQLAlchemy's
        """The text with everything written out that a database refuses."""
        return None if value is None else written_out(value)


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    }
)


def position_fields() -> tuple[Column[Any], ...]:
    """A position in the binary log, of which a server may know the file or the GTIDs or neither."""
    return (
        Column("position_file", FreeText, nullable=False),
        Column("position_pos", BigInteger, nullable=False),
        Column("position_gtid", FreeText, nullable=False),
    )


def phases_json(phases: Iterable[Phase]) -> list[dict[str, Any]]:
    """Exact, unlike ``Phase.as_json``, which rounds for readers."""
    return [{"name": phase.name, "seconds": phase.seconds, "bytes": phase.bytes} for phase in phases]


def phases_from(column: Iterable[dict[str, Any]]) -> tuple[Phase, ...]:
    """What ``phases_json`` wrote."""
    return tuple(Phase(item["name"], float(item["seconds"]), int(item["bytes"])) for item in column)


R = TypeVar("R")


def row_of(table: Table, record: Any, **given: Any) -> dict[str, Any]:
    """The row of ``table`` for a dataclass: a field in the column of its name, the fields of a nested one in columns of
    their names, which may begin with that of the field; ``given``: further values, or other ones."""
    values: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value) and field.name not in table.c:
            for name, part in asdict(value).items():  # type: ignore[arg-type]  # of a value, not of its class
                values |= {name: part, f"{field.name}_{name}": part}
        else:
            values[field.name] = _stored(value)
    names = [column.name for column in table.columns if column.autoincrement is not True or column.name in given]
    values |= given
    return {name: values[name] for name in names if name in values}


def _stored(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Set):
        return sorted(value)
    if isinstance(value, tuple):
        return [_stored(one) for one in value]
    if isinstance(value, Mapping):
        return dict(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def record_of(kind: Callable[..., R], row: RowMapping, **given: Any) -> R:
    """What ``row_of`` made a row of; ``given``: fields that are not in it."""
    return reader(kind, row.keys(), *given)(row, **given)


def reader(kind: Callable[..., R], columns: Iterable[str], *given: str) -> Callable[..., R]:
    """The same for many rows of these columns, which it takes with a value of each of ``given``."""
    fields_of = _fields(kind, tuple(columns), given)

    def read(row: RowMapping, **values: Any) -> R:
        for name, made, parts in fields_of:
            values[name] = row[name] if made is None else made(*[row[part] for part in parts])
        return kind(**values)

    return read


@cache
def _fields(
    kind: Any, columns: tuple[str, ...], given: tuple[str, ...]
) -> tuple[tuple[str, Callable[..., Any] | None, tuple[str, ...]], ...]:
    """The fields that are in rows of these columns, each with what makes it of which columns; None: as it is."""
    found: list[tuple[str, Callable[..., Any] | None, tuple[str, ...]]] = []
    hints = get_type_hints(kind)
    for name in (field.name for field in fields(kind) if field.name not in given):
        if name in columns:
            found.append((name, _read(hints[name]), (name,)))
        elif is_dataclass(hints[name]):
            parts = (part.name for part in fields(hints[name]))
            found.append((name, hints[name], tuple(part if part in columns else f"{name}_{part}" for part in parts)))
    return tuple(found)


def _read(hint: Any) -> Callable[[Any], Any] | None:
    parts = get_args(hint)
    if get_origin(hint) is UnionType:
        read = _read(next(part for part in parts if part is not NoneType))
        return None if read is None else lambda value: None if value is None else read(value)
    if get_origin(hint) is tuple:
        one = _read(parts[0])
        return lambda value: tuple((value or ()) if one is None else map(one, value))
    if get_origin(hint) is frozenset:
        return frozenset
    if isinstance(hint, type) and issubclass(hint, bool | Enum):
        return hint
    return getattr(hint, "from_json", None)


def records(
    connection: Connection, kind: Callable[..., R], query: Select[Any], values: Mapping[str, Any] | None = None
) -> tuple[R, ...]:
    """What the rows of ``query`` are the rows of, in their order; ``values``: of its bound parameters."""
    rows = connection.execute(query, values).mappings()
    return tuple(map(reader(kind, rows.keys()), rows))


def first_record(connection: Connection, kind: Callable[..., R], query: Select[Any]) -> R | None:
    """Of the first row of ``query``; None where it has none."""
    row = connection.execute(query).mappings().first()
    return None if row is None else record_of(kind, row)


def put_row(connection: Connection, table: Table, values: Mapping[str, Any]) -> None:
    """Insert a row; one that has the same key gives way."""
    connection.execute(delete(table).where(*(key == values[key.name] for key in table.primary_key.columns)))
    connection.execute(insert(table).values(values))


def write_row(
    connection: Connection,
    table: Table,
    values: Mapping[str, Any],
    *,
    key: Sequence[str] = (),
    once: Sequence[str] = (),
) -> None:
    """Change the row that has this key, by default the primary one, or insert it. ``once``: columns that are written
    with a new row only: somebody else writes them later, or they are of its beginning."""
    names = key or [column.name for column in table.primary_key.columns]
    again = {name: value for name, value in values.items() if name not in (*names, *once)}
    known = update(table).where(*(table.c[name] == values[name] for name in names))
    if not connection.execute(known.values(again)).rowcount:
        connection.execute(insert(table).values(values))


def insert_all(connection: Connection, table: Table, found: Iterable[Any]) -> None:
    """Insert the rows of these records, within a transaction of the caller."""
    if rows := [row_of(table, one) for one in found]:
        connection.execute(insert(table), rows)


T = TypeVar("T")
_BETWEEN = "~"
_HINT = "use the cursor of the previous page, or start with the first page"


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """One page. ``next``: the cursor of the one after it, None where this is the last one."""

    items: tuple[T, ...]
    next: str | None = None

    @classmethod
    def of(cls, found: Sequence[T], limit: int, cursor: Callable[[T], str]) -> Listed[T]:
        """``found``: one more than ``limit`` where there is another page."""
        items = tuple(found[:limit])
        return cls(items, cursor(items[-1]) if len(found) > limit and items else None)

    @classmethod
    def part(cls, values: Sequence[T], limit: int | None, after: str | None, cursor: Callable[[T], str]) -> Listed[T]:
        """Of a list that is at hand: all that follows ``after``, or the first ``limit`` of it. Raises UsageError for
        what is the cursor of none of the ``values``."""
        names = [cursor(value) for value in values]
        if after is not None and after not in names:
            raise UsageError(f"{after[:80]!r} is not a cursor", hint=_HINT)
        rest = values if after is None else values[names.index(after) + 1 :]
        return cls.of(rest, len(rest) if limit is None else limit, cursor)


@dataclass(frozen=True, slots=True)
class Span:
    """From ``since`` to ``until``, with both; None: without an end there."""

    since: datetime | None = None
    until: datetime | None = None

    def of(self, query: Select[Any], moment: Column[Any]) -> Select[Any]:
        """Those rows of ``query`` whose ``moment`` is in it."""
        if self.since is not None:
            query = query.where(moment >= self.since)
        return query if self.until is None else query.where(moment <= self.until)


EVER = Span()


def narrowed(query: Select[Any], *wanted: tuple[Column[Any], object]) -> Select[Any]:
    """Those rows of ``query`` that have these values in these columns, or one of several; None: any value."""
    for column, value in wanted:
        if isinstance(value, Collection) and not isinstance(value, str):
            query = query.where(column.in_([_stored(one) for one in value]))
        elif value is not None:
            query = query.where(column == _stored(value))
    return query


def among(column: Column[str], values: Collection[str], dialect: str) -> ColumnElement[bool]:
    """Has ``column`` one of ``values``, of which there may be a thousand? The list is one bound value: the statement is
    the same whatever is in it. Drivers keep the statements that they were given, and one with a thousand parameters
    takes 200 KiB for each length of the list, on each connection."""
    made = func.json_each if dialect == "sqlite" else func.json_array_elements_text
    listed = made(bindparam(None, sorted(values), JSON)).table_valued("value")
    return column.in_(select(listed.c.value))


def page(
    read: Callable[[Select[Any]], Sequence[Any]], query: Select[Any], moment: Column[Any], after: str | None, limit: int
) -> Listed[Any]:
    """What ``read`` makes of the rows of ``query`` behind the cursor ``after``, by ``moment`` and id, newest
    first. Raises UsageError for what is not a cursor."""
    row_id = moment.table.c.id
    if after is not None:
        then, row = _parsed(after)
        query = query.where(tuple_(moment, row_id) < (then, row))
    found = read(query.order_by(moment.desc(), row_id.desc()).limit(limit + 1))
    return Listed.of(found, limit, lambda one: f"{format_time(getattr(one, moment.name))}{_BETWEEN}{one.id}")


_AT_A_TIME = 1000


def page_by_page(read: Callable[[int, str | None], Listed[T]], limit: int | None = None) -> Iterator[T]:
    """The rows of a list, ``limit`` of them at most, while they are read: of a long list one page is in memory.
    ``read``: gives a page of that many rows after a cursor."""
    left, after = limit, None
    while left is None or left > 0:
        found = read(_AT_A_TIME if left is None else min(left, _AT_A_TIME), after)
        yield from found.items
        left, after = None if left is None else left - len(found.items), found.next
        if after is None:
            return


def number_of(after: str) -> int:
    """The cursor of a list whose rows are numbered. Raises UsageError."""
    if not after.isascii() or not after.isdigit() or len(after) > 18:
        raise UsageError(f"{after[:80]!r} is not a cursor", hint=_HINT)
    return int(after)


def _parsed(after: str) -> tuple[datetime, str]:
    moment, _, row = after.partition(_BETWEEN)
    try:
        if not row or "\0" in row:
            raise ValueError(after)
        return parse_time(moment), row
    except ValueError as error:
        raise UsageError(f"{after[:80]!r} is not a cursor", hint=_HINT) from error
