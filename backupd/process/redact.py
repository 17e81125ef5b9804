"""Taking secrets and table data out of what tools print, before it reaches an error text or a log.

Known to leak: mariadb-backup prints SHOW GRANTS with password hashes when a privilege is missing, and the hex
and ASCII dump of a whole page (rows of users) when a checksum is wrong; xtrabackup prints the SQL of long
queries; servers print the running statement when they crash.
"""

from __future__ import annotations

import re

_HIDDEN = "[hidden]"
_QUOTED = r"""(?:'(?:[^'\\]|\\.|'')*'?|"(?:[^"\\]|\\.|"")*"?)"""

# No rule may begin to match at each place of a word and look to its end from there: lines of a megabyte are printed.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # Hashes of mysql_native_password, and the $A$ form of caching_sha2_password.
    (re.compile(r"\*[0-9A-Fa-f]{40}\b"), _HIDDEN),
    (re.compile(r"\$A\$\d{3}\$.{20,}?(?='|\"|$)"), _HIDDEN),
    (
        re.compile(
            rf"(\bIDENTIFIED\s+(?:BY|WITH|VIA)(?:\s+PASSWORD)?(?:\s+[`'\"]?\w+[`'\"]?)?"
            rf"(?:\s+(?:USING|AS|BY))?\s*\(?\s*)(?:0x[0-9A-Fa-f]+|{_QUOTED})",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    (
        re.compile(r"(\b(?:USING|AS)\s+)(?:0x[0-9A-Fa-f]{16,}|'\$[^']*'|'[0-9A-Za-z+/=.]{32,}')", re.IGNORECASE),
        rf"\1{_HIDDEN}",
    ),
    (re.compile(rf"(\bPASSWORD\s*\(\s*){_QUOTED}", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (
        re.compile(
            rf"((?:password|passwd|passphrase|secret|token|mysql_pwd|api_?key)\w{{0,64}}\s{{0,16}}=\s*)"
            rf"(?:{_QUOTED}|(?!\[hidden\])[^\s,;'\"]+)",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    (re.compile(r"(://[^/@:\s]*:)[^/@\s]+@"), rf"\1{_HIDDEN}@"),
    # What scripts print of the programs that they call: headers, accounts as curl takes them, answers as JSON.
    (
        re.compile(
            r"(\b(?:authorization|x-[\w-]{0,40}?(?:token|key|secret)|(?:private|api)-(?:token|key))\b['\"]?\s{0,4}[:=]"
            r"\s{0,4}['\"]?)(?!Bearer TOKEN\b)[^\s'\";,]+(?:[ \t]{1,4}[^\s'\";,]+)?",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    (re.compile(r"(\bbearer\s{1,4})[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (
        re.compile(
            r"((?:^|(?<=[\s'\"]))(?:-u|--user|--proxy-user)[\s=]{0,4}(['\"])?[^\s:'\"]{1,100}:)(?(2)[^'\"]+|[^\s'\"]+)"
        ),
        rf"\1{_HIDDEN}",
    ),
    (
        re.compile(
            rf"""(["'][\w-]{{0,40}}?(?:password|passwd|passphrase|secret|token|api_?key)\w{{0,40}}["']\s{{0,4}}:\s{{0,4}})"""
            rf"{_QUOTED}",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    # " len 16384; hex 0f...; asc ...;" is one line of InnoDB's page dump.
    (re.compile(r"(\blen \d+; hex ).*", re.IGNORECASE | re.DOTALL), r"\1[page content hidden]"),
    (re.compile(r"^(\s*(?:InnoDB: )?)(?:[0-9A-Fa-f]{2}[ ]?){24,}.*$", re.DOTALL), r"\1[page content hidden]"),
    (re.compile(r"\b[0-9A-Fa-f]{128,}\b"), "[hex hidden]"),
    # The statement in a crash report, and xtrabackup's list of long queries.
    (re.compile(r"(\bQuery\s*\((?:0x)?[0-9A-Fa-f]+\)\s*:\s*).+", re.DOTALL), r"\1[statement hidden]"),
    (re.compile(r"(\bQuery\s*:\s*).+", re.DOTALL), r"\1[statement hidden]"),
    (re.compile(r"(\bquery \d+ \(duration \d+ sec\)\s*:\s*).+", re.IGNORECASE | re.DOTALL), r"\1[statement hidden]"),
    # Literals of a statement that a tool quotes: names stay readable, values do not.
    (re.compile(r"(\b(?:INSERT|REPLACE)\b.*?\bVALUES?\b\s*).+", re.IGNORECASE | re.DOTALL), r"\1[values hidden]"),
    (re.compile(r"(\bUPDATE\b\s+\S+\s+SET\b\s*).+", re.IGNORECASE | re.DOTALL), r"\1[values hidden]"),
)
_MAYBE = re.compile(
    r"\*[0-9A-Fa-f]{40}|IDENTIFIED|USING|\bAS\b|passw|passphrase|secret|token|://|hex |"
    r"[0-9A-Fa-f]{2}(?: ?[0-9A-Fa-f]{2}){23}|query|VALUE|UPDATE|\$A\$|_pwd|api_?key|authorization|[-](?:token|key)|"
    r"\bx-|bearer|(?:^|[\s'\"])(?:-u|-p\S|--user|--proxy-user)",
    re.IGNORECASE,
)
_CLIENT = re.compile(r"\b(?:mysql|mariadb|mydumper|myloader|xtrabackup|innobackupex|pt-)", re.IGNORECASE)
_CLIENTS_PASSWORD = re.compile(rf"((?:^|(?<=[\s'\"]))-p)(?:{_QUOTED}|[^\s'\"]+)")
"""Where such a program is called. What the same letter is for another one is hidden with it."""


_STATEMENT_HIDDEN = "[statement hidden]"
_OWN_LINE = re.compile(
    r"\.?(?:\d{6} +\d|\d{4}-\d\d-\d\d[ T]|\[\d\d\] |>> log|xtrabackup: |mariabackup: |innobackupex: |InnoDB: |Error: |"
    r"Unable to obtain lock|MySQL binlog position|Connection ID|Status: |Optimizer switch|Some pointers)"
)
"""How a line begins that a tool or server itself made up, and not whoever sent a statement of several lines."""


class Redactor:
    """``redact`` for the lines of one program in order: a statement keeps its line ends when it is printed, so what
    follows the first line of one is hidden, too, up to the program's next line."""

    def __init__(self) -> None:
        self._inside = False

    def line(self, line: str) -> str:
        if self._inside and not _OWN_LINE.match(line):
            return _STATEMENT_HIDDEN if line.strip() else line
        shown = redact(line)
        self._inside = shown.endswith(_STATEMENT_HIDDEN)
        return shown


def redact(line: str) -> str:
    """``line`` without secrets and table data. What remains names users, tables, files and errors as
    before."""
    if not _MAYBE.search(line):
        return line
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return _CLIENTS_PASSWORD.sub(rf"\1{_HIDDEN}", line) if _CLIENT.search(line) else line
