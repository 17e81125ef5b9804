"""Tables that a logged statement ties to each other, told from its text: more than there are at times, never fewer of
those that stand in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from backupd.engine.sql.tokens import Token, after_account, full_name, tokens_of

Name = tuple[str, str]
"""Schema and table; the schema is "" where the statement leaves it to the current one."""

_FROM = frozenset({"FROM", "JOIN", "STRAIGHT_JOIN", "USING"})
_AFTER_FROM = frozenset(
    {
        "WHERE",
        "SET",
        "GROUP",
        "ORDER",
        "HAVING",
        "LIMIT",
        "SELECT",
        "VALUES",
        "UNION",
        "FOR",
        "PROCEDURE",
        "WINDOW",
        "RETURNING",
        "LOCK",
    }
)
_NO_TABLE = _AFTER_FROM | {"LATERAL", "ONLY", "ON"}
_REFERS = frozenset({"REFERENCES", "LIKE"})
_ROUTINES = frozenset({"PROCEDURE", "FUNCTION", "PACKAGE", "EVENT", "SERVER"})
_LEADING = frozenset(
    {"OR", "REPLACE", "AGGREGATE", "=", "ALGORITHM", "UNDEFINED", "MERGE", "TEMPTABLE", "SQL", "SECURITY", "INVOKER"}
)
_DATA = frozenset({"INSERT", "REPLACE", "UPDATE", "DELETE", "WITH", "LOAD"})
_QUERY = frozenset({"SELECT", "TABLE", "FROM", "JOIN"})
_DEFINING = frozenset({"CREATE", "ALTER", "DROP", "RENAME", "TRUNCATE"})
_BEFORE_NAMES = frozenset({"REFERENCES", "FROM", "JOIN", "INTO", "UPDATE", "TO", "ON", "."})
_MASKED = "'***'"
_AT_BEGINNING = 10
"""Words, behind which LIKE is no CREATE TABLE ... LIKE any more."""

_OPENS, _CLOSES, _EQUALS = (Token(mark, name=False) for mark in "()=")


@dataclass(frozen=True, slots=True)
class Routine:
    """What is defined or dropped: ``kind`` as it stands there (``EVENT``, ``PROCEDURE`` ...); ``schema`` its own, the
    current one where the statement names none. ``loaded``: is it a function of a library?"""

    kind: str
    schema: str
    loaded: bool = False


def statements(text: str) -> Iterator[list[Token]]:
    """The statements of one transaction, which an index joins with semicolons; a definition is one, with all that is
    in its body."""
    current: list[Token] = []
    for token in tokens_of(text):
        if token.text == ";" and not token.quoted and current and current[0].word not in _DEFINING:
            yield current
            current = []
        elif token.text != ";" or current:
            current.append(token)
    if current:
        yield current


def read_by(tokens: list[Token]) -> tuple[Name, ...]:
    """Tables that stand behind FROM, JOIN, LIKE, REFERENCES and the like: what the statement needs besides those that
    it changes."""
    found: dict[Name, None] = {}
    verb = tokens[0].word if tokens else ""
    if verb in _DATA and not any(token.word in _QUERY for token in tokens):
        return ()
    listing, expected, at = False, False, 0
    outer: list[bool] = []  # whether a list of tables goes on behind each open parenthesis
    while at < len(tokens):
        word = tokens[at].word
        if expected and tokens[at].name and word not in _NO_TABLE:
            name, at = full_name(tokens, at, "")
            found[name] = None
            expected = False
            continue
        if tokens[at] == _OPENS:
            outer.append(listing)
        elif tokens[at] == _CLOSES:
            listing, expected = outer.pop() if outer else False, False
        elif word == "USING" and tokens[at + 1 : at + 2] == [_OPENS]:
            expected = False  # columns of a join
        elif word in _FROM:
            listing = expected = True
        elif word in _REFERS and verb not in _DATA:
            # LIKE in a CHECK or a query is followed by a text, which is no name.
            expected, listing = True, False
        elif word == "TABLE" and at and (tokens[at - 1].word == "WITH" or verb not in _DEFINING):
            expected = True
        elif word == "UNION" and tokens[at + 1 : at + 3] == [_EQUALS, _OPENS]:
            listing = expected = True  # of a MERGE table
            at += 1
        elif word in _AFTER_FROM:
            listing = expected = False
        else:
            expected = listing and word == ","
        at += 1
    return tuple(found)


def renamed(tokens: list[Token]) -> tuple[tuple[Name, Name], ...]:
    """Old and new names, in order, of RENAME TABLE; of ALTER TABLE ... RENAME, too."""
    words = [token.word for token in tokens]
    if words[:1] == ["RENAME"] and words[1:2] in (["TABLE"], ["TABLES"]):
        return tuple(_pairs(tokens, 2))
    if words[:1] != ["ALTER"] or "TABLE" not in words[:6]:
        return ()
    at = words.index("TABLE") + 1
    while at < len(tokens) and words[at] in {"IF", "EXISTS"}:
        at += 1
    if at >= len(tokens):
        return ()
    old, at = full_name(tokens, at, "")
    depth = 0
    for here in range(at, len(tokens) - 1):
        depth += {"(": 1, ")": -1}.get(words[here], 0)
        if not depth and words[here] == "RENAME" and words[here + 1] not in {"COLUMN", "INDEX", "KEY"}:
            begin = here + 2 if words[here + 1] in {"TO", "AS", "="} else here + 1
            if begin < len(tokens) and tokens[begin].name:
                return ((old, full_name(tokens, begin, "")[0]),)
    return ()


def _pairs(tokens: list[Token], at: int) -> Iterator[tuple[Name, Name]]:
    while at < len(tokens):
        while at < len(tokens) and tokens[at].word in {"IF", "EXISTS"}:
            at += 1
        if at >= len(tokens):
            return
        old, at = full_name(tokens, at, "")
        while at < len(tokens) and tokens[at].word != "TO":
            at += 1
        if at + 1 >= len(tokens):
            return
        new, at = full_name(tokens, at + 1, "")
        yield old, new
        at += 1  # the comma


def created_trigger(tokens: list[Token]) -> Name | None:
    """The table of a CREATE TRIGGER, None for any other statement."""
    at = _kind_at(tokens, "CREATE", frozenset({"TRIGGER"}))
    if at is None:
        return None
    for here in range(at, len(tokens) - 1):
        if tokens[here].word == "ON":
            return full_name(tokens, here + 1, "")[0]
    return None


def is_trigger(tokens: list[Token]) -> bool:
    """Is it a CREATE TRIGGER?"""
    return _kind_at(tokens, "CREATE", frozenset({"TRIGGER"})) is not None


def is_view(tokens: list[Token]) -> bool:
    """Is it a CREATE VIEW or an ALTER VIEW?"""
    return any(_kind_at(tokens, verb, frozenset({"VIEW"})) is not None for verb in ("CREATE", "ALTER"))


def has_named_all(tokens: list[Token]) -> bool:
    """Of the beginning of a definition: can nothing that follows name a table that a replay would not miss? Behind the
    table of an index are its columns; a table's partitions come last."""
    words = [token.word for token in tokens]
    if words[:1] == ["CREATE"] and "INDEX" in words[1:4]:
        return "ON" in words
    if words[:1] not in (["CREATE"], ["ALTER"]) or "TABLE" not in words[1:4]:
        return False
    depth = 0
    for at, word in enumerate(words):
        depth += {"(": 1, ")": -1}.get(word, 0)
        if (
            not depth
            and word == "PARTITION"
            and (words[at + 1 : at + 2] == ["BY"] or words[at - 1] in {"ADD", "REORGANIZE"})
        ):
            return True
    return False


