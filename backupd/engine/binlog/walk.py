"""A quick walk over logs that are about to be replayed: event headers, and the few bodies that matter to a replay.

What the plan says of the logs is compared with what they hold before a server is given them: which servers' ids occur,
how many transactions, whether they end between two, which statements concern scheduled events. Layouts: log_event.h of
the servers. Neither checksums nor rows are looked at: the archive's scan did that, and the applying server does again.

What a statement does is told by the words at its beginning. Statements are logged as they were written: with comments
of any sort in front, of which versioned ones are read by the server.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backupd.engine.binlog import events
from backupd.engine.binlog.hole import hole_of
from backupd.engine.binlog.statements import NO_ROWS, Routine, routine_of
from backupd.model.binlog import FIRST_EVENT, MariadbGtids, MysqlGtids
from backupd.model.errors import DamagedError, RefusedError, StreamError
from backupd.model.server_facts import Position

_FRONT = re.compile(r"(?:[\s(;]+|\*/|/\*M?!\d*|/\*.*?(?:\*/|\Z)|\#[^\n]*|--(?=\s|\Z)[^\n]*)*", re.DOTALL)
_WORD = re.compile(r"\w+")
_WITH_VARIABLES = re.compile(r"SET\s+STATEMENT\b", re.IGNORECASE)
_DEFINES = re.compile(r"(CREATE|ALTER|DROP|SET\s+STATEMENT)\b.*?\b(EVENT|DATABASE|SCHEMA)\b", re.IGNORECASE | re.DOTALL)
_ROUTINES = re.compile(
    r"(?:CREATE|ALTER|DROP)\b.{0,300}?\b(?:PROCEDURE|FUNCTION|PACKAGE|EVENT|SERVER)\b", re.IGNORECASE | re.DOTALL
)
_NO_DATA = NO_ROWS | {"IMPORT", "START", "SAVEPOINT", "RELEASE", "XA"}
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


_BEGINNINGS = (events.MARIADB_GTID, events.GTID, events.ANONYMOUS_GTID, events.TAGGED_GTID)
_ENDINGS = (events.XID, events.XA_PREPARE, events.PAYLOAD)
_QUERIES = (events.QUERY, events.QUERY_COMPRESSED)
_OF_FILES = (events.GTID_LIST, events.PREVIOUS_GTIDS, events.START_ENCRYPTION, events.ROTATE, events.STOP)
_LOOKED_AT = frozenset({*_BEGINNINGS, *_ENDINGS, *_QUERIES, *_OF_FILES, events.EXECUTE_LOAD})
_STANDALONE, _XA_PREPARED, _XA_COMPLETED = 0x1, 0x40, 0x80
_HEADER = events.HEADER
_KIND_AND_LENGTH = struct.Struct("<4xB4xI")
"""Of a header, what the walk needs of the many events that it passes over."""
_FIXED_PART = 13
"""Bytes of a Query event's body before its status variables."""
_BLOCK = 1024 * 1024
_TEXT = 64 * 1024
"""Of a statement, at most: what it does to an event is at its beginning."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One that may concern scheduled events. ``schema``: the current one; ``server_id``: of where it ran first;
    ``own``: was that the server whose log this is?"""

    schema: str
    text: str
    server_id: int
    own: bool


@dataclass(slots=True)
class Walk:
    """What the logs hold from the start to their end.

    ``transactions``: event groups, of them ``anonymous`` without a GTID; both 0 where the server marked none (MySQL
    before 5.7 without GTIDs). ``begun``: how many begin with a BEGIN or XA START of their own. ``last_at``: when the
    last one did, in seconds, 0 for none. ``by_statement``: do statements change data, instead of rows?
    ``works``: is there anything to execute at all? ``server_ids``: of all events. ``routines``: where routines,
    scheduled events and the like are defined or dropped (path and place of the event).
    MySQL only: ``executed``: all that is executed at the end, by the logs' own lists and GTIDs; ``known``: what was at
    the beginning of the first file.
    MariaDB only: ``reached``: the last transaction of each domain that is to be applied; ``cuts``: transactions that
    are not, because they were executed before the start or nobody wants them (path, and from which byte to which);
    ``repeated``: how many more there are that were executed before the start; ``domains`` of the
    transactions; ``marks``: where files that came decrypted from a server say that they are encrypted (path and place
    of the event); ``twice``: GTIDs that occur more than once, so that they tell no position; ``first`` is the state at
    the beginning of the first file, ``start`` at the start, ``end`` at the end; ``before`` the state just before each
    transaction that was asked for.
    """

    mariadb: bool = False
    bytes: int = 0
    transactions: int = 0
    anonymous: int = 0
    begun: int = 0
    last_at: int = 0
    by_statement: bool = False
    repeated: int = 0
    domains: set[int] = field(default_factory=set)
    marks: list[tuple[Path, int]] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    xa: bool = False
    works: bool = False
    routines: list[tuple[Path, int, Routine]] = field(default_factory=list)
    server_ids: set[int] = field(default_factory=set)
    statements: list[Statement] = field(default_factory=list)
    first: MariadbGtids = field(default_factory=MariadbGtids)
    start: MariadbGtids = field(default_factory=MariadbGtids)
    end: MariadbGtids = field(default_factory=MariadbGtids)
    before: dict[str, MariadbGtids] = field(default_factory=dict)
    reached: MariadbGtids = field(default_factory=MariadbGtids)
    cuts: list[tuple[Path, int, int]] = field(default_factory=list)
    known: MysqlGtids = field(default_factory=MysqlGtids)
    executed: MysqlGtids = field(default_factory=MysqlGtids)

    @property
    def is_marked(self) -> bool:
        """Did the server mark where transactions begin?"""
        return bool(self.transactions) or not self.works

    @property
    def is_by_gtid(self) -> bool:
        """Has every transaction a GTID?"""
        return bool(self.transactions) and not self.anonymous


