"""The text of a definition as SHOW CREATE prints it: its columns, keys, foreign keys and checks.

Read from the text and not from the information schema, because the text is what a backup holds: so the definition of a
running server and the one out of a backup are understood in the same way. Only what servers print is understood
(backticks, one constraint after the other), not what people may write.

Checks: MySQL knows the name of one only once per schema, as of a foreign key; MariaDB once per table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backupd.engine.sql.dialect import Token, outside, tokens_of
from backupd.engine.sql.tables import ForeignKey
from backupd.model.table import TableName

if TYPE_CHECKING:
    from backupd.engine.sql.client import Session

_ELSEWHERE = re.compile(r"DIRECTORY|DATAFILE", re.IGNORECASE)

_SIGNS = frozenset({"UNSIGNED", "ZEROFILL"})


@dataclass(frozen=True, slots=True)
class Column:
    """``type`` as printed: ``int(10) unsigned zerofill``, ``enum('a','b')``. ``rest``: what follows it.

    ``generated``: computed from others, so that it cannot be inserted; ``stored``: computed once and kept.
    ``period``: ``START`` or ``END`` of a system-versioned row, else empty; such a column is ``generated``, too.
    """

    name: str
    type: str
    rest: str = ""
    nullable: bool = True
    generated: bool = False
    stored: bool = False
    invisible: bool = False
    auto_increment: bool = False
    period: str = ""

    @property
    def kind(self) -> str:
        """The type's first word in lower case: ``int``, ``varchar``."""
        return re.split(r"[\s(]", self.type, maxsplit=1)[0].lower()


