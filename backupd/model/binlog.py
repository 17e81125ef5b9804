"""Sets of global transaction ids, in the two families' own writing.

MySQL: ``<uuid>[:<tag>]:<first>[-<last>]...``, a set with holes (manual, "GTID sets"; tags since 8.3). MariaDB: one
``<domain>-<server>-<sequence>`` per domain, which means everything of the domain up to it.

Binary logs as values: transactions, segments, runs of segments, branches of a server's history.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any

from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.server_facts import Position
from backupd.model.text import format_time, parse_time

_MARIADB = re.compile(r"(\d+)-(\d+)-(\d+)")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TAG = re.compile(r"[a-z_]\w{0,31}")
_INTERVAL = re.compile(r"(\d+)(?:-(\d+))?")

FilePosition = tuple[int, int]
"""Number of a file and position in it: what sorts within one branch."""

Intervals = tuple[tuple[int, int], ...]
"""First and last number of each run, both included, in order and never touching each other."""


@dataclass(frozen=True, slots=True)
class MariadbGtids:
    """The last transaction of each replication domain: ``last[domain] == (server id, sequence)``."""

    last: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MariadbGtids:
        """Where a domain is named twice (a Gtid_list event does), the last one counts. Raises ValueError."""
        last: dict[int, tuple[int, int]] = {}
        for member in _members(text):
            match = _MARIADB.fullmatch(member)
            if match is None:
                raise ValueError(f"{member!r} is not a GTID of MariaDB")
            last[int(match[1])] = (int(match[2]), int(match[3]))
        return cls(last)

    def covers(self, other: MariadbGtids) -> bool:
        """Is every domain of ``other`` here, as far or further?"""
        return all(
            domain in self.last and self.last[domain][1] >= sequence
            for domain, (_server, sequence) in other.last.items()
        )

    def plus(self, other: MariadbGtids) -> MariadbGtids:
        """After ``other``, too: the later writing of a domain counts, as in the binary log."""
        return MariadbGtids({**self.last, **other.last})

    @property
    def is_empty(self) -> bool:
        return not self.last

    def __str__(self) -> str:
        return ",".join(f"{domain}-{server}-{sequence}" for domain, (server, sequence) in sorted(self.last.items()))


@dataclass(frozen=True, slots=True)
class MysqlGtids:
    """``runs[source] == intervals``; a source is a UUID in lower case, with ``:tag`` where there is one."""

    runs: Mapping[str, Intervals] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MysqlGtids:
        """Raises ValueError."""
        found: dict[str, list[tuple[int, int]]] = {}
        for member in _members(text.lower()):
            uuid, *rest = member.split(":")
            if not _UUID.fullmatch(uuid) or not rest:
                raise ValueError(f"{member!r} is not a GTID of MySQL")
            source = uuid
            for word in rest:
                if interval := _INTERVAL.fullmatch(word):
                    first, last = int(interval[1]), int(interval[2] or interval[1])
                    if not 0 < first <= last:
                        raise ValueError(f"{word!r} in {member!r} is not an interval")
                    found.setdefault(source, []).append((first, last))
                elif _TAG.fullmatch(word):
                    source = f"{uuid}:{word}"
                else:
                    raise ValueError(f"{word!r} in {member!r} is neither an interval nor a tag")
        return cls({source: _joined(intervals) for source, intervals in found.items()})

    def covers(self, other: MysqlGtids) -> bool:
        """Is ``other`` a subset?"""
        return other.minus(self).is_empty

    def plus(self, other: MysqlGtids) -> MysqlGtids:
        sources = {*self.runs, *other.runs}
        return MysqlGtids(
            {source: _joined([*self.runs.get(source, ()), *other.runs.get(source, ())]) for source in sources}
        )

    def minus(self, other: MysqlGtids) -> MysqlGtids:
        """What is here and not in ``other``."""
        left = {source: _without(intervals, other.runs.get(source, ())) for source, intervals in self.runs.items()}
        return MysqlGtids({source: intervals for source, intervals in left.items() if intervals})

    @property
    def count(self) -> int:
        """How many transactions."""
        return sum(last - first + 1 for intervals in self.runs.values() for first, last in intervals)

    def each(self) -> Iterator[str]:
        """One transaction after the other."""
        for source, intervals in self.runs.items():
            for first, last in intervals:
                yield from (f"{source}:{number}" for number in range(first, last + 1))

    @property
    def is_empty(self) -> bool:
        return not self.runs

    def __str__(self) -> str:
        return ",".join(
            f"{source}:" + ":".join(f"{first}" if first == last else f"{first}-{last}" for first, last in intervals)
            for source, intervals in sorted(self.runs.items())
        )


def covers(one: str, other: str, *, mariadb: bool) -> bool:
    """Does ``one`` hold everything of ``other``? Raises ValueError for what is neither."""
    if mariadb:
        return _mariadb_gtids(one).covers(_mariadb_gtids(other))
    return _mysql_gtids(one).covers(_mysql_gtids(other))


def plus(one: str, other: str, *, mariadb: bool) -> str:
    """The state after both. Raises ValueError."""
    if mariadb:
        return str(MariadbGtids.parse(one).plus(MariadbGtids.parse(other)))
    return str(MysqlGtids.parse(one).plus(MysqlGtids.parse(other)))


def same(one: str, other: str, *, mariadb: bool) -> bool:
    """Do both mean the same transactions? Raises ValueError."""
    return covers(one, other, mariadb=mariadb) and covers(other, one, mariadb=mariadb)


_mariadb_gtids = lru_cache(maxsize=64)(MariadbGtids.parse)
_mysql_gtids = lru_cache(maxsize=64)(MysqlGtids.parse)
"""The same few states are compared with those of each backup."""


def _members(text: str) -> Iterable[str]:
    return (member for word in text.split(",") if (member := "".join(word.split())))


def _joined(intervals: Iterable[tuple[int, int]]) -> Intervals:
    found: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def _without(intervals: Intervals, other: Intervals) -> Intervals:
    left: list[tuple[int, int]] = []
    for first, last in intervals:
        begin = first
        for cut_first, cut_last in other:
            if cut_last < begin or cut_first > last:
                continue
            if cut_first > begin:
                left.append((begin, cut_first - 1))
            begin = cut_last + 1
        if begin <= last:
            left.append((begin, last))
    return tuple(left)


INDEX_FORMAT = "backupd-index/1"
STATEMENT_SIZE = 1024
"""Characters that an index keeps of statements; of those that define tables ``changes.DEFINITION_SIZE``."""
MAGIC = b"\xfebin"
FIRST_EVENT = len(MAGIC)
"""Where the first event of a binary log starts."""


_LOG_NAME = re.compile(r"[^-./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*\.[0-9]{6,10}")
_LONGEST_NAME = 255


def is_log_name(name: str) -> bool:
    """Could a server's binary log be called so? No path, no option, nothing hidden: ``binlog.000042``."""
    return _LOG_NAME.fullmatch(name) is not None and len(name.encode("utf-8", "surrogateescape")) <= _LONGEST_NAME