def walk(files: Sequence[Path], start: Position, *, wanted: Sequence[str] = ()) -> Walk:
    """Walk over ``files``, which follow each other, from ``start`` on: by its place when that is in the first file,
    else by its GTIDs from the first event on. ``wanted``: GTIDs of MariaDB whose ``before`` is to be told.

    Raises DamagedError for what no server could read, RefusedError when ``start`` is no position between two
    transactions, when the logs do not continue it, or when they end inside a transaction.
    """
    return _Walker(files, start, frozenset(wanted)).run()


class _Walker:
    def __init__(self, files: Sequence[Path], start: Position, wanted: frozenset[str]) -> None:
        self._files, self._start, self._wanted = files, start, wanted
        self._by_position = bool(files) and start.file == files[0].name
        self._found = Walk()
        self._state: dict[int, tuple[int, int]] = {}
        self._pending: dict[int, tuple[int, int]] = {}
        self._seen: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
        """GTIDs that were met, by domain and server, as runs of sequence numbers: they grow by one as a rule."""
        self._start_gtids = frozenset(start.gtid.replace(" ", "").split(","))
        self._started = not self._by_position
        self._skipping = self._open = self._grouped = False
        self._own_id = 0
        self._checksum = 0
        self._reached: dict[int, tuple[int, int]] = {}
        self._cut_from = 0
        """Where the transaction begins that is passed over, 0 for none."""
        self._executed = events.MysqlState("")
        self._uuids: dict[bytes, str] = {}

    def run(self) -> Walk:
        found = self._found
        for number, path in enumerate(self._files):
            first = self._format(path)
            if number == 0 and self._by_position:
                self._refuse_hole(path)
            if number == 0 and not found.mariadb:
                self._begin_here()
            for at, kind, when, server_id, event in _events(path, first):
                if kind == events.GTID_LIST and number == 0:
                    for domain, (server, sequence) in events.listed_gtids(event.body()):
                        events.add_to_runs(self._seen[domain, server], sequence)
                        self._state[domain] = (server, sequence)  # the last one counts: the server writes it last
                    found.first = MariadbGtids(dict(self._state))
                    self._begin_here()
                if number == 0 and self._by_position and not self._started and at >= self._start.pos:
                    self._reach(path, at)
                self._take(path, at, kind, when, server_id, event)
            size = path.stat().st_size
            self._end_cut(path, size)
            if number == 0 and self._by_position and not self._started:
                self._reach(path, size)
            found.bytes += size - (self._start.pos if number == 0 and self._by_position else 0)
        if self._open:
            raise RefusedError(
                f"{self._files[-1].name} ends inside a transaction",
                hint="the stop position of a replay must be between two transactions",
            )
        found.end = MariadbGtids(dict(self._state))
        found.reached = MariadbGtids(dict(self._reached))
        found.executed = MysqlGtids.parse(str(self._executed))
        missing = {domain: gtid for domain, gtid in self._pending.items() if domain in self._state}
        if missing:
            raise RefusedError(
                f"the logs do not continue the copy: they lack {MariadbGtids(missing)}, which it has executed",
                detail=f"they begin after {found.first or 'nothing'} and end at {found.end}",
                hint="these logs are of another branch of this server's history",
            )
        return found

    # -- where it begins

    def _begin_here(self) -> None:
        """At the first file's beginning, its state known."""
        if self._started:
            self._wait_for_start()

    def _refuse_hole(self, path: Path) -> None:
        """Its head says what is executed behind its hole, so nothing else would notice."""
        hole = hole_of(path)
        if hole is not None and self._start.pos < hole.end:
            raise RefusedError(
                f"{path.name}:{self._start.pos} was not fetched: the file goes on at byte {hole.end}",
                hint="fetch the logs again, from the start of the replay",
            )

    def _reach(self, path: Path, at: int) -> None:
        if (at != self._start.pos and self._start.pos > FIRST_EVENT) or self._open:
            raise RefusedError(
                f"{path.name}:{self._start.pos} is not a position between two transactions",
                hint="the position of the backup does not match these logs; use an older or newer backup",
            )
        self._started = True
        self._wait_for_start()

    def _wait_for_start(self) -> None:
        """Whatever of MariaDB's domains stands behind the start is skipped until the start's own transaction."""
        if not self._found.mariadb:
            return
        here = MariadbGtids(dict(self._state))
        self._found.start = MariadbGtids.parse(self._start.gtid) if self._start.gtid or not self._by_position else here
        if not self._found.start.covers(here):
            raise RefusedError(
                f"the logs begin after {here}, and the copy has executed only {self._found.start or 'nothing'}",
                hint="transactions between the two are missing: nothing can be replayed",
            )
        self._pending = {
            domain: gtid for domain, gtid in self._found.start.last.items() if self._state.get(domain) != gtid
        }
        if self._by_position and self._start.pos > FIRST_EVENT and self._pending.keys() & self._state.keys():
            raise RefusedError(
                f"position {self._start.file}:{self._start.pos} and GTID {self._found.start} do not match "
                "in these binary logs",
                detail=f"the logs are at {here} at this position",
                hint="the position of the backup is ambiguous; use an older or newer backup",
            )

    # -- events

    def _format(self, path: Path) -> int:
        """Read the beginning of a file; gives where its first event starts."""
        try:
            with path.open("rb") as stream:
                form = events.read_format(stream)
        except StreamError as error:
            raise DamagedError("a binary log ends inside its header", [str(path)]) from error
        if path != self._files[0] and form.mariadb != self._found.mariadb:
            raise DamagedError("the logs are of both MySQL and MariaDB servers", [str(path)])
        self._found.mariadb = form.mariadb
        self._checksum = events.CRC_SIZE if form.checksums else 0
        self._own_id = form.server_id
        return form.end

    def _take(self, path: Path, at: int, kind: int, when: int, server_id: int, event: _Event) -> None:
        found = self._found
        if self._started:
            found.server_ids.add(server_id)
            found.works |= kind in _ENDINGS or kind in _QUERIES
        if self._cut_from and (kind in _BEGINNINGS or kind in _OF_FILES):
            self._end_cut(path, at)
        if kind in _BEGINNINGS:
            if self._open:
                raise DamagedError("a transaction begins inside another", [f"{path}:{at}"])
            self._open, self._grouped = True, False
            if kind != events.ANONYMOUS_GTID:
                self._gtid(kind, server_id, at, event.body())
            if self._counts:
                found.transactions += 1
                found.last_at = when
                found.anonymous += kind == events.ANONYMOUS_GTID
            elif self._skipping and self._started:
                found.repeated += 1
        elif kind in _QUERIES:
            self._query(kind, server_id, path, at, event)
        elif kind == events.EXECUTE_LOAD:
            found.by_statement |= self._counts
        elif kind in _ENDINGS:
            self._open = False
            found.xa |= kind == events.XA_PREPARE and self._counts
            found.begun += kind == events.PAYLOAD and self._counts
        elif kind == events.START_ENCRYPTION:
            # Else nothing behind it could be read: the server sends events in clear, and this one along with them.
            found.marks.append((path, at))
        elif kind == events.PREVIOUS_GTIDS:
            self._previous_gtids(path, at, event.body(event.size))

    @property
    def _counts(self) -> bool:
        return self._started and not self._skipping

    def _end_cut(self, path: Path, at: int) -> None:
        if self._cut_from:
            self._found.cuts.append((path, self._cut_from, at))
            self._cut_from = 0

    def _previous_gtids(self, path: Path, at: int, body: bytes) -> None:
        """What purged files and ``gtid_purged`` add comes in no other way."""
        try:
            listed = events.read_previous_gtids((0, 0, 0, 0, 0, body, 0, len(body) - self._checksum))
        except (ValueError, IndexError, struct.error) as error:
            raise DamagedError("a binary log has an invalid list of GTIDs", [f"{path}:{at}"]) from error
        if path == self._files[0]:
            self._found.known = listed
        self._executed.start(str(MysqlGtids.parse(str(self._executed)).plus(listed)))

    def _gtid(self, kind: int, server_id: int, at: int, body: bytes) -> None:
        if kind == events.MARIADB_GTID:
            self._mariadb_gtid(server_id, at, body)
            return
        event = (kind, 0, 0, at, 0, body, 0, len(body) - self._checksum)
        tagged = kind == events.TAGGED_GTID
        try:
            gtid = (
                events.read_tagged_gtid(event)
                if tagged
                else events.read_mysql_gtid(event, self._uuids, anonymous=False)
            )
        except (ValueError, IndexError, struct.error) as error:
            raise DamagedError("a binary log has an invalid GTID", [f"byte {at}"]) from error
        self._executed.add(gtid.source, 0, gtid.number)

    def _mariadb_gtid(self, server_id: int, at: int, body: bytes) -> None:
        sequence, domain, flags = struct.unpack_from("<QIB", body)
        gtid = (server_id, sequence)
        name = f"{domain}-{server_id}-{sequence}"
        if name in self._wanted:
            self._found.before[name] = MariadbGtids(dict(self._state))
        self._state[domain] = gtid
        self._grouped = not flags & _STANDALONE
        self._skipping = domain in self._pending
        if self._started and (self._skipping or name in self._wanted):
            self._cut_from = at
        elif self._started:
            self._reached[domain] = gtid
        if self._pending.get(domain) == gtid:
            del self._pending[domain]
        met = events.add_to_runs(self._seen[domain, server_id], sequence)
        if met and (self._counts or name in self._start_gtids):
            self._found.twice.append(name)
        if self._counts:
            self._found.domains.add(domain)
        self._found.xa |= self._counts and bool(flags & (_XA_PREPARED | _XA_COMPLETED))

    def _query(self, kind: int, server_id: int, path: Path, at: int, event: _Event) -> None:
        schema, text = _statement(
            event.body(_TEXT), 0 if event.is_long(_TEXT) else self._checksum, compressed=kind == events.QUERY_COMPRESSED
        )
        word = text[:16].upper()
        if word.startswith(("BEGIN", "XA START", "XA BEGIN")):
            self._open = self._grouped = True
            self._found.begun += self._counts
        elif not self._grouped or word.startswith(("COMMIT", "ROLLBACK", "XA COMMIT", "XA ROLLBACK")):
            self._open = word.startswith("ROLLBACK TO")
        self._found.xa |= self._counts and word.startswith("XA ")
        self._found.by_statement |= self._counts and changes_data(text)
        if self._counts and may_concern_events(text):
            self._found.statements.append(Statement(schema, text, server_id, server_id == self._own_id))
        if self._counts and may_concern_routines(text) and (routine := routine_of(text, schema)) is not None:
            self._found.routines.append((path, at, routine))