@dataclass(frozen=True, slots=True)
class Columns:
    """Of one table, in order. ``versioned``: the table keeps the history of its rows (MariaDB)."""

    all: tuple[Column, ...] = ()
    primary_key: tuple[str, ...] = ()
    versioned: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in order."""
        return tuple(column.name for column in self.all)

    @property
    def written(self) -> tuple[str, ...]:
        """Those that an INSERT gives values for: all but the computed ones, invisible ones too."""
        return tuple(column.name for column in self.all if not column.generated)

    def __getitem__(self, name: str) -> Column:
        """Raises KeyError."""
        for column in self.all:
            if column.name == name:
                return column
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class TableText:
    """A CREATE TABLE, understood. ``engine``: as printed, empty where it is not."""

    columns: Columns
    foreign_keys: tuple[ForeignKey, ...] = ()
    engine: str = ""
    partitioned: bool = False
    spans: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """Where the foreign keys stand, each with the comma before it."""


def parse_table(name: TableName, create: str) -> TableText:
    """Understand the CREATE TABLE (or SEQUENCE) of ``name``. Raises ValueError for text that no server prints."""
    everything = list(tokens_of(create))
    body, options = _split(everything)
    if body is None:
        if [token.word for token in everything[:2]] != ["CREATE", "SEQUENCE"]:
            raise ValueError(f"the definition of {name.shown} has no columns: {create[:100]!r}")
        return TableText(Columns(), engine=_engine(everything))
    columns: list[Column] = []
    primary: tuple[str, ...] = ()
    keys: list[ForeignKey] = []
    spans: list[tuple[int, int]] = []
    for comma, item in body:
        words = [token.word for token in item[:4]]
        if item[0].kind == "name":
            columns.append(_column(create, item))
        elif words[:2] == ["PRIMARY", "KEY"]:
            primary = _listed(item, 2)[0]
        elif words[0] == "CONSTRAINT" and words[2:] == ["FOREIGN", "KEY"]:
            keys.append(_foreign_key(name, item))
            spans.append((comma, item[-1].end))
    words = [token.word for token in options]
    return TableText(
        columns=Columns(tuple(columns), primary, versioned=_after(words, "WITH", "SYSTEM", "VERSIONING") >= 0),
        foreign_keys=tuple(keys),
        engine=_engine(options),
        partitioned=_after(words, "PARTITION", "BY") >= 0,
        spans=tuple(spans),
    )


def without_foreign_keys(name: TableName, create: str) -> str:
    """The same CREATE TABLE without its foreign keys; the indexes that served them stay. Raises ValueError."""
    return _cut(create, parse_table(name, create).spans)


def without_directories(create: str) -> str:
    """The same definition with all files in the datadir: without DATA DIRECTORY and INDEX DIRECTORY."""
    found = list(tokens_of(create))
    spans = []
    for at, token in enumerate(found):
        if token.word not in ("DATA", "INDEX") or at + 2 >= len(found) or found[at + 1].word != "DIRECTORY":
            continue
        value = at + 3 if found[at + 2].text == "=" else at + 2
        if value < len(found) and found[value].kind == "text":
            spans.append((token.start, found[value].end))
    return _cut(create, spans)


def makes_elsewhere(statement: str) -> bool:
    """Does it make files outside of the data directory (DATA DIRECTORY, INDEX DIRECTORY, ADD DATAFILE)?"""
    if not _ELSEWHERE.search(statement):
        return False
    found = list(tokens_of(statement))
    datafile = any(
        one.word == "ADD" and two.word == "DATAFILE" and three.text.strip("'\"").startswith(("/", "../"))
        for one, two, three in zip(found, found[1:], found[2:], strict=False)
    )
    return datafile or without_directories(statement) != statement


def _cut(text: str, spans: Iterable[tuple[int, int]]) -> str:
    for start, end in sorted(spans, reverse=True):
        text = text[:start] + text[end:]
    return text


def _split(found: Sequence[Token]) -> tuple[list[tuple[int, list[Token]]] | None, Sequence[Token]]:
    """What is between the outer parentheses, as (index of the comma before it, tokens) each; and what follows."""
    items: list[tuple[int, list[Token]]] = []
    depth = 0
    for at, token in enumerate(found):
        if token.word == "(":
            depth += 1
            if depth == 1:
                items.append((token.start, []))
                continue
        elif token.word == ")":
            depth -= 1
            if depth == 0:
                complete = all(item for _, item in items)
                return (items, found[at + 1 :]) if complete else (None, found)
        elif token.word == "," and depth == 1:
            items.append((token.start, []))
            continue
        if depth:
            items[-1][1].append(token)
    return None, found


def _column(text: str, item: Sequence[Token]) -> Column:
    end = 2
    if end < len(item) and item[end].text == "(":
        end = _closing(item, end) + 1
    while end < len(item) and item[end].word in _SIGNS:
        end += 1
    words = [token.word for _at, token in outside(item[end:])]
    computed = _after(words, "GENERATED", "ALWAYS", "AS")
    period = words[computed + 1] if computed >= 0 and words[computed : computed + 1] == ["ROW"] else ""
    rest = text[item[end - 1].end : item[-1].end].strip()
    return Column(
        name=item[0].plain,
        type=text[item[1].start : item[end - 1].end],
        rest=f"{rest} */" if rest.rpartition("/*!")[2].find("*/") < 0 <= rest.find("/*!") else rest,
        nullable=_after(words, "NOT", "NULL") < 0 and not period,
        generated=computed >= 0,
        stored=computed >= 0 and bool({"STORED", "PERSISTENT"} & set(words)),
        invisible="INVISIBLE" in words,
        auto_increment="AUTO_INCREMENT" in words,
        period=period,
    )


def _closing(item: Sequence[Token], at: int) -> int:
    """Where the parenthesis that opens at ``at`` is closed."""
    depth = 0
    for index in range(at, len(item)):
        depth += (item[index].word == "(") - (item[index].word == ")")
        if depth == 0:
            return index
    raise ValueError(f"a parenthesis is not closed at {item[at].start}")


def _listed(item: Sequence[Token], at: int) -> tuple[tuple[str, ...], int]:
    """The names in the first parentheses from ``at`` on, and the index behind; none when one is an expression."""
    start = next(index for index in range(at, len(item)) if item[index].text == "(")
    end = _closing(item, start)
    inside = [token for _at, token in outside(item[start + 1 : end])]
    parts = 1 + sum(token.word == "," for token in inside)
    names = tuple(token.plain for token in inside if token.kind == "name")
    return (names if len(names) == parts else ()), end + 1


def _foreign_key(child: TableName, item: Sequence[Token]) -> ForeignKey:
    columns, at = _listed(item, 4)
    parent = [item[at + 1].plain, *([item[at + 3].plain] if item[at + 2].text == "." else [])]
    parent_columns, at = _listed(item, at + 1)
    words = [token.word for token in item[at:]]
    return ForeignKey(
        name=item[1].plain,
        child=child,
        columns=columns,
        parent=TableName(*parent) if len(parent) == 2 else TableName(child.schema, parent[0]),
        parent_columns=parent_columns,
        on_delete=_rule(words, "DELETE"),
        on_update=_rule(words, "UPDATE"),
    )


def _rule(words: Sequence[str], change: str) -> str:
    at = _after(words, "ON", change)
    if at < 0:
        return "NO ACTION"
    return words[at] if words[at] in ("RESTRICT", "CASCADE") else " ".join(words[at : at + 2])


def _engine(found: Sequence[Token]) -> str:
    for at, token in enumerate(found):
        if token.word == "ENGINE" and at + 2 < len(found) and found[at + 1].text == "=":
            return found[at + 2].text
    return ""


def _after(words: Sequence[str], *wanted: str) -> int:
    """The index behind the first ``wanted`` in ``words``; -1 without one."""
    for at in range(len(words) - len(wanted) + 1):
        if tuple(words[at : at + len(wanted)]) == wanted:
            return at + len(wanted)
    return -1


_CHECKS = """
SELECT CONSTRAINT_NAME, TABLE_NAME FROM information_schema.TABLE_CONSTRAINTS
WHERE CONSTRAINT_TYPE = 'CHECK' AND TABLE_SCHEMA = %s
"""


def check_names(session: Session, table: TableName) -> tuple[str, ...]:
    """Raises ServerError."""
    rows = session.query(f"{_CHECKS} AND TABLE_NAME = %s", table.schema, table.table)
    return tuple(str(name) for name, _table in rows)


def schema_checks(session: Session, schema: str) -> dict[str, str]:
    """The table that has each, by the check's name in lower case. Raises ServerError."""
    return {str(name).lower(): str(table) for name, table in session.query(_CHECKS, schema)}


def check_clauses(create: str) -> tuple[tuple[str, str], ...]:
    """Name and clause of each named check of a CREATE TABLE as printed."""
    found = list(tokens_of(create))
    checks = []
    for at, token in enumerate(found[:-3]):
        if token.word != "CONSTRAINT" or found[at + 1].kind != "name" or found[at + 2].word != "CHECK":
            continue
        end = _closing(found, at + 3)
        enforced = [token.word for token in found[end + 1 : end + 3]] != ["NOT", "ENFORCED"]
        text = create[token.start : found[end].end]
        checks.append((found[at + 1].plain, text if enforced else f"{text} NOT ENFORCED"))
    return tuple(checks)
