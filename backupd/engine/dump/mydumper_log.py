"""What mydumper says: its log, line by line, and its file ``metadata``, of all versions that are called.

The exit code says little: it was 0 over broken tables in some versions, the number of errors in others, and 1 here
means "some table failed". What counts is said per table:

* 0.10.1, ``-v 3``: one line when a thread begins a table; the same thread's next line comes after it closed that
  table's last file. So of a tool that was killed, too, it is known which tables are complete;
* 0.16 and later: several threads may read one table, so nothing is known of single tables before the end;
* errors name the table as ``schema.table``, without quotes. One that names none that could be meant is trouble of the
  whole run, since the words may be those of a version that is not known;
* without locks of its own, 0.16 and later make a **new connection** when one is lost and read on with it, outside the
  snapshot; a warning is all that is said of it ("Reconnecting due errors", and, where a query could not be begun,
  "Retrying last failed executed statement");
* the end is announced ("Finished dump at"), and ``metadata.partial`` is renamed to ``metadata``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from backupd.model.table import TableName

_LINE = re.compile(
    r"(?:\*\* )?(?:\([^()]*\): )?(?P<level>Message|WARNING|CRITICAL|ERROR)(?: \*\*)?: "
    r"(?:\d\d:\d\d:\d\d\.\d+: )?(?P<text>.*)"
)
_THREAD = re.compile(r"Thread (?P<thread>\d+)\b")
_BEGUN = re.compile(
    r"Thread (?P<thread>\d+):? (?:dumping data (?:for|from) )?`(?P<schema>[^`]+)`\.`(?P<table>[^`]+)`(?P<rest>.*)"
)
_READY = "Transactions started, unlocking tables"
_FINISHED = "Finished dump at"
_NO_WRITE = "Couldn't write data to a file"
_OF_TABLE: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"Error dumping table \((?P<name>.+)"), (") data",)),
    (re.compile(r"Could not read data from (?P<name>.+)"), (" to write on ", ":")),
    (re.compile(r"Could not write out (?:data|closing newline) for (?P<name>.+)"), (",",)),
    (re.compile(r"Fail to write on (?:.*/)?(?P<schema>[^./]+)\.(?P<table>[^./]+)(?:\.\d+)*\.sql"), ()),
    (re.compile(r"Error: DB: (?P<schema>.+?) TABLE: (?P<table>.+?) Could not create output file"), ()),
    (re.compile(r"Broken table (?:detected|found).*?: (?P<name>.+)"), ()),
)
"""The name, or all that stands from its beginning on; and what may come behind it."""
_A_NAME = re.compile(r"[^\s.,:;()`'\"]+\.[^\s.,:;()`'\"]+")
_OF_SCHEMA = (
    re.compile(r"Error: DB: (?P<schema>.+?) - Could not execute query"),
    re.compile(r"Could not list tables for (?P<schema>.+?):"),
)
_RECONNECTS = "Reconnecting due"
_RETRIES = "Retrying last failed"
_STAYS = ("doesn't exist", "definition has changed")
"""What the server refuses so costs no connection; so what the thread reads afterwards is of its snapshot."""


class DumpLog:
    """Hears each line, from one thread; asked from any. ``wanted``: the tables of the run, what concerns others is of
    no interest. ``whole``: a table is read by one thread in one go (0.10.1)."""

    def __init__(self, wanted: Collection[TableName], *, whole: bool) -> None:
        self._wanted = {f"{name.schema}.{name.table}": name for name in wanted}
        self._schemas: dict[str, list[TableName]] = {}
        for name in wanted:
            self._schemas.setdefault(name.schema, []).append(name)
        self._whole = whole
        self._under_way: dict[str, TableName] = {}
        self._no_write = ""
        self._refused: set[str] = set()
        """Threads whose query was refused, and whose connection stays."""
        self.ready = threading.Event()
        """Every thread has its snapshot."""
        self.finished = False
        self.begun: set[TableName] = set()
        self.ended: set[TableName] = set()
        """Read to the end and written, by the tool's own word."""
        self.failed: dict[TableName, str] = {}
        """In the tool's words."""
        self.errors = 0
        """Those of which is known what they concern, so that they explain an exit code."""
        self.trouble: list[str] = []
        """Errors that name no table, and lost snapshots: nothing of this run can be trusted."""

    def heard(self, line: str) -> None:
        """Take one line of the log; lines that mydumper does not write itself are passed over."""
        match = _LINE.match(line)
        if match is None:
            return
        text = match["text"].strip()
        self._progress(text)
        if match["level"] == "Message":
            if text == _READY:
                self.ready.set()
            elif text.startswith(_FINISHED):
                self.finished = True
        else:
            self._error(text, warning=match["level"] == "WARNING")

    def _progress(self, text: str) -> None:
        thread = _THREAD.match(text)
        if thread is None:
            return
        before = self._under_way.pop(thread["thread"], None)
        if before is not None:
            self.ended.add(before)
        begun = _BEGUN.match(text)
        name = self._wanted.get(f"{begun['schema']}.{begun['table']}") if begun else None
        if begun is None or name is None:
            return
        self.begun.add(name)
        if self._whole and not begun["rest"]:
            self._under_way[thread["thread"]] = name

    def _error(self, text: str, *, warning: bool) -> None:
        if text.startswith(_NO_WRITE):
            self._no_write = text  # the next line names the table
        elif not (self._of_table(text) or self._of_schema(text) or self._of_connection(text) or warning):
            self._distrust(text)

    def _of_table(self, text: str) -> bool:
        found = next(((match, ends) for pattern, ends in _OF_TABLE if (match := pattern.search(text))), None)
        if found is None:
            return False
        match, ends = found
        groups = match.groupdict()
        readings = _readings(groups.get("name") or f"{groups['schema']}.{groups['table']}", ends)
        names = [self._wanted[reading] for reading in readings if reading in self._wanted]
        why = f"{self._no_write}: {text}" if self._no_write and "write out" in text else text
        for name in names:
            self.failed.setdefault(name, why)
        if not names and not _A_NAME.fullmatch(readings[0]):
            self._distrust(text)
            return True
        self.errors += 1
        thread = _THREAD.match(text)
        if thread is not None and any(words in text for words in _STAYS):
            self._refused.add(thread["thread"])
        return True

    def _of_schema(self, text: str) -> bool:
        match = next((match for pattern in _OF_SCHEMA if (match := pattern.search(text))), None)
        if match is None:
            return False
        self.errors += 1
        for name in self._schemas.get(match["schema"], ()):
            self.failed.setdefault(name, text)
        return True

    def _of_connection(self, text: str) -> bool:
        thread = _THREAD.match(text)
        number = thread["thread"] if thread else ""
        if _RECONNECTS in text or (_RETRIES in text and number not in self._refused):
            self._distrust(f"{text}: what it read from then on is of a later moment")
            return True
        self._refused.discard(number)
        return _RETRIES in text

    def _distrust(self, text: str) -> None:
        self.errors += 1
        self.trouble.append(text)


