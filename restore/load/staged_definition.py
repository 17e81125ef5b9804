"""The definition of a table for loading: without foreign keys, without places on the source's disks, and, for large
tables, with secondary keys that are built once all rows are there. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from backupd.engine.schema.definition_text import Token, parse_table, tokens, without_directories, without_foreign_keys
from backupd.engine.schema.definitions import TableDefinition

_LATER = (["KEY"], ["UNIQUE", "KEY"])
_ELSEWHERE = frozenset(
    {
        "FEDERATED",
        "FEDERATEDX",
        "SPIDER",
        "CONNECT",
        "MRG_MYISAM",
        "MERGE",
        "OQGRAPH",
        "SPHINX",
        "NDB",
        "NDBCLUSTER",
        "S3",
    }
)
"""Engines whose rows lie somewhere else, mostly in a table that lives on; what is inserted would arrive there."""


@dataclass(frozen=True, slots=True)
class StagedTable:
    """``create``: the statement, for a session in the staging schema. ``later``: names of keys and the ``ADD`` clauses
    that build them, in one ALTER TABLE once all rows are there. ``engine`` as printed, in upper case; ``sequence``: no
    table at all."""

    create: str
    later: tuple[tuple[str, str], ...] = ()
    engine: str = ""
    sequence: bool = False
    versioned: bool = False

    @property
    def rows_elsewhere(self) -> bool:
        """Would an INSERT write into something that is not this table?"""
        return self.engine in _ELSEWHERE


def staged_table(definition: TableDefinition, *, foreign_keys: bool = False, defer: bool = False) -> StagedTable:
    """``definition`` made fit. ``foreign_keys``: keep them; ``defer``: build secondary keys later, where that is
    possible. Raises ValueError when it would create something else than its table."""
    name, create = definition.name, definition.create
    words = list(itertools.islice(tokens(create), 4))
    if len(words) < 4 or words[2].plain != name.table or words[3].text == ".":
        raise ValueError(f"its definition is one of something else: {create[:80]!r}")
    engine = definition.engine.upper()
    if definition.is_sequence:
        return StagedTable(create, engine=engine, sequence=True)
    text = without_directories(create if foreign_keys else without_foreign_keys(name, create))
    versioned = definition.columns.versioned
    if not defer or engine != "INNODB" or versioned or not definition.columns.primary_key:
        return StagedTable(text, engine=engine, versioned=versioned)
    head, items, tail = parts(text)
    counters = {column.name for column in parse_table(name, text).columns.all if column.auto_increment}
    later = [item for item in items if _may_wait(item, counters)]
    inline = [item for item in items if item not in later]
    return StagedTable(
        f"{head}(\n  " + ",\n  ".join(inline) + f"\n){tail}",
        tuple((_key_name(item), f"ADD {item}") for item in later),
        engine,
    )


def parts(create: str) -> tuple[str, Sequence[str], str]:
    """All before the first parenthesis of a CREATE TABLE, what is listed in it, all after it. Raises ValueError."""
    depth, head, begin, items = 0, "", 0, []
    for token in tokens(create):
        if token.kind != "mark":
            continue
        depth += (token.text == "(") - (token.text == ")")
        if token.text == "(" and depth == 1:
            head, begin = create[: token.start], token.end
        elif depth == 0 and token.text == ")":
            items.append(create[begin : token.start].strip())
            return head, items, create[token.end :]
        elif token.text == "," and depth == 1:
            items.append(create[begin : token.start].strip())
            begin = token.end
    raise ValueError(f"this definition has no end: {create[:80]!r}")


def _may_wait(item: str, counters: set[str]) -> bool:
    """A plain or unique key; but the server wants a key that begins with the counter from the start."""
    words = list(tokens(item))
    place = _place_of_name(words)
    plain = [token.word for token in words[:place]] in _LATER
    return plain and words[place + 2].plain not in counters and not {"HASH", "OVERLAPS"} & {one.word for one in words}


def _key_name(item: str) -> str:
    words = list(tokens(item))
    return words[_place_of_name(words)].plain


def _place_of_name(words: Sequence[Token]) -> int:
    return next((place for place, token in enumerate(words) if token.kind == "name"), 0)
