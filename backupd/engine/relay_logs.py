"""Archived binary logs as the relay logs of a restored copy, for its own applier.

A server applies what is in its relay logs, whoever put it there. So copies of the files become the relay logs of a
replication connection that never connects: nothing is sent, received and written once more, and no second server runs.
(Through an empty server that served the files, 60,000 small transactions took MariaDB 1.4 times the processor time.)

A relay log begins with a format description, and the rest is what is to be applied: of the first file what follows the
start, without the transactions that MariaDB's copy has executed or that nobody wants. (MySQL passes over GTIDs that it
has executed.) Where a replay ends is where the last file ends. What servers take amiss in files that others wrote
(measured, MariaDB 10.11 and MySQL 9.7): an event that says that the rest is encrypted, and on MariaDB a connection
without the name of a log of its source, at which the server crashes.

A replay is narrowed down to some tables by the servers' own filters: rows of other tables are skipped, and so is a
statement that changes none of the tables; one that changes any of them is executed whole, so all tables that it names
must be there. Statements about accounts are skipped, too. Those about routines, scheduled events and servers are no
filter's business, and fail where what they mean (a schema, say) is not there: they are taken out of the logs.
Only where data was logged as statements, which may call routines, those of the tables' own schemas stay.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import BinaryIO

from backupd.engine.binlog import events
from backupd.engine.binlog.hole import copy_without, hole_of
from backupd.engine.binlog.walk import Walk, statement_at
from backupd.engine.server.launch import LaunchedServer, give
from backupd.engine.server.sandbox import owner_of
from backupd.engine.sql.client import Session
from backupd.model.binlog import ReplayMethod, Stop
from backupd.model.errors import DamagedError
from backupd.model.server_facts import Flavour, Position, ServerInfo, Version
from backupd.model.table import TableName
from backupd.process.folders import PASSABLE, write_anew
from backupd.process.run_context import RunContext

CHANNEL = "backupd"
"""The replication connection that a replay uses: others of the copy are not touched."""
RELAY_LOGS = "backupd-relay"
"""The server's option relay_log; names of a connection's files have that of the connection in them."""
_FICLONE = 0x40049409
_MODE = 0o640
_MOST_SENT = 1 << 30

_SPECIAL = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})
_CALLED = frozenset({"PROCEDURE", "FUNCTION", "PACKAGE"})
_BY_CHANNEL = Version(8, 0)


def patterns(tables: Sequence[TableName]) -> tuple[str, ...]:
    """Wild patterns that fit just these tables, and what is done to their schemas.

    Patterns, because with them statements about other schemas are left out: a server asks for the pattern of a table
    without a name.
    """
    schemas = dict.fromkeys(table.schema for table in tables)
    return (
        *(f"{_escaped(table.schema)}.{_escaped(table.table)}" for table in dict.fromkeys(tables)),
        *(f"{_escaped(schema)}." for schema in schemas),
    )


def mistakable(name: TableName) -> str:
    """The same for two tables that a filter may take for each other. Servers compare without regard to case and
    accents, even where names differ by these."""
    plain = unicodedata.normalize("NFKD", f"{name.schema}.{name.table}").casefold()
    return "".join("_" if char == "," else char for char in plain if not unicodedata.combining(char))


def _escaped(name: str) -> str:
    return name.translate(_SPECIAL)


def left_out(found: Walk, tables: Sequence[TableName]) -> Iterator[tuple[Path, int]]:
    """Statements that must not be executed when only ``tables`` are: path and position of each."""
    schemas = {table.schema for table in tables}
    for path, at, routine in found.routines if tables else ():
        called = found.by_statement and routine.kind in _CALLED and not routine.loaded
        if not (called and routine.schema in schemas):
            yield path, at


def skipped_statement(tables: Sequence[TableName]) -> str:
    """One that the filter skips, as short as the shortest that it may replace (``DROP EVENT e``)."""
    names = (TableName(one, other) for one, other in itertools.product(ascii_lowercase, repeat=2))
    free = next(name for name in names if name not in tables)
    return f"TRUNCATE {free.schema}.{free.table}"


def filter_replication(session: Session, info: ServerInfo, connection: str, tables: Sequence[TableName]) -> None:
    """Let a replication connection, which is there and stopped, apply these tables only; none: no filter."""
    wanted = patterns(tables)
    if info.flavour is Flavour.MARIADB:
        # A comma separates two patterns; "_" fits it, too.
        joined = ",".join(pattern.replace(",", "_") for pattern in wanted)
        session.execute(f"SET GLOBAL `{connection}`.replicate_wild_do_table = %s", joined)
        return
    marks = ", ".join(["%s"] * len(wanted))
    of_channel = f" FOR CHANNEL '{connection}'" if info.version >= _BY_CHANNEL else ""
    session.execute(f"CHANGE REPLICATION FILTER REPLICATE_WILD_DO_TABLE = ({marks}){of_channel}", *wanted)


@dataclass(frozen=True, slots=True)
class Leg:
    """What is replayed onto a private copy of a server like ``info``.

    ``files``: plain, original names, in order, the last one cut at the stop; they are copied, never changed. ``start``:
    where the copy is; by GTID alone when its file is not the first of the leg. ``folder``: for the pipe,
    not there yet, passable for the server's user; it takes the room of the logs. ``transactions``: how many lie between
    the two (with the excluded ones), None where that is not known. ``tables``: only what these need is applied
    (``left_out``), onto a copy that holds no others; empty for all. ``found``: what the files hold from ``start`` on,
    up to ``stop``, once somebody has looked.
    """

    info: ServerInfo
    files: tuple[Path, ...]
    start: Position
    stop: Stop
    method: ReplayMethod
    folder: Path
    context: RunContext
    server_ids: tuple[int, ...] = ()
    transactions: int | None = None
    exclude: tuple[str, ...] = ()
    tables: tuple[TableName, ...] = ()
    found: Walk = field(default_factory=Walk)

    @property
    def mariadb(self) -> bool:
        """Is it one of MariaDB?"""
        return self.info.flavour is Flavour.MARIADB

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Name and bytes of each file."""
        return [(path.name, path.stat().st_size) for path in self.files]

    @property
    def closed(self) -> int:
        """Bytes by which the copy of the first file is shorter than it: its hole is closed."""
        return hole.size if self.files and (hole := hole_of(self.files[0])) else 0


