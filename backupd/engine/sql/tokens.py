"""A logged statement cut into words, names, texts and marks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN = re.compile(
    r"""\s+ | --(?=\s)[^\n]* | \#[^\n]* | /\*M?!\d* | /\*.*?(?:\*/|\Z) | \*/
      | (?P<quoted>`(?:[^`]++|``)*+`) | (?P<text>'(?:[^'\\]++|\\.|'')*+'?) | (?P<double>"(?:[^"\\]++|\\.|"")*+"?)
      | (?P<word>[\w$]+) | (?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """``text`` without its quotation marks, where it is a name."""

    text: str
    name: bool
    """May it be a name?"""
    quoted: bool = False

    @property
    def word(self) -> str:
        """In upper case, empty for what is quoted."""
        return "" if self.quoted else self.text.upper()


def tokens_of(text: str) -> Iterator[Token]:
    """Comments are left out; versioned ones are read, as the server does."""
    for match in TOKEN.finditer(text):
        kind, found = match.lastgroup, match.group()
        if kind == "quoted":
            yield Token(found[1:-1].replace("``", "`"), name=True, quoted=True)
        elif kind == "double":
            yield Token(found[1:-1].replace('""', '"'), name=True, quoted=True)
        elif kind == "text":
            yield Token(found, name=False, quoted=True)
        elif kind is not None:
            yield Token(found, name=kind == "word")


def full_name(tokens: list[Token], at: int, schema: str) -> tuple[tuple[str, str], int]:
    """The name that begins at ``at``, and where what follows it begins."""
    if at + 2 < len(tokens) and tokens[at + 1].word == "." and tokens[at + 2].name:
        return (tokens[at].text, tokens[at + 2].text), at + 3
    return (schema, tokens[at].text), at + 1


def after_account(tokens: list[Token], at: int) -> int:
    """Behind ``= user@host`` or ``= CURRENT_USER()``."""
    while at < len(tokens) and tokens[at].word == "=":
        at += 1
    at += 1
    while at < len(tokens) and tokens[at].word in {"@", "(", ")"}:
        at += 2 if tokens[at].word == "@" else 1
    return at