class ChangeKind(StrEnum):
    """What a transaction does to a table."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    CREATE = "create"
    ALTER = "alter"
    DROP = "drop"
    TRUNCATE = "truncate"
    RENAME = "rename"
    OTHER = "other"
    """Any other statement: accounts, routines, events, or data changed by a statement that is not understood."""


@dataclass(frozen=True, slots=True)
class Change:
    """``rows``: how many row images, 0 for statements. ``name`` is empty for what concerns a schema or none."""

    schema: str
    name: str
    kind: ChangeKind
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transaction (or one statement that commits alone) of a binary log, as the index keeps it.

    It is in ``[start, end)`` of its file, in bytes. ``gtid``: empty where the server gave none. ``at``: when it
    committed, as exactly as the log records it: to the microsecond with ``precise``, else the second of its last event.
    ``state``: "" as a rule, ``prepared``, ``committed`` or ``rolled back`` for the parts of an XA transaction, which
    ``xid`` names. ``statement``: the text of what is not a row event, without secrets, shortened to 1,024 characters;
    of what defines a table, a view or a trigger up to 64 KiB, since all that it names is of interest (indexes of
    before: 1,024 of that, too; ``engine.binlogchanges.is_cut`` shows which are not whole).
    """

    gtid: str
    start: int
    end: int
    at: datetime
    precise: bool
    server_id: int
    changes: tuple[Change, ...] = ()
    statement: str = ""
    state: str = ""
    xid: str = ""

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "gtid": self.gtid,
            "start": self.start,
            "end": self.end,
            "at": format_time(self.at),
            "precise": self.precise,
            "server_id": self.server_id,
            "changes": [[c.schema, c.name, str(c.kind), c.rows] for c in self.changes],
        }
        for name in ("statement", "state", "xid"):
            if value := getattr(self, name):
                document[name] = value
        return document

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Transaction:
        return cls(
            gtid=data["gtid"],
            start=int(data["start"]),
            end=int(data["end"]),
            at=parse_time(data["at"]),
            precise=bool(data["precise"]),
            server_id=int(data["server_id"]),
            changes=tuple(
                Change(schema, name, ChangeKind(kind), int(rows)) for schema, name, kind, rows in data["changes"]
            ),
            statement=data.get("statement", ""),
            state=data.get("state", ""),
            xid=data.get("xid", ""),
        )


