"""What a replay has to know of a logged statement, by the words at its beginning. Logged are statements as they were
written: with comments of any sort in front, of which versioned ones are read by the server."""

from __future__ import annotations

import re

_FRONT = re.compile(r"(?:[\s(;]+|\*/|/\*M?!\d*|/\*.*?(?:\*/|\Z)|\#[^\n]*|--(?=\s|\Z)[^\n]*)*", re.DOTALL)
_WORD = re.compile(r"\w+")
_WITH_VARIABLES = re.compile(r"SET\s+STATEMENT\b", re.IGNORECASE)
_DEFINES = re.compile(r"(CREATE|ALTER|DROP|SET\s+STATEMENT)\b.*?\b(EVENT|DATABASE|SCHEMA)\b", re.IGNORECASE | re.DOTALL)
_ROUTINES = re.compile(
    r"(?:CREATE|ALTER|DROP)\b.{0,300}?\b(?:PROCEDURE|FUNCTION|PACKAGE|EVENT|SERVER)\b", re.IGNORECASE | re.DOTALL
)
_NO_DATA = frozenset(
    {
        "CREATE",
        "ALTER",
        "DROP",
        "RENAME",
        "TRUNCATE",
        "GRANT",
        "REVOKE",
        "SET",
        "ANALYZE",
        "OPTIMIZE",
        "REPAIR",
        "CHECK",
        "FLUSH",
        "INSTALL",
        "UNINSTALL",
        "IMPORT",
        "BEGIN",
        "START",
        "COMMIT",
        "ROLLBACK",
        "SAVEPOINT",
        "RELEASE",
        "XA",
        "LOCK",
        "UNLOCK",
        "USE",
    }
)
"""DDL, accounts and control of transactions: servers apply them in order. Whatever else is logged as a statement, or
is not understood, changes data."""


def changes_data(text: str) -> bool:
    """Does the statement change rows (which are not logged themselves, then)?"""
    at = _FRONT.match(text)
    begin = at.end() if at else 0
    word = _WORD.match(text, begin)
    if word is None:
        return begin < len(text)
    return word[0].upper() not in _NO_DATA or _WITH_VARIABLES.match(text, begin) is not None


def may_concern_events(text: str) -> bool:
    """May it make, change or drop scheduled events?"""
    at = _FRONT.match(text)
    return _DEFINES.match(text, at.end() if at else 0) is not None


def may_concern_routines(text: str) -> bool:
    """May it make, change or drop a routine, a scheduled event or a server?"""
    at = _FRONT.match(text)
    return _ROUTINES.match(text, at.end() if at else 0) is not None