@dataclass(frozen=True, slots=True)
class RelayLog:
    """``source``: the archived file; ``name`` of the relay log; ``kept``: which bytes of the file are in it, one after
    the other (from, to)."""

    source: Path
    name: str
    kept: tuple[tuple[int, int], ...]

    def positions(self, found: Iterable[tuple[Path, int]]) -> Iterator[int]:
        """Where those of ``found`` (path and byte) are in the relay log that are in it."""
        for path, at in found:
            if path == self.source:
                before = 0
                for begin, end in self.kept:
                    if begin <= at < end:
                        yield before + at - begin
                    before += end - begin

    def origin_of(self, at: int) -> int:
        """Up to which byte of the file the first ``at`` bytes of the relay log go."""
        for begin, end in self.kept:
            if at <= end - begin:
                return begin + at
            at -= end - begin
        return self.kept[-1][1]


def lay_relay_logs(copy: LaunchedServer, leg: Leg) -> tuple[RelayLog, ...]:
    """Make the files of ``leg`` relay logs of ``copy``, in its datadir, where it has none of this connection: the
    copy's own user owns them, and the server removes them with the connection."""
    data, user = copy.config.datadir, copy.config.user
    base = f"{RELAY_LOGS}-{CHANNEL}"
    for left in data.glob(f"{base}.*"):  # of a process that was killed before the server knew of them
        left.unlink()
    logs = tuple(RelayLog(path, f"{base}.{path.name.rpartition('.')[2]}", _kept(leg, path)) for path in leg.files)
    nothing = skipped_statement(leg.tables)
    for log in logs:
        # The datadir is the server's: whatever is done is done to the open file, not to a name.
        with (data / log.name).open("x+b") as stream:
            _copy_kept(log, stream)
            clear_in_use(stream)
            for at in log.positions(leg.found.marks):
                _unmark(stream, at, log.source.name)
            for at in log.positions(left_out(leg.found, leg.tables)):
                _leave_out(stream, at, nothing)
            os.fchmod(stream.fileno(), _MODE)
            if owner := owner_of(user if os.geteuid() == 0 else None):
                os.fchown(stream.fileno(), *owner)
    index = data / f"{base}.index"
    write_anew(index, "".join(f"./{log.name}\n" for log in logs).encode())
    give(index, user)
    return logs


