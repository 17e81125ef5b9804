"""Tables and what a backup holds of them: names and patterns, the inventory in a manifest, the layout of a dump.

The layout of a logical backup does not depend on the tool that took it. ``E(name)`` is the name with all of ASCII but
letters, digits, ``_`` and ``-``, and whatever cannot be printed, as ``%`` and two hex digits per byte of UTF-8:
different names stay different, none leaves its folder, and 64 characters of any script fit into the 255 bytes that file
systems allow::

    schemas/E(schema)/create.sql              CREATE DATABASE
    schemas/E(schema)/views.sql               views
    schemas/E(schema)/routines.sql            procedures and functions (packages, too)
    schemas/E(schema)/events.sql              scheduled events
    tables/E(schema)/E(table)/definition.sql  CREATE TABLE (or SEQUENCE), as the server prints it
    tables/E(schema)/E(table)/data-00000.sql  rows, in any number of files; INSERT statements without the schema
    tables/E(schema)/E(table)/triggers.sql    its triggers

Every file can be given to the client as it is (``mariadb --binary-mode --comments SCHEMA < FILE``): whatever it needs
so that rows and bodies come back as they were, it sets itself, and each file of rows in the same way, whichever tool
wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Self

from backupd.model.document import Document, json_key
from backupd.model.server_facts import Position

_QUOTED = re.compile(r"`((?:[^`]|``)+)`\.`((?:[^`]|``)+)`")
_PLAIN_HALF = re.compile(r"[^.\s`][^.`]*")
_HALF = rf"(`(?:[^`]|``)+`|{_PLAIN_HALF.pattern})"
_PATTERN = re.compile(rf"{_HALF}\.{_HALF}")


def quote_name(*names: str) -> str:
    """```shop`.`or``der` ``: identifiers as they may be written in any statement, whatever the sql_mode."""
    return ".".join("`" + name.replace("`", "``") + "`" for name in names)


@dataclass(frozen=True, slots=True, order=True)
class TableName(Document):
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
    ```my.shop`.`or der` ``, ```my.shop`.* ``. ``*`` matches any text, ``?`` for one character; upper and lower case
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


@dataclass(frozen=True, slots=True)
class BaseTable:
    """A base table or sequence outside the system schemas. ``engine`` as the server names it, "" where it could not
    tell. ``space``: number of its InnoDB tablespace (of the first partition's), None where that is not known.
    ``shared``: its rows are in a tablespace that is not its own (the system's, a general one). ``parts``: names of its
    partitions, ``p0`` or ``p0/p0sp1``; empty where it has none or they are not known."""

    name: TableName
    engine: str
    space: int | None = None
    shared: bool = False
    parts: tuple[str, ...] = ()

    def as_json(self) -> list[Any]:
        return [self.name.schema, self.name.table, self.engine, self.space, self.shared, list(self.parts)]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Self:
        """Raises ValueError, TypeError."""
        schema, table, engine, space, shared, parts = data
        return cls(
            TableName(str(schema), str(table)),
            str(engine),
            None if space is None else int(space),
            bool(shared),
            tuple(str(part) for part in parts),
        )


_CODED = re.compile(r"(?:%[0-9A-F]{2})+")
_KEPT = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def encode_name(name: str) -> str:
    """``E(name)``."""
    return "".join(
        char if char in _KEPT or (not char.isascii() and char.isprintable()) else _coded(char) for char in name
    )


def decode_name(text: str) -> str:
    """What ``encode_name`` wrote."""
    return _CODED.sub(lambda run: bytes.fromhex(run[0].replace("%", "")).decode("utf-8", "surrogateescape"), text)


def _coded(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogateescape"))


def table_folder(name: TableName) -> str:
    return f"tables/{encode_name(name.schema)}/{encode_name(name.table)}/"


def definition_path(name: TableName) -> str:
    return table_folder(name) + "definition.sql"


def triggers_path(name: TableName) -> str:
    return table_folder(name) + "triggers.sql"


def data_path(name: TableName, number: int) -> str:
    """``number`` from 0; without a gap in a finished backup."""
    return f"{table_folder(name)}data-{number:05d}.sql"


def schema_folder(schema: str) -> str:
    return f"schemas/{encode_name(schema)}/"


PREPARED_XA = "prepared_xa"
"""Among a dump's settings: XA transactions that were prepared at its position, whose text says why it cannot be
rolled forward. Missing without any."""


class Outcome(StrEnum):
    """``skipped``: left out by a rule (too large, an engine without rows). ``failed``: wanted, and not there."""

    DUMPED = "dumped"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DumpedTable(Document):
    """What became of one table. ``rows`` None: not counted. ``bytes`` and ``files`` of its rows. ``tool``: which wrote
    the rows. ``reason``: why it was skipped or failed, or "". ``note``: what to know of a dumped one (its engine has no
    snapshots, say). ``position``: of its own snapshot where that is not the backup's."""

    name: TableName = field(metadata=json_key(inline=True))
    outcome: Outcome
    engine: str = ""
    rows: int | None = None
    bytes: int = 0
    files: int = 0
    tool: str = ""
    reason: str = ""
    note: str = ""
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class DumpFacts(Document):
    """Of a logical backup. ``table_set``: the set of the policy, "" for all of it. ``blocked``: seconds that commits
    were blocked for while the snapshots were opened. ``schemas``: those with files in ``schemas/``."""

    tables: tuple[DumpedTable, ...] = field(metadata=json_key(after="settings"))
    schemas: tuple[str, ...] = field(default=(), metadata=json_key(after="blocked"))
    table_set: str = field(default="", metadata=json_key("set"))
    blocked: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def dumped(self) -> tuple[DumpedTable, ...]:
        return tuple(table for table in self.tables if table.outcome is Outcome.DUMPED)

    @property
    def failed(self) -> tuple[DumpedTable, ...]:
        return tuple(table for table in self.tables if table.outcome is Outcome.FAILED)

    @property
    def skipped(self) -> tuple[DumpedTable, ...]:
        return tuple(table for table in self.tables if table.outcome is Outcome.SKIPPED)