def hides_names(tokens: list[Token]) -> bool:
    """Was a name taken for a secret, in the quotation marks that texts have, too?"""
    return any(
        token.text == _MASKED and (before.word in _BEFORE_NAMES or (before.word == "LIKE" and at < _AT_BEGINNING))
        for at, (before, token) in enumerate(pairwise(tokens))
    )


def routine_of(text: str, schema: str) -> Routine | None:
    """Of a statement that creates, alters or drops a routine, a scheduled event or a server; ``schema``: the current
    one."""
    tokens = list(tokens_of(text[:1024]))
    at = next(
        (found for verb in ("CREATE", "ALTER", "DROP") if (found := _kind_at(tokens, verb, _ROUTINES)) is not None),
        None,
    )
    if at is None:
        return None
    kind = tokens[at].word
    at += 1
    while at < len(tokens) and tokens[at].word in {"IF", "NOT", "EXISTS", "BODY"}:
        at += 1
    loaded = any(token.word == "SONAME" for token in tokens[at : at + 6])
    return Routine(kind, full_name(tokens, at, schema)[0][0] if at < len(tokens) else schema, loaded)


def _kind_at(tokens: list[Token], verb: str, kinds: frozenset[str]) -> int | None:
    """Where the kind of what the statement is about stands, when it is one of ``kinds``."""
    if not tokens or tokens[0].word != verb:
        return None
    at = 1
    while at < len(tokens):
        word = tokens[at].word
        if word == "DEFINER" and tokens[at + 1 : at + 2] == [Token("=", name=False)]:
            at = after_account(tokens, at + 1)
        elif word in _LEADING or word == "DEFINER":
            at += 1
        else:
            return at if word in kinds else None
    return None