class Ending(StrEnum):
    """How the part of a file that a segment holds comes to its end."""

    OPEN = "open"
    """The file goes on: this is a piece of one that is still being written."""
    ROTATED = "rotated"
    """A Rotate event: the next file follows without a hole."""
    STOPPED = "stopped"
    """A Stop event: the server was shut down cleanly; the next file follows."""
    CRASHED = "crashed"
    """Neither, but nothing is missing: the server had begun the next file and listed this one with just this size."""
    CUT = "cut"
    """Neither, and whether something followed in the file is not known: it was lost before its end was copied, say."""


@dataclass(frozen=True, slots=True, order=True)
class SegmentKey:
    """What names a segment of a server: bytes ``[start, end)`` of file ``number`` of a branch. Sorts in log order
    within a branch."""

    branch: str
    number: int
    start: int
    end: int


STATEMENTS = "data was changed by statements, not rows: a replay may give other values"
TEMPORARY = "temporary tables in statements: a replay that begins while one is open is inexact"
OF_TEMPORARY = frozenset({TEMPORARY, "temporary tables in statements: a replay that begins between them fails"})
"""As segments of older versions say it, too."""
ELSEWHERE = "files outside of the data directory are made by statements: no replay goes past them"


@dataclass(frozen=True, slots=True)
class Segment(Document):
    """An archived binary log, or an archived piece of one. Pieces are cut between transactions.

    ``file``: its name at the source. ``start`` is 0 for the beginning of the file (its magic number), ``end`` excluded.
    ``gtids_before`` and ``gtids_after``: everything that was executed at either end (in the writing of model.gtid; ""
    where the server gave none). ``first_at`` and ``last_at``: earliest and latest commit inside, None without any.
    ``precise``: are all its times exact to the microsecond? ``server_ids``: of all events inside. ``remarks``: what
    makes recovery through it doubtful. ``sha256``: of its bytes, with the in-use flag (byte 21, bit 0x1) cleared.
    """

    server: str
    branch: str
    file: str
    number: int
    start: int
    end: int
    ending: Ending
    gtids_before: str
    gtids_after: str
    transactions: int
    first_at: datetime | None
    last_at: datetime | None
    precise: bool
    server_ids: tuple[int, ...]
    flavour: str
    server_version: str
    sha256: str
    remarks: tuple[str, ...] = ()

    @property
    def key(self) -> SegmentKey:
        return SegmentKey(self.branch, self.number, self.start, self.end)

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def is_final(self) -> bool:
        """Does nothing of its file come after it?"""
        return self.ending is not Ending.OPEN