@dataclass(frozen=True, slots=True)
class _Event:
    """``data`` holds the beginning of the event, after its header, or all of it; ``size`` is its length."""

    path: Path
    at: int
    size: int
    data: memoryview

    def is_long(self, most: int) -> bool:
        return self.size - _HEADER.size > most

    def body(self, most: int = _BLOCK) -> bytes:
        """After the header, at most ``most`` bytes."""
        want = min(self.size - _HEADER.size, most)
        if len(self.data) >= want:
            return bytes(self.data[:want])
        with self.path.open("rb") as stream:
            stream.seek(self.at + _HEADER.size)
            return stream.read(want)


def _events(path: Path, at: int) -> Iterator[tuple[int, int, int, int, _Event]]:
    """Place, type, seconds, server id and the rest of each event that matters, from byte ``at`` on. Rows and the like
    have the server id of their transaction."""
    size = path.stat().st_size
    kind_and_length, looked_at = _KIND_AND_LENGTH.unpack_from, _LOOKED_AT
    with path.open("rb") as stream:
        while at < size:
            stream.seek(at)
            block = memoryview(stream.read(_BLOCK))
            base, here, last = at, 0, len(block) - _HEADER.size
            while here <= last:
                at = base + here
                kind, length = kind_and_length(block, here)
                following = here + length
                if length < _HEADER.size or (following > last and base + following > size):
                    raise _cut_short(path, at)
                if kind in looked_at:
                    when, _kind, server_id, *_ = _HEADER.unpack_from(block, here)
                    event = _Event(path, at, length, block[here + _HEADER.size : following])
                    yield at, kind, when, server_id, event
                here = following
            if last < 0:
                raise _cut_short(path, at)
            at = base + here


def _cut_short(path: Path, at: int) -> DamagedError:
    return DamagedError("a binary log ends inside an event", [f"{path}:{at}"])


def statement_at(body: bytes) -> int:
    """Where the text, or its compressed form, begins in the body of a Query event."""
    return _FIXED_PART + int.from_bytes(body[11:13], "little") + body[8] + 1


def _statement(body: bytes, checksum: int, *, compressed: bool) -> tuple[str, str]:
    """Current schema and text of a Query event."""
    at = statement_at(body)
    schema = body[at - 1 - body[8] : at - 1].decode("utf-8", "replace")
    text = body[at : len(body) - checksum]
    if compressed:
        text = zlib.decompressobj().decompress(text[1 + (text[0] & 0x07) :], _TEXT)
    return schema, text.decode("utf-8", "replace")
