"""Whether the binary logs of a server continue those in the spool: the history goes on, has a hole, or begins a branch.

A server's binary logs are known again by what the server reports and by the bytes of its files. Files are
compared with their in-use flag (byte 21, bit 0x1) cleared: the server clears it when it closes a file.

The decision is pure: the values come from the server, from the spool and from the comparison of both. A history goes on
only where that is shown: by the newest file that is here, which must be at the server with the same bytes and not be
shorter, or by GTIDs. Everything else begins a branch, and the fork is named only where it is known.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from backupd.engine.binlog.events import clear_flag
from backupd.engine.binlog.xids import SharedXid
from backupd.engine.receiver.connection import HIGHEST_START
from backupd.engine.server.binary_logs import SourceState
from backupd.model.binlog import MAGIC, BranchReason, Ending, covers, same
from backupd.model.document import Document, json_key
from backupd.model.server_facts import Position
from backupd.model.text import format_time
from backupd.recovery.runs import holder_of_each

_HEADER = struct.Struct("<IBIIIH")
"""Time, type, server id, size, position of the next event, flags."""
_STOP, _ROTATE = 3, 4
_PREVIOUS_GTIDS, _GTID_LIST, _START_ENCRYPTION = 35, 163, 164
_LIST_COUNT = 0x0FFFFFFF
_CHECKSUM = 4
_ROTATE_POSITION = 8
_IN_USE = 21
_HEAD, _TAIL = 512, 16 * 1024
_BLOCK = 1024 * 1024
_SEEN_AGAIN = 16 * 1024
"""Bytes at the end of a file that come again when a dump goes on, and are compared; at least one event."""


@dataclass(frozen=True, slots=True)
class Seen(Document):
    """What a server was when its stream was last known to be whole.

    ``at``: by our clock. ``lsn``: on its disk then, None where the account may not know. ``marker``: of the restore its
    datadir came from, "" for none. ``gtids``: executed then. ``cluster``: of which it was a node, "" for none.
    """

    at: datetime
    server_uuid: str
    server_id: int
    lsn: int | None
    marker: str
    gtids: str
    cluster: str = field(default="", metadata=json_key(later=True))


@dataclass(frozen=True, slots=True)
class Fingerprint(Document):
    """What an ended file was: its size, and SHA-256 of its beginning and its end."""

    branch: str
    number: int
    size: int
    digest: str


def fingerprint_of(path: Path, branch: str, number: int, size: int) -> Fingerprint:
    """Of the first ``size`` bytes of a file. Raises OSError."""
    with path.open("rb") as file:
        head = without_flag(file.read(min(_HEAD, size)))
        file.seek(max(size - _TAIL, len(head)))
        tail = file.read(max(0, size - file.tell()))
    return Fingerprint(branch, number, size, hashlib.sha256(head + tail).hexdigest())


def ending_of(path: Path, size: int) -> Ending:
    """How a file that others followed ends, by its last event. Raises OSError."""
    lengths = [
        _HEADER.size + body + checksum
        for body in (0, *(_ROTATE_POSITION + len(path.name) + longer for longer in (0, 1)))
        for checksum in (0, _CHECKSUM)
    ]
    with path.open("rb") as file:
        for length in lengths:
            if size < len(MAGIC) + length:
                continue
            file.seek(size - length)
            _at, kind, _server, event_length, next_position, _flags = _HEADER.unpack(file.read(_HEADER.size))
            if event_length == length and next_position == size & 0xFFFFFFFF:
                if kind == _STOP:
                    return Ending.STOPPED
                if kind == _ROTATE:
                    return Ending.ROTATED
    return Ending.CUT


def ending_at_server(path: Path, size: int, is_whole: Callable[[], bool]) -> Ending:
    """As ``ending_of``; ``is_whole``: does the server say that nothing is missing behind ``size``? Raises OSError, and
    what ``is_whole`` raises."""
    ending = ending_of(path, size)
    return Ending.CRASHED if ending is Ending.CUT and is_whole() else ending


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, before its transactions. ``size``: where they begin. ``gtids``: MariaDB's list of the
    last transaction of each server in each domain; empty for MySQL."""

    size: int
    gtids: tuple[str, ...] = ()


