"""Names of tables, and patterns of them as operators write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

_QUOTED = re.compile(r"`((?:[^`]|``)+)`\.`((?:[^`]|``)+)`")
_PLAIN_HALF = re.compile(r"[^.\s`][^.`]*")


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
    """``shop.orders``, ``shop.*``, ``*.log_?``; or one table, quoted: ```my.shop`.`or der` ``, which means just this
    name. ``*`` stands for any text, ``?`` for one character; upper and lower case differ."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, saying how to write it."""
        halves = text.split(".")
        if _QUOTED.fullmatch(text) or (len(halves) == 2 and all(_PLAIN_HALF.fullmatch(half) for half in halves)):
            return cls(text)
        raise ValueError(f"{text!r} is not a pattern of tables: write schema.table, as in shop.* or shop.audit_*, or "
                         "quote one table with backticks: `my.shop`.`or der` (in there, * means itself)")

    @property
    def table(self) -> TableName | None:
        """The table, where only one can be meant."""
        if _QUOTED.fullmatch(self.text):
            return TableName.parse(self.text)
        schema, _, table = self.text.partition(".")
        return None if set(self.text) & set("*?") else TableName(schema, table)

    def fits(self, name: TableName) -> bool:
        if (only := self.table) is not None:
            return only == name
        schema, _, table = self.text.partition(".")
        return _fits(name.schema, schema) and _fits(name.table, table)

    def takes_all_of(self, schema: str) -> bool:
        """Does it mean every table of ``schema``, and so the schema itself?"""
        of_schema, _, table = self.text.partition(".")
        return table == "*" and _fits(schema, of_schema)

    def __str__(self) -> str:
        return self.text


def _fits(text: str, pattern: str) -> bool:
    return fnmatchcase(text, pattern.replace("[", "[[]"))


def fits_any(name: TableName, patterns: Iterable[TablePattern]) -> bool:
    return any(pattern.fits(name) for pattern in patterns)
