"""Names of tables, and patterns of them as operators write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Self

_QUOTED = re.compile(r"`((?:[^`]|``)+)`\.`((?:[^`]|``)+)`")
_PLAIN_HALF = re.compile(r"[^.\s`][^.`]*")
_HALF = rf"(`(?:[^`]|``)+`|{_PLAIN_HALF.pattern})"
_PATTERN = re.compile(rf"{_HALF}\.{_HALF}")


def quote_name(*names: str) -> str:
    """```shop`.`or``der` ``: identifiers as they may stand in any statement, whatever the sql_mode."""
    return ".".join("`" + name.replace("`", "``") + "`" for name in names)


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A table's schema and name. As text both are quoted with backticks: ```shop`.`orders` ``."""

    schema: str
    table: str

    def __str__(self) -> str:
        return quote_name(self.schema, self.table)

    @property
    def shown(self) -> str:
        """``shop.orders`` where that is not ambiguous, else quoted; what ``TablePattern`` reads as just this table."""
        plain = all(_PLAIN_HALF.fullmatch(half) and not set(half) & set("*?[]") for half in (self.schema, self.table))
        return f"{self.schema}.{self.table}" if plain else str(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str`` wrote. Raises ValueError."""
        match = _QUOTED.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a quoted table name")
        return cls(match.group(1).replace("``", "`"), match.group(2).replace("``", "`"))


@dataclass(frozen=True, slots=True)
class TablePattern:
    """``shop.orders``, ``shop.*``, ``*.log_?``; or with quoted names, which mean just themselves:
    ```my.shop`.`or der` ``, ```my.shop`.* ``. ``*`` stands for any text, ``?`` for one character; upper and lower case
    differ."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, saying how to write it."""
        if _PATTERN.fullmatch(text):
            return cls(text)
        raise ValueError(
            f"{text!r} is not a pattern of tables: write schema.table, as in shop.* or shop.audit_*, and "
            "quote odd names with backticks: `my.shop`.`or der`, `my.shop`.* (in there, * means itself)"
        )

    @property
    def table(self) -> TableName | None:
        """The table, where only one can be meant."""
        schema, table = _halves(self.text)
        return TableName(schema.text, table.text) if schema.plain and table.plain else None

    @property
    def schema(self) -> str:
        """The schema, or what its name must look like."""
        return _halves(self.text)[0].text

    def fits(self, name: TableName) -> bool:
        schema, table = _halves(self.text)
        return schema.fits(name.schema) and table.fits(name.table)

    def reaches(self, schema: str) -> bool:
        """May it mean tables of ``schema``?"""
        return _halves(self.text)[0].fits(schema)

    def takes_all_of(self, schema: str) -> bool:
        """Does it mean every table of ``schema``, and so the schema itself?"""
        of_schema, table = _halves(self.text)
        return table == _Half("*", plain=False) and of_schema.fits(schema)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Half:
    """Of a pattern. ``plain``: it means just this name."""

    text: str
    plain: bool

    @classmethod
    def read(cls, text: str) -> Self:
        if text.startswith("`"):
            return cls(text[1:-1].replace("``", "`"), plain=True)
        return cls(text, plain=not set(text) & set("*?"))

    def fits(self, name: str) -> bool:
        return name == self.text if self.plain else fnmatchcase(name, self.text.replace("[", "[[]"))


@lru_cache(maxsize=1024)
def _halves(pattern: str) -> tuple[_Half, _Half]:
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise ValueError(f"{pattern!r} is not a pattern of tables")
    return _Half.read(match[1]), _Half.read(match[2])


def fits_any(name: TableName, patterns: Iterable[TablePattern]) -> bool:
    return any(pattern.fits(name) for pattern in patterns)
