"""Reading binary logs of both families once, from their first byte to their last, in bounded memory.

What is promised to callers is here: ``scan`` and its values. Below it: ``events`` (framing, checksums, compression,
GTIDs), ``transactions`` (what belongs together), ``changes`` (rows), ``statements``. ``conflicts`` shows whether a
transaction can be left out.

Can a transaction be left out of a replay? Not where later ones build upon it.

Use: feed the replayed part of the binary logs, file by file, in log order::

    conflicts = Conflicts({"0-1-27"})
    for path, since, stop in files:                      # bytes; 0 and None for a whole file
        with path.open("rb") as stream:
            for conflict in conflicts.look(stream, since=since, stop=stop): ...
    conflicts.missing                                    # excluded GTIDs that no file held

A later transaction conflicts when

- it changes or deletes a row that an excluded one wrote (its image before equals their image after), or either has
  images without some columns, so that this cannot be seen;
- it or an excluded one changes the definition of a table that the other touches, or changes that table's data by a
  statement;
- it changes data by a statement, of whatever table: it may read what the excluded one changed (a query, a function, a
  trigger), and nothing in the log shows it;
- it ends an XA transaction that an excluded one prepared.

It is no conflict that it inserts a row which an excluded one deleted, or a key which an excluded one changed: whether
that is allowed only the keys show it, and those the server knows. It stops the replay at such a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import datetime
from typing import BinaryIO

from backupd.engine.binlog.changes import RowWatch
from backupd.engine.binlog.events import Frames, read_format
from backupd.engine.binlog.rows import TableMap
from backupd.engine.binlog.statements import Effect
from backupd.engine.binlog.transactions import Assembler, ScanContext
from backupd.model.binlog import Change, ChangeKind, Ending, Transaction
from backupd.model.errors import StreamError


@dataclass(frozen=True, slots=True)
class Scan:
    """What bytes ``[start, end)`` of a binary log hold. ``end`` never is inside a transaction: it is a safe cut.

    ``tail``: bytes that were read behind ``end``: an event or a transaction that is not complete yet. ``ending``: by
    the last event, OPEN while the file is marked as in use, CUT when it is not and has neither Rotate nor Stop.
    ``server_ids``: of all events. ``precise``: were all commit times exact?
    ``remarks``: what makes recovery through it doubtful. ``context``: to go on at ``end``.
    """

    start: int
    end: int
    tail: int
    gtids_before: str
    gtids_after: str
    transactions: int
    first_at: datetime | None
    last_at: datetime | None
    precise: bool
    server_ids: tuple[int, ...]
    remarks: tuple[str, ...]
    ending: Ending
    context: ScanContext


def scan(
    stream: BinaryIO,
    *,
    start: int = 0,
    context: ScanContext | None = None,
    stop: int | None = None,
    on_transaction: Callable[[Transaction], None] | None = None,
    watch: RowWatch | None = None,
) -> Scan:
    """Read a binary log to the stream's end, or to byte ``stop`` of the file (a growing file's safe size).

    ``stream`` is at byte ``start`` of the file and is only read forward. ``start`` is 0, or the ``end`` of an
    earlier scan of the same file, whose ``context`` is then given. Every complete transaction is handed over in log
    order. An event that the stream's end cuts is no error: it is behind ``end``. Raises DamagedError, naming the
    offset, for a wrong checksum, a broken event, and a file that is encrypted; StreamError when the stream is shorter
    than a file's first event. ``watch``: sees row images (of what may turn out to be incomplete, too).
    """
    if (0 if context is None else context.end) != start:
        raise ValueError(f"a scan from byte {start} needs the context of a scan that ended there")
    fresh = None
    if context is None:
        fresh = read_format(stream)
        context = ScanContext(
            "mariadb" if fresh.mariadb else "mysql",
            fresh.server_version,
            "crc32" if fresh.checksums else "none",
            fresh.at,
            fresh.in_use,
            "",
            fresh.end,
        )
    if stop is not None and stop < context.end:
        raise StreamError(f"a binary log cannot be read to byte {stop} from byte {context.end}")
    found = Assembler(context, on_transaction, watch)
    if fresh is not None:
        found.server_ids.add(fresh.server_id)
    frames = Frames(
        stream, context.end, checksums=context.checksum == "crc32", limit=None if stop is None else stop - context.end
    )
    found.run(frames)
    open_end = Ending.OPEN if context.in_use else Ending.CUT
    return Scan(
        start=start,
        end=found.end,
        tail=context.end + frames.read - found.end,
        gtids_before=context.gtids if found.gtids_before is None else found.gtids_before,
        gtids_after=found.gtids,
        transactions=found.transactions,
        first_at=found.first_at,
        last_at=found.last_at,
        precise=found.precise,
        server_ids=tuple(sorted(found.server_ids)),
        remarks=tuple(found.remarks),
        ending=open_end if found.ending is Ending.OPEN else found.ending,
        context=replace(context, gtids=found.gtids, end=found.end, ending=found.ending, next_file=found.next_file),
    )


IMAGES_AT_MOST = 2_000_000
"""Digests of rows that are kept, of all excluded transactions; 150 bytes each."""

_Table = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Conflict:
    """The later transaction ``gtid`` (which starts at byte ``start`` of its file) builds on the excluded one
    ``excluded``: ``why``, in words, with ``table`` (``schema.name``, empty where no single one)."""

    gtid: str
    start: int
    excluded: str
    table: str
    why: str


class Conflicts:
    """``excluded``: GTIDs that are to be left out."""

    def __init__(self, excluded: Collection[str], *, images_at_most: int = IMAGES_AT_MOST) -> None:
        self._excluded = frozenset(excluded)
        self._met: set[str] = set()
        self._begun = ""
        """The first excluded transaction that was seen to do something."""
        self._room = images_at_most
        self._rows: dict[_Table, str] = {}
        """Tables whose rows an excluded transaction changed, and its GTID."""
        self._statements: dict[_Table, str] = {}
        self._schemas: dict[str, str] = {}
        self._partial: dict[_Table, str] = {}
        """Tables with images that cannot be compared."""
        self._wild = ""
        self._images: dict[_Table, dict[bytes, str]] = {}
        self._xids: dict[str, str] = {}
        self._found: dict[tuple[int, str], Conflict] = {}
        self._since = 0
        self._gtid, self._start, self._table = "", 0, ("", "")

    @property
    def missing(self) -> tuple[str, ...]:
        """Excluded GTIDs that no file held so far."""
        return tuple(sorted(self._excluded - self._met))

    def look(self, stream: BinaryIO, *, since: int = 0, stop: int | None = None) -> tuple[Conflict, ...]:
        """Read one file from its first byte to byte ``stop``, which is between transactions; those that start before
        byte ``since`` are passed over. At most one conflict for each pair of transactions. Raises DamagedError as
        ``scan`` does."""
        self._since, self._found = since, {}
        confirmed: list[Conflict] = []

        def complete(transaction: Transaction) -> None:
            if transaction.start >= since:
                self._ended(transaction)
                confirmed.extend(found for (start, _), found in self._found.items() if start == transaction.start)
                self._found.clear()

        scan(stream, stop=stop, on_transaction=complete, watch=self)
        return tuple(confirmed)

    # --- what the scan shows

    def wants(self, gtid: str, start: int, table: TableMap) -> bool:
        """See RowWatch. A conflict is noted where the table itself, whatever the rows, implies one."""
        if start < self._since:
            return False
        self._gtid, self._start, self._table = gtid, start, _table(table.schema, table.name)
        name = self._table
        if gtid in self._excluded:
            self._begun = self._begun or gtid
            self._rows.setdefault(name, gtid)
            return True
        shown = f"{table.schema}.{table.name}"
        if by := self._statements.get(name) or self._schemas.get(name[0]):
            self._conflict(by, shown, f"it changes rows of a table that {by} changes by a statement")
        elif self._wild:
            self._conflict(self._wild, shown, f"the tables that {self._wild} changes are unknown")
        return name in self._rows

    def row(self, table: TableMap, kind: ChangeKind, images: tuple[bytes, ...], *, full: bool) -> None:
        """See RowWatch. Keeps digests of what an excluded transaction wrote, and compares those of later ones with
        them."""
        name = self._table
        if self._gtid in self._excluded:
            self._wrote(kind, images, full=full)
            return
        shown = f"{table.schema}.{table.name}"
        if kind is not ChangeKind.INSERT and (by := self._images.get(name, {}).get(images[0])):
            self._conflict(by, shown, f"it changes a row that {by} wrote")
        elif kind is not ChangeKind.INSERT and (by := self._partial.get(name) or ("" if full else self._rows[name])):
            why = "the log does not hold all columns of all rows (binlog_row_image), so it may change a row that"
            self._conflict(by, shown, f"{why} {by} wrote")

    def statement(self, gtid: str, start: int, done: Effect) -> None:
        """See RowWatch. Keeps what an excluded transaction changed by statements, and compares later ones with it."""
        if start < self._since:
            return
        self._gtid, self._start = gtid, start
        if gtid in self._excluded:
            self._begun = self._begun or gtid
            if done.wild:
                self._wild = gtid
            for change in done.changes:
                if change.name:
                    self._statements.setdefault(_table(change.schema, change.name), gtid)
                elif change.kind is not ChangeKind.OTHER:
                    self._schemas.setdefault(change.schema.lower(), gtid)
            return
        if done.wild and (by := next(iter((*self._rows.values(), *self._statements.values())), "")):
            self._conflict(by, "", "the tables that its statement changes are unknown")
        for change in done.changes:
            if by := self._touched(change):
                shown = f"{change.schema}.{change.name}" if change.name else change.schema
                self._conflict(by, shown, f"its statement uses an object that {by} changes")
        if done.data and (by := self._begun):
            shown = next((f"{change.schema}.{change.name}" for change in done.changes if change.name), "")
            why = f"that may read rows that {by} changed and give another result without it"
            self._conflict(by, shown, f"it is logged as a statement, not as rows: {why}")

    # --- what follows from it

    def _ended(self, transaction: Transaction) -> None:
        gtid, xid = transaction.gtid, transaction.xid
        self._gtid, self._start = gtid, transaction.start
        if gtid in self._excluded:
            self._met.add(gtid)
            if xid and transaction.state == "prepared":
                self._xids[xid] = gtid
            elif xid and not transaction.changes and xid not in self._xids:
                why = "stays prepared and keeps its locks; leave out its first part as well"
                self._conflict(gtid, "", f"without it the XA transaction {xid} {why}")
        elif xid and transaction.state != "prepared" and (by := self._xids.get(xid)):
            self._conflict(by, "", f"it ends the XA transaction {xid} that {by} prepares")

    def _wrote(self, kind: ChangeKind, images: tuple[bytes, ...], *, full: bool) -> None:
        name, gtid = self._table, self._gtid
        if kind is ChangeKind.DELETE:
            return
        if not full or self._room <= 0:
            self._partial.setdefault(name, gtid)
            return
        if images[-1] not in (known := self._images.setdefault(name, {})):
            self._room -= 1
            known[images[-1]] = gtid

    def _touched(self, change: Change) -> str:
        """By which excluded transaction."""
        schema, name = key = _table(change.schema, change.name)
        if name:
            return self._rows.get(key) or self._statements.get(key) or self._schemas.get(schema) or self._wild
        if change.kind is ChangeKind.OTHER:
            return ""
        return self._schemas.get(schema) or next(
            (gtid for touched in (self._rows, self._statements) for (one, _), gtid in touched.items() if one == schema),
            "",
        )

    def _conflict(self, excluded: str, table: str, why: str) -> None:
        found = Conflict(self._gtid, self._start, excluded, table, why)
        self._found.setdefault((self._start, excluded), found)


def _table(schema: str, name: str) -> _Table:
    """Statements may write names in other letters than the tables have."""
    return schema.lower(), name.lower()