def _readings(text: str, ends: Sequence[str]) -> list[str]:
    """Where a name may end that ``text`` begins with, the shortest first: a name may hold what comes behind it, too."""
    at = sorted({match.start() for end in ends for match in re.finditer(re.escape(end), text)})
    return [*(text[:end] for end in at if end), text]


@dataclass(frozen=True, slots=True)
class Metadata:
    """``finished``: the dump came to its end. ``rows``: of each table, told from 0.16 on."""

    finished: bool
    rows: Mapping[TableName, int] = field(default_factory=dict)


_SECTION = re.compile(r"\[(?:`(?P<schema>[^`]+)`\.`(?P<table>[^`]+)`|[^\]]+)\]")


def read_metadata(text: str) -> Metadata:
    """Both formats: the free text of 0.10.1 and the key file of 0.16 and later."""
    rows: dict[TableName, int] = {}
    table: TableName | None = None
    for line in text.splitlines():
        if match := _SECTION.fullmatch(line.strip()):
            table = TableName(match["schema"], match["table"]) if match["schema"] else None
            continue
        key, _, value = (part.strip() for part in line.strip().lstrip("# ").partition("="))
        if table is not None and key == "rows" and value.isdecimal():
            rows[table] = int(value)
    return Metadata(any(line.lstrip("# ").startswith(_FINISHED) for line in text.splitlines()), rows)