@dataclass(frozen=True, slots=True)
class CopyState:
    """One destination's copy of a segment. ``state``: complete or damaged; ``stored``: its sealed bytes."""

    state: str
    stored: int
    stored_at: datetime
    verified_at: datetime | None = None

    @property
    def is_complete(self) -> bool:
        return self.state == "complete"


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A segment as the catalog knows it: with its copies by destination. ``stored``: the sealed bytes of one copy."""

    segment: Segment
    destinations: Mapping[str, CopyState]
    stored: int

    @property
    def key(self) -> SegmentKey:
        return self.segment.key


class BranchReason(StrEnum):
    """Why a branch of a server's history began."""

    FIRST = "first"
    RESTORE = "restore"
    RESET = "reset"
    FAILOVER = "failover"
    LOST_TAIL = "lost-tail"
    NODE_CHANGED = "node-changed"
    """Another node of the same Galera cluster answers: one history, in another node's files."""
    UNKNOWN = "unknown"
    """The source's files do not go on from those that were archived; the branch's note says what is known."""


@dataclass(frozen=True, slots=True)
class Branch(Document):
    """One unbroken history of a server.

    ``id``: of model.ids, so branches sort by when they were noticed (``noticed_at``). ``since``: until when the branch
    before was certainly alive; it ended between ``since`` and ``noticed_at`` (None for the first). ``parent``: the
    branch that it forked from and ``fork``: the last position, in the parent's writing, that both share; None where
    that is not known, and then nothing is recovered across the fork. ``names_go_on``: are the parent's files before
    ``first_number`` its own earlier files, too (a lost tail), so that positions of both mean the same up to ``fork``?
    ``baseline``: what a MySQL server had executed before the first file. Its files hold what older files held, not
    of what came with the data when the server was made from a backup (gtid_purged).
    ``entry``: the position in the branch's own files that is the same as ``fork``, where GTIDs cannot show it: nodes of
    a Galera cluster may give the same transaction GTIDs of their own. None: it is found by GTID.
    """

    server: str
    id: str
    noticed_at: datetime
    reason: BranchReason
    server_uuid: str
    flavour: str
    basename: str
    first_number: int
    since: datetime | None = None
    parent: str | None = None
    fork: Position | None = None
    names_go_on: bool = False
    note: str = ""
    baseline: str = field(default="", metadata=json_key(later=True))
    entry: Position | None = field(default=None, metadata=json_key(later=True))

    def executed(self, logged: str) -> str:
        """All that is executed at a position of the branch where its files record ``recorded``. Raises ValueError."""
        return plus(self.baseline, logged, mariadb=False) if self.baseline else logged

    def as_json(self) -> dict[str, Any]:
        """Without an entry it is, byte for byte, the document of earlier versions."""
        document = Document.as_json(self)
        if self.entry is None:
            del document["entry"]
        return document

    @property
    def entered_at(self) -> Position | None:
        """The fork in the writing of the branch itself, as far as that is known: by GTID alone, the parent's
        position."""
        return self.entry or self.fork

    def file(self, number: int) -> str:
        """The name of a file; at least six digits, as servers write it."""
        return f"{self.basename}.{number:06d}"

    def number(self, name: str) -> int:
        """42 for ``binlog.000042``; 0 for what is no file of this log."""
        stem, _, number = name.rpartition(".")
        return int(number) if stem == self.basename and number.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class Run:
    """Segments of one branch at one destination, from ``(first_number, first_pos)`` to ``(last_number, last_pos)``,
    without a hole between them. Sizes in bytes: ``size`` of the logs, ``stored`` sealed.

    ``confirmed_at``: everything that the source had committed by then (its clock and ours) is in here, even where
    nothing was committed lately; None when that was never asked. ``first_at``, ``last_at``: earliest and latest commit.
    ``ending``: of its last segment. While that is OPEN, more of the last file may follow, so the next file does not
    continue the run.
    """

    server: str
    branch: str
    destination: str
    first_number: int
    first_pos: int
    last_number: int
    last_pos: int
    gtids_before: str
    gtids_after: str
    first_at: datetime | None
    last_at: datetime | None
    confirmed_at: datetime | None
    size: int
    stored: int
    segments: int
    transactions: int
    remarks: tuple[str, ...] = ()
    ending: Ending = Ending.OPEN