def head_of(path: Path) -> Head | None:
    """None while the file does not hold all of it yet. Raises OSError."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
        size, first = len(MAGIC), True
        gtids: tuple[str, ...] = ()
        while len(raw := file.read(_HEADER.size)) == _HEADER.size:
            _at, kind, _server, length, _next, _flags = _HEADER.unpack(raw)
            if not first and kind not in (_PREVIOUS_GTIDS, _GTID_LIST, _START_ENCRYPTION):
                return Head(size, gtids)
            if length < _HEADER.size:
                return None  # damaged
            body = file.read(length - _HEADER.size)
            if len(body) < length - _HEADER.size:
                return None
            if kind == _GTID_LIST:
                gtids = _gtid_list(body)
            first = False
            size += length
            if kind in (_PREVIOUS_GTIDS, _GTID_LIST):
                return Head(size, gtids)
    return None


def _gtid_list(body: bytes) -> tuple[str, ...]:
    count = min(int.from_bytes(body[:4], "little") & _LIST_COUNT, (len(body) - 4) // 16)
    return tuple("{}-{}-{}".format(*struct.unpack_from("<IIQ", body, 4 + 16 * index)) for index in range(count))


def without_flag(beginning: bytes) -> bytes:
    """The beginning of a file with its in-use flag cleared."""
    return clear_flag(beginning) if len(beginning) > _IN_USE else beginning


def digest_of(path: Path, start: int = 0, end: int | None = None) -> str:
    """SHA-256 of bytes ``[start, end)`` of a binary log as the archive counts it: with the in-use flag cleared. Raises
    OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        left = (path.stat().st_size if end is None else end) - start
        while left > 0 and (data := file.read(min(left, _BLOCK))):
            first = start == 0 and file.tell() == len(data)
            digest.update(without_flag(data) if first else data)
            left -= len(data)
    return digest.hexdigest()


def first_moment(path: Path) -> datetime:
    """When a file began, to the second, by its server's clock. Raises OSError."""
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        return datetime.fromtimestamp(int.from_bytes(file.read(4), "little"), UTC)


@dataclass(frozen=True, slots=True)
class Resume:
    """Where the events of a file are, by their headers. ``end``: behind the last whole one. ``start``: of the first one
    that is seen again when a dump goes on. ``is_damaged``: what follows ``end`` is no beginning of an event."""

    start: int
    end: int
    is_damaged: bool


def resume_at(path: Path) -> Resume | None:
    """Walks over the headers. None: it does not even begin as a binary log. Raises OSError."""
    size = path.stat().st_size
    if size < len(MAGIC):
        return None
    starts: deque[int] = deque()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
        if content[: len(MAGIC)] != MAGIC:
            return None
        at, damaged = len(MAGIC), False
        while at + _HEADER.size <= size:
            _at, _kind, _server, length, following, _flags = _HEADER.unpack_from(content, at)
            end = at + length
            damaged = length < _HEADER.size or following != end & 0xFFFFFFFF
            if damaged or end > size:
                break
            if at <= HIGHEST_START:
                starts.append(at)
                while len(starts) > 1 and starts[0] < end - _SEEN_AGAIN:
                    starts.popleft()
            at = end
    return Resume(starts[0] if starts else len(MAGIC), at, damaged)


class Comparison:
    """Compares a file that grows with one that is there, as far as both go, without reading anything twice.

    ``equal``: bytes from the beginning that are the same; ``differs``: is the next byte of both another one?
    """

    def __init__(self, kept: BinaryIO, fresh: BinaryIO) -> None:
        self._kept = kept
        self._fresh = fresh
        self.equal = 0
        self.differs = False

    def go_on(self) -> int:
        """Compare what came since. Gives ``equal``. Raises OSError."""
        while not self.differs:
            self._kept.seek(self.equal)
            self._fresh.seek(self.equal)
            one, other = self._kept.read(_BLOCK), self._fresh.read(_BLOCK)
            if self.equal == 0:
                if min(len(one), len(other)) <= _IN_USE and len(one) > _IN_USE:
                    break  # the byte with the flag is not there yet
                one, other = without_flag(one), without_flag(other)
            size = min(len(one), len(other))
            if size == 0:
                break
            if one[:size] == other[:size]:
                self.equal += size
            else:
                self.equal += next(index for index in range(size) if one[index] != other[index])
                self.differs = True
        return self.equal


