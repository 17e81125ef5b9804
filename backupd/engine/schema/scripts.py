"""Scripts of views, triggers, routines and events: each statement in the surroundings that it was made in.

A script can be given to a client. The end of a statement is a delimiter that occurs nowhere inside of it, alone on its
line, so ``statements`` finds it whatever quotes, comments and modes a body uses. Scripts are UTF-8. A client sends the
character set with which the object was made only where that cannot matter to the bytes; otherwise the object comes
back with the same text and ``character_set_client`` utf8mb4. A client without ``--comments`` leaves out comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backupd.engine.schema.definition_text import Token, tokens
from backupd.model.table import quote_name

_UNICODE = frozenset({"utf8mb4", "utf8mb3", "utf8"})
_SET_DELIMITER = "DELIMITER "
_WORD = re.compile(r"\w+")
_MODES = re.compile(r"[\w,]*")
_ZONE = re.compile(r"[\w+:/-]+")


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored object. ``sql_mode`` empty for views, ``time_zone`` for all but events. ``database_collation``: the
    schema's when it was made; parameters and variables without a character set have its."""

    statement: str
    sql_mode: str = ""
    charset: str = "utf8mb4"
    collation: str = ""
    database_collation: str = ""
    time_zone: str = ""

    @classmethod
    def from_record(cls, record: Mapping[str, Any], statement: str) -> Stored:
        """From a row of SHOW CREATE ...."""
        return cls(
            statement=statement,
            sql_mode=str(record.get("sql_mode") or ""),
            charset=str(record.get("character_set_client") or "utf8mb4"),
            collation=str(record.get("collation_connection") or ""),
            database_collation=str(record.get("Database Collation") or ""),
            time_zone=str(record.get("time_zone") or ""),
        )


def script(objects: Iterable[Stored], *, collation: str) -> str:
    """Of objects of one schema, whose own collation is ``collation``; empty without any."""
    lines: list[str] = []
    for one in objects:
        charset = one.charset if one.charset in _UNICODE or one.statement.isascii() else "utf8mb4"
        settings = [f"sql_mode = '{_safe(_MODES, one.sql_mode)}'", f"character_set_client = {_safe(_WORD, charset)}"]
        if one.collation:
            settings.append(f"collation_connection = {_safe(_WORD, one.collation)}")
        if one.time_zone:
            settings.append(f"time_zone = '{_safe(_ZONE, one.time_zone)}'")
        delimiter = _delimiter(one.statement)
        made_in = one.database_collation or collation
        lines.append(f"SET SESSION {', SESSION '.join(settings)};")
        if made_in != collation:
            lines.append(_collate(made_in))
        lines += [_SET_DELIMITER + delimiter, one.statement, delimiter, _SET_DELIMITER + ";"]
        if made_in != collation:
            lines.append(_collate(collation))
    return "\n".join(["SET NAMES utf8mb4;", *lines, ""]) if lines else ""


def statements(text: str) -> Iterator[str]:
    """The statements of a script that ``script`` wrote, one after the other, for the same session with the schema as
    its default."""
    lines = iter(text.split("\n"))
    for line in lines:
        delimiter = line.removeprefix(_SET_DELIMITER)
        if not line.startswith(_SET_DELIMITER):
            statement = line  # a name may hold line ends
            while statement.count("`") % 2 and not line.startswith("-- ") and (more := next(lines, None)) is not None:
                statement += f"\n{more}"
            if statement:
                yield statement.removesuffix(";")
        elif delimiter != ";":
            body: list[str] = []
            for inner in lines:
                if inner == delimiter:
                    break
                body.append(inner)
            yield "\n".join(body)


def _collate(collation: str) -> str:
    charset = collation.partition("_")[0]
    return f"ALTER DATABASE CHARACTER SET {_safe(_WORD, charset)} COLLATE {_safe(_WORD, collation)};"


def _safe(pattern: re.Pattern[str], value: str) -> str:
    if pattern.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not what a server names so")
    return value


def _delimiter(statement: str) -> str:
    number, delimiter = 0, "//"
    while delimiter in statement:
        number += 1
        delimiter = f"//{number}//"
    return delimiter


def made_trigger(statement: str, *, table: str = "", name: str = "") -> str:
    """A CREATE TRIGGER without schemas; with ``table`` or ``name`` given, on this one, or called so.

    MariaDB keeps the words with which a trigger was made, ``ON shop.orders`` among them, and would so make it in the
    old schema again. Raises ValueError for a statement that is not understood.
    """
    found = list(tokens(statement))
    words = [token.word for token in found]
    try:
        made = words.index("TRIGGER")
        on = words.index("ON", made)
        body = next(at for at in range(on, len(found)) if words[at : at + 3] == ["FOR", "EACH", "ROW"]) + 3
    except (ValueError, StopIteration):
        raise ValueError(f"this is not a trigger: {statement[:200]!r}") from None
    start = made + 4 if words[made + 1 : made + 4] == ["IF", "NOT", "EXISTS"] else made + 1
    old_name, timed = _name(found, start)
    old_table, _ = _name(found, on + 1)
    if words[body : body + 1] in (["FOLLOWS"], ["PRECEDES"]):
        body = _name(found, body + 1)[1]
    definer = statement[found[1].start : found[made].start].strip() if made > 1 else ""
    if words[1:3] == ["OR", "REPLACE"]:
        definer = statement[found[3].start : found[made].start].strip() if made > 3 else ""
    timing = " ".join(token.text for token in found[timed:on])
    if body >= len(found):
        raise ValueError(f"this trigger has no body: {statement[:200]!r}")
    return (
        f"CREATE {definer + ' ' if definer else ''}TRIGGER {quote_name(name or old_name)} {timing} "
        f"ON {quote_name(table or old_table)} FOR EACH ROW {statement[found[body].start :]}"
    )


def _name(found: list[Token], at: int) -> tuple[str, int]:
    """The last part of the name at ``at``, with a schema or without one, and the place behind."""
    while at + 2 < len(found) and found[at + 1].text == ".":
        at += 2
    if at >= len(found):
        raise ValueError(f"a name is missing at the end: {' '.join(token.text for token in found)[:200]!r}")
    return found[at].plain, at + 1
