"""What a statement in a binary log does, told from its text: which tables, in which way.

No parser of SQL: the words at its beginning decide, and where tables stand after them. What is not understood changes
``OTHER`` things; a data change whose tables are not found out is said to change everything (``wild``).

The second half finds the tables that a statement ties to each other: more than there are at times, never fewer than
those that its text names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from backupd.engine.sql.dialect import TOKEN, Token, after_account, full_name, outside, tokens_of, word_at
from backupd.model.binlog import Change, ChangeKind

Name = tuple[str, str]
"""Schema and table; the schema is "" where the statement leaves it to the current one."""

READ_AT_MOST = 64 * 1024
"""Characters of a statement that are looked at."""

_REVEALING = (
    r"PASSW|PASSPHRASE|SECRET|CREDENTIAL|TOKEN|AUTH(?:ENTICATION)?_STRING|"
    r"(?:API|PRIVATE|ENCRYPTION|CRYPT)_?KEY"
)
_MAY_HOLD_SECRETS = re.compile(
    rf"{_REVEALING}|PWD|PASS|IDENTIFIED|CONNECTION|OPTION_LIST|CRYPT|CODE|MD5|SHA|://", re.IGNORECASE
)
_NAMES_SECRET = re.compile(
    rf"{_REVEALING}|(?:^|_)(?:PWD|PASS)(?:$|_)|^(?:IDENTIFIED|CONNECTION|OPTION_LIST)$", re.IGNORECASE
)
"""What stands behind such a word, up to the next comma, is a secret or may hold one."""
_TAKES_SECRET = re.compile(r"(?:\w*(?:EN|DE)CRYPT|(?:EN|DE)CODE|MD5|SHA[12]?)$", re.IGNORECASE)
"""Functions of whose values a key or a password may be one."""
_TELLS_SECRET = re.compile(rf"{_REVEALING}|\bPWD\b|IDENTIFIED\s+(?:BY|WITH|VIA)|://[^/\s]*:[^/\s]*@", re.IGNORECASE)
"""Text with a secret inside, as the connections of tables have it."""
_BENT = re.compile(r"""\\['"]""")
REST_HIDDEN = "'***' ..."
"""How a masked statement ends of which nobody can tell where a secret ends."""
_LEADING_WORDS = """
OR REPLACE ONLINE OFFLINE UNIQUE FULLTEXT SPATIAL VECTOR IGNORE TEMPORARY ALGORITHM DEFINER SQL SECURITY INVOKER
UNDEFINED MERGE TEMPTABLE AGGREGATE
"""
_LEADING = frozenset(_LEADING_WORDS.split())
_MODIFIERS = frozenset({"LOW_PRIORITY", "HIGH_PRIORITY", "DELAYED", "QUICK", "IGNORE", "INTO", "CONCURRENT", "LOCAL"})
_TABLE_LIKE = frozenset({"TABLE", "TABLES", "VIEW", "SEQUENCE"})
_OF_DATABASE = frozenset({"DATABASE", "SCHEMA"})
_DDL = {"CREATE": ChangeKind.CREATE, "ALTER": ChangeKind.ALTER, "DROP": ChangeKind.DROP}
_DATA = {
    "INSERT": ChangeKind.INSERT,
    "REPLACE": ChangeKind.INSERT,
    "UPDATE": ChangeKind.UPDATE,
    "DELETE": ChangeKind.DELETE,
    "LOAD": ChangeKind.INSERT,
}
_OF_TABLES = frozenset({"TRUNCATE", "RENAME", "ANALYZE", "OPTIMIZE", "REPAIR", "CHECK"})
_OF_THE_SERVER = frozenset({"FLUSH", "GRANT", "REVOKE", "SET", "INSTALL", "UNINSTALL", "RESET", "PURGE", "SHUTDOWN"})
_ACCOUNTS = frozenset({"USER", "ROLE", "SERVER", "TABLESPACE", "LOGFILE", "UNDO", "RESOURCE", "INSTANCE"})
_NOT_DATA = frozenset({"LOCK", "UNLOCK", "USE", "BINLOG", "CACHE", "COMMIT", "ROLLBACK", "BEGIN"})
_NOT_LOGGED = frozenset({"RESET", "PURGE", "SHUTDOWN"})
NO_ROWS = (_OF_TABLES | _OF_THE_SERVER | _NOT_DATA.union(_DDL)) - {"BINLOG", "CACHE"} - _NOT_LOGGED
"""Verbs of statements that change no rows: definitions, accounts, control of sessions and transactions. What no server
logs is not among them: nobody knows what it would be."""
_END_OF_TABLES = frozenset({"SET", "WHERE", "VALUES", "VALUE", "SELECT", "ORDER", "LIMIT", "RETURNING"})
_JOIN = frozenset({"JOIN", "STRAIGHT_JOIN", ",", "FROM", "USING"})


@dataclass(frozen=True, slots=True)
class Effect:
    """``data``: does it change rows, or fill a new table, by a statement? ``wild``: of tables that are not known.
    ``temporary``: does it make or drop a temporary table? ``load``: LOAD DATA."""

    changes: tuple[Change, ...]
    data: bool = False
    wild: bool = False
    temporary: bool = False
    load: bool = False


def masked(text: str) -> str:
    """The statement without passwords, their hashes and keys, so far as a statement is looked at. When in doubt a
    value is left out: which table was touched is what a search is for."""
    text = text[:READ_AT_MOST]
    return "".join(_masked(text)) if _MAY_HOLD_SECRETS.search(text) else text


def _masked(text: str) -> Iterator[str]:
    reader = _SecretReader()
    for match in TOKEN.finditer(text):
        kind, found = match.lastgroup or "comment", match.group()
        if not reader.is_secret(kind, found):
            yield found
        elif kind == "comment":
            yield "/* *** */"
        elif _BENT.search(text):
            yield REST_HIDDEN  # where such a string ends depends on the server's SQL mode
            return
        else:
            yield "'***'"


class _SecretReader:
    """Goes through a statement token by token."""

    def __init__(self) -> None:
        self._first: list[str] = []
        """The first two words."""
        self._before = ""
        self._depth = 0
        self._named: int | None = None
        """How deep in parentheses the name of a secret stood, None when what comes is none."""
        self._inside: int | None = None
        """The same of a function that takes one."""
        self._everything = False

    def is_secret(self, kind: str, found: str) -> bool:
        if kind == "comment":
            return bool(_TELLS_SECRET.search(found))
        word = found.upper() if kind == "word" else ""
        hidden = self._hides(kind, found, word)
        if kind == "mark":
            self._pass_mark(found)
        elif word == "REQUIRE" or (word == "FOR" and self._sets_password):
            self._named = None
        elif word and _TAKES_SECRET.match(word):
            self._inside = self._depth if self._inside is None else self._inside
        elif kind != "text" and not hidden and _NAMES_SECRET.search(found.strip('`"')):
            self._named = self._depth if self._named is None else self._named
            self._everything |= self._first[:1] in (["INSERT"], ["REPLACE"])
        if word and len(self._first) < 2:
            self._first.append(word)
        self._before = word or found
        return hidden

    @property
    def _sets_password(self) -> bool:
        return self._first == ["SET", "PASSWORD"]

    def _hides(self, kind: str, found: str, word: str) -> bool:
        expected = self._everything or self._named is not None or self._inside is not None
        if kind in {"text", "double"}:
            simple = found[1:-1].replace("_", "").isalnum()
            if simple and self._named is not None and self._before in {"WITH", "VIA", "OR"}:
                return self._everything  # else it is a plugin
            a_name = simple and kind == "double"  # it may be one of a column
            return expected or bool(_TELLS_SECRET.search(found) and not a_name)
        return expected and (word.startswith("0X") or (word[:1].isdigit() and self._before == "="))

    def _pass_mark(self, found: str) -> None:
        if found == ";":
            self._first, self._named, self._inside, self._everything = [], None, None, False
        elif found == "=" and self._sets_password:
            self._named = self._depth
        elif found in {"(", ")"}:
            self._depth += 1 if found == "(" else -1
            if self._named is not None and self._depth < self._named:
                self._named = None
            if self._inside is not None and self._depth <= self._inside:
                self._inside = None
        elif self._inside == self._depth:
            self._inside = None  # no function after all
        if found == "," and self._named is not None and self._depth <= self._named:
            self._named = None


def effect(text: str, schema: str) -> Effect:
    """What ``text`` does when ``schema`` is the current one."""
    coming = tokens_of(text[:READ_AT_MOST])
    first = next(coming, None)
    if first is None:
        return Effect(())
    if first.word in _DATA:
        return _data(first.word, _head(first.word, coming), schema)
    tokens = [first, *coming]
    if first.word == "WITH":
        tokens = _after_with(tokens)
    verb = tokens[0].word if tokens else ""
    if verb in _DATA:
        return _data(verb, _head(verb, iter(tokens[1:])), schema)
    if verb in _DDL:
        return _definition(_DDL[verb], tokens[1:], schema)
    if verb in _OF_TABLES:
        return Effect(_of_tables(verb, tokens, schema) or _other(schema))
    unknown = verb not in _NOT_DATA | _OF_THE_SERVER
    return Effect(_other("" if verb in _OF_THE_SERVER else schema), data=unknown, wild=unknown)


def _head(verb: str, coming: Iterator[Token]) -> list[Token]:
    """What is before the data: values can be long, and no table is named behind them."""
    ends = _END_OF_TABLES | {"("} if _DATA[verb] is ChangeKind.INSERT else _END_OF_TABLES
    head: list[Token] = []
    depth = 0
    for token in coming:
        if not depth and token.word in ends and verb != "LOAD":
            break
        depth += {"(": 1, ")": -1}.get(token.word, 0)
        head.append(token)
    return head


def _of_tables(verb: str, tokens: list[Token], schema: str) -> tuple[Change, ...]:
    at = next((at for at, token in enumerate(tokens) if token.word in {"TABLE", "TABLES"}), 0)
    names = _listed(tokens[at + 1 :], schema)
    if verb == "TRUNCATE":
        return _changes(names[:1], ChangeKind.TRUNCATE)
    return _changes(names if at else [], ChangeKind.RENAME if verb == "RENAME" else ChangeKind.OTHER)


def _after_with(tokens: list[Token]) -> list[Token]:
    verbs = {*_DATA, "SELECT"}
    return next((tokens[at:] for at, token in outside(tokens) if token.word in verbs), [])


def _definition(kind: ChangeKind, tokens: list[Token], schema: str) -> Effect:
    at = _behind_leading(tokens, 0)
    if at >= len(tokens):
        return Effect(_other(schema))
    temporary = any(token.word == "TEMPORARY" for token in tokens[:at])
    what, rest = tokens[at].word, tokens[at + 1 :]
    while word_at(rest, 0) in {"IF", "NOT", "EXISTS"}:
        rest = rest[1:]
    if what in _TABLE_LIKE:
        names = _listed(rest, schema)
        if kind is not ChangeKind.DROP:
            names = names[:1]
        filled = kind is ChangeKind.CREATE and what == "TABLE" and _is_filled(rest)
        if temporary:
            return Effect(_changes(names, ChangeKind.OTHER), data=filled, temporary=True)
        new = _renamed(rest, 0, schema) if kind is ChangeKind.ALTER else None
        return Effect(_changes(names, kind) + _changes([new] if new else [], ChangeKind.RENAME), data=filled)
    if what in _OF_DATABASE:
        named = rest and rest[0].may_name and rest[0].word not in {"CHARACTER", "DEFAULT", "COLLATE", "CHARSET"}
        return Effect((Change(rest[0].plain if named else schema, "", kind),))
    if what in {"INDEX", "TRIGGER"}:
        on = next((number for number, token in enumerate(rest) if token.word == "ON"), len(rest))
        meant = ChangeKind.ALTER if what == "INDEX" else ChangeKind.OTHER
        return Effect(_changes(_listed(rest[on + 1 :], schema)[:1], meant) or _other(schema))
    return Effect(_other("" if what in _ACCOUNTS else schema))


def _is_filled(rest: list[Token]) -> bool:
    """Does what stands behind CREATE TABLE fill it from a query?"""
    return any(
        (token.word == "SELECT" or (token.word == "TABLE" and at)) and rest[at - 1].word != "."
        for at, token in enumerate(rest)
    )


def _renamed(tokens: list[Token], at: int, schema: str) -> Name | None:
    """The new name in an ALTER TABLE ... RENAME [TO|AS], whose clauses begin at ``at``."""
    for here, token in outside(tokens[at:-1]):
        following = at + here + 1
        if token.word == "RENAME" and tokens[following].word not in {"COLUMN", "INDEX", "KEY"}:
            begin = following + (tokens[following].word in {"TO", "AS", "="})
            return full_name(tokens, begin, schema)[0] if begin < len(tokens) and tokens[begin].may_name else None
    return None


def _data(verb: str, tokens: list[Token], schema: str) -> Effect:
    kind, load = _DATA[verb], verb == "LOAD"
    if load:
        at = next((at for at, token in enumerate(tokens) if token.word == "TABLE"), len(tokens))
        names = _listed(tokens[at + 1 :], schema)[:1]
    else:
        while tokens and tokens[0].word in _MODIFIERS:
            tokens = tokens[1:]
        if kind is ChangeKind.INSERT:
            names = _listed(tokens, schema)[:1]
        elif (
            kind is ChangeKind.DELETE
            and tokens
            and tokens[0].word == "FROM"
            and not any(token.word == "USING" for token in tokens)
        ):
            names = _listed(tokens[1:], schema)[:1]
        else:
            names = _joined(tokens, schema)
    return Effect(_changes(names, kind) or _other(schema), data=True, wild=not names, load=load)


def _joined(tokens: list[Token], schema: str) -> list[tuple[str, str]]:
    """All tables that an UPDATE or a DELETE of several tables names: more than it changes, never fewer."""
    found: list[tuple[str, str]] = []
    expected, at = True, 0
    while at < len(tokens):
        word = tokens[at].word
        if expected and tokens[at].may_name and word not in _JOIN | {"LATERAL", "SELECT"}:
            name, at = full_name(tokens, at, schema)
            if name not in found:
                found.append(name)
            expected = False
            continue
        condition = word == "USING" and word_at(tokens, at + 1) == "("
        expected = (word in _JOIN and not condition) or (expected and word in {"(", "."})
        at += 1
    return found


def _listed(tokens: list[Token], schema: str) -> list[tuple[str, str]]:
    """Names with commas, or TO, between them."""
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(tokens) and tokens[at].may_name:
        if tokens[at].word in {"IF", "EXISTS", "NOT"}:
            at += 1
            continue
        name, at = full_name(tokens, at, schema)
        found.append(name)
        while at < len(tokens) and (tokens[at].word in {"WAIT", "NOWAIT"} or tokens[at].text.isdigit()):
            at += 1
        if word_at(tokens, at) not in {",", "TO"}:
            break
        at += 1
    return found


def _changes(names: list[tuple[str, str]], kind: ChangeKind) -> tuple[Change, ...]:
    return tuple(Change(schema, name, kind) for schema, name in dict.fromkeys(names))


def _other(schema: str) -> tuple[Change, ...]:
    return (Change(schema, "", ChangeKind.OTHER),)


_FROM = frozenset({"FROM", "JOIN", "STRAIGHT_JOIN", "USING"})
_AFTER_FROM_WORDS = """
WHERE SET GROUP ORDER HAVING LIMIT SELECT VALUES UNION FOR PROCEDURE WINDOW RETURNING LOCK
"""
_AFTER_FROM = frozenset(_AFTER_FROM_WORDS.split())
_NO_TABLE = _AFTER_FROM | {"LATERAL", "ONLY", "ON"}
_REFERS = frozenset({"REFERENCES", "LIKE"})
_ROUTINES = frozenset({"PROCEDURE", "FUNCTION", "PACKAGE", "EVENT", "SERVER"})
_CHANGES_ROWS = frozenset({"INSERT", "REPLACE", "UPDATE", "DELETE", "WITH", "LOAD"})
_QUERY = frozenset({"SELECT", "TABLE", "FROM", "JOIN"})
_DEFINING = frozenset({"CREATE", "ALTER", "DROP", "RENAME", "TRUNCATE"})
_BEFORE_NAMES = frozenset({"REFERENCES", "FROM", "JOIN", "INTO", "UPDATE", "TO", "ON", "."})
_MASKED = "'***'"
_AT_BEGINNING = 10
"""Words, behind which LIKE is no CREATE TABLE ... LIKE any more."""


@dataclass(frozen=True, slots=True)
class Routine:
    """What is defined or dropped: ``kind`` as it is there (``EVENT``, ``PROCEDURE`` ...); ``schema`` its own, the
    current one where the statement names none. ``loaded``: is it a function of a library?"""

    kind: str
    schema: str
    loaded: bool = False


def statements(text: str) -> Iterator[list[Token]]:
    """The statements of one transaction, which an index joins with semicolons; a definition is one, with all that is
    in its body."""
    current: list[Token] = []
    for token in tokens_of(text):
        if token.word == ";" and current and current[0].word not in _DEFINING:
            yield current
            current = []
        elif token.word != ";" or current:
            current.append(token)
    if current:
        yield current


def read_by(tokens: list[Token]) -> tuple[Name, ...]:
    """Tables that stand behind FROM, JOIN, LIKE, REFERENCES and the like: what the statement needs besides those that
    it changes."""
    found: dict[Name, None] = {}
    verb = tokens[0].word if tokens else ""
    if verb in _CHANGES_ROWS and not any(token.word in _QUERY for token in tokens):
        return ()
    listing, expected, at = False, False, 0
    outer: list[bool] = []  # whether a list of tables goes on behind each open parenthesis
    while at < len(tokens):
        word = tokens[at].word
        if expected and tokens[at].may_name and word not in _NO_TABLE:
            name, at = full_name(tokens, at, "")
            found[name] = None
            expected = False
            continue
        if word == "(":
            outer.append(listing)
        elif word == ")":
            listing, expected = outer.pop() if outer else False, False
        elif word == "USING" and word_at(tokens, at + 1) == "(":
            expected = False  # columns of a join
        elif word in _FROM:
            listing = expected = True
        elif word in _REFERS and verb not in _CHANGES_ROWS:
            # LIKE in a CHECK or a query is followed by a text, which is no name.
            expected, listing = True, False
        elif word == "TABLE" and at and (tokens[at - 1].word == "WITH" or verb not in _DEFINING):
            expected = True
        elif word == "UNION" and word_at(tokens, at + 1) == "=" and word_at(tokens, at + 2) == "(":
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
    while word_at(tokens, at) in {"IF", "EXISTS"}:
        at += 1
    if at >= len(tokens):
        return ()
    old, at = full_name(tokens, at, "")
    new = _renamed(tokens, at, "")
    return ((old, new),) if new else ()


def _pairs(tokens: list[Token], at: int) -> Iterator[tuple[Name, Name]]:
    while at < len(tokens):
        while word_at(tokens, at) in {"IF", "EXISTS"}:
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
    at = kind_at(tokens, "CREATE", frozenset({"TRIGGER"}))
    if at is None:
        return None
    for here in range(at, len(tokens) - 1):
        if tokens[here].word == "ON":
            return full_name(tokens, here + 1, "")[0]
    return None


def is_trigger(tokens: list[Token]) -> bool:
    """Is it a CREATE TRIGGER?"""
    return kind_at(tokens, "CREATE", frozenset({"TRIGGER"})) is not None


def is_view(tokens: list[Token]) -> bool:
    """Is it a CREATE VIEW or an ALTER VIEW?"""
    return any(kind_at(tokens, verb, frozenset({"VIEW"})) is not None for verb in ("CREATE", "ALTER"))


def has_named_all(tokens: list[Token]) -> bool:
    """Of the beginning of a definition: can nothing that follows name a table that a replay would not miss? Behind the
    table of an index are its columns; a table's partitions come last."""
    words = [token.word for token in tokens]
    if words[:1] == ["CREATE"] and "INDEX" in words[1:4]:
        return "ON" in words
    if words[:1] not in (["CREATE"], ["ALTER"]) or "TABLE" not in words[1:4]:
        return False
    return any(
        token.word == "PARTITION" and (word_at(tokens, at + 1) == "BY" or words[at - 1] in {"ADD", "REORGANIZE"})
        for at, token in outside(tokens)
    )


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
        (found for verb in ("CREATE", "ALTER", "DROP") if (found := kind_at(tokens, verb, _ROUTINES)) is not None),
        None,
    )
    if at is None:
        return None
    kind = tokens[at].word
    at += 1
    while word_at(tokens, at) in {"IF", "NOT", "EXISTS", "BODY"}:
        at += 1
    loaded = any(token.word == "SONAME" for token in tokens[at : at + 6])
    return Routine(kind, full_name(tokens, at, schema)[0][0] if at < len(tokens) else schema, loaded)


def kind_at(tokens: list[Token], verb: str, kinds: frozenset[str]) -> int | None:
    """Where the kind of what the statement is about is, when it is one of ``kinds``."""
    at = _behind_leading(tokens, 1) if tokens and tokens[0].word == verb else len(tokens)
    return at if at < len(tokens) and tokens[at].word in kinds else None


def _behind_leading(tokens: list[Token], at: int) -> int:
    """Where the kind of what is defined is, from ``at`` on, behind the verb."""
    while at < len(tokens):
        if tokens[at].word == "DEFINER" and word_at(tokens, at + 1) == "=":
            at = after_account(tokens, at + 1)
        elif tokens[at].word in _LEADING or tokens[at].word == "=":
            at += 1
        else:
            break
    return at
