"""Which events of a binary log belong together, and what they do: transactions.

Both families: a GTID event opens a group. MySQL: BEGIN or XA START follows, up to Xid, COMMIT, ROLLBACK or XA PREPARE;
or a single statement; or everything compressed in one event. MariaDB: the GTID event itself says whether a single event
follows. Without GTID events (MySQL 5.6 and before) the first event that belongs to a statement opens a group.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from backupd.engine.binlog import events
from backupd.engine.binlog.changes import Changes, RowWatch
from backupd.engine.binlog.events import (
    LONG,
    CompressionError,
    CutShortError,
    Event,
    Frames,
    MariadbState,
    MysqlState,
    Pull,
    damaged,
    encrypted,
    inflated,
    open_payload,
    read_gtid_list,
    read_mariadb_gtid,
    read_mysql_gtid,
    read_previous_gtids,
    read_tagged_gtid,
    xid_text,
)
from backupd.engine.binlog.rows import ROW_KINDS
from backupd.engine.binlog.statements import READ_AT_MOST
from backupd.model.binlog import Ending, Transaction
from backupd.model.document import Document
from backupd.model.errors import DamagedError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_QUERY = struct.Struct("<IIBHH")
_XA_PREPARE = struct.Struct("<BIII")
_XA = re.compile(r"XA\s+(START|BEGIN|END|COMMIT|ROLLBACK)\s+(.*?)(?:\s+ONE PHASE)?\s*\Z", re.IGNORECASE | re.DOTALL)
_SAVEPOINT = re.compile(r"\s*(?:SAVEPOINT|RELEASE\s+SAVEPOINT|ROLLBACK\s+(?:WORK\s+)?TO)\b", re.IGNORECASE)
_LOAD_SIZE = 13
_GROUP_REPLICATION = (36, 37)
_OF_STATEMENTS = (events.INTVAR, events.RAND, events.USER_VAR, events.ROWS_QUERY, events.ANNOTATE)
_OF_LOADS = (events.BEGIN_LOAD, events.APPEND_BLOCK, events.DELETE_FILE)
_PARTS = frozenset({*_OF_STATEMENTS, *_OF_LOADS, *_GROUP_REPLICATION})
_BOUNDS = (events.MARIADB_GTID, events.GTID, events.ANONYMOUS_GTID, events.QUERY, events.XID)
_ALONE = frozenset({events.CHECKPOINT, events.STOP, events.START_ENCRYPTION, events.IGNORABLE})


@dataclass(frozen=True, slots=True)
class ScanContext(Document):
    """All that a later scan needs to go on at byte ``end`` of the same file. JSON-able; nothing else is kept.

    ``flavour``: ``mariadb`` or ``mysql`` (Percona Server's logs are MySQL's). ``checksum``: ``crc32`` or ``none``.
    ``next_file``: of the Rotate event.
    """

    flavour: str
    server_version: str
    checksum: str
    first_event_at: datetime
    in_use: bool
    gtids: str
    end: int
    ending: Ending = Ending.OPEN
    next_file: str = ""


class Assembler:
    """Puts transactions together. All counts hold for ``[start, end)`` only: what is not complete is in none."""

    def __init__(
        self,
        context: ScanContext,
        on_transaction: Callable[[Transaction], None] | None = None,
        watch: RowWatch | None = None,
    ) -> None:
        self.end, self.ending, self.next_file = context.end, context.ending, context.next_file
        self.gtids_before: str | None = None
        self.transactions, self.precise = 0, True
        self.first_at: datetime | None = None
        self.last_at: datetime | None = None
        self.server_ids: set[int] = set()
        self.remarks: dict[str, None] = {}
        self._state: MariadbState | MysqlState = (
            MariadbState(context.gtids) if context.flavour == "mariadb" else MysqlState(context.gtids)
        )
        self._on_transaction = on_transaction
        self._checked = context.checksum == "crc32"
        self._changes = Changes(watch)
        self._uuids: dict[bytes, str] = {}
        self._second: tuple[int, datetime] = (0, _EPOCH)
        self._new_servers: set[int] = set()
        self._new_remarks = self._changes.remarks
        self._encryption: tuple[int, int] | None = None
        self._ended_inside: tuple[int, str] | None = None
        self._open = False
        self._clear(0)
        self._handlers: dict[int, Callable[[Event], None]] = {
            events.QUERY: self._query,
            events.QUERY_COMPRESSED: self._query,
            events.EXECUTE_LOAD: self._query,
            events.XID: self._xid,
            events.TABLE_MAP: self._table_map,
            events.XA_PREPARE: self._xa_prepare,
            events.GTID: self._mysql_gtid,
            events.ANONYMOUS_GTID: self._mysql_gtid,
            events.TAGGED_GTID: self._mysql_gtid,
            events.MARIADB_GTID: self._mariadb_gtid,
            events.PREVIOUS_GTIDS: self._known_before,
            events.GTID_LIST: self._known_before,
            events.ROTATE: self._rotate,
            events.PAYLOAD: self._payload,
            events.INCIDENT: self._incident,
            **dict.fromkeys(ROW_KINDS, self._changes.rows),
        }
        self._bounds = {kind: self._bound(self._handlers[kind]) for kind in _BOUNDS}

    @property
    def gtids(self) -> str:
        """All that was executed up to ``end``."""
        return str(self._state)

    def run(self, frames: Frames) -> None:
        """Take all events. A stream that ends in an event or in a transaction is no error."""
        self._frames = frames
        handlers, seen = self._handlers, self.server_ids
        try:
            for event in frames.events(self._skim if self._checked else None):
                if event[2] not in seen:
                    self._new_servers.add(event[2])
                if (handler := handlers.get(event[0])) is not None:
                    handler(event)
                else:
                    self._other(event)
        except CutShortError:
            return
        except DamagedError:
            if self._encryption is not None and self.end == self._encryption[1]:
                raise encrypted(self._encryption[0]) from None
            raise

    def _skim(self, data: bytes, at: int, size: int, origin: int) -> int:
        return self._changes.skim(
            data, at, size, origin, servers=self.server_ids, bounds=self._bounds, inside=self._open
        )

    def _bound(self, take: Callable[[Event], None]) -> Callable[[Event], bool]:
        """``take``, which says whether a transaction is open afterwards."""

        def taken(event: Event) -> bool:
            take(event)
            return self._open

        return taken

    # --- groups

    def _clear(self, start: int) -> None:
        self._start, self._gtid, self._micros = start, "", 0
        self._source, self._number = "", 0
        self._begun = self._half_alter = self._in_payload = False
        self._xa_state = self._xa_id = ""
        self._changes.begin(start)

    def _opened(self, event: Event) -> None:
        if self._open:
            self._unfinished()
        self._clear(event[3])
        self._open = True

    def _unfinished(self) -> None:
        self._new_remarks[f"the transaction at byte {self._start} is incomplete: its server wrote a part of it"] = None
        self._open = False

    def _belongs(self, event: Event) -> None:
        """The event is part of a group, and opens one where no GTID did."""
        if not self._open:
            self._opened(event)

    def _passed(self, event: Event) -> None:
        """A complete event outside of transactions."""
        if self._open:
            self._unfinished()
        self._settled(event[4])
        self.ending = {events.STOP: Ending.STOPPED, events.ROTATE: Ending.ROTATED}.get(event[0], Ending.OPEN)

    def _settled(self, end: int) -> None:
        self.end = end
        if self._new_servers:
            self.server_ids |= self._new_servers
            self._new_servers = set()
        if self._new_remarks:
            self.remarks |= self._new_remarks
            self._new_remarks.clear()

    def _complete(self, event: Event, state: str = "") -> None:
        if self._in_payload:
            self._ended_inside = (event[1], state)
            return
        _kind, when, server, _start, end, *_ = event
        self._open = False
        self._settled(end)
        self.ending = Ending.OPEN
        micros = self._micros
        if micros:
            at = _EPOCH + timedelta(microseconds=micros)
        else:
            self.precise = False
            if self._second[0] != when:
                self._second = (when, events.moment(when))
            at = self._second[1]
        self.transactions += 1
        if self.first_at is None or at < self.first_at:
            self.first_at = at
        if self.last_at is None or at > self.last_at:
            self.last_at = at
        if self._number:
            self._state.add(self._source, server, self._number)
        if self._on_transaction is not None:
            done = (*self._changes.done(), state or self._xa_state, self._xa_id)
            self._on_transaction(Transaction(self._gtid, self._start, end, at, bool(micros), server, *done))

    # --- events that open and end groups

    def _mysql_gtid(self, event: Event) -> None:
        if isinstance(self._state, MariadbState):
            raise damaged(event[3], "a GTID event of MySQL in a log of MariaDB")
        self._opened(event)
        try:
            if event[0] == events.TAGGED_GTID:
                gtid = read_tagged_gtid(event)
            else:
                gtid = read_mysql_gtid(event, self._uuids, anonymous=event[0] == events.ANONYMOUS_GTID)
        except (IndexError, ValueError, struct.error) as error:
            raise damaged(event[3], f"a GTID event cannot be read: {error}") from None
        self._source, self._number, self._micros = gtid
        if self._number:
            self._gtid = self._changes.gtid = f"{self._source}:{self._number}"

    def _mariadb_gtid(self, event: Event) -> None:
        if isinstance(self._state, MysqlState):
            raise damaged(event[3], "a GTID event of MariaDB in a log of MySQL")
        self._opened(event)
        try:
            gtid = read_mariadb_gtid(event)
        except (IndexError, ValueError, struct.error) as error:
            raise damaged(event[3], f"a GTID event cannot be read: {error}") from None
        self._source, self._number = str(gtid.domain), gtid.sequence
        self._gtid = self._changes.gtid = f"{gtid.domain}-{event[2]}-{gtid.sequence}"
        self._begun, self._half_alter = not gtid.standalone, gtid.unfinished_alter
        self._xa_id, self._xa_state = gtid.xid, gtid.state

    def _known_before(self, event: Event) -> None:
        try:
            self._state.start(
                str(read_gtid_list(event) if event[0] == events.GTID_LIST else read_previous_gtids(event))
            )
        except (IndexError, ValueError, struct.error) as error:
            raise damaged(event[3], f"its list of earlier GTIDs cannot be read: {error}") from None
        if self.gtids_before is None:
            self.gtids_before = str(self._state)
        self._passed(event)

    def _xid(self, event: Event) -> None:
        self._belongs(event)
        self._complete(event)

    def _xa_prepare(self, event: Event) -> None:
        self._belongs(event)
        *_, data, body, stop = event
        try:
            one_phase, form, transaction, branch = _XA_PREPARE.unpack_from(data, body)
        except struct.error:
            raise damaged(event[3], "an XA PREPARE event is cut") from None
        at = body + _XA_PREPARE.size
        if at + transaction + branch > stop:
            raise damaged(event[3], "an XA identifier is longer than its event")
        self._xa_id = xid_text(form, data[at : at + transaction], data[at + transaction : at + transaction + branch])
        self._complete(event, "committed" if one_phase else "prepared")

    def _rotate(self, event: Event) -> None:
        *_, data, body, stop = event
        self.next_file = data[body + 8 : stop].decode("utf-8", "replace")
        self._passed(event)

    def _incident(self, event: Event) -> None:
        self._new_remarks[f"the server lost events before byte {event[4]} and logged an incident event"] = None
        if self._open and not self._begun:
            self._complete(event)
        elif not self._open:
            self._passed(event)

    def _other(self, event: Event) -> None:
        kind = event[0]
        if kind >= LONG:
            self._long(event)
        elif kind in _PARTS:
            self._belongs(event)
        else:
            if kind not in _ALONE:
                self._new_remarks[f"events of type {kind} are not known"] = None
            if kind == events.START_ENCRYPTION:
                self._encryption = event[3], event[4]
            if kind in _ALONE or not self._open:
                self._passed(event)

    def _table_map(self, event: Event) -> None:
        if not self._open:
            self._opened(event)
        self._changes.table_map(event)

    # --- statements

    def _query(self, event: Event) -> None:
        kind, _when, _server, start, _end, data, body, stop = event
        try:
            _thread, _seconds, schema_size, _error, status_size = _QUERY.unpack_from(data, body)
        except struct.error:
            raise damaged(start, "a statement's event is cut") from None
        at = body + _QUERY.size + status_size + (_LOAD_SIZE if kind == events.EXECUTE_LOAD else 0)
        schema = data[at : at + schema_size]
        text = data[at + schema_size + 1 : stop]
        if kind == events.QUERY_COMPRESSED:
            try:
                plain = inflated(Pull(io.BytesIO(text).read, len(text)))
            except CompressionError as error:
                raise damaged(start, str(error)) from None
            text = plain.take(min(READ_AT_MOST + 1, plain.left)) if isinstance(plain, Pull) else plain
        self._statement(event, schema, text)

    def _statement(self, event: Event, schema: bytes, raw: bytes) -> None:
        self._belongs(event)
        if raw == b"BEGIN":
            self._begun = True
            return
        if raw in {b"COMMIT", b"ROLLBACK"}:
            self._complete(event)
            return
        text = _decoded(raw)
        if _SAVEPOINT.match(text):
            return
        if (xa := _XA.match(text)) is not None:
            self._xa_statement(event, xa[1].upper(), xa[2])
            return
        self._changes.statement(
            text, schema.decode("utf-8", "replace"), only_begun=self._half_alter, whole=len(raw) <= READ_AT_MOST
        )
        if not self._begun:
            self._complete(event)

    def _xa_statement(self, event: Event, verb: str, xid: str) -> None:
        if verb in {"COMMIT", "ROLLBACK"}:
            self._xa_id = xid
            self._complete(event, "committed" if verb == "COMMIT" else "rolled back")
        elif verb != "END":
            self._begun, self._xa_id = True, xid

    # --- what is compressed or long

    def _payload(self, event: Event) -> None:
        *_, data, body, stop = event
        self._inside(event, self._frames, Pull(io.BytesIO(data[body:stop]).read, stop - body))

    def _inside(self, event: Event, outer: Frames, body: Pull) -> None:
        """All events of a compressed transaction."""
        self._belongs(event)
        start = event[3]
        self._in_payload, self._ended_inside = True, None
        try:
            inner = self._frames = Frames(open_payload(body), 0, checksums=False, inside=start)
            for one in inner.events():
                if one[2] not in self.server_ids:
                    self._new_servers.add(one[2])
                self._handlers.get(one[0], self._other)(one)
        except (CompressionError, CutShortError) as error:
            outer.finish(start)
            raise damaged(start, str(error) or "a compressed transaction ends inside an event") from None
        finally:
            self._frames, self._in_payload = outer, False
        outer.finish(start)
        if self._ended_inside is None:
            raise damaged(start, "a compressed transaction has no end")
        when, state = self._ended_inside
        self._complete((event[0], when, *event[2:]), state)

    def _long(self, event: Event) -> None:
        frames, start, kind = self._frames, event[3], event[0] - LONG
        body = frames.long
        if body is None:
            raise AssertionError("a long event without a body")
        short = (kind, *event[1:])
        if kind == events.PAYLOAD:
            self._inside(short, frames, body)
        elif kind in ROW_KINDS:
            self._changes.long_rows(kind, start, body)
            frames.finish(start)
        elif kind in {events.QUERY, events.EXECUTE_LOAD, events.QUERY_COMPRESSED}:
            schema, text = self._long_query(kind, start, body)
            frames.finish(start)
            self._statement(short, schema, text)
        elif kind in {events.PREVIOUS_GTIDS, events.GTID_LIST}:
            whole = body.take(body.left)
            frames.finish(start)
            self._known_before((*short[:5], whole, 0, len(whole)))
        else:
            frames.finish(start)
            self._other(short)

    @staticmethod
    def _long_query(kind: int, start: int, body: Pull) -> tuple[bytes, bytes]:
        try:
            _thread, _seconds, schema_size, _error, status_size = _QUERY.unpack(body.take(_QUERY.size))
            body.skip(status_size + (_LOAD_SIZE if kind == events.EXECUTE_LOAD else 0))
            schema = body.take(schema_size + 1)[:-1]
            plain = inflated(body) if kind == events.QUERY_COMPRESSED else body
        except (ValueError, CompressionError) as error:
            raise damaged(start, f"a long statement cannot be read: {error}") from None
        return schema, plain.take(min(READ_AT_MOST + 1, plain.left)) if isinstance(plain, Pull) else plain


def _decoded(raw: bytes) -> str:
    """Statements are in their client's character set; nearly always UTF-8 or a relative of Latin-1."""
    raw = raw[:READ_AT_MOST]
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        if error.start >= len(raw) - 3:
            return raw[: error.start].decode()
        return raw.decode("cp1252", "replace")