@dataclass(frozen=True, slots=True)
class Tail:
    """The newest file that is here, as far as it holds whole transactions. ``before``, ``after``: GTIDs executed at its
    beginning and its ``end``; ``ended``: how, None while it was still written to."""

    name: str
    number: int
    end: int
    before: str
    after: str
    ended: Ending | None

    @property
    def position(self) -> Position:
        """The end of the file as a position."""
        return Position(self.name, self.end, self.after)


@dataclass(frozen=True, slots=True)
class GoOn:
    """The same branch goes on with the server's file ``number``. ``gap``: what is missing before it, "" for nothing."""

    number: int
    gap: str = ""


@dataclass(frozen=True, slots=True)
class Fork:
    """Another history begins with the server's file ``number``. ``fork``: the last position that both share, as far as
    it is known; ``names_go_on``, ``entry``: as of model.Branch; ``note``: why, in words. ``parent``: the branch that it
    forked from, "" for the newest; ``since``: when the parent was last seen, None for what is known of the newest."""

    reason: BranchReason
    number: int
    note: str
    fork: Position | None = None
    names_go_on: bool = False
    parent: str = ""
    since: datetime | None = None
    entry: Position | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """The newest file that is here beside the server's file of that name. ``common``: the last position between whole
    transactions up to which both are the same, with the GTIDs there; None where they differ from the very beginning.
    ``lost``: is there a transaction behind it here? ``transactions``: how many both share."""

    common: Position | None
    transactions: int
    lost: bool


_LSN_SLACK = 4096
"""Bytes of its log that a server may leave out when it starts again after a crash."""


def seen_now(source: SourceState, now: datetime) -> Seen:
    """What is to be remembered of a server whose history goes on."""
    return Seen(
        now,
        source.server_uuid,
        source.server_id,
        source.durable_lsn,
        source.marker,
        source.position.gtid,
        source.cluster,
    )


def restored(seen: Seen | None, source: SourceState) -> str:
    """Why the server's data must have been replaced since it was seen; "" where nothing says so.

    Of another server this says nothing. But who has the same files is none, whatever it is called: MariaDB makes its
    ``server_uid`` from a network address and the port.
    """
    if seen is None:
        return ""
    if source.marker != seen.marker and source.marker:
        return f"its data directory is of restore {source.marker}"
    if seen.lsn is not None and source.lsn is not None and source.lsn + _LSN_SLACK < seen.lsn:
        return f"its log sequence number is {source.lsn}, after {seen.lsn} earlier"
    return ""


def without_file(
    tail: Tail, seen: Seen | None, source: SourceState, previous: Callable[[str], str | None]
) -> GoOn | Fork | None:
    """What it means that the server has no file of the newest one's name. ``previous``: what was executed before one of
    the server's files. None: only earlier files can show it (see ``looked_back``)."""
    oldest = source.logs[0]
    if (other := _other_file(tail, seen, source, previous)) is not None or oldest.number <= tail.number:
        return other
    if another(seen, source):
        return Fork(
            BranchReason.UNKNOWN,
            oldest.number,
            f"the server is {_identity(source.server_uuid, source.server_id)} now, and {tail.name} is not"
            " there to show that it is still the same history",
        )
    return _after_purge(tail, seen, source, previous(oldest.name))


def _after_purge(tail: Tail, seen: Seen | None, source: SourceState, before: str | None) -> GoOn | Fork:
    """The server's oldest file is a later one; ``before``: what was executed before it."""
    oldest = source.logs[0]
    gtids = _relation(source, before, tail)
    follows = oldest.number == tail.number + 1
    if follows and (tail.ended not in (None, Ending.CUT) or gtids == "same"):
        return GoOn(oldest.number)
    if gtids in ("same", "ahead"):
        nothing = "; its GTIDs say that no transaction is missing" if gtids == "same" else ""
        return GoOn(oldest.number, f"the server removed its binary logs before {oldest.name} too early{nothing}")
    if gtids == "silent" and seen is not None and seen.lsn is not None and source.lsn is not None:
        return GoOn(oldest.number, f"the server removed its binary logs before {oldest.name} too early")
    why = "its GTIDs lack what was archived" if gtids == "behind" else "nothing shows that it is still the same history"
    return Fork(BranchReason.UNKNOWN, oldest.number, f"the server's binary logs begin with {oldest.name}, and {why}")