def _kept(leg: Leg, path: Path) -> tuple[tuple[int, int], ...]:
    with path.open("rb") as stream:
        begin = stream.seek(events.read_format(stream).end)
        following = stream.read(events.HEADER.size)
    if len(following) == events.HEADER.size:
        _when, kind, _server, length, *_ = events.HEADER.unpack(following)
        # MySQL refuses a relay log that has GTIDs and no list of earlier ones (error 1866).
        begin += length if kind == events.PREVIOUS_GTIDS else 0
    size = path.stat().st_size
    cuts = [(at, end) for cut, at, end in leg.found.cuts if cut == path]
    if path == leg.files[0]:
        if path.name == leg.start.file:
            cuts.append((begin, max(begin, leg.start.pos)))
        elif hole := hole_of(path):
            cuts.append((hole.start, hole.end))
    kept, at = [], 0
    for cut, end in sorted(cuts):
        if cut > at:
            kept.append((at, cut))
        at = max(at, end)
    return (*kept, (at, size)) if at < size else tuple(kept)


def _copy_kept(log: RelayLog, target: BinaryIO) -> None:
    with log.source.open("rb") as source:
        if log.kept == ((0, log.source.stat().st_size),) and _cloned(source.fileno(), target.fileno()):
            return
        for begin, end in log.kept:
            at = begin
            while at < end:
                sent = os.sendfile(target.fileno(), source.fileno(), at, min(end - at, _MOST_SENT))
                if not sent:
                    raise DamagedError("a binary log became shorter while it was copied", [str(log.source)])
                at += sent


def clear_in_use(log: BinaryIO) -> None:
    """Unmark a log that its server had open: the format description's checksum is computed without the mark."""
    log.seek(events.FLAGS_AT)
    flags = log.read(1)
    if flags and flags[0] & events.IN_USE:
        log.seek(events.FLAGS_AT)
        log.write(bytes([flags[0] & ~events.IN_USE]))


def _unmark(log: BinaryIO, at: int, name: str) -> None:
    """Make the event at ``at``, which says that the rest is encrypted, a checkpoint event, which means nothing to who
    applies logs. A server that encrypts its logs sends that event along with those that it has decrypted (measured,
    MariaDB 10.11), and whoever reads it from a file asks for the key."""

    def checkpoint(body: bytes) -> bytes:
        room = len(body) - 4
        return room.to_bytes(4, "little") + name.encode()[:room].ljust(room, b"0")

    _rewrite(log, at, events.CHECKPOINT, checkpoint)


def _leave_out(log: BinaryIO, at: int, statement: str) -> None:
    """Put ``statement``, which nothing comes of, instead of the one in the event at ``at``."""

    def other(body: bytes) -> bytes:
        begin = statement_at(body)
        return body[:begin] + statement.encode().ljust(len(body) - begin)

    _rewrite(log, at, events.QUERY, other)


def _rewrite(log: BinaryIO, at: int, kind: int, new: Callable[[bytes], bytes]) -> None:
    """Make the event at ``at`` one of ``kind``, with the body, as long, that ``new`` makes of its own."""
    log.seek(0)
    checksum = events.CRC_SIZE if events.read_format(log).checksums else 0
    log.seek(at)
    when, _kind, server_id, length, end, flags = events.HEADER.unpack(log.read(events.HEADER.size))
    body = new(log.read(length - events.HEADER.size - checksum))
    event = events.HEADER.pack(when, kind, server_id, length, end, flags) + body
    log.seek(at)
    log.write(event + zlib.crc32(event).to_bytes(events.CRC_SIZE, "little")[:checksum])


def lay_out(folder: Path, user: str) -> None:
    """The folder, the user's and empty: what a killed process left in it is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=PASSABLE, parents=True)
    give(folder, user, PASSABLE)


def copy_log(source: Path, target: Path) -> None:
    """A copy that shares its blocks where the filesystem can do that; without its hole where it has one."""
    if hole := hole_of(source):
        copy_without(hole, source, target)
        target.chmod(0o640)
        return
    with source.open("rb") as one, target.open("xb") as other:
        if not _cloned(one.fileno(), other.fileno()):
            shutil.copyfileobj(one, other, 8 * 1024 * 1024)
    target.chmod(_MODE)


def _cloned(source: int, target: int) -> bool:
    """Could the filesystem let the new file share the blocks of the other?"""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True