@dataclass(frozen=True, slots=True)
class Gap(Document):
    """Binary logs that are not there: nothing between ``after`` and ``before`` can be replayed.

    ``destination`` empty: at none. ``after``/``before``: the last position before it and the first after it; None where
    nothing follows. ``from_at``/``to_at``: commits nearest to it on both sides, as far as known.
    """

    server: str
    branch: str
    destination: str
    after: Position
    before: Position | None
    from_at: datetime | None
    to_at: datetime | None
    reason: str
    noticed_at: datetime


@dataclass(frozen=True, slots=True)
class Stop(Document):
    """Where a replay ends: before the event that starts at ``file:pos`` of ``branch``.

    ``gtids``: all that is executed there. ``at``: commit time of the last transaction before it. ``next_gtid`` and
    ``next_at``: of the first one that is left out, "" and None at the end of the archive.
    """

    branch: str
    file: str
    pos: int
    gtids: str = field(metadata=json_key("gtid"))
    at: datetime | None = None
    next_gtid: str = field(default="", metadata=json_key(later=True))
    next_at: datetime | None = field(default=None, metadata=json_key(later=True))

    @property
    def position(self) -> Position:
        return Position(self.file, self.pos, self.gtids)


@dataclass(frozen=True, slots=True)
class ReplayLeg(Document):
    """Binary logs of one sequence of names, replayed in one go: from ``start`` (where the copy is) to ``stop``.

    ``segments``: in log order, without a hole, from the first byte of the file that holds ``start``; those of a lost
    tail's parent come before the branch's own. ``size`` (bytes) and ``transactions`` between both positions; None where
    nobody counted them.
    """

    segments: tuple[SegmentKey, ...] = field(metadata=HIDDEN)
    start: Position
    stop: Stop
    size: int = field(default=0, metadata=HIDDEN)
    transactions: int | None = field(default=None, metadata=HIDDEN)

    @property
    @computed("segments")
    def count(self) -> int:
        """How many segments are replayed."""
        return len(self.segments)

    @property
    def since(self) -> int:
        """From which byte of the first file on the replay reads; 0 where its start is not known by a position in it."""
        _base, _, number = self.start.file.rpartition(".")
        in_first = bool(self.segments) and number.isdecimal() and int(number) == self.segments[0].number
        return self.start.pos if in_first else 0

    def range_of(self, key: SegmentKey) -> tuple[int, int]:
        """From which byte of its file to which one a segment is replayed; an empty range for none of it."""
        begin = self.since if key.number == self.segments[0].number else 0
        end = self.stop.pos if key.number == self.segments[-1].number else key.end
        return max(key.start, begin), min(key.end, end)


class ReplayMethod(StrEnum):
    APPLIER = "applier"
    """The restored server's own replication applies the files, which are its relay logs."""
    PIPE = "pipe"
    """One mysqlbinlog, piped into a client."""


@dataclass(frozen=True, slots=True)
class ReplaySpec(Document):
    """What is replayed onto a restored backup, decided before a byte moves.

    ``legs``: more than one where it goes across a fork. ``reason``: why this method. ``exclude``: GTIDs that are left
    out. ``doubtful``: transactions of which the logs do not say whether they belong before the target, in words.
    ``size`` (bytes) and ``transactions``: what is replayed, at most. ``server_ids``: of all events, so that the
    restored server can take another one. ``tables``: only these, quoted, are replayed, and what cannot be determined
    from them; empty for all.
    """

    legs: tuple[ReplayLeg, ...] = field(metadata=json_key(after="transactions"))
    method: ReplayMethod
    reason: str
    size: int = field(metadata=json_key("bytes"))
    transactions: int
    server_ids: tuple[int, ...] = field(metadata=HIDDEN)
    exclude: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = field(default=())
    tables: tuple[str, ...] = field(default=(), metadata=HIDDEN)

    @property
    def stop(self) -> Stop:
        return self.legs[-1].stop