def with_file(
    tail: Tail, compared: Compared, seen: Seen | None, source: SourceState, previous: Callable[[str], str | None]
) -> GoOn | Fork | None:
    """What it means that the server's file of the newest one's name is shorter or another one. None: as above."""
    if compared.common is None:
        return _other_file(tail, seen, source, previous)
    if not compared.lost:
        return GoOn(tail.number)  # only half a transaction is here and not there
    if compared.transactions == 0 and (node := _other_node(tail, seen, source)) is not None:
        return node
    position = f"{compared.common.file}:{compared.common.pos}"
    if why := restored(seen, source):
        return Fork(BranchReason.RESTORE, tail.number, f"{why}; its binary log is another one from {position} on")
    if compared.transactions == 0 and tail.number == 1:
        return None  # a file that began anew within the same second looks like this, too
    note = f"the server's binary log has lost what was behind {position}"
    return Fork(BranchReason.LOST_TAIL, tail.number, note, fork=compared.common, names_go_on=True)


def _other_file(
    tail: Tail, seen: Seen | None, source: SourceState, previous: Callable[[str], str | None]
) -> Fork | None:
    """The newest file that is here is not at the server."""
    if (node := _other_node(tail, seen, source)) is not None:
        return node
    renumbered = seen is not None and bool(source.server_uuid) and source.server_uuid == seen.server_uuid
    if seen is not None and another(seen, source) and not renumbered:
        if source.mariadb and source.server_id == seen.server_id:
            # No server replicates from one of its own number: this is a copy, and what it writes gets the very GTIDs
            # of what it lacks.
            why = f"a copy answers, with the same server_id {source.server_id} but files of its own"
            return _anew(BranchReason.RESTORE, source, tail, previous, why)
        # Where its history begins is found by ``first_covered``; what both share by the tail's transactions.
        return Fork(
            BranchReason.FAILOVER,
            source.logs[0].number,
            f"another server answers: {_identity(source.server_uuid, source.server_id)}, before it was"
            f" {_identity(seen.server_uuid, seen.server_id)}",
        )
    if why := restored(seen, source):
        return _anew(BranchReason.RESTORE, source, tail, previous, why)
    return None


def _other_node(tail: Tail, seen: Seen | None, source: SourceState) -> Fork | None:
    """Another node of the same cluster, or the same one with the data of a donor (SST), or one that came back out of a
    backup and has all that was archived: never a restore, whatever its log sequence number is, and its server_id is
    that of the others as a rule. What it shares with what is here is found as with a failover."""
    if seen is None or not source.cluster or source.cluster != seen.cluster:
        return None
    if another(seen, source):
        what = (
            f"another node of the cluster {source.cluster} answers: {_identity(source.server_uuid, source.server_id)}, "
            f"before it was {_identity(seen.server_uuid, seen.server_id)}"
        )
    elif restored(seen, source) and source.marker == seen.marker:
        what = f"the node has the data of another one of the cluster {source.cluster} now (SST)"
    elif restored(seen, source) and source.cluster_gtids and _executed(source, tail):
        what = f"the node was restored, and has caught up with its cluster {source.cluster}"
    else:
        return None
    return Fork(BranchReason.NODE_CHANGED, source.logs[0].number, what)


def behind_xid(
    fork: Fork, found: SharedXid | None, source: SourceState, ours: str, gtids: Callable[[Path, int], str]
) -> Fork:
    """For another node of a cluster whose nodes give GTIDs of their own, and for one that was restored and is in its
    cluster again: where ``fork`` is, by what the logs of both have in common. ``ours``: the name of the file here;
    ``gtids``: executed at a byte of a file."""
    goes_on = found is not None and found.agrees and source.logs_cluster
    if fork.reason is BranchReason.RESTORE:
        if not goes_on:
            return fork
        was = f"the node was restored, and has caught up with its cluster {source.cluster}"
    else:
        was = fork.note
    note = f"{was}; wsrep_gtid_mode is OFF, so that both have GTIDs of their own"
    if found is None:
        return replace(fork, number=source.logs[-1].number, note=f"{note}, and no Xid that both have was found")
    log, (end, entry) = next(one for one in source.logs if one.name == found.name), found.ends
    note += f"; both have the transaction with Xid {found.number}, which ends at {log.name}:{entry}"
    if not goes_on:
        return replace(fork, number=log.number, note=f"{note}, but not all those before it")
    return Fork(
        BranchReason.NODE_CHANGED,
        log.number,
        note,
        fork=Position(ours, end, gtids(found.ours, end)),
        entry=Position(log.name, entry, gtids(found.theirs, entry)),
    )


