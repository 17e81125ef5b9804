"""Long lists, page by page: newest first, each page with the cursor of the next one.

A cursor names the last row that was given by its moment and its id, so rows that come and go meanwhile neither repeat
nor hide others, and the row itself may be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from sqlalchemy import Column, Select, and_, or_

from backupd.model.errors import UsageError
from backupd.model.text import format_time, parse_time

T = TypeVar("T")
_BETWEEN = "~"
_HINT = "take the cursor as the page before gave it, or begin with the first page"


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


@dataclass(frozen=True, slots=True)
class Span:
    """From ``since`` to ``until``, with both; None: without an end there."""

    since: datetime | None = None
    until: datetime | None = None

    def of(self, query: Select[Any], moment: Column[Any]) -> Select[Any]:
        """Those rows of ``query`` whose ``moment`` lies in it."""
        if self.since is not None:
            query = query.where(moment >= self.since)
        return query if self.until is None else query.where(moment <= self.until)


EVER = Span()


def cursor_of(moment: datetime, row_id: str) -> str:
    """The cursor behind the row with this moment and id."""
    return f"{format_time(moment)}{_BETWEEN}{row_id}"


def page(query: Select[Any], moment: Column[Any], row_id: Column[Any], after: str | None, limit: int) -> Select[Any]:
    """``query`` in the order of a list, behind the cursor ``after``, and one row more than ``limit``. Raises UsageError
    for what is no cursor."""
    if after is not None:
        then, row = _parsed(after)
        query = query.where(or_(moment < then, and_(moment == then, row_id < row)))
    return query.order_by(moment.desc(), row_id.desc()).limit(limit + 1)


def number_of(after: str) -> int:
    """The cursor of a list whose rows are numbered. Raises UsageError."""
    if not after.isascii() or not after.isdigit() or len(after) > 18:
        raise UsageError(f"{after[:80]!r} is no cursor", hint=_HINT)
    return int(after)


def _parsed(after: str) -> tuple[datetime, str]:
    moment, _, row = after.partition(_BETWEEN)
    try:
        if not row or "\0" in row:
            raise ValueError(after)
        return parse_time(moment), row
    except ValueError as error:
        raise UsageError(f"{after[:80]!r} is no cursor", hint=_HINT) from error