def looked_back(tail: Tail, source: SourceState, earlier: Position | None) -> Fork:
    """The newest file is not at the server, or another one. ``earlier``: the end of the file before it, where the
    server still has that one unchanged."""
    if earlier is not None:
        number = int(earlier.file.rpartition(".")[2]) + 1
        note = f"the server has lost {tail.name}, which followed {earlier.file}"
        return Fork(BranchReason.LOST_TAIL, number, note, fork=earlier, names_go_on=True)
    oldest = source.logs[0]
    if oldest.number == 1 or not _executed(source, tail):
        return Fork(BranchReason.RESET, oldest.number, f"the server began its binary logs anew with {oldest.name}")
    return Fork(
        BranchReason.UNKNOWN, oldest.number, f"the server has another {tail.name} than the one that was archived"
    )


def after_restore(tail: Tail, why: str) -> Fork:
    """The newest file is unchanged at the server, but its data was replaced afterwards."""
    return Fork(BranchReason.RESTORE, tail.number + 1, why)


def after_silence(seen: Seen | None, unlogged: datetime, source: SourceState, now: datetime) -> Fork:
    """The server was seen to write no binary log at ``unlogged``, and writes one again. Only its newest file is
    certainly of afterwards: with each start it begins one."""
    since = seen.at if seen is not None else unlogged
    return Fork(
        BranchReason.UNKNOWN,
        source.logs[-1].number,
        f"the server wrote no binary log between {format_time(since)} and {format_time(now)} (log_bin was"
        f" seen OFF at {format_time(unlogged)}); its transactions of that time are in no binary log",
    )


def is_whole(source: SourceState, number: int, size: int) -> bool:
    """Is nothing missing behind the first ``size`` bytes of a file? The server has begun the next one then, and nothing
    comes to this one."""
    sizes = {log.number: log.size for log in source.logs}
    return sizes.get(number) == size and number + 1 in sizes


def first_covered(source: SourceState, history: str, previous: Callable[[str], str | None]) -> int | None:
    """Number of the newest file of another server that begins within what is archived; None without one.

    ``history``: of the archive, as ``holder_of_each`` reads it.
    """
    has = holder_of_each(history, mariadb=source.mariadb)
    for log in reversed(source.logs):
        before = previous(log.name)
        if before is not None and all(has(member) for member in before.split(",") if member):
            return log.number
    return None


def another(seen: Seen | None, source: SourceState) -> bool:
    """Does another server answer than before?"""
    return seen is not None and (seen.server_uuid, seen.server_id) != (source.server_uuid, source.server_id)


def _anew(
    reason: BranchReason, source: SourceState, tail: Tail, previous: Callable[[str], str | None], why: str
) -> Fork:
    oldest = source.logs[0]
    before = previous(oldest.name) or ""
    known = not source.mariadb and bool(before) and covers(tail.after or "", before, mariadb=False)
    return Fork(reason, oldest.number, why, fork=Position("", 0, before) if known else None)


def _relation(source: SourceState, before: str | None, tail: Tail) -> str:
    """What GTIDs say of a file that begins after ``before``: same, ahead, behind, or silent."""
    if not before or not tail.after:
        return "silent"
    if same(before, tail.after, mariadb=source.mariadb):
        return "same"
    if covers(before, tail.after, mariadb=source.mariadb):
        return "ahead"
    return "behind"


def _executed(source: SourceState, tail: Tail) -> bool:
    """Has the server all that was archived, by its GTIDs?"""
    return bool(tail.after and source.position.gtid) and covers(
        source.position.gtid, tail.after, mariadb=source.mariadb
    )


def _identity(uuid: str, number: int) -> str:
    return f"server_id {number}" + (f", {uuid}" if uuid else "")
